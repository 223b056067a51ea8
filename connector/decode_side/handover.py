"""The consumer's state machine: one attempt of a hand-over on one rank of D. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``. An attempt reads from several *sources* (P ranks, numbered from 0);
a phase ends when every source has passed it::

    HANDSHAKING ─▶ READY ─▶ MOVING ─▶ COMMITTING ─▶ DONE
         │           │        │            │
         │           │        ▼            │
         │           │     DRAINING        │
         └───────────┴────────┼────────────┘
                              ▼
                           FAILED

Only MOVING can have I/O that writes D's pages. A failure before or after it ends the attempt at once. A failure
during it drains first: D keeps the pages until ``SourceDrained`` has come from every source. Exactly one effect leaves
the machine that is a ``ReportLoad`` or an ``AttemptFailed``, whatever happens (``HANDOVER`` is total). What follows a
failure, ``load_attempts`` decides.

Progress extends the deadline of a phase, up to ``Handover.end``, which is the same for all attempts of a load. DRAINING
has no end in time. It ends with the copies under way, and these are copies of D's own device and system: a channel
that was stopped writes no page, whatever P does, and a read of P's memory ends with an error when P's process ends.
"""

from __future__ import annotations

import enum
import math
from typing import Literal, get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.wire.metrics import FailureKind
from kvferry.connector.wire.states import Tick, TransitionTable, ignore


class HandoverPhase(enum.Enum):
    HANDSHAKING = "handshaking"
    READY = "ready"
    MOVING = "moving"
    COMMITTING = "committing"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


Blame = Literal["", "plane", "peer"]
"""What must not be used again: nothing that is known, the data plane of the link, or this life of P."""


class Reason(msgspec.Struct, frozen=True):
    """Why a hand-over failed: a kind to count, one line for the log, and what another attempt should avoid."""

    kind: FailureKind
    text: str
    blames: Blame = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds that each phase may last without an event that extends or ends it. ``handover``: seconds for all attempts
    of one load together, whatever extends their phases."""

    handshake: float
    transfer: float
    handover: float


class Handover(msgspec.Struct, frozen=True):
    """State. ``pending``: sources that have not passed the phase; ``deadline``: local seconds, as ``now``, for the
    phase; ``end``: for all attempts of the load."""

    phase: HandoverPhase
    sources: int
    pending: frozenset[int]
    deadline: float
    end: float
    timeouts: Timeouts
    reason: Reason | None = None

    @property
    def due(self) -> float:
        """When a Tick changes something."""
        return math.inf if self.phase in (HandoverPhase.DONE, HandoverPhase.FAILED) else self.deadline


# --- events -----------------------------------------------------------------------------------------------------


class SourceReady(msgspec.Struct, frozen=True):
    """The handshake with a source is complete, a data plane is attached."""

    source: int


class SourceGranted(msgspec.Struct, frozen=True):
    source: int


class SourceProgress(msgspec.Struct, frozen=True):
    """Bytes arrived; the deadline starts anew."""


class SourceMoved(msgspec.Struct, frozen=True):
    """All bytes from a source lie in D's pages, and no more bytes of this source will be written."""

    source: int


class SourceCommitted(msgspec.Struct, frozen=True):
    source: int


class SourceDrained(msgspec.Struct, frozen=True):
    """Nothing that was started for a source can write D's pages any more."""

    source: int


class SourceFailed(msgspec.Struct, frozen=True):
    """A source refused the read, its lease expired, its link broke, or P is gone."""

    source: int
    reason: Reason


class CancelLoad(msgspec.Struct, frozen=True):
    """D's engine has cancelled the request."""

    reason: Reason = Reason("cancelled", "the engine gave the request up")


HandoverEvent = (
    SourceReady
    | SourceGranted
    | SourceProgress
    | SourceMoved
    | SourceCommitted
    | SourceDrained
    | SourceFailed
    | CancelLoad
    | Tick
)

# --- effects ----------------------------------------------------------------------------------------------------


class AskSources(msgspec.Struct, frozen=True):
    """Ask every source for its part of the prompt."""


class CommitSources(msgspec.Struct, frozen=True):
    """Ask every source whether its lease still exists, so that the data that were read are valid."""


class StopSources(msgspec.Struct, frozen=True):
    """Stop the reads from all sources. Answer with one ``SourceDrained`` per source where the phase is DRAINING."""


class ReleaseLease(msgspec.Struct, frozen=True):
    """This request does not need its leases any more."""


class AttemptFailed(msgspec.Struct, frozen=True):
    """The attempt has failed, and nothing of it writes D's pages any more. An event of ``load_attempts``."""

    reason: Reason


class ReportLoad(msgspec.Struct, frozen=True):
    """Report the load to the engine, once. ``reason``: why it failed; ``None`` where it succeeded."""

    reason: Reason | None = None

    @property
    def ok(self) -> bool:
        return self.reason is None


HandoverEffect = AskSources | CommitSources | StopSources | AttemptFailed | ReleaseLease | ReportLoad
Outcome = tuple[Handover, tuple[HandoverEffect, ...]]


def begin(sources: int, timeouts: Timeouts, now: float, end: float | None = None) -> Outcome:
    """A new attempt from ``sources`` P ranks; with none there is nothing to fetch and it reports at once. ``end``: that
    of the first attempt; ``None`` where this is the first one."""
    everyone = frozenset(range(sources))
    end = now + timeouts.handover if end is None else end
    deadline = min(now + timeouts.handshake, end)
    state = Handover(HandoverPhase.HANDSHAKING, sources, everyone, deadline, end, timeouts)
    if not sources:
        return _finish(state)
    return state, ()


# --- transitions ------------------------------------------------------------------------------------------------


def _enter(state: Handover, phase: HandoverPhase, now: float) -> Handover:
    everyone = frozenset(range(state.sources))
    return replace(state, phase=phase, pending=everyone, deadline=min(now + state.timeouts.transfer, state.end))


def _finish(state: Handover) -> Outcome:
    # The report to the engine comes first: a request waits for it, and no request waits for P's blocks.
    return replace(state, phase=HandoverPhase.DONE, pending=frozenset()), (ReportLoad(), ReleaseLease())


def _fail(state: Handover, reason: Reason) -> Outcome:
    ended = replace(state, phase=HandoverPhase.FAILED, pending=frozenset(), reason=reason)
    return ended, (StopSources(), AttemptFailed(reason))


def _ready(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    assert isinstance(event, SourceReady)
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending), ()
    return _enter(state, HandoverPhase.READY, now), (AskSources(),)


def _granted(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    return _enter(state, HandoverPhase.MOVING, now), ()


def _moved_before_grant(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    # Data and grant come by different sockets; the first chunk also shows that P has granted the ask.
    return _moved(_enter(state, HandoverPhase.MOVING, now), event, now)


def _progress(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    return replace(state, deadline=min(now + state.timeouts.transfer, state.end)), ()


def _moved(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    assert isinstance(event, SourceMoved)
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending, deadline=min(now + state.timeouts.transfer, state.end)), ()
    return _enter(state, HandoverPhase.COMMITTING, now), (CommitSources(),)


def _committed(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    assert isinstance(event, SourceCommitted)
    pending = state.pending - {event.source}
    return _finish(state) if not pending else (replace(state, pending=pending), ())


def _fail_now(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    assert isinstance(event, SourceFailed | CancelLoad)
    return _fail(state, event.reason)


def _drain(state: Handover, reason: Reason, now: float) -> Outcome:
    # Sources that have moved have no I/O left; each other source must send ``SourceDrained``.
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
    assert state.reason is not None
    return replace(state, phase=HandoverPhase.FAILED, pending=frozenset()), (AttemptFailed(state.reason),)


def _cancel_draining(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    # No other attempt may follow, whatever the failure before was.
    assert isinstance(event, CancelLoad)
    return replace(state, reason=event.reason), ()


_BLAMED: dict[HandoverPhase, Blame] = {HandoverPhase.HANDSHAKING: "peer", HandoverPhase.MOVING: "plane"}


def _deadline(state: Handover, now: float) -> Reason:
    if now >= state.end:
        text = f"no end in {state.timeouts.handover:g} s (handover_timeout_seconds), now {state.phase.value}"
        return Reason("timeout", text)
    text = f"nothing moved on in time while {state.phase.value}"
    return Reason("timeout", text, _BLAMED.get(state.phase, ""))


def _late(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    if now < state.deadline:
        return state, ()
    return _fail(state, _deadline(state, now))


def _late_moving(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    return (state, ()) if now < state.deadline else _drain(state, _deadline(state, now), now)


def _late_draining(state: Handover, event: HandoverEvent, now: float) -> Outcome:
    # Time is no proof that a write has ended: ask again, keep the pages.
    if now < state.deadline:
        return state, ()
    return replace(state, deadline=now + state.timeouts.transfer), (StopSources(),)


_P = HandoverPhase
HANDOVER: TransitionTable[Handover, HandoverEvent, HandoverEffect] = TransitionTable(
    "hand-over",
    HandoverPhase,
    get_args(HandoverEvent),
    (
        ((_P.HANDSHAKING,), (SourceReady,), _ready),
        ((_P.READY,), (SourceGranted, SourceProgress), _granted),
        ((_P.READY,), (SourceMoved,), _moved_before_grant),
        ((_P.MOVING,), (SourceGranted, SourceProgress), _progress),
        ((_P.MOVING,), (SourceMoved,), _moved),
        ((_P.COMMITTING,), (SourceCommitted,), _committed),
        ((_P.DRAINING,), (SourceMoved, SourceDrained), _drained),
        ((_P.DRAINING,), (CancelLoad,), _cancel_draining),
        ((_P.HANDSHAKING, _P.READY, _P.COMMITTING), (SourceFailed, CancelLoad), _fail_now),
        ((_P.MOVING,), (SourceFailed, CancelLoad), _fail_after_draining),
        ((_P.HANDSHAKING, _P.READY, _P.COMMITTING), (Tick,), _late),
        ((_P.MOVING,), (Tick,), _late_moving),
        ((_P.DRAINING,), (Tick,), _late_draining),
        # An event of an earlier phase, or of a hand-over that has ended, comes too late to change anything.
        (HandoverPhase, get_args(HandoverEvent), ignore),
    ),
)
