"""Copies wait for the engine's device where a block that they write may still be in use by steps in flight, and only
there. The device here computes later than its step is launched, as GPUs do; what it writes then lands over a copy that
did not wait.

vLLM by itself keeps such blocks until those steps have ended (``defer_block_free``), which is switched off here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from vllm.v1.request import RequestStatus

from kvferry.connector.vllm import compat
from kvferry.connector.wire.step_plan import Load, StepPlan
from kvferry.connector.wire.transfer_estimate import TransferEstimates
from kvferry.connector.worker import worker_setup
from kvferry.connector.worker.worker import WorkerHalf
from tests.handover.slow_copies import SlowCopies
from tests.support.inside import scheduler_half
from tests.vllm.labelled import prompt
from tests.vllm.stepped import EngineGroup, eventually, settle
from tests.vllm.test_step_loads import IDS, add, pair_of

pytestmark = pytest.mark.vllm


class Event(threading.Event):
    """A point in the order of the device's work, reached when it is set."""

    query = threading.Event.is_set


class OrderedCopies(SlowCopies):
    """Copies in the order of a stream, which can be made to wait for the device's work."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.writes: list[Callable[[], None]] = []
        """Of D's device, which it has not come to."""
        self.events: list[Event] = []
        self.awaited: list[Event] = []

    def record_event(self) -> Event:  # type: ignore[override]
        self.events.append(Event())
        if not self.writes:
            self.events[-1].set()
        return self.events[-1]

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        self.awaited.append(event)
        self._queue.put(partial(event.wait, 60))  # type: ignore[arg-type]


class Scene:
    """P and D, of which D is a step ahead of its device: while ``late``, what a step writes is written when the device
    comes to it. What D loads may or must not wait for that."""

    def __init__(self, group: EngineGroup, monkeypatch: pytest.MonkeyPatch, inside: bool = True, **kwargs: Any) -> None:
        made: list[OrderedCopies] = []
        monkeypatch.setattr(worker_setup, "copies_on", lambda *_: made.append(OrderedCopies()) or made[-1])
        monkeypatch.setattr(TransferEstimates, "seconds", lambda *_: 0.0)
        self.inside, self.late = inside, False
        self.posted: list[Load] = []
        """All loads that D's worker is given, each of one copy."""
        self.behind: bool | None = None
        """What loads are given in place of what they should."""
        post = WorkerHalf.post

        def posted(half: WorkerHalf, plan: StepPlan) -> None:
            if self.behind is not None:
                loads = tuple(msgspec.structs.replace(load, behind=self.behind) for load in plan.loads)
                plan = msgspec.structs.replace(plan, loads=loads)
            self.posted += plan.loads
            post(half, plan)

        monkeypatch.setattr(WorkerHalf, "post", posted)
        extra = {"plane": "shm"} | ({} if inside else {"step_hold_seconds": 0.0})
        self.p, self.d = pair_of(group, extra, policy="recompute", **({"ahead": 1, "num_blocks": 31} | kwargs))
        self.d.scheduler.defer_block_free = False
        self.copies = made[1]
        self._write = self.d.workers[0].write
        self.d.workers[0].write = self._put_aside  # type: ignore[method-assign]
        self.d.device = self._before_a_forward

    def _put_aside(self, *args: Any, **options: Any) -> None:
        if self.late:
            self.copies.writes.append(partial(self._write, *args, **options))
        else:
            self._write(*args, **options)

    def _before_a_forward(self) -> None:
        """The device's own order: first what it was given before, then the copies that it waits for."""
        self.go_on()
        for held in self.copies.held:
            assert held.wait(60)

    def go_on(self) -> None:
        """The device comes to the end of its work, at the worst moment: after the copies that need not wait."""
        copies = self.copies
        if not copies.writes:
            return
        eventually(lambda: copies.awaited or (len(copies.waits) >= len(self.posted) and not copies.running))
        for write in copies.writes:
            write()
        copies.writes.clear()
        for event in copies.events:
            event.set()

    def meet(self) -> Scene:
        """A first hand-over, so that the next one finds its link."""
        self.d.finish(add(self.p, self.d, prompt(40, 1)))
        settle(self.p, self.d)
        for seen in (self.posted, self.copies.awaited, self.copies.waits):
            seen.clear()
        return self

    def late_step(self) -> None:
        self.late = True
        self.d.step()
        self.late = False
        assert self.copies.writes

    def a_step_in_flight(self) -> str:
        """A request whose prompt the device has not begun to compute, though the step is launched: half of all
        blocks, so that the next one needs some of them."""
        request_id = self.d.add(prompt(250, 5), max_tokens=5)
        self.late_step()
        assert self.d.computed[request_id] == 250
        return request_id

    def load(self) -> str:
        return add(self.p, self.d, IDS, max_tokens=5)

    def to_the_end(self, request_id: str) -> None:
        while self.d.answers[request_id].finish is None:
            self.d.step()
            self.go_on()


@pytest.fixture(params=[True, False], ids=["inside the step", "beside the steps"])
def scene(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Scene:
    return Scene(group, monkeypatch, inside=request.param).meet()


@pytest.mark.parametrize("how", ["aborted", "preempted"])
def test_blocks_that_a_step_in_flight_writes_are_written_after_it(scene: Scene, how: str) -> None:
    d = scene.d
    victim = scene.a_step_in_flight()
    request_id = scene.load()
    if how == "preempted":
        d.preempt(victim)
        d.scheduler.waiting.remove_requests([d.scheduler.requests[victim]])  # not before the other one
        d.scheduler.waiting.add_request(d.scheduler.requests[victim])
    else:
        d.abort(victim)
    scene.to_the_end(request_id)
    assert [load.now for load in scene.posted] == [scene.inside]
    assert scene.posted[0].behind and scene.copies.awaited, "its copies waited"
    assert d.origins[request_id].theirs == 299
    settle(scene.p, d)


def test_they_would_be_written_over(scene: Scene) -> None:
    """The same, with copies that do not wait: the overlap is real."""
    d = scene.d
    scene.behind = False
    victim = scene.a_step_in_flight()
    request_id = scene.load()
    d.abort(victim)
    with pytest.raises(AssertionError, match=f"{request_id}: wrong KV at positions"):
        scene.to_the_end(request_id)
    assert not scene.copies.awaited


def test_blocks_of_a_step_that_has_ended_are_written_at_once(scene: Scene) -> None:
    d = scene.d
    victim = scene.a_step_in_flight()
    scene.go_on()
    d.abort(victim)
    while d._outputs:
        d.step()
    request_id = scene.load()
    scene.to_the_end(request_id)
    assert [load.behind for load in scene.posted] == [False] and not scene.copies.awaited
    settle(scene.p, d)


def test_blocks_that_are_given_up_after_a_failed_load_are_written_after_the_steps_in_flight(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that has used them is preempted between two steps, with one of its steps in flight."""
    scene = Scene(group, monkeypatch).meet()
    p, d = scene.p, scene.d
    failed = add(p, d, prompt(250, 5), max_tokens=5)
    scene.copies.error = "CUDA error: out of order"
    d.step()
    scene.late_step()
    scene.copies.error = ""
    assert d.status(failed) is RequestStatus.PREEMPTED
    d.abort(failed)
    request_id = scene.load()
    scene.to_the_end(request_id)
    assert scene.copies.awaited
    settle(p, d)


def test_where_blocks_leave_before_the_end_copies_always_wait(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window gives back blocks of requests that go on, of which nobody hears."""
    monkeypatch.setattr(compat, "why_beside", lambda *_: "a release that says nothing of steps in flight")
    scene = Scene(group, monkeypatch, window=64, num_blocks=81)
    assert scheduler_half(scene.d).steps is None
    for number in range(2):
        scene.d.finish(add(scene.p, scene.d, prompt(150, number)))
        settle(scene.p, scene.d)
    assert [(load.behind, load.now) for load in scene.posted] == [(True, False)] * 2
    assert len(scene.copies.awaited) == 2
