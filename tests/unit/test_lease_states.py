"""A prompt and its lease: on P freed exactly once, never under a running own read; on D renewed while needed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side.renew import LeaseRenewal, LeaseRenewals
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.prefill_side import lease as ls
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from tests.support.ranks import Timed

PHASE, K = ls.LeasePhase, ls.LeaseEventKind
STOP, FREE = ls.LeaseEffect.STOP, ls.LeaseEffect.FREE
D1, D2 = b"d1", b"d2"
FIRST, AGAIN, PREEMPTED, ABANDONED, BEGUN = map(
    ls.LeaseEvent, (K.STEP_PLANNED, K.RESTARTED, K.PREEMPTED, K.ABANDONED, K.BEGUN)
)
READ_STARTED, READ_ENDED, RENEWED, TICK = map(ls.LeaseEvent, (K.READ_STARTED, K.READ_ENDED, K.RENEWED, K.TICK))


def run(state: ls.LeaseState, *events: ls.LeaseEvent, now: float = 1) -> tuple[ls.LeaseState, list[ls.LeaseEffect]]:
    effects: list[ls.LeaseEffect] = []
    for event in events:
        state, new = ls.LEASE.step(state, event, now)
        effects += new
    return state, effects


def new() -> ls.LeaseState:
    return ls.LeaseState(Timed(lease_seconds=30, lease_cap_seconds=100))


def granted() -> ls.LeaseState:
    return run(new(), BEGUN, now=0)[0]


def lent() -> ls.LeaseState:
    return ls.lent_at(new().settings, 0, tokens=64)


BOTH = pytest.mark.parametrize("begin", [granted, lent])


def asked(*expected: int, decode_engine: bytes = D1) -> ls.LeaseEvent:
    return ls.LeaseEvent(K.ASKED, decode_engine, expected=ls.rank_set(expected))


def released(rank: int, *expected: int, decode_engine: bytes = D1) -> ls.LeaseEvent:
    return ls.LeaseEvent(K.RELEASED, decode_engine, rank, ls.rank_set(expected))


# --- the lease --------------------------------------------------------------------------------------------------------
@BOTH
@pytest.mark.parametrize(
    ("events", "freed"),
    [
        ((asked(0, 1), released(0, 0, 1), released(0, 0, 1)), []),
        ((asked(0, 1), released(0, 0, 1), released(1, 0, 1), released(1, 0, 1)), [FREE]),
        # The first ask fixes the set, and decode engines do not mix.
        ((asked(0, 1), asked(0), released(0, 0), released(0, 0, 1, decode_engine=D2)), []),
        ((asked(0, 1), released(0, 0, 1, decode_engine=D2), released(1, 0, 1, decode_engine=D2)), [FREE]),
        ((released(0, 0),), [FREE]),  # of a rank that never asked
    ],
)
def test_freed_when_one_consumers_full_set_has_released(
    begin: Callable[[], ls.LeaseState], events: tuple[ls.LeaseEvent, ...], freed: list[ls.LeaseEffect]
) -> None:
    state, effects = run(begin(), *events)
    assert effects == freed and state.phase is (PHASE.RELEASED if freed else begin().phase)


@BOTH
def test_renewal_extends_up_to_the_cap(begin: Callable[[], ls.LeaseState]) -> None:
    state, _ = ls.LEASE.step(begin(), RENEWED, 20)
    assert ls.LEASE.step(state, TICK, 49)[1] == ()
    ended, effects = ls.LEASE.step(state, TICK, 50)
    assert (ended.reason, effects) == ("expired", (FREE,))
    for now in range(0, 100, 10):
        state, _ = ls.LEASE.step(state, RENEWED, now)
    assert ls.LEASE.step(state, TICK, 99.9)[1] == ()
    ended, effects = ls.LEASE.step(state, TICK, 100)
    assert (ended.reason, effects) == ("cap", (FREE,))


@BOTH
def test_what_is_taken_back_ends_after_its_reads(begin: Callable[[], ls.LeaseState]) -> None:
    revoked = ls.LeaseEvent(K.REVOKED)
    state, effects = run(begin(), READ_STARTED, revoked)
    assert effects == [STOP] and state.phase is PHASE.EXPIRED
    assert run(state, READ_ENDED)[1] == [FREE]
    assert run(begin(), revoked, revoked)[1] == [FREE]


# --- before the lease -------------------------------------------------------------------------------------------------
def test_after_a_preemption_tokens_count_from_the_chunk_that_restarts_on() -> None:
    """Another chunk says too little."""
    state, _ = run(new(), FIRST, PREEMPTED, FIRST, ls.LeaseEvent(K.ADVANCED, tokens=40))
    assert state.phase is PHASE.PREEMPTED and run(state, BEGUN)[0].phase is PHASE.GRANTED
    state, _ = run(state, AGAIN, ls.LeaseEvent(K.ADVANCED, life=1, tokens=40))
    assert (state.phase, state.computed) == (PHASE.COMPUTING, 40)


# --- any order --------------------------------------------------------------------------------------------------------
before_it = st.one_of(
    st.sampled_from([FIRST, AGAIN, PREEMPTED, ABANDONED, BEGUN]),
    st.builds(ls.LeaseEvent, st.just(K.ADVANCED), life=st.integers(0, 3), tokens=st.integers(0, 100)),
)
under_it = st.one_of(
    st.sampled_from([asked(*ranks, decode_engine=name) for ranks in ([0], [0, 1]) for name in (D1, D2)]),
    st.sampled_from([READ_STARTED, READ_ENDED, RENEWED, TICK]),
    st.sampled_from([released(rank, 0, 1, decode_engine=name) for rank in (0, 1) for name in (D1, D2)]),
)


@given(
    st.sampled_from([granted, lent, new]),
    st.lists(st.tuples(st.one_of(before_it, under_it), st.floats(0, 40)), max_size=60),
)
def test_freed_once_and_never_under_a_read(
    begin: Callable[[], ls.LeaseState], script: list[tuple[ls.LeaseEvent, float]]
) -> None:
    state, now, freed, reads, over = begin(), 0.0, 0, 0, False
    for event, seconds in script:
        now += seconds
        if event is READ_STARTED:
            if state.phase in (PHASE.RELEASED, PHASE.EXPIRED, PHASE.ABANDONED):
                continue  # the transfer thread never starts one then
            reads += 1
        elif event is READ_ENDED:
            if not reads:
                continue
            reads -= 1
        state, effects = ls.LEASE.step(state, event, now)
        freed += effects.count(FREE)
        assert not (freed and reads) and state.reads == reads
        assert not (over and state.phase in (PHASE.GRANTED, PHASE.LENT)), "a lease that ended came back"
        over = over or state.phase in (PHASE.RELEASED, PHASE.EXPIRED, PHASE.ABANDONED)
    assert freed == (state.phase in (PHASE.RELEASED, PHASE.EXPIRED) and not reads)


@given(st.lists(before_it, max_size=40))
def test_tokens_count_of_the_present_life_only(script: list[ls.LeaseEvent]) -> None:
    state, failed = new(), 0
    for event in script:
        before = state
        state, effects = ls.LEASE.step(state, event, 1)
        failed += STOP in effects
        if state.computed > before.computed:
            assert event.kind is K.ADVANCED and event.life == state.life == before.life
            assert before.phase is PHASE.COMPUTING
        if event == PREEMPTED or state.life > before.life:
            assert state.computed == 0 or state.phase in (PHASE.GRANTED, PHASE.ABANDONED)
        if before.phase in (PHASE.GRANTED, PHASE.ABANDONED):
            assert (state, effects) == (before, ())
    assert failed <= 1


TOKEN = b"t" * 16
PEER = PeerEngine("p", 1, 1, 30.0, (RankAddress(0, 0, "host", 1, b""),))
"""Renewals are due every 10 s."""


class Keeper:
    """``LeaseRenewals`` whose messages are noted, in the place of a transfer thread."""

    def __init__(self) -> None:
        topology = SimpleNamespace(release_ranks=lambda: [0], expected_consumers=lambda rank: (0,))
        geometry = SimpleNamespace(pp_rank=0, tp_rank=0, tp_size=1)
        context: Any = SimpleNamespace(caches=SimpleNamespace(geometry=geometry), topology=lambda peer: topology)
        self.sent: list[str] = []
        link = SimpleNamespace(start_greeting=lambda now: None, send=lambda m: self.sent.append(type(m).__name__))
        links: Any = SimpleNamespace(get=lambda address, now: link)
        self._deadlines = Deadlines[LeaseRenewal](lambda renewal: renewal.due)
        self.leases = LeaseRenewals(context, links, self._deadlines)

    def keep(self, *requests: str, siblings: bool = False, now: float = 0.0) -> None:
        for request in requests:
            self.leases.keep(TOKEN, PEER, request, now, siblings=siblings)

    def tick(self, now: float) -> list[str]:
        """What is sent."""
        for renewal in self._deadlines.due(now):
            self.leases.on_due(renewal, now)
        self.leases.send_renewals(now)
        return self.taken()

    def taken(self) -> list[str]:
        sent, self.sent[:] = self.sent[:], []
        return sent


@pytest.mark.parametrize("siblings", [False, True])
def test_renewals_come_at_their_interval(siblings: bool) -> None:
    keeper = Keeper()
    keeper.keep("a", siblings=siblings)
    sent = [keeper.tick(now) for now in (9.9, 10.0, 10.1, 19.9, 20.0)]
    assert sent == [[], ["Renew"], [], [], ["Renew"]]
    if siblings:
        keeper.leases.release(TOKEN, "a", 20.1)
    keeper.leases.renew_now()
    assert keeper.tick(20.2) == ["Renew"], "after a stand-still"


def test_a_lease_of_another_prompt_is_left_alone() -> None:
    keeper = Keeper()
    keeper.keep("a")
    keeper.leases.disown(TOKEN, "b")
    assert keeper.leases.kept
    keeper.leases.disown(TOKEN, "a")
    assert not keeper.leases.kept and keeper.tick(100.0) == []


CALLS = st.tuples(st.sampled_from(["keep", "keep", "release", "release", "late", "tick"]), st.sampled_from("abc"))


@given(st.lists(st.tuples(CALLS, st.booleans(), st.floats(0, 20)), max_size=60))
def test_one_release_and_no_renewal_after_it(script: list[tuple[tuple[str, str], bool, float]]) -> None:
    keeper, now, wanted, kept = Keeper(), 0.0, set[str](), False
    for (call, name), siblings, seconds in script:
        now += seconds
        match call:
            case "keep":
                keeper.keep(name, siblings=siblings, now=now)
                wanted, kept = wanted | {name}, True
            case "release":
                keeper.leases.release(TOKEN, name, now)
                wanted.discard(name)
            case "late":
                keeper.leases.renew_now()
        sent = keeper.taken() + (keeper.tick(now) if call == "tick" else [])
        assert kept or not sent
        assert not ("Release" in sent and wanted), "somebody still needs it"
        kept = kept and messages.Release.__name__ not in sent
        assert kept == (TOKEN in keeper.leases.kept) and sent.count("Release") <= 1
        if kept:
            assert keeper.leases.kept[TOKEN].requests == wanted
