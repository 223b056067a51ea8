"""How many Python calls one hand-over takes. On a GPU the time of a short hand-over is the time of these calls."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from types import CodeType, FrameType

import pytest

from kvferry.connector.engine import loop
from kvferry.transport.planes.cma import CmaChannel
from tests.handover.scenario import RankGroup
from tests.support.inside import ident_of, sleeps
from tests.support.ranks import Rank, grant, load_plan, peer, wait

PACKAGES = tuple(loop.__file__.removesuffix("connector/engine/loop.py") + name
                 for name in ("connector/", "transport/", "kernels/"))  # fmt: skip
MAX_CALLS = 450
"""Calls of functions of this project, in the transfer threads of P and D and in the engines' calls. They are 442 on
Python 3.11. Without a reason in the same change this bound does not grow."""
MAX_CALLS_TO_BEGIN = 155
"""Those of D from ``WorkerHalf.post`` to the begin of the copy, which are 152 on Python 3.11: two of them shorten the
switch interval, which is not short between hand-overs."""
HAND_OVERS = 12


class Calls:
    """The code that this project has called while ``counting``, in order, of all threads that started meanwhile."""

    def __init__(self) -> None:
        self.counting = False
        self.found: list[tuple[int, CodeType]] = []

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if self.counting and event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            self.found.append((threading.get_ident(), frame.f_code))

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """Count the calls of this thread."""
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)


def asleep(*ranks: Rank) -> bool:
    """Whether the transfer threads wait for events, and have handled all of them."""
    return all(map(sleeps, ranks))


def test_a_hand_over_takes_few_python_calls(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without looks at deadlines, whose number depends on the time that a hand-over takes."""
    monkeypatch.setattr(loop, "TICK_SECONDS", 600.0)
    monkeypatch.setattr(loop, "BUSY_SECONDS", 600.0)
    calls = Calls()
    threading.setprofile(calls.profile)
    try:
        p, d = group.pair(plane="cma")
    finally:
        threading.setprofile(None)
    threads_of_d = threading.get_ident(), ident_of(d)
    totals, begins = [], []
    for number in range(HAND_OVERS + 2):  # the first ones make the handshake
        calls.found, calls.counting = [], True
        name, blocks = f"r{number}", [number % 32]
        with calls.of_engine():
            token = grant([p], name, blocks, 1)
        assert wait(lambda: asleep(p))
        posted = len(calls.found)
        with calls.of_engine():
            d.worker.post(load_plan(name, token, peer([p]), blocks, 0, 1))
        assert wait(lambda: bool(p.thread.results.leases)) and wait(lambda: asleep(p, d))
        with calls.of_engine():
            d.poll()
            p.poll()
        calls.counting = False
        assert name in d.received and name in p.sent and not d.failed
        if number >= 2:
            begin = [code for _, code in calls.found].index(CmaChannel.read.__code__, posted)
            begins.append(sum(thread in threads_of_d for thread, _ in calls.found[posted:begin]))
            totals.append(len(calls.found))
    most = Counter(code.co_qualname for _, code in calls.found).most_common(25)
    assert median(totals) <= MAX_CALLS, f"{totals} calls for a hand-over; of the last one: {most}"
    assert median(begins) <= MAX_CALLS_TO_BEGIN, f"{begins} calls from the post of a load to the begin of its copy"
