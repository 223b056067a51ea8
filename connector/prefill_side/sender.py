"""P's side of the data: the reads that it packs and sends, chunk by chunk, in turn.

``lease.LEASE`` decides who may read, ``outgoing_read.OUTGOING_READ`` when a read has ended. This file packs and sends.

A read may begin while P's engine computes its prompt. Then its chunks leave, in order, once their bytes lie in the
blocks, and meanwhile it waits aside. The engine may take the blocks back at any time, so each chunk is copied to a
slot, and is sent only if the blocks were not taken back before the end of the copy (``PromptBlocks.lost``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import msgspec

from kvferry.connector.geometry.spans import MAX_CHUNKS, check_spans
from kvferry.connector.pages.caches import Ids, PageBox, RankCaches
from kvferry.connector.pages.checksums import Trailer, new_trailer, sealed_pieces, takes_pieces, trailer_bytes
from kvferry.connector.pages.computed_steps import PromptBlocks
from kvferry.connector.prefill_side import outgoing_read
from kvferry.connector.prefill_side.computing_prompts import ComputingPrompt
from kvferry.connector.prefill_side.outgoing_read import (
    ChannelIdle,
    ChunkBegun,
    ChunkLost,
    ChunkSent,
    OutgoingReadEffect,
    OutgoingReadEvent,
    SendFailed,
    SendPhase,
)
from kvferry.connector.prefill_side.sessions import Session
from kvferry.connector.wire import messages
from kvferry.connector.wire.states import Lifetime
from kvferry.kernels.checksum import WireCheck
from kvferry.transport.channels import Copy, SendChannel, Slot
from kvferry.transport.errors import GeometryError, ProtocolError
from kvferry.transport.fair_table import FairTable

logger = logging.getLogger("vllm.kvferry.sender")

ENDED_READS = 1 << 15
"""Reads that P remembers after they have ended: how many of their chunks it has sent."""
LIVE_SPANS = 1 << 17
"""Bound on the reads that P sends, by their spans: 45 MB."""
READ_COST = 32
"""Cost of a read beside its spans."""


ReadKey = tuple[bytes, int]
"""An identity, and D's number of the read."""


class PackedChunk(msgspec.Struct):
    """A chunk that is being packed into a slot, or waits there to be sent. ``blocks``: those that it is copied from,
    where its prompt is being computed."""

    copy: Copy
    channel: SendChannel
    slot: Slot
    nbytes: int
    tag: int
    blocks: PromptBlocks | None = None

    @property
    def lost(self) -> bool:
        """Whether the engine took the blocks back before the end of the copy was seen."""
        return self.blocks is not None and self.blocks.lost


class OutgoingRead(msgspec.Struct, eq=False):
    """A read that P sends, one chunk per box of pages.

    ``ask``: what D asked for. ``boxes``: the chunks that are not made yet, in wire order; ``None`` comes in place of a
    chunk that is not computed. ``next_box``: the chunk that is made but has not begun. ``packing``: the chunks that
    have begun but are not sent, in order. ``trailer``: the checksum of the message that is being sent in place.
    ``prompt``: where the read began before the lease; ``blocks``: the blocks that ``boxes`` name then. ``nbytes``: sent
    so far; ``early``: of these, before the lease. ``begun_at``: by ``RankContext.clock``.
    """

    session: Session
    ask: messages.Ask
    boxes: Iterator[PageBox | None]
    lifetime: Lifetime[outgoing_read.SendProgress, OutgoingReadEvent, OutgoingReadEffect]
    packing: deque[PackedChunk] = msgspec.field(default_factory=deque)
    next_box: PageBox | None = None
    trailer: Trailer = msgspec.field(default_factory=new_trailer)
    prompt: ComputingPrompt | None = None
    blocks: PromptBlocks | None = None
    nbytes: int = 0
    early: int = 0
    begun_at: float = 0.0

    @property
    def leased(self) -> bool:
        """Whether a lease holds the blocks."""
        return self.prompt is None or self.prompt.granted

    def count(self, nbytes: int) -> None:
        """Count bytes that were sent."""
        self.nbytes += nbytes
        if not self.leased:
            self.early += nbytes

    @property
    def number(self) -> int:
        """D's number of the read."""
        return self.ask.read

    @property
    def token(self) -> bytes:
        """The token of its lease."""
        return self.ask.token

    @property
    def begun(self) -> int:
        """The number of chunks, from the first one on, that have been begun."""
        return self.lifetime.state.begun

    @property
    def all_begun(self) -> bool:
        """Whether the last chunk has begun."""
        return self.lifetime.state.begun == self.lifetime.state.chunks

    @property
    def key(self) -> ReadKey:
        return self.session.identity, self.number

    @property
    def reading(self) -> bool:
        """Whether the channel still reads its last message from P's pages."""
        channel = self.session.sender
        tag = None if channel is None else channel.reading
        return tag is not None and tag >> 32 == self.number


class Sender:
    """All reads that this rank sends. The sender handles the events of chunks, its owner all other events of a read."""

    def __init__(self, caches: RankCaches) -> None:
        self._caches = caches
        self._outgoing: deque[OutgoingRead] = deque()  # SENDING or SENT, in the order of their turns
        self.waiting: dict[bytes, list[OutgoingRead]] = {}
        """The reads that wait until P's engine has computed their next chunk, by token."""
        self._draining: list[OutgoingRead] = []
        self._live: FairTable[ReadKey, OutgoingRead] = FairTable(LIVE_SPANS)  # all reads that have not ended
        self._ended: FairTable[ReadKey, int] = FairTable(ENDED_READS)  # the number of chunks sent

    def __len__(self) -> int:
        """How many reads take turns."""
        return len(self._outgoing)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to send, and no stopped read whose pages a copy still reads. Reads that wait for P's
        engine do not count."""
        return not (self._outgoing or self._draining)

    def of(self, wanted: Callable[[OutgoingRead], bool]) -> list[OutgoingRead]:
        """The reads that are SENDING or SENT, and for which ``wanted`` is true."""
        waiting = chain.from_iterable(self.waiting.values())
        return [outgoing for outgoing in chain(self._outgoing, waiting) if wanted(outgoing)]

    def of_lease(self, token: bytes) -> list[OutgoingRead]:
        """All reads under a token that have not ended, also the stopped ones whose pages a copy still reads."""
        draining = [outgoing for outgoing in self._draining if outgoing.token == token]
        return self.of(lambda outgoing: outgoing.token == token) + draining

    def check(self, session: Session, ask: messages.Ask, num_tokens: int, ids: Sequence[Ids] | None) -> None:
        """Check that an ask can be served from blocks ``ids`` (per region) that hold ``num_tokens``; ``None`` where the
        engine has not allocated all blocks yet.

        Raises:
            GeometryError: its number was used before, or its spans are not in our regions, the prompt or its blocks.
        """
        key = session.identity, ask.read
        if key in self._live or key in self._ended:
            raise GeometryError(f"read {ask.read} was asked for before")
        strange = {span.shard for span in ask.spans} - session.shards
        if strange:  # any other shard would cost a pass over every token
            raise GeometryError(f"span of the tokens of {strange.pop()}, which is none of that rank's")
        check_spans(ask.spans, self._caches.geometry, num_tokens)
        if ids is None:
            return
        for region, token, end in {(span.region, span.token, span.token + span.num_tokens) for span in ask.spans}:
            self._caches.check_held(region, ids[region], token, end)

    def num_chunks(self, ask: messages.Ask, slot_bytes: int) -> int:
        """The number of chunks of a read.

        Raises:
            GeometryError: a chunk does not fit into a slot, or there are more than ``MAX_CHUNKS``.
        """
        if ask.chunk_bytes > slot_bytes:
            raise GeometryError(f"chunk_bytes {ask.chunk_bytes} is more than the {slot_bytes} of a slot")
        regions = self._caches.geometry.regions
        count = sum(len(self._caches.span_cut(span, ask.chunk_bytes, regions[span.region])) for span in ask.spans)
        if count > MAX_CHUNKS:
            raise GeometryError(f"read of {count} chunks of {ask.chunk_bytes} bytes, limit {MAX_CHUNKS}")
        return count

    def _boxes(self, ask: messages.Ask, ids: Sequence[Ids]) -> Iterator[PageBox]:
        """The chunks of a read, in wire order. They are made while P sends, because a long read has many."""
        for span in ask.spans:
            ours = self._caches.geometry.regions[span.region]
            whole = self._caches.box(span, span.region, span.layer, span.head, ids[span.region], ours.shard)
            yield from self._caches.cut(whole, span, ask.chunk_bytes, ours)

    def new(
        self,
        session: Session,
        ask: messages.Ask,
        source: Sequence[Ids] | ComputingPrompt,
        chunks: int,
        now: float,
    ) -> tuple[OutgoingRead, list[OutgoingRead]]:
        """The read of an ask, of ``chunks`` chunks; ``start`` begins to send it. ``source``: the blocks of its lease
        per region, or the prompt that P's engine computes. Also returns the reads that find no room any more: the owner
        fails them."""
        lifetime = Lifetime(outgoing_read.OUTGOING_READ, outgoing_read.begin_sending(chunks), now)
        if isinstance(source, ComputingPrompt):
            outgoing = OutgoingRead(session, ask, source.boxes(ask), lifetime, prompt=source, blocks=source.blocks)
        else:
            outgoing = OutgoingRead(session, ask, self._boxes(ask, source), lifetime)
        return outgoing, self._live.put(session.identity, outgoing.key, outgoing, READ_COST + len(ask.spans))

    def start(self, outgoing: OutgoingRead) -> None:
        """Begin to send a read, in turn with the other reads."""
        self._outgoing.append(outgoing)

    def resume(self, token: bytes) -> None:
        """Reads that wait for the prompt under this token take turns again."""
        self._outgoing += self.waiting.pop(token, ())

    def find(self, session: Session, read: int) -> OutgoingRead | None:
        """The read of a session with this number, if it has not ended."""
        return self._live.get((session.identity, read))

    def refused(self, session: Session, read: int) -> None:
        """Remember a read that was denied: none of its chunks was sent."""
        key = session.identity, read
        if key not in self._live and key not in self._ended:
            self._ended.put(session.identity, key, 0)

    def turn(self, now: float) -> tuple[OutgoingRead, bool, OutgoingReadEvent | None]:
        """Pack the next chunk of the read whose turn it is, and send the chunks that are packed.

        Without a free slot nothing is packed, and the next turn is another read's.

        Returns:
            The read, whether a chunk was packed or sent, and the event that the owner must act on, if there is one.
        """
        outgoing = self._outgoing[0]
        self._outgoing.rotate(-1)
        channel = outgoing.session.sender
        if channel is None or channel.error is not None:
            return outgoing, False, SendFailed("the data plane is gone")
        try:
            begun = self._begin(outgoing, channel, now)
            sent, failure = self._send(outgoing, now)
            if outgoing.prompt is not None and not (outgoing.packing or outgoing.all_begun or self._next(outgoing)):
                self._outgoing.remove(outgoing)
                self.waiting.setdefault(outgoing.token, []).append(outgoing)
        except Exception as error:  # an error of the copy concerns this read only
            logger.exception("kvferry: a chunk could not be packed and sent")
            return outgoing, False, SendFailed(repr(error))
        if failure:
            return outgoing, sent or begun, SendFailed(f"a chunk could not be packed: {failure}")
        all_sent = outgoing.lifetime.state.phase is SendPhase.SENT
        return outgoing, sent or begun, ChannelIdle() if all_sent and not outgoing.reading else None

    def _begin(self, outgoing: OutgoingRead, channel: SendChannel, now: float) -> bool:
        if outgoing.all_begun:  # its last chunk is being packed or sent
            return False
        box, tag = self._next(outgoing), outgoing.number << 32 | outgoing.begun
        if box is None:
            return False
        checksum = outgoing.session.checksum
        if channel.sends_in_place and outgoing.leased and takes_pieces(checksum) and self._caches.in_pieces(box):
            pieces = partial(self._caches.pieces, box)
            if checksum is not None:
                pieces = partial(sealed_pieces, pieces, tag, outgoing.trailer)
            if outgoing.packing or not channel.send_pieces(pieces, tag):
                return False
            outgoing.next_box = None
            outgoing.lifetime.step(ChunkBegun(), now)
            outgoing.lifetime.step(ChunkSent(), now)
            outgoing.count(self._caches.nbytes(box))
            return True
        slot = channel.acquire()
        if slot is None:
            return False
        try:
            check = None if checksum is None else WireCheck(checksum, tag)
            copy = self._caches.pack(slot.address, box, slot.tensor.device, alone=len(self._outgoing) == 1, check=check)
        except Exception:
            channel.give_back(slot)
            raise
        outgoing.next_box = None
        nbytes = self._caches.nbytes(box) + trailer_bytes(checksum)
        outgoing.packing.append(PackedChunk(copy, channel, slot, nbytes, tag, outgoing.blocks))
        outgoing.lifetime.step(ChunkBegun(), now)
        return True

    def _next(self, outgoing: OutgoingRead) -> PageBox | None:
        """The next chunk of a read that has not begun all of them; ``None`` where its bytes do not lie in the blocks
        yet."""
        prompt = outgoing.prompt
        if prompt is not None and (outgoing.blocks is not prompt.blocks or prompt.blocks is None or prompt.blocks.lost):
            outgoing.next_box = None
            if outgoing.packing or prompt.blocks is None or prompt.blocks.lost:  # it may be that these chunks are lost
                return None
            outgoing.blocks, outgoing.boxes = prompt.blocks, prompt.boxes(outgoing.ask, outgoing.begun)
        if outgoing.next_box is None:
            outgoing.next_box = next(outgoing.boxes)
        return outgoing.next_box

    @staticmethod
    def _send(outgoing: OutgoingRead, now: float) -> tuple[bool, str]:
        """Pass the packed chunks to the channel, in order. Returns whether the channel took any, and the error of the
        first chunk that could not be packed."""
        sent = False
        while outgoing.packing and outgoing.packing[0].copy.done:
            packed = outgoing.packing[0]
            if packed.lost:
                outgoing.packing.popleft()
                packed.channel.give_back(packed.slot)
                outgoing.lifetime.step(ChunkLost(), now)
                continue
            if packed.copy.error:
                return sent, packed.copy.error
            outgoing.packing.popleft()
            outgoing.lifetime.step(ChunkSent(), now)
            packed.channel.send(packed.slot, packed.nbytes, packed.tag)
            outgoing.count(packed.nbytes)
            sent = True
        return sent, ""

    def stop(self, outgoing: OutgoingRead) -> bool:
        """Send no more of a read. Returns whether no copy reads its pages any more. If one does, ``drained`` returns
        the read once its copies have ended. A socket reads pages on this thread, so its reading stops here."""
        waiting = self.waiting.get(outgoing.token, [])
        (waiting if outgoing in waiting else self._outgoing).remove(outgoing)
        if not waiting:
            self.waiting.pop(outgoing.token, None)
        self._draining.append(outgoing)
        if outgoing.reading:
            assert outgoing.session.sender is not None
            outgoing.session.sender.stop_reading()
        self._ended.put(outgoing.session.identity, outgoing.key, outgoing.lifetime.state.sent)
        return self._gave_back(outgoing)

    def drained(self) -> list[OutgoingRead]:
        """The reads that were stopped, and whose pages no copy reads any more."""
        return [outgoing for outgoing in self._draining if self._gave_back(outgoing)]

    def forget(self, outgoing: OutgoingRead) -> None:
        """Forget a read that has ended."""
        self._draining.remove(outgoing)
        if self._live.get(outgoing.key) is outgoing:
            self._live.pop(outgoing.key)

    def forget_session(self, session: Session) -> None:
        """Forget the reads of a session that have ended."""
        self._ended.drop(session.identity)

    @staticmethod
    def _gave_back(outgoing: OutgoingRead) -> bool:
        """Release the slots into which no copy packs any more. Returns whether no slot is left."""
        while outgoing.packing and outgoing.packing[0].copy.done:
            packed = outgoing.packing.popleft()
            packed.channel.give_back(packed.slot)
        return not outgoing.packing

    def flush(self, session: Session, cancel: messages.Cancel) -> int:
        """After a cancelled read has stopped: the number of its chunks that D may wait for. D cannot withdraw the
        receives that it has posted beyond the chunks that were sent, so P sends empty messages for them.

        Raises:
            ProtocolError: D's Cancel names more chunks than a read may have.
        """
        key = session.identity, cancel.read
        sent = self._ended.get(key)
        if sent is None:
            return 0  # D never asked for this read
        if cancel.posted > sent and session.sender is not None:
            if cancel.posted > MAX_CHUNKS:
                raise ProtocolError(f"Cancel names {cancel.posted} posted chunks, limit {MAX_CHUNKS}")
            session.sender.flush(cancel.read << 32 | chunk for chunk in range(sent, cancel.posted))
            sent = cancel.posted
            self._ended.put(session.identity, key, sent)
        return sent
