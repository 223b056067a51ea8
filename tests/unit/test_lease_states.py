"""The producer's machine: freed exactly once, never under a running own read, nothing committed after the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.prefill_side import lease as ls
from kvferry.connector.wire.states import Tick

D1, D2 = b"d1", b"d2"


def run(state: ls.Lease, *events: ls.LeaseEvent, now: float = 1) -> tuple[ls.Lease, list[ls.LeaseEffect]]:
    effects: list[ls.LeaseEffect] = []
    for event in events:
        state, new = ls.LEASE.step(state, event, now)
        effects += new
    return state, effects


def granted() -> ls.Lease:
    return ls.grant(0, term=30, cap=100)


def released(rank: int, *expected: int, consumer: bytes = D1) -> ls.Released:
    return ls.Released(consumer, rank, frozenset(expected))


def test_freed_when_one_consumers_full_set_has_released() -> None:
    state, effects = run(granted(), ls.Asked(D1, frozenset({0, 1})), released(0, 0, 1), released(0, 0, 1))
    assert not effects
    assert ls.may_commit(state)
    state, effects = run(state, released(1, 0, 1))
    assert effects == [ls.Freed("released")]
    assert not ls.may_commit(state)
    assert run(state, released(1, 0, 1))[1] == []


def test_first_ask_fixes_the_set_and_consumers_do_not_mix() -> None:
    state, _ = run(granted(), ls.Asked(D1, frozenset({0, 1})), ls.Asked(D1, frozenset({0})))
    state, effects = run(state, released(0, 0), released(0, 0, 1, consumer=D2))
    assert not effects
    assert run(state, released(1, 0, 1, consumer=D2))[1] == [ls.Freed("released")]


def test_release_of_a_rank_that_never_asked_counts() -> None:
    assert run(granted(), released(0, 0))[1] == [ls.Freed("released")]


def test_p_s_engine_ends_it() -> None:
    state, effects = run(granted(), ls.Asked(D1, frozenset({0})), ls.Revoked(), ls.Revoked())
    assert effects == [ls.Freed("reset")] and not ls.may_commit(state)
    state, effects = run(granted(), ls.ReadStarted("r"), ls.Revoked())
    assert effects == [ls.StopReads()] and not ls.may_commit(state)
    assert run(state, ls.ReadEnded("r"))[1] == [ls.Freed("reset")]


def test_renewal_extends_up_to_the_cap() -> None:
    state, _ = ls.LEASE.step(granted(), ls.Renewed(), 20)
    assert ls.LEASE.step(state, Tick(), 49)[1] == ()
    assert ls.LEASE.step(state, Tick(), 50)[1] == (ls.Freed("expired"),)
    for now in range(0, 100, 10):
        state, _ = ls.LEASE.step(state, ls.Renewed(), now)
    assert ls.LEASE.step(state, Tick(), 99.9)[1] == ()
    assert ls.LEASE.step(state, Tick(), 100)[1] == (ls.Freed("cap"),)


def test_own_reads_finish_first() -> None:
    state, _ = run(granted(), ls.ReadStarted("a"), ls.ReadStarted("b"))
    assert state.phase is ls.LeasePhase.READING
    state, effects = ls.LEASE.step(state, Tick(), 30)
    assert effects == (ls.StopReads(),)
    assert not ls.may_commit(state)
    state, none = run(state, ls.ReadEnded("a"))
    assert not none
    assert run(state, ls.ReadEnded("b"))[1] == [ls.Freed("expired")]


events = st.one_of(
    st.builds(ls.Asked, st.sampled_from([D1, D2]), st.sampled_from([frozenset({0}), frozenset({0, 1})])),
    st.builds(ls.ReadStarted, st.integers(0, 3)),
    st.builds(ls.ReadEnded, st.integers(0, 3)),
    st.just(ls.Renewed()),
    st.builds(ls.Released, st.sampled_from([D1, D2]), st.integers(0, 1), st.just(frozenset({0, 1}))),
    st.just(Tick()),
)


@given(st.lists(st.tuples(events, st.floats(0, 40)), max_size=60))
def test_freed_once_and_never_under_a_read(script: list[tuple[ls.LeaseEvent, float]]) -> None:
    state, now, freed, reads, ended = granted(), 0.0, 0, set(), False
    for event, seconds in script:
        now += seconds
        if isinstance(event, ls.ReadStarted):
            if not ls.may_commit(state):
                continue  # the transfer thread never starts one then
            reads.add(event.key)
        elif isinstance(event, ls.ReadEnded):
            reads.discard(event.key)
        state, effects = ls.LEASE.step(state, event, now)
        for effect in effects:
            if isinstance(effect, ls.Freed):
                freed += 1
                assert not reads
        ended = ended or not ls.may_commit(state)
        assert not (ended and ls.may_commit(state)), "a lease that ended came back"
    assert freed <= 1
    assert freed == (ended and not reads)
