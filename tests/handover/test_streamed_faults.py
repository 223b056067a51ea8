"""Prompts that P's engine computes while their bytes leave: no wrong byte ever counts, and everything ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvferry.connector.prefill_side.lease import PREEMPTED_SECONDS
from kvferry.connector.prefill_side.send import PackedChunk
from kvferry.connector.wire.step_plan import StepPlan
from tests.handover.gates import halves
from tests.handover.prefilling import PrefillingEngine
from tests.handover.rank_group import RankGroup
from tests.handover.slow_copies import SlowCopies, install
from tests.handover.streamed import (
    ELSEWHERE,
    OURS,
    PLANES,
    STEP,
    THEIRS,
    TOKENS,
    all_ended,
    ends_well,
    has,
    make,
    nothing_of,
)
from tests.support.inside import early_asks, early_votes, leases_of, plans_of, sends_of
from tests.support.ranks import Rank, let_time_pass, wait
from tests.transport.plane_list import PUSH, host_planes


@pytest.mark.parametrize("plane", PLANES)
def test_a_preempted_prompt_goes_on_from_other_blocks(group: RankGroup, plane: str) -> None:
    p, d = make(group, plane)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    engine.plan(STEP, 2 * STEP)
    engine.take_back(ELSEWHERE)
    engine.end()  # of the step that was under way: it says nothing about the new blocks
    engine.plan(0, STEP, restarts=True)
    assert wait(lambda: not plans_of(p).posted, [p, d]) and nothing_of(d, STEP, TOKENS)
    engine.write(0, STEP)
    engine.end()
    engine.step(STEP, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_a_prompt_that_stays_preempted_gives_d_its_blocks_back(group: RankGroup) -> None:
    """P's engine may wait for blocks of a lease that D releases only when it gets blocks itself."""
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    engine.take_back(ELSEWHERE)
    assert wait(lambda: not plans_of(p).posted, [p, d]) and not d.failed
    let_time_pass(p, PREEMPTED_SECONDS + 1)
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    engine.step(0, STEP, restarts=True)
    engine.step(STEP, TOKENS)
    engine.grant()
    assert wait(lambda: p.sent == {"req-p"} and all_ended(p), [p, d]), "D has released the lease before it began"


def test_a_prompt_that_is_preempted_until_its_lease(group: RankGroup) -> None:
    """Without a chunk that restarts, the lease names the blocks."""
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    engine.take_back(ELSEWHERE)
    engine.write(0, TOKENS)
    engine.grant()
    ends_well([p], d)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[SlowCopies]:
    return install(monkeypatch)


def preempt_under_a_copy(p: Rank, d: Rank, slow: SlowCopies) -> PrefillingEngine:
    """A copy out of P's blocks is under way when the engine takes them back, and reads what others wrote there."""
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.plan(0, STEP)
    assert wait(lambda: bool(sends_of(p).waiting), [p, d])
    engine.write(0, STEP)
    slow.gate.clear()
    engine.end()
    assert wait(lambda: slow.running > 0, [p, d])
    engine.take_back(ELSEWHERE)
    slow.gate.set()
    assert wait(lambda: not slow.running, [p, d])
    engine.step(0, STEP, restarts=True)
    engine.step(STEP, TOKENS)
    engine.grant()
    return engine


@pytest.mark.parametrize("plane", host_planes(PUSH))
def test_no_byte_of_a_copy_counts_that_ends_after_its_blocks_are_lost(
    group: RankGroup, copies: list[SlowCopies], plane: str
) -> None:
    p, d = make(group, plane)
    preempt_under_a_copy(p, d, copies[0])
    ends_well([p], d)


def test_without_the_look_at_the_blocks_wrong_bytes_arrive(
    group: RankGroup, copies: list[SlowCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: the test above would see it."""
    monkeypatch.setattr(PackedChunk, "lost", property(lambda packed: False))
    p, d = make(group)
    preempt_under_a_copy(p, d, copies[0])
    assert wait(lambda: d.received == {"req-d"}, [p, d]) and not d.failed
    assert not has(d, 0, STEP) and has(d, STEP, TOKENS)


def test_an_abort_under_a_copy(group: RankGroup, copies: list[SlowCopies]) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.plan(0, STEP)
    assert wait(lambda: bool(sends_of(p).waiting), [p, d])
    engine.write(0, STEP)
    copies[0].gate.clear()
    engine.end()
    assert wait(lambda: copies[0].running > 0, [p, d])
    engine.take_back(ended=True)
    assert wait(lambda: d.failed == {"req-d"}, [p, d]), "D need not wait for the copy"
    copies[0].gate.set()
    assert wait(lambda: all_ended(p), [p, d])
    assert nothing_of(d, 0, TOKENS)


@pytest.mark.parametrize("when", ["before the first step", "while a step runs", "after a step", "after a preemption"])
def test_p_gives_the_prompt_up(group: RankGroup, when: str) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    sender = sends_of(p)
    if when == "before the first step":
        assert wait(lambda: bool(sender.waiting), [p, d])
    else:
        engine.step(0, STEP)
        assert wait(lambda: has(d, 0, STEP), [p, d])
        if when == "while a step runs":
            engine.plan(STEP, TOKENS)
        elif when == "after a preemption":
            engine.take_back(ELSEWHERE)
    engine.take_back(ended=True)
    assert wait(lambda: d.failed == {"req-d"} and all_ended(p), [p, d])
    engine.load(d, OURS, "late-d", step=STEP)
    assert wait(lambda: "late-d" in d.failed, [p, d]), "who asks later is refused at once"
    assert not p.sent


def test_asks_that_are_held_are_refused_with_the_prompt(group: RankGroup) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.load(d, OURS, step=STEP)
    assert wait(lambda: bool(early_asks(p)), [p, d])
    engine.take_back(ended=True)
    assert wait(lambda: d.failed == {"req-d"} and all_ended(p), [p, d])


def test_d_cancels_while_p_computes(group: RankGroup) -> None:
    """D's release comes before the lease, and counts when the lease begins."""
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    d.worker.post(StepPlan(cancels=("req-d",)))
    assert wait(lambda: d.failed == {"req-d"}, [p, d])
    for cache in d.caches.values():
        cache.fill_(-1)
    producer = halves(p)[0]
    assert wait(lambda: bool(early_votes(producer)) and not sends_of(producer).waiting, [p, d])
    let_time_pass(p, 10_000)  # the vote is kept for as long as P computes
    engine.step(STEP, TOKENS)
    assert nothing_of(d, 0, TOKENS)
    engine.grant()
    assert wait(lambda: p.sent == {"req-p"} and all_ended(p), [p, d])
    assert nothing_of(d, 0, TOKENS)


def test_a_d_that_is_gone_lets_the_lease_expire(group: RankGroup) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    keeper = halves(d)[1].leases  # D says nothing, as when its process is killed
    keeper.release = keeper.close = lambda *arguments: None
    d.close()
    engine.step(STEP, TOKENS)
    engine.grant()
    assert wait(lambda: token_is_leased(p, engine), [p])
    let_time_pass(p, 10_000)
    assert wait(lambda: p.sent == {"req-p"} and all_ended(p), [p])


def token_is_leased(p: Rank, engine: PrefillingEngine) -> bool:
    return engine.token in leases_of(p)


def test_p_ends_while_it_computes(group: RankGroup) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    p.close()
    assert wait(lambda: d.failed == {"req-d"}, [d])
    assert nothing_of(d, STEP, TOKENS)


def test_blocks_that_do_not_exist_are_not_read(group: RankGroup) -> None:
    """An error of the engine: its later chunks do not say which tokens lie where, and the lease does."""
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d])
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
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that is behind its engine: the prompt begins anew before the step of the lost blocks has ended."""
    p, d = make(group)
    device: list[Callable[[], None]] = []
    monkeypatch.setattr(p.context.caches.copies, "after_engine", device.append)

    def reach(count: int) -> None:
        for _ in range(count):
            device.pop(0)()

    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    reach(1)
    assert wait(lambda: has(d, 0, STEP), [p, d])
    engine.step(STEP, 2 * STEP)
    engine.take_back(ELSEWHERE)
    engine.plan(0, 2 * STEP, restarts=True)
    reach(1)
    assert wait(lambda: len(halves(p)[0].steps.flights) == 1, [p, d]), "the step of the lost blocks has ended"
    assert not wait(lambda: not nothing_of(d, STEP, TOKENS), [p, d], seconds=0.2)
    engine.write(0, 2 * STEP)
    engine.end()
    reach(1)
    assert wait(lambda: has(d, 0, 2 * STEP), [p, d])
    engine.step(2 * STEP, TOKENS)
    engine.grant()
    reach(1)
    ends_well([p], d)
