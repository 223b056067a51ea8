"""Engines of any model family, stepped by hand: vLLM's own cache configuration, views and scheduler, no forward.

Beside stepped.py, whose engines have one layer group of full attention. Here the KV of a token says layer, head,
position, token and who computed it, a state says layer, all tokens before it and who computed it; each step checks
what vLLM's kernels would read in it, block tables and null blocks included, and writes what they would write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_cache_hit_alignment_tokens,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

from tests.vllm.releases import kv_cache_config
from tests.vllm.stepped_rank import _rank

FACTOR = 2654435761
"""Spreads what it multiplies over 32 bits (Knuth)."""


class Cache:
    """One layer's cache as its kernels use it. ``number`` is in its labels."""

    def __init__(self, number: int, group: int, spec: Any, tensor: torch.Tensor, kv_config: KVCacheConfig) -> None:
        self.number, self.group, self.spec = number, group, spec
        self.hash_size, self.hit_tokens = kv_config.hash_block_size, kv_config.cache_hit_alignment_tokens
        self.bytes = tensor.view(torch.uint8)  # [B,H,N,C]
        self.size = spec.block_size
        self.is_state = hasattr(spec, "mamba_cache_mode")
        self.aligned = self.is_state and spec.mamba_cache_mode == "align"

    def first_needed(self, token: int) -> int:
        """The first token that computing this one reads."""
        name = type(self.spec).__name__
        if "SlidingWindow" in name:
            return max(0, token - self.spec.sliding_window + 1)
        return token // self.spec.attention_chunk_size * self.spec.attention_chunk_size if "Chunked" in name else 0

    def first_kept(self, tokens: int) -> int:
        """The first token of the first block that vLLM keeps once so many tokens are computed."""
        return self.first_needed(tokens) // self.size * self.size

    def block_of_state(self, blocks: Sequence[int], tokens: int) -> int:
        """``mamba_get_block_table_tensor`` of vLLM, for the state after so many tokens."""
        return blocks[(tokens - 1) // self.size if self.aligned else 0]

    def check(self, blocks: Sequence[int], ids: Sequence[int], start: int) -> tuple[bool, ...]:
        """That all is there that computing tokens from ``start`` on reads; who computed it, per token or state.

        Raises:
            AssertionError: what is read is not what some engine computed of these tokens.
        """
        if start == 0:
            return ()
        if self.is_state:
            block = self.block_of_state(blocks, start)
            found, wanted = self.bytes[block].flatten(), self._state(ids[:start], self.bytes[0].numel())
            assert block, f"layer {self.number}: the state after {start} tokens is in the null block"
            assert torch.equal(found & 0xFE, wanted), f"layer {self.number}: wrong state after {start} tokens"
            return (bool(found[0] & 1),)
        first = self.first_needed(start)
        places = torch.arange(first, start)
        held = torch.tensor(list(blocks))[places // self.size]
        assert held.all(), f"layer {self.number}: tokens {first}..{start} are read, some of them in the null block"
        found = self.bytes[held, :, places % self.size]  # [T,H,C]
        wrong = ((found & 0xFE) != self._kv(ids, first, start)).flatten(1).any(dim=1).nonzero().flatten() + first
        assert not len(wrong), f"layer {self.number}: wrong KV of tokens {wrong.tolist()} before token {start}"
        return tuple((found[:, 0, 0] & 1).bool().tolist())

    def write(self, blocks: Sequence[int], ids: Sequence[int], start: int, stop: int, origin: int) -> None:
        if self.is_state:
            self._write_state(self.block_of_state(blocks, stop), ids[:stop], origin)
            for offset, column in zip(*self._checkpoints(start, stop), strict=True):
                if offset and blocks[column]:
                    self._write_state(blocks[column], ids[: start + offset], origin)
            return
        places = torch.arange(start, stop)
        held = torch.tensor(list(blocks))[places // self.size]
        kept = held != 0
        self.bytes[held[kept], :, places[kept] % self.size] = (self._kv(ids, start, stop) | origin)[kept]

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
        place = (self.number * 64 + torch.arange(heads)[None, :, None]) * content + torch.arange(content)
        return (place * (7919 * FACTOR % 2**32)).to(torch.int32)

    def _state(self, ids: Sequence[int], size: int) -> torch.Tensor:
        seed = hashlib.sha256(b"%d" % self.number + np.asarray(ids, dtype=np.int64).tobytes()).digest()
        made = np.random.default_rng(int.from_bytes(seed[:8], "little")).bytes(size)
        return torch.frombuffer(bytearray(made), dtype=torch.uint8) & 0xFE


class Rank:
    """Caches and the connector's worker half."""

    def __init__(self, config: VllmConfig, kv_config: KVCacheConfig, sharing: dict[str, str]) -> None:
        self.config, self.kv_config = config, kv_config
        layout = config.cache_config.get_resolved_kv_cache_layout()
        self.tensors = allocate_kv_cache(kv_config, torch.device("cpu"), layout)
        registered = self.tensors | {name: self.tensors[owner] for name, owner in sharing.items()}
        self.caches = []
        for number, group in enumerate(kv_config.kv_cache_groups):
            for name in group.layer_names:
                spec = group.kv_cache_spec
                spec = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
                self.caches.append(Cache(_number(name), number, spec, self.tensors[name], kv_config))
        with _rank(0):
            self.connector: Any = KVConnectorFactory.create_connector(
                config=config, role=KVConnectorRole.WORKER, kv_cache_config=kv_config
            )
        self.connector.register_kv_caches(registered)

    def windowed(self) -> list[Cache]:
        """In an order that is the same on P and D."""
        return sorted((cache for cache in self.caches if cache.first_needed(1 << 20)), key=lambda cache: cache.number)

    def run(self, step: Any, forward: Any) -> KVConnectorOutput | None:
        for block in step.new_block_ids_to_zero or ():
            for tensor in self.tensors.values():
                tensor[block].zero_()
        if step.kv_cache_block_copies:
            copy_kv_cache_blocks_inplace(
                list(self.tensors.values()), self.kv_config.num_blocks, step.kv_cache_block_copies
            )
        with mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector):
            if step.total_num_scheduled_tokens == 0:
                nothing = KVConnectorModelRunnerMixin.kv_connector_no_forward(step, self.config)
                return nothing.kv_connector_output
            with (
                set_forward_context(None, self.config),
                KVConnectorModelRunnerMixin._get_kv_connector_output(step) as output,
            ):
                forward()
            return output


def _number(layer: str) -> int:
    """The same on P and D, whose groups may differ."""
    return int.from_bytes(hashlib.sha256(layer.encode()).digest()[:3], "little")


class FamilyEngine:
    """One engine. ``origin`` marks what it computes; ``specs`` are those of the model's layers, by name."""

    def __init__(
        self, config: VllmConfig, specs: dict[str, KVCacheSpec], origin: int, sharing: dict[str, str] | None = None
    ) -> None:
        self.config, self.origin = config, origin
        self.kv_config = kv_cache_config(config, specs, 1 << 30)
        scheduled = generate_scheduler_kv_cache_config([self.kv_config])
        config.cache_config.num_gpu_blocks = scheduled.num_blocks
        sizes = [group.kv_cache_spec.block_size for group in scheduled.kv_cache_groups]
        config.cache_config.block_size = min(sizes)
        block_size, hash_size = resolve_kv_cache_block_sizes(scheduled, config)
        hit_tokens = resolve_cache_hit_alignment_tokens(scheduled, config, block_size, hash_size)
        for part in (scheduled, self.kv_config):  # as EngineCore does
            part.hash_block_size, part.cache_hit_alignment_tokens = hash_size, hit_tokens
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        self.scheduler = Scheduler(
            config, scheduled, StructuredOutputManager(config), block_size=block_size, hash_block_size=hash_size,
            log_stats=True,
        )  # fmt: skip
        self.rank = Rank(config, self.kv_config, sharing or {})
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): self.rank.connector.get_handshake_metadata()}
        )
        self.answers: dict[str, SimpleNamespace] = {}
        self.theirs: dict[str, int] = {}
        """By request, how many tokens or states of the other engine its first forward found, over all layers."""
        self.failed = 0
        self.baseline = self.free_blocks

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def idle(self) -> bool:
        return not self.scheduler.requests and self.free_blocks == self.baseline

    def add(self, name: str, ids: Sequence[int], params: object = None, max_tokens: int = 1, salt: str = "") -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params} if params else None
        )
        request = Request(
            request_id=name, prompt_token_ids=list(ids), sampling_params=sampling, pooling_params=None,
            block_hasher=self._hasher, cache_salt=salt or None,
        )  # fmt: skip
        self.answers[name] = SimpleNamespace(finish=None, params=None, external=None, tokens=[])
        self.scheduler.add_request(request)

    def step(self) -> None:
        step = self.scheduler.schedule()
        sampled = {}

        def forward() -> None:
            for name, count in step.num_scheduled_tokens.items():
                request = self.scheduler.requests[name]
                ids = list(request.all_token_ids)
                start = request.num_computed_tokens - count  # the scheduler counts ahead
                tables = self.scheduler.kv_cache_manager.get_block_ids(name)
                found = [who for cache in self.rank.caches for who in cache.check(tables[cache.group], ids, start)]
                self.theirs.setdefault(name, sum(who != self.origin for who in found))
                for cache in self.rank.caches:
                    cache.write(tables[cache.group], ids, start, start + count, self.origin)
                sampled[name] = [(ids[-1] * 31 + len(ids)) % 280 + 2] if start + count == len(ids) else []

        output = self.rank.run(step, forward)
        if output is not None:
            self.failed += len(output.failed_recving or ())
        names = list(sampled)
        output = ModelRunnerOutput(
            names, {name: n for n, name in enumerate(names)}, list(sampled.values()), kv_connector_output=output
        )
        for client in self.scheduler.update_from_output(step, output).values():
            for part in client.outputs:
                answer = self.answers[part.request_id]
                answer.tokens += part.new_token_ids
                answer.params = part.kv_transfer_params or answer.params
                answer.finish = part.finish_reason if part.finish_reason is not None else answer.finish
                if part.prefill_stats is not None:
                    answer.external = part.prefill_stats.num_external_cached_tokens

    def close(self) -> None:
        self.rank.connector.shutdown()
        self.scheduler.shutdown()
