"""Hand-overs of prompts that P computes meanwhile: P, D, and what has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.handover.prefilling import PrefillingEngine
from tests.handover.scenario import OURS, PATIENT, THEIRS, TOKENS, Pair, RankGroup
from tests.support.inside import prompts_of, sends_of
from tests.support.ranks import Rank, left_in_tables, wait
from tests.transport.plane_pair import PUSH, host_planes

STEP = 40
ELSEWHERE = [20, 21, 24, 22, 28, 27, 30]
PLANES = [*host_planes(PUSH), "tcp in pieces"]


def make(group: RankGroup, plane: str = "shm", content: int = 16, of_d: Any = None, **settings: Any) -> Pair:
    """P and D, without a prompt."""
    common = {
        "plane": plane.split(maxsplit=1)[0], "slot_bytes": 1 << 20, "staging_bytes": 8 << 20,
        "content": 64 if "pieces" in plane else content, **PATIENT, **settings,
    }  # fmt: skip
    return group.rank(engine_id="engine-p", **common), group.rank(engine_id="engine-d", **common, **(of_d or {}))


def computing(p: Rank, d: Rank, step: int = STEP) -> PrefillingEngine:
    """P's engine begins with the prompt, and D loads it; P has no step yet."""
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=step)
    engine.load(d, OURS, step=step)
    return engine


def after_a_step(p: Rank, d: Rank) -> PrefillingEngine:
    """The same once D has what the first step has computed."""
    engine = computing(p, d)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    return engine


def has(d: Rank, start: int, stop: int, blocks: Sequence[int] = OURS, layers: slice = slice(None)) -> bool:
    return torch.equal(d.read(blocks, TOKENS)[layers, :, start:stop], d.wanted(TOKENS)[layers, :, start:stop])


def nothing_of(d: Rank, start: int, stop: int, layers: slice = slice(None)) -> bool:
    return bool((d.read(OURS, TOKENS)[layers, :, start:stop] == -1).all())


def ends_well(p: Sequence[Rank], *ds: Rank, blocks: Sequence[int] = OURS) -> None:
    """D has the prompt, and P's lease has ended."""
    assert wait(lambda: all(d.received == {"req-d"} for d in ds), [*p, *ds])
    assert not any(d.failed for d in ds) and all(has(d, 0, TOKENS, blocks) for d in ds)
    assert wait(lambda: all(rank.sent == {"req-p"} for rank in p), [*p, *ds])
    for rank in p:
        assert wait(lambda rank=rank: all_ended(rank), [*p, *ds])


def all_ended(p: Rank) -> bool:
    left = left_in_tables(p)
    del left["links"]
    return not (any(left.values()) or prompts_of(p) or sends_of(p).waiting)
