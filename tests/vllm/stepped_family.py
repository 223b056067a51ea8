"""Engines of any model family, stepped by hand: vLLM's own cache configuration, views and scheduler, no forward.

The KV of a token says layer, head, position, token and who computed it, a state says layer, all tokens before it and
who computed it; each step checks what vLLM's kernels would read in it, block tables and null blocks included, and
writes what they would write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

from tests.vllm.releases import kv_cache_config
from tests.vllm.stepped import Engine, Forward, Origins, Turn, Worker

FACTOR = 2654435761
"""Spreads what it multiplies over 32 bits (Knuth)."""


class Cache:
    """One layer's cache as its kernels use it. ``number`` is in its labels. ``first_head``: of the rank."""

    def __init__(
        self, number: int, group: int, spec: Any, tensor: torch.Tensor, kv_config: KVCacheConfig, first_head: int = 0
    ) -> None:
        self.number, self.group, self.spec, self.first_head = number, group, spec, first_head
        self.hash_size, self.hit_tokens = kv_config.hash_block_size, kv_config.cache_hit_alignment_tokens
        self.bytes = tensor.view(torch.uint8)  # [B,H,N,C]
        self.size = spec.block_size
        self.entry = max(1, spec.tokens_per_state)  # tokens that are kept together, once all of them are computed
        self.is_ring = type(spec).__name__ == "CircularBufferSpec"
        self.is_state = hasattr(spec, "mamba_cache_mode")
        self.aligned = self.is_state and spec.mamba_cache_mode == "align"

    def first_needed(self, token: int) -> int:
        """The first token that computing this one reads; of a ring those since the last one that divides its size."""
        if self.is_ring:
            return token // self.size * self.size
        name = type(self.spec).__name__
        if "SlidingWindow" in name:
            return max(0, token - self.spec.sliding_window + 1)
        return token // self.spec.attention_chunk_size * self.spec.attention_chunk_size if "Chunked" in name else 0

    def places(self, blocks: Sequence[int], start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the tokens [start, stop) those that end an entry, their blocks and their rows in these."""
        tokens = torch.arange(start, stop)
        tokens = tokens[(tokens + 1) % self.entry == 0]
        held = torch.tensor(list(blocks))[tokens * 0 if self.is_ring else tokens // self.size]
        return tokens, held, tokens % self.size // self.entry

    def first_kept(self, tokens: int) -> int:
        """The first token of the first block that vLLM keeps once so many tokens are computed."""
        return self.first_needed(tokens) // self.size * self.size

    def block_of_state(self, blocks: Sequence[int], tokens: int) -> int:
        """``mamba_get_block_table_tensor`` of vLLM, for the state after so many tokens."""
        return blocks[(tokens - 1) // self.size if self.aligned else 0]

    def move_state(self, blocks: Sequence[int], start: int, stop: int) -> None:
        """Before a step, to where the step works on it."""
        if self.aligned and start:
            here, there = (self.block_of_state(blocks, tokens) for tokens in (start, stop))
            self.bytes[there] = self.bytes[here]

    def check(self, blocks: Sequence[int], ids: Sequence[int], start: int, stop: int) -> tuple[bool, ...]:
        """That all is there that computing tokens from ``start`` on reads; who computed it, per token or state.

        Raises:
            AssertionError: what is read is not what some engine computed of these tokens.
        """
        if start == 0:
            return ()
        if self.is_state:
            block = self.block_of_state(blocks, start)
            found, wanted = (
                self.bytes[self.block_of_state(blocks, stop)].flatten(),
                self._state(ids[:start], self.bytes[0].numel()),
            )
            assert block, f"layer {self.number}: the state after {start} tokens is in the null block"
            assert torch.equal(found & 0xFE, wanted), f"layer {self.number}: wrong state after {start} tokens"
            return (bool(found[0] & 1),)
        first = self.first_needed(start)
        tokens, held, rows = self.places(blocks, first, start)
        assert held.all(), f"layer {self.number}: tokens {first}..{start} are read, some of them in the null block"
        found = self.bytes[held, :, rows]  # [T,H,C]
        differs = (found & 0xFE) != self._kv(ids, first, start)[tokens - first]
        wrong = tokens[differs.flatten(1).any(dim=1)]
        assert not len(wrong), f"layer {self.number}: wrong KV of tokens {wrong.tolist()} before token {start}"
        return tuple((found[:, 0, 0] & 1).bool().tolist())

    def write(self, blocks: Sequence[int], ids: Sequence[int], start: int, stop: int, origin: int) -> None:
        if self.is_state:
            self._write_state(self.block_of_state(blocks, stop), ids[:stop], origin)
            for offset, column in zip(*self._checkpoints(start, stop), strict=True):
                if offset and blocks[column]:
                    self._write_state(blocks[column], ids[: start + offset], origin)
            return
        if self.is_ring:
            start = max(start, stop - self.size)
        tokens, held, rows = self.places(blocks, start, stop)
        tokens, held, rows = (found[held != 0] for found in (tokens, held, rows))
        self.bytes[held, :, rows] = self._kv(ids, start, stop)[tokens - start] | origin

    def _checkpoints(self, start: int, stop: int) -> tuple[list[int], list[int]]:
        """Some kernels leave a state on the way, for other requests that begin alike."""
        if not (self.aligned and self.spec.num_prefill_checkpoint_blocks):
            return [], []
        return compute_mamba_prefill_checkpoints(
            [stop], [stop - start], self.hash_size, self.size, self.spec.prefill_checkpoint_alignment, False,
            self.hit_tokens,
        )  # fmt: skip

    def _write_state(self, block: int, ids: Sequence[int], origin: int) -> None:
        self.bytes[block] = (self._state(ids, self.bytes[0].numel()) | origin).view(self.bytes.shape[1:])

    def _kv(self, ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """[T,H,C] with the lowest bits zero: bits 16 to 23 of a hash of token and place, so 32 bits are enough."""
        token = torch.arange(start, stop) * 521 + torch.tensor(ids[start:stop], dtype=torch.long)
        mixed = (token * (1_000_003 * FACTOR % 2**32)).to(torch.int32)[:, None, None] + self._places
        return mixed.view(torch.uint8).view(*mixed.shape, 4)[..., 2] & 0xFE

    @cached_property
    def _places(self) -> torch.Tensor:
        """[1,H,C] int32: a number for each place of a token's KV in this layer."""
        heads, content = self.bytes.shape[1], self.bytes.shape[3]
        head = self.number * 64 + self.first_head + torch.arange(heads)[None, :, None]
        place = head * content + torch.arange(content)
        return (place * (7919 * FACTOR % 2**32)).to(torch.int32)

    def _state(self, ids: Sequence[int], size: int) -> torch.Tensor:
        seed = hashlib.sha256(b"%d" % self.number + np.asarray(ids, dtype=np.int64).tobytes()).digest()
        made = np.random.default_rng(int.from_bytes(seed[:8], "little")).bytes(size)
        return torch.frombuffer(bytearray(made), dtype=torch.uint8) & 0xFE


class FamilyWorker(Worker):
    """A rank with the caches that vLLM lays out."""

    engine: FamilyEngine

    def make_caches(self) -> dict[str, torch.Tensor]:
        config, kv_config = self.engine.config, self.engine.kv_config
        layout = config.cache_config.get_resolved_kv_cache_layout()
        self.tensors = allocate_kv_cache(kv_config, torch.device("cpu"), layout)
        self.views = []
        for number, group in enumerate(kv_config.kv_cache_groups):
            for name in group.layer_names:
                spec = group.kv_cache_spec
                spec = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
                tensor = self.tensors[name]
                shared = type(spec).__name__ == "CircularBufferSpec" or getattr(spec, "max_tp_shards", None) == 1
                first_head = 0 if shared else self.rank * tensor.shape[1]
                self.views.append(Cache(_number(name), number, spec, tensor, kv_config, first_head))
        return self.tensors | {name: self.tensors[owner] for name, owner in self.engine.sharing.items()}

    def windowed(self) -> list[Cache]:
        """In an order that is the same on P and D."""
        return sorted((cache for cache in self.views if cache.first_needed(1 << 20)), key=lambda cache: cache.number)

    def run(self, step: Any, turns: dict[str, Turn]) -> KVConnectorOutput | None:
        self.connector.before_step(step)
        for block in step.new_block_ids_to_zero or ():
            for tensor in self.tensors.values():
                tensor[block].zero_()
        if step.kv_cache_block_copies:
            copy_kv_cache_blocks_inplace(
                list(self.tensors.values()), self.engine.kv_config.num_blocks, step.kv_cache_block_copies
            )
        for name, turn in turns.items():  # ``preprocess_mamba``
            for cache in self.views:
                cache.move_state(self.engine.block_tables(name)[cache.group], turn.start, len(turn.ids))
        return super().run(step, turns)

    def _layers(self) -> Any:
        return set_forward_context(None, self.engine.config)

    def _attend(self, turns: dict[str, Turn]) -> None:
        self.engine.forward_class(self.engine, self, turns).finish()


class FamilyForward(Forward):
    """All layers at once, of which the connector hears nothing."""

    worker: FamilyWorker

    def finish(self) -> None:
        for name, turn in self.turns.items():
            views, tables, stop = self.worker.views, self.tables[name], len(turn.ids)
            ids, found = turn.ids, list[bool]()
            try:
                found = [who for cache in views for who in cache.check(tables[cache.group], ids, turn.start, stop)]
            except AssertionError as error:  # from wrong KV comes wrong KV
                self.engine.wrong.append((name, set().union(*tables) - {0}, f"{name}: {error}"))
                ids = [token + 1 for token in ids]
            theirs = sum(who != self.engine.origin for who in found)
            self.engine.origins.setdefault(name, Origins(len(found) - theirs, theirs))
            for cache in views:
                cache.write(tables[cache.group], ids, turn.start, stop, self.engine.origin)


def _number(layer: str) -> int:
    """The same on P and D, whose groups may differ."""
    return int.from_bytes(hashlib.sha256(layer.encode()).digest()[:3], "little")


class FamilyEngine(Engine):
    """One engine. ``specs`` are those of the model's layers on a rank, by name. Its origins count tokens, entries
    or states, over all layers of its first rank."""

    worker_class, forward_class = FamilyWorker, FamilyForward

    def __init__(
        self, config: VllmConfig, specs: dict[str, KVCacheSpec], origin: int, sharing: dict[str, str], ahead: int = 0
    ) -> None:
        self.kv_config, self.sharing = kv_cache_config(config, specs, 1 << 30), sharing
        scheduled = generate_scheduler_kv_cache_config([self.kv_config])
        config.cache_config.num_gpu_blocks = scheduled.num_blocks
        self.block = config.cache_config.block_size = min(g.kv_cache_spec.block_size for g in scheduled.kv_cache_groups)
        self.tp, self.dcp, self.runner, self.layers = config.parallel_config.tensor_parallel_size, 1, "v1", list(specs)
        self.ranks = self.tp
        block_size, hash_size = resolve_kv_cache_block_sizes(scheduled, config)
        hit_tokens = resolve_cache_hit_alignment_tokens(scheduled, config, block_size, hash_size)
        for part in (scheduled, self.kv_config):  # as EngineCore does
            part.hash_block_size, part.cache_hit_alignment_tokens = hash_size, hit_tokens
        sizes = {"block_size": block_size, "hash_block_size": hash_size}
        self.window = None
        self.start(config, scheduled, origin, sizes, hash_size, ahead=ahead)

    @property
    def rank(self) -> FamilyWorker:
        worker = self.workers[0]
        assert isinstance(worker, FamilyWorker)
        return worker
