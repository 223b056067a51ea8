"""Engines whose model has an EAGLE head: one more layer, which vLLM's model runner names, and whose KV is computed
after the forward. Its labels say position, token and engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from tests.vllm.labelled import LAYERS
from tests.vllm.stepped import Engine, Forward, Turn, Worker

HEAD = f"model.layers.{LAYERS}.self_attn.attn"
DRAFTS = 3
WINDOW = 32


def kv_of_head(ids: Sequence[int], start: int, origin: int) -> torch.Tensor:
    """[T] int32: what the head keeps of the tokens ``ids`` from position ``start`` on; never 0."""
    tokens = torch.tensor(list(ids), dtype=torch.int64) * 4096 + torch.arange(start, start + len(ids))
    return ((tokens + 1) * 2 + origin).to(torch.int32)


class DraftingForward(Forward):
    """The head runs when the forward of the model has ended."""

    def finish(self) -> None:
        super().finish()
        engine, worker = self.engine, self.worker
        assert isinstance(engine, DraftingEngine) and isinstance(worker, DraftingModelRunner)
        for request_id, turn in self.turns.items():
            table = torch.tensor(self.tables[request_id][-1 if engine.own_table else 0])
            if request_id not in engine.first:
                engine.first[request_id] = turn, worker.of_head(table, 0, turn.start).clone()
            cache, places = worker.caches[HEAD].view(torch.int32), torch.arange(turn.start, len(turn.ids))
            values = kv_of_head(turn.ids[turn.start :], turn.start, engine.origin)
            cache[table[places // engine.block], :, places % engine.block] = values[:, None, None]


class DraftingModelRunner(Worker):
    """By name and methods one of vLLM's model runners, as the connector finds it among its callers."""

    def __init__(self, engine: Engine, rank: int) -> None:
        assert isinstance(engine, DraftingEngine)
        names = {HEAD} if engine.config.speculative_config else set()
        if engine.runner.startswith("v2"):
            self.speculator = SimpleNamespace(draft_attn_layer_names=names)
        else:
            self.drafter = SimpleNamespace(_draft_attn_layer_names=names)
        super().__init__(engine, rank)

    def execute_model(self, scheduler_output: Any) -> None:
        """The steps of these tests are run by ``run``."""

    def make_caches(self) -> dict[str, torch.Tensor]:
        caches = super().make_caches()
        like = caches[self.engine.layers[0]]
        return caches | {HEAD: torch.full_like(like, -1.0)}

    def of_head(self, table: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """[T,H,C] int32: the head's KV of tokens [start, stop)."""
        places = torch.arange(start, stop)
        return self.caches[HEAD].view(torch.int32)[table[places // self.engine.block], :, places % self.engine.block]


class DraftingEngine(Engine):
    """``head``: the folder of its head. ``own_table``: the head attends to a window, and has a block table of its own.
    ``first``: of each request the tokens of its first forward, and the head's KV below these, as rank 0 has it."""

    worker_class = DraftingModelRunner
    forward_class = DraftingForward

    def __init__(self, model: ModelConfig, origin: int, *, head: Path, own_table: bool = False, **kwargs: Any) -> None:
        self.head, self.own_table = head, own_table
        self.first: dict[str, tuple[Turn, torch.Tensor]] = {}
        super().__init__(model, origin, drafts=DRAFTS, **kwargs)

    def speculative(self, model: ModelConfig, drafts: int) -> SpeculativeConfig:
        return SpeculativeConfig(
            method="eagle",
            model=str(self.head),
            num_speculative_tokens=drafts,
            target_model_config=model,
            target_parallel_config=ParallelConfig(tensor_parallel_size=self.tp),
        )

    def start(self, config: VllmConfig, scheduled: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        groups = scheduled.kv_cache_groups
        spec = groups[0].kv_cache_spec
        assert isinstance(spec, FullAttentionSpec)
        if self.own_table:
            windowed = SlidingWindowSpec(
                block_size=spec.block_size, num_kv_heads=spec.num_kv_heads, head_size=spec.head_size, dtype=spec.dtype,
                sliding_window=WINDOW,
            )  # fmt: skip
            groups.append(KVCacheGroupSpec([HEAD], windowed))
        else:
            groups[0].layer_names.append(HEAD)
        super().start(config, scheduled, *args, **kwargs)
