"""The attempts of one load: what another attempt follows, where, how often, until when; one report, after the last."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side import handover as h
from kvferry.connector.decode_side import load_attempts as a
from kvferry.connector.decode_side.failed_planes import AVOIDED_SECONDS, MAX_PEERS, FailedPlanes, avoided_seconds
from kvferry.connector.wire.metrics import FAILURE_KINDS, FailureKind
from kvferry.connector.wire.states import Tick

END = 100.0


def first(peers: int = 1, planes: int = 1, *, again: bool = True) -> a.LoadAttempts:
    return a.first_attempt(peers, planes, END, again=again)


def failed(kind: FailureKind = "peer_lost", blames: h.Blame = "") -> h.AttemptFailed:
    return h.AttemptFailed(h.Reason(kind, "planted", blames))


def run(state: a.LoadAttempts, *events: Any, now: float = 1) -> tuple[a.LoadAttempts, list[Any]]:
    effects: list[Any] = []
    for event in events:
        state, new = a.LOAD_ATTEMPTS.step(state, event, now)
        effects += new
    return state, effects


def reported(effects: list[Any], event: Any) -> bool:
    return effects == [h.ReportLoad(event.reason), h.ReleaseLease()]


@pytest.mark.parametrize("kind", FAILURE_KINDS)
def test_what_another_attempt_can_mend(kind: FailureKind) -> None:
    state, effects = run(first(), failed(kind))
    if kind in ("peer_lost", "timeout", "data", "checksum"):
        assert (state.phase, effects) == (a.LoadPhase.WAITING, [])
    else:
        assert reported(effects, failed(kind)) and state.phase is a.LoadPhase.ENDED


@pytest.mark.parametrize("kind", FAILURE_KINDS)
def test_another_p_is_asked_at_once(kind: FailureKind) -> None:
    _, effects = run(first(peers=2), failed(kind), Tick())
    final = kind in ("cancelled", "internal")
    assert reported(effects, failed(kind)) if final else effects == [a.BeginAttempt(1)]


def test_a_load_inside_a_step_is_not_tried_again() -> None:
    assert reported(run(first(3, 5, again=False), failed())[1], failed())
    assert reported(run(first(3, 5, again=False), failed(blames="plane"))[1], failed(blames="plane"))


def test_the_same_p_is_tried_once_more_and_not_at_once() -> None:
    state, effects = run(first(), failed(), Tick(), now=10)
    assert not effects and state.begin_at == 10 + a.SAME_PEER_SECONDS
    state, effects = run(state, Tick(), now=state.begin_at)
    assert effects == [a.BeginAttempt(0)] and state.number == 2
    assert reported(run(state, failed(), now=20)[1], failed())


def test_a_p_that_is_gone_is_not_tried_again() -> None:
    gone = failed(blames="peer")
    assert reported(run(first(), gone)[1], gone)
    _, effects = run(first(peers=3), gone, Tick(), gone, Tick(), gone)
    assert effects[:2] == [a.BeginAttempt(1), a.BeginAttempt(2)] and reported(effects[2:], gone)


def test_a_broken_plane_is_followed_by_the_next_one_at_once() -> None:
    broken = failed(blames="plane")
    state, effects = run(first(planes=3), broken, Tick(), broken, Tick())
    assert effects == [a.BeginAttempt(0)] * 2
    state, effects = run(state, broken, Tick(), now=10)
    assert not effects, "no plane is left: as any other failure"
    state, effects = run(state, Tick(), now=20)
    assert effects == [a.BeginAttempt(0)] and reported(run(state, broken, now=21)[1], broken)


def test_all_named_p_are_tried_before_the_first_again() -> None:
    state, effects = first(peers=3), []
    for now in range(10, 90, 10):
        state, new = run(state, failed(), Tick(), now=now)
        effects += new
    assert effects[:5] == [a.BeginAttempt(n) for n in (1, 2, 0, 1, 2)] and reported(effects[5:], failed())


def test_no_attempt_begins_after_the_end() -> None:
    assert reported(run(first(), failed(), now=END - a.SAME_PEER_SECONDS)[1], failed())
    assert reported(run(first(peers=2), failed(), now=END)[1], failed())
    state, _ = run(first(peers=2), failed(), now=END - 1)
    assert reported(run(state, Tick(), now=END)[1], failed()), "the thread stood still"


def test_a_load_that_is_cancelled_between_attempts_is_reported_once() -> None:
    cancel = h.CancelLoad()
    state, effects = run(first(), failed(), cancel, cancel, Tick(), failed(), now=1)
    assert reported(effects, cancel) and state.phase is a.LoadPhase.ENDED
    state, effects = run(first(), cancel, Tick())
    assert not effects, "the attempt ends first"


class Rank:
    """Both tables as ``Consumer`` uses them, with a note of what may write D's pages."""

    def __init__(self, peers: int, planes: int, sources: int, *, inside: bool) -> None:
        self.now, self.sources = 0.0, sources
        self.timeouts = h.Timeouts(handshake=10, transfer=30, handover=END)
        self.loads: a.LoadAttempts | None = None
        self.first = (peers, planes, inside)
        self.state, effects = h.begin(sources, self.timeouts, self.now)
        self.writing: set[int] = set()
        self.begun, self.reports, self.releases = 1, 0, 0
        self.perform(effects)

    def perform(self, effects: tuple[Any, ...]) -> None:
        for effect in effects:
            match effect:
                case h.AttemptFailed():
                    assert not self.writing, "an attempt has ended, and its copies have not"
                    self.load(effect)
                case a.BeginAttempt():
                    assert self.now < END and not self.writing and not self.reports
                    self.begun += 1
                    self.state, new = h.begin(self.sources, self.timeouts, self.now, END)
                    self.perform(new)
                case h.ReportLoad():
                    assert not self.writing
                    self.reports += 1
                case h.ReleaseLease():
                    assert self.reports == 1, "between attempts the lease is kept"
                    self.releases += 1

    def load(self, event: Any) -> None:
        peers, planes, inside = self.first
        self.loads = self.loads or a.first_attempt(peers, planes, END, again=not inside)
        self.loads, effects = a.LOAD_ATTEMPTS.step(self.loads, event, self.now)
        self.perform(effects)

    def give(self, event: Any) -> None:
        moving = self.state.phase in (h.HandoverPhase.READY, h.HandoverPhase.MOVING, h.HandoverPhase.DRAINING)
        if isinstance(event, h.SourceProgress) and self.state.phase is not h.HandoverPhase.DRAINING and moving:
            self.writing = set(self.state.pending)
        if isinstance(event, h.SourceMoved | h.SourceDrained) and moving:
            self.writing.discard(event.source)
        waits = self.loads is not None and self.loads.phase is a.LoadPhase.WAITING
        self.state, effects = h.HANDOVER.step(self.state, event, self.now)
        self.perform(effects)
        if waits and isinstance(event, h.CancelLoad | Tick):
            self.load(event)


SOURCE = st.integers(0, 1)
REASONS = st.builds(
    h.Reason, st.sampled_from(FAILURE_KINDS), st.just("planted"), st.sampled_from(["", "", "plane", "peer"])
)
EVENTS = st.one_of(
    *(st.builds(kind, SOURCE) for kind in (h.SourceReady, h.SourceGranted, h.SourceMoved, h.SourceCommitted)),
    st.builds(h.SourceDrained, SOURCE),
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
        assert rank.reports <= 1 and rank.releases == rank.reports
        assert rank.begun <= (1 if inside else planes - 1 + a.ATTEMPTS_PER_PEER * peers)
    rank.now = max(rank.now, END)
    rank.give(Tick())
    for source in range(sources):  # copies end, whatever P does
        rank.give(h.SourceDrained(source))
    rank.give(Tick())
    assert rank.reports == rank.releases == 1, "the deadline is past, and nothing writes"


# --- planes that broke ------------------------------------------------------------------------------------------


def test_a_plane_that_broke_is_avoided_for_a_time() -> None:
    planes = FailedPlanes(AVOIDED_SECONDS)
    planes.add("p", "tcp", "cut", 10)
    planes.add("p", "shm", "gone", 20)
    assert planes.of("p", 9 + AVOIDED_SECONDS) == {"tcp": "cut", "shm": "gone"} and planes.of("q", 20) == {}
    assert planes.of("p", 10 + AVOIDED_SECONDS) == {"shm": "gone"}, "also before it is forgotten"
    planes.expire(10 + AVOIDED_SECONDS)
    assert planes.of("p", 20) == {"shm": "gone"}
    planes.add("p", "shm", "again", 50)
    planes.expire(20 + AVOIDED_SECONDS)
    assert planes.of("p", 20 + AVOIDED_SECONDS) == {"shm": "again"}
    planes.expire(1e9)
    assert not len(planes)


def test_a_plane_is_avoided_for_all_attempts_of_a_load() -> None:
    assert (avoided_seconds(600), avoided_seconds(5)) == (600, AVOIDED_SECONDS)


def test_the_planes_that_broke_are_bounded() -> None:
    planes = FailedPlanes(AVOIDED_SECONDS)
    for peer in range(MAX_PEERS + 5):
        planes.add(peer, "tcp", "cut", 0)
    assert len(planes) == MAX_PEERS and not planes.of(4, 0) and planes.of(5, 0)
