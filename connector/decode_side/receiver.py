"""The data side of D's hand-overs: the reads, one per P rank, and the copies into D's pages.

``source_read`` decides. The receiver announces chunks to the channels, unpacks them, and yields events for the reads.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from kvferry.connector.decode_side.active_load import ActiveLoad, SourceRead
from kvferry.connector.decode_side.handover import Reason
from kvferry.connector.decode_side.link import Link
from kvferry.connector.decode_side.link_state import LinkPhase
from kvferry.connector.decode_side.source_read import (
    SOURCE_READ,
    MessagesLeft,
    ReadEvent,
    ReadFailed,
    ReadState,
    WriteBegan,
    WriteEnded,
    WriteMoved,
)
from kvferry.connector.decode_side.span_read import Side, SpanRead, cut_read
from kvferry.connector.geometry.byte_ranges import pages_of
from kvferry.connector.geometry.read_plan import PlannedSpan
from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.connector.pages.checksums import (
    PlacedMessage,
    Verdict,
    takes_pieces,
    trailer_bytes,
)
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.wire import messages
from kvferry.connector.wire.states import Lifetime
from kvferry.connector.wire.step_plan import RankAddress, unpack_ids
from kvferry.transport.channels import Copy, Pieces, Received
from kvferry.transport.errors import GeometryError

logger = logging.getLogger("vllm.kvferry.receiver")

UNPACKS_PER_TURN = 4
"""Messages that the thread unpacks before it looks at control messages again."""


Happening = tuple[SourceRead, ReadEvent]
"""An event, and the read that takes it."""


class PageWrite(msgspec.Struct, eq=False):
    """A copy of ``nbytes`` into D's pages. ``message``: the message that it unpacks, where P sent one. ``verdict``:
    whether the checksum of the message fits, where it has one. ``seen``: the value of ``copy.moved`` that is counted;
    ``None`` before the first look."""

    read: SourceRead
    copy: Copy
    nbytes: int
    message: Received | None = None
    verdict: Verdict | None = None
    seen: int | None = None


class Receiver:
    """All reads of this rank, also stopped reads whose last messages are still under way."""

    def __init__(self, caches: RankCaches) -> None:
        self._caches = caches
        self._reads: dict[int, SourceRead] = {}
        self._last = 0
        self._arrived: deque[tuple[Link, Received]] = deque()
        self._writing: dict[PageWrite, None] = {}
        self._deadlines = Deadlines(self._due)
        self._moving = False  # a copy by a plane has just begun or moved bytes
        self._moves = 0  # how often bytes of any read came into D's pages

    def __bool__(self) -> bool:
        return bool(self._reads)

    def new(
        self, active_load: ActiveLoad, source: int, link: Link, address: RankAddress, now: float, timeout: float
    ) -> SourceRead:
        """A new read of ``active_load`` from its source number ``source``, the P rank at ``address``. ``timeout``: as
        ``ReadState`` takes it."""
        self._last = (self._last + 1) % (1 << 32)
        lifetime = Lifetime(SOURCE_READ, ReadState(source, timeout=timeout), now)
        read = self._reads[self._last] = SourceRead(self._last, active_load, link, address, lifetime)
        active_load.reads.append(read)
        return read

    def find(self, number: int, link: Link) -> SourceRead | None:
        """The read with this number, if it uses this link and has not ended."""
        read = self._reads.get(number)
        return read if read is not None and read.link is link else None

    def through(self, link: Link) -> list[SourceRead]:
        """All reads over a link."""
        return [read for read in self._reads.values() if read.link is link]

    def links(self) -> set[Link]:
        """The links that reads use."""
        return {read.link for read in self._reads.values()}

    def stopped(self, read: SourceRead) -> None:
        """A read was stopped. Its last messages may come until its deadline."""
        self._deadlines.note(read.number, read.state.due)

    def late(self, now: float) -> list[SourceRead]:
        """The stopped reads whose last messages are overdue."""
        return [self._reads[number] for number in self._deadlines.due(now)]

    def _due(self, number: int) -> float:
        read = self._reads.get(number)
        return math.inf if read is None else read.state.due

    def others_move(self, read: SourceRead) -> bool:
        """Whether another read over the link of a read goes on, and has made progress since this one did."""
        return any(
            other.moved > read.moved and not other.state.stopped and not other.state.landed
            for other in self.through(read.link)
        )

    def forget(self, read: SourceRead) -> None:
        """Forget a read of which no message can arrive any more."""
        self._reads.pop(read.number, None)

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
        for item in read.planned:
            theirs, whole = regions[item.span.region], self._box(read, item)
            convert = (item.region, item.span.region) in read.link.converted
            read.boxes.extend(self._caches.cut(whole, item.span, read.chunk_bytes, theirs, convert=convert))
        for chunk, box in enumerate(read.boxes):
            read.tags.add(read.tag(chunk))
            tag, into = read.tag(chunk), self._into(read, chunk, box)
            channel.expect(tag, self._caches.nbytes(box) + trailer_bytes(read.link.checksum), into)

    def _into(self, read: SourceRead, chunk: int, box: PageBox) -> Callable[[], Pieces] | None:
        """The memory of a message that may be received into pages; ``None`` where it must go through a slot."""
        checksum = read.link.checksum
        if not (takes_pieces(checksum) and self._caches.in_pieces(box)):
            return None
        pieces = partial(self._caches.pieces, box)
        if checksum is None:
            return pieces
        placed = read.placed[read.tag(chunk)] = PlacedMessage(pieces)
        return placed.into

    def check_grant(self, read: SourceRead, grant: messages.Grant) -> None:
        """Check that a grant fits D's ask.

        Raises:
            GeometryError: it does not.
        """
        if grant.chunks != len(read.boxes):
            raise GeometryError(f"P grants {grant.chunks} chunks, D asked for {len(read.boxes)}")
        if read.link.pulls and (highest := max(item.span.region for item in read.planned)) >= len(grant.block_ids):
            raise GeometryError(f"P grants blocks of {len(grant.block_ids)} regions, D asked for region {highest}")

    def begin_pull(self, read: SourceRead, grant: messages.Grant) -> Iterator[Happening]:
        """Where D reads P's pages by itself: begin to copy the pages of a grant.

        Raises:
            GeometryError: the granted blocks do not cover the spans.
        """
        channel = read.link.channel
        if channel is not None and channel.pulls:
            sides = [self._sides(read, planned, grant) for planned in read.planned]
            portions = [sides]
            if order := read.active_load.layer_order:
                portions = cut_read(self._caches, read.planned, sides, partial(self._sides, read, grant=grant), order)
            request = SpanRead(self._caches, portions, alone=self._alone(read))
            copy = channel.read(request)
            if len(portions) > 1 and channel.in_order and not copy.on_stream:
                request.note_ends(copy)
            yield self._write(read, copy, sum(self._caches.nbytes(box) for box, _ in sides))

    def _sides(self, read: SourceRead, planned: PlannedSpan, grant: messages.Grant) -> Side:
        """A span as a box of D's pages and as P's pages."""
        span = planned.span
        theirs = pages_of(read.link.pages[span.region], unpack_ids(grant.block_ids[span.region]), span, planned.shard)
        return self._box(read, planned), theirs

    def _alone(self, read: SourceRead) -> bool:
        """Whether this is the only read, and the engine is not about to compute."""
        return read.active_load.alone and len(self._reads) == 1 and not read.active_load.load.now

    def _write(
        self, read: SourceRead, copy: Copy, nbytes: int, message: Received | None = None, verdict: Verdict | None = None
    ) -> Happening:
        self._writing[PageWrite(read, copy, nbytes, message, verdict)] = None
        return read, WriteBegan(len(read.tags), awaitable=copy.on_stream or copy.done)

    def _box(self, read: SourceRead, item: PlannedSpan) -> PageBox:
        ids = read.active_load.ids[item.region]
        return self._caches.box(item.span, item.region, item.layer, item.head, ids, item.shard)

    def cancel(self, read: SourceRead) -> Iterator[Happening]:
        """Let no channel write D's pages for this read, and ask P to stop sending.

        A copy that cannot be cancelled goes on, and ``finished_writes`` yields an event when it ends. Messages under
        way end in staging memory or are dropped; P's ``Stopped`` contains their number. Where none is left, the read
        need not wait for it.
        """
        posted: set[int] = set()
        channel = read.link.channel
        if channel is not None and channel.pulls:
            for write in [write for write in self._writing if write.read is read]:
                channel.cancel(write.copy)
                if write.copy.done:
                    del self._writing[write]
                    yield read, WriteEnded()
        elif channel is not None:
            for tag in read.tags:
                channel.stop_writing(tag)
            posted = channel.posted()
        if read.link.phase is LinkPhase.ATTACHED:
            highest = max((tag & 0xFFFFFFFF for tag in posted & read.tags), default=-1)
            read.link.send(messages.Cancel(read=read.number, posted=highest + 1))
        if read.state.left and not read.tags:  # no copy of the last message has begun, because the message was bad
            yield read, MessagesLeft(0)

    def on_stopped(self, read: SourceRead, sent: int) -> Iterator[Happening]:
        """Handle a Stopped. P has sent the first ``sent`` chunks of the read, or empty messages, and sends no more."""
        if not read.state.stopped:
            return
        channel = read.link.channel
        for tag in [tag for tag in read.tags if tag & 0xFFFFFFFF >= sent]:
            read.tags.discard(tag)
            if channel is not None and not channel.pulls:
                channel.forget(tag)
        yield read, MessagesLeft(len(read.tags))

    def collect(self) -> Iterator[Happening]:
        """Unpack some of the messages that have arrived, and check the copies under way. Yields the events of both."""
        for read in self._reads.values():  # of two over one link, the second finds nothing
            link, channel = read.link, read.link.channel
            if channel is not None and not channel.pulls and link.phase is LinkPhase.ATTACHED:
                self._arrived.extend((link, message) for message in channel.poll())
        for _ in range(min(UNPACKS_PER_TURN, len(self._arrived))):
            yield from self._unpack(*self._arrived.popleft())
        self._moving = False
        if not self._writing:
            return
        yield from self.finished_writes()
        for write in [write for write in self._writing if not write.copy.on_stream]:
            before, write.seen = write.seen, write.copy.moved
            if write.seen != before:
                self._moving = True
                if not write.read.state.stopped:
                    self._count(write.read, write.seen - (before or 0))
                yield write.read, WriteMoved(awaitable=write.copy.has_ended(0))

    def finished_writes(self) -> Iterator[Happening]:
        """The events of the copies into D's pages that have ended."""
        for write in [write for write in self._writing if write.copy.done]:
            if write not in self._writing:  # an earlier event has cancelled its read
                continue
            del self._writing[write]
            if write.message is not None:
                write.message.release()
            failure = _failure(write)
            if failure is not None and write.message is None and write.copy.peer_lost:
                write.read.link.lose_plane(failure.text)  # D reads P's pages by itself, and cannot any more
            load = write.read.active_load
            load.copied_at = max(load.copied_at, write.copy.ended_at)
            if failure is None and not write.read.state.stopped:
                self._count(write.read, write.nbytes - (write.seen or 0))
            yield write.read, WriteEnded(failure)

    def _count(self, read: SourceRead, nbytes: int) -> None:
        """Count bytes of a read that have come into D's pages."""
        if nbytes:
            self._moves += 1
            read.moved = self._moves
            read.active_load.nbytes += nbytes

    def copies_of(self, active_load: ActiveLoad) -> list[Copy]:
        """The copies of a load that are under way."""
        return [write.copy for write in self._writing if write.read.active_load is active_load]

    @property
    def writing(self) -> bool:
        """Whether copies into D's pages are under way, or their end is not handled yet."""
        return bool(self._writing)

    @property
    def backlog(self) -> bool:
        """Whether messages wait to be unpacked, or a plane is copying pages."""
        return bool(self._arrived) or self._moving

    def _unpack(self, link: Link, message: Received) -> Iterator[Happening]:
        """Begin to copy a message into D's pages. It is released when the copy has ended, or here."""
        read = self.find(message.tag >> 32, link)
        if read is None or message.tag not in read.tags:
            message.release()
            return
        read.tags.discard(message.tag)
        if read.state.stopped:
            message.release()
            yield read, MessagesLeft(len(read.tags))
            return
        chunk = message.tag & 0xFFFFFFFF
        box = read.boxes[chunk]
        checksum, nbytes = link.checksum, self._caches.nbytes(box)
        expected = nbytes + trailer_bytes(checksum)
        if message.nbytes != expected:
            message.release()
            yield read, ReadFailed(Reason("data", f"chunk {chunk} has {message.nbytes} bytes, expected {expected}"))
            return
        check = verdict = None
        try:
            if message.placed:
                if checksum is not None and not read.placed.pop(message.tag).fits(message.tag):
                    message.release()
                    yield read, ReadFailed(_damaged(link, message.tag))
                    return
                copy = Copy(done=True)
            else:
                if checksum is not None:
                    verdict = Verdict(self._caches.device)
                    check = verdict.check(checksum, message.tag)
                copy = self._caches.unpack(message.address, box, message.device, alone=self._alone(read), check=check)
        except Exception as error:  # an error of one copy fails one request
            message.release()
            logger.exception("kvferry: a chunk of %s could not be unpacked", read.active_load.load.request_id)
            yield read, ReadFailed(Reason("internal", repr(error)))
            return
        yield self._write(read, copy, nbytes, message, verdict)


def _damaged(link: Link, tag: int) -> Reason:
    return Reason("checksum", f"{link.name}: chunk {tag & 0xFFFFFFFF} does not fit its checksum ({link.checksum})")


def _failure(write: PageWrite) -> Reason | None:
    """Why the bytes of a copy that has ended are not in place, or are not P's."""
    copy = write.copy
    if not copy.error:
        if write.verdict is None or write.verdict.fits:
            return None
        assert write.message is not None
        return _damaged(write.read.link, write.message.tag)
    if copy.peer_lost:
        return Reason("peer_lost", copy.error, "plane")
    return Reason("internal", f"the copy failed: {copy.error}")
