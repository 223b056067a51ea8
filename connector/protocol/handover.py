"""The consumer's state machine: one hand-over on one rank of D. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``. A hand-over reads from several *sources* (P ranks, numbered from 0);
a phase ends when every source has passed it::

    HANDSHAKING ─▶ READY ─▶ MOVING ─▶ COMMITTING ─▶ DONE
         │           │        │            │
         │           │        ▼            │
         │           │     DRAINING        │
         └───────────┴────────┼────────────┘
                              ▼
                           FAILED

Only MOVING can have I/O that writes D's pages. A failure before or after it ends the hand-over at once; a failure
during it drains first: the pages stay with us until every source has said that nothing can write them any more.
Exactly one ``ReportLoad`` leaves the machine, whatever happens (``TRANSITIONS`` is total over live phases).
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from kvferry.connector.protocol.metrics import FailureKind


class HandoverPhase(enum.Enum):
    HANDSHAKING = "handshaking"
    READY = "ready"
    MOVING = "moving"
    COMMITTING = "committing"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


class Reason(msgspec.Struct, frozen=True):
    """Why a hand-over failed: a kind to count, and one line for the log."""

    kind: FailureKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


LIVE = (
    HandoverPhase.HANDSHAKING,
    HandoverPhase.READY,
    HandoverPhase.MOVING,
    HandoverPhase.COMMITTING,
    HandoverPhase.DRAINING,
)


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds a phase may last without an event that moves it on."""

    handshake: float
    transfer: float


class Handover(msgspec.Struct, frozen=True):
    """State. ``pending``: sources that have not passed the phase; ``deadline``: local seconds, as ``now``."""

    phase: HandoverPhase
    sources: int
    pending: frozenset[int]
    deadline: float
    timeouts: Timeouts
    reason: Reason | None = None


# --- events -----------------------------------------------------------------------------------------------------


class SourceReady(msgspec.Struct, frozen=True):
    """The handshake with a source is complete, a data plane is attached."""

    source: int


class SourceGranted(msgspec.Struct, frozen=True):
    source: int


class SourceProgress(msgspec.Struct, frozen=True):
    """Bytes arrived; the deadline starts anew."""


class SourceMoved(msgspec.Struct, frozen=True):
    """All that a source owed lies in D's pages, and nothing more will be written from it."""

    source: int


class SourceCommitted(msgspec.Struct, frozen=True):
    source: int


class SourceDrained(msgspec.Struct, frozen=True):
    """Nothing that was started for a source can write D's pages any more."""

    source: int


class SourceFailed(msgspec.Struct, frozen=True):
    """A source refused, expired, broke or went away."""

    source: int
    reason: Reason


class CancelLoad(msgspec.Struct, frozen=True):
    """D's engine gave the request up."""

    reason: Reason = Reason("cancelled", "the engine gave the request up")


class HandoverTick(msgspec.Struct, frozen=True):
    """Time passed."""


HandoverEvent = (
    SourceReady
    | SourceGranted
    | SourceProgress
    | SourceMoved
    | SourceCommitted
    | SourceDrained
    | SourceFailed
    | CancelLoad
    | HandoverTick
)

# --- effects ----------------------------------------------------------------------------------------------------


class AskSources(msgspec.Struct, frozen=True):
    """Ask every source for its part."""


class CommitSources(msgspec.Struct, frozen=True):
    """Ask every source whether what was read is still true."""


class StopSources(msgspec.Struct, frozen=True):
    """End what was started at every source; answer with ``SourceDrained`` per source where the phase is DRAINING."""


class ReleaseLease(msgspec.Struct, frozen=True):
    """This request needs the lease no longer."""


class ReportLoad(msgspec.Struct, frozen=True):
    """Tell the engine, once. ``reason`` says why it failed, ``None`` where it did not."""

    reason: Reason | None = None

    @property
    def ok(self) -> bool:
        return self.reason is None


HandoverEffect = AskSources | CommitSources | StopSources | ReleaseLease | ReportLoad
Outcome = tuple[Handover, tuple[HandoverEffect, ...]]


def begin(sources: int, timeouts: Timeouts, now: float) -> Outcome:
    """A new hand-over from ``sources`` P ranks; with none there is nothing to fetch and it reports at once."""
    everyone = frozenset(range(sources))
    state = Handover(HandoverPhase.HANDSHAKING, sources, everyone, now + timeouts.handshake, timeouts)
    if not sources:
        return _finish(state)
    return state, ()


def step(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    """One event. Late events of a hand-over that has ended change nothing."""
    if state.phase not in LIVE:
        return state, ()
    return TRANSITIONS[state.phase, type(event)](state, event, now)


# --- transitions ------------------------------------------------------------------------------------------------


def _enter(state: Handover, phase: HandoverPhase, now: float) -> Handover:
    everyone = frozenset(range(state.sources))
    return replace(state, phase=phase, pending=everyone, deadline=now + state.timeouts.transfer)


def _finish(state: Handover) -> Outcome:
    # The engine first: its request waits, P's blocks do not.
    return replace(state, phase=HandoverPhase.DONE, pending=frozenset()), (ReportLoad(), ReleaseLease())


def _fail(state: Handover, reason: Reason) -> Outcome:
    ended = replace(state, phase=HandoverPhase.FAILED, pending=frozenset(), reason=reason)
    return ended, (StopSources(), ReleaseLease(), ReportLoad(reason))


def _ignore(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    return state, ()


def _ready(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    assert isinstance(event, SourceReady)
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending), ()
    return _enter(state, HandoverPhase.READY, now), (AskSources(),)


def _granted(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    return _enter(state, HandoverPhase.MOVING, now), ()


def _moved_before_grant(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    # Data and grant come by different sockets; the first chunk is as good as the grant.
    return _moved(_enter(state, HandoverPhase.MOVING, now), event, now)


def _progress(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    return replace(state, deadline=now + state.timeouts.transfer), ()


def _moved(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    assert isinstance(event, SourceMoved)
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending, deadline=now + state.timeouts.transfer), ()
    return _enter(state, HandoverPhase.COMMITTING, now), (CommitSources(),)


def _committed(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    assert isinstance(event, SourceCommitted)
    pending = state.pending - {event.source}
    return _finish(state) if not pending else (replace(state, pending=pending), ())


def _fail_now(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    assert isinstance(event, SourceFailed | CancelLoad)
    return _fail(state, event.reason)


def _drain(state: Handover, reason: Reason, now: float) -> Outcome:
    # Sources that have moved have no I/O left; the others must say so.
    return replace(state, phase=HandoverPhase.DRAINING, deadline=now + state.timeouts.transfer, reason=reason), (
        StopSources(),
    )


def _fail_after_draining(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    assert isinstance(event, SourceFailed | CancelLoad)
    return _drain(state, event.reason, now)


def _drained(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    assert isinstance(event, SourceDrained | SourceMoved)
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending), ()
    ended = replace(state, phase=HandoverPhase.FAILED, pending=frozenset())
    return ended, (ReleaseLease(), ReportLoad(state.reason))


def _deadline(state: Handover) -> Reason:
    return Reason("timeout", f"nothing moved on in time while {state.phase.value}")


def _late(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    if now < state.deadline:
        return state, ()
    return _fail(state, _deadline(state))


def _late_moving(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    return (state, ()) if now < state.deadline else _drain(state, _deadline(state), now)


def _late_draining(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    # Time is no proof that a write has ended: ask again, keep the pages.
    if now < state.deadline:
        return state, ()
    return replace(state, deadline=now + state.timeouts.transfer), (StopSources(),)


Transition = Callable[[Handover, HandoverEvent, float], Outcome]

TRANSITIONS: dict[tuple[HandoverPhase, type], Transition] = {
    (HandoverPhase.HANDSHAKING, SourceReady): _ready,
    (HandoverPhase.HANDSHAKING, SourceGranted): _ignore,
    (HandoverPhase.HANDSHAKING, SourceProgress): _ignore,
    (HandoverPhase.HANDSHAKING, SourceMoved): _ignore,
    (HandoverPhase.HANDSHAKING, SourceCommitted): _ignore,
    (HandoverPhase.HANDSHAKING, SourceDrained): _ignore,
    (HandoverPhase.HANDSHAKING, SourceFailed): _fail_now,
    (HandoverPhase.HANDSHAKING, CancelLoad): _fail_now,
    (HandoverPhase.HANDSHAKING, HandoverTick): _late,
    (HandoverPhase.READY, SourceReady): _ignore,
    (HandoverPhase.READY, SourceGranted): _granted,
    (HandoverPhase.READY, SourceProgress): _granted,
    (HandoverPhase.READY, SourceMoved): _moved_before_grant,
    (HandoverPhase.READY, SourceCommitted): _ignore,
    (HandoverPhase.READY, SourceDrained): _ignore,
    (HandoverPhase.READY, SourceFailed): _fail_now,
    (HandoverPhase.READY, CancelLoad): _fail_now,
    (HandoverPhase.READY, HandoverTick): _late,
    (HandoverPhase.MOVING, SourceReady): _ignore,
    (HandoverPhase.MOVING, SourceGranted): _progress,
    (HandoverPhase.MOVING, SourceProgress): _progress,
    (HandoverPhase.MOVING, SourceMoved): _moved,
    (HandoverPhase.MOVING, SourceCommitted): _ignore,
    (HandoverPhase.MOVING, SourceDrained): _ignore,
    (HandoverPhase.MOVING, SourceFailed): _fail_after_draining,
    (HandoverPhase.MOVING, CancelLoad): _fail_after_draining,
    (HandoverPhase.MOVING, HandoverTick): _late_moving,
    (HandoverPhase.COMMITTING, SourceReady): _ignore,
    (HandoverPhase.COMMITTING, SourceGranted): _ignore,
    (HandoverPhase.COMMITTING, SourceProgress): _ignore,
    (HandoverPhase.COMMITTING, SourceMoved): _ignore,
    (HandoverPhase.COMMITTING, SourceCommitted): _committed,
    (HandoverPhase.COMMITTING, SourceDrained): _ignore,
    (HandoverPhase.COMMITTING, SourceFailed): _fail_now,
    (HandoverPhase.COMMITTING, CancelLoad): _fail_now,
    (HandoverPhase.COMMITTING, HandoverTick): _late,
    (HandoverPhase.DRAINING, SourceReady): _ignore,
    (HandoverPhase.DRAINING, SourceGranted): _ignore,
    (HandoverPhase.DRAINING, SourceProgress): _ignore,
    (HandoverPhase.DRAINING, SourceMoved): _drained,
    (HandoverPhase.DRAINING, SourceCommitted): _ignore,
    (HandoverPhase.DRAINING, SourceDrained): _drained,
    (HandoverPhase.DRAINING, SourceFailed): _ignore,
    (HandoverPhase.DRAINING, CancelLoad): _ignore,
    (HandoverPhase.DRAINING, HandoverTick): _late_draining,
}
