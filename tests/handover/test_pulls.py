"""Copies that a plane of D makes by itself: a step waits for their end, they are progress, their failure is P's."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.transport.channels import Copy
from kvferry.transport.planes import cma
from tests.handover.gates import Gate, halves
from tests.handover.opening import OURS, THEIRS, TOKENS, another_works, begin
from tests.handover.rank_group import RankGroup
from tests.support.ranks import Rank, grant, load_plan, peer, reason_of, standing, wait

TURN_BYTES = 4096
"""A hand-over takes some 25 turns."""


@pytest.fixture
def pair(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> tuple[Rank, Rank]:
    monkeypatch.setattr(cma, "TURN_BYTES", TURN_BYTES)
    settings = Settings(plane="cma", transfer_timeout_seconds=1.5)
    p, d = group.rank(settings=settings), group.rank(settings=settings, engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    return p, d


def plane_of(rank: Rank) -> Any:
    (plane,) = rank.context.planes
    return plane


def test_a_step_waits_for_the_end_of_the_copy(pair: tuple[Rank, Rank]) -> None:
    """Its device cannot: the copy is none of the device's."""
    p, d = pair
    begin(p, d, "first")
    assert wait(lambda: "first-d" in d.received, [p, d])
    gate = Gate(plane_of(d), "progress", lambda: False)
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS, now=True))
    step = threading.Thread(target=d.worker.begin_step)
    step.start()
    assert wait(lambda: bool(plane_of(d).copies))
    step.join(0.3)
    assert step.is_alive(), "the engine would compute with blocks that are not there yet"
    gate.open()
    step.join(60)
    assert standing(d) == {"req-d"}
    assert torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


def test_a_copy_that_goes_on_may_take_longer_than_the_time_out(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    plane, progress, turns = plane_of(d), plane_of(d).progress, [time.monotonic()]

    def seldom() -> bool:
        if plane.copies and time.monotonic() < turns[-1] + 0.15:
            return False
        turns.append(time.monotonic())
        return bool(progress())

    plane.progress = seldom
    started = time.monotonic()
    begin(p, d)
    loads = halves(d)[1].loads.running
    seen: set[int] = set()

    def done() -> bool:
        seen.update(load.nbytes for load in list(loads))
        return "req-d" in d.received

    assert wait(done, [p, d])
    assert len(seen) > 10, "what is in place is counted turn by turn"
    taken = d.context.stats.take()
    assert taken is not None and taken["finished"]["cma"]["nbytes"] == [d.wanted(TOKENS).nbytes]
    assert time.monotonic() > started + 2 * d.settings.transfer_timeout_seconds
    assert not d.failed and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))


def test_the_ends_of_many_copies_are_seen_in_one_pass(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for each end among the copies that go on would hold up every other hand-over."""
    count, settings = 100, Settings(plane="cma")
    p, d = (group.rank(settings=settings, engine_id=name, blocks=count) for name in ("engine-p", "engine-d"))
    plane, looks = plane_of(d), [0]
    done: Any = vars(Copy)["done"]
    progress = type(plane).progress
    Gate(plane, "progress", lambda: False)

    def the_later_half() -> bool:
        if len(plane.copies) == count:
            plane.copies.rotate(count // 2)
        left = len(plane.copies) // 2
        while len(plane.copies) > left:
            progress(plane)
        return True

    def look(copy: Copy) -> bool:
        looks[0] += threading.current_thread().name == "kvferry-transfer"
        return bool(done.__get__(copy))

    for n in range(count):
        d.worker.post(load_plan(f"d{n}", grant([p], f"p{n}", [n], 1), peer([p]), [n], 0, 1))
    assert wait(lambda: len(plane.copies) == count, [p, d])
    monkeypatch.setattr(Copy, "done", property(look, done.__set__))
    plane.progress = the_later_half
    assert wait(lambda: len(d.received) == count, [p, d]) and not d.failed
    assert looks[0] < 10 * count


def test_a_copy_that_stands_still_times_out(pair: tuple[Rank, Rank]) -> None:
    p, d = pair
    gate = Gate(plane_of(d), "progress", lambda: False)
    begin(p, d)
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    assert reason_of(d) == "timeout"
    gate.open()
    another_works(p, d)


def test_memory_that_cannot_be_read_is_a_broken_plane(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = pair
    begin(p, d, "first")
    assert wait(lambda: "first-d" in d.received, [p, d])
    d.context.stats.take()
    real, calls = cma.read_memory, []

    def breaks(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ESRCH, os.strerror(errno.ESRCH))
        real(*args)

    monkeypatch.setattr(cma, "read_memory", breaks)
    begin(p, d)
    assert wait(lambda: "req-d" in d.received, [p, d])
    taken = d.context.stats.take()
    assert not d.failed and taken is not None and taken["retried"] == {"peer_lost": 1}
    assert len(calls) > 3 and torch.equal(d.read(OURS, TOKENS), d.wanted(TOKENS))
    monkeypatch.undo()
    another_works(p, d)
