"""D's state machine of one request whose P is known by address, and whose lease is known by name. Pure.

``step(state, event, now) -> (state, effects)``::

    LOCATING ──▶ FINDING ──▶ CONNECTING ──▶ AWAITING_GRANT ──▶ FOUND ──▶ ENDED
                    └──────▶ LEFT ──────────────────────────────────────▶  ▲
    every state ── P failed, or the request has ended ─────────────────────┘

D's engine gives the request no blocks meanwhile. In LOCATING, P's bootstrap page is fetched, where the request names
that page and not the address of a rank. In FINDING, P has not begun to compute the prompt. Where P sends bytes while
it computes them, the request goes on as soon as P has begun: CONNECTING finds out whether P sends over the data plane.
Otherwise D could use no block before P has computed the whole prompt, so the request waits for the grant, and the load
then goes inside a step. The deadline is that of D's scheduler half: ``NameLeft``. It begins anew where P says that its
engine has the prompt. In FOUND, D's engine has not taken the answer yet.

A request that does not need its lease any more must not leave it to P's clock. Where P has told the lease, D releases
it at once. Where P does not know the prompt yet, P may have it already in its engine: the question stays open, LEFT.
"""

from __future__ import annotations

import enum
import math
from typing import Literal, get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.wire.states import Tick, TransitionTable, ignore

RETRY_SECONDS = 0.2
"""Seconds until D asks again after P has said that it does not know the name yet. P holds a question for long."""
LEFT_SECONDS = 5.0
"""How long a question stays open whose request has ended. A router ends P's leg together with D's, so that P either has
finished the prompt by then or never does."""


class RendezvousPhase(enum.Enum):
    LOCATING = "locating"
    FINDING = "finding"
    CONNECTING = "connecting"
    AWAITING_GRANT = "awaiting the grant"
    FOUND = "found"
    LEFT = "left"
    ENDED = "ended"


class RendezvousState(msgspec.Struct, frozen=True):
    """State. ``retry_at``: when D asks again, in seconds as ``now``; ``None`` while a question is open, or none is
    needed. ``until``: when LEFT ends. ``lost``: whether the connection to P was lost since P has last answered."""

    phase: RendezvousPhase = RendezvousPhase.FINDING
    retry_at: float | None = None
    until: float = 0.0
    lost: bool = False

    @property
    def due(self) -> float:
        """When a Tick changes something."""
        retry_at = math.inf if self.retry_at is None else self.retry_at
        if self.phase is RendezvousPhase.LEFT:
            return min(self.until, retry_at)
        return retry_at if self.phase in _ASKING else math.inf


_R = RendezvousPhase
_ASKING = (_R.FINDING, _R.AWAITING_GRANT)
_WAITING = (_R.LOCATING, *_ASKING, _R.CONNECTING)

# --- events -----------------------------------------------------------------------------------------------------


class PeerLocated(msgspec.Struct, frozen=True):
    """The address of P's rank is known."""


class NameResolved(msgspec.Struct, frozen=True):
    """P knows the prompt. ``granted``, ``streams``: as in ``messages.Resolved``."""

    granted: bool
    streams: bool


class NameUnresolved(msgspec.Struct, frozen=True):
    """What D asked for has not happened. ``final``, ``known``: as in ``messages.Unresolved``."""

    final: bool
    detail: str = ""
    known: bool = False


class PlaneFound(msgspec.Struct, frozen=True):
    """The handshakes with P's ranks have ended. ``p_sends``: on all data planes P sends the bytes."""

    p_sends: bool


class PeerFailed(msgspec.Struct, frozen=True):
    """P cannot be found, or D cannot use what P has sent."""

    why: str


class ContactLost(msgspec.Struct, frozen=True):
    """The connection to P could not be made, or has ended. A busy P may have ended it: D connects once more."""

    why: str


class AnswerTaken(msgspec.Struct, frozen=True):
    """D's engine keeps the lease that P has told."""


class NameLeft(msgspec.Struct, frozen=True):
    """The request does not need the answer any more."""


RendezvousEvent = (
    PeerLocated | NameResolved | NameUnresolved | PlaneFound | PeerFailed | ContactLost | AnswerTaken | NameLeft | Tick
)

# --- effects ----------------------------------------------------------------------------------------------------


class FetchPage(msgspec.Struct, frozen=True):
    """Fetch P's bootstrap page; ``PeerLocated`` or ``PeerFailed`` follows."""


class AskName(msgspec.Struct, frozen=True):
    """Ask P."""

    until: Literal["begun", "granted"]


class BeginLinks(msgspec.Struct, frozen=True):
    """Begin the handshakes with P's ranks; ``PlaneFound`` follows in CONNECTING."""


class ReportFound(msgspec.Struct, frozen=True):
    """Report P's last answer. ``streams``: P computes the prompt, and sends it meanwhile."""

    streams: bool


class ReportLost(msgspec.Struct, frozen=True):
    """Report that D must prefill."""

    why: str


class ReportKnown(msgspec.Struct, frozen=True):
    """Report that P's engine has the prompt, so that D may wait on."""


class ReleaseUnneeded(msgspec.Struct, frozen=True):
    """Release the lease of P's last answer."""


class SendLeave(msgspec.Struct, frozen=True):
    """Tell P that a question is not needed any more."""


RendezvousEffect = (
    FetchPage | AskName | BeginLinks | ReportFound | ReportLost | ReportKnown | ReleaseUnneeded | SendLeave
)
Outcome = tuple[RendezvousState, tuple[RendezvousEffect, ...]]

# --- transitions ------------------------------------------------------------------------------------------------


def begin(*, located: bool) -> Outcome:
    """A new rendezvous. ``located``: the address of P's rank is known."""
    if located:
        return RendezvousState(), (AskName("begun"),)
    return RendezvousState(RendezvousPhase.LOCATING), (FetchPage(),)


def _ended(*effects: RendezvousEffect) -> Outcome:
    return RendezvousState(RendezvousPhase.ENDED), effects


def _report_found(*, streams: bool) -> Outcome:
    return RendezvousState(RendezvousPhase.FOUND), (ReportFound(streams),)


def _await_grant(*effects: RendezvousEffect) -> Outcome:
    return RendezvousState(RendezvousPhase.AWAITING_GRANT), (*effects, AskName("granted"))


def _contact_lost(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    assert isinstance(event, ContactLost)
    if state.lost:
        return _ended(ReportLost(event.why))
    return replace(state, lost=True, retry_at=now + RETRY_SECONDS), ()


def _located(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    return begin(located=True)


def _found(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    assert isinstance(event, NameResolved)
    if event.granted:
        return _report_found(streams=False)
    if event.streams:
        return RendezvousState(RendezvousPhase.CONNECTING), (BeginLinks(),)
    return _await_grant(BeginLinks())


def _granted(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    assert isinstance(event, NameResolved)
    return _report_found(streams=False) if event.granted else (replace(state, retry_at=now + RETRY_SECONDS), ())


def _plane_found(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    assert isinstance(event, PlaneFound)
    return _report_found(streams=True) if event.p_sends else _await_grant()


def _unresolved(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    assert isinstance(event, NameUnresolved)
    if event.final:
        return _ended(ReportLost(event.detail or "P does not hand the prompt over"))
    return replace(state, retry_at=now + RETRY_SECONDS, lost=False), (ReportKnown(),) if event.known else ()


def _retry(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    if state.retry_at is None or now < state.retry_at:
        return state, ()
    until: Literal["begun", "granted"] = "granted" if state.phase is RendezvousPhase.AWAITING_GRANT else "begun"
    return replace(state, retry_at=None), (AskName(until),)


def _failed(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    assert isinstance(event, PeerFailed)
    return _ended(ReportLost(event.why))


def _end(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    return _ended()


def _leave(state: RendezvousState) -> tuple[RendezvousEffect, ...]:
    return () if state.retry_at is not None else (SendLeave(),)


def _left(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    return replace(state, phase=RendezvousPhase.LEFT, until=now + LEFT_SECONDS), ()


def _left_grant(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    return _ended(*_leave(state), ReleaseUnneeded())


def _left_known(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    return _ended(ReleaseUnneeded())


def _left_unresolved(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    assert isinstance(event, NameUnresolved)
    return _ended() if event.final else (replace(state, retry_at=now + RETRY_SECONDS), ())


def _left_tick(state: RendezvousState, event: RendezvousEvent, now: float) -> Outcome:
    return _ended(*_leave(state)) if now >= state.until else _retry(state, event, now)


RENDEZVOUS: TransitionTable[RendezvousState, RendezvousEvent, RendezvousEffect] = TransitionTable(
    "rendezvous",
    RendezvousPhase,
    get_args(RendezvousEvent),
    (
        ((_R.LOCATING,), (PeerLocated,), _located),
        ((_R.FINDING,), (NameResolved,), _found),
        ((_R.AWAITING_GRANT,), (NameResolved,), _granted),
        ((_R.CONNECTING,), (PlaneFound,), _plane_found),
        (_ASKING, (NameUnresolved,), _unresolved),
        (_ASKING, (Tick,), _retry),
        (_WAITING, (PeerFailed,), _failed),
        (_ASKING, (ContactLost,), _contact_lost),
        ((_R.LOCATING,), (NameLeft,), _end),
        ((_R.FINDING,), (NameLeft,), _left),
        ((_R.AWAITING_GRANT,), (NameLeft,), _left_grant),
        ((_R.CONNECTING, _R.FOUND), (NameLeft,), _left_known),
        ((_R.LEFT,), (NameResolved,), _left_known),
        ((_R.LEFT,), (NameUnresolved,), _left_unresolved),
        ((_R.LEFT,), (Tick,), _left_tick),
        ((_R.LEFT,), (PeerFailed, ContactLost), _end),
        ((_R.FOUND,), (AnswerTaken,), _end),
        # An answer may come twice, or late; links may be ready before they are needed.
        (RendezvousPhase, get_args(RendezvousEvent), ignore),
    ),
)
