"""Hand-overs of prompts that P computes meanwhile: P, D, and what has arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.connector.config import Settings
from tests.handover.gates import PATIENT, halves
from tests.handover.rank_group import RankGroup
from tests.support.inside import prompts_of, sends_of
from tests.support.ranks import Rank, left_in_tables, wait
from tests.transport.plane_list import PUSH, host_planes

TOKENS, STEP = 100, 40
THEIRS, OURS = [9, 2, 17, 5, 11, 3, 1], [4, 1, 8, 2, 6, 3, 7]
ELSEWHERE = [20, 21, 24, 22, 28, 27, 30]
PLANES = [*host_planes(PUSH), "tcp in pieces", "tcp with checksums"]


def make(
    group: RankGroup, plane: str = "shm", content: int = 16, transfer_timeout_seconds: float = 600.0, **options: object
) -> tuple[Rank, Rank]:
    settings = Settings(
        plane=plane.split(maxsplit=1)[0],
        slot_bytes=1 << 20,
        staging_bytes=8 << 20,
        checksum="checksums" in plane,
        **PATIENT | {"transfer_timeout_seconds": transfer_timeout_seconds},
    )
    content = 64 if "pieces" in plane or "checksums" in plane else content
    p = group.rank(settings=settings, content=content, engine_id="engine-p")
    d = group.rank(settings=settings, content=content, engine_id="engine-d", **options)
    return p, d


def has(d: Rank, start: int, stop: int, blocks: Sequence[int] = OURS, layers: slice = slice(None)) -> bool:
    return torch.equal(d.read(blocks, TOKENS)[layers, :, start:stop], d.wanted(TOKENS)[layers, :, start:stop])


def nothing_of(d: Rank, start: int, stop: int, layers: slice = slice(None)) -> bool:
    return bool((d.read(OURS, TOKENS)[layers, :, start:stop] == -1).all())


def ends_well(p: Sequence[Rank], *ds: Rank) -> None:
    """D has the prompt, and P's lease has ended."""
    assert wait(lambda: all(d.received == {"req-d"} for d in ds), [*p, *ds])
    assert not any(d.failed for d in ds) and all(has(d, 0, TOKENS) for d in ds)
    assert wait(lambda: all(rank.sent == {"req-p"} for rank in p), [*p, *ds])
    for rank in p:
        assert wait(lambda rank=rank: all_ended(rank), [*p, *ds])


def all_ended(p: Rank) -> bool:
    producer = halves(p)[0]
    left = left_in_tables(p)
    del left["links"]
    return not (any(left.values()) or prompts_of(producer) or sends_of(producer).waiting or producer.steps.flights)
