"""D: one life of a P whose slots D READs, and when NIXL's connection to that P is closed. Pure: no I/O, no clock.

NIXL's connection serves all channels to one P, and outlives them, because a new one costs milliseconds. It is closed
when no channel and no READ uses it any more, if P may be dead::

    SERVING ─── a channel is lost ──▶ DOUBTED ──┐
       │  ◀─── P answers a new one ─────┘       ├── unused ──▶ CLOSED
       └─────── a READ failed ──────▶ BROKEN ───┘

A connection that is unused and SERVING stays, until there are too many such.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from kvferry.transport.planes.nixl_messages import NixlSlots


class SourcePhase(enum.Enum):
    SERVING = "serving"
    DOUBTED = "doubted"
    BROKEN = "broken"
    CLOSED = "closed"


class SourceEvent(enum.Enum):
    JOINED = "P has replied to a new channel"
    LEFT = "a channel ended, and P's process lives on"
    LOST = "a channel ended without a word of P"
    READ_FAILED = "a READ failed"
    UNUSED = "the last channel and the last READ have ended"
    TOO_MANY = "too many connections are unused"


_P, _E = SourcePhase, SourceEvent
TRANSITIONS: Mapping[tuple[SourcePhase, SourceEvent], SourcePhase] = {
    (_P.SERVING, _E.JOINED): _P.SERVING,
    (_P.SERVING, _E.LEFT): _P.SERVING,
    (_P.SERVING, _E.LOST): _P.DOUBTED,
    (_P.SERVING, _E.READ_FAILED): _P.BROKEN,
    (_P.SERVING, _E.UNUSED): _P.SERVING,
    (_P.SERVING, _E.TOO_MANY): _P.CLOSED,
    (_P.DOUBTED, _E.JOINED): _P.SERVING,  # P has just answered; if the connection has broken, a READ fails
    (_P.DOUBTED, _E.LEFT): _P.DOUBTED,
    (_P.DOUBTED, _E.LOST): _P.DOUBTED,
    (_P.DOUBTED, _E.READ_FAILED): _P.BROKEN,
    (_P.DOUBTED, _E.UNUSED): _P.CLOSED,
    (_P.DOUBTED, _E.TOO_MANY): _P.CLOSED,
    (_P.BROKEN, _E.JOINED): _P.BROKEN,
    (_P.BROKEN, _E.LEFT): _P.BROKEN,
    (_P.BROKEN, _E.LOST): _P.BROKEN,
    (_P.BROKEN, _E.READ_FAILED): _P.BROKEN,
    (_P.BROKEN, _E.UNUSED): _P.CLOSED,
    (_P.BROKEN, _E.TOO_MANY): _P.CLOSED,
} | {(_P.CLOSED, event): _P.CLOSED for event in _E}


class NixlSource:
    """``agent``: P's agent. ``checksum``: of its metadata. ``channels``, ``reads``: how many use the connection."""

    def __init__(self, agent: str, slots: NixlSlots, checksum: int) -> None:
        self.agent, self.slots, self.checksum = agent, slots, checksum
        self.phase = SourcePhase.SERVING
        self.channels = self.reads = 0

    @property
    def unused(self) -> bool:
        return not (self.channels or self.reads)

    def join(self) -> None:
        """One more channel."""
        self.channels += 1
        self._step(SourceEvent.JOINED)

    def leave(self, *, lives_on: bool) -> None:
        """A channel has ended. ``lives_on``: P's process has not."""
        self.channels -= 1
        self._step(SourceEvent.LEFT if lives_on else SourceEvent.LOST)

    def begin_read(self) -> None:
        self.reads += 1

    def end_read(self) -> None:
        self.reads -= 1
        self._step()

    def break_off(self) -> None:
        """A READ has failed, or could not begin."""
        self._step(SourceEvent.READ_FAILED)

    def discard(self) -> None:
        """Too many connections are unused, and this one is the oldest."""
        assert self.unused
        self._step(SourceEvent.TOO_MANY)

    def _step(self, *events: SourceEvent) -> None:
        for event in (*events, SourceEvent.UNUSED) if self.unused else events:
            self.phase = TRANSITIONS[self.phase, event]
