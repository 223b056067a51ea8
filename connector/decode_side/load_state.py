"""The life of a load on one rank of D: one hand-over, in one or more attempts. Pure: no I/O, no clock.

An attempt reads from several *sources* (P ranks, numbered from 0); a phase ends when every source has passed it::

    HANDSHAKING ─▶ READY ─▶ MOVING ─▶ COMMITTING ─▶ [REPORTED ─▶] DONE
      ▲  │           │        │            │
      │  │           │        ▼            │
      │  │           │     DRAINING        │
      │  └───────────┴────────┼────────────┘
      │                       ▼
      └── WAITING ◀── the attempt has failed ──▶ FAILED

Only MOVING can have I/O that writes D's pages. A failure before or after it ends the attempt at once. A failure
during it drains first: D keeps the pages until ``SourceDrained`` has come from every source. In WAITING nothing of an
attempt is left. Exactly one ``ReportLoad`` leaves the machine, whatever happens (``LOAD`` is total).

Progress extends the deadline of a phase, up to ``LoadState.end``, which is the same for all attempts. DRAINING has no
end in time. It ends with the copies under way, and these are copies of D's own device and system: a channel that was
stopped writes no page, whatever P does, and a read of P's memory ends with an error when P's process ends.
"""

from __future__ import annotations

import enum
import math
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.link import Blame, Reason
from kvferry.connector.wire.metrics import FailureKind
from kvferry.connector.wire.states import Tick, TransitionTable, ignore

ATTEMPTS_PER_PEER = 2
"""Attempts at one P engine, beside those that only change the data plane: its connection may have broken."""
SAME_PEER_SECONDS = 1.0
"""Seconds between two attempts at one P engine; none before the next data plane, or before another P."""
MENDED_HERE: frozenset[FailureKind] = frozenset(("peer_lost", "timeout", "data", "checksum"))
"""Failures that another attempt at the same P may mend."""
FINAL: frozenset[FailureKind] = frozenset(("cancelled", "internal"))
"""Failures of D itself, which no other attempt mends. The cause of any other one may lie in this P: another P may serve
the load."""


class LoadPhase(enum.Enum):
    HANDSHAKING = "handshaking"
    READY = "ready"
    MOVING = "moving"
    COMMITTING = "committing"
    DRAINING = "draining"
    WAITING = "waiting for the next attempt"
    REPORTED = "reported"
    DONE = "done"
    FAILED = "failed"


class LoadState(msgspec.Struct, frozen=True):
    """State. Times are local seconds, as ``now``."""

    phase: LoadPhase
    sources: int
    pending: frozenset[int]
    """Sources that have not passed the phase."""
    deadline: float
    """For the phase; in WAITING when the next attempt begins."""
    end: float
    """When the last attempt must have ended."""
    settings: Settings
    left: tuple[int, ...]
    """Attempts that are left at each of the P engines that the load names."""
    planes: int
    """Data planes that have not been tried beside the first one."""
    inside: bool = False
    """An engine's step computes with the load, so it waits for no other attempt."""
    peer: int = 0
    """The number of the P engine of this attempt, or of the next one."""
    number: int = 1
    """Of this attempt."""
    reason: Reason | None = None

    @property
    def due(self) -> float:
        """When a Tick changes something."""
        return math.inf if self.phase in (LoadPhase.DONE, LoadPhase.FAILED) else self.deadline


# --- events -----------------------------------------------------------------------------------------------------


class SourceReady(msgspec.Struct, frozen=True):
    """The handshake with a source is complete, a data plane is attached."""

    source: int


class SourceProgress(msgspec.Struct, frozen=True):
    """P has granted the read, or bytes have arrived; the deadline starts anew."""


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


LoadEvent = (
    SourceReady | SourceProgress | SourceMoved | SourceCommitted | SourceDrained | SourceFailed | CancelLoad | Tick
)

# --- effects ----------------------------------------------------------------------------------------------------


class AskSources(msgspec.Struct, frozen=True):
    """Ask every source for its part of the prompt."""


class CommitSources(msgspec.Struct, frozen=True):
    """Ask every source whether its lease still exists, so that the data that were read are valid."""


class StopSources(msgspec.Struct, frozen=True):
    """Stop the reads from all sources. Answer with one ``SourceDrained`` per source where the phase is DRAINING."""


class LeaveAttempt(msgspec.Struct, frozen=True):
    """The attempt has failed, and nothing of it writes D's pages any more."""

    reason: Reason


class BeginAttempt(msgspec.Struct, frozen=True):
    """Begin the next attempt, at the P engine with the number ``LoadState.peer`` (``next_attempt``)."""


class ReportLoad(msgspec.Struct, frozen=True):
    """Report the load to the engine, once. ``reason``: why it failed; ``None`` where it succeeded."""

    reason: Reason | None = None


class RecordLoad(msgspec.Struct, frozen=True):
    """Log and trace the load, and forget it."""

    reason: Reason | None = None


class ReleaseLeases(msgspec.Struct, frozen=True):
    """This request does not need its leases any more."""


LoadEffect = (
    AskSources | CommitSources | StopSources | LeaveAttempt | BeginAttempt | ReportLoad | RecordLoad | ReleaseLeases
)
Outcome = tuple[LoadState, tuple[LoadEffect, ...]]


def first_attempt(
    sources: int, peers: int, planes: int, settings: Settings, now: float, *, inside: bool = False
) -> LoadState:
    """A new load. ``peers``: P engines that it names; ``planes``: data planes that this rank has."""
    end = now + settings.handover_timeout_seconds
    left, planes = ((0,) * peers, 0) if inside else ((ATTEMPTS_PER_PEER,) * peers, planes - 1)
    deadline = min(now + settings.handshake_timeout_seconds, end)
    everyone = frozenset(range(sources))
    return LoadState(LoadPhase.HANDSHAKING, sources, everyone, deadline, end, settings, left, planes, inside)


def next_attempt(state: LoadState, sources: int, now: float) -> LoadState:
    """The load in its next attempt."""
    deadline = min(now + state.settings.handshake_timeout_seconds, state.end)
    everyone = frozenset(range(sources))
    return replace(
        state, phase=LoadPhase.HANDSHAKING, sources=sources, pending=everyone, deadline=deadline,
        number=state.number + 1,
    )  # fmt: skip


# --- transitions ------------------------------------------------------------------------------------------------

_P = LoadPhase


def _later(state: LoadState, now: float) -> float:
    return min(now + state.settings.transfer_timeout_seconds, state.end)


def _enter(state: LoadState, phase: LoadPhase, now: float) -> LoadState:
    return replace(state, phase=phase, pending=frozenset(range(state.sources)), deadline=_later(state, now))


def _ready(state: LoadState, event: SourceReady, now: float) -> Outcome:
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending), ()
    return _enter(state, _P.READY, now), (AskSources(),)


def _began(state: LoadState, event: SourceProgress, now: float) -> Outcome:
    return _enter(state, _P.MOVING, now), ()


def _moved_before_grant(state: LoadState, event: SourceMoved, now: float) -> Outcome:
    # Data and grant come by different sockets; the first chunk also shows that P has granted the ask.
    return _moved(_enter(state, _P.MOVING, now), event, now)


def _progress(state: LoadState, event: SourceProgress, now: float) -> Outcome:
    return replace(state, deadline=_later(state, now)), ()


def _moved(state: LoadState, event: SourceMoved, now: float) -> Outcome:
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending, deadline=_later(state, now)), ()
    return _enter(state, _P.COMMITTING, now), (CommitSources(),)


def _committed(state: LoadState, event: SourceCommitted, now: float) -> Outcome:
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending), ()
    # The report to the engine comes first: a request waits for it, and no request waits for P's blocks.
    if (
        state.inside
    ):  # the engine's thread is at work on the step, and needs the interpreter: the rest follows at a tick
        return replace(state, phase=_P.REPORTED, pending=pending, deadline=now), (ReportLoad(),)
    return replace(state, phase=_P.DONE, pending=pending), (ReportLoad(), RecordLoad(), ReleaseLeases())


def _recorded(state: LoadState, event: Tick, now: float) -> Outcome:
    return (state, ()) if now < state.deadline else (replace(state, phase=_P.DONE), (RecordLoad(), ReleaseLeases()))


def _drain(state: LoadState, event: SourceFailed | CancelLoad, now: float) -> Outcome:
    # Sources that have moved have no I/O left; each other source must send ``SourceDrained``.
    deadline = now + state.settings.transfer_timeout_seconds
    return replace(state, phase=_P.DRAINING, deadline=deadline, reason=event.reason), (StopSources(),)


def _drained(state: LoadState, event: SourceMoved | SourceDrained, now: float) -> Outcome:
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending), ()
    assert state.reason is not None
    return _fail(state, state.reason, now)


def _cancel_draining(state: LoadState, event: CancelLoad, now: float) -> Outcome:
    # No other attempt may follow, whatever the failure before was.
    return replace(state, reason=event.reason), ()


_BLAMED: dict[LoadPhase, Blame] = {_P.HANDSHAKING: "peer", _P.MOVING: "plane"}


def _deadline(state: LoadState, now: float) -> Reason:
    if now >= state.end:
        seconds = state.settings.handover_timeout_seconds
        text = f"no end in {seconds:g} s (handover_timeout_seconds), now {state.phase.value}"
        return Reason("timeout", text)
    text = f"nothing moved on in time while {state.phase.value}"
    return Reason("timeout", text, _BLAMED.get(state.phase, ""))


def _late(state: LoadState, event: Tick, now: float) -> Outcome:
    return (state, ()) if now < state.deadline else _stop(state, _deadline(state, now), now)


def _late_moving(state: LoadState, event: Tick, now: float) -> Outcome:
    return (state, ()) if now < state.deadline else _drain(state, SourceFailed(0, _deadline(state, now)), now)


def _late_draining(state: LoadState, event: Tick, now: float) -> Outcome:
    # Time is no proof that a write has ended: ask again, keep the pages.
    if now < state.deadline:
        return state, ()
    return replace(state, deadline=now + state.settings.transfer_timeout_seconds), (StopSources(),)


# --- after an attempt -------------------------------------------------------------------------------------------


def _fail_now(state: LoadState, event: SourceFailed | CancelLoad, now: float) -> Outcome:
    return _stop(state, event.reason, now)


def _stop(state: LoadState, reason: Reason, now: float) -> Outcome:
    state, effects = _fail(state, reason, now)
    return state, (StopSources(), *effects)


def _fail(state: LoadState, reason: Reason, now: float) -> Outcome:
    """The attempt has failed, and nothing of it writes D's pages any more."""
    state, begin_at = _following(state, reason, now)
    if begin_at >= state.end:
        state, effects = _give_up(state, reason)
        return state, (LeaveAttempt(reason), *effects)
    waiting = replace(state, phase=_P.WAITING, pending=frozenset(), deadline=begin_at, reason=reason)
    return waiting, (LeaveAttempt(reason),)


def _give_up(state: LoadState, reason: Reason) -> Outcome:
    failed = replace(state, phase=_P.FAILED, pending=frozenset(), reason=reason)
    return failed, (ReportLoad(reason), RecordLoad(reason), ReleaseLeases())


def _following(state: LoadState, reason: Reason, now: float) -> tuple[LoadState, float]:
    """Where the next attempt goes, and when it begins; infinite where there is none."""
    if reason.kind in FINAL:
        return state, math.inf
    if reason.blames == "plane" and state.planes > 0:
        return replace(state, planes=state.planes - 1), now
    here = state.left[state.peer] - 1 if reason.kind in MENDED_HERE and reason.blames != "peer" else 0
    left = tuple(max(0, here) if number == state.peer else count for number, count in enumerate(state.left))
    others = [(state.peer + step) % len(left) for step in range(1, len(left) + 1)]  # this P comes last
    peer = next((number for number in others if left[number]), None)
    if peer is None:
        return state, math.inf
    return replace(state, left=left, peer=peer), now + SAME_PEER_SECONDS if peer == state.peer else now


def _wait_over(state: LoadState, event: Tick, now: float) -> Outcome:
    assert state.reason is not None
    if now >= state.end:
        return _give_up(state, state.reason)
    return (state, ()) if now < state.deadline else (replace(state, phase=_P.HANDSHAKING), (BeginAttempt(),))


def _cancel_waiting(state: LoadState, event: CancelLoad, now: float) -> Outcome:
    return _give_up(state, event.reason)


LOAD: TransitionTable[LoadState, LoadEvent, LoadEffect] = TransitionTable(
    "load",
    LoadPhase,
    get_args(LoadEvent),
    (
        ((_P.HANDSHAKING,), (SourceReady,), _ready),
        ((_P.READY,), (SourceProgress,), _began),
        ((_P.READY,), (SourceMoved,), _moved_before_grant),
        ((_P.MOVING,), (SourceProgress,), _progress),
        ((_P.MOVING,), (SourceMoved,), _moved),
        ((_P.COMMITTING,), (SourceCommitted,), _committed),
        ((_P.REPORTED,), (Tick,), _recorded),
        ((_P.DRAINING,), (SourceMoved, SourceDrained), _drained),
        ((_P.DRAINING,), (CancelLoad,), _cancel_draining),
        ((_P.WAITING,), (CancelLoad,), _cancel_waiting),
        ((_P.HANDSHAKING, _P.READY, _P.COMMITTING), (SourceFailed, CancelLoad), _fail_now),
        ((_P.MOVING,), (SourceFailed, CancelLoad), _drain),
        ((_P.HANDSHAKING, _P.READY, _P.COMMITTING), (Tick,), _late),
        ((_P.MOVING,), (Tick,), _late_moving),
        ((_P.DRAINING,), (Tick,), _late_draining),
        ((_P.WAITING,), (Tick,), _wait_over),
        # An event of an earlier phase, or of a load that has ended, comes too late to change anything.
        (LoadPhase, get_args(LoadEvent), ignore),
    ),
)
