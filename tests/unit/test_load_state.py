"""A load: exactly one end, no end while something may write, none after the deadline; its attempts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.connector.decode_side.link import Blame, Reason
from kvferry.connector.decode_side.load_state import (
    ATTEMPTS_PER_PEER,
    CANCELLED,
    LOAD,
    SAME_PEER_SECONDS,
    TICK,
    LoadEffect,
    LoadEvent,
    LoadEventKind,
    LoadPhase,
    LoadState,
    first_attempt,
    next_attempt,
)
from kvferry.connector.wire.metrics import FAILURE_KINDS, FailureKind
from tests.support.timed import Timed

PHASE, K, E = LoadPhase, LoadEventKind, LoadEffect
END = 100.0
SETTINGS = Timed(handshake_timeout_seconds=10, transfer_timeout_seconds=30, handover_timeout_seconds=END)
GONE = Reason("denied", "gone")
PROGRESS = LoadEvent(K.PROGRESS)
READY = (LoadEvent(K.READY, 0), LoadEvent(K.READY, 1))
MOVING = (*READY, PROGRESS)
COMMITTING = (*MOVING, LoadEvent(K.MOVED, 0), LoadEvent(K.MOVED, 1))
COMMITTED = (*COMMITTING, LoadEvent(K.COMMITTED, 1), LoadEvent(K.COMMITTED, 0))
FAILED = [E.LEAVE, E.REPORT, E.RECORD, E.RELEASE]
"""The effects of a failure that no other attempt follows."""
NO_WRITES = pytest.mark.parametrize("before", [(), READY, COMMITTING], ids=["handshaking", "ready", "committing"])
GIVEN_UP = pytest.mark.parametrize(
    "event", [LoadEvent(K.FAILED, 1, GONE), replace(CANCELLED, reason=GONE)], ids=["failed", "cancel"]
)


def begun(sources: int = 2, peers: int = 1, planes: int = 1, *, inside: bool = False) -> LoadState:
    return first_attempt(sources, peers, planes, SETTINGS, 0.0, inside=inside)


def run(state: LoadState, *events: LoadEvent, now: float = 1) -> tuple[LoadState, list[LoadEffect]]:
    effects: list[LoadEffect] = []
    for event in events:
        state, new = LOAD.step(state, event, now)
        effects += new
    return state, effects


@GIVEN_UP
def test_during_io_it_drains_first(event: LoadEvent) -> None:
    state, effects = run(run(begun(), *MOVING, LoadEvent(K.MOVED, 0))[0], event)
    assert (state.phase, effects) == (PHASE.DRAINING, [E.STOP])
    state, effects = run(state, LoadEvent(K.FAILED, 1, Reason("denied", "again")), LoadEvent(K.DRAINED, 0))
    assert (state.phase, effects) == (PHASE.DRAINING, [])
    end, effects = run(state, LoadEvent(K.DRAINED, 1))
    assert (end.reason, effects) == (GONE, FAILED)
    mended = replace(state, reason=Reason("peer_lost", "gone"))
    end, effects = run(mended, CANCELLED, LoadEvent(K.DRAINED, 1))
    assert (end.reason, effects) == (CANCELLED.reason, FAILED), "no attempt follows"


@NO_WRITES
def test_every_phase_has_a_deadline(before: tuple[LoadEvent, ...]) -> None:
    state, _ = run(begun(inside=True), *before, now=0)
    limit, name = 30 if before else 10, state.phase.value
    assert LOAD.step(state, TICK, limit - 0.1) == (state, ())
    late, effects = run(state, TICK, now=limit)
    assert late.reason == Reason("timeout", f"nothing moved on in time while {name}", "" if before else "peer")
    assert effects == [E.STOP, *FAILED]
    state, _ = run(replace(state, deadline=END), TICK, now=END)  # whatever extends the phase
    assert state.phase is PHASE.FAILED and state.reason is not None and state.reason.kind == "timeout"
    assert run(begun(), *before, now=95)[0].deadline in (10, 100), "no phase lasts longer"


def test_progress_moves_the_deadline_and_time_is_no_proof_of_drained() -> None:
    state, _ = run(begun(), *MOVING, now=0)
    state, _ = LOAD.step(state, PROGRESS, 20)
    assert LOAD.step(state, TICK, 49)[0].phase is PHASE.MOVING
    for now in (50, 1e9):
        state, effects = LOAD.step(state, TICK, now)
        assert (state.phase, effects) == (PHASE.DRAINING, (E.STOP,))


# --- attempts -----------------------------------------------------------------------------------------------------


def fail(kind: FailureKind = "peer_lost", blames: Blame = "") -> LoadEvent:
    return LoadEvent(K.FAILED, 0, Reason(kind, "planted", blames))


GONE_P, BROKEN = fail(blames="peer"), fail(blames="plane")


def attempts(state: LoadState, *events: LoadEvent, now: float = 1) -> tuple[LoadState, list[int]]:
    """As ``run``; an attempt that is to begin begins. The P engines of these attempts."""
    peers: list[int] = []
    for event in events:
        state, effects = LOAD.step(state, event, now)
        if E.BEGIN in effects:
            peers.append(state.peer)
            state = next_attempt(state, state.sources, now)
    return state, peers


def test_the_same_p_is_tried_once_more_and_not_at_once() -> None:
    state, peers = attempts(begun(1), fail(), TICK, now=10)
    assert not peers and state.deadline == 10 + SAME_PEER_SECONDS
    state, peers = attempts(state, TICK, now=state.deadline)
    assert peers == [0] and state.number == 2 and state.phase is PHASE.HANDSHAKING and state.reason is None
    assert run(state, fail(), now=20)[0].phase is PHASE.FAILED


@pytest.mark.parametrize(("event", "expected"), [(fail(), [1, 2, 0, 1, 2]), (GONE_P, [1, 2])])
def test_all_named_p_are_tried_before_the_first_again(event: LoadEvent, expected: list[int]) -> None:
    state, peers = begun(1, peers=3), list[int]()
    for now in range(10, 90, 10):
        state, new = attempts(state, event, TICK, now=now)
        peers += new
    assert peers == expected and state.phase is PHASE.FAILED


class Rank:
    """The table as ``Loads`` uses it, with a note of what may write D's pages."""

    def __init__(self, peers: int, planes: int, sources: int, *, inside: bool) -> None:
        self.now, self.sources = 0.0, sources
        self.state = begun(sources, peers, planes, inside=inside)
        self.writing: set[int] = set()
        self.begun, self.reports, self.releases = 1, 0, 0

    def give(self, event: LoadEvent) -> None:
        before = self.state
        moving = before.phase in (PHASE.READY, PHASE.MOVING, PHASE.DRAINING)
        if event.kind is K.PROGRESS and before.phase is not PHASE.DRAINING and moving:
            self.writing = set(before.pending)
        if event.kind in (K.MOVED, K.DRAINED) and moving:
            self.writing.discard(event.source)
        self.state, effects = LOAD.step(before, event, self.now)
        for effect in effects:
            match effect:
                case E.LEAVE:
                    assert not self.writing, "an attempt has ended, and its copies have not"
                case E.BEGIN:
                    assert self.now < END and not self.writing and not self.reports
                    self.begun += 1
                    self.state = next_attempt(self.state, self.sources, self.now)
                case E.REPORT:
                    assert not self.writing
                    self.reports += 1
                case E.RELEASE:
                    assert self.reports == 1, "between attempts the lease is kept"
                    self.releases += 1
        if effects and self.state.phase in (PHASE.HANDSHAKING, PHASE.READY, PHASE.MOVING):
            assert self.state.deadline <= self.state.end


SOURCE = st.integers(0, 1)
REASONS = st.builds(
    Reason, st.sampled_from(FAILURE_KINDS), st.just("planted"), st.sampled_from(["", "", "plane", "peer"])
)
EVENTS = st.one_of(
    st.builds(LoadEvent, st.sampled_from([K.READY, K.MOVED, K.COMMITTED, K.DRAINED]), SOURCE),
    st.builds(LoadEvent, st.just(K.FAILED), SOURCE, REASONS),
    st.sampled_from([PROGRESS, CANCELLED, TICK, TICK, TICK]),
)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.sampled_from([False, False, False, True]),
    st.booleans(),
    st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.0, 0.02, 1.0, 25.0])), max_size=80),
)  # fmt: skip
def test_one_report_and_one_release_after_the_last_attempt(
    peers: int, planes: int, sources: int, inside: bool, moving: bool, script: list[tuple[Any, float]]
) -> None:
    rank = Rank(peers, planes, sources, inside=inside)
    for event in (*READY[:sources], PROGRESS) if moving else ():
        rank.give(event)
    for event, seconds in script:
        rank.now += seconds
        rank.give(event)
        assert rank.reports <= 1 and rank.releases <= rank.reports
        assert rank.begun <= (1 if inside else planes - 1 + ATTEMPTS_PER_PEER * peers)
    rank.now = max(rank.now, END)
    for event in (TICK, *(LoadEvent(K.DRAINED, source) for source in range(sources)), TICK):
        rank.give(event)  # copies end, whatever P does
    assert rank.reports == rank.releases == 1, "the deadline is past, and nothing writes"
