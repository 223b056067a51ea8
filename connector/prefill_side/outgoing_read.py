"""P's state machine of one read that it packs and sends. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``::

    SENDING ──▶ SENT ──▶ DRAINING ──▶ ENDED
       │                     ▲
       └─ failed, stopped ───┘

In SENDING, chunks are left to pack or to hand to the channel. In SENT the channel has every chunk, and may still read
one in place, from P's pages. In DRAINING nothing more is sent, but copies that were begun may still read P's pages;
only their end proves that nothing does. Exactly one ``EndRead`` leaves the machine, when nothing reads P's pages any
more.
"""

from __future__ import annotations

import enum
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.wire.states import TransitionTable, ignore


class SendPhase(enum.Enum):
    SENDING = "sending"
    SENT = "sent"
    DRAINING = "draining"
    ENDED = "ended"


UNDER_WAY = (SendPhase.SENDING, SendPhase.SENT)


class SendProgress(msgspec.Struct, frozen=True):
    """State. Of ``chunks``, the first ``begun`` are packed or being packed, and the channel has the first ``sent``."""

    phase: SendPhase
    chunks: int
    begun: int = 0
    sent: int = 0


# --- events -----------------------------------------------------------------------------------------------------


class ChunkBegun(msgspec.Struct, frozen=True):
    """The next chunk is being packed, or is about to be sent directly from P's pages."""


class ChunkSent(msgspec.Struct, frozen=True):
    """The channel has the next chunk."""


class ChunkLost(msgspec.Struct, frozen=True):
    """The first chunk that has begun and is not sent must be packed again: P's engine has taken its blocks back, while
    it was being packed. The chunks that began after it are lost too."""


class ChannelIdle(msgspec.Struct, frozen=True):
    """The channel reads none of this read's pages."""


class SendFailed(msgspec.Struct, frozen=True):
    """A chunk could not be packed or sent. ``why`` completes the line in the log and P's answer to D."""

    why: str


class SendStopped(msgspec.Struct, frozen=True):
    """D cancelled the read, its lease ended, or its session ended."""


class CopiesEnded(msgspec.Struct, frozen=True):
    """No copy out of P's pages runs any more."""


OutgoingReadEvent = ChunkBegun | ChunkSent | ChunkLost | ChannelIdle | SendFailed | SendStopped | CopiesEnded

# --- effects ----------------------------------------------------------------------------------------------------


class DenyRead(msgspec.Struct, frozen=True):
    """Send D a Deny that contains why the read failed."""

    why: str


class StopSending(msgspec.Struct, frozen=True):
    """Send no more of the read; answer with ``CopiesEnded``."""


class EndRead(msgspec.Struct, frozen=True):
    """Nothing reads P's pages for this read any more, once."""


OutgoingReadEffect = DenyRead | StopSending | EndRead
Outcome = tuple[SendProgress, tuple[OutgoingReadEffect, ...]]


def begin_sending(chunks: int) -> SendProgress:
    """A read of ``chunks`` chunks, at least one."""
    return SendProgress(SendPhase.SENDING, chunks)


# --- transitions ------------------------------------------------------------------------------------------------


def _chunk_begun(state: SendProgress, event: OutgoingReadEvent, now: float) -> Outcome:
    assert state.begun < state.chunks
    return replace(state, begun=state.begun + 1), ()


def _chunk_sent(state: SendProgress, event: OutgoingReadEvent, now: float) -> Outcome:
    assert state.sent < state.begun
    sent = state.sent + 1
    return replace(state, sent=sent, phase=SendPhase.SENT if sent == state.chunks else SendPhase.SENDING), ()


def _chunk_lost(state: SendProgress, event: OutgoingReadEvent, now: float) -> Outcome:
    assert state.sent < state.begun
    return replace(state, begun=state.begun - 1), ()


def _failed(state: SendProgress, event: OutgoingReadEvent, now: float) -> Outcome:
    assert isinstance(event, SendFailed)
    return replace(state, phase=SendPhase.DRAINING), (DenyRead(event.why), StopSending())


def _drain(state: SendProgress, event: OutgoingReadEvent, now: float) -> Outcome:
    return replace(state, phase=SendPhase.DRAINING), (StopSending(),)


def _end(state: SendProgress, event: OutgoingReadEvent, now: float) -> Outcome:
    return replace(state, phase=SendPhase.ENDED), (EndRead(),)


def _chunk_too_late(state: SendProgress, event: OutgoingReadEvent, now: float) -> Outcome:
    raise AssertionError(f"a chunk of a read that is {state.phase.value}")


OUTGOING_READ: TransitionTable[SendProgress, OutgoingReadEvent, OutgoingReadEffect] = TransitionTable(
    "outgoing read",
    SendPhase,
    get_args(OutgoingReadEvent),
    (
        ((SendPhase.SENDING,), (ChunkBegun,), _chunk_begun),
        ((SendPhase.SENDING,), (ChunkSent,), _chunk_sent),
        ((SendPhase.SENDING,), (ChunkLost,), _chunk_lost),
        ((SendPhase.SENT,), (ChannelIdle,), _drain),
        (UNDER_WAY, (SendFailed,), _failed),
        (UNDER_WAY, (SendStopped,), _drain),
        ((SendPhase.DRAINING,), (CopiesEnded,), _end),
        (SendPhase, (ChunkBegun, ChunkSent, ChunkLost), _chunk_too_late),
        # Chunks are left to send; or the read has stopped already.
        (SendPhase, (ChannelIdle, SendFailed, SendStopped, CopiesEnded), ignore),
    ),
)
