"""Prompts that P still computes, at an idle D: their last bytes are foreseen, and the step that computes with them is
prepared meanwhile. It waits for them, and one that does not come is recovered from as inside a step."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import pytest
from vllm.v1.request import RequestStatus

from kvferry.connector.decode_side.fetch import RankRead
from kvferry.connector.step_loads import step_hold, step_loads
from kvferry.connector.step_loads.step_loads import StepOutcome
from tests.support.inside import consumer_of, producer_of, worker_half
from tests.vllm.labelled import prompt
from tests.vllm.stepped import ROOM, Engine, EngineGroup, Lines, eventually, loaded, run, settle
from tests.vllm.test_rendezvous import IDS, STEP, begin, holds
from tests.vllm.test_step_loads import add

pytestmark = pytest.mark.vllm
ONE_PROCESS = pytest.mark.parametrize("one_process", [True, False])


@pytest.fixture(autouse=True)
def foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """P is about to send the rest, as far as D can see, once it has sent something."""
    left = lambda read, now: 0.0 if len(read.tags) < len(read.boxes) else math.inf  # noqa: E731
    monkeypatch.setattr(RankRead, "seconds_left", left)
    monkeypatch.setattr(step_loads, "ALONE_SECONDS", math.inf)  # a D may be stepped late


class Rest:
    """What P sends after its first step comes once ``come`` is called; ``waits``: a step of D waits for it;
    ``prepared``: with nothing but its forward to do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, p: Engine, d: Engine) -> None:
        self._gate, self._thread, self.waits, producer = threading.Event(), p.thread, threading.Event(), producer_of(p)
        self._half = worker_half(d.workers[0].connector)
        pump, wait_begun = producer.pump, StepOutcome.wait_begun

        def wait(outcome: StepOutcome, seconds: float) -> bool:
            if outcome.waiting and seconds > step_hold.BEGIN_SECONDS:
                self.waits.set()
            return wait_begun(outcome, seconds)

        monkeypatch.setattr(producer, "pump", lambda now: self._gate.is_set() and pump(now))
        leg, self.request_id = begin(p, d, reads_early=False)
        run([d], lambda: d.all_loads[self.request_id] > 0)
        self.come()
        eventually(lambda: holds(d, self.request_id, 0, STEP))
        self._gate.clear()
        p.finish(leg)
        monkeypatch.setattr(StepOutcome, "wait_begun", wait)

    def come(self) -> None:
        self.prepared = self._half.step_hold.outcome is not None
        self._gate.set()
        self._thread.wake()

    def when_a_step_waits(self, act: Callable[[], object]) -> threading.Thread:
        def wait() -> None:
            if self.waits.wait(300):
                act()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    def not_waited_for(self, p: Engine, d: Engine) -> None:
        for _ in range(5):
            d.step()
        assert not d.workers[0].received[self.request_id]
        self.come()
        loaded(None, d, self.request_id)
        settle(p, d)


@ONE_PROCESS
@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_the_step_waits_for_the_rest(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, plane: str, one_process: bool
) -> None:
    monkeypatch.setattr(step_hold, "PATIENCE_SECONDS", 600.0)
    p, d = group.pair(extra={"plane": plane}, max_batched=STEP, runner=runner, one_process=one_process)
    rest = Rest(monkeypatch, p, d)
    thread = rest.when_a_step_waits(rest.come)
    assert loaded(None, d, rest.request_id).external == len(IDS)
    thread.join()
    settle(p, d)
    assert d.joined[rest.request_id] == 1 and rest.prepared and not d.failed and not d.fallen_loads


def test_no_step_waits_for_an_attempt_that_has_failed(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """The next one may take long."""
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP, runner=runner)
    rest = Rest(monkeypatch, p, d)
    (load,) = consumer_of(d).loads.running
    load.reads[0].link.fail("peer_lost", "planted")
    d.thread.wake()
    eventually(lambda: load.number == 2)
    rest.not_waited_for(p, d)


@pytest.mark.parametrize(
    ("hold", "policy", "late"), [(0.0, "recompute", math.inf), (0.01, "fail", math.inf), (0.01, "recompute", 0.0)]
)
def test_no_step_waits(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, hold: float, policy: str, late: float
) -> None:
    """It is off; a step that gives the load up would end its request; the foreseen end is long past."""
    monkeypatch.setattr(step_loads, "ALONE_SECONDS", late)
    p, d = group.pair(extra={"plane": "tcp", "step_hold_seconds": hold}, max_batched=STEP, runner=runner, policy=policy)
    rest = Rest(monkeypatch, p, d)
    rest.not_waited_for(p, d)


def test_what_never_comes_is_computed_here(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, lines: Lines
) -> None:
    monkeypatch.setattr(step_hold, "PATIENCE_SECONDS", 0.0)
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP, runner=runner)
    rest = Rest(monkeypatch, p, d)
    assert d.finish(rest.request_id).finish == "length" and d.joined[rest.request_id] == 1
    assert d.computed[rest.request_id] >= len(IDS)
    assert len(lines("failed inside its step", rest.request_id)) == 1
    rest.come()
    settle(p, d)


@ONE_PROCESS
def test_a_client_that_leaves_gives_no_block_away_that_is_still_written(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, one_process: bool
) -> None:
    """vLLM gives the blocks of a load that was reported to the next request at once: its step waits for the rest."""
    monkeypatch.setattr(step_hold, "PATIENCE_SECONDS", 600.0)
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP, runner=runner, one_process=one_process)
    rest = Rest(monkeypatch, p, d)
    run([d], lambda: d.workers[0].received[rest.request_id] > 0)
    d.abort(rest.request_id)
    thread = rest.when_a_step_waits(rest.come)
    other = d.add(prompt(280, 17), max_tokens=3)
    assert d.finish(other).finish == "length"
    thread.join()
    assert rest.waits.is_set() and not rest.prepared and d.computed[other] < 2 * 280
    settle(p, d)


@pytest.mark.parametrize("comes", [True, False])
def test_nor_one_that_another_load_fills(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, comes: bool
) -> None:
    """That load begins once nothing else writes the blocks."""
    monkeypatch.setattr(step_hold, "PATIENCE_SECONDS", 600.0 if comes else 0.01)
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP, runner=runner)
    q = group.engine(0, extra=ROOM | {"plane": "tcp"}, runner=runner)
    rest = Rest(monkeypatch, p, d)
    run([d], lambda: d.workers[0].received[rest.request_id] > 0)
    d.abort(rest.request_id)
    begun: list[int] = []

    def come() -> None:
        time.sleep(0.05)  # another load could begin
        begun.append(len(consumer_of(d).loads.running))
        if comes:
            rest.come()

    thread = rest.when_a_step_waits(come)
    other = add(q, d, prompt(280, 17), max_tokens=3)
    assert d.finish(other, beside=[q]).finish == "length"
    thread.join()
    assert begun == [1] or not comes
    rest.come()
    eventually(lambda: not consumer_of(d).reads.by_number)
    again = d.add(prompt(280, 17), max_tokens=3)
    assert d.finish(again).finish == "length" and d.computed[again] < 280, "its blocks are right, too"
    settle(p, q, d)


def test_a_client_leaves_before_the_scheduler_has_heard_of_it(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """The load is cancelled, and a step joins it."""
    monkeypatch.setattr(step_hold, "PATIENCE_SECONDS", 0.01)
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP, runner=runner)
    rest = Rest(monkeypatch, p, d)

    def leave(step: object) -> None:
        if d.workers[0].received[rest.request_id]:
            d.before_update = None
            d.abort(rest.request_id)

    d.before_update = leave
    run([d], lambda: d.before_update is None)
    other = d.add(prompt(280, 17), max_tokens=3)
    assert d.finish(other).finish == "length"
    rest.come()
    settle(p, d)


def test_a_busy_engine_waits_for_no_p(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP, runner=runner, num_blocks=61)
    decoding = d.add(prompt(20, 5), max_tokens=50)
    rest = Rest(monkeypatch, p, d)
    d.finish(decoding)
    assert d.status(rest.request_id) is RequestStatus.WAITING_FOR_REMOTE_KVS and not rest.waits.is_set()
    rest.come()
    loaded(None, d, rest.request_id)
    settle(p, d)
