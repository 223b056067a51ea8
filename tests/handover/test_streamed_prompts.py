"""Prompts that P's engine computes while their bytes leave: what has left when, and in every form."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.config import Settings
from tests.handover.gates import PATIENT, halves
from tests.handover.prefilling import PrefillingEngine
from tests.handover.rank_group import RankGroup
from tests.handover.streamed import (
    OURS,
    PLANES,
    STEP,
    THEIRS,
    TOKENS,
    ends_well,
    has,
    make,
    nothing_of,
)
from tests.support.inside import early_asks, sends_of
from tests.support.ranks import Rank, let_time_pass, wait


@pytest.mark.parametrize("plane", PLANES)
def test_each_step_leaves_before_the_next_one_is_computed(group: RankGroup, plane: str) -> None:
    p, d = make(group, plane)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    for start in range(0, TOKENS, STEP):
        stop = min(start + STEP, TOKENS)
        engine.plan(start, stop)
        engine.write(start, stop)
        engine.end()
        assert wait(lambda stop=stop: has(d, 0, stop), [p, d]), "the step's bytes arrive before the next step"
        assert nothing_of(d, stop, TOKENS)
    assert wait(lambda: d.received == {"req-d"}, [p, d]), "D needs no lease: P itself has sent the bytes"
    engine.grant()
    ends_well([p], d)
    assert d.plane == plane.split(maxsplit=1)[0]


def test_the_layers_of_a_step_leave_one_after_the_other(group: RankGroup) -> None:
    p, d = make(group, content=1024)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=TOKENS)
    engine.load(d, OURS, step=TOKENS)
    engine.plan(0, TOKENS)
    for layer in range(len(p.layers)):
        engine.write(0, TOKENS, [layer])
        engine.hook([layer])
        assert wait(lambda layer=layer: has(d, 0, TOKENS, layers=slice(layer + 1)), [p, d])
        assert nothing_of(d, 0, TOKENS, slice(layer + 1, None))
    engine.end()
    engine.grant()
    ends_well([p], d)


@pytest.mark.parametrize("hooked", [(3, 1), (0, 0, 2), (), (1,)])
def test_layers_that_come_in_another_order_or_not_at_all(group: RankGroup, hooked: tuple[int, ...]) -> None:
    """Chunks leave in order, so a layer that is early waits, and one without a hook is ready at the end of the step."""
    p, d = make(group, content=1024)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=TOKENS)
    engine.load(d, OURS, step=TOKENS)
    engine.plan(0, TOKENS)
    engine.write(0, TOKENS, hooked)
    engine.hook(hooked)
    first = 0 in hooked
    assert wait(lambda: bool(sends_of(p).waiting), [p, d])
    assert wait(lambda: has(d, 0, TOKENS, layers=slice(int(first))), [p, d]) and nothing_of(
        d, 0, TOKENS, slice(1, None)
    )
    engine.write(0, TOKENS)
    engine.end()
    engine.grant()
    ends_well([p], d)


def test_tokens_found_in_the_prefix_cache_leave_before_the_first_step_ends(group: RankGroup) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.write(0, 48)
    engine.begin(found=48, step_tokens=STEP)
    engine.load(d, OURS, found=48, step=STEP)
    engine.plan(48, 88)
    assert wait(lambda: has(d, 0, 48), [p, d]) and nothing_of(d, 48, TOKENS)
    engine.write(48, 88)
    engine.end()
    engine.step(88, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_an_ask_that_precedes_the_first_step(group: RankGroup) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.load(d, OURS, step=STEP)
    assert wait(lambda: bool(early_asks(p)), [p, d])
    engine.begin(step_tokens=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP), [p, d]) and nothing_of(d, STEP, TOKENS)
    engine.step(STEP, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_steps_that_differ_from_d_s_windows(group: RankGroup) -> None:
    """P's steps are shorter beside other requests, and D's window is ready when all of its tokens are."""
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    for start, stop in ((0, 7), (7, 39), (39, 55), (55, 99)):
        engine.step(start, stop)
        ready = stop // STEP * STEP
        assert wait(lambda ready=ready: has(d, 0, ready), [p, d]) and nothing_of(d, ready, TOKENS)
    engine.step(99, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_the_lease_begins_while_bytes_are_left(group: RankGroup) -> None:
    """P's lease comes before the transfer thread has sent all: the read goes on under the lease."""
    p, d = make(group, "tcp in pieces")
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.plan(0, TOKENS)
    assert wait(lambda: bool(sends_of(p).waiting), [p, d])
    engine.write(0, TOKENS)
    engine.grant()
    ends_well([p], d)


def test_two_ds_read_one_prompt_while_it_is_computed(group: RankGroup) -> None:
    p, d = make(group)
    other = group.rank(settings=d.settings, engine_id="engine-other")
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    engine.step(0, STEP)
    engine.load(other, OURS)
    assert wait(lambda: has(d, 0, STEP), [p, d, other])
    assert wait(lambda: len(sends_of(p).waiting.get(engine.token, ())) == 2, [p, d, other])
    engine.step(STEP, TOKENS)
    assert wait(lambda: d.received == other.received == {"req-d"}, [p, d, other]) and not (d.failed or other.failed)
    assert has(other, 0, TOKENS)
    engine.grant()
    ends_well([p], d, other)


@pytest.mark.parametrize(("theirs", "ours"), [(2, 1), (1, 2), (2, 3)])
def test_other_numbers_of_ranks(group: RankGroup, theirs: int, ours: int) -> None:
    settings = Settings(plane="shm", **PATIENT)
    ps = [group.rank(engine_id="engine-p", tp_rank=n, tp_size=theirs, total_heads=6, settings=settings)
          for n in range(theirs)]  # fmt: skip
    ds = [group.rank(engine_id="engine-d", tp_rank=n, tp_size=ours, total_heads=6, settings=settings)
          for n in range(ours)]  # fmt: skip
    engine = PrefillingEngine(ps, THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    for d in ds:
        engine.load(d, OURS, step=STEP)
    for start in range(0, TOKENS, STEP):
        stop = min(start + STEP, TOKENS)
        engine.step(start, stop)
        assert wait(lambda stop=stop: all(has(d, 0, stop) for d in ds), [*ps, *ds])
        assert all(nothing_of(d, stop, TOKENS) for d in ds)
    engine.grant()
    ends_well(ps, *ds)


@pytest.mark.parametrize(("block_size", "layout"), [(8, "HND"), (32, "NHD"), (16, "NHD")])
def test_other_blocks_and_layouts(group: RankGroup, block_size: int, layout: str) -> None:
    p, d = make(group, "tcp", block_size=block_size, layout=layout, blocks=40)
    ours = list(range(3, 3 + -(-TOKENS // block_size)))[::-1]
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, ours, step=STEP)
    engine.step(0, STEP)
    assert wait(lambda: has(d, 0, STEP, ours), [p, d])
    engine.step(STEP, TOKENS)
    assert wait(lambda: d.received == {"req-d"}, [p, d]) and has(d, 0, TOKENS, ours)
    engine.grant()
    assert wait(lambda: p.sent == {"req-p"}, [p, d]) and not d.failed


def test_p_says_that_it_lives_while_it_computes(group: RankGroup) -> None:
    """D's deadline begins anew with each repeated grant, and ends a read of which it hears nothing."""
    p, d = make(group, transfer_timeout_seconds=60.0)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    (active,) = wait_for_reads(p, d)
    for turn in range(1, 4):
        before = active.lifetime.state.deadline
        let_time_pass(d, 50 * turn)
        let_time_pass(p, 3 * turn)
        assert wait(lambda before=before: active.lifetime.state.deadline > before + 40, [p, d])
    assert not d.failed
    let_time_pass(d, 250)
    assert wait(lambda: active.number > 1 or active.lifetime.state.reason is not None, [p, d]), (
        "after a silence D begins anew"
    )


def wait_for_reads(p: Rank, d: Rank) -> list[Any]:
    assert wait(lambda: bool(sends_of(p).waiting), [p, d])
    return list(halves(d)[1].loads.running)


def test_a_read_that_waits_takes_no_turn(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = make(group)
    engine = PrefillingEngine([p], THEIRS, TOKENS)
    engine.begin(step_tokens=STEP)
    engine.load(d, OURS, step=STEP)
    wait_for_reads(p, d)
    producer = halves(p)[0]
    turns: list[None] = []
    pumped, real, pump = [], sends_of(producer).turn, producer.pump
    monkeypatch.setattr(sends_of(producer), "turn", lambda: turns.append(None) or real())
    monkeypatch.setattr(producer, "pump", lambda now: pumped.append(now) or pump(now))
    assert wait(lambda: len(pumped) > 20, [p, d]) and not turns
    engine.step(0, TOKENS)
    engine.grant()
    ends_well([p], d)
    assert turns
