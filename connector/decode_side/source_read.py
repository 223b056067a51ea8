"""D's read from one P rank, from the ask to the commit. Pure: no I/O, no clock.

The wire has two sockets, so chunks of a read that P sends can arrive before the grant::

    WAITING ─▶ ASKED ────────────▶ MOVING ────────────▶ LANDED ─▶ COMMITTING ─▶ COMMITTED
                 │                   ▲                    ▲  └───────────────────▲
                 ▼       the grant   │        the grant   │                      │ the grant
              OVERTAKEN ─────────────┘                    │                      │
                 └──────────▶ LANDED_UNGRANTED ───────────┴─▶ AWAITING_GRANT ────┘

    before LANDED: StopRead ─▶ DRAINING while copies write D's pages ─▶ STOPPED

A read that was stopped is remembered as long as messages of it can arrive. P answers how many it has sent. The link
fails where P does not answer, or where these messages do not come.

The effects that are events of ``handover`` go to the hand-over that the read belongs to.
"""

from __future__ import annotations

import enum
import math
from typing import Literal, get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.decode_side.handover import (
    HandoverEvent,
    Reason,
    SourceCommitted,
    SourceDrained,
    SourceFailed,
    SourceGranted,
    SourceMoved,
    SourceProgress,
)
from kvferry.connector.wire.states import Tick, TransitionTable, ignore

Fence = Literal["pushed", "posted", "asked"]
"""The proof that a lease still stood when its blocks were read. Either P sent the bytes itself, and P sends nothing
under a lease that has ended; or the grant that P posted on its grant board still stands; or P answers a Commit."""


class ReadPhase(enum.Enum):
    WAITING = "waiting for the link"
    ASKED = "asked"
    OVERTAKEN = "moving before the grant"
    MOVING = "moving"
    LANDED_UNGRANTED = "landed before the grant"
    LANDED = "landed"
    AWAITING_GRANT = "waiting for the grant to commit"
    COMMITTING = "committing"
    COMMITTED = "committed"
    DRAINING = "draining"
    STOPPED = "stopped"


class ReadState(msgspec.Struct, frozen=True):
    """``source``: the number of the P rank in its hand-over. ``writing``: copies into D's pages under way. ``left``:
    messages whose copies have not begun. ``awaitable``: the engine can wait for all copies that have begun.
    ``timeout``: seconds that the last messages of a stopped read may take; ``deadline``: local seconds, as ``now``."""

    source: int
    phase: ReadPhase = ReadPhase.WAITING
    fence: Fence = "pushed"
    writing: int = 0
    left: int = 0
    awaitable: bool = True
    timeout: float = float("inf")
    deadline: float = float("inf")

    @property
    def stopped(self) -> bool:
        """Whether no more copies into D's pages may begin."""
        return self.phase in (ReadPhase.DRAINING, ReadPhase.STOPPED)

    @property
    def due(self) -> float:
        """When a Tick changes something."""
        return self.deadline if self.stopped and self.left else math.inf

    @property
    def awaits_grant(self) -> bool:
        return self.phase in (
            ReadPhase.ASKED,
            ReadPhase.OVERTAKEN,
            ReadPhase.LANDED_UNGRANTED,
            ReadPhase.AWAITING_GRANT,
        )

    @property
    def landed(self) -> bool:
        """Whether all bytes lie in D's pages."""
        return self.phase in LANDED

    @property
    def all_begun(self) -> bool:
        """Whether all copies into D's pages have ended, or are under way and the engine can wait for them."""
        return self.landed or (self.writing > 0 and self.left == 0 and self.awaitable)


LANDED = (
    ReadPhase.LANDED_UNGRANTED,
    ReadPhase.LANDED,
    ReadPhase.AWAITING_GRANT,
    ReadPhase.COMMITTING,
    ReadPhase.COMMITTED,
)

# --- events -----------------------------------------------------------------------------------------------------


class ReadAsked(msgspec.Struct, frozen=True):
    """D asked P, or uses P's posted grant, also one that P posted after D had asked. ``left``: messages that P will
    send, 0 where D reads P's pages."""

    left: int
    fence: Fence


class NothingToRead(msgspec.Struct, frozen=True):
    """The P rank holds nothing that D needs of this prompt."""


class ReadGranted(msgspec.Struct, frozen=True):
    """P's grant was checked and fits."""


class WriteBegan(msgspec.Struct, frozen=True):
    """A copy into D's pages has begun, or has ended at once. ``left``: messages whose copies have not begun after it.
    ``awaitable``: the engine can wait for the copy."""

    left: int
    awaitable: bool = True


class WriteMoved(msgspec.Struct, frozen=True):
    """A copy that takes long has moved bytes. ``awaitable``: the engine can wait for the rest of it. It is the read's
    only copy."""

    awaitable: bool = False


class WriteEnded(msgspec.Struct, frozen=True):
    """A copy into D's pages has ended. ``failure``: why its bytes are not there; ``None`` where they are."""

    failure: Reason | None = None


class ReadFailed(msgspec.Struct, frozen=True):
    """P refused the read, the link failed, or the data are wrong."""

    reason: Reason


class CommitWanted(msgspec.Struct, frozen=True):
    """All reads of the hand-over have landed."""


class CommitAnswered(msgspec.Struct, frozen=True):
    """``ok``: the lease stood after the last byte was read."""

    ok: bool


class StopRead(msgspec.Struct, frozen=True):
    """The hand-over has failed or was cancelled."""


class MessagesLeft(msgspec.Struct, frozen=True):
    """Messages of a stopped read were discarded, or will not be sent: ``left`` can still arrive."""

    left: int


class HandoverEnded(msgspec.Struct, frozen=True):
    """The engine has the result."""


ReadEvent = (
    ReadAsked
    | NothingToRead
    | ReadGranted
    | WriteBegan
    | WriteMoved
    | WriteEnded
    | ReadFailed
    | CommitWanted
    | CommitAnswered
    | StopRead
    | MessagesLeft
    | HandoverEnded
    | Tick
)

# --- effects ----------------------------------------------------------------------------------------------------


class SendCommit(msgspec.Struct, frozen=True):
    """Ask P whether the lease still stands; answer with ``CommitAnswered``."""


class CheckPostedGrant(msgspec.Struct, frozen=True):
    """Look whether P's posted grant still stands; answer with ``CommitAnswered``."""


class CancelRead(msgspec.Struct, frozen=True):
    """Let no channel write D's pages, and have P stop sending."""


class ForgetRead(msgspec.Struct, frozen=True):
    """No message of the read can arrive any more."""


class FailLink(msgspec.Struct, frozen=True):
    """P has not ended a stopped read in time."""


ReadEffect = HandoverEvent | SendCommit | CheckPostedGrant | CancelRead | ForgetRead | FailLink
Outcome = tuple[ReadState, tuple[ReadEffect, ...]]

# --- transitions ------------------------------------------------------------------------------------------------

_P = ReadPhase


def _asked(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    assert isinstance(event, ReadAsked)
    return replace(state, phase=_P.ASKED, left=event.left, fence=event.fence), ()


def _nothing(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    return replace(state, phase=_P.LANDED), (SourceMoved(state.source),)


def _granted(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    return replace(state, phase=_P.MOVING), (SourceGranted(state.source),)


def _granted_again(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    return state, (SourceProgress(),)


def _granted_after_landing(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    return replace(state, phase=_P.LANDED), (SourceGranted(state.source),)


def _granted_at_last(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    return replace(state, phase=_P.COMMITTED), (SourceCommitted(state.source),)


def _began(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    assert isinstance(event, WriteBegan)
    phase = _P.MOVING if state.phase is _P.MOVING else _P.OVERTAKEN
    # The hand-over must know that its pages are written, also while the grant is on its way.
    state = replace(
        state, phase=phase, writing=state.writing + 1, left=event.left, awaitable=state.awaitable and event.awaitable
    )
    return state, (SourceProgress(),)


def _moved(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    assert isinstance(event, WriteMoved)
    return replace(state, awaitable=state.awaitable or event.awaitable), (SourceProgress(),)


def _ended(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    assert isinstance(event, WriteEnded)
    state = replace(state, writing=state.writing - 1)
    if event.failure is not None:
        return state, (SourceFailed(state.source, event.failure),)
    if state.writing or state.left:
        return state, (SourceProgress(),)
    phase = _P.LANDED if state.phase is _P.MOVING else _P.LANDED_UNGRANTED
    return replace(state, phase=phase), (SourceMoved(state.source),)


def _ended_while_draining(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    state = replace(state, writing=state.writing - 1)
    if state.writing:
        return state, ()
    return replace(state, phase=_P.STOPPED), (SourceDrained(state.source),)


def _failed(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    assert isinstance(event, ReadFailed)
    return state, (SourceFailed(state.source, event.reason),)


def _commit(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    if state.fence == "pushed":
        return replace(state, phase=_P.COMMITTED), (SourceCommitted(state.source),)
    return replace(state, phase=_P.COMMITTING), (SendCommit() if state.fence == "asked" else CheckPostedGrant(),)


def _commit_ungranted(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    # The grant names the prompt of the lease, so the read counts only once the grant is here.
    return replace(state, phase=_P.AWAITING_GRANT), ()


def _answered(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    assert isinstance(event, CommitAnswered)
    if event.ok:
        return replace(state, phase=_P.COMMITTED), (SourceCommitted(state.source),)
    return state, (SourceFailed(state.source, Reason("expired", "the lease ended before the read was committed")),)


def _stop_waiting(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    return replace(state, phase=_P.STOPPED), (SourceDrained(state.source),)


def _stop(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    state = replace(state, deadline=now + state.timeout)
    if state.writing:
        return replace(state, phase=_P.DRAINING), (CancelRead(),)
    return replace(state, phase=_P.STOPPED), (CancelRead(), SourceDrained(state.source))


def _drained(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    return state, (SourceDrained(state.source),)


def _left(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    assert isinstance(event, MessagesLeft)
    return replace(state, left=event.left), () if event.left else (ForgetRead(),)


def _late(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    if now < state.deadline or not state.left:
        return state, ()
    return replace(state, deadline=float("inf")), (FailLink(),)


def _forget(state: ReadState, event: ReadEvent, now: float) -> Outcome:
    return state, () if state.stopped and state.left else (ForgetRead(),)


SOURCE_READ: TransitionTable[ReadState, ReadEvent, ReadEffect] = TransitionTable(
    "read from one P rank",
    ReadPhase,
    get_args(ReadEvent),
    (
        ((_P.WAITING, _P.ASKED), (ReadAsked,), _asked),
        ((_P.WAITING,), (NothingToRead,), _nothing),
        ((_P.ASKED, _P.OVERTAKEN), (ReadGranted,), _granted),
        # P computes the prompt, and repeats the grant as a sign of life.
        ((_P.MOVING,), (ReadGranted,), _granted_again),
        ((_P.LANDED_UNGRANTED,), (ReadGranted,), _granted_after_landing),
        ((_P.AWAITING_GRANT,), (ReadGranted,), _granted_at_last),
        ((_P.ASKED, _P.OVERTAKEN, _P.MOVING), (WriteBegan,), _began),
        ((_P.OVERTAKEN, _P.MOVING), (WriteMoved,), _moved),
        ((_P.OVERTAKEN, _P.MOVING), (WriteEnded,), _ended),
        ((_P.DRAINING,), (WriteEnded,), _ended_while_draining),
        ((_P.LANDED,), (CommitWanted,), _commit),
        ((_P.LANDED_UNGRANTED,), (CommitWanted,), _commit_ungranted),
        ((_P.COMMITTING,), (CommitAnswered,), _answered),
        ((_P.WAITING,), (StopRead,), _stop_waiting),
        ((_P.ASKED, _P.OVERTAKEN, _P.MOVING), (StopRead,), _stop),
        # Nothing writes D's pages for a read that has landed or stopped.
        ((*LANDED, _P.STOPPED), (StopRead,), _drained),
        ((_P.DRAINING, _P.STOPPED), (MessagesLeft,), _left),
        ((_P.DRAINING, _P.STOPPED), (Tick,), _late),
        (ReadPhase, (HandoverEnded,), _forget),
        # An error of P or of the link after the stop of a read is no failure of its hand-over.
        ((_P.DRAINING, _P.STOPPED), (ReadFailed,), ignore),
        (ReadPhase, (ReadFailed,), _failed),
        # Messages of P that arrive twice, or too late, change nothing.
        (ReadPhase, get_args(ReadEvent), ignore),
    ),
)
