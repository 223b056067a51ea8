"""The data planes: one way to move KV bytes each."""
