"""P's machine of a prompt and its lease: freed exactly once, never under a running own read, nothing committed after
the end; and before the lease nothing of a life of blocks that is over counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.prefill_side import lease as ls
from kvferry.connector.wire.states import Tick

PHASE = ls.LeasePhase
D1, D2 = b"d1", b"d2"


def run(state: ls.LeaseState, *events: ls.LeaseEvent, now: float = 1) -> tuple[ls.LeaseState, list[ls.LeaseEffect]]:
    effects: list[ls.LeaseEffect] = []
    for event in events:
        state, new = ls.LEASE.step(state, event, now)
        effects += new
    return state, effects


def granted() -> ls.LeaseState:
    return ls.granted_at(0, term=30, cap=100)


def asked(*expected: int, consumer: bytes = D1) -> ls.Asked:
    return ls.Asked(consumer, ls.rank_set(expected))


def released(rank: int, *expected: int, consumer: bytes = D1) -> ls.Released:
    return ls.Released(consumer, rank, ls.rank_set(expected))


# --- the lease --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "freed"),
    [
        ((asked(0, 1), released(0, 0, 1), released(0, 0, 1)), []),
        ((asked(0, 1), released(0, 0, 1), released(1, 0, 1), released(1, 0, 1)), [ls.Freed("released")]),
        # The first ask fixes the set, and consumers do not mix.
        ((asked(0, 1), asked(0), released(0, 0), released(0, 0, 1, consumer=D2)), []),
        ((asked(0, 1), released(0, 0, 1, consumer=D2), released(1, 0, 1, consumer=D2)), [ls.Freed("released")]),
        ((released(0, 0),), [ls.Freed("released")]),  # of a rank that never asked
    ],
)
def test_freed_when_one_consumers_full_set_has_released(
    events: tuple[ls.LeaseEvent, ...], freed: list[ls.LeaseEffect]
) -> None:
    state, effects = run(granted(), *events)
    assert effects == freed and state.phase is (PHASE.RELEASED if freed else PHASE.GRANTED)


def test_renewal_extends_up_to_the_cap() -> None:
    state, _ = ls.LEASE.step(granted(), ls.Renewed(), 20)
    assert ls.LEASE.step(state, Tick(), 49)[1] == ()
    assert ls.LEASE.step(state, Tick(), 50)[1] == (ls.Freed("expired"),)
    for now in range(0, 100, 10):
        state, _ = ls.LEASE.step(state, ls.Renewed(), now)
    assert ls.LEASE.step(state, Tick(), 99.9)[1] == ()
    assert ls.LEASE.step(state, Tick(), 100)[1] == (ls.Freed("cap"),)


# --- before the lease -------------------------------------------------------------------------------------------------

FIRST, AGAIN = ls.ChunkPlanned(restarts=False), ls.ChunkPlanned(restarts=True)
LOST, GIVEN_UP = ls.BlocksLost(ended=False), ls.BlocksLost(ended=True)
BEGINS = ls.LeaseBegins(30, 100)
STOPPED = ls.StopReads(ls.GIVEN_UP)


def test_after_a_preemption_tokens_count_from_the_chunk_that_restarts_on() -> None:
    """Another chunk says too little."""
    state, _ = run(ls.LeaseState(), FIRST, LOST, FIRST, ls.StepAdvanced(0, 40))
    assert state.phase is PHASE.PREEMPTED and run(state, BEGINS)[0].phase is PHASE.GRANTED
    state, _ = run(state, AGAIN, ls.StepAdvanced(1, 40))
    assert (state.phase, state.computed) == (PHASE.COMPUTING, 40)


# --- any order --------------------------------------------------------------------------------------------------------

before_it = st.one_of(
    st.sampled_from([FIRST, AGAIN, LOST, GIVEN_UP, BEGINS]),
    st.builds(ls.StepAdvanced, st.integers(0, 3), st.integers(0, 100)),
)
under_it = st.one_of(
    st.builds(ls.Asked, st.sampled_from([D1, D2]), st.sampled_from([0b1, 0b11])),
    st.sampled_from([ls.ReadStarted(), ls.ReadEnded(), ls.Renewed(), Tick()]),
    st.builds(ls.Released, st.sampled_from([D1, D2]), st.integers(0, 1), st.just(0b11)),
)


@given(st.booleans(), st.lists(st.tuples(st.one_of(before_it, under_it), st.floats(0, 40)), max_size=60))
def test_freed_once_and_never_under_a_read(leased: bool, script: list[tuple[ls.LeaseEvent, float]]) -> None:
    state, now, freed, reads, over = granted() if leased else ls.LeaseState(), 0.0, 0, 0, False
    for event, seconds in script:
        now += seconds
        if isinstance(event, ls.ReadStarted):
            if state.phase in (PHASE.RELEASED, PHASE.EXPIRED, PHASE.ABANDONED):
                continue  # the transfer thread never starts one then
            reads += 1
        elif isinstance(event, ls.ReadEnded):
            if not reads:
                continue
            reads -= 1
        state, effects = ls.LEASE.step(state, event, now)
        freed += effects.count(ls.Freed(state.reason))
        assert not (freed and reads) and state.reads == reads
        assert not (over and state.phase is PHASE.GRANTED), "a lease that ended came back"
        over = over or state.phase in (PHASE.RELEASED, PHASE.EXPIRED, PHASE.ABANDONED)
    assert freed == (state.phase in (PHASE.RELEASED, PHASE.EXPIRED) and not reads)


@given(st.lists(before_it, max_size=40))
def test_tokens_count_of_the_present_life_only(script: list[ls.LeaseEvent]) -> None:
    state, failed = ls.LeaseState(), 0
    for event in script:
        before = state
        state, effects = ls.LEASE.step(state, event, 1)
        failed += STOPPED in effects
        if state.computed > before.computed:
            assert isinstance(event, ls.StepAdvanced) and event.life == state.life == before.life
            assert before.phase is PHASE.COMPUTING
        if event == LOST or state.life > before.life:
            assert state.computed == 0 or state.phase in (PHASE.GRANTED, PHASE.ABANDONED)
        if before.phase in (PHASE.GRANTED, PHASE.ABANDONED):
            assert (state, effects) == (before, ())
    assert failed <= 1
