"""A load and its reads: one end, none while something may write or after the deadline; attempts; each reported once."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, get_args

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
from kvferry.connector.decode_side.read import PROGRESS, Fence, PageWrite, ReadPhase, SourceRead
from kvferry.connector.geometry.read_plan import PlannedSpan
from kvferry.connector.geometry.spans import Span
from kvferry.connector.geometry.token_sharding import ALL_TOKENS
from kvferry.connector.step_loads.step_loads import StepLoad, StepLoads
from kvferry.connector.wire.metrics import FAILURE_KINDS, FailureKind
from kvferry.connector.wire.step_plan import LOST, LeaseGrant, Load, LoadEnd, PeerEngine, RankAddress
from kvferry.transport.channels import Copy, RecvChannel
from tests.support.ranks import Timed

PHASE, K, E = LoadPhase, LoadEventKind, LoadEffect
END = 100.0
SETTINGS = Timed(handshake_timeout_seconds=10, transfer_timeout_seconds=30, handover_timeout_seconds=END)
GONE = Reason("denied", "gone")
MOVED_ON = LoadEvent(K.PROGRESS)
READY = (LoadEvent(K.READY, 0), LoadEvent(K.READY, 1))
MOVING = (*READY, MOVED_ON)
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
    state, _ = LOAD.step(state, MOVED_ON, 20)
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
    st.sampled_from([MOVED_ON, CANCELLED, TICK, TICK, TICK]),
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
    for event in (*READY[:sources], MOVED_ON) if moving else ():
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


P = PeerEngine("p", 1, 1, 30.0, ())


def load(request_id: str, *, now: bool = False) -> Load:
    return Load(request_id, b"t" * 16, P, (), (), now=now)


NAMES = "ab"
WHAT = ["post", "post", "lease", "freed", "early", "early", "join", "ended", "ended", "earlier", "take", "thread"]
act = st.tuples(st.sampled_from(WHAT), st.sampled_from(NAMES), st.booleans())


@given(st.lists(act, min_size=10, max_size=60))
def test_whatever_happens_every_id_is_reported_once(script: list[tuple[str, str, bool]]) -> None:
    """At its end, or early, and then the end of the load is the step's that joins it."""
    rank = StepLoads()
    owed: dict[str, StepLoad] = {}  # posted, and not reported
    early: dict[str, StepLoad] = {}  # reported before their end, and not joined
    told: dict[str, LoadEnd | None] = {}  # reported, and not taken; with its end, if it has one
    leased: set[str] = set()

    def take() -> None:
        results = rank.take_results()
        assert results.received == told.keys()
        assert results.ends == {name: end for name, end in told.items() if end is not None}
        assert results.failed == {name for name, end in results.ends.items() if end.failed}
        told.clear()
        assert results.sent <= leased
        leased.difference_update(results.sent)

    def thread_ends() -> None:
        rank.end_all(LOST)
        told.update(dict.fromkeys(owed, LOST))
        owed.clear()

    for what, name, flag in script:
        end = LoadEnd() if flag else LOST
        if what == "post" and not (name in owed or name in early or name in told):
            (owed[name],) = rank.post([load(name)])
        elif what == "early" and name in owed:
            owed[name].begun(ends_at=-math.inf if flag else math.inf)
            rank.report_early(0.0, foresees=False)
            if flag:
                early[name], told[name] = owed.pop(name), None
        elif what == "join" and name in early and name not in told:
            assert rank.join([load(name)]) == [early.pop(name)]
        elif what == "ended" and (one := owed.pop(name, None) or early.get(name)) is not None:
            one.ended(end)
            rank.load_ended(one)
            if name not in early:
                told[name] = end
        elif what == "earlier":
            (one,) = StepLoads().post([load(name, now=flag)])
            one.ended(LoadEnd())
            rank.load_ended(one)
        elif what == "lease" and name not in leased:
            leased.add(name)
            rank.post((), [LeaseGrant(name, b"", 0, ())])
        elif what == "freed":
            rank.lease_freed(name)
        elif what == "thread":
            thread_ends()
        elif what == "take":
            take()
    thread_ends()
    take()
    assert not leased


KIND = LoadEventKind
PEER_LOST = Reason("peer_lost", "gone")
ADDRESS = RankAddress(0, 0, "host", 1, b"")


class Read:
    """A read, and how its copies begin and end."""

    def __init__(self, left: int = 0, fence: Fence = "pushed") -> None:
        anything: Any = SimpleNamespace()
        self.it = SourceRead(1, 7, anything, anything, ADDRESS, [(0.0, ReadPhase.WAITING)])
        self.it.tags = set(range(left))
        self.it.asked(fence, 0.0)

    def begin(self) -> LoadEvent:
        self.it.tags -= {max(self.it.tags, default=0)}
        return self.it.write_began(PageWrite(self.it, Copy(done=True), 1), 0.0)

    def end(self, failure: Reason | None = None) -> LoadEvent | None:
        return self.it.write_ended(next(iter(self.it.writes)), failure, 0.0)


def landed(fence: Fence = "pushed", *, granted: bool = True) -> Read:
    read = Read(1 if fence == "pushed" else 0, fence)
    if granted:
        assert read.it.take_grant(0.0) == PROGRESS
    read.begin()
    assert read.end() == LoadEvent(KIND.MOVED, 7) and read.it.landed
    return read


@pytest.mark.parametrize("fence", ["asked", "posted"])
def test_a_pulled_read_is_committed_by_its_fence(fence: Fence) -> None:
    read = landed(fence)
    assert read.it.answered(True, 0.0) is None, "not before it is asked"
    assert read.it.commit(0.0) is None
    failed = read.it.answered(False, 0.0)
    assert failed is not None and failed.kind is KIND.FAILED and failed.reason.kind == "expired"
    assert read.it.answered(True, 0.0) == LoadEvent(KIND.COMMITTED, 7)
    assert read.it.answered(True, 0.0) is None


def test_nothing_to_read() -> None:
    read = Read().it
    read.link = SimpleNamespace(slot_bytes=1)  # type: ignore[assignment]
    read.active_load = SimpleNamespace(load=None)  # type: ignore[assignment]
    assert (read.plan((), 0.0), read.commit(0.0)) == (LoadEvent(KIND.MOVED, 7), LoadEvent(KIND.COMMITTED, 7))


MIB = 1 << 20
UNBOUNDED = RecvChannel.few_bytes


@pytest.mark.parametrize(
    ("few", "slot", "step", "wanted"),
    [
        (UNBOUNDED, 8 * MIB, 0, 8 * MIB),  # a prompt that is computed, in whole slots
        (4 * MIB, 8 * MIB, 0, 4 * MIB),
        (4 * MIB, MIB, 0, MIB),
        (UNBOUNDED, 64 * MIB, 2048, 32 * MIB),  # an eighth of the layers of a step
        (UNBOUNDED, 8 * MIB, 2048, 8 * MIB),
        (4 * MIB, 16 * MIB, 2048, 8 * MIB),  # which takes several flows
        (4 * MIB, 16 * MIB, 512, 4 * MIB),
        (4 * MIB, 16 * MIB, 128, 2 * MIB),  # no longer than until an eighth of the layers is computed
    ],
)
def test_the_messages_that_d_asks_for(few: int, slot: int, step: int, wanted: int) -> None:
    region = SimpleNamespace(tile_tokens=1, content_bytes=512, shard=ALL_TOKENS)
    channel = SimpleNamespace(pulls=False, few_bytes=few)
    read = Read().it
    read.link = SimpleNamespace(  # type: ignore[assignment]
        slot_bytes=slot, channel=channel, theirs=SimpleNamespace(regions=(region,))
    )
    read.active_load = SimpleNamespace(load=SimpleNamespace(step_tokens=step, found=0))  # type: ignore[assignment]
    whole = PlannedSpan(Span(0, 0, 32, 0, 8, 0, 4096), 0, 0, 0)
    assert read.plan((whole,), 0.0) is None
    assert read.chunk_bytes == wanted and len(read.planned) == (4096 // step if step else 1)


def test_stopped_while_copies_write() -> None:
    read = Read(2)
    read.begin()
    read.begin()
    assert read.it.stop(0.0, 3.0) and not read.it.stop(0.0, 3.0)
    assert read.end() is None, "one copy still writes"
    assert read.end(PEER_LOST) == LoadEvent(KIND.DRAINED, 7)
    assert read.it.failed("data", "late") is None
    read = Read(2)
    assert read.it.stop(1.0, 3.0) and read.it.due == 4.0, "messages of it can come"
    read.it.tags.clear()
    assert read.it.due == float("inf")


CALLS = st.sampled_from(["grant", "begin", "end", "fail", "commit", "answer", "stop"])


@given(st.sampled_from(get_args(Fence)), st.integers(0, 3), st.lists(CALLS, max_size=30))
def test_nothing_is_drained_or_landed_while_a_copy_writes(fence: Fence, left: int, calls: list[str]) -> None:
    read, committed, stopped = Read(left, fence), 0, False
    for call in calls:
        event: LoadEvent | None = None
        match call:
            case "grant" if read.it.awaits_grant:
                event = read.it.take_grant(0.0)
            case "begin" if not (read.it.stopped or read.it.landed):
                event = read.begin()
            case "end" | "fail" if read.it.writes:
                event = read.end(PEER_LOST if call == "fail" else None)
            case "commit" if read.it.phase is ReadPhase.LANDED:
                event = read.it.commit(0.0)
            case "answer":
                event = read.it.answered(True, 0.0)
            case "stop":
                read.it.stop(0.0, 1.0)
        if event is not None and event.kind in (KIND.MOVED, KIND.DRAINED, KIND.COMMITTED):
            assert not read.it.writes
        committed += event is not None and event.kind is KIND.COMMITTED
        assert committed <= 1 and (committed == 1) == (read.it.phase is ReadPhase.COMMITTED)
        assert read.it.stopped or not stopped
        stopped = read.it.stopped


def test_a_burst_says_nothing_of_the_end() -> None:
    """Messages come many at once: what is left is foreseen once half of the last step's are there."""
    read = Read(8).it
    read.boxes, read.last_step, read.last_step_at = [SimpleNamespace()] * 10, 2, 1.0  # type: ignore[list-item]
    assert read.take_grant(0.0) == PROGRESS
    left = []
    for _ in range(6):
        read.tags.pop()
        left.append(read.seconds_left(4.0))
    assert left == [math.inf] * 3 + [3.0 * 4 / 3, 3.0 * 3 / 4, 3.0 * 2 / 5]
