"""What both sides of a hand-over have: the caches of a rank and their bytes, copies, the rank itself."""
