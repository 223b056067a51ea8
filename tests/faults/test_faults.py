"""Seeded faults between P and D: a proxy damages a stream or a process, a host is cut off, P reuses what is read.

``python tests/faults/run.py`` goes on with other seeds (``make faults``).
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.outages import DistantPair
from tests.faults.pair import DATA_BYTES, Case, FaultyPair, covering, draw
from tests.faults.run import DAMAGED, PAIRS
from tests.faults.stale_reads import FENCES, race
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


@pytest.mark.root
@pytest.mark.parametrize(
    ("plane", "event", "still"),
    [("tcp", "kill P", "D"), ("zmq", "kill D", "P"), ("tcp", "link", "D"), ("zmq", "link", "P")],
)
def test_an_outage_ends_no_other_process(plane: str, event: str, still: str) -> None:
    """Each while the other one's transfer thread reads nothing."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this container may make no network namespace")
    with closing(DistantPair(plane)) as pair:
        pair.strike(event, still)


@pytest.mark.parametrize("fence", FENCES)
def test_races_over_cma(fence: str) -> None:
    """Forty and more, until some were lost and some were won. With the fence switched off, some loads are stale."""
    row: dict[str, Any] = {}
    for seed in range(1, 25):
        row = race(fence, 40, seed, "cpu")
        assert (row["stale"] == 0) or fence == "off", row
        if row["done"] and row["failed"] and row["overlapped"] and (row["stale"] or fence != "off"):
            return
    raise AssertionError(row)
