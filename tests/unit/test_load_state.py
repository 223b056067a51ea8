"""A load: total table, exactly one end, no end while something may write, none after the deadline; its attempts."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.connector.config import Settings
from kvferry.connector.decode_side import load_state as h
from kvferry.connector.decode_side.link import Blame, Reason
from kvferry.connector.decode_side.plane_choice import AVOIDED_SECONDS, MAX_PEERS, FailedPlanes, avoided_seconds
from kvferry.connector.wire.metrics import FAILURE_KINDS, FailureKind
from kvferry.connector.wire.states import Tick

END = 100.0
SETTINGS = Settings(handshake_timeout_seconds=10, transfer_timeout_seconds=30, handover_timeout_seconds=END)
GONE, AGAIN = Reason("denied", "gone"), Reason("denied", "again")
PHASE = h.LoadPhase


def begun(sources: int = 2, peers: int = 1, planes: int = 1, now: float = 0.0, *, inside: bool = False) -> h.LoadState:
    return h.first_attempt(sources, peers, planes, SETTINGS, now, inside=inside)


def run(state: h.LoadState, *events: h.LoadEvent, now: float = 1) -> tuple[h.LoadState, list[h.LoadEffect]]:
    effects: list[h.LoadEffect] = []
    for event in events:
        state, new = h.LOAD.step(state, event, now)
        effects += new
    return state, effects


def failed(reason: Reason) -> list[h.LoadEffect]:
    """The effects of a failure that no other attempt follows."""
    return [h.LeaveAttempt(reason), h.ReportLoad(reason), h.RecordLoad(reason), h.ReleaseLeases()]


READY = (h.SourceReady(0), h.SourceReady(1))
MOVING = (*READY, h.SourceProgress())
COMMITTING = (*MOVING, h.SourceMoved(0), h.SourceMoved(1))
COMMITTED = (*COMMITTING, h.SourceCommitted(1), h.SourceCommitted(0))


def test_the_good_way() -> None:
    state, effects = run(begun(), *COMMITTED)
    assert state.phase is PHASE.DONE
    asked, end = [h.AskSources(), h.CommitSources()], [h.ReportLoad(), h.RecordLoad(), h.ReleaseLeases()]
    assert effects == [*asked, *end]
    state, effects = run(begun(inside=True), *COMMITTED)
    assert (state.phase, effects) == (PHASE.REPORTED, [*asked, h.ReportLoad()]), "the engine is at work"
    assert run(state, h.CancelLoad(), Tick(), Tick())[1] == end[1:]


@pytest.mark.parametrize("before", [(), READY, COMMITTING], ids=["handshaking", "ready", "committing"])
@pytest.mark.parametrize("event", [h.SourceFailed(1, GONE), h.CancelLoad(GONE)], ids=["failed", "cancel"])
def test_before_and_after_io_it_fails_at_once(before: tuple[h.LoadEvent, ...], event: h.LoadEvent) -> None:
    state, effects = run(run(begun(), *before)[0], event)
    assert (state.phase, effects) == (PHASE.FAILED, [h.StopSources(), *failed(GONE)])


@pytest.mark.parametrize("event", [h.SourceFailed(1, GONE), h.CancelLoad(GONE)], ids=["failed", "cancel"])
def test_during_io_it_drains_first(event: h.LoadEvent) -> None:
    state, effects = run(run(begun(), *MOVING, h.SourceMoved(0))[0], event)
    assert (state.phase, effects) == (PHASE.DRAINING, [h.StopSources()])
    state, effects = run(state, h.SourceFailed(1, AGAIN), h.SourceDrained(0))
    assert (state.phase, effects) == (PHASE.DRAINING, [])
    assert run(state, h.SourceDrained(1))[1] == failed(GONE)
    cancelled = h.CancelLoad()
    mended = replace(state, reason=Reason("peer_lost", "gone"))
    assert run(mended, cancelled, h.SourceDrained(1))[1] == failed(cancelled.reason), "no attempt follows"


@pytest.mark.parametrize(
    ("before", "name", "limit"),
    [((), "handshaking", 10), (READY, "ready", 30), (COMMITTING, "committing", 30)],
)
def test_every_phase_has_a_deadline(before: tuple[h.LoadEvent, ...], name: str, limit: float) -> None:
    state, _ = run(begun(inside=True), *before, now=0)
    assert h.LOAD.step(state, Tick(), limit - 0.1) == (state, ())
    blames: Literal["peer", ""] = "peer" if name == "handshaking" else ""
    reason = Reason("timeout", f"nothing moved on in time while {name}", blames)
    assert run(state, Tick(), now=limit)[1] == [h.StopSources(), *failed(reason)]


def test_data_may_overtake_the_grant() -> None:
    moved = (h.SourceMoved(0), h.SourceProgress(), h.SourceMoved(1), h.SourceProgress())
    state, effects = run(begun(), *READY, *moved)
    assert (state.phase, effects) == (PHASE.COMMITTING, [h.AskSources(), h.CommitSources()])


def test_progress_moves_the_deadline_and_time_is_no_proof_of_drained() -> None:
    state, _ = run(begun(), *MOVING, now=0)
    state, _ = h.LOAD.step(state, h.SourceProgress(), 20)
    assert h.LOAD.step(state, Tick(), 49)[0].phase is PHASE.MOVING
    for now in (50, 1e9):
        state, effects = h.LOAD.step(state, Tick(), now)
        assert (state.phase, effects) == (PHASE.DRAINING, (h.StopSources(),))


@pytest.mark.parametrize("before", [(), READY, COMMITTING], ids=["handshaking", "ready", "committing"])
def test_all_phases_together_have_a_deadline(before: tuple[h.LoadEvent, ...]) -> None:
    state = replace(run(begun(), *before, now=0)[0], deadline=END)  # whatever extends the phase
    state, _ = run(state, Tick(), now=END)
    assert state.phase is PHASE.FAILED and state.reason is not None and state.reason.kind == "timeout"
    assert run(begun(), *before, now=95)[0].deadline in (10, 100), "no phase lasts longer"


def test_progress_does_not_extend_the_last_deadline() -> None:
    state, _ = run(begun(), *MOVING, now=0)
    for now in range(0, 100, 20):
        state, effects = run(state, h.SourceProgress(), Tick(), now=now)
        assert (state.phase, effects) == (PHASE.MOVING, [])
    state, effects = run(state, Tick(), now=100)
    assert (state.phase, effects) == (PHASE.DRAINING, [h.StopSources()])
    reason = Reason("timeout", "no end in 100 s (handover_timeout_seconds), now moving")
    assert run(state, h.SourceDrained(0), h.SourceDrained(1), now=101)[1] == failed(reason)


# --- attempts -----------------------------------------------------------------------------------------------------


def fail(kind: FailureKind = "peer_lost", blames: Blame = "") -> h.SourceFailed:
    return h.SourceFailed(0, Reason(kind, "planted", blames))


def attempts(state: h.LoadState, *events: h.LoadEvent, now: float = 1) -> tuple[h.LoadState, list[int]]:
    """As ``run``; an attempt that is to begin begins. The P engines of these attempts."""
    peers: list[int] = []
    for event in events:
        state, effects = h.LOAD.step(state, event, now)
        if h.BeginAttempt() in effects:
            peers.append(state.peer)
            state = h.next_attempt(state, state.sources, now)
    return state, peers


MENDED = ("peer_lost", "timeout", "data", "checksum")


@pytest.mark.parametrize("kind", FAILURE_KINDS)
def test_what_another_attempt_can_mend(kind: FailureKind) -> None:
    state, effects = run(begun(1), fail(kind))
    assert state.phase is (PHASE.WAITING if kind in MENDED else PHASE.FAILED)
    assert (h.ReleaseLeases() in effects) == (kind not in MENDED)
    state, peers = attempts(begun(1, peers=2), fail(kind), Tick())
    assert peers == ([] if kind in ("cancelled", "internal") else [1]), "another P is asked at once"


def test_a_load_inside_a_step_is_not_tried_again() -> None:
    for event in (fail(), fail(blames="plane")):
        assert run(begun(1, 3, 5, inside=True), event)[0].phase is PHASE.FAILED


def test_the_same_p_is_tried_once_more_and_not_at_once() -> None:
    state, peers = attempts(begun(1), fail(), Tick(), now=10)
    assert not peers and state.deadline == 10 + h.SAME_PEER_SECONDS
    state, peers = attempts(state, Tick(), now=state.deadline)
    assert peers == [0] and state.number == 2 and state.phase is PHASE.HANDSHAKING
    assert run(state, fail(), now=20)[0].phase is PHASE.FAILED


def test_a_p_that_is_gone_is_not_tried_again() -> None:
    gone = fail(blames="peer")
    assert run(begun(1), gone)[0].phase is PHASE.FAILED
    state, peers = attempts(begun(1, peers=3), gone, Tick(), gone, Tick(), gone)
    assert peers == [1, 2] and state.phase is PHASE.FAILED


def test_a_broken_plane_is_followed_by_the_next_one_at_once() -> None:
    broken = fail(blames="plane")
    state, peers = attempts(begun(1, planes=3), broken, Tick(), broken, Tick())
    assert peers == [0, 0]
    state, peers = attempts(state, broken, Tick(), now=10)
    assert not peers, "no plane is left: as any other failure"
    state, peers = attempts(state, Tick(), now=20)
    assert peers == [0] and run(state, broken, now=21)[0].phase is PHASE.FAILED


def test_all_named_p_are_tried_before_the_first_again() -> None:
    state, peers = begun(1, peers=3), list[int]()
    for now in range(10, 90, 10):
        state, new = attempts(state, fail(), Tick(), now=now)
        peers += new
    assert peers == [1, 2, 0, 1, 2] and state.phase is PHASE.FAILED


def test_no_attempt_begins_after_the_end() -> None:
    assert run(begun(1), fail(), now=END - h.SAME_PEER_SECONDS)[0].phase is PHASE.FAILED
    assert run(begun(1, peers=2), fail(), now=END)[0].phase is PHASE.FAILED
    state, _ = run(begun(1, peers=2), fail(), now=END - 1)
    assert run(state, Tick(), now=END)[0].phase is PHASE.FAILED, "the thread stood still"


def test_a_load_that_is_cancelled_between_attempts_is_reported_once() -> None:
    cancel = h.CancelLoad()
    state, effects = run(begun(1), fail(), cancel, cancel, Tick(), fail(), now=1)
    assert effects[1:] == [h.LeaveAttempt(fail().reason), *failed(cancel.reason)[1:]] and state.phase is PHASE.FAILED


class Rank:
    """The table as ``Loads`` uses it, with a note of what may write D's pages."""

    def __init__(self, peers: int, planes: int, sources: int, *, inside: bool) -> None:
        self.now, self.sources = 0.0, sources
        self.state = begun(sources, peers, planes, inside=inside)
        self.writing: set[int] = set()
        self.begun, self.reports, self.releases = 1, 0, 0

    def give(self, event: Any) -> None:
        before = self.state
        moving = before.phase in (PHASE.READY, PHASE.MOVING, PHASE.DRAINING)
        if isinstance(event, h.SourceProgress) and before.phase is not PHASE.DRAINING and moving:
            self.writing = set(before.pending)
        if isinstance(event, h.SourceMoved | h.SourceDrained) and moving:
            self.writing.discard(event.source)
        self.state, effects = h.LOAD.step(before, event, self.now)
        for effect in effects:
            match effect:
                case h.LeaveAttempt():
                    assert not self.writing, "an attempt has ended, and its copies have not"
                case h.BeginAttempt():
                    assert self.now < END and not self.writing and not self.reports
                    self.begun += 1
                    self.state = h.next_attempt(self.state, self.sources, self.now)
                case h.ReportLoad():
                    assert not self.writing
                    self.reports += 1
                case h.ReleaseLeases():
                    assert self.reports == 1, "between attempts the lease is kept"
                    self.releases += 1
        if effects and self.state.phase in (PHASE.HANDSHAKING, PHASE.READY, PHASE.MOVING):
            assert self.state.deadline <= self.state.end


SOURCE = st.integers(0, 1)
REASONS = st.builds(
    Reason, st.sampled_from(FAILURE_KINDS), st.just("planted"), st.sampled_from(["", "", "plane", "peer"])
)
EVENTS = st.one_of(
    *(st.builds(kind, SOURCE) for kind in (h.SourceReady, h.SourceMoved, h.SourceCommitted, h.SourceDrained)),
    st.builds(h.SourceFailed, SOURCE, REASONS),
    st.just(h.SourceProgress()),
    st.sampled_from([h.CancelLoad(), Tick(), Tick(), Tick()]),
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
    for source in range(sources if moving else 0):
        rank.give(h.SourceReady(source))
    if moving:
        rank.give(h.SourceProgress())
    for event, seconds in script:
        rank.now += seconds
        rank.give(event)
        assert rank.reports <= 1 and rank.releases <= rank.reports
        assert rank.begun <= (1 if inside else planes - 1 + h.ATTEMPTS_PER_PEER * peers)
    rank.now = max(rank.now, END)
    rank.give(Tick())
    for source in range(sources):  # copies end, whatever P does
        rank.give(h.SourceDrained(source))
    rank.give(Tick())
    assert rank.reports == rank.releases == 1, "the deadline is past, and nothing writes"


# --- planes that broke --------------------------------------------------------------------------------------------


def test_a_plane_that_broke_is_avoided_for_a_time() -> None:
    planes = FailedPlanes(AVOIDED_SECONDS)
    planes.add("p", "tcp", "cut", 10)
    planes.add("p", "shm", "gone", 20)
    assert planes.of("p", 9 + AVOIDED_SECONDS) == {"tcp": "cut", "shm": "gone"} and planes.of("q", 20) == {}
    assert planes.of("p", 10 + AVOIDED_SECONDS) == {"shm": "gone"}
    planes.add("p", "shm", "again", 50)
    assert planes.of("p", 20 + AVOIDED_SECONDS) == {"shm": "again"}
    assert (avoided_seconds(600), avoided_seconds(5)) == (600, AVOIDED_SECONDS), "for all attempts of a load"


def test_the_planes_that_broke_are_bounded() -> None:
    planes = FailedPlanes(AVOIDED_SECONDS)
    for peer in range(MAX_PEERS + 5):
        planes.add(peer, "tcp", "cut", 0)
    assert len(planes) == MAX_PEERS and not planes.of(4, 0) and planes.of(5, 0)
