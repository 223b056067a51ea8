"""The data side of D's hand-overs: what is asked of each P rank, and the chunks that come. One *read* per P rank.

Decides nothing: it announces chunks, unpacks them and says which events that is for the hand-over.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvferry.connector import handover, protocol
from kvferry.connector.handover import Reason
from kvferry.connector.link import Link, LinkState
from kvferry.connector.plan import PlannedSpan, chunks
from kvferry.connector.site import Caches, Ids, Part
from kvferry.connector.stepplan import Load
from kvferry.connector.topology import HeadRead
from kvferry.transport.plane import Received

logger = logging.getLogger("vllm.kvferry.reads")

UNPACKS_PER_TURN = 4
"""Messages unpacked before control messages are looked at again."""


@dataclass(slots=True)
class Job:
    """One request's hand-over on this rank. ``ids``: kernel block ids per layer group."""

    load: Load
    state: handover.Handover
    started: float
    ids: list[Ids]
    reads: list[Read] = field(default_factory=list)
    nbytes: int = 0


@dataclass(slots=True, eq=False)
class Read:
    """One hand-over's part from one P rank. ``tags``: announced chunks that are still to come."""

    number: int
    job: Job
    source: int
    link: Link
    heads: HeadRead
    parts: list[Part] = field(default_factory=list)
    tags: set[int] = field(default_factory=set)
    stopped: bool = False
    moved: bool = False

    def tag(self, chunk: int) -> int:
        """A chunk's tag on the data plane, unique in this process."""
        return self.number << 32 | chunk


Happened = tuple[Read, handover.Event]


class Reads:
    """All reads of this rank, also those that were stopped and whose last chunks are still under way."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._reads: dict[int, Read] = {}
        self._last = 0
        self._arrived: deque[tuple[Link, Received]] = deque()

    def __bool__(self) -> bool:
        return bool(self._reads)

    def new(self, job: Job, source: int, link: Link, heads: HeadRead) -> Read:
        """The read of ``job`` from its source number ``source``."""
        self._last = (self._last + 1) % (1 << 32)
        read = self._reads[self._last] = Read(self._last, job, source, link, heads)
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

    def announce(self, read: Read, planned: Iterable[PlannedSpan]) -> None:
        """Cut the spans into chunks and expect them. Precedes the ask: the first chunk may overtake the grant, which
        comes by another socket."""
        groups = read.link.theirs.groups
        for item in planned:
            read.parts.extend(self._cut(read.job, item, read.link.slot_bytes, groups[item.span.group].block_size))
        channel = read.link.channel
        assert channel is not None
        for chunk, part in enumerate(read.parts):
            read.tags.add(read.tag(chunk))
            channel.expect(read.tag(chunk), self._caches.nbytes(part))

    def _cut(self, job: Job, planned: PlannedSpan, chunk_bytes: int, align: int) -> Iterator[Part]:
        span = planned.span
        content = self._caches.views[planned.group].content_bytes
        for chunk in chunks(span, content, chunk_bytes, align):
            yield Part(
                group=planned.group,
                layer=planned.layer + chunk.layer,
                num_layers=chunk.num_layers,
                head=planned.head,
                num_heads=span.num_heads,
                token=span.token + chunk.token,
                num_tokens=chunk.num_tokens,
                kernel_ids=job.ids[planned.group],
            )

    def stop(self, read: Read) -> None:
        """Unpack nothing more. Unpacking happens on this very thread, so nothing writes the pages from here on; what
        is under way ends in staging memory, and P's ``Stopped`` says how much of it there is."""
        if read.stopped or read.moved:
            return
        read.stopped = True
        if read.link.state is LinkState.ATTACHED and read.parts:
            posted = read.link.channel.posted() if read.link.channel is not None else set()
            highest = max((tag & 0xFFFFFFFF for tag in posted & read.tags), default=-1)
            read.link.send(protocol.Cancel(read=read.number, posted=highest + 1))

    def stopped(self, read: Read, sent: int) -> None:
        """P has sent, or ended by empty messages, the first ``sent`` chunks; the others will never come."""
        for tag in [tag for tag in read.tags if tag & 0xFFFFFFFF >= sent]:
            read.tags.discard(tag)
            if read.link.channel is not None:
                read.link.channel.forget(tag)
        if read.stopped and not read.tags:
            self.forget(read)

    def collect(self, links: Iterable[Link]) -> Iterator[Happened]:
        """Unpack some of what has arrived; what that means for the hand-overs."""
        for link in links:
            if link.channel is not None and link.state is LinkState.ATTACHED:
                self._arrived.extend((link, message) for message in link.channel.poll())
        for _ in range(min(UNPACKS_PER_TURN, len(self._arrived))):
            link, message = self._arrived.popleft()
            try:
                happened = self._unpack(link, message)
            finally:
                message.release()
            if happened is not None:
                yield happened

    @property
    def backlog(self) -> bool:
        """Whether messages wait to be unpacked."""
        return bool(self._arrived)

    def _unpack(self, link: Link, message: Received) -> Happened | None:
        read = self.find(message.tag >> 32, link)
        if read is None or message.tag not in read.tags:
            return None
        read.tags.discard(message.tag)
        if read.stopped:
            if not read.tags:
                self.forget(read)
            return None
        chunk = message.tag & 0xFFFFFFFF
        part = read.parts[chunk]
        wanted = self._caches.nbytes(part)
        if message.nbytes != wanted:
            text = f"chunk {chunk} has {message.nbytes} bytes, expected {wanted}"
            return read, handover.Failed(read.source, Reason("data", text))
        try:
            self._caches.unpack(message.address, part)
        except Exception as error:  # an error of the copy is this request's, not everybody's
            logger.exception("kvferry: a chunk of %s could not be unpacked", read.job.load.request_id)
            return read, handover.Failed(read.source, Reason("internal", repr(error)))
        read.job.nbytes += wanted
        if read.tags:
            return read, handover.Progress()
        read.moved = True
        return read, handover.Moved(read.source)
