"""P's state machine of one prompt that its engine computes, from its first step to its lease. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``::

    WAITING ─▶ COMPUTING ◀──▶ PREEMPTED
       │           │              │
       └───────────┴──────┬───────┘
                          ▼
                   GRANTED or ENDED

The tokens that are computed leave meanwhile (``transfer.sender``). A D that reads P's pages by itself may do so from
the end of the last step on. The blocks are the engine's: it may take them back at any time, and then says so. Blocks
have a life, which ends when the engine takes them back. What a step of an earlier life has computed counts no more.
From GRANTED on the lease holds the blocks (``lease.LEASE``).
"""

from __future__ import annotations

import enum
import math
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.wire.states import Tick, TransitionTable, ignore

PREEMPTED_SECONDS = 5.0
"""How long reads wait for a prompt that the engine has preempted. D holds blocks for them. P's engine may wait for
blocks of leases that D releases only when it gets such blocks itself: both would wait until D's deadline."""
ABANDONED = "P's engine has given the prompt up"
NOT_RESUMED = "P's engine has preempted the prompt, and computes it later"


class ComputingPhase(enum.Enum):
    WAITING = "waiting for its first step"
    COMPUTING = "computing"
    PREEMPTED = "preempted"
    GRANTED = "granted"
    ENDED = "ended"


class ComputingState(msgspec.Struct, frozen=True):
    """State. ``life``: the number of the present life of the blocks. ``computed``: tokens, from the first one on, whose
    KV lies in the present blocks, of all layers. ``refuse_at``: in PREEMPTED, when reads that wait are refused."""

    phase: ComputingPhase = ComputingPhase.WAITING
    life: int = 0
    computed: int = 0
    refuse_at: float | None = None

    @property
    def due(self) -> float:
        """When a Tick changes something."""
        return math.inf if self.refuse_at is None or self.phase is not ComputingPhase.PREEMPTED else self.refuse_at


# --- events -----------------------------------------------------------------------------------------------------


class ChunkPlanned(msgspec.Struct, frozen=True):
    """A step has begun that computes tokens of the prompt. ``restarts``: in new blocks, from their first one on."""

    restarts: bool


class TokensComputed(msgspec.Struct, frozen=True):
    """The device has computed the first ``tokens`` tokens, of all layers, into the blocks of this ``life``. ``whole``:
    these are all."""

    life: int
    tokens: int
    whole: bool = False


class LayersComputed(msgspec.Struct, frozen=True):
    """The device has computed some layers of a step into the blocks of this ``life``."""

    life: int


class BlocksLost(msgspec.Struct, frozen=True):
    """The engine has taken the blocks back. ``ended``: the prompt will not be handed over."""

    ended: bool


class LeaseBegins(msgspec.Struct, frozen=True):
    """The prompt is computed, and from now on the lease holds its blocks."""


ComputingEvent = ChunkPlanned | TokensComputed | LayersComputed | BlocksLost | LeaseBegins | Tick

# --- effects ----------------------------------------------------------------------------------------------------


class ResumeReads(msgspec.Struct, frozen=True):
    """Reads that wait may find more chunks whose bytes lie in the blocks."""


class PostGrant(msgspec.Struct, frozen=True):
    """All of the prompt lies in the blocks: a D that reads them by itself may do so from now on."""


class FailReads(msgspec.Struct, frozen=True):
    """The reads that run get no more bytes, or not soon: refuse them."""

    why: str = ABANDONED


ComputingEffect = ResumeReads | PostGrant | FailReads
Outcome = tuple[ComputingState, tuple[ComputingEffect, ...]]

# --- transitions ------------------------------------------------------------------------------------------------

_P = ComputingPhase


def _chunk(state: ComputingState, event: ComputingEvent, now: float) -> Outcome:
    assert isinstance(event, ChunkPlanned)
    if event.restarts:
        return _restart(state, event, now)
    return replace(state, phase=_P.COMPUTING), (ResumeReads(),)


def _chunk_after_preemption(state: ComputingState, event: ComputingEvent, now: float) -> Outcome:
    assert isinstance(event, ChunkPlanned)
    # Which blocks hold the tokens before this chunk is not known, so reads wait for the lease.
    return _restart(state, event, now) if event.restarts else (state, ())


def _restart(state: ComputingState, event: ComputingEvent, now: float) -> Outcome:
    return ComputingState(_P.COMPUTING, state.life + 1, 0), (ResumeReads(),)


def _computed(state: ComputingState, event: ComputingEvent, now: float) -> Outcome:
    assert isinstance(event, TokensComputed)
    if event.life != state.life or event.tokens <= state.computed:
        return state, ()
    computed = replace(state, computed=event.tokens)
    return computed, (ResumeReads(), PostGrant()) if event.whole else (ResumeReads(),)


def _layers(state: ComputingState, event: ComputingEvent, now: float) -> Outcome:
    assert isinstance(event, LayersComputed)
    return state, (ResumeReads(),) if event.life == state.life else ()


def _lost(state: ComputingState, event: ComputingEvent, now: float) -> Outcome:
    assert isinstance(event, BlocksLost)
    if event.ended:
        return replace(state, phase=_P.ENDED, refuse_at=None), (FailReads(),)
    return replace(state, phase=_P.PREEMPTED, computed=0, refuse_at=now + PREEMPTED_SECONDS), ()


def _not_resumed(state: ComputingState, event: ComputingEvent, now: float) -> Outcome:
    if state.refuse_at is None or now < state.refuse_at:
        return state, ()
    return replace(state, refuse_at=now + PREEMPTED_SECONDS), (FailReads(NOT_RESUMED),)


def _granted(state: ComputingState, event: ComputingEvent, now: float) -> Outcome:
    return replace(state, phase=_P.GRANTED, refuse_at=None), (ResumeReads(),)


_LIVE = (_P.WAITING, _P.COMPUTING, _P.PREEMPTED)
COMPUTING_PROMPT: TransitionTable[ComputingState, ComputingEvent, ComputingEffect] = TransitionTable(
    "prompt that P computes",
    ComputingPhase,
    get_args(ComputingEvent),
    (
        ((_P.WAITING, _P.COMPUTING), (ChunkPlanned,), _chunk),
        ((_P.PREEMPTED,), (ChunkPlanned,), _chunk_after_preemption),
        ((_P.COMPUTING,), (TokensComputed,), _computed),
        ((_P.COMPUTING,), (LayersComputed,), _layers),
        ((_P.PREEMPTED,), (Tick,), _not_resumed),
        (_LIVE, (BlocksLost,), _lost),
        (_LIVE, (LeaseBegins,), _granted),
        # A step that was under way when the blocks were lost, or events after the end.
        (ComputingPhase, get_args(ComputingEvent), ignore),
    ),
)
