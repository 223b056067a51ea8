"""The state machine of a load whose first attempt has failed, on one rank of D. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``::

    UNDER_WAY ◀──▶ WAITING
        │             │
        └─────────────┴──▶ ENDED

In UNDER_WAY an attempt has a lifetime of its own (``handover``). In WAITING nothing of an attempt is left: none of its
copies writes D's pages. A load whose failure no other attempt can mend is reported: exactly one ``ReportLoad`` leaves
the machine if no attempt succeeds. All attempts share one end in time.
"""

from __future__ import annotations

import enum
import math
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.decode_side.handover import AttemptFailed, CancelLoad, Reason, ReleaseLease, ReportLoad
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
    UNDER_WAY = "under way"
    WAITING = "waiting for the next attempt"
    ENDED = "ended"


class LoadAttempts(msgspec.Struct, frozen=True):
    """State. Times are local seconds, as ``now``.

    Attributes:
        end: when the last attempt must have ended.
        left: attempts that are left at each of the P engines that the load names.
        planes: data planes that have not been tried beside the first one.
        source: the number of the P engine of this attempt, or of the next one.
        number: of this attempt, or of the next one; the first is 1.
        begin_at: when the next attempt may begin; only in WAITING.
        reason: why the last attempt failed.
    """

    phase: LoadPhase
    end: float
    left: tuple[int, ...]
    planes: int
    source: int = 0
    number: int = 1
    begin_at: float = 0.0
    reason: Reason | None = None

    @property
    def due(self) -> float:
        """When a Tick changes something."""
        return min(self.begin_at, self.end) if self.phase is LoadPhase.WAITING else math.inf


# --- events and effects -----------------------------------------------------------------------------------------


class BeginAttempt(msgspec.Struct, frozen=True):
    """Begin an attempt at this P engine; its number among those that the load names."""

    source: int


LoadAttemptsEvent = AttemptFailed | CancelLoad | Tick
LoadAttemptsEffect = BeginAttempt | ReportLoad | ReleaseLease
Outcome = tuple[LoadAttempts, tuple[LoadAttemptsEffect, ...]]


def first_attempt(peers: int, planes: int, end: float, *, again: bool) -> LoadAttempts:
    """A load in its first attempt. ``peers``: P engines that it names; ``planes``: data planes that this rank has.
    ``again``: whether other attempts may follow; an engine's step waits for no other attempt."""
    left = (ATTEMPTS_PER_PEER,) * peers if again else (0,) * peers
    return LoadAttempts(LoadPhase.UNDER_WAY, end, left, planes - 1 if again else 0)


# --- transitions ------------------------------------------------------------------------------------------------


def _report(state: LoadAttempts, reason: Reason) -> Outcome:
    return replace(state, phase=LoadPhase.ENDED, reason=reason), (ReportLoad(reason), ReleaseLease())


def _failed(state: LoadAttempts, event: LoadAttemptsEvent, now: float) -> Outcome:
    assert isinstance(event, AttemptFailed)
    reason = event.reason
    if reason.kind in FINAL:
        return _report(state, reason)
    if reason.blames == "plane" and state.planes > 0:
        return _wait(replace(state, planes=state.planes - 1), state.source, now, reason)
    here = state.left[state.source] - 1 if reason.kind in MENDED_HERE and reason.blames != "peer" else 0
    left = tuple(max(0, here) if number == state.source else count for number, count in enumerate(state.left))
    peers = len(left)
    others = [(state.source + step) % peers for step in range(1, peers + 1)]  # this P comes last
    source = next((number for number in others if left[number]), None)
    if source is None:
        return _report(state, reason)
    at = now + SAME_PEER_SECONDS if source == state.source else now
    return _wait(replace(state, left=left), source, at, reason)


def _wait(state: LoadAttempts, source: int, at: float, reason: Reason) -> Outcome:
    if at >= state.end:
        return _report(state, reason)
    number = state.number + 1
    return replace(state, phase=LoadPhase.WAITING, source=source, number=number, begin_at=at, reason=reason), ()


def _due(state: LoadAttempts, event: LoadAttemptsEvent, now: float) -> Outcome:
    assert state.reason is not None
    if now >= state.end:
        return _report(state, state.reason)
    if now < state.begin_at:
        return state, ()
    return replace(state, phase=LoadPhase.UNDER_WAY), (BeginAttempt(state.source),)


def _cancelled(state: LoadAttempts, event: LoadAttemptsEvent, now: float) -> Outcome:
    assert isinstance(event, CancelLoad)
    return _report(state, event.reason)


_P = LoadPhase
LOAD_ATTEMPTS: TransitionTable[LoadAttempts, LoadAttemptsEvent, LoadAttemptsEffect] = TransitionTable(
    "load",
    LoadPhase,
    get_args(LoadAttemptsEvent),
    (
        ((_P.UNDER_WAY,), (AttemptFailed,), _failed),
        ((_P.WAITING,), (Tick,), _due),
        ((_P.WAITING,), (CancelLoad,), _cancelled),
        # The attempt under way has deadlines of its own, and ends by itself when it is cancelled.
        (LoadPhase, get_args(LoadAttemptsEvent), ignore),
    ),
)
