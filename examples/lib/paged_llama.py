"""A small Llama with paged attention in plain torch, on KVFerry's KV-binding utilities. Axes ``[L, B, H, N, C]``.

L layers, B kernel blocks, H KV heads, N tokens in a kernel block, C content: a head's key, then its value.
Random weights from a seed, in double precision, so that no token hangs on the order of a sum.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kvferry.connector.binding.attention_group import attention_groups, get_kv_cache_spec, prepare_kernel_block_sizes
from kvferry.connector.binding.block_ops import KVBlockZeroer
from kvferry.connector.binding.kv_binding import init_kv_cache
from kvferry.connector.binding.kv_spec import (
    AttentionSpec,
    KVCacheGroupSpec,
    MultipleOf,
    get_kv_cache_config_from_groups,
)

DTYPE = torch.float64


@dataclass(frozen=True)
class Llama:
    """Sizes of the model. ``heads`` query heads in groups that share one of ``kv_heads``."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    vocabulary: int = 512
    seed: int = 7


@dataclass(frozen=True)
class CacheForm:
    """How one engine keeps its cache: tokens of a manager block, layout, and the tokens of a kernel block."""

    block_size: int
    layout: str
    kernel_blocks: int | MultipleOf
    num_blocks: int = 64


def attention_backend(kernel_blocks: int | MultipleOf) -> type:
    """A backend, which says nothing but what blocks its kernels take."""

    class TorchAttention:
        @staticmethod
        def get_supported_kernel_block_sizes(spec: Any = None) -> list[int | MultipleOf]:
            return [kernel_blocks]

    return TorchAttention


class PagedAttention:
    """The attention of one layer, as the utilities see it; writes to and reads from its ``kv_cache``."""

    def __init__(self, model: Llama, form: CacheForm) -> None:
        self.model, self.form = model, form
        self.num_heads = model.heads
        self._backend = attention_backend(form.kernel_blocks)
        self.kv_cache = torch.empty(0)

    def get_kv_cache_spec(self, config: Any) -> AttentionSpec:
        return AttentionSpec(
            block_size=self.form.block_size,
            num_kv_heads=self.model.kv_heads,
            head_size=self.model.head_dim,
            dtype=DTYPE,
        )

    def get_attn_backend(self) -> type:
        return self._backend

    def read(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, H, C] of these positions; ``table``: kernel block ids."""
        tokens = self.kv_cache.shape[2]
        return self.kv_cache[table[positions // tokens], :, positions % tokens]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Store keys and values [T, H, D] of ``positions``, and attend from q [T, heads, D] to all up to them."""
        tokens = self.kv_cache.shape[2]
        self.kv_cache[table[positions // tokens], :, positions % tokens] = torch.cat([k, v], -1)
        seen = torch.arange(int(positions[-1]) + 1)
        keys, values = self.read(table, seen).repeat_interleave(q.shape[1] // k.shape[1], 1).chunk(2, -1)
        scores = torch.einsum("thd,shd->hts", q, keys) / self.model.head_dim**0.5
        scores = scores.masked_fill(seen[None, None, :] > positions[None, :, None], -torch.inf)
        return torch.einsum("hts,shd->thd", scores.softmax(-1), values).flatten(1)


class PagedEngine:
    """The model, its cache in one form, and the free blocks."""

    def __init__(self, model: Llama, form: CacheForm) -> None:
        self.model, self.form = model, form
        self._draw_weights()
        self.layers = {f"model.layers.{n}.self_attn": PagedAttention(model, form) for n in range(model.layers)}
        specs = get_kv_cache_spec(self.layers)
        groups = [KVCacheGroupSpec(list(specs), next(iter(specs.values())))]
        config = get_kv_cache_config_from_groups(groups, form.num_blocks, form.layout)
        attention = attention_groups(config, self.layers)
        kernel_sizes = prepare_kernel_block_sizes(config, attention)
        self.kv_caches = init_kv_cache(self.layers, config, "cpu", kernel_sizes, form.layout)
        flat = [group for each in attention for group in each]
        self._zeroer = KVBlockZeroer(torch.device("cpu"), flat, kernel_sizes, self.layers, form.num_blocks)
        self._kernel_blocks = form.block_size // kernel_sizes[0]
        self.free = list(range(form.num_blocks))

    def _draw_weights(self) -> None:
        m, random = self.model, torch.Generator().manual_seed(self.model.seed)

        def draw(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=random, dtype=DTYPE) / rows**0.5

        self._embedding = draw(m.vocabulary, m.hidden) * m.vocabulary**0.5
        self._head = draw(m.hidden, m.vocabulary)
        queries, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim
        self._weights = [
            {
                "qkv": draw(m.hidden, queries + 2 * keys),
                "out": draw(queries, m.hidden),
                "gate_up": draw(m.hidden, 2 * m.intermediate),
                "down": draw(m.intermediate, m.hidden),
            }
            for _ in range(m.layers)
        ]

    # --- blocks -------------------------------------------------------------------------------------------------

    def allocate(self, num_tokens: int) -> list[int]:
        """Zeroed manager blocks for so many tokens, in no order."""
        count = -(-num_tokens // self.form.block_size)
        if count > len(self.free):
            raise RuntimeError(f"{num_tokens} tokens need {count} blocks, {len(self.free)} are free")
        taken = [self.free.pop((7 * n) % len(self.free)) for n in range(count)]
        self._zeroer.zero_block_ids(taken)
        return taken

    def kernel_table(self, block_ids: list[int]) -> torch.Tensor:
        """Kernel block ids of manager blocks, in token order."""
        within = torch.arange(self._kernel_blocks)
        return (torch.tensor(block_ids)[:, None] * self._kernel_blocks + within).flatten()

    def kv_digests(self, block_ids: list[int], num_tokens: int) -> list[str]:
        """A digest of the prompt's KV bytes in token order, per layer."""
        table, positions = self.kernel_table(block_ids), torch.arange(num_tokens)
        content = [layer.read(table, positions).contiguous().view(torch.uint8) for layer in self.layers.values()]
        return [hashlib.blake2b(each.numpy().tobytes(), digest_size=16).hexdigest() for each in content]

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(self, tokens: list[int], start: int, block_ids: list[int]) -> int:
        """Compute ``tokens`` at positions ``start`` and up, after what the cache holds; the next token, greedily."""
        m, table = self.model, self.kernel_table(block_ids)
        positions = torch.arange(start, start + len(tokens))
        x = self._embedding[torch.tensor(tokens)]
        for attention, weights in zip(self.layers.values(), self._weights, strict=True):
            heads = (F.rms_norm(x, (m.hidden,)) @ weights["qkv"]).unflatten(-1, (-1, m.head_dim))
            q, k, v = heads.split([m.heads, m.kv_heads, m.kv_heads], 1)
            x = x + attention(_rotate(q, positions), _rotate(k, positions), v, table, positions) @ weights["out"]
            gate, up = (F.rms_norm(x, (m.hidden,)) @ weights["gate_up"]).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ weights["down"]
        return int((F.rms_norm(x[-1], (m.hidden,)) @ self._head).argmax())

    def decode(self, tokens: list[int], block_ids: list[int], count: int) -> list[int]:
        """``count`` tokens after ``tokens``, the last of which is not computed yet; all before it are in the cache."""
        made: list[int] = []
        while len(made) < count:
            last = made[-1] if made else tokens[-1]
            made.append(self.forward([last], len(tokens) - 1 + len(made), block_ids))
        return made


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [T, heads, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(half, dtype=DTYPE) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
