"""D's link to one life of one P rank: handshake, choice of a data plane, failure. Pure: no I/O, no clock.

::

    CONNECTED ─▶ GREETING ─▶ ATTACHING ─▶ MAPPING ─▶ ATTACHED          (each ─▶ FAILED)
                    │          ▲ ▲ └─────────┴── the next plane where P or the memory refuses one
                    └─▶ GREETED ─┘   where D only releases a lease: that needs a session at P, but no data plane

A link that has failed is replaced, never used again.
"""

from __future__ import annotations

import enum
from typing import get_args

import msgspec
from msgspec.structs import replace

from kvferry.connector.decode_side.handover import Reason
from kvferry.connector.wire.states import Tick, TransitionTable, ignore


class LinkPhase(enum.Enum):
    CONNECTED = "connected"  # control messages only; no handshake was needed yet
    GREETING = "waiting for the answer to the handshake"
    GREETED = "known to P"  # control messages only
    ATTACHING = "waiting for the data plane"
    MAPPING = "waiting for P's memory to be mapped"
    ATTACHED = "attached"
    FAILED = "failed"


class LinkState(msgspec.Struct, frozen=True):
    """``timeout``: seconds that a handshake may take. ``plane_wanted``: a read needs a data plane. ``plane``: the data
    plane under negotiation or in use."""

    timeout: float
    phase: LinkPhase = LinkPhase.CONNECTED
    deadline: float = float("inf")
    plane: str = ""
    reason: Reason | None = None
    plane_wanted: bool = False


# --- events -----------------------------------------------------------------------------------------------------


class GreetingWanted(msgspec.Struct, frozen=True):
    """A message needs a session at P."""


class HandshakeWanted(msgspec.Struct, frozen=True):
    """A read needs the link."""


class PeerWelcomed(msgspec.Struct, frozen=True):
    """P's Welcome was checked and fits."""


class PlaneChosen(msgspec.Struct, frozen=True):
    """D has connected its end of this data plane, and asks P for the other end."""

    plane: str


class PlaneAttached(msgspec.Struct, frozen=True):
    """P's end of this data plane is ready. ``ready``: D's end is ready too; else D is mapping P's memory."""

    plane: str
    ready: bool


class MemoryMapped(msgspec.Struct, frozen=True):
    """D can address P's memory."""


class PlaneRejected(msgspec.Struct, frozen=True):
    """This data plane cannot be used; the event contains the reason."""

    plane: str
    why: str


class PlaneLost(msgspec.Struct, frozen=True):
    """The data plane broke; the event contains the reason."""

    why: str


class LinkBroken(msgspec.Struct, frozen=True):
    """The peer does not fit, broke the protocol, or is gone."""

    reason: Reason


LinkEvent = (
    GreetingWanted
    | HandshakeWanted
    | PeerWelcomed
    | PlaneChosen
    | PlaneAttached
    | MemoryMapped
    | PlaneRejected
    | PlaneLost
    | LinkBroken
    | Tick
)

# --- effects ----------------------------------------------------------------------------------------------------


class SendHello(msgspec.Struct, frozen=True):
    """Begin the handshake."""


class ChoosePlane(msgspec.Struct, frozen=True):
    """Choose the best data plane that is left; answer with ``PlaneChosen`` or ``LinkBroken``."""


class DropPlane(msgspec.Struct, frozen=True):
    """Close D's end of this plane and do not choose it again."""

    plane: str
    why: str


class ReportBroken(msgspec.Struct, frozen=True):
    """Write the failure to the log; the reads over the link fail."""

    reason: Reason


LinkEffect = SendHello | ChoosePlane | DropPlane | ReportBroken
Outcome = tuple[LinkState, tuple[LinkEffect, ...]]

# --- transitions ------------------------------------------------------------------------------------------------

_P = LinkPhase


def _greet(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    plane_wanted = isinstance(event, HandshakeWanted)
    return replace(state, phase=_P.GREETING, deadline=now + state.timeout, plane_wanted=plane_wanted), (SendHello(),)


def _want_plane(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    return replace(state, plane_wanted=True), ()


def _welcomed(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    if state.plane_wanted:
        return replace(state, phase=_P.ATTACHING), (ChoosePlane(),)
    return replace(state, phase=_P.GREETED, deadline=float("inf")), ()


def _attach(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    return replace(state, phase=_P.ATTACHING, deadline=now + state.timeout, plane_wanted=True), (ChoosePlane(),)


def _chosen(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    assert isinstance(event, PlaneChosen)
    return replace(state, plane=event.plane), ()


def _attached(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    assert isinstance(event, PlaneAttached)
    if event.plane != state.plane:
        return state, ()  # D has rejected this plane in the meantime
    return _mapped(state, event, now) if event.ready else (replace(state, phase=_P.MAPPING), ())


def _mapped(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    return replace(state, phase=_P.ATTACHED, deadline=float("inf")), ()


def _rejected(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    assert isinstance(event, PlaneRejected)
    if event.plane != state.plane:
        return state, ()
    return _next_plane(state, event.why)


def _lost_while_attaching(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    # P closes a channel that it refuses, and the close arrives before P's answer.
    assert isinstance(event, PlaneLost)
    return _next_plane(state, event.why)


def _next_plane(state: LinkState, why: str) -> Outcome:
    return replace(state, phase=_P.ATTACHING, plane=""), (DropPlane(state.plane, why), ChoosePlane())


def _lost(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    assert isinstance(event, PlaneLost)
    return _fail(state, Reason("peer_lost", event.why, blames="plane"))


def _broken(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    assert isinstance(event, LinkBroken)
    return _fail(state, event.reason)


def _unanswered(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    # Nobody is there, or D may not connect there: another attempt would find the same.
    assert isinstance(event, LinkBroken)
    return _fail(state, replace(event.reason, blames="peer"))


def _late(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    if now < state.deadline:
        return state, ()
    text = f"no answer to the handshake in {state.timeout:g} s ({state.phase.value})"
    return _fail(state, Reason("timeout", text, blames="peer"))


def _out_of_place(state: LinkState, event: LinkEvent, now: float) -> Outcome:
    return _fail(state, Reason("data", f"{type(event).__name__} came while {state.phase.value}"))


def _fail(state: LinkState, reason: Reason) -> Outcome:
    failed = replace(state, phase=_P.FAILED, reason=reason, deadline=float("inf"))
    return failed, (ReportBroken(reason),)


_HANDSHAKE = (_P.GREETING, _P.ATTACHING, _P.MAPPING)

LINK: TransitionTable[LinkState, LinkEvent, LinkEffect] = TransitionTable(
    "link",
    LinkPhase,
    get_args(LinkEvent),
    (
        ((_P.FAILED,), get_args(LinkEvent), ignore),
        ((_P.CONNECTED,), (GreetingWanted, HandshakeWanted), _greet),
        ((_P.GREETING,), (HandshakeWanted,), _want_plane),
        ((_P.GREETED,), (HandshakeWanted,), _attach),
        ((_P.GREETING,), (PeerWelcomed,), _welcomed),
        ((_P.ATTACHING,), (PlaneChosen,), _chosen),
        ((_P.ATTACHING,), (PlaneAttached,), _attached),
        ((_P.MAPPING,), (MemoryMapped,), _mapped),
        ((_P.ATTACHING, _P.MAPPING), (PlaneRejected,), _rejected),
        ((_P.ATTACHING, _P.MAPPING), (PlaneLost,), _lost_while_attaching),
        ((_P.ATTACHED,), (PlaneLost,), _lost),
        (_HANDSHAKE, (Tick,), _late),
        ((_P.GREETING,), (LinkBroken,), _unanswered),
        (LinkPhase, (LinkBroken,), _broken),
        (LinkPhase, (GreetingWanted, HandshakeWanted, PlaneRejected, Tick, PlaneLost), ignore),
        (LinkPhase, (PeerWelcomed, PlaneAttached, PlaneChosen, MemoryMapped), _out_of_place),
    ),
)
