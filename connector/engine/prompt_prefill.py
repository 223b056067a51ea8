"""The state machine of one prompt that P's engine computes for a D, in P's scheduler half. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``::

    WAITING ──▶ COMPUTING ◀──▶ PREEMPTED
       │            │              │
       └────────────┴──────────────┴──▶ ENDED

The engine has computed no token of the prompt in WAITING; ``PlanQueued`` tells P's ranks, once, that it has the prompt
in its queue. P's ranks know the prompt from ``PlanPrefill`` on, until
``PlanLease``, or a ``PlanStop`` that ends it. Exactly one of these two follows. Between two chunks of a prompt that
streams, a ``PlanStop`` that does not end it takes back the blocks of all chunks before.
"""

from __future__ import annotations

import enum
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.wire.states import TransitionTable, ignore
from kvferry.connector.wire.step_plan import LeaseGrant, Prefill, PrefillChunk, PrefillStop, QueuedPrompt


class PromptPhase(enum.Enum):
    WAITING = "waiting"
    COMPUTING = "computing"
    PREEMPTED = "preempted"
    ENDED = "ended"


BEGUN = (PromptPhase.COMPUTING, PromptPhase.PREEMPTED)


class PromptPrefill(msgspec.Struct, frozen=True):
    """State. ``token``: of the lease that follows. ``streams``: the ranks get the blocks chunk by chunk. ``queued``:
    the ranks know that the prompt waits."""

    token: bytes
    phase: PromptPhase = PromptPhase.WAITING
    streams: bool = False
    queued: bool = False


# --- events -----------------------------------------------------------------------------------------------------


class LeftInQueue(msgspec.Struct, frozen=True):
    """The engine has scheduled a step without the request."""

    prompt: QueuedPrompt


class PrefillBegun(msgspec.Struct, frozen=True):
    """The engine begins to compute the prompt, or does not hand it over and must say so."""

    prefill: Prefill


class StepScheduled(msgspec.Struct, frozen=True):
    """A step computes tokens of the prompt. ``start``: the first of them. ``block_ids``, ``ready``: as in
    ``PrefillChunk``."""

    start: int
    stop: int
    block_ids: tuple[bytes, ...]
    ready: int


class BlocksTaken(msgspec.Struct, frozen=True):
    """The engine has preempted the request."""


class PromptLeased(msgspec.Struct, frozen=True):
    """The prompt is computed, and its blocks are held from now on."""

    lease: LeaseGrant


class PromptGivenUp(msgspec.Struct, frozen=True):
    """The prompt will not be handed over."""


PromptEvent = LeftInQueue | PrefillBegun | StepScheduled | BlocksTaken | PromptLeased | PromptGivenUp

# --- effects ----------------------------------------------------------------------------------------------------


class PlanQueued(msgspec.Struct, frozen=True):
    prompt: QueuedPrompt


class PlanPrefill(msgspec.Struct, frozen=True):
    prefill: Prefill


class PlanChunk(msgspec.Struct, frozen=True):
    chunk: PrefillChunk


class PlanStop(msgspec.Struct, frozen=True):
    stop: PrefillStop


class PlanLease(msgspec.Struct, frozen=True):
    lease: LeaseGrant


PromptEffect = PlanQueued | PlanPrefill | PlanChunk | PlanStop | PlanLease
Outcome = tuple[PromptPrefill, tuple[PromptEffect, ...]]

# --- transitions ------------------------------------------------------------------------------------------------


def _queued(state: PromptPrefill, event: PromptEvent, now: float) -> Outcome:
    assert isinstance(event, LeftInQueue)
    return (state, ()) if state.queued else (replace(state, queued=True), (PlanQueued(event.prompt),))


def _begun(state: PromptPrefill, event: PromptEvent, now: float) -> Outcome:
    assert isinstance(event, PrefillBegun)
    begun = replace(state, phase=PromptPhase.COMPUTING, streams=event.prefill.streams)
    return begun, (PlanPrefill(event.prefill),)


def _chunk(state: PromptPrefill, event: PromptEvent, *, restarts: bool) -> tuple[PromptEffect, ...]:
    assert isinstance(event, StepScheduled)
    if not state.streams:
        return ()
    return (PlanChunk(PrefillChunk(state.token, event.start, event.stop, event.block_ids, restarts, event.ready)),)


def _scheduled(state: PromptPrefill, event: PromptEvent, now: float) -> Outcome:
    return state, _chunk(state, event, restarts=False)


def _resumed(state: PromptPrefill, event: PromptEvent, now: float) -> Outcome:
    return replace(state, phase=PromptPhase.COMPUTING), _chunk(state, event, restarts=True)


def _preempted(state: PromptPrefill, event: PromptEvent, now: float) -> Outcome:
    return replace(state, phase=PromptPhase.PREEMPTED), (PlanStop(PrefillStop(state.token, ended=False)),)


def _leased(state: PromptPrefill, event: PromptEvent, now: float) -> Outcome:
    assert isinstance(event, PromptLeased)
    return replace(state, phase=PromptPhase.ENDED), (PlanLease(event.lease),)


def _given_up(state: PromptPrefill, event: PromptEvent, now: float) -> Outcome:
    return replace(state, phase=PromptPhase.ENDED), (PlanStop(PrefillStop(state.token, ended=True)),)


def _never_begun(state: PromptPrefill, event: PromptEvent, now: float) -> Outcome:
    return replace(state, phase=PromptPhase.ENDED), ()


def _unknown(state: PromptPrefill, event: PromptEvent, now: float) -> Outcome:
    raise AssertionError("P's ranks do not know this prompt yet")


_P = PromptPhase
PROMPT_PREFILL: TransitionTable[PromptPrefill, PromptEvent, PromptEffect] = TransitionTable(
    "prompt in P's scheduler",
    PromptPhase,
    get_args(PromptEvent),
    (
        ((_P.WAITING,), (LeftInQueue,), _queued),
        ((_P.WAITING,), (PrefillBegun,), _begun),
        ((_P.WAITING,), (PromptGivenUp,), _never_begun),
        ((_P.WAITING,), (StepScheduled, PromptLeased), _unknown),
        ((_P.COMPUTING,), (StepScheduled,), _scheduled),
        ((_P.COMPUTING,), (BlocksTaken,), _preempted),
        ((_P.PREEMPTED,), (StepScheduled,), _resumed),
        (BEGUN, (PromptLeased,), _leased),
        (BEGUN, (PromptGivenUp,), _given_up),
        # A request that waits holds no blocks; one that the engine preempts twice has lost them once.
        (PromptPhase, get_args(PromptEvent), ignore),
    ),
)
