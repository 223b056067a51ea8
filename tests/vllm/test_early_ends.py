"""Loads beside the steps that are reported while they run: the step that joins them waits, no step computes with what
is not there, and one that fails is recovered from as inside a step."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.scheduler.steps_in_flight import StepsInFlight
from kvferry.connector.wire.transfer_estimate import TransferEstimates
from tests.handover.slow_copies import SlowCopies, install
from tests.support.cases import each_once
from tests.support.inside import consumer_of, report_no_load_early, scheduler_half, thread_of, worker_half
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import RUNNERS, EngineGroup, Lines, eventually, loaded, run, settle
from tests.vllm.test_step_loads import POLICIES, add

pytestmark = pytest.mark.vllm
IDS = prompt(300, 9)
LONG = 100.0
"""Seconds; as long as a copy should take here, too long for a load inside a step."""


class Scene:
    """P, and a D that decodes, whose device is busy for long enough with ``copies[rank]`` held back."""

    def __init__(self, group: EngineGroup, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> None:
        self.copies: list[SlowCopies] = install(monkeypatch)
        monkeypatch.setattr(TransferEstimates, "seconds", lambda *_: LONG)
        monkeypatch.setattr(StepsInFlight, "seconds_until_seen", lambda *_: LONG)
        extra = {"plane": "shm", **kwargs.pop("extra", {})}
        self.p, self.d = group.pair(**{"num_blocks": 61, "ahead": 1} | kwargs, extra=extra)
        self.slow = self.copies[-self.d.ranks :]
        self.decoding = self.d.add(prompt(50, 3), max_tokens=60)
        self.d.step()

    def open(self) -> None:
        for slow in self.slow:
            slow.gate.set()

    def add(self, ids: list[int] = IDS, **kwargs: Any) -> str:
        """A request whose copies wait, reported all the same."""
        for slow in self.slow:
            slow.gate.clear()
        name = add(self.p, self.d, ids, **kwargs)

        def told() -> bool:
            return self.d.workers[0].received[name] > 0

        eventually(lambda: (self.d.step(), told())[1])
        assert any(slow.running for slow in self.slow), "its copies go on"
        return name

    def end(self) -> None:
        self.open()
        self.d.finish(self.decoding)
        settle(self.p, self.d)


def opened_by_the_forward(scene: Scene, name: str) -> list[int]:
    """The copies that run when the forward of the step begins that joins this load; it is a device, and waits."""
    running: list[int] = []

    def device() -> None:
        if scene.d.joined[name]:
            running.append(sum(slow.running for slow in scene.slow))
            scene.open()
            for slow in scene.slow:  # each rank's forward waits for what its engine was made to wait for
                for event in slow.held:
                    assert event.wait(60)

    scene.d.device = device
    return running


def test_the_step_that_joins_it_waits_for_it(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    scene = Scene(group, monkeypatch, runner=runner)
    name = scene.add(max_tokens=5)
    running = opened_by_the_forward(scene, name)
    loaded(None, scene.d, name)
    assert running[0] > 0 and scene.d.loads[name] == scene.d.joined[name] == 1
    assert not scene.d.failed and not scene.d.fallen_loads
    scene.end()


def test_the_engine_is_busy_with_its_admission(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was with the last loads that a step has joined."""
    told: list[tuple[int, float]] = []
    admitted = StepsInFlight.admitted

    def note(self: StepsInFlight, tokens: int, seconds: float) -> None:
        told.append((tokens, seconds))
        admitted(self, tokens, LONG)

    monkeypatch.setattr(StepsInFlight, "admitted", note)
    scene = Scene(group, monkeypatch, num_blocks=91)
    for number in range(3):
        name = scene.add(prompt(300, 20 + number), max_tokens=2)
        opened_by_the_forward(scene, name)
        loaded(None, scene.d, name)
        assert scene.d.joined[name] == 1
        scene.d.device = lambda: None
        for _ in range(3):  # no step in flight may use its blocks any more
            scene.d.step()
        if number:
            monkeypatch.setattr(StepsInFlight, "seconds_until_seen", lambda *_: 0.0)
    assert [tokens for tokens, _ in told] == [len(IDS)] * 3 and all(0 < seconds < LONG for _, seconds in told)
    scene.end()


def test_a_step_that_joins_two_says_nothing_of_the_admission_of_one(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(StepsInFlight, "admitted", lambda _, tokens, seconds: told.append(tokens))
    scene = Scene(group, monkeypatch)
    half = worker_half(scene.d.workers[0].connector)
    report_again = report_no_load_early(half)
    for slow in scene.slow:
        slow.gate.clear()
    names = [add(scene.p, scene.d, prompt(200, 30 + number), max_tokens=2) for number in range(2)]
    running = consumer_of(scene.d).loads.running
    eventually(lambda: (scene.d.step(), len(running) == 2 and all(load.posted.under_way for load in running))[1])
    report_again()
    opened_by_the_forward(scene, names[0])
    for name in names:
        loaded(None, scene.d, name)
    assert all(scene.d.joined[name] == 1 for name in names) and not told
    scene.end()


@each_once("runner policy ahead", (*RUNNERS, *RUNNERS), ("fail", "recompute"), (0, 1))
def test_one_that_fails_is_recovered_from(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, policy: str, ahead: int, lines: Lines
) -> None:
    scene = Scene(group, monkeypatch, runner=runner, policy=policy, ahead=ahead)
    name = scene.add(max_tokens=5)
    for slow in scene.slow:
        slow.error = "CUDA error: out of order"
    opened_by_the_forward(scene, name)
    answer = scene.d.finish(name)
    assert answer.finish == ("error" if policy == "fail" else "length")
    assert scene.d.joined[name] == 1 and scene.d.computed[name] >= (len(IDS) if policy == "recompute" else 0)
    assert len(lines("failed inside its step", name)) == 1
    again = scene.d.add(IDS)
    scene.d.finish(again)
    found = len(IDS) - scene.d.computed[again]
    assert found == (0 if policy == "fail" else (len(IDS) - 1) // BLOCK * BLOCK), "nothing of it stays in the cache"
    scene.end()


@POLICIES
def test_another_one_found_its_blocks(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """In the step that joins it, before the load has failed."""
    scene = Scene(group, monkeypatch, policy=policy)
    name = scene.add(max_tokens=5)
    other = scene.d.add(IDS, max_tokens=4)
    for slow in scene.slow:
        slow.error = "CUDA error: out of order"
    opened_by_the_forward(scene, name)
    ends = [scene.d.finish(one).finish for one in (name, other)]
    assert ends[0] == ("error" if policy == "fail" else "length") and ends[1] in ("error", "length")
    scene.end()


def test_a_client_that_leaves_gives_no_block_away_that_is_still_written(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """vLLM gives the blocks of a load that was reported to the next request at once."""
    scene = Scene(group, monkeypatch, runner=runner, num_blocks=46)
    name = scene.add()
    scene.d.abort(name)
    running = opened_by_the_forward(scene, name)
    other = scene.d.add(prompt(280, 17), max_tokens=3)
    scene.d.finish(other)
    assert running[0] > 0
    scene.end()


def test_a_client_leaves_before_the_scheduler_has_heard_of_it(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """The load is cancelled, and a step joins it: who has its blocks then computes once."""
    scene = Scene(group, monkeypatch, runner=runner, num_blocks=46)
    for slow in scene.slow:
        slow.gate.clear()
    name = add(scene.p, scene.d, IDS)
    left: list[int] = []

    def leave(step: object) -> None:
        if scene.d.workers[0].received[name] and not left:
            left.append(1)
            scene.d.abort(name)

    scene.d.before_update = leave
    eventually(lambda: (scene.d.step(), bool(left))[1])
    opened_by_the_forward(scene, name)
    other = scene.d.add(prompt(280, 17), max_tokens=3)
    scene.d.finish(other)
    assert scene.d.joined[name] == 1 and not scene.d.fallen_loads
    assert scene.d.computed[other] == 280 + 2
    scene.end()


def test_one_rank_has_ended_before_the_other(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(group, monkeypatch, tp=2)
    scene.slow[1].gate.clear()
    name = add(scene.p, scene.d, IDS, max_tokens=5)
    run([scene.d], lambda: all(worker.received[name] for worker in scene.d.workers))
    running = opened_by_the_forward(scene, name)
    loaded(None, scene.d, name)
    assert scene.d.joined[name] == 1 and running and not scene.d.fallen_loads
    scene.end()


def test_a_client_leaves_while_only_one_rank_has_reported(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(group, monkeypatch, tp=2)
    report_no_load_early(worker_half(scene.d.workers[1]))
    for slow in scene.slow:
        slow.gate.clear()
    name = add(scene.p, scene.d, IDS)
    run([scene.d], lambda: scene.d.workers[0].received[name] > 0)
    scene.d.abort(name)
    scene.d.step()
    assert scene.d.status(name) is not None and not scene.d.joined[name], "its blocks are not free"
    scene.open()
    scene.end()


def test_the_transfer_thread_ends_first(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(group, monkeypatch, policy="recompute")
    name = scene.add(max_tokens=5)
    thread = thread_of(worker_half(scene.d.workers[0]))
    scene.open()
    thread.close()
    assert scene.d.finish(name).finish == "length"


def test_not_where_an_answer_must_tell_how_it_went(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plane and its time are known at its end; and none inside or early where the setting says so."""
    scene = Scene(group, monkeypatch, extra={"step_hold_seconds": 0.0})
    name = add(scene.p, scene.d, IDS)
    loaded(None, scene.d, name)
    assert scene.d.loads[name] == 1 and not scene.d.joined
    assert not scheduler_half(scene.d).step_load_rule.hold_seconds
    scene.end()
