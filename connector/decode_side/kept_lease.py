"""D's state machine of one lease that it keeps alive at P. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``::

    NEEDED ◀──▶ WAITING_FOR_SIBLINGS
       │                │
       └────────────────┴──▶ RELEASED

A lease is NEEDED while a request of D may still read under it. Requests of one prompt (``n > 1``) share a lease and
arrive one by one, so the last of them does not release the lease at once: the lease waits a moment for more siblings.
D renews the lease in both phases. Exactly one ``SendRelease`` leaves the machine.
"""

from __future__ import annotations

import enum
import math
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.wire.states import Tick, TransitionTable, ignore


class KeptLeasePhase(enum.Enum):
    NEEDED = "needed"
    WAITING_FOR_SIBLINGS = "waiting for siblings"
    RELEASED = "released"


KEPT = (KeptLeasePhase.NEEDED, KeptLeasePhase.WAITING_FOR_SIBLINGS)


class KeptLease(msgspec.Struct, frozen=True):
    """State. Times are local seconds, as ``now``.

    Attributes:
        interval: seconds between two renewals.
        sibling_seconds: how long the lease waits for more requests of the same prompt.
        requests: the requests that may still read under the lease.
        siblings: more requests of the same prompt may follow.
        renew_at: when the next renewal is due.
        release_at: when the lease stops waiting for siblings; only in WAITING_FOR_SIBLINGS.
    """

    phase: KeptLeasePhase
    interval: float
    sibling_seconds: float
    renew_at: float
    requests: frozenset[str]
    siblings: bool = False
    release_at: float = 0.0

    @property
    def due(self) -> float:
        """When a Tick changes something."""
        if self.phase is KeptLeasePhase.WAITING_FOR_SIBLINGS:
            return min(self.renew_at, self.release_at)
        return self.renew_at if self.phase is KeptLeasePhase.NEEDED else math.inf


# --- events -----------------------------------------------------------------------------------------------------


class LeaseWanted(msgspec.Struct, frozen=True):
    """A request may read under the lease. ``siblings``: more requests of its prompt may follow."""

    request_id: str
    siblings: bool


class LeaseUnwanted(msgspec.Struct, frozen=True):
    """A request reads no more under the lease."""

    request_id: str


class RenewalOverdue(msgspec.Struct, frozen=True):
    """D's transfer thread stood still while P's deadline went on: the next tick renews."""


class KeepingEnded(msgspec.Struct, frozen=True):
    """D shuts down."""


KeptLeaseEvent = LeaseWanted | LeaseUnwanted | RenewalOverdue | KeepingEnded | Tick

# --- effects ----------------------------------------------------------------------------------------------------


class SendRenewal(msgspec.Struct, frozen=True):
    """Send a renewal to P's ranks."""


class SendRelease(msgspec.Struct, frozen=True):
    """Send the release to P's ranks, once."""


KeptLeaseEffect = SendRenewal | SendRelease
Outcome = tuple[KeptLease, tuple[KeptLeaseEffect, ...]]


def keep_lease(now: float, interval: float, sibling_seconds: float) -> KeptLease:
    """A lease that D begins to keep; ``LeaseWanted`` adds its requests. The first renewal is due after ``interval``."""
    return KeptLease(KeptLeasePhase.NEEDED, interval, sibling_seconds, now + interval, frozenset())


# --- transitions ------------------------------------------------------------------------------------------------


def _wanted(state: KeptLease, event: KeptLeaseEvent, now: float) -> Outcome:
    assert isinstance(event, LeaseWanted)
    requests = state.requests | {event.request_id}
    siblings = state.siblings or event.siblings
    return replace(state, phase=KeptLeasePhase.NEEDED, requests=requests, siblings=siblings), ()


def _unwanted(state: KeptLease, event: KeptLeaseEvent, now: float) -> Outcome:
    assert isinstance(event, LeaseUnwanted)
    requests = state.requests - {event.request_id}
    if requests:
        return replace(state, requests=requests), ()
    if state.siblings:
        release_at = now + state.sibling_seconds
        return replace(state, phase=KeptLeasePhase.WAITING_FOR_SIBLINGS, requests=requests, release_at=release_at), ()
    return _release(state, event, now)


def _release(state: KeptLease, event: KeptLeaseEvent, now: float) -> Outcome:
    return replace(state, phase=KeptLeasePhase.RELEASED, requests=frozenset()), (SendRelease(),)


def _overdue(state: KeptLease, event: KeptLeaseEvent, now: float) -> Outcome:
    return replace(state, renew_at=float("-inf")), ()


def _tick(state: KeptLease, event: KeptLeaseEvent, now: float) -> Outcome:
    if now < state.renew_at:
        return state, ()
    return replace(state, renew_at=now + state.interval), (SendRenewal(),)


def _tick_waiting(state: KeptLease, event: KeptLeaseEvent, now: float) -> Outcome:
    return _release(state, event, now) if now >= state.release_at else _tick(state, event, now)


def _wanted_too_late(state: KeptLease, event: KeptLeaseEvent, now: float) -> Outcome:
    raise AssertionError("a request joined a lease that D had released")


KEPT_LEASE: TransitionTable[KeptLease, KeptLeaseEvent, KeptLeaseEffect] = TransitionTable(
    "kept lease",
    KeptLeasePhase,
    get_args(KeptLeaseEvent),
    (
        (KEPT, (LeaseWanted,), _wanted),
        (KEPT, (RenewalOverdue,), _overdue),
        (KEPT, (KeepingEnded,), _release),
        ((KeptLeasePhase.NEEDED,), (LeaseUnwanted,), _unwanted),
        ((KeptLeasePhase.NEEDED,), (Tick,), _tick),
        ((KeptLeasePhase.WAITING_FOR_SIBLINGS,), (LeaseUnwanted,), ignore),
        ((KeptLeasePhase.WAITING_FOR_SIBLINGS,), (Tick,), _tick_waiting),
        ((KeptLeasePhase.RELEASED,), (LeaseWanted,), _wanted_too_late),
        ((KeptLeasePhase.RELEASED,), (LeaseUnwanted, RenewalOverdue, KeepingEnded, Tick), ignore),
    ),
)
