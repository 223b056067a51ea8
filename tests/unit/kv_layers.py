"""Fake attention layers and backends for the tests of the KV-binding utilities; no vLLM."""

from __future__ import annotations

from typing import Any

import torch

from kvferry.connector.binding.kv_spec import AttentionSpec


def spec(block: int = 16, heads: int = 3, size: int = 4, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    return AttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=dtype, **more)


def backend(*sizes: Any, name: str = "Fake") -> Any:
    """A backend class that takes these kernel block sizes."""
    return type(name, (), {"get_supported_kernel_block_sizes": staticmethod(lambda spec=None: list(sizes))})


class Layer:
    """An attention layer whose cache is set as an attribute."""

    def __init__(self, kv_spec: Any = None, kind: Any = None, target: str | None = None) -> None:
        self._spec, self._kind = kv_spec, kind
        self.kv_sharing_target_layer_name = target
        self.kv_cache: Any = None

    def get_kv_cache_spec(self, config: Any) -> Any:
        return self._spec

    def get_attn_backend(self) -> Any:
        return self._kind
