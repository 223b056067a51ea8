"""Prompts that P's engine computes while their bytes leave: what has left when, and in every form."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.handover.prefilling import PrefillingEngine
from tests.handover.scenario import OURS, THEIRS, TOKENS, Pair, RankGroup
from tests.handover.streamed import PLANES, STEP, computing, ends_well, has, make, nothing_of
from tests.support.inside import early_asks, sends_of
from tests.support.ranks import Rank, let_time_pass, wait


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
        before = active.lifetime.state.deadline
        let_time_pass(d, 50 * turn)
        let_time_pass(p, 3 * turn)
        assert wait(lambda before=before: active.lifetime.state.deadline > before + 40, [p, d])
    assert not d.failed
    let_time_pass(d, 250)
    assert wait(lambda: active.number > 1 or active.lifetime.state.reason is not None, [p, d]), "D begins anew"


def wait_for_reads(p: Rank, d: Rank) -> list[Any]:
    assert wait(lambda: bool(sends_of(p).waiting), [p, d])
    return list(d.consumer.loads.running)
