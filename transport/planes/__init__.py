"""The data planes: each module moves KV bytes in one way."""
