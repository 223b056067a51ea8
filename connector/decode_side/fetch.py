"""One load on one rank of D: its attempts, and in an attempt one read from each P rank. No I/O, no clock.

A state ends when every read has passed it::

    CONNECTING ─▶ READING ─▶ COMMITTING ─▶ DONE
      ▲   │         │  │         │           ▲
      │   │         │  ▼         │           │
      │   │         │ DRAINING   │           │
      │   ▼         ▼  ▼         ▼           │
      │  the attempt has failed ─────────────┤
      └── WAITING ◀──┘                       │
             └───────────────────────────────┘

Only in READING copies into D's pages are under way. A failure while there is one drains first: D keeps the pages until
every copy has ended. In WAITING nothing of an attempt is left.

Progress extends the deadline of READING, up to ``Fetch.end``, which is the same for all attempts. DRAINING has no end
in time. It ends with the copies under way, and these are copies of D's own device and system: a channel that was
stopped writes no page, whatever P does, and a read of P's memory ends with an error when P's process ends.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.link import Link, LinkPhase, Reason
from kvferry.connector.geometry.read_plan import STREAM_MESSAGES, PlannedSpan, in_windows, part_bytes
from kvferry.connector.pages.caches import Ids, PageBox
from kvferry.connector.step_loads.step_loads import StepLoad
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import FailureKind
from kvferry.connector.wire.states import story
from kvferry.connector.wire.step_plan import Load, RankAddress
from kvferry.transport.channels import Copy, Received
from kvferry.transport.errors import IncompatiblePeerError, TransportError
from kvferry.transport.grant_board import PostedGrant

ATTEMPTS_PER_PEER = 2
"""Attempts at one P engine, beside those that only change the data plane: its connection may have broken."""
SAME_PEER_SECONDS = 1.0
"""Seconds between two attempts at one P engine; none before the next data plane, or before another P."""
MENDED_HERE: frozenset[FailureKind] = frozenset(("peer_lost", "timeout", "data"))
"""Failures that another attempt at the same P may mend."""
FINAL: frozenset[FailureKind] = frozenset(("cancelled", "internal"))
"""Failures of D itself, which no other attempt mends. The cause of any other one may lie in this P: another P may serve
the load."""
MAX_STORIES = 4
"""Reads whose phases are in the log line of a failed hand-over."""


class FetchState(enum.Enum):
    CONNECTING = "handshaking"
    READING = "reading"
    COMMITTING = "committing"
    DRAINING = "draining"
    WAITING = "waiting for the next attempt"
    DONE = "done"  # reported


class ReadPhase(enum.Enum):
    WAITING = "waiting for the link"
    CONNECTED = "connected"
    ASKED = "asked"
    MOVING = "moving"
    LANDED = "landed"
    PROVEN = "proven"
    STOPPED = "stopped"


_WAITING, _CONNECTED, _ASKED, _MOVING, _LANDED, _PROVEN, _STOPPED = ReadPhase  # as in ``link``


@dataclass(slots=True, eq=False)
class Fetch:
    """One load. ``now``, ``deadline`` and ``end`` are local seconds, all other times are by ``RankContext.clock``."""

    posted: StepLoad
    load: Load
    """With the lease and the P engine of this attempt."""
    started: float
    ids: list[Ids]
    """Kernel block ids per region."""
    attempts: list[int]
    """Attempts that are left at each of the P engines that the load names."""
    planes: int
    """Data planes that have not been tried beside the first one."""
    end: float
    """When the last attempt must have ended."""
    alone: bool = False
    """No other load began in the same step."""
    state: FetchState = FetchState.WAITING
    deadline: float = math.inf
    """Of the state; in WAITING when the next attempt begins, in DONE when the load is forgotten."""
    peer: int = 0
    """The number of the P engine of this attempt, or of the next one."""
    number: int = 0
    """Of this attempt; the first is 1."""
    reason: Reason | None = None
    """Why the attempt has failed, or the load."""
    reads: list[RankRead] = field(default_factory=list)
    """Of this attempt."""
    nbytes: int = 0
    copied_at: float = 0.0
    """The end of its last copy, where it was noted."""
    granted_at: float = 0.0
    """When P had posted the grant that D asked for before."""
    ended_at: float = 0.0
    history: list[tuple[float, enum.Enum]] = field(default_factory=list)
    """The states of this attempt, each with its begin."""

    @property
    def due(self) -> float:
        return self.deadline

    @property
    def seconds(self) -> float:
        """From the request to the end of the last copy; the thread may come there late, see ``yield_to_engine``."""
        return (self.copied_at or self.ended_at) - self.started

    @property
    def plane_names(self) -> str:
        """The data planes of this attempt."""
        return "+".join(sorted({read.link.plane.name for read in self.reads if read.link.plane is not None})) or "none"

    @property
    def moving(self) -> bool:
        """Whether P has granted a read, or bytes have come."""
        return any(read.phase in (_MOVING, _LANDED) for read in self.reads)

    @property
    def writing(self) -> bool:
        """Whether a copy into D's pages is under way."""
        return any(read.writes for read in self.reads)

    def story(self) -> str:
        """The states of the attempt and the phases of its reads, with their times."""
        number = [f"attempt {self.number}"] if self.number > 1 else []
        reads = [f"{read.link.name}: {read.story()}" for read in self.reads[:MAX_STORIES]]
        return "; ".join([*number, story(self.history), *reads])

    def enter(self, state: FetchState, deadline: float, now: float) -> bool:
        """Returns whether the deadline has moved to earlier."""
        earlier, self.state, self.deadline = deadline < self.deadline, state, deadline
        self.history.append((now, state))
        return earlier

    def begin_attempt(self, load: Load) -> None:
        """Forget the last attempt. ``load``: with the lease and the P engine of the next one."""
        self.load, self.number, self.alone = load, self.number + 1, self.alone and not self.number
        self.reason, self.reads, self.history = None, [], []
        self.nbytes, self.copied_at, self.granted_at = 0, 0.0, 0.0

    def later(self, settings: Settings, now: float) -> float:
        """The deadline after progress."""
        return min(now + settings.transfer_timeout_seconds, self.end)

    def late(self, settings: Settings, now: float) -> Reason:
        """Why an attempt fails whose deadline has come."""
        if now >= self.end:
            seconds = settings.handover_timeout_seconds
            return Reason("timeout", f"no end in {seconds:g} s (handover_timeout_seconds), now {self.state.value}")
        text = f"nothing moved on in time while {self.state.value}"
        if self.state is FetchState.CONNECTING:
            return Reason("timeout", text, "peer")
        return Reason("timeout", text, "plane" if self.state is FetchState.READING and self.moving else "")

    def next_attempt_at(self, reason: Reason, now: float) -> float:
        """Choose where the next attempt goes. Returns when it begins; infinite where there is none."""
        if reason.kind in FINAL:
            return math.inf
        if reason.blames == "plane" and self.planes > 0:
            self.planes -= 1
            return now
        here = self.attempts[self.peer] - 1 if reason.kind in MENDED_HERE and reason.blames != "peer" else 0
        self.attempts[self.peer], last = max(0, here), self.peer
        for step in range(1, len(self.attempts) + 1):  # the P of this attempt comes last
            self.peer = (last + step) % len(self.attempts)
            if self.attempts[self.peer]:
                return now + SAME_PEER_SECONDS if self.peer == last else now
        return math.inf


@dataclass(slots=True, eq=False)
class RankRead:
    """One load's part from one P rank, in one attempt.

    A method takes what has happened; the load looks at its reads then. The wire has two sockets, so chunks of a read
    that P sends can arrive before the grant, also all of them. What comes twice, or too late, changes nothing.
    """

    number: int
    fetch: Fetch
    link: Link
    address: RankAddress
    """The P rank as the request names it."""
    history: list[tuple[float, enum.Enum]]
    """The phases, each with its begin."""
    phase: ReadPhase = _WAITING
    failure: Reason | None = None
    """The first one; after the stop of a read nothing is a failure."""
    granted: bool = False
    note: PostedGrant | None = None
    """P's posted grant, where D found one."""
    writes: dict[PageWrite, None] = field(default_factory=dict)
    """The copies into D's pages that are under way."""
    awaitable: bool = True
    """The engine can wait for all copies that have begun."""
    planned: tuple[PlannedSpan, ...] = ()
    chunk_bytes: int = 0
    boxes: list[PageBox] = field(default_factory=list)
    """Where P sends the bytes: the chunks of the planned spans, of at most ``chunk_bytes``."""
    tags: set[int] = field(default_factory=set)
    """Of the chunks whose messages have not arrived."""
    moved: int = 0
    """The number of its last progress among those of all reads, by bytes in D's pages; 0 before the first."""
    last_step: int = 0
    """Of a prompt that P computes: the first chunk of P's last step."""
    last_step_at: float = math.inf
    """When the first one of these arrived."""

    @property
    def stopped(self) -> bool:
        """Whether no more copies into D's pages may begin."""
        return self.phase is _STOPPED

    @property
    def landed(self) -> bool:
        """Whether all bytes lie in D's pages."""
        return self.phase in (_LANDED, _PROVEN)

    @property
    def awaits_grant(self) -> bool:
        return not (self.granted or self.phase in (_WAITING, _CONNECTED, _STOPPED))

    @property
    def all_begun(self) -> bool:
        """Whether all copies into D's pages have ended, or are under way and the engine can wait for them."""
        return self.landed or (bool(self.writes) and not self.tags and self.awaitable)

    @property
    def grant_stands(self) -> bool:
        """Whether the grant that P posted has been posted without a break since D found it, and P's process has not
        ended. Nobody withdraws the grants of a process that was killed, and its number may be another's by now: what D
        has copied by that number is P's only if P lives after the copy."""
        link = self.link
        stands = self.note is not None and self.note.is_current and link.phase is not LinkPhase.FAILED
        return stands and link.process is not None and not link.process.ended

    def seconds_left(self, now: float) -> float:
        """How long its bytes should still take, as P's last step has sent them so far. Infinite until half of them have
        arrived: they come in bursts."""
        if self.all_begun:
            return 0.0
        left, arrived = len(self.tags), len(self.boxes) - self.last_step - len(self.tags)
        known = self.granted and arrived > 1 and arrived >= left
        return (now - self.last_step_at) * left / (arrived - 1) if known else math.inf

    def tag(self, chunk: int) -> int:
        """A chunk's tag on the data plane, unique in this process."""
        return self.number << 32 | chunk

    def story(self) -> str:
        return story(self.history)

    def _enter(self, phase: ReadPhase, now: float) -> None:
        self.phase = phase
        self.history.append((now, phase))

    # --- what happens -------------------------------------------------------------------------------------------

    def link_moved(self, now: float) -> None:
        """The link is in another phase, or the read is new."""
        link = self.link
        if link.phase is LinkPhase.FAILED:
            self.fail(link.failure)
        elif link.phase is LinkPhase.ATTACHED and self.phase is _WAITING:
            try:
                link.check_addressed(self.fetch.load.peer, self.address)
                self._enter(_CONNECTED, now)
            except IncompatiblePeerError as error:
                self.fail(Reason("incompatible", f"{link.name}: {error}"))
            except TransportError as error:
                self.fail(Reason("peer_lost", f"{link.name}: {error}", "peer"))

    def plan(self, planned: tuple[PlannedSpan, ...], now: float) -> None:
        """The spans to read are known, in the order of P's steps where P sends them while it computes."""
        load, link = self.fetch.load, self.link
        self.planned, self.chunk_bytes = planned, link.slot_bytes
        if not planned:  # this pipeline stage of P holds none of D's layers
            self.granted = True
            self._enter(_LANDED, now)
        elif link.channel is not None and not link.channel.pulls:
            most = link.channel.few_bytes
            if load.step_tokens:
                self.planned = in_windows(planned, link.theirs, load.found, load.step_tokens)
                part = part_bytes(self.planned, link.theirs)
                most = min(part, max(most, part // STREAM_MESSAGES))
            self.chunk_bytes = min(link.slot_bytes, max(most, messages.MIN_SLOT_BYTES))

    def asked(self, now: float) -> None:
        """D asked P, or uses P's posted grant."""
        self._enter(_ASKED, now)

    def take_grant(self, now: float) -> None:
        """P's grant was checked and fits. It names the prompt of the lease: bytes that came before count only now."""
        self.granted = True
        if self.phase is _ASKED:
            self._enter(_MOVING, now)
        elif self.fetch.state is FetchState.COMMITTING:
            self.prove(now)

    def write_began(self, write: PageWrite, now: float) -> None:
        """A copy into D's pages has begun, or has ended at once; the grant may be on its way."""
        self.writes[write] = None
        self.awaitable &= write.copy.on_stream or write.copy.done
        if self.phase is _ASKED:
            self._enter(_MOVING, now)

    def write_ended(self, write: PageWrite, failure: Reason | None, now: float) -> None:
        """``failure``: why the bytes are not there; ``None`` where they are."""
        del self.writes[write]
        if failure is not None:
            self.fail(failure)
        elif not (self.writes or self.tags or self.stopped):
            self._enter(_LANDED, now)

    def prove(self, now: float) -> None:
        """The lease stood after the last byte was read."""
        if self.phase is _LANDED:
            self._enter(_PROVEN, now)

    def fail(self, reason: Reason) -> None:
        """The link has failed, P has refused the read, or the data are wrong."""
        if not self.stopped:
            self.failure = self.failure or reason

    def stop(self, now: float) -> bool:
        """Begin no more copies. Returns whether P or a copy may be at work."""
        at_work = self.phase in (_ASKED, _MOVING)
        if at_work or self.phase in (_WAITING, _CONNECTED):
            self._enter(_STOPPED, now)
        return at_work


@dataclass(slots=True, eq=False)
class PageWrite:
    """A copy of ``nbytes`` into D's pages."""

    read: RankRead
    copy: Copy
    nbytes: int
    message: Received | None = None
    """The message that it unpacks, where P sent one."""
    seen: int | None = None
    """The value of ``copy.moved`` that is counted; ``None`` before the first look."""

    def failure(self) -> Reason | None:
        """Why the bytes of the copy, which has ended, are not in place, or are not P's."""
        copy = self.copy
        if not copy.error:
            return None
        if copy.peer_lost:
            return Reason("peer_lost", copy.error, "plane")
        return Reason("internal", f"the copy failed: {copy.error}")
