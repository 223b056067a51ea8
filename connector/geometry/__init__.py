"""Where the bytes of a KV cache lie, and which rank reads what from which rank. Pure functions and data."""
