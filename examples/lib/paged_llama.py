"""One tensor-parallel rank of a small Llama with paged attention, in plain torch, on KVFerry's KV-binding utilities.

Axes ``[L, B, H, N, C]``: L layers, B kernel blocks, H KV heads of the rank, N tokens in a kernel block, C content: a
head's key, then its value. Weights are random from a seed, and in double precision: then no token depends on the order
of a sum, so engines of any number of ranks must decode the same tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from tp_step import CacheForm

from kvferry.connector.binding.attention_group import attention_groups, get_kv_cache_spec, prepare_kernel_block_sizes
from kvferry.connector.binding.block_ops import KVBlockZeroer
from kvferry.connector.binding.kv_binding import init_kv_cache
from kvferry.connector.binding.kv_spec import (
    AttentionSpec,
    KVCacheGroupSpec,
    MultipleOf,
    get_kv_cache_config_from_groups,
)
from kvferry.connector.geometry.topology import TpKVTopology

DTYPE = torch.float64


@dataclass(frozen=True)
class Llama:
    """Sizes of the model. The ``heads`` query heads are in groups, each of which shares one of ``kv_heads``."""

    layers: int = 4
    hidden: int = 64
    heads: int = 12
    kv_heads: int = 6
    head_dim: int = 8
    intermediate: int = 128
    vocabulary: int = 512
    seed: int = 7


class Shard:
    """One rank's part of the model: its KV heads, its query heads, its columns of the MLP, all as global numbers.

    Ranks that hold the same KV head share out the query heads of its group.
    """

    def __init__(self, model: Llama, rank: int, tp_size: int) -> None:
        def held(rank: int) -> range:
            first, count = TpKVTopology.head_interval(rank, tp_size, model.kv_heads)
            return range(first, first + count)

        group = model.heads // model.kv_heads
        self.tp_size, self.kv_heads = tp_size, held(rank)
        self.heads: list[int] = []
        for head in self.kv_heads:
            holders = [other for other in range(tp_size) if head in held(other)]
            place = holders.index(rank)
            self.heads += range(
                head * group + place * group // len(holders), head * group + (place + 1) * group // len(holders)
            )
        self.mlp = range(rank * model.intermediate // tp_size, (rank + 1) * model.intermediate // tp_size)
        self.kv_of_query = torch.tensor([self.kv_heads.index(head // group) for head in self.heads], dtype=torch.long)

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, in place; the same bits on every rank."""
        if self.tp_size > 1:
            torch.distributed.all_reduce(x)
        return x


def attention_backend(kernel_blocks: int | MultipleOf) -> type:
    """A backend class with the one method that the utilities use: the block sizes that its kernels take."""

    class TorchAttention:
        @staticmethod
        def get_supported_kernel_block_sizes(spec: Any = None) -> list[int | MultipleOf]:
            return [kernel_blocks]

    return TorchAttention


class PagedAttention:
    """The attention of one layer on one rank. The utilities call its two ``get_`` methods and bind its ``kv_cache``."""

    def __init__(self, model: Llama, form: CacheForm, shard: Shard) -> None:
        self.model, self.form, self.shard = model, form, shard
        self.num_heads = len(shard.heads)
        self._backend = attention_backend(form.kernel_blocks)
        self.kv_cache = torch.empty(0)

    def get_kv_cache_spec(self, config: Any) -> AttentionSpec:
        return AttentionSpec(
            block_size=self.form.block_size,
            num_kv_heads=len(self.shard.kv_heads),
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
        keys, values = self.read(table, seen)[:, self.shard.kv_of_query].chunk(2, -1)
        scores = torch.einsum("thd,shd->hts", q, keys) / self.model.head_dim**0.5
        scores = scores.masked_fill(seen[None, None, :] > positions[None, :, None], -torch.inf)
        return torch.einsum("hts,shd->thd", scores.softmax(-1), values).flatten(1)


class PagedLlama:
    """One rank's part of the model, and its cache in one form."""

    def __init__(self, model: Llama, form: CacheForm, rank: int, tp_size: int) -> None:
        self.model, self.form, self.shard = model, form, Shard(model, rank, tp_size)
        self._draw_weights()
        self.layers = {
            f"model.layers.{n}.self_attn": PagedAttention(model, form, self.shard) for n in range(model.layers)
        }
        specs = get_kv_cache_spec(self.layers)
        groups = [KVCacheGroupSpec(list(specs), next(iter(specs.values())))]
        config = get_kv_cache_config_from_groups(groups, form.num_blocks, form.layout)
        attention = attention_groups(config, self.layers)
        kernel_sizes = prepare_kernel_block_sizes(config, attention)
        self.kv_caches = init_kv_cache(self.layers, config, "cpu", kernel_sizes, form.layout)
        flat = [group for each in attention for group in each]
        self._zeroer = KVBlockZeroer(torch.device("cpu"), flat, kernel_sizes, self.layers, form.num_blocks)
        self._kernel_blocks = form.block_size // kernel_sizes[0]

    def _draw_weights(self) -> None:
        """Every rank draws all weights and keeps its part: the columns or rows of its heads and of its MLP."""
        m, random = self.model, torch.Generator().manual_seed(self.model.seed)

        def draw(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=random, dtype=DTYPE) / rows**0.5

        self._embedding = draw(m.vocabulary, m.hidden) * m.vocabulary**0.5
        self._head = draw(m.hidden, m.vocabulary)
        heads = m.heads, m.kv_heads, m.kv_heads
        queries, kv, mlp = (torch.tensor(part) for part in (self.shard.heads, self.shard.kv_heads, self.shard.mlp))
        self._weights = []
        for _ in range(m.layers):
            qkv = draw(m.hidden, sum(heads) * m.head_dim).unflatten(-1, (-1, m.head_dim)).split(heads, 1)
            out = draw(m.heads * m.head_dim, m.hidden).unflatten(0, (-1, m.head_dim))
            gate_up, down = draw(m.hidden, 2 * m.intermediate).unflatten(-1, (2, -1)), draw(m.intermediate, m.hidden)
            self._weights.append(
                {
                    "qkv": torch.cat([part[:, held] for part, held in zip(qkv, (queries, kv, kv), strict=True)], 1),
                    "out": out[queries].flatten(0, 1),
                    "gate_up": gate_up[:, :, mlp].flatten(1),
                    "down": down[mlp],
                }
            )

    # --- blocks -------------------------------------------------------------------------------------------------

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Fill manager blocks with zeros, in all layers."""
        self._zeroer.zero_block_ids(block_ids)

    def kernel_table(self, block_ids: list[int]) -> torch.Tensor:
        """Kernel block ids of manager blocks, in token order."""
        within = torch.arange(self._kernel_blocks)
        return (torch.tensor(block_ids)[:, None] * self._kernel_blocks + within).flatten()

    def kv_digests(self, block_ids: list[int], num_tokens: int) -> list[dict[int, str]]:
        """A digest of the prompt's KV bytes in token order, per layer and by global KV head."""
        table, positions = self.kernel_table(block_ids), torch.arange(num_tokens)
        found = []
        for layer in self.layers.values():
            by_head = layer.read(table, positions).transpose(0, 1).contiguous().numpy()  # [H, T, C]
            hashes = [hashlib.blake2b(content.tobytes(), digest_size=16) for content in by_head]
            found.append({head: each.hexdigest() for head, each in zip(self.shard.kv_heads, hashes, strict=True)})
        return found

    def negate_one_number(self, block_id: int) -> None:
        """Change the sign of one number of a block, in layer 1. A comparison of KV bytes must find it."""
        cache = list(self.layers.values())[1].kv_cache
        cache[int(self.kernel_table([block_id])[0]), 0, 0, 0] *= -1

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(self, tokens: list[int], start: int, block_ids: list[int]) -> int:
        """Compute ``tokens`` at positions ``start`` and up, after the tokens in the cache, and return the next token,
        greedily. All ranks must call it with the same arguments."""
        m, table = self.model, self.kernel_table(block_ids)
        positions = torch.arange(start, start + len(tokens))
        x = self._embedding[torch.tensor(tokens)]
        for attention, weights in zip(self.layers.values(), self._weights, strict=True):
            qkv = torch.einsum("td,dhc->thc", F.rms_norm(x, (m.hidden,)), weights["qkv"])
            q, k, v = qkv.split([attention.num_heads, *[len(self.shard.kv_heads)] * 2], 1)
            attended = attention(_rotate(q, positions), _rotate(k, positions), v, table, positions)
            x = x + self.shard.sum_over_ranks(attended @ weights["out"])
            gate, up = (F.rms_norm(x, (m.hidden,)) @ weights["gate_up"]).chunk(2, -1)
            x = x + self.shard.sum_over_ranks((F.silu(gate) * up) @ weights["down"])
        return int((F.rms_norm(x[-1], (m.hidden,)) @ self._head).argmax())


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [T, heads, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(half, dtype=DTYPE) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
