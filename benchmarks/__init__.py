"""What is measured of KVFerry: scripts by area, and what they share in ``harness``."""
