"""The producer's state machine: one lease on one rank of P. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``::

    GRANTED ◀──▶ READING (k own reads running)
       │             │
       ├─ release ───┤──▶ RELEASED ─┐
       └─ expiry  ───┘──▶ EXPIRED  ─┴─▶ Freed, once, when the last own read has ended

An *own* read is P's own packing of its pages; P waits for it, because only its end proves that nothing reads the pages.
A *peer* read is a read by D's kernel over mapped memory. P can neither see nor stop it, so it does not appear here. D
must commit it: ``may_commit`` is false from the moment the lease has ended.
The first ask of a consumer fixes which of its ranks must release; the lease ends when one consumer's set is complete.
Sets of ranks are numbers, one bit for each rank: a peer names thousands of ranks in a message, and a lease keeps them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.wire.states import Tick, TransitionTable, ignore


class LeasePhase(enum.Enum):
    GRANTED = "granted"
    READING = "reading"
    RELEASED = "released"
    EXPIRED = "expired"


HELD = (LeasePhase.GRANTED, LeasePhase.READING)
ENDED = (LeasePhase.RELEASED, LeasePhase.EXPIRED)

Consumer = bytes
"""One life of one D engine."""
MAX_CONSUMERS = 64
"""Consumers of one lease whose votes P counts. A hand-over has one, or a few where D is replaced by another D."""


def rank_set(ranks: Iterable[int]) -> int:
    """A set of ranks as a number with one bit for each rank."""
    bits = 0
    for rank in ranks:
        bits |= 1 << rank
    return bits


def ranks_of(bits: int) -> Iterator[int]:
    """The ranks of a set, ascending: the inverse of ``rank_set``."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class Lease(msgspec.Struct, frozen=True):
    """State. Times are local seconds, as ``now``. A renewal moves ``deadline`` to ``term`` seconds from now, never past
    ``cap``.

    ``votes``: per consumer, the ranks that have not released yet (``rank_set``), of at most ``MAX_CONSUMERS``.
    ``reads``: own reads that are running.
    """

    phase: LeasePhase
    deadline: float
    term: float
    cap: float
    votes: Mapping[Consumer, int] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    reads: frozenset[object] = frozenset()
    freed: bool = False
    reason: str = ""

    @property
    def due(self) -> float:
        """When a Tick changes something."""
        return self.deadline if self.phase in HELD else math.inf


# --- events -----------------------------------------------------------------------------------------------------


class Asked(msgspec.Struct, frozen=True):
    """A consumer's rank asks to read. ``expected``: the consumer's ranks that will release the lease at this rank."""

    consumer: Consumer
    expected: frozenset[int]


class ReadStarted(msgspec.Struct, frozen=True):
    key: object


class ReadEnded(msgspec.Struct, frozen=True):
    """The last access of an own read to P's pages has ended."""

    key: object


class Renewed(msgspec.Struct, frozen=True):
    """D has sent a renewal, or a read has made progress."""


class Released(msgspec.Struct, frozen=True):
    consumer: Consumer
    rank: int
    expected: frozenset[int]


class Revoked(msgspec.Struct, frozen=True):
    """P's engine was paused, or its caches were reset: the lease expires before its time."""


LeaseEvent = Asked | ReadStarted | ReadEnded | Renewed | Released | Revoked | Tick

# --- effects ----------------------------------------------------------------------------------------------------


class StopReads(msgspec.Struct, frozen=True):
    """Stop the own reads. The owner answers with one ``ReadEnded`` per read."""


class Freed(msgspec.Struct, frozen=True):
    """Report to the engine, once, that nothing reads the blocks any more. ``reason``: one of ``metrics.LEASE_ENDS``."""

    reason: str


LeaseEffect = StopReads | Freed
Outcome = tuple[Lease, tuple[LeaseEffect, ...]]


def grant(now: float, term: float, cap: float) -> Lease:
    """A new lease of ``term`` seconds that renewals can extend to ``cap`` seconds in all."""
    return Lease(LeasePhase.GRANTED, now + min(term, cap), term, now + cap)


def may_commit(state: Lease) -> bool:
    """Whether data that was read under the lease is valid: the lease has not ended."""
    return state.phase in HELD


# --- transitions ------------------------------------------------------------------------------------------------


def _asked(state: Lease, event: LeaseEvent, now: float) -> Outcome:
    assert isinstance(event, Asked)
    if event.consumer in state.votes or len(state.votes) >= MAX_CONSUMERS:
        return state, ()
    votes = MappingProxyType({**state.votes, event.consumer: rank_set(event.expected)})
    return replace(state, votes=votes), ()


def _read_started(state: Lease, event: LeaseEvent, now: float) -> Outcome:
    assert isinstance(event, ReadStarted)
    return replace(state, phase=LeasePhase.READING, reads=state.reads | {event.key}), ()


def _read_ended(state: Lease, event: LeaseEvent, now: float) -> Outcome:
    assert isinstance(event, ReadEnded)
    reads = state.reads - {event.key}
    return replace(state, reads=reads, phase=LeasePhase.READING if reads else LeasePhase.GRANTED), ()


def _renewed(state: Lease, event: LeaseEvent, now: float) -> Outcome:
    return replace(state, deadline=max(state.deadline, min(now + state.term, state.cap))), ()


def _released(state: Lease, event: LeaseEvent, now: float) -> Outcome:
    assert isinstance(event, Released)
    known = state.votes.get(event.consumer)
    left = (rank_set(event.expected) if known is None else known) & ~(1 << event.rank)
    if left and known is None and len(state.votes) >= MAX_CONSUMERS:
        return state, ()
    voted = replace(state, votes=MappingProxyType({**state.votes, event.consumer: left}))
    return (voted, ()) if left else _end(voted, LeasePhase.RELEASED, "released")


def _tick(state: Lease, event: LeaseEvent, now: float) -> Outcome:
    if now < state.deadline:
        return state, ()
    return _end(state, LeasePhase.EXPIRED, "cap" if now >= state.cap else "expired")


def _revoked(state: Lease, event: LeaseEvent, now: float) -> Outcome:
    return _end(state, LeasePhase.EXPIRED, "reset")


def _end(state: Lease, phase: LeasePhase, reason: str) -> Outcome:
    ended = replace(state, phase=phase, reason=reason)
    return (ended, (StopReads(),)) if state.reads else _free(ended)


def _free(state: Lease) -> Outcome:
    return replace(state, freed=True), (Freed(state.reason),)


def _last_read_ended(state: Lease, event: LeaseEvent, now: float) -> Outcome:
    assert isinstance(event, ReadEnded)
    left = replace(state, reads=state.reads - {event.key})
    return (left, ()) if left.reads or left.freed else _free(left)


def _read_too_late(state: Lease, event: LeaseEvent, now: float) -> Outcome:
    raise AssertionError("a read was started under a lease that has ended")


LEASE: TransitionTable[Lease, LeaseEvent, LeaseEffect] = TransitionTable(
    "lease",
    LeasePhase,
    get_args(LeaseEvent),
    (
        (HELD, (Asked,), _asked),
        (HELD, (ReadStarted,), _read_started),
        (HELD, (ReadEnded,), _read_ended),
        (HELD, (Renewed,), _renewed),
        (HELD, (Released,), _released),
        (HELD, (Revoked,), _revoked),
        (HELD, (Tick,), _tick),
        (ENDED, (ReadStarted,), _read_too_late),
        (ENDED, (ReadEnded,), _last_read_ended),
        (ENDED, (Asked, Renewed, Released, Revoked, Tick), ignore),
    ),
)
