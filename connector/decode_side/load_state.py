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
during it drains first: D keeps the pages until DRAINED has come from every source. In WAITING nothing of an
attempt is left. Exactly one REPORT leaves the machine, whatever happens (``LOAD`` is total).

Progress extends the deadline of a phase, up to ``LoadState.end``, which is the same for all attempts. DRAINING has no
end in time. It ends with the copies under way, and these are copies of D's own device and system: a channel that was
stopped writes no page, whatever P does, and a read of P's memory ends with an error when P's process ends.
"""

from __future__ import annotations

import enum
import math

import msgspec
from msgspec.structs import replace

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.link import Blame, Reason
from kvferry.connector.wire.metrics import FailureKind
from kvferry.connector.wire.states import TransitionTable, ignore

ATTEMPTS_PER_PEER = 2
"""Attempts at one P engine, beside those that only change the data plane: its connection may have broken."""
SAME_PEER_SECONDS = 1.0
"""Seconds between two attempts at one P engine; none before the next data plane, or before another P."""
MENDED_HERE: frozenset[FailureKind] = frozenset(("peer_lost", "timeout", "data"))
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


class LoadEventKind(enum.Enum):
    """What happens to a source, or to the load. The values are the names in a log line."""

    READY = "SourceReady"
    """The handshake with the source is complete, a data plane is attached."""
    PROGRESS = "SourceProgress"
    """P has granted the read, or bytes have arrived; the deadline starts anew."""
    MOVED = "SourceMoved"
    """All bytes from the source lie in D's pages, and no more bytes of it will be written."""
    COMMITTED = "SourceCommitted"
    DRAINED = "SourceDrained"
    """Nothing that was started for the source can write D's pages any more."""
    FAILED = "SourceFailed"
    """The source refused the read, its lease expired, its link broke, or P is gone."""
    CANCELLED = "CancelLoad"
    """D's engine has cancelled the request."""
    TICK = "Tick"


class LoadEvent(msgspec.Struct, frozen=True):
    kind: LoadEventKind
    source: int = 0
    reason: Reason = Reason("cancelled", "the engine gave the request up")
    """Of FAILED and CANCELLED."""


CANCELLED, TICK = LoadEvent(LoadEventKind.CANCELLED), LoadEvent(LoadEventKind.TICK)


class LoadEffect(enum.Enum):
    """What the owner must do. ``LoadState.reason`` says why an attempt or the load failed."""

    ASK = "AskSources"
    """Ask every source for its part of the prompt."""
    COMMIT = "CommitSources"
    """Ask every source whether its lease still exists, so that the data that were read are valid."""
    STOP = "StopSources"
    """Stop the reads from all sources. Answer with one DRAINED per source where the phase is DRAINING."""
    LEAVE = "LeaveAttempt"
    """The attempt has failed, and nothing of it writes D's pages any more."""
    BEGIN = "BeginAttempt"
    """Begin the next attempt, at the P engine with the number ``LoadState.peer`` (``next_attempt``)."""
    REPORT = "ReportLoad"
    """Report the load to the engine, once."""
    RECORD = "RecordLoad"
    """Log and trace the load, and forget it."""
    RELEASE = "ReleaseLeases"
    """This request does not need its leases any more."""


Outcome = tuple[LoadState, tuple[LoadEffect, ...]]


def first_attempt(
    sources: int, peers: int, planes: int, settings: Settings, now: float, *, inside: bool = False, once: bool = False
) -> LoadState:
    """A new load. ``peers``: P engines that it names; ``planes``: data planes that this rank has. ``once``: no other
    attempt follows the first one, as for a load inside a step."""
    end = now + settings.handover_timeout_seconds
    left, planes = ((0,) * peers, 0) if inside or once else ((ATTEMPTS_PER_PEER,) * peers, planes - 1)
    deadline = min(now + settings.handshake_timeout_seconds, end)
    everyone = frozenset(range(sources))
    return LoadState(LoadPhase.HANDSHAKING, sources, everyone, deadline, end, settings, left, planes, inside)


def next_attempt(state: LoadState, sources: int, now: float) -> LoadState:
    """The load in its next attempt."""
    deadline = min(now + state.settings.handshake_timeout_seconds, state.end)
    everyone = frozenset(range(sources))
    return replace(
        state, phase=LoadPhase.HANDSHAKING, sources=sources, pending=everyone, deadline=deadline,
        number=state.number + 1, reason=None,
    )  # fmt: skip


# --- transitions ------------------------------------------------------------------------------------------------

_P, _K, _E = LoadPhase, LoadEventKind, LoadEffect


def _later(state: LoadState, now: float) -> float:
    return min(now + state.settings.transfer_timeout_seconds, state.end)


def _enter(state: LoadState, phase: LoadPhase, now: float) -> LoadState:
    return replace(state, phase=phase, pending=frozenset(range(state.sources)), deadline=_later(state, now))


def _ready(state: LoadState, event: LoadEvent, now: float) -> Outcome:
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending), ()
    return _enter(state, _P.READY, now), (_E.ASK,)


def _moved(state: LoadState, event: LoadEvent, now: float) -> Outcome:
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending, deadline=_later(state, now)), ()
    return _enter(state, _P.COMMITTING, now), (_E.COMMIT,)


def _committed(state: LoadState, event: LoadEvent, now: float) -> Outcome:
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending), ()
    # The report to the engine comes first: a request waits for it, and no request waits for P's blocks.
    if (
        state.inside
    ):  # the engine's thread is at work on the step, and needs the interpreter: the rest follows at a tick
        return replace(state, phase=_P.REPORTED, pending=pending, deadline=now), (_E.REPORT,)
    return replace(state, phase=_P.DONE, pending=pending), (_E.REPORT, _E.RECORD, _E.RELEASE)


def _recorded(state: LoadState, event: LoadEvent, now: float) -> Outcome:
    return (state, ()) if now < state.deadline else (replace(state, phase=_P.DONE), (_E.RECORD, _E.RELEASE))


def _drain(state: LoadState, event: LoadEvent, now: float) -> Outcome:
    # Sources that have moved have no I/O left; each other source must send DRAINED.
    deadline = now + state.settings.transfer_timeout_seconds
    return replace(state, phase=_P.DRAINING, deadline=deadline, reason=event.reason), (_E.STOP,)


def _drained(state: LoadState, event: LoadEvent, now: float) -> Outcome:
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending), ()
    assert state.reason is not None
    return _fail(state, state.reason, now)


_BLAMED: dict[LoadPhase, Blame] = {_P.HANDSHAKING: "peer", _P.MOVING: "plane"}


def _deadline(state: LoadState, now: float) -> Reason:
    if now >= state.end:
        seconds = state.settings.handover_timeout_seconds
        text = f"no end in {seconds:g} s (handover_timeout_seconds), now {state.phase.value}"
        return Reason("timeout", text)
    text = f"nothing moved on in time while {state.phase.value}"
    return Reason("timeout", text, _BLAMED.get(state.phase, ""))


def _late(state: LoadState, event: LoadEvent, now: float) -> Outcome:
    return (state, ()) if now < state.deadline else _stop(state, _deadline(state, now), now)


def _late_moving(state: LoadState, event: LoadEvent, now: float) -> Outcome:
    return (
        (state, ()) if now < state.deadline else _drain(state, LoadEvent(_K.FAILED, reason=_deadline(state, now)), now)
    )


def _late_draining(state: LoadState, event: LoadEvent, now: float) -> Outcome:
    # Time is no proof that a write has ended: ask again, keep the pages.
    if now < state.deadline:
        return state, ()
    return replace(state, deadline=now + state.settings.transfer_timeout_seconds), (_E.STOP,)


# --- after an attempt -------------------------------------------------------------------------------------------


def _stop(state: LoadState, reason: Reason, now: float) -> Outcome:
    state, effects = _fail(state, reason, now)
    return state, (_E.STOP, *effects)


def _fail(state: LoadState, reason: Reason, now: float) -> Outcome:
    """The attempt has failed, and nothing of it writes D's pages any more."""
    state, begin_at = _following(state, reason, now)
    if begin_at >= state.end:
        state, effects = _give_up(state, reason)
        return state, (_E.LEAVE, *effects)
    waiting = replace(state, phase=_P.WAITING, pending=frozenset(), deadline=begin_at, reason=reason)
    return waiting, (_E.LEAVE,)


def _give_up(state: LoadState, reason: Reason) -> Outcome:
    failed = replace(state, phase=_P.FAILED, pending=frozenset(), reason=reason)
    return failed, (_E.REPORT, _E.RECORD, _E.RELEASE)


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


def _wait_over(state: LoadState, event: LoadEvent, now: float) -> Outcome:
    assert state.reason is not None
    if now >= state.end:
        return _give_up(state, state.reason)
    return (state, ()) if now < state.deadline else (replace(state, phase=_P.HANDSHAKING), (_E.BEGIN,))


LOAD: TransitionTable[LoadState, LoadEvent, LoadEffect] = TransitionTable(
    "load",
    LoadPhase,
    LoadEventKind,
    (
        ((_P.HANDSHAKING,), (_K.READY,), _ready),
        ((_P.READY,), (_K.PROGRESS,), lambda state, event, now: (_enter(state, _P.MOVING, now), ())),
        # Data and grant come by different sockets; the first chunk also shows that P has granted the ask.
        ((_P.READY,), (_K.MOVED,), lambda state, event, now: _moved(_enter(state, _P.MOVING, now), event, now)),
        ((_P.MOVING,), (_K.PROGRESS,), lambda state, event, now: (replace(state, deadline=_later(state, now)), ())),
        ((_P.MOVING,), (_K.MOVED,), _moved),
        ((_P.COMMITTING,), (_K.COMMITTED,), _committed),
        ((_P.REPORTED,), (_K.TICK,), _recorded),
        ((_P.DRAINING,), (_K.MOVED, _K.DRAINED), _drained),
        # No other attempt may follow, whatever the failure before was.
        ((_P.DRAINING,), (_K.CANCELLED,), lambda state, event, now: (replace(state, reason=event.reason), ())),
        ((_P.WAITING,), (_K.CANCELLED,), lambda state, event, now: _give_up(state, event.reason)),
        (
            (_P.HANDSHAKING, _P.READY, _P.COMMITTING),
            (_K.FAILED, _K.CANCELLED),
            lambda state, event, now: _stop(state, event.reason, now),
        ),
        ((_P.MOVING,), (_K.FAILED, _K.CANCELLED), _drain),
        ((_P.HANDSHAKING, _P.READY, _P.COMMITTING), (_K.TICK,), _late),
        ((_P.MOVING,), (_K.TICK,), _late_moving),
        ((_P.DRAINING,), (_K.TICK,), _late_draining),
        ((_P.WAITING,), (_K.TICK,), _wait_over),
        # An event of an earlier phase, or of a load that has ended, comes too late to change anything.
        (LoadPhase, LoadEventKind, ignore),
    ),
)
