"""The consumer's state machine: one hand-over on one rank of D. Pure: no I/O, no clock.

``step(state, event, now) -> (state, effects)``. A hand-over reads from several *sources* (P ranks, numbered from 0);
a phase ends when every source has passed it::

    HANDSHAKING ─▶ READY ─▶ MOVING ─▶ COMMITTING ─▶ DONE
         │           │        │            │
         │           │        ▼            │
         │           │     DRAINING        │
         └───────────┴────────┼────────────┘
                              ▼
                           FAILED

Only MOVING can have I/O that writes D's pages. A failure before or after it ends the hand-over at once; a failure
during it drains first: the pages stay with us until every source has said that nothing can write them any more.
Exactly one ``Report`` leaves the machine, whatever happens (``TRANSITIONS`` is total over live phases).
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from kvferry.connector.metrics import FailureKind


class Phase(enum.Enum):
    HANDSHAKING = "handshaking"
    READY = "ready"
    MOVING = "moving"
    COMMITTING = "committing"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


class Reason(msgspec.Struct, frozen=True):
    """Why a hand-over failed: a kind to count, and one line for the log."""

    kind: FailureKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


LIVE = (Phase.HANDSHAKING, Phase.READY, Phase.MOVING, Phase.COMMITTING, Phase.DRAINING)


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds a phase may last without an event that moves it on."""

    handshake: float
    transfer: float


class Handover(msgspec.Struct, frozen=True):
    """State. ``pending``: sources that have not passed the phase; ``deadline``: local seconds, as ``now``."""

    phase: Phase
    sources: int
    pending: frozenset[int]
    deadline: float
    timeouts: Timeouts
    reason: Reason | None = None


# --- events -----------------------------------------------------------------------------------------------------


class PeerReady(msgspec.Struct, frozen=True):
    """The handshake with a source is complete, a data plane is attached."""

    source: int


class Granted(msgspec.Struct, frozen=True):
    source: int


class Progress(msgspec.Struct, frozen=True):
    """Bytes arrived; the deadline starts anew."""


class Moved(msgspec.Struct, frozen=True):
    """All that a source owed lies in D's pages, and nothing more will be written from it."""

    source: int


class Committed(msgspec.Struct, frozen=True):
    source: int


class Drained(msgspec.Struct, frozen=True):
    """Nothing that was started for a source can write D's pages any more."""

    source: int


class Failed(msgspec.Struct, frozen=True):
    """A source refused, expired, broke or went away."""

    source: int
    reason: Reason


class Cancel(msgspec.Struct, frozen=True):
    """D's engine gave the request up."""

    reason: Reason = Reason("cancelled", "the engine gave the request up")


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


Event = PeerReady | Granted | Progress | Moved | Committed | Drained | Failed | Cancel | Tick

# --- effects ----------------------------------------------------------------------------------------------------


class Ask(msgspec.Struct, frozen=True):
    """Ask every source for its part."""


class Commit(msgspec.Struct, frozen=True):
    """Ask every source whether what was read is still true."""


class Stop(msgspec.Struct, frozen=True):
    """End what was started at every source; answer with ``Drained`` per source where the phase is DRAINING."""


class Release(msgspec.Struct, frozen=True):
    """This request needs the lease no longer."""


class Report(msgspec.Struct, frozen=True):
    """Tell the engine, once. ``reason`` says why it failed, ``None`` where it did not."""

    reason: Reason | None = None

    @property
    def ok(self) -> bool:
        return self.reason is None


Effect = Ask | Commit | Stop | Release | Report
Outcome = tuple[Handover, tuple[Effect, ...]]


def begin(sources: int, timeouts: Timeouts, now: float) -> Outcome:
    """A new hand-over from ``sources`` P ranks; with none there is nothing to fetch and it reports at once."""
    everyone = frozenset(range(sources))
    state = Handover(Phase.HANDSHAKING, sources, everyone, now + timeouts.handshake, timeouts)
    if not sources:
        return _finish(state)
    return state, ()


def step(state: Handover, event: Event, now: float) -> Outcome:
    """One event. Late events of a hand-over that has ended change nothing."""
    if state.phase not in LIVE:
        return state, ()
    return TRANSITIONS[state.phase, type(event)](state, event, now)


# --- transitions ------------------------------------------------------------------------------------------------


def _enter(state: Handover, phase: Phase, now: float) -> Handover:
    everyone = frozenset(range(state.sources))
    return replace(state, phase=phase, pending=everyone, deadline=now + state.timeouts.transfer)


def _finish(state: Handover) -> Outcome:
    # The engine first: its request waits, P's blocks do not.
    return replace(state, phase=Phase.DONE, pending=frozenset()), (Report(), Release())


def _fail(state: Handover, reason: Reason) -> Outcome:
    ended = replace(state, phase=Phase.FAILED, pending=frozenset(), reason=reason)
    return ended, (Stop(), Release(), Report(reason))


def _ignore(state: Handover, event: Event, now: float) -> Outcome:
    return state, ()


def _ready(state: Handover, event: Event, now: float) -> Outcome:
    assert isinstance(event, PeerReady)
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending), ()
    return _enter(state, Phase.READY, now), (Ask(),)


def _granted(state: Handover, event: Event, now: float) -> Outcome:
    return _enter(state, Phase.MOVING, now), ()


def _moved_before_grant(state: Handover, event: Event, now: float) -> Outcome:
    # Data and grant come by different sockets; the first chunk is as good as the grant.
    return _moved(_enter(state, Phase.MOVING, now), event, now)


def _progress(state: Handover, event: Event, now: float) -> Outcome:
    return replace(state, deadline=now + state.timeouts.transfer), ()


def _moved(state: Handover, event: Event, now: float) -> Outcome:
    assert isinstance(event, Moved)
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending, deadline=now + state.timeouts.transfer), ()
    return _enter(state, Phase.COMMITTING, now), (Commit(),)


def _committed(state: Handover, event: Event, now: float) -> Outcome:
    assert isinstance(event, Committed)
    pending = state.pending - {event.source}
    return _finish(state) if not pending else (replace(state, pending=pending), ())


def _fail_now(state: Handover, event: Event, now: float) -> Outcome:
    assert isinstance(event, Failed | Cancel)
    return _fail(state, event.reason)


def _drain(state: Handover, reason: Reason, now: float) -> Outcome:
    # Sources that have moved have no I/O left; the others must say so.
    return replace(state, phase=Phase.DRAINING, deadline=now + state.timeouts.transfer, reason=reason), (Stop(),)


def _fail_after_draining(state: Handover, event: Event, now: float) -> Outcome:
    assert isinstance(event, Failed | Cancel)
    return _drain(state, event.reason, now)


def _drained(state: Handover, event: Event, now: float) -> Outcome:
    assert isinstance(event, Drained | Moved)
    pending = state.pending - {event.source}
    if pending:
        return replace(state, pending=pending), ()
    ended = replace(state, phase=Phase.FAILED, pending=frozenset())
    return ended, (Release(), Report(state.reason))


def _deadline(state: Handover) -> Reason:
    return Reason("timeout", f"nothing moved on in time while {state.phase.value}")


def _late(state: Handover, event: Event, now: float) -> Outcome:
    if now < state.deadline:
        return state, ()
    return _fail(state, _deadline(state))


def _late_moving(state: Handover, event: Event, now: float) -> Outcome:
    return (state, ()) if now < state.deadline else _drain(state, _deadline(state), now)


def _late_draining(state: Handover, event: Event, now: float) -> Outcome:
    # Time is no proof that a write has ended: ask again, keep the pages.
    if now < state.deadline:
        return state, ()
    return replace(state, deadline=now + state.timeouts.transfer), (Stop(),)


Transition = Callable[[Handover, Event, float], Outcome]

TRANSITIONS: dict[tuple[Phase, type], Transition] = {
    (Phase.HANDSHAKING, PeerReady): _ready,
    (Phase.HANDSHAKING, Granted): _ignore,
    (Phase.HANDSHAKING, Progress): _ignore,
    (Phase.HANDSHAKING, Moved): _ignore,
    (Phase.HANDSHAKING, Committed): _ignore,
    (Phase.HANDSHAKING, Drained): _ignore,
    (Phase.HANDSHAKING, Failed): _fail_now,
    (Phase.HANDSHAKING, Cancel): _fail_now,
    (Phase.HANDSHAKING, Tick): _late,
    (Phase.READY, PeerReady): _ignore,
    (Phase.READY, Granted): _granted,
    (Phase.READY, Progress): _granted,
    (Phase.READY, Moved): _moved_before_grant,
    (Phase.READY, Committed): _ignore,
    (Phase.READY, Drained): _ignore,
    (Phase.READY, Failed): _fail_now,
    (Phase.READY, Cancel): _fail_now,
    (Phase.READY, Tick): _late,
    (Phase.MOVING, PeerReady): _ignore,
    (Phase.MOVING, Granted): _progress,
    (Phase.MOVING, Progress): _progress,
    (Phase.MOVING, Moved): _moved,
    (Phase.MOVING, Committed): _ignore,
    (Phase.MOVING, Drained): _ignore,
    (Phase.MOVING, Failed): _fail_after_draining,
    (Phase.MOVING, Cancel): _fail_after_draining,
    (Phase.MOVING, Tick): _late_moving,
    (Phase.COMMITTING, PeerReady): _ignore,
    (Phase.COMMITTING, Granted): _ignore,
    (Phase.COMMITTING, Progress): _ignore,
    (Phase.COMMITTING, Moved): _ignore,
    (Phase.COMMITTING, Committed): _committed,
    (Phase.COMMITTING, Drained): _ignore,
    (Phase.COMMITTING, Failed): _fail_now,
    (Phase.COMMITTING, Cancel): _fail_now,
    (Phase.COMMITTING, Tick): _late,
    (Phase.DRAINING, PeerReady): _ignore,
    (Phase.DRAINING, Granted): _ignore,
    (Phase.DRAINING, Progress): _ignore,
    (Phase.DRAINING, Moved): _drained,
    (Phase.DRAINING, Committed): _ignore,
    (Phase.DRAINING, Drained): _drained,
    (Phase.DRAINING, Failed): _ignore,
    (Phase.DRAINING, Cancel): _ignore,
    (Phase.DRAINING, Tick): _late_draining,
}
