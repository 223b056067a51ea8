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
from tests.support.pair import Broken

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


# --- that the harness sees what it is to see ------------------------------------------------------------------------


def test_a_wrong_byte_in_a_load_that_is_done_is_noticed(make: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over tcp, which does not promise to see it."""
    monkeypatch.setattr("tests.faults.pair.is_promised", lambda case, settings: True)
    with pytest.raises(Broken, match=r"corrupt at byte 200000 of data to D.* a load that was reported as done has"):
        make(PAIRS["tcp"]).strike(CORRUPTED)


@pytest.mark.parametrize(
    ("settings", "broken"),
    [
        ({"transfer_timeout_seconds": 10_000.0, "handshake_timeout_seconds": 10_000.0}, "D reports a load within 35 s"),
        ({"lease_seconds": 500.0}, "P has its pages back 21 s after the load ended"),
    ],
)
def test_a_deadline_that_does_not_hold_is_noticed(make: MakePair, settings: dict[str, float], broken: str) -> None:
    """The control port is stalled where D's first message is on its way to P."""
    pair = make(PAIRS["tcp"] | settings, patience=2.0)
    pair.move_seconds = 5.0
    used = replace(CORRUPTED, kind=Kind.DELAY)
    with pytest.raises(Broken, match=broken):
        pair.strike(used)
        pair.strike(replace(used, kind=Kind.STALL, control=True, upwards=True, at=10))
