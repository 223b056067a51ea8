"""Random turns of events under vLLM's real scheduler: whatever happens, tokens and KV are right and nothing is left.

Every forward checks all KV that it reads, so one stale or misplaced block fails the walk.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.vllm.engine_group import EngineGroup, Lines
from tests.vllm.random_walk import LEASE_SECONDS, Walk
from tests.vllm.stepped import run, settle
from tests.vllm.stepped_rank import RUNNERS

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("seed", range(12))
def test_walk(group: EngineGroup, lines: Lines, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    runner = RUNNERS[seed % 3]
    if runner == "v026":
        monkeypatch.setattr("kvferry.connector.vllm.compat.HAS_TRANSFER_RESULTS", False)
    extra: dict[str, object] = {
        "slot_bytes": 64 << 10,
        "staging_bytes": 1 << 20,
        "lease_seconds": LEASE_SECONDS,
        "ask_hold_seconds": 0.3,
    }
    extra["plane"] = ("auto", "shm", "zmq")[seed // 4]
    common: dict[str, Any] = {
        "runner": runner,
        "ahead": seed // 3 % 3,
        "max_batched": rng.choice((64, 256)),
        "extra": extra,
    }
    common |= {"drafts": rng.choice((0, 0, 3)), "scheduling": rng.choice(("fcfs", "priority"))}
    p = group.engine(0, tp=1 + (seed % 4 == 1), **common)
    d = group.engine(1, tp=1 + (seed % 4 == 2), **common)
    walk = Walk(p, d, rng)
    walk.go(250)
    run([p, d], walk.over, seconds=150)
    settle(p, d)
    walk.check_tokens(p)
    walk.check_tokens(d)
    assert not lines("unexpected error")
    assert d.loads, "some were loaded"
