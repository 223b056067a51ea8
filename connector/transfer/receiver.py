"""The data side of D's hand-overs: what is asked of each P rank, and the chunks that come. One *read* per P rank.

Decides nothing: it announces chunks, unpacks them and says which events that is for the hand-over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

import msgspec

from kvferry.connector.geometry.byte_ranges import byte_ranges, join_ranges, pages_of
from kvferry.connector.geometry.read_plan import PlannedSpan
from kvferry.connector.protocol import handover, messages
from kvferry.connector.protocol.handover import Reason
from kvferry.connector.protocol.step_plan import Load, unpack_ids
from kvferry.connector.transfer.caches import Ids, PageBox, RankCaches
from kvferry.connector.transfer.link import Link, LinkState
from kvferry.kernels.paged_copy import Pages
from kvferry.transport.channels import ByteRanges, Copy, PageRead, Received
from kvferry.transport.errors import GeometryError
from kvferry.transport.grant_board import PostedGrant

logger = logging.getLogger("vllm.kvferry.receiver")

UNPACKS_PER_TURN = 4
"""Messages unpacked before control messages are looked at again."""


class ActiveLoad(msgspec.Struct):
    """One request's hand-over on this rank. ``ids``: kernel block ids per region; ``alone``: no other one began with
    it; ``begun``: the step that waits for it knows that all its copies are under way."""

    load: Load
    state: handover.Handover
    started: float
    ids: list[Ids]
    alone: bool = False
    begun: bool = False
    reads: list[SourceRead] = msgspec.field(default_factory=list)
    nbytes: int = 0


class SourceRead(msgspec.Struct, eq=False):
    """One hand-over's part from one P rank.

    ``planned``: what is asked for. Where P pushes, ``boxes`` are the chunks that it is cut into, and ``tags`` those
    still to come. ``note`` is the grant where it was found posted. ``granted``: P's grant is here, and is what was
    asked for. ``writing``: copies into D's pages that have not ended. ``off_stream``: the engine's device cannot wait
    for one of them.
    """

    number: int
    active_load: ActiveLoad
    source: int
    link: Link
    planned: tuple[PlannedSpan, ...] = ()
    boxes: list[PageBox] = msgspec.field(default_factory=list)
    tags: set[int] = msgspec.field(default_factory=set)
    note: PostedGrant | None = None
    granted: bool = False
    writing: int = 0
    off_stream: bool = False
    stopped: bool = False
    moved: bool = False

    def tag(self, chunk: int) -> int:
        """A chunk's tag on the data plane, unique in this process."""
        return self.number << 32 | chunk

    @property
    def begun(self) -> bool:
        """Of one that is moving: whether all copies into our pages have ended, or are under way where the engine's
        device waits for them."""
        return self.moved or (self.writing > 0 and not self.tags and not self.off_stream)


ReadEvent = tuple[SourceRead, handover.HandoverEvent]


class SpanRead(PageRead):
    """The spans of one read, each in D's pages and in P's."""

    def __init__(self, caches: RankCaches, sides: list[tuple[PageBox, Pages]], *, alone: bool) -> None:
        self._caches, self._sides, self._alone = caches, sides, alone

    def byte_ranges(self) -> ByteRanges:
        return join_ranges([self._ranges(box, theirs) for box, theirs in self._sides])

    def _ranges(self, box: PageBox, theirs: Pages) -> ByteRanges:
        row_bytes = self._caches.views[box.region].row_bytes
        return byte_ranges(self._caches.pages(box), theirs, box.num_heads, box.num_tokens, row_bytes)

    def launch(self) -> Copy:
        return self._caches.fetch(self._sides, alone=self._alone)


class PageWrite(msgspec.Struct, eq=False):
    """A copy of ``nbytes`` into D's pages. ``message`` holds what it copies, where that came in one. ``seen``: the
    value of ``copy.moved`` that is counted; ``None`` before the first look."""

    read: SourceRead
    copy: Copy
    nbytes: int
    message: Received | None = None
    seen: int | None = None


class Receiver:
    """All reads of this rank, also those that were stopped and whose last chunks are still under way."""

    def __init__(self, caches: RankCaches) -> None:
        self._caches = caches
        self._reads: dict[int, SourceRead] = {}
        self._last = 0
        self._arrived: deque[tuple[Link, Received]] = deque()
        self._writing: list[PageWrite] = []
        self._moving = False  # a plane's own copy has just begun or gone on

    def __bool__(self) -> bool:
        return bool(self._reads)

    def new(self, active_load: ActiveLoad, source: int, link: Link) -> SourceRead:
        """The read of ``active_load`` from its source number ``source``."""
        self._last = (self._last + 1) % (1 << 32)
        read = self._reads[self._last] = SourceRead(self._last, active_load, source, link)
        active_load.reads.append(read)
        return read

    def find(self, number: int, link: Link) -> SourceRead | None:
        """The read of that number, if it goes over that link and has not ended."""
        read = self._reads.get(number)
        return read if read is not None and read.link is link else None

    def through(self, link: Link) -> list[SourceRead]:
        """All reads over a link."""
        return [read for read in self._reads.values() if read.link is link]

    def forget(self, read: SourceRead) -> None:
        """Nothing of it will come any more."""
        self._reads.pop(read.number, None)

    def expect(self, read: SourceRead) -> None:
        """Where P pushes: expect what has just been asked for. Not before, because cutting takes as long as the ask
        takes to P; not later, because the first chunk may overtake the grant, which comes by another socket.

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
            read.boxes.extend(self._caches.cut(whole, item.span, read.link.slot_bytes, theirs, convert=convert))
        for chunk, box in enumerate(read.boxes):
            read.tags.add(read.tag(chunk))
            into = partial(self._caches.pieces, box) if self._caches.in_pieces(box) else None
            channel.expect(read.tag(chunk), self._caches.nbytes(box), into)

    def granted(self, read: SourceRead, grant: messages.Grant) -> None:
        """Check a grant; if it says where P's pages lie, begin to read them.

        Raises:
            GeometryError: it does not fit what was asked for.
        """
        if grant.chunks != len(read.boxes):
            raise GeometryError(f"P grants {grant.chunks} chunks, {len(read.boxes)} were asked for")
        channel = read.link.channel
        if channel is not None and channel.pulls:
            sides = [self._sides(read, planned, grant) for planned in read.planned]
            copy = channel.read(SpanRead(self._caches, sides, alone=self._alone(read)))
            self._write(read, copy, sum(self._caches.nbytes(box) for box, _ in sides))

    def _sides(self, read: SourceRead, planned: PlannedSpan, grant: messages.Grant) -> tuple[PageBox, Pages]:
        """A span in our pages and in P's."""
        span = planned.span
        if span.region >= len(grant.block_ids):
            raise GeometryError(f"P grants blocks of {len(grant.block_ids)} groups, group {span.region} was asked for")
        theirs = pages_of(read.link.pages[span.region], unpack_ids(grant.block_ids[span.region]), span, planned.shard)
        return self._box(read, planned), theirs

    def _alone(self, read: SourceRead) -> bool:
        """Whether it is the only one, and the engine is not about to compute meanwhile."""
        return read.active_load.alone and len(self._reads) == 1 and not read.active_load.load.now

    def _write(self, read: SourceRead, copy: Copy, nbytes: int, message: Received | None = None) -> None:
        read.writing += 1
        read.off_stream |= not (copy.on_stream or copy.done)
        self._writing.append(PageWrite(read, copy, nbytes, message))

    def _box(self, read: SourceRead, item: PlannedSpan) -> PageBox:
        ids = read.active_load.ids[item.region]
        return self._caches.box(item.span, item.region, item.layer, item.head, ids, item.shard)

    def stop(self, read: SourceRead) -> None:
        """Start no more copies, let no channel write the pages. Copies that cannot be cancelled go on, and ``collect``
        yields an event when the last one ends. Messages under way end in staging memory or are dropped, and P's
        ``Stopped`` contains their number."""
        if read.stopped or read.moved:
            return
        read.stopped = True
        posted: set[int] = set()
        channel = read.link.channel
        if channel is not None and channel.pulls:
            for write in [write for write in self._writing if write.read is read]:
                channel.cancel(write.copy)
                if write.copy.done:
                    self._writing.remove(write)
                    read.writing -= 1
        elif channel is not None:
            for tag in read.tags:
                channel.stop_writing(tag)
            posted = channel.posted()
        if read.link.state is LinkState.ATTACHED and read.planned:
            highest = max((tag & 0xFFFFFFFF for tag in posted & read.tags), default=-1)
            read.link.send(messages.Cancel(read=read.number, posted=highest + 1))

    def stopped(self, read: SourceRead, sent: int) -> None:
        """P has sent, or ended by empty messages, the first ``sent`` chunks; the others will never come. It says so
        when it is told to stop, and of a read that was not it is no word."""
        if not read.stopped:
            return
        channel = read.link.channel
        for tag in [tag for tag in read.tags if tag & 0xFFFFFFFF >= sent]:
            read.tags.discard(tag)
            if channel is not None and not channel.pulls:
                channel.forget(tag)
        if not read.tags:
            self.forget(read)

    def collect(self, links: Iterable[Link]) -> Iterator[ReadEvent]:
        """Unpack some of what has arrived, look at the copies; the events for the hand-overs."""
        for link in links:
            channel = link.channel
            if channel is not None and not channel.pulls and link.state is LinkState.ATTACHED:
                self._arrived.extend((link, message) for message in channel.poll())
        for _ in range(min(UNPACKS_PER_TURN, len(self._arrived))):
            link, message = self._arrived.popleft()
            happened = self._unpack(link, message)
            if happened is not None:
                yield happened
        yield from self.finished_writes()
        self._moving = False
        for write in [write for write in self._writing if not write.copy.on_stream]:
            before, write.seen = write.seen, write.copy.moved
            if write.seen != before:
                self._moving = True
                if not write.read.stopped:
                    write.read.active_load.nbytes += write.seen - (before or 0)
                    yield write.read, handover.SourceProgress()

    def finished_writes(self) -> Iterator[ReadEvent]:
        """The events for the hand-overs whose copies into our pages have ended."""
        while (write := next((write for write in self._writing if write.copy.done), None)) is not None:
            self._writing.remove(write)
            happened = self._written(write)
            if happened is not None:
                yield happened

    @property
    def backlog(self) -> bool:
        """Whether messages wait to be unpacked, or a plane is copying pages."""
        return bool(self._arrived) or self._moving

    def _unpack(self, link: Link, message: Received) -> ReadEvent | None:
        """Begin to copy a message to where it belongs; it is released once that has ended, or here."""
        read = self.find(message.tag >> 32, link)
        if read is None or message.tag not in read.tags:
            message.release()
            return None
        read.tags.discard(message.tag)
        if read.stopped:
            if not read.tags:
                self.forget(read)
            message.release()
            return None
        chunk = message.tag & 0xFFFFFFFF
        box = read.boxes[chunk]
        wanted = self._caches.nbytes(box)
        if message.nbytes != wanted:
            message.release()
            text = f"chunk {chunk} has {message.nbytes} bytes, expected {wanted}"
            return read, handover.SourceFailed(read.source, Reason("data", text))
        try:
            if message.placed:
                copy = Copy(done=True)
            else:
                copy = self._caches.unpack(message.address, box, message.device, alone=self._alone(read))
        except Exception as error:  # an error of the copy is this request's, not everybody's
            message.release()
            logger.exception("kvferry: a chunk of %s could not be unpacked", read.active_load.load.request_id)
            return read, handover.SourceFailed(read.source, Reason("internal", repr(error)))
        self._write(read, copy, wanted, message)
        # From here on our pages are written: the hand-over must hear so even where the grant is still on its way.
        return None if copy.done else (read, handover.SourceProgress())

    def _written(self, writing: PageWrite) -> ReadEvent | None:
        """A copy into our pages has ended."""
        read = writing.read
        read.writing -= 1
        if writing.message is not None:
            writing.message.release()
        if read.stopped:
            return None if read.writing else (read, handover.SourceDrained(read.source))
        if error := writing.copy.error:
            lost = writing.copy.peer_lost
            reason = Reason("peer_lost", error) if lost else Reason("internal", f"the copy failed: {error}")
            return read, handover.SourceFailed(read.source, reason)
        read.active_load.nbytes += writing.nbytes - (writing.seen or 0)
        if read.tags or read.writing:
            return read, handover.SourceProgress()
        read.moved = True
        return read, handover.SourceMoved(read.source)
