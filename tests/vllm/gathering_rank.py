"""A rank in a process of its own that tells the others of its PCP group where it listens, over a real process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch

from kvferry.connector.vllm import from_vllm
from kvferry.connector.wire.step_plan import RankAddress


class GatheringRank:
    """One of ``size`` ranks that meet at the file ``store``."""

    def __init__(self, store: str, rank: int, size: int) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        self._ours = RankAddress(0, rank, "127.0.0.1", 5600 + rank, b"life")
        self._group = SimpleNamespace(world_size=size, cpu_group=torch.distributed.group.WORLD)

    def addresses(self) -> tuple[RankAddress, ...]:
        config = SimpleNamespace(parallel_config=SimpleNamespace(prefill_context_parallel_size=self._group.world_size))
        with mock.patch.object(from_vllm, "get_pcp_group", lambda: self._group):
            return from_vllm.addresses(cast(Any, config), self._ours)

    def close(self) -> None:
        torch.distributed.destroy_process_group()
