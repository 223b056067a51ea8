"""Prompts that P's engine computes while their bytes leave: what leaves when, who wakes whom, no wrong byte counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.connector.prefill_side.prompts import PREEMPTED_SECONDS
from kvferry.connector.prefill_side.send import Sends
from kvferry.connector.wire.step_plan import StepPlan
from kvferry.connector.worker import loop
from tests.handover.prefilling import PrefillingEngine
from tests.handover.scenario import OURS, THEIRS, TOKENS, Pair, RankGroup, wipe
from tests.handover.slow_copies import SlowCopies, install
from tests.handover.streamed import (
    ELSEWHERE,
    PLANES,
    STEP,
    after_a_step,
    all_ended,
    computing,
    ends_well,
    has,
    make,
    nothing_of,
)
from tests.support.inside import early_asks, early_releases, leases_of, plans_of, sends_of, sleeps
from tests.support.ranks import Rank, let_time_pass, wait
from tests.transport.plane_pair import PUSH, host_planes


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    return make(group)


@pytest.mark.parametrize("plane", PLANES)
def test_each_step_leaves_before_the_next_one_is_computed(group: RankGroup, plane: str) -> None:
    p, d = make(group, plane)
    engine = computing(p, d)
    for start in range(0, TOKENS, STEP):
        stop = min(start + STEP, TOKENS)
        engine.step(start, stop)
        assert wait(lambda stop=stop: has(d, 0, stop), [p, d]), "the step's bytes arrive before the next step"
        assert nothing_of(d, stop, TOKENS)
    assert wait(lambda: d.received == {"req-d"}, [p, d]), "D needs no lease: P itself has sent the bytes"
    engine.grant()
    ends_well([p], d)
    assert d.plane == plane.split(maxsplit=1)[0]


@pytest.mark.parametrize("hooked", [(0, 1, 2, 3), (3, 1), (0, 0, 2), (), (1,)])
def test_layers_leave_one_after_the_other(group: RankGroup, hooked: tuple[int, ...]) -> None:
    """Chunks leave in order, so a layer that is early waits, and one without a hook is ready at the end of the step."""
    p, d = make(group, content=1024)
    engine = computing(p, d, TOKENS)
    engine.plan(0, TOKENS)
    assert wait(lambda: bool(sends_of(p).waiting), [p, d])
    there = 0
    for layer in hooked:
        engine.write(0, TOKENS, [layer])
        engine.hook([layer])
        there += layer == there
        assert wait(lambda there=there: has(d, 0, TOKENS, layers=slice(there)), [p, d])
        assert nothing_of(d, 0, TOKENS, slice(there, None))
    engine.write(0, TOKENS)
    engine.end()
    engine.grant()
    ends_well([p], d)


def test_tokens_found_in_the_prefix_cache_leave_before_the_first_step_ends(p: Rank, d: Rank) -> None:
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.write(0, 48)
    engine.begin(found=48, step_tokens=STEP)
    engine.load(d, OURS, found=48, step=STEP)
    engine.plan(48, 88)
    assert wait(lambda: has(d, 0, 48), [p, d]) and nothing_of(d, 48, TOKENS)
    engine.write(48, 88)
    engine.end()
    engine.finish(88)
    ends_well([p], d)


def test_an_ask_that_precedes_the_first_step_and_steps_that_differ_from_d_s_windows(p: Rank, d: Rank) -> None:
    """P's steps are shorter beside other requests, and D's window is ready when all of its tokens are."""
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.load(d, OURS, step=STEP)
    assert wait(lambda: bool(early_asks(p)), [p, d])
    engine.begin(step_tokens=STEP)
    for start, stop in ((0, 7), (7, 39), (39, 55), (55, 99)):
        engine.step(start, stop)
        ready = stop // STEP * STEP
        assert wait(lambda ready=ready: has(d, 0, ready), [p, d]) and nothing_of(d, ready, TOKENS)
    engine.finish(99)
    ends_well([p], d)


def test_d_foresees_the_end_from_what_the_last_step_has_sent(group: RankGroup) -> None:
    """Once half of its messages have come; not from steps before it, after which P may compute other prompts first."""
    p, d = make(group, content=1024)
    engine = computing(p, d, TOKENS // 2)
    (active,) = wait_for_reads(p, d)
    (read,) = active.reads
    engine.step(0, TOKENS // 2)
    assert wait(lambda: has(d, 0, TOKENS // 2), [p, d])
    assert read.seconds_left(1e9) == math.inf
    engine.plan(TOKENS // 2, TOKENS)
    engine.write(TOKENS // 2, TOKENS)
    for layer, left in enumerate((math.inf, 20.0, 5.0)):  # of 4 layers
        engine.hook([layer])
        assert wait(lambda layer=layer: has(d, 0, TOKENS, layers=slice(layer + 1)), [p, d])
        assert read.seconds_left(read.last_step_at + 10.0) == left
    engine.end()
    engine.grant()
    ends_well([p], d)
    assert read.seconds_left(0.0) == 0.0


def test_p_says_that_it_lives_while_it_computes(group: RankGroup) -> None:
    """D's deadline begins anew with each repeated grant, and ends a read of which it hears nothing."""
    p, d = make(group, transfer_timeout_seconds=60.0)
    computing(p, d)
    (active,) = wait_for_reads(p, d)
    for turn in range(1, 4):
        before = active.deadline
        let_time_pass(d, 50 * turn)
        let_time_pass(p, 3 * turn)
        assert wait(lambda before=before: active.deadline > before + 40, [p, d])
    assert not d.failed
    let_time_pass(d, 250)
    assert wait(lambda: active.number > 1 or active.reason is not None, [p, d]), "D begins anew"


def wait_for_reads(p: Rank, d: Rank) -> list[Any]:
    assert wait(lambda: bool(sends_of(p).waiting), [p, d])
    return list(d.consumer.loads.running)


@pytest.mark.parametrize("plane", PLANES)
def test_a_preempted_prompt_goes_on_from_other_blocks(group: RankGroup, plane: str) -> None:
    p, d = make(group, plane)
    engine = after_a_step(p, d)
    engine.plan(STEP, 2 * STEP)
    engine.take_back(ELSEWHERE)
    engine.end()  # of the step that was under way: it says nothing about the new blocks
    engine.plan(0, STEP, restarts=True)
    assert wait(lambda: not plans_of(p).posted, [p, d]) and nothing_of(d, STEP, TOKENS)
    engine.write(0, STEP)
    engine.end()
    engine.finish(STEP)
    ends_well([p], d)


def test_a_prompt_that_stays_preempted_gives_d_its_blocks_back(p: Rank, d: Rank) -> None:
    """P's engine may wait for blocks of a lease that D releases only when it gets blocks itself."""
    engine = after_a_step(p, d)
    engine.take_back(ELSEWHERE)
    assert wait(lambda: not plans_of(p).posted, [p, d]) and not d.failed
    let_time_pass(p, PREEMPTED_SECONDS + 1)
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    engine.finish(restarts=True)
    assert wait(lambda: p.sent == {"req-p"} and all_ended(p), [p, d]), "D has released the lease before it began"


def test_a_prompt_that_is_preempted_until_its_lease(p: Rank, d: Rank) -> None:
    """Without a chunk that restarts, the lease names the blocks."""
    engine = after_a_step(p, d)
    engine.take_back(ELSEWHERE)
    engine.write(0, TOKENS)
    engine.grant()
    ends_well([p], d)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[SlowCopies]:
    return install(monkeypatch)


def under_a_copy(p: Rank, d: Rank, slow: SlowCopies) -> PrefillingEngine:
    """A copy out of P's blocks is under way."""
    engine = computing(p, d)
    engine.plan(0, STEP)
    assert wait(lambda: bool(sends_of(p).waiting), [p, d])
    engine.write(0, STEP)
    slow.gate.clear()
    engine.end()
    assert wait(lambda: slow.running > 0, [p, d])
    return engine


def preempt_under_a_copy(p: Rank, d: Rank, slow: SlowCopies) -> None:
    """The copy reads what others write there when the engine has taken the blocks back."""
    engine = under_a_copy(p, d, slow)
    engine.take_back(ELSEWHERE)
    slow.gate.set()
    assert wait(lambda: not slow.running, [p, d])
    engine.step(0, STEP, restarts=True)
    engine.finish(STEP)


@pytest.mark.parametrize("plane", host_planes(PUSH))
def test_no_byte_of_a_copy_counts_that_ends_after_its_blocks_are_lost(
    group: RankGroup, copies: list[SlowCopies], plane: str
) -> None:
    p, d = make(group, plane)
    preempt_under_a_copy(p, d, copies[0])
    ends_well([p], d)


@pytest.mark.parametrize("when", ["held", "before the first step", "in a step", "after a step", "after a preemption"])
def test_p_gives_the_prompt_up(p: Rank, d: Rank, when: str) -> None:
    """``held``: D's ask precedes the begin of the prompt."""
    if when == "held":
        engine = PrefillingEngine([p], THEIRS, TOKENS)
        engine.load(d, OURS, step=STEP)
        assert wait(lambda: bool(early_asks(p)), [p, d])
        engine.begin(streams=False)
    elif when == "before the first step":
        engine = computing(p, d)
        assert wait(lambda: bool(sends_of(p).waiting), [p, d])
    else:
        engine = after_a_step(p, d)
        if when == "in a step":
            engine.plan(STEP, TOKENS)
        elif when == "after a preemption":
            engine.take_back(ELSEWHERE)
    engine.take_back(ended=True)
    assert wait(lambda: d.failed == {"req-d"} and all_ended(p), [p, d])
    engine.load(d, OURS, "late-d", step=STEP)
    assert wait(lambda: "late-d" in d.failed, [p, d]), "who asks later is refused at once"
    assert not p.sent


def test_d_cancels_while_p_computes(p: Rank, d: Rank) -> None:
    """D's release comes before the lease, and counts when the lease begins."""
    engine = after_a_step(p, d)
    d.worker.post(StepPlan(cancels=("req-d",)))
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    wipe(d, -1)
    assert wait(lambda: bool(early_releases(p)) and not sends_of(p).waiting, [p, d])
    let_time_pass(p, 10_000)  # the vote is kept for as long as P computes
    engine.finish(STEP)
    assert wait(lambda: p.sent == {"req-p"} and all_ended(p), [p, d])
    assert nothing_of(d, 0, TOKENS)


def test_blocks_that_do_not_exist_are_not_read(p: Rank, d: Rank) -> None:
    """An error of the engine: its later chunks do not say which tokens lie where, and the lease does."""
    engine = after_a_step(p, d)
    right, engine.blocks = engine.blocks, [*THEIRS[:3], 99, 98, *THEIRS[5:]]
    engine.plan(STEP, 2 * STEP)
    engine.end()
    engine.blocks = right
    engine.step(2 * STEP, TOKENS)
    assert wait(lambda: not plans_of(p).posted, [p, d]) and nothing_of(d, STEP, TOKENS)
    engine.write(0, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_a_step_that_ends_after_its_blocks_are_lost_says_nothing_of_the_new_ones(
    p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that is behind its engine: the prompt begins anew before the step of the lost blocks has ended."""
    device: list[Callable[[], None]] = []
    monkeypatch.setattr(p.context.caches.copies, "after_engine", device.append)
    engine = computing(p, d)
    engine.step(0, STEP)
    device.pop(0)()
    assert wait(lambda: has(d, 0, STEP), [p, d])
    engine.step(STEP, 2 * STEP)
    engine.take_back(ELSEWHERE)
    engine.plan(0, 2 * STEP, restarts=True)
    device.pop(0)()
    assert wait(lambda: len(p.producer.steps.flights) == 1, [p, d]), "the step of the lost blocks has ended"
    assert not wait(lambda: not nothing_of(d, STEP, TOKENS), [p, d], seconds=0.2)
    engine.write(0, 2 * STEP)
    engine.end()
    device.pop(0)()
    assert wait(lambda: has(d, 0, 2 * STEP), [p, d])
    engine.finish(2 * STEP)
    device.pop(0)()
    ends_well([p], d)


@pytest.fixture
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


@pytest.mark.usefixtures("untimed")
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


@pytest.mark.usefixtures("untimed")
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


@pytest.mark.usefixtures("untimed")
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
