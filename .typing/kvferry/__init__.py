"""KVFerry: KV caches from prefill engines to decode engines."""

__version__ = "0.1.0"
