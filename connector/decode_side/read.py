"""One source of a load: D's read from one P rank, from the ask to the commit; and all reads of a rank of D.

P sends the bytes, or D copies P's pages by itself. A read stays known after its stop as long as messages of it can
arrive: P answers how many it has sent. The link fails where P does not answer, or where these messages do not come.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from kvferry.connector.decode_side.link import Link, LinkPhase, Reason, story
from kvferry.connector.decode_side.load_state import LoadEffect, LoadEvent, LoadEventKind, LoadState
from kvferry.connector.decode_side.renew import LeaseRenewals
from kvferry.connector.decode_side.span_read import Side, SpanRead
from kvferry.connector.geometry.byte_ranges import pages_of
from kvferry.connector.geometry.rank_geometry import KEEPS_ALL, RegionGeometry
from kvferry.connector.geometry.read_plan import STREAM_MESSAGES, PlannedSpan, in_windows, part_bytes
from kvferry.connector.geometry.spans import Span, check_spans
from kvferry.connector.pages.caches import Ids, PageBox
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.step_loads.step_loads import StepLoad
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import FailureKind
from kvferry.connector.wire.states import Lifetime
from kvferry.connector.wire.step_plan import Load, RankAddress, unpack_ids
from kvferry.transport.channels import Copy, Received
from kvferry.transport.errors import (
    GeometryError,
    IncompatiblePeerError,
    ProtocolError,
    TransportError,
    shortened,
)
from kvferry.transport.grant_board import PostedGrant

UNPACKS_PER_TURN = 4
"""Messages that the thread unpacks before it looks at control messages again."""
_DENIED: dict[messages.DenyReason, FailureKind] = {
    "expired": "expired",
    "unknown": "expired",
    "bounds": "denied",
    "detached": "peer_lost",
    "failed": "data",
}
_E = LoadEventKind
PROGRESS = LoadEvent(_E.PROGRESS)
ReadReply = messages.Grant | messages.Deny | messages.Stopped | messages.Committed
Fence = Literal["pushed", "posted", "asked"]
"""The proof that a lease still stood when its blocks were read. Either P sent the bytes itself, and P sends nothing
under a lease that has ended; or the grant that P posted on its grant board still stands; or P answers a Commit."""


class ActiveLoad(msgspec.Struct, eq=False):
    """One request's hand-over on this rank, in its present attempt."""

    load: Load
    """With the lease and the P engine of this attempt."""
    posted: StepLoad
    lifetime: Lifetime[LoadState, LoadEvent, LoadEffect]
    started: float
    """By ``RankContext.clock``, as the times below."""
    ids: list[Ids]
    """Kernel block ids per region."""
    alone: bool = False
    """No other hand-over began in the same step."""
    reads: list[SourceRead] = msgspec.field(default_factory=list)
    nbytes: int = 0
    copied_at: float = 0.0
    """The end of its last copy, where it was noted."""
    granted_at: float = 0.0
    """When P had posted the grant that D asked for before."""
    ended_at: float = 0.0

    @property
    def number(self) -> int:
        """Of this attempt; the first is 1."""
        return self.lifetime.state.number

    @property
    def seconds(self) -> float:
        """From the request to the end of the last copy; the thread may come there late, see ``yield_to_engine``."""
        return (self.copied_at or self.ended_at) - self.started

    @property
    def planes(self) -> str:
        """The data planes of this attempt."""
        return "+".join(sorted({read.link.plane.name for read in self.reads if read.link.plane is not None})) or "none"

    @property
    def due(self) -> float:
        return self.lifetime.state.due


class ReadPhase(enum.Enum):
    WAITING = "waiting for the link"
    ASKED = "asked"
    MOVING = "moving"
    LANDED = "landed"
    COMMITTING = "committing"
    COMMITTED = "committed"
    STOPPED = "stopped"


class SourceRead(msgspec.Struct, eq=False):
    """One load's part from one P rank.

    A method takes what has happened, and returns what that means to the load, if anything. The wire has two sockets, so
    chunks of a read that P sends can arrive before the grant, also all of them. What comes twice, or too late, changes
    nothing.
    """

    number: int
    source: int
    """The number of the P rank in the load."""
    active_load: ActiveLoad
    link: Link
    address: RankAddress
    """The P rank as the request names it."""
    history: list[tuple[float, ReadPhase]]
    phase: ReadPhase = ReadPhase.WAITING
    granted: bool = False
    fence: Fence = "pushed"
    writes: dict[PageWrite, None] = msgspec.field(default_factory=dict)
    """The copies into D's pages that are under way."""
    awaitable: bool = True
    """The engine can wait for all copies that have begun."""
    deadline: float = math.inf
    """For the last messages of a stopped read."""
    planned: tuple[PlannedSpan, ...] = ()
    chunk_bytes: int = 0
    boxes: list[PageBox] = msgspec.field(default_factory=list)
    """Where P sends the bytes: the chunks of the planned spans, of at most ``chunk_bytes``."""
    tags: set[int] = msgspec.field(default_factory=set)
    """Of the chunks whose messages have not arrived."""
    note: PostedGrant | None = None
    """P's posted grant, where D found one."""
    moved: int = 0
    """The number of its last progress among those of all reads, by bytes in D's pages; 0 before the first."""
    last_step: int = 0
    """Of a prompt that P computes: the first chunk of P's last step."""
    last_step_at: float = math.inf
    """When the first one of these arrived."""

    @property
    def stopped(self) -> bool:
        """Whether no more copies into D's pages may begin."""
        return self.phase is ReadPhase.STOPPED

    @property
    def landed(self) -> bool:
        """Whether all bytes lie in D's pages."""
        return self.phase in (ReadPhase.LANDED, ReadPhase.COMMITTING, ReadPhase.COMMITTED)

    @property
    def awaits_grant(self) -> bool:
        return not (self.granted or self.stopped or self.phase is ReadPhase.WAITING)

    @property
    def all_begun(self) -> bool:
        """Whether all copies into D's pages have ended, or are under way and the engine can wait for them."""
        return self.landed or (bool(self.writes) and not self.tags and self.awaitable)

    def seconds_left(self, now: float) -> float:
        """How long its bytes should still take, as P's last step has sent them so far. Infinite until half of them have
        arrived: they come in bursts."""
        if self.all_begun:
            return 0.0
        left, arrived = len(self.tags), len(self.boxes) - self.last_step - len(self.tags)
        known = self.granted and arrived > 1 and arrived >= left
        return (now - self.last_step_at) * left / (arrived - 1) if known else math.inf

    @property
    def due(self) -> float:
        return self.deadline if self.stopped and self.tags else math.inf

    @property
    def grant_stands(self) -> bool:
        """Whether the grant that P posted has been posted without a break since D found it, and P's process has not
        ended. Nobody withdraws the grants of a process that was killed, and its number may be another's by now: what D
        has copied by that number is P's only if P lives after the copy."""
        link = self.link
        stands = self.note is not None and self.note.is_current and link.phase is not LinkPhase.FAILED
        return stands and link.process is not None and not link.process.ended

    def tag(self, chunk: int) -> int:
        """A chunk's tag on the data plane, unique in this process."""
        return self.number << 32 | chunk

    def story(self) -> str:
        return story(self.history)

    def _enter(self, phase: ReadPhase, now: float) -> None:
        self.phase = phase
        self.history.append((now, phase))

    # --- what happens -------------------------------------------------------------------------------------------

    def link_moved(self) -> LoadEvent | None:
        """The link is in another phase, or the read is new."""
        phase = self.link.phase
        if self.stopped or phase not in (LinkPhase.ATTACHED, LinkPhase.FAILED):
            return None
        if phase is LinkPhase.FAILED:
            return LoadEvent(_E.FAILED, self.source, self.link.failure)
        try:
            self.link.check_addressed(self.active_load.load.peer, self.address)
        except IncompatiblePeerError as error:
            return self.failed("incompatible", f"{self.link.name}: {error}")
        except TransportError as error:
            return LoadEvent(_E.FAILED, self.source, Reason("peer_lost", f"{self.link.name}: {error}", "peer"))
        return LoadEvent(_E.READY, self.source)

    def plan(self, planned: tuple[PlannedSpan, ...], now: float) -> LoadEvent | None:
        """The spans to read are known, in the order of P's steps where P sends them while it computes."""
        load, link = self.active_load.load, self.link
        self.planned, self.chunk_bytes = planned, link.slot_bytes
        if not planned:  # this pipeline stage of P holds none of D's layers
            self.granted = True
            self._enter(ReadPhase.LANDED, now)
            return LoadEvent(_E.MOVED, self.source)
        if link.channel is not None and not link.channel.pulls:
            most = link.channel.few_bytes
            if load.step_tokens:
                self.planned = in_windows(planned, link.theirs, load.found, load.step_tokens)
                part = part_bytes(self.planned, link.theirs)
                most = min(part, max(most, part // STREAM_MESSAGES))
            self.chunk_bytes = min(link.slot_bytes, max(most, messages.MIN_SLOT_BYTES))
        return None

    def asked(self, fence: Fence, now: float) -> None:
        """D asked P, or uses P's posted grant."""
        self.fence = fence
        self._enter(ReadPhase.ASKED, now)

    def take_grant(self, now: float) -> LoadEvent:
        """P's grant was checked and fits."""
        self.granted = True
        if self.phase is ReadPhase.COMMITTING:
            self._enter(ReadPhase.COMMITTED, now)
            return LoadEvent(_E.COMMITTED, self.source)
        if self.phase is ReadPhase.ASKED:
            self._enter(ReadPhase.MOVING, now)
        return PROGRESS

    def write_began(self, write: PageWrite, now: float) -> LoadEvent:
        """A copy into D's pages has begun, or has ended at once. The load must know that its pages are written, also
        while the grant is on its way."""
        self.writes[write] = None
        self.awaitable &= write.copy.on_stream or write.copy.done
        if self.phase is ReadPhase.ASKED:
            self._enter(ReadPhase.MOVING, now)
        return PROGRESS

    def write_ended(self, write: PageWrite, failure: Reason | None, now: float) -> LoadEvent | None:
        """``failure``: why the bytes are not there; ``None`` where they are."""
        del self.writes[write]
        if self.stopped:
            return None if self.writes else LoadEvent(_E.DRAINED, self.source)
        if failure is not None:
            return LoadEvent(_E.FAILED, self.source, failure)
        if self.writes or self.tags:
            return PROGRESS
        self._enter(ReadPhase.LANDED, now)
        return LoadEvent(_E.MOVED, self.source)

    def commit(self, now: float) -> LoadEvent | None:
        """All reads of the load have landed. The grant names the prompt of the lease, so the read counts only once the
        grant is here. ``answered`` follows where P did not send the bytes."""
        if self.granted and self.fence == "pushed":
            self._enter(ReadPhase.COMMITTED, now)
            return LoadEvent(_E.COMMITTED, self.source)
        self._enter(ReadPhase.COMMITTING, now)
        return None

    def answered(self, ok: bool, now: float) -> LoadEvent | None:
        """``ok``: the lease stood after the last byte was read."""
        if self.phase is not ReadPhase.COMMITTING or not self.granted:
            return None
        if not ok:
            return self.failed("expired", "the lease ended before the read was committed")
        self._enter(ReadPhase.COMMITTED, now)
        return LoadEvent(_E.COMMITTED, self.source)

    def failed(self, kind: FailureKind, text: str) -> LoadEvent | None:
        """P refused the read, or the data are wrong. After the stop of a read that is no failure of its load."""
        return None if self.stopped else LoadEvent(_E.FAILED, self.source, Reason(kind, text))

    def stop(self, now: float, timeout: float) -> bool:
        """Begin no more copies. ``timeout``: seconds that the last messages may take. Returns whether P or a copy may
        be at work."""
        at_work = self.phase in (ReadPhase.ASKED, ReadPhase.MOVING)
        if at_work:
            self.deadline = now + timeout
        if at_work or self.phase is ReadPhase.WAITING:
            self._enter(ReadPhase.STOPPED, now)
        return at_work


class PageWrite(msgspec.Struct, eq=False):
    """A copy of ``nbytes`` into D's pages."""

    read: SourceRead
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


Happening = tuple[ActiveLoad, LoadEvent]
"""What a read means to its load."""


class Reads:
    """All reads of this rank, also stopped reads whose last messages are still under way. Asks P, announces chunks to
    the channels, unpacks them, and copies P's pages. Used by the transfer thread only."""

    def __init__(self, rank_context: RankContext, renewals: LeaseRenewals, deadlines: Deadlines[Any]) -> None:
        self._rank_context, self._caches, self._log = rank_context, rank_context.caches, rank_context.log
        self._renewals, self._deadlines = renewals, deadlines
        self.by_number: dict[int, SourceRead] = {}
        self._by_link: dict[Link, dict[SourceRead, None]] = {}
        self._last = 0
        self.arrived: deque[tuple[Link, Received]] = deque()
        """Messages that wait to be unpacked."""
        self.writes: dict[PageWrite, None] = {}
        """The copies into D's pages that are under way, or whose end is not handled yet."""
        self._moving = False  # a copy by a plane has just begun or moved bytes
        self._moves = 0  # how often bytes of any read came into D's pages

    def new(self, active_load: ActiveLoad, link: Link, address: RankAddress, now: float) -> SourceRead:
        """A new read of a load from its next source, the P rank at ``address``."""
        self._last = number = (self._last + 1) % (1 << 32)
        history = [(now, ReadPhase.WAITING)]
        read = SourceRead(number, len(active_load.reads), active_load, link, address, history)
        self.by_number[number] = read
        self._by_link.setdefault(link, {})[read] = None
        link.users += 1
        active_load.reads.append(read)
        return read

    def through(self, link: Link) -> list[SourceRead]:
        """All reads over a link."""
        return list(self._by_link.get(link, ()))

    def forget(self, read: SourceRead) -> None:
        """Forget a read of which no message can arrive any more."""
        if self.by_number.pop(read.number, None) is None:
            return
        read.deadline = math.inf
        read.link.users -= 1
        reads = self._by_link[read.link]
        del reads[read]
        if not reads:
            del self._by_link[read.link]

    def end(self, read: SourceRead) -> None:
        """The load has ended, or goes on in another attempt."""
        if not (read.stopped and read.tags):
            self.forget(read)

    def others_move(self, read: SourceRead) -> bool:
        """Whether another read over the link of a read goes on, and has made progress since this one did."""
        others = self._by_link.get(read.link, ())
        return any(other.moved > read.moved and not other.stopped and not other.landed for other in others)

    # --- ask and grant ------------------------------------------------------------------------------------------

    def ask(self, read: SourceRead, now: float) -> LoadEvent | None:
        """Begin with the grant that P has posted for the planned spans, or ask P for them."""
        grant = self._posted_grant(read)
        if grant is not None:
            read.asked("posted", now)
            return self.take_grant(read, grant, now)
        load, failure = read.active_load.load, None
        if load.prefix:
            read.link.send(messages.LendPrefix(token=load.token, digests=load.prefix))
        read.link.send(
            messages.Ask(
                read=read.number,
                token=load.token,
                decode_engine=self._renewals.decode_engine,
                decode_rank=self._renewals.rank,
                expected=self._renewals.expected(load.peer, read.address.tp_rank),
                spans=tuple(item.span for item in read.planned),
                chunk_bytes=read.chunk_bytes,
            )
        )
        try:
            self.expect(read)
        except GeometryError as error:
            failure = read.failed("incompatible", str(error))
        except Exception as error:  # some chunks may be announced: the read must be cancelled, not forgotten
            self._log.exception("announce", "kvferry: chunks of %s could not be announced", load.request_id)
            failure = read.failed("internal", repr(error))
        read.asked("asked" if read.link.pulls else "pushed", now)
        return failure

    def _posted_grant(self, read: SourceRead) -> messages.Grant | None:
        """The grant on P's grant board, where P has posted it. Then D needs no ask, nor a commit of P."""
        board = read.link.board
        note = None if board is None else board.find(read.active_load.load.token)
        if note is None:
            return None
        try:
            grant = messages.decode_grant(note.text)
            spans, theirs = [item.span for item in read.planned], read.link.theirs
            check_spans(spans, theirs, grant.num_tokens)
            for span in spans:
                region = theirs.regions[span.region]
                if region.kind not in KEEPS_ALL:
                    _check_held(span, region, grant.block_ids)
        except (ProtocolError, GeometryError):
            return None  # P's answer to an ask will contain the reason
        read.note = note
        return grant

    def expect(self, read: SourceRead) -> None:
        """Where P sends the bytes: announce the chunks that D has just asked for.

        D does not cut them before the ask, because cutting takes as long as the ask takes to reach P. D does not cut
        them later, because the first chunk may arrive before the grant, which comes by another socket.

        Raises:
            GeometryError: a chunk of one token does not fit into a slot.
        """
        channel = read.link.channel
        if channel is None or channel.pulls:
            return
        regions = read.link.theirs.regions
        stop = max(item.span.token + item.span.num_tokens for item in read.planned)
        for item in read.planned:
            theirs, whole = regions[item.span.region], self._box(read, item)
            convert = (item.region, item.span.region) in read.link.converted
            read.boxes.extend(self._caches.cut(whole, item.span, read.chunk_bytes, theirs, convert=convert))
            if item.span.token + item.span.num_tokens < stop:
                read.last_step = len(read.boxes)
        for chunk, box in enumerate(read.boxes):
            tag = read.tag(chunk)
            read.tags.add(tag)
            into = partial(self._caches.pieces, box) if self._caches.in_pieces(box) else None
            channel.expect(tag, self._caches.nbytes(box), into)

    def take_grant(self, read: SourceRead, grant: messages.Grant, now: float) -> LoadEvent | None:
        """Check a grant, and begin to copy P's pages where D reads them by itself."""
        pulls, load = read.link.pulls, read.active_load.load
        if not read.awaits_grant:  # where P computes the prompt, this is a sign of life
            return PROGRESS if read.phase is ReadPhase.MOVING and not pulls else None
        try:
            if load.digest and grant.digest != load.digest:
                self._renewals.disown(load.token, load.request_id)
                return read.failed(
                    "other_prompt", "the prefill engine's lease is of another prompt than the request's parameters name"
                )
            self.check_grant(read, grant)
            event = read.take_grant(now)
            return self.begin_pull(read, grant, now) if pulls else event
        except GeometryError as error:
            return read.failed("data", str(error))
        except Exception as error:  # an error of one copy fails one request
            self._log.exception(
                "pull", "kvferry: %s could not be read from the prefill engine's pages", load.request_id
            )
            return read.failed("internal", repr(error))

    def check_grant(self, read: SourceRead, grant: messages.Grant) -> None:
        """Check that a grant fits D's ask.

        Raises:
            GeometryError: it does not.
        """
        if grant.chunks != len(read.boxes):
            raise GeometryError(
                f"the prefill engine grants {grant.chunks} chunks, the decode engine asked for {len(read.boxes)}"
            )
        if read.link.pulls and (highest := max(item.span.region for item in read.planned)) >= len(grant.block_ids):
            raise GeometryError(
                f"the prefill engine grants blocks of {len(grant.block_ids)} regions, the decode engine asked "
                f"for region {highest}"
            )

    def begin_pull(self, read: SourceRead, grant: messages.Grant, now: float) -> LoadEvent:
        """Begin to copy the pages of a grant.

        Raises:
            GeometryError: the granted blocks do not cover the spans.
        """
        channel = read.link.channel
        assert channel is not None and channel.pulls
        sides = [self._sides(read, planned, grant) for planned in read.planned]
        copy = channel.read(SpanRead(self._caches, sides, alone=self._alone(read)))
        return self.begin_write(PageWrite(read, copy, sum([self._caches.nbytes(box) for box, _ in sides])), now)

    def _sides(self, read: SourceRead, planned: PlannedSpan, grant: messages.Grant) -> Side:
        """A span as a box of D's pages and as P's pages."""
        span = planned.span
        theirs = pages_of(read.link.pages[span.region], unpack_ids(grant.block_ids[span.region]), span, planned.shard)
        return self._box(read, planned), theirs

    def _box(self, read: SourceRead, item: PlannedSpan) -> PageBox:
        ids = read.active_load.ids[item.region]
        return self._caches.box(item.span, item.region, item.layer, item.head, ids, item.shard)

    def _alone(self, read: SourceRead) -> bool:
        """Whether this is the only read, and the engine is not about to compute."""
        return read.active_load.alone and len(self.by_number) == 1 and not read.active_load.load.now

    def begin_write(self, write: PageWrite, now: float) -> LoadEvent:
        """A copy into D's pages has begun."""
        self.writes[write] = None
        return write.read.write_began(write, now)

    # --- messages of P ------------------------------------------------------------------------------------------

    def reply(self, link: Link, reply: ReadReply, now: float) -> Sequence[Happening]:
        """Handle a message of P about a read."""
        read = self.by_number.get(reply.read)
        if read is None or read.link is not link:
            return ()  # a message for a read that has ended
        event: LoadEvent | None = None
        match reply:
            case messages.Grant():
                if link.pulls and read.awaits_grant and (grant := self._posted_grant(read)) is not None:
                    read.active_load.granted_at = self._rank_context.clock()  # posted since D has asked
                    read.fence, reply = "posted", grant
                event = self.take_grant(read, reply, now)
            case messages.Deny():
                detail = f": {shortened(reply.detail)!r}" if reply.detail else ""
                if reply.reason == "detached":  # P has ended its session with this D: the next load makes a new link
                    link.fail("peer_lost", f"the prefill engine has no handshake of ours{detail}")
                event = read.failed(
                    _DENIED[reply.reason], f"the prefill engine denied the read, {reply.reason}{detail}"
                )
            case messages.Committed():
                event = self._answered(read, reply.ok, now)
            case messages.Stopped():
                self._on_stopped(read, reply.sent)
        return () if event is None else ((read.active_load, event),)

    def _on_stopped(self, read: SourceRead, sent: int) -> None:
        """P has sent the first ``sent`` chunks of the read, or empty messages, and sends no more."""
        if not read.stopped:
            return
        channel = read.link.channel
        for tag in [tag for tag in read.tags if tag & 0xFFFFFFFF >= sent]:
            read.tags.discard(tag)
            if channel is not None and not channel.pulls:
                channel.forget(tag)
        if not read.tags:
            self.forget(read)

    # --- commit and stop ----------------------------------------------------------------------------------------

    def commit(self, read: SourceRead, now: float) -> LoadEvent | None:
        """Find out whether the lease stood until the last byte was read."""
        event = read.commit(now)
        if event is None and read.granted:
            if read.fence == "posted":
                return self._answered(read, read.grant_stands, now)
            read.link.send(messages.Commit(read=read.number, token=read.active_load.load.token))
        return event

    def _answered(self, read: SourceRead, ok: bool, now: float) -> LoadEvent | None:
        event = read.answered(ok, now)
        if event is not None and not ok:
            self._rank_context.stats.count("num_stale_reads")
        return event

    def stop(self, read: SourceRead, now: float) -> LoadEvent | None:
        """Let no channel write D's pages for this read, and ask P to stop sending.

        A copy that cannot be cancelled goes on: ``finished_writes`` yields DRAINED when it has ended.
        Messages under way end in staging memory or are dropped; P's ``Stopped`` contains their number. Where none is
        left, the read need not wait for it.
        """
        if read.stop(now, self._rank_context.settings.transfer_timeout_seconds):
            try:
                self._cancel(read)
            except Exception:
                self._log.exception("CancelRead", "kvferry: unexpected error in CancelRead of read %d", read.number)
                self._rank_context.stats.failed("internal")
            self._deadlines.note(read, read.due)
        return None if read.writes else LoadEvent(_E.DRAINED, read.source)

    def _cancel(self, read: SourceRead) -> None:
        channel = read.link.channel
        if channel is not None and channel.pulls:
            for write in list(read.writes):
                channel.cancel(write.copy)
                if write.copy.done:
                    del self.writes[write], read.writes[write]
        elif channel is not None:
            for tag in read.tags:
                channel.stop_writing(tag)
        if read.link.phase is LinkPhase.ATTACHED:
            read.link.send(messages.Cancel(read=read.number))

    def on_due(self, read: SourceRead, now: float) -> None:
        """Fail the link of a stopped read whose last messages are overdue."""
        if now >= read.due:
            read.deadline = math.inf
            seconds = self._rank_context.settings.transfer_timeout_seconds
            read.link.fail("timeout", f"no end of a stopped read in {seconds:g} s")

    # --- bytes --------------------------------------------------------------------------------------------------

    @property
    def backlog(self) -> bool:
        """Whether messages wait to be unpacked, or a plane is copying pages."""
        return bool(self.arrived) or self._moving

    def collect(self, now: float) -> Iterator[Happening]:
        """Unpack some of the messages that have arrived, and check the copies under way."""
        for link in self._by_link:
            channel = link.channel
            if channel is not None and not channel.pulls and link.phase is LinkPhase.ATTACHED:
                self.arrived.extend([(link, message) for message in channel.poll()])
        for _ in range(min(UNPACKS_PER_TURN, len(self.arrived))):
            link, message = self.arrived.popleft()
            read = self.by_number.get(message.tag >> 32)
            if read is None or read.link is not link or message.tag not in read.tags:
                message.release()
            elif (event := self._unpack(read, message, now)) is not None:
                yield read.active_load, event
        self._moving = False
        if not self.writes:
            return
        yield from self.finished_writes(now)
        for write in [write for write in self.writes if not write.copy.on_stream]:
            read, before, write.seen = write.read, write.seen, write.copy.moved
            if write.seen != before:
                self._moving = True
                if not read.stopped:
                    self.count(read, write.seen - (before or 0))
                    yield read.active_load, PROGRESS

    def finished_writes(self, now: float) -> Iterator[Happening]:
        """The events of the copies into D's pages that have ended."""
        for write in [write for write in self.writes if write.copy.done]:
            if write not in self.writes:  # an earlier event has cancelled its read
                continue
            del self.writes[write]
            if write.message is not None:
                write.message.release()
            read, failure = write.read, write.failure()
            if failure is not None and write.message is None and write.copy.peer_lost:
                read.link.lose_plane(failure.text)  # D reads P's pages by itself, and cannot any more
            load = read.active_load
            for other in self.writes:  # copies follow each other
                if other.read.active_load is not load:
                    other.read.active_load.posted.begins_again(self._rank_context.clock())
            load.copied_at = max(load.copied_at, write.copy.ended_at)
            if failure is None and not read.stopped:
                self.count(read, write.nbytes - (write.seen or 0))
            if (event := read.write_ended(write, failure, now)) is not None:
                yield load, event

    def count(self, read: SourceRead, nbytes: int) -> None:
        """Count bytes of a read that have come into D's pages."""
        if nbytes:
            self._moves += 1
            read.moved = self._moves
            read.active_load.nbytes += nbytes

    def _unpack(self, read: SourceRead, message: Received, now: float) -> LoadEvent | None:
        """Begin to copy a message into D's pages. It is released when the copy has ended, or here."""
        read.tags.discard(message.tag)
        if read.stopped:
            message.release()
            if not read.tags:
                self.forget(read)
            return None
        chunk = message.tag & 0xFFFFFFFF
        if chunk >= read.last_step:
            read.last_step_at = min(read.last_step_at, now)
        box = read.boxes[chunk]
        nbytes = self._caches.nbytes(box)
        if message.nbytes != nbytes:
            message.release()
            return read.failed("data", f"chunk {chunk} has {message.nbytes} bytes, expected {nbytes}")
        try:
            if message.placed:
                copy = Copy(done=True)
            else:
                copy = self._caches.unpack(message.address, box, message.device, alone=self._alone(read))
        except Exception as error:  # an error of one copy fails one request
            message.release()
            name = read.active_load.load.request_id
            self._log.exception("unpack", "kvferry: a chunk of %s could not be unpacked", name)
            return read.failed("internal", repr(error))
        return self.begin_write(PageWrite(read, copy, nbytes, message), now)


def _check_held(span: Span, region: RegionGeometry, block_ids: Sequence[bytes]) -> None:
    """Check that P has freed none of the blocks of ``span``, as P checks an ask. Raises GeometryError."""
    ids = unpack_ids(block_ids[span.region]) if span.region < len(block_ids) else unpack_ids(b"")
    start, stop = region.shard.count(span.token), region.shard.count(span.token + span.num_tokens)
    last = -(-stop // region.block_size)
    if len(ids) < last or not ids[start // region.block_size : last].all():
        raise GeometryError(f"tokens from {span.token} on are needed, the peer has freed some of their blocks")
