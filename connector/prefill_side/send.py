"""The reads that P sends, chunk by chunk, in turn.

A read may begin while P's engine computes its prompt. Then its chunks leave, in order, once their bytes lie in the
blocks, and meanwhile it waits aside. The engine may take the blocks back at any time, so each chunk is copied to a
slot, and is sent only if the blocks were not taken back before the end of the copy (``PromptBlocks.lost``).

A read that is stopped sends no more, but copies that were begun may still read P's pages. It ends, once, when none
does: only that proves that nothing reads the pages.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import msgspec

from kvferry.connector.geometry.spans import MAX_CHUNKS, check_spans
from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.connector.pages.computed_steps import PromptBlocks
from kvferry.connector.prefill_side.prompts import Prompt
from kvferry.connector.prefill_side.session import Session
from kvferry.connector.prefill_side.stream import boxes
from kvferry.connector.wire import messages
from kvferry.transport.channels import Copy, SendChannel, Slot
from kvferry.transport.errors import GeometryError
from kvferry.transport.fair_table import FairTable
from kvferry.transport.limited_log import RateLimitedLog

_limited = RateLimitedLog(logging.getLogger("vllm.kvferry.send"))

LIVE_SPANS = 1 << 17
"""Bound on the reads that P sends, by their spans: 45 MB."""
READ_COST = 32
"""Cost of a read beside its spans."""

ReadKey = tuple[bytes, int]
"""An identity, and D's number of the read."""


class PackedChunk(msgspec.Struct):
    """A chunk that is being packed into a slot, or waits there to be sent."""

    copy: Copy
    channel: SendChannel
    slot: Slot
    nbytes: int
    tag: int
    blocks: PromptBlocks | None
    """Those that it is copied from, where its prompt was read before its lease."""

    @property
    def lost(self) -> bool:
        """Whether the engine took the blocks back before the end of the copy was seen."""
        return self.blocks is not None and self.blocks.lost


class OutgoingRead(msgspec.Struct, eq=False):
    """A read that P sends, one chunk per box of pages."""

    session: Session
    ask: messages.Ask
    prompt: Prompt
    chunks: int
    boxes: Iterator[PageBox | None]
    """The chunks that are not made yet, in wire order; ``None`` comes in place of a chunk that is not computed."""
    begun_at: float
    """By ``RankContext.clock``."""
    blocks: PromptBlocks | None
    """Those that ``boxes`` name."""
    begun: int = 0
    """The first ``begun`` chunks are packed or being packed."""
    sent: int = 0
    """The channel has the first ``sent`` chunks."""
    stopped: bool = False
    renews_at: float = 0.0
    """From then on a chunk renews the lease once more."""
    next_box: PageBox | None = None
    """The chunk that is made but has not begun."""
    packing: deque[PackedChunk] = msgspec.field(default_factory=deque)
    """The chunks that have begun but are not sent, in order."""
    nbytes: int = 0
    early: int = 0
    """Of ``nbytes``, those that were sent before the lease."""

    def count(self, nbytes: int) -> None:
        """Count a chunk that was sent."""
        assert not self.stopped and self.sent < self.begun
        self.sent += 1
        self.nbytes += nbytes
        if not self.prompt.leased:
            self.early += nbytes

    @property
    def all_begun(self) -> bool:
        return self.begun == self.chunks

    @property
    def key(self) -> ReadKey:
        return self.session.identity, self.ask.read

    @property
    def reading(self) -> bool:
        """Whether the channel still reads its last message from P's pages."""
        channel = self.session.sender
        tag = None if channel is None else channel.reading
        return tag is not None and tag >> 32 == self.ask.read


class Sends:
    """All reads that this rank sends. Used by the transfer thread only."""

    def __init__(self, caches: RankCaches, clock: Callable[[], float]) -> None:
        self._caches, self._clock = caches, clock
        self.turns: deque[OutgoingRead] = deque()
        """The reads that take turns, in their order."""
        self.waiting: dict[bytes, list[OutgoingRead]] = {}
        """The reads that wait until P's engine has computed their next chunk, by token."""
        self.draining: list[OutgoingRead] = []
        """The reads that are stopped, and whose pages a copy still reads."""
        self.live: FairTable[ReadKey, OutgoingRead] = FairTable(LIVE_SPANS)
        """All of these."""

    def of(self, wanted: Callable[[OutgoingRead], bool]) -> list[OutgoingRead]:
        """The reads that are not stopped, and for which ``wanted`` is true."""
        return [read for read in chain(self.turns, *self.waiting.values()) if wanted(read)]

    # --- the begin of a read ------------------------------------------------------------------------------------

    def check(self, session: Session, ask: messages.Ask, prompt: Prompt, *, allocated: bool) -> int:
        """Check that an ask can be served. Returns the number of its chunks, 0 where D reads P's pages by itself.
        ``allocated``: the engine has allocated all blocks.

        Raises:
            GeometryError: a read of its number is under way, its spans are not in our regions, the prompt or its
                blocks, or its chunks do not fit into slots, or are more than ``MAX_CHUNKS``.
        """
        key = session.identity, ask.read
        if key in self.live:
            raise GeometryError(f"read {ask.read} is under way")
        strange = {span.shard for span in ask.spans} - session.shards
        if strange:  # any other shard would cost a pass over every token
            raise GeometryError(f"span of the tokens of {strange.pop()}, which is none of that rank's")
        check_spans(ask.spans, self._caches.geometry, prompt.num_tokens)
        if allocated:
            for region, token, end in {(span.region, span.token, span.token + span.num_tokens) for span in ask.spans}:
                self._caches.check_held(region, prompt.ids[region], token, end)
        return 0 if session.sender is None else self.num_chunks(ask, session.chunk_bytes)

    def num_chunks(self, ask: messages.Ask, slot_bytes: int) -> int:
        """The number of chunks of a read."""
        if ask.chunk_bytes > slot_bytes:
            raise GeometryError(f"chunk_bytes {ask.chunk_bytes} is more than the {slot_bytes} of a slot")
        regions = self._caches.geometry.regions
        count = sum(len(self._caches.span_cut(span, ask.chunk_bytes, regions[span.region])) for span in ask.spans)
        if count > MAX_CHUNKS:
            raise GeometryError(f"read of {count} chunks of {ask.chunk_bytes} bytes, limit {MAX_CHUNKS}")
        return count

    def begin(self, session: Session, ask: messages.Ask, prompt: Prompt, chunks: int) -> list[OutgoingRead]:
        """Begin to send a read, in turn with the other reads. Returns the reads that find no room any more: the caller
        fails them."""
        chunks_of = boxes(prompt, self._caches, ask)
        read = OutgoingRead(session, ask, prompt, chunks, chunks_of, self._clock(), prompt.blocks)
        displaced = self.live.put(session.identity, read.key, read, READ_COST + len(ask.spans))
        self.turns.append(read)
        return displaced

    def resume(self, token: bytes) -> None:
        """Reads that wait for the prompt under this token take turns again."""
        self.turns += self.waiting.pop(token, ())

    # --- turns --------------------------------------------------------------------------------------------------

    def turn(self) -> tuple[OutgoingRead, bool, str]:
        """Pack the next chunk of the read whose turn it is, and send the chunks that are packed.

        Without a free slot nothing is packed, and the next turn is another read's.

        Returns:
            The read, whether a chunk was packed or sent, and why the read must fail, if it must.
        """
        read = self.turns[0]
        self.turns.rotate(-1)
        channel = read.session.sender
        if channel is None or channel.error is not None:
            return read, False, "the data plane is gone"
        try:
            begun = self._begin(read, channel)
            sent, failure = self._send(read)
            if not (read.prompt.granted or read.packing or read.all_begun or self._next(read)):
                self.turns.remove(read)
                self.waiting.setdefault(read.ask.token, []).append(read)
        except Exception as error:  # an error of the copy concerns this read only
            _limited.exception("send", "kvferry: a chunk could not be packed and sent")
            return read, False, repr(error)
        return read, sent or begun, failure

    def _begin(self, read: OutgoingRead, channel: SendChannel) -> bool:
        if read.all_begun:  # its last chunk is being packed or sent
            return False
        box, tag = self._next(read), read.ask.read << 32 | read.begun
        if box is None:
            return False
        if channel.sends_in_place and read.prompt.granted and self._caches.in_pieces(box):
            if read.packing or not channel.send_pieces(partial(self._caches.pieces, box), tag):
                return False
            read.next_box = None
            read.begun += 1
            read.count(self._caches.nbytes(box))
            return True
        slot = channel.acquire()
        if slot is None:
            return False
        try:
            copy = self._caches.pack(slot.address, box, slot.tensor.device, alone=len(self.turns) == 1)
        except Exception:
            channel.give_back(slot)
            raise
        read.next_box = None
        read.begun += 1
        read.packing.append(PackedChunk(copy, channel, slot, self._caches.nbytes(box), tag, read.blocks))
        return True

    def _next(self, read: OutgoingRead) -> PageBox | None:
        """The next chunk of a read that has not begun all of them; ``None`` where its bytes do not lie in the blocks
        yet."""
        prompt = read.prompt
        if read.blocks is not prompt.blocks or not prompt.intact:
            read.next_box = None
            if read.packing or not prompt.intact:  # it may be that these chunks are lost
                return None
            read.blocks, read.boxes = prompt.blocks, boxes(prompt, self._caches, read.ask, read.begun)
        if read.next_box is None:
            read.next_box = next(read.boxes)
        return read.next_box

    @staticmethod
    def _send(read: OutgoingRead) -> tuple[bool, str]:
        """Pass the packed chunks to the channel, in order. Returns whether the channel took any, and the error of the
        first chunk that could not be packed."""
        sent = False
        while read.packing and read.packing[0].copy.done:
            packed = read.packing[0]
            if packed.lost:
                read.packing.popleft()
                packed.channel.give_back(packed.slot)
                read.begun -= 1
                continue
            if packed.copy.error:
                return sent, f"a chunk could not be packed: {packed.copy.error}"
            read.packing.popleft()
            read.count(packed.nbytes)
            packed.channel.send(packed.slot, packed.nbytes, packed.tag)
            sent = True
        return sent, ""

    # --- the end of a read --------------------------------------------------------------------------------------

    def stop(self, read: OutgoingRead) -> bool:
        """Send no more of a read. Returns whether it has ended: no copy reads its pages any more. If one does,
        ``drained`` returns the read later. A socket reads pages on this thread, so its reading stops here."""
        token = read.ask.token
        waiting = self.waiting.get(token, [])
        (waiting if read in waiting else self.turns).remove(read)
        if not waiting:
            self.waiting.pop(token, None)
        read.stopped = True
        self.draining.append(read)
        if read.reading:
            assert read.session.sender is not None
            read.session.sender.stop_reading()
        return self._gave_back(read)

    def drained(self) -> list[OutgoingRead]:
        """The reads that were stopped, and whose pages no copy reads any more."""
        return [read for read in self.draining if self._gave_back(read)]

    @staticmethod
    def _gave_back(read: OutgoingRead) -> bool:
        """Release the slots into which no copy packs any more. Returns whether no slot is left."""
        while read.packing and read.packing[0].copy.done:
            packed = read.packing.popleft()
            packed.channel.give_back(packed.slot)
        return not read.packing

    def forget(self, read: OutgoingRead) -> None:
        """Forget a read that has ended."""
        self.draining.remove(read)
        if self.live.get(read.key) is read:
            self.live.pop(read.key)
