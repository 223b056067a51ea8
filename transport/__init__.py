"""How bytes and messages move between ranks: data planes, and the control connection."""
