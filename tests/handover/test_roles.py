"""Engines that are P and D at once, and change places under load: kv_role kv_both."""

from __future__ import annotations

import random

import pytest
import torch

from kvferry.connector.config import Settings
from tests.handover.gates import PATIENT
from tests.handover.opening import TOKENS
from tests.handover.rank_group import RankGroup
from tests.support.ranks import Rank, grant, load_plan, peer, wait

BLOCKS, EACH = 7, 2
"""Blocks of a prompt, and prompts that are under way at once in each direction."""


class Direction:
    """Hand-overs from one rank to the other, each with blocks of its own on both."""

    def __init__(self, name: str, p: Rank, d: Rank, theirs: list[int], ours: list[int]) -> None:
        self.name, self.p, self.d = name, p, d
        self.theirs = [theirs[n * BLOCKS : (n + 1) * BLOCKS] for n in range(EACH)]
        self.ours = [ours[n * BLOCKS : (n + 1) * BLOCKS] for n in range(EACH)]

    def begin(self, life: int) -> list[str]:
        names = [f"{self.name}{life}-{n}" for n in range(EACH)]
        for name, theirs, ours in zip(names, self.theirs, self.ours, strict=True):
            for cache in self.p.caches.values():
                cache[theirs] = -1
            for cache in self.d.caches.values():
                cache[ours] = -7
            self.p.fill(theirs, TOKENS)
            token = grant([self.p], f"{name}-p", theirs, TOKENS)
            engine = peer([self.p], engine_id=f"engine-{self.name}")
            self.d.worker.post(load_plan(name, token, engine, ours, 0, TOKENS))
        return names

    def check(self, names: list[str]) -> None:
        assert not self.d.failed
        for name, ours in zip(names, self.ours, strict=True):
            assert torch.equal(self.d.read(ours, TOKENS), self.d.wanted(TOKENS)), name


@pytest.mark.parametrize("plane", ["cma", "shm", "tcp"])
def test_two_engines_change_places_under_load(group: RankGroup, plane: str) -> None:
    """A to B, B to A, and both at once, with every byte compared; whoever was P is D two hand-overs later."""
    draw = random.Random(plane)
    settings = Settings(plane=plane, **PATIENT)
    a, b = (group.rank(engine_id=f"engine-{name}", settings=settings, content=64, blocks=64) for name in "ab")
    blocks = [draw.sample(range(1, 64), 4 * EACH * BLOCKS) for _ in range(2)]
    half = 2 * EACH * BLOCKS
    to_b = Direction("a", a, b, blocks[0][:half], blocks[1][:half])
    to_a = Direction("b", b, a, blocks[1][half:], blocks[0][half:])
    for life in range(12):
        ways = [(to_b,), (to_a,), (to_b, to_a)][life // 2 % 3]
        begun = [(way, way.begin(life)) for way in ways]
        for way, names in begun:
            ended = {f"{name}-p" for name in names}
            assert wait(lambda way=way, names=names: way.d.received >= set(names), [a, b])
            assert wait(lambda way=way, ended=ended: way.p.sent >= ended, [a, b])
        for way, names in begun:
            way.check(names)
