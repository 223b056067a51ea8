"""When P's engine wakes its transfer thread while it computes: only where bytes can leave, for they share one
interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.engine import loop
from kvferry.connector.prefill_side.send import Sends
from tests.handover.prefilling import PrefillingEngine
from tests.handover.scenario import OURS, THEIRS, TOKENS, Pair, RankGroup
from tests.handover.streamed import STEP, computing, ends_well, has, make
from tests.support.inside import leases_of, sends_of, sleeps
from tests.support.ranks import Rank, wait


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    return make(group)


@pytest.fixture(autouse=True)
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turns because time has passed: a wake-up that is missed is missed for ever."""
    for name in ("TICK_SECONDS", "BUSY_SECONDS", "IDLE_SECONDS"):
        monkeypatch.setattr(loop, name, 600.0)


class Wakes:
    """Counts how often P's transfer thread is woken."""

    def __init__(self, p: Rank) -> None:
        self._p, self._count = p, 0
        wake = p.thread.wake

        def counted() -> None:
            self._count += 1
            wake()

        p.thread.wake = counted  # type: ignore[method-assign]

    def new(self) -> int:
        """How often since the last call."""
        count, self._count = self._count, 0
        return count

    @property
    def asleep(self) -> bool:
        return sleeps(self._p)


def test_a_prompt_that_nobody_reads(group: RankGroup) -> None:
    p, _ = make(group)
    wakes, engine = Wakes(p), PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    assert wakes.new() == 1
    for start in range(0, TOKENS, STEP):
        engine.plan(start, min(start + STEP, TOKENS))
        engine.hook(range(len(p.layers)))
        engine.end()
    assert wakes.new() == 0
    engine.grant()
    assert wakes.new() == 1
    assert wait(lambda: bool(leases_of(p)) and not p.producer.steps.flights)


def test_a_read_that_waits(group: RankGroup) -> None:
    """Each layer wakes the thread once; the plan and the end of a step bring nothing that could leave."""
    p, d = make(group, content=1024)
    step = TOKENS // 2  # windows of one length, so that each layer of each one is a message
    engine = computing(p, d, step)
    sender, wakes = sends_of(p), Wakes(p)
    for start in range(0, TOKENS, step):
        stop = start + step
        assert wait(lambda: bool(sender.waiting) and wakes.asleep)
        wakes.new()
        engine.plan(start, stop)
        assert wakes.new() == 0
        for layer in range(len(p.layers)):
            engine.write(start, stop, [layer])
            engine.hook([layer])
            assert wait(lambda stop=stop, layer=layer: has(d, 0, stop, layers=slice(layer + 1)), [p, d])
            last = (stop, layer) == (TOKENS, len(p.layers) - 1)
            assert wait(lambda last=last: (last or bool(sender.waiting)) and wakes.asleep)
            assert wakes.new() == 1
        engine.end()
        assert wakes.new() == 0
    engine.grant()
    ends_well([p], d)


def test_a_layer_that_is_computed_while_its_read_is_put_aside(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine sees no read that waits, and wakes nobody; the thread has looked at the step before."""
    p, d = make(group, content=512)  # each layer is a message
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=TOKENS)
    turn, late = Sends.turn, [2, 3]

    def put_aside(sender: Sends) -> Any:
        result = turn(sender)
        if late and sender.waiting and result[0].sent == late[0]:
            waiting, sender.waiting = sender.waiting, {}
            engine.hook([late.pop(0)])
            sender.waiting = waiting
        return result

    thread: Any = p.thread
    thread_turn, more = thread.turn, []

    def turn_of_thread(now: float) -> bool:
        before = len(late)
        busy = bool(thread_turn(now))
        if len(late) < before:
            more.append(busy)
        return busy

    monkeypatch.setattr(Sends, "turn", put_aside)
    monkeypatch.setattr(thread, "turn", turn_of_thread)
    engine.load(d, OURS, step=TOKENS)
    assert wait(lambda: bool(sends_of(p).waiting))
    engine.plan(0, TOKENS)
    engine.write(0, TOKENS)
    engine.hook([0, 1])
    assert wait(lambda: has(d, 0, TOKENS), [p, d])
    assert not late and more == [True, True], "also where D's next message would wake the thread"
    engine.end()
    engine.grant()
    ends_well([p], d)
