"""A proxy between P and D damages the control stream, the data stream, or a process: seeded, with every fault in it.

``python tests/faults/run.py`` goes on with other seeds (``make faults``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest

from tests.faults.pair import DATA_BYTES, Case, FaultyPair, covering, draw
from tests.faults.run import DAMAGED, PAIRS
from tests.support.fault_proxy import Kind

SLICE = covering()
CORRUPTED = Case(0, False, False, False, Kind.CORRUPT, at=200_000, nbytes=1, flip=4, abruptly=False)
MakePair = Callable[..., FaultyPair]


def cases_of(name: str) -> list[Case]:
    """The part of the slice that a pair runs. Together the pairs run all of it."""
    owners = [list(PAIRS if case.control else DAMAGED) for case in SLICE]
    return [case for n, case in enumerate(SLICE) if owners[n][n % len(owners[n])] == name]


@pytest.fixture
def make() -> Iterator[MakePair]:
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(closing(FaultyPair(*args, **options)))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.ucx if n == "ucx" else ()) for n in PAIRS])
def test_hand_overs_through_faults(name: str, make: MakePair) -> None:
    """With ``encrypt`` also some changed bytes of data: each is found, and the load tried again."""
    pair = make(PAIRS[name])
    for case in cases_of(name):
        pair.strike(case)
    assert 2 * pair.outcomes["struck"] > len(cases_of(name)) > 0, pair.outcomes  # the last bytes vary
    if name == "encrypt":
        rng = random.Random(name)
        pair.d.retried()
        for number in range(1, 4):
            done = pair.outcomes["done"]
            pair.strike(replace(CORRUPTED, seed=number, at=rng.randrange(DATA_BYTES // 2), flip=1 << rng.randrange(8)))
            assert pair.d.retried() == {"peer_lost": 1} and pair.outcomes["done"] == done + 1


def test_a_seed_gives_the_same_case_again() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]
    assert sum(len(cases_of(name)) for name in PAIRS) == len(SLICE) >= 18
