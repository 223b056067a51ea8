"""Prompts that P's engine computes while their bytes leave: no wrong byte ever counts, and everything ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.connector.prefill_side.lease import PREEMPTED_SECONDS
from kvferry.connector.wire.step_plan import StepPlan
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
from tests.support.inside import early_asks, early_votes, plans_of, sends_of
from tests.support.ranks import Rank, let_time_pass, wait
from tests.transport.plane_list import PUSH, host_planes


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    return make(group)


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
    assert wait(lambda: bool(early_votes(p)) and not sends_of(p).waiting, [p, d])
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
