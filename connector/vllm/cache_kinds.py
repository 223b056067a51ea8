"""Which of vLLM's KV cache specs are carried, and as what. Pure.

A spec is a vLLM ``KVCacheSpec``, the form of the cache of some layers. It is known by the name of its class: a class
that a later release adds may free blocks by rules of its own, also where it inherits from a known one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvferry.connector.geometry.rank_geometry import CacheKind
from kvferry.transport.errors import ConfigError

RING = "CircularBufferSpec"
"""A request keeps its last ``block_size`` tokens in one block, token t in row t % ``block_size``. vLLM frees the block
when the request ends, and never finds it in the prefix cache."""
GAPPED = "RSWASpec"
"""A request keeps its prompt, and its last tokens: vLLM frees the blocks in between while it runs."""
CARRIED: dict[str, tuple[CacheKind, str]] = {
    "FullAttentionSpec": ("full", ""),
    "SinkFullAttentionSpec": ("full", ""),
    GAPPED: ("full", ""),
    "MLAAttentionSpec": ("mla", ""),
    "HiddenStateCacheSpec": ("mla", ""),
    "SlidingWindowSpec": ("sliding_window", "sliding_window"),
    "SlidingWindowMLASpec": ("sliding_window", "sliding_window"),
    "ChunkedLocalAttentionSpec": ("chunked_local", "attention_chunk_size"),
    "MambaSpec": ("state", ""),
    RING: ("state", ""),
}
"""By class, the kind of cache and the field that has its window."""
REFUSED = {
    "CrossAttentionSpec": "vLLM takes the encoder's part of a request from no connector",
    "EncoderOnlyAttentionSpec": "its layers keep no KV",
    "HiSparseHotSpec": "vLLM fills it from KV that it keeps on the host",
    "HiSparseResidentSpec": "vLLM fills it from KV that it keeps on the host",
}
"""By class that is not carried, the cause."""
WRAPPER = "UniformTypeKVCacheSpecs"
"""Its layers have specs of their own, under one block table."""


def layer_specs(spec: Any) -> Collection[Any]:
    """The specs of the layers of a KV cache group: one, or one for each layer where their sizes differ."""
    inner = getattr(spec, "kv_cache_specs", None)
    return inner.values() if inner else (spec,)


def first_spec(spec: Any) -> Any:
    """The spec of a KV cache group, or of its first layer where the sizes of its layers differ."""
    return next(iter(layer_specs(spec)))


def cache_kind(spec: Any) -> tuple[CacheKind, int]:
    """The kind of cache, and its window in tokens (0 for none). Raises ConfigError: it is not carried; names it."""
    name = type(spec).__name__
    if name in CARRIED:
        kind, window = CARRIED[name]
        return kind, int(getattr(spec, window)) if window else 0
    why = REFUSED.get(name, "this KVFerry does not know what it keeps of a request")
    raise ConfigError(f"KV caches of kind {name} are not carried: {why}; run this model without KVFerry")


def is_ring(spec: Any) -> bool:
    """Whether a cache is a ``RING``."""
    return type(first_spec(spec)).__name__ == RING


def keeps_blocks(spec: Any) -> bool:
    """Whether a running request keeps all blocks of a KV cache group."""
    specs = layer_specs(spec)
    return all(cache_kind(each)[0] in ("full", "mla") and type(each).__name__ != GAPPED for each in specs)


def entry_tokens(spec: Any) -> int:
    """The tokens that have one entry together in a cache that compresses them.

    Raises:
        ConfigError: a token has several entries, or a block ends inside one.
    """
    tokens = spec.tokens_per_state
    if tokens < 1 or spec.block_size % tokens:
        raise ConfigError(
            f"KV caches of kind {type(spec).__name__} with {tokens} tokens in an entry and {spec.block_size} in a "
            "block are not carried; run this model without KVFerry"
        )
    return int(tokens)
