"""Copies that a plane of D makes by itself: a step waits for their end, they are progress, their failure is P's."""

from __future__ import annotations

import errno
import os
import threading
from typing import Any

import pytest

from kvferry.transport.planes import cma
from tests.handover.scenario import PATIENT, TOKENS, Gate, Pair, RankGroup, another_works, begin, ended, has_all
from tests.support.ranks import Rank, let_time_pass, standing, wait

TURN_BYTES = 4096
"""A hand-over takes some 25 turns."""


@pytest.fixture
def pair(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(cma, "TURN_BYTES", TURN_BYTES)
    return group.pair(plane="cma", **PATIENT | {"handover_timeout_seconds": 86400.0})


def plane_of(rank: Rank) -> Any:
    (plane,) = rank.context.planes
    return plane


def test_a_step_waits_for_the_end_of_the_copy(p: Rank, d: Rank) -> None:
    """Its device cannot: the copy is none of the device's."""
    another_works(p, d)
    gate = Gate(plane_of(d), "progress", lambda: False)
    begin(p, d, now=True)
    step = threading.Thread(target=d.worker.begin_step)
    step.start()
    assert wait(lambda: bool(plane_of(d).copies))
    step.join(0.3)
    assert step.is_alive(), "the engine would compute with blocks that are not there yet"
    gate.open()
    step.join(60)
    assert standing(d) == {"req-d"} and has_all(d)


def test_a_copy_that_goes_on_may_take_longer_than_the_time_out(p: Rank, d: Rank) -> None:
    plane, progress, turns, allowed = plane_of(d), plane_of(d).progress, 0, 0

    def seldom() -> bool:
        nonlocal turns
        if turns == allowed:
            return False
        turns += bool(plane.copies)
        return bool(progress())

    plane.progress = seldom
    begin(p, d)
    assert wait(lambda: bool(plane.copies), [p, d])
    loads, seen = d.consumer.loads.running, set[int]()
    while "req-d" not in d.received:
        allowed += 1
        assert wait(lambda: turns == allowed or "req-d" in d.received, [p, d])  # noqa: B023 (it is called here)
        seen.update(load.nbytes for load in list(loads))
        let_time_pass(d, 250 * allowed)
    assert len(seen) > 10, "what is in place is counted turn by turn"
    assert d.figures()["finished"]["cma"]["nbytes"] == [d.wanted(TOKENS).nbytes]
    assert 250 * allowed > 2 * PATIENT["transfer_timeout_seconds"] and not d.failed and has_all(d)


def test_memory_that_cannot_be_read_is_a_broken_plane(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    another_works(p, d)
    d.figures()
    real, calls = cma.read_memory, []

    def breaks_once(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        real(*args)

    monkeypatch.setattr(cma, "read_memory", breaks_once)
    begin(p, d)
    assert ended(p, d) and d.figures()["retried"] == {"peer_lost": 1} and len(calls) > 3
    monkeypatch.undo()
    another_works(p, d, "then")
