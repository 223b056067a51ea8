"""The data side of D's hand-overs: what is asked of each P rank, and the chunks that come. One *read* per P rank.

Decides nothing: it announces chunks, unpacks them and says which events that is for the hand-over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

import msgspec

from kvferry.connector import handover, protocol
from kvferry.connector.copies import Copy
from kvferry.connector.errors import GeometryError, TransportError
from kvferry.connector.handover import Reason
from kvferry.connector.link import Link, LinkState
from kvferry.connector.plan import PlannedSpan
from kvferry.connector.runs import Runs, joined, pages_of, runs, taken
from kvferry.connector.site import Caches, Ids, Part
from kvferry.connector.stepplan import Load, unpack_ids
from kvferry.kernels.paged_copy import Pages
from kvferry.transport.board import Note
from kvferry.transport.plane import MappedChannel, ReadChannel, Received, RecvChannel

logger = logging.getLogger("vllm.kvferry.reads")

UNPACKS_PER_TURN = 4
"""Messages unpacked before control messages are looked at again."""
PEER_BYTES_PER_TURN = 16 << 20
"""The same for a read of P's pages: a few milliseconds, and few steps of Python however much there is."""


class Job(msgspec.Struct):
    """One request's hand-over on this rank. ``ids``: kernel block ids per region; ``alone``: no other one began with
    it; ``begun``: the step that waits for it knows that all its copies are under way."""

    load: Load
    state: handover.Handover
    started: float
    ids: list[Ids]
    alone: bool = False
    begun: bool = False
    reads: list[Read] = msgspec.field(default_factory=list)
    nbytes: int = 0


class Read(msgspec.Struct, eq=False):
    """One hand-over's part from one P rank.

    ``planned``: what is asked for. Where P pushes, ``parts`` are the chunks that it is cut into, and ``tags`` those
    still to come. Where a plane reads P's pages, ``runs`` are what is left to read, known from the grant on; ``note``
    is the grant where it was found posted. ``granted``: P's grant is here, and is what was asked for. ``writing``:
    copies into D's pages that have not ended.
    """

    number: int
    job: Job
    source: int
    link: Link
    planned: tuple[PlannedSpan, ...] = ()
    parts: list[Part] = msgspec.field(default_factory=list)
    runs: Runs | None = None
    tags: set[int] = msgspec.field(default_factory=set)
    note: Note | None = None
    granted: bool = False
    writing: int = 0
    stopped: bool = False
    moved: bool = False

    def tag(self, chunk: int) -> int:
        """A chunk's tag on the data plane, unique in this process."""
        return self.number << 32 | chunk

    @property
    def begun(self) -> bool:
        """Of one that is moving: whether all copies into our pages are under way or have ended."""
        return self.moved or (self.writing > 0 and not self.tags)


Happened = tuple[Read, handover.Event]


class Writing(msgspec.Struct):
    """A copy of ``nbytes`` into D's pages. ``message`` holds what it copies, where that came in one."""

    read: Read
    copy: Copy
    nbytes: int
    message: Received | None = None


class Reads:
    """All reads of this rank, also those that were stopped and whose last chunks are still under way."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._reads: dict[int, Read] = {}
        self._last = 0
        self._arrived: deque[tuple[Link, Received]] = deque()
        self._writing: deque[Writing] = deque()

    def __bool__(self) -> bool:
        return bool(self._reads)

    def new(self, job: Job, source: int, link: Link) -> Read:
        """The read of ``job`` from its source number ``source``."""
        self._last = (self._last + 1) % (1 << 32)
        read = self._reads[self._last] = Read(self._last, job, source, link)
        job.reads.append(read)
        return read

    def find(self, number: int, link: Link) -> Read | None:
        """The read of that number, if it goes over that link and has not ended."""
        read = self._reads.get(number)
        return read if read is not None and read.link is link else None

    def through(self, link: Link) -> list[Read]:
        """All reads over a link."""
        return [read for read in self._reads.values() if read.link is link]

    def forget(self, read: Read) -> None:
        """Nothing of it will come any more."""
        self._reads.pop(read.number, None)

    def expect(self, read: Read) -> None:
        """Where P pushes: expect what has just been asked for. Not before, because cutting takes as long as the ask
        takes to P; not later, because the first chunk may overtake the grant, which comes by another socket.

        Raises:
            GeometryError: a chunk of one token does not fit into a slot.
        """
        channel = read.link.channel
        if not isinstance(channel, RecvChannel):
            return
        groups = read.link.theirs.groups
        for item in read.planned:
            theirs, whole = groups[item.span.group], self._part(read, item)
            convert = (item.group, item.span.group) in read.link.converted
            read.parts.extend(self._caches.cut(whole, item.span, read.link.slot_bytes, theirs, convert=convert))
        for chunk, part in enumerate(read.parts):
            read.tags.add(read.tag(chunk))
            in_place = channel.scatters and self._caches.in_pieces(part)
            into = partial(self._caches.pieces, part) if in_place else None
            channel.expect(read.tag(chunk), self._caches.nbytes(part), into)

    def granted(self, read: Read, grant: protocol.Grant) -> None:
        """Check a grant; if it says where P's pages lie, begin to read them.

        Raises:
            GeometryError: it does not fit what was asked for.
        """
        if grant.chunks != len(read.parts):
            raise GeometryError(f"P grants {grant.chunks} chunks, {len(read.parts)} were asked for")
        channel = read.link.channel
        if isinstance(channel, ReadChannel):
            read.runs = joined([self._runs(planned, *self._sides(read, planned, grant)) for planned in read.planned])
        elif isinstance(channel, MappedChannel):
            sides = [self._sides(read, planned, grant) for planned in read.planned]
            fetched = self._caches.fetch(sides, alone=self._alone(read))
            self._write(read, fetched, sum(self._caches.nbytes(part) for part, _ in sides))

    def _sides(self, read: Read, planned: PlannedSpan, grant: protocol.Grant) -> tuple[Part, Pages]:
        """A span in our pages and in P's."""
        span = planned.span
        if span.group >= len(grant.block_ids):
            raise GeometryError(f"P grants blocks of {len(grant.block_ids)} groups, group {span.group} was asked for")
        theirs = pages_of(read.link.pages[span.group], unpack_ids(grant.block_ids[span.group]), span, planned.share)
        return self._part(read, planned), theirs

    def _alone(self, read: Read) -> bool:
        """Whether it is the only one, and the engine is not about to compute meanwhile."""
        return read.job.alone and len(self._reads) == 1 and not read.job.load.now

    def _runs(self, planned: PlannedSpan, part: Part, theirs: Pages) -> Runs:
        row_bytes = self._caches.views[planned.group].row_bytes
        return runs(self._caches.pages(part), theirs, part.num_heads, part.num_tokens, row_bytes)

    def _write(self, read: Read, copy: Copy, nbytes: int, message: Received | None = None) -> None:
        read.writing += 1
        self._writing.append(Writing(read, copy, nbytes, message))

    def _part(self, read: Read, item: PlannedSpan) -> Part:
        ids = read.job.ids[item.group]
        return self._caches.part(item.span, item.group, item.layer, item.head, ids, item.share)

    def stop(self, read: Read) -> None:
        """Start no more copies, let no channel write the pages. Copies under way go on: ``collect`` tells of the end
        of the last. What else is under way ends in staging memory or nowhere, and P's ``Stopped`` says how much."""
        if read.stopped or read.moved:
            return
        read.stopped = True
        channel = read.link.channel
        if isinstance(channel, RecvChannel):
            for tag in read.tags:
                channel.let_go(tag)
        if read.link.state is LinkState.ATTACHED and read.planned:
            posted = channel.posted() if isinstance(channel, RecvChannel) else set()
            highest = max((tag & 0xFFFFFFFF for tag in posted & read.tags), default=-1)
            read.link.send(protocol.Cancel(read=read.number, posted=highest + 1))

    def stopped(self, read: Read, sent: int) -> None:
        """P has sent, or ended by empty messages, the first ``sent`` chunks; the others will never come. It says so
        when it is told to stop, and of a read that was not it is no word."""
        if not read.stopped:
            return
        for tag in [tag for tag in read.tags if tag & 0xFFFFFFFF >= sent]:
            read.tags.discard(tag)
            if isinstance(read.link.channel, RecvChannel):
                read.link.channel.forget(tag)
        if not read.tags:
            self.forget(read)

    def collect(self, links: Iterable[Link]) -> Iterator[Happened]:
        """Unpack some of what has arrived, read some of what P granted; what that means for the hand-overs."""
        for link in links:
            if isinstance(link.channel, RecvChannel) and link.state is LinkState.ATTACHED:
                self._arrived.extend((link, message) for message in link.channel.poll())
        for _ in range(min(UNPACKS_PER_TURN, len(self._arrived))):
            link, message = self._arrived.popleft()
            happened = self._unpack(link, message)
            if happened is not None:
                yield happened
        yield from self.written()
        peer = next((read for read in self._reads.values() if read.runs is not None and not read.stopped), None)
        if peer is not None:
            yield peer, self._read(peer)

    def written(self) -> Iterator[Happened]:
        """What it means for the hand-overs that copies into our pages have ended."""
        while self._writing and self._writing[0].copy.done:
            happened = self._written(self._writing.popleft())
            if happened is not None:
                yield happened

    @property
    def backlog(self) -> bool:
        """Whether messages wait to be unpacked, or pages to be read."""
        return bool(self._arrived) or any(r.runs is not None and not r.stopped for r in self._reads.values())

    def _read(self, read: Read) -> handover.Event:
        channel = read.link.channel
        assert isinstance(channel, ReadChannel) and read.runs is not None
        now, read.runs = taken(read.runs, PEER_BYTES_PER_TURN)
        try:
            channel.read(now.to, now.of, now.nbytes)
        except TransportError as error:
            read.runs = None
            return handover.Failed(read.source, Reason("peer_lost", str(error)))
        read.job.nbytes += int(now.nbytes.sum())
        if read.runs is not None:
            self._reads[read.number] = self._reads.pop(read.number)  # the next turn is another's
            return handover.Progress()
        read.moved = True
        return handover.Moved(read.source)

    def _unpack(self, link: Link, message: Received) -> Happened | None:
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
        part = read.parts[chunk]
        wanted = self._caches.nbytes(part)
        if message.nbytes != wanted:
            message.release()
            text = f"chunk {chunk} has {message.nbytes} bytes, expected {wanted}"
            return read, handover.Failed(read.source, Reason("data", text))
        try:
            if message.placed:
                copy = Copy(done=True)
            else:
                copy = self._caches.unpack(message.address, part, message.device, alone=self._alone(read))
        except Exception as error:  # an error of the copy is this request's, not everybody's
            message.release()
            logger.exception("kvferry: a chunk of %s could not be unpacked", read.job.load.request_id)
            return read, handover.Failed(read.source, Reason("internal", repr(error)))
        self._write(read, copy, wanted, message)
        # From here on our pages are written: the hand-over must hear so even where the grant is still on its way.
        return None if copy.done else (read, handover.Progress())

    def _written(self, writing: Writing) -> Happened | None:
        """A copy into our pages has ended."""
        read = writing.read
        read.writing -= 1
        if writing.message is not None:
            writing.message.release()
        if read.stopped:
            return None if read.writing else (read, handover.Drained(read.source))
        if writing.copy.error:
            return read, handover.Failed(read.source, Reason("internal", f"the copy failed: {writing.copy.error}"))
        read.job.nbytes += writing.nbytes
        if read.tags or read.writing:
            return read, handover.Progress()
        read.moved = True
        return read, handover.Moved(read.source)
