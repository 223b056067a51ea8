"""P's side of the data: the reads that it packs and sends, chunk by chunk, in turn.

Decides nothing: who may read is the lease's business, and its owner is told when a read has ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvferry.connector.geometry.spans import MAX_CHUNKS, check_spans
from kvferry.connector.protocol import messages
from kvferry.connector.transfer.caches import Ids, PageBox, RankCaches
from kvferry.connector.transfer.sessions import Session
from kvferry.transport.channels import Copy, SendChannel, Slot
from kvferry.transport.errors import GeometryError, ProtocolError

logger = logging.getLogger("vllm.kvferry.sender")

ENDED_READS = 4096
"""Reads remembered per session after their end, so that a number is not used twice."""


class PackedChunk(msgspec.Struct):
    """A chunk on its way into its slot."""

    copy: Copy
    channel: SendChannel
    slot: Slot
    nbytes: int
    tag: int


class OutgoingRead(msgspec.Struct, eq=False):
    """A read on its way: ``begun`` of its ``boxes`` have been packed and sent, but for those in ``packing``. ``why``:
    what broke it, empty if nothing did."""

    session: Session
    number: int
    token: bytes
    boxes: list[PageBox]
    begun: int = 0
    packing: deque[PackedChunk] = msgspec.field(default_factory=deque)
    why: str = ""

    @property
    def sent(self) -> int:
        """How many of its chunks have been handed to the channel, the first ones."""
        return self.begun - len(self.packing)

    @property
    def key(self) -> tuple[bytes, int]:
        return self.session.identity, self.number

    @property
    def over(self) -> bool:
        """Whether nothing more of it will be sent, nor read from pages."""
        return bool(self.why) or (self.sent == len(self.boxes) and not self.reading)

    @property
    def reading(self) -> bool:
        """Whether its last message is still being read from pages."""
        channel = self.session.sender
        tag = None if channel is None else channel.reading
        return tag is not None and tag >> 32 == self.number


class Sender:
    """All reads that this rank is sending."""

    def __init__(self, caches: RankCaches) -> None:
        self._caches = caches
        self._outgoing: deque[OutgoingRead] = deque()
        self._ended: list[OutgoingRead] = []  # whose pages are still being packed from

    def __len__(self) -> int:
        return len(self._outgoing)

    def of(self, wanted: Callable[[OutgoingRead], bool]) -> list[OutgoingRead]:
        """Those under way that are ``wanted``."""
        return [outgoing for outgoing in self._outgoing if wanted(outgoing)]

    def check(self, session: Session, ask: messages.Ask, num_tokens: int, ids: Sequence[Ids]) -> None:
        """Whether an ask can be served from blocks ``ids`` (per region) that hold ``num_tokens``.

        Raises:
            GeometryError: its number was used before, or its spans are not ours, beyond the prompt or its blocks.
        """
        if ask.read in session.sent or self.of(lambda outgoing: outgoing.key == (session.identity, ask.read)):
            raise GeometryError(f"read {ask.read} was asked for before")
        for span in ask.spans:
            if span.shard not in session.shards:  # each other one would cost a look at every token
                raise GeometryError(f"span of the tokens of {span.shard}, which is none of that rank's")
        check_spans(ask.spans, self._caches.geometry, num_tokens)
        for span in ask.spans:
            self._caches.check_held(span.region, ids[span.region], span.token, span.token + span.num_tokens)

    def cut(self, ask: messages.Ask, ids: Sequence[Ids], slot_bytes: int) -> list[PageBox]:
        """The chunks of a read, in the order of the wire. Raises GeometryError where one does not fit into a slot."""
        if ask.chunk_bytes > slot_bytes:
            raise GeometryError(f"chunk_bytes {ask.chunk_bytes} is more than the {slot_bytes} of a slot")
        boxes: list[PageBox] = []
        for span in ask.spans:
            ours = self._caches.geometry.regions[span.region]
            whole = self._caches.box(span, span.region, span.layer, span.head, ids[span.region], ours.shard)
            boxes.extend(self._caches.cut(whole, span, ask.chunk_bytes, ours))
        return boxes

    def start(self, outgoing: OutgoingRead) -> None:
        """Send it, in turn with the others."""
        self._outgoing.append(outgoing)

    def turn(self) -> tuple[OutgoingRead, bool]:
        """Pack the next chunk of the read whose turn it is, and send what has been packed; whether anything was. A read
        that is ``over`` then waits for ``end``; without a free slot the next turn is another's."""
        outgoing = self._outgoing[0]
        self._outgoing.rotate(-1)
        try:
            begun = self._begin(outgoing)
            return outgoing, self._send(outgoing) or begun
        except Exception as error:  # an error of the copy is this read's, not everybody's
            logger.exception("kvferry: a chunk could not be packed and sent")
            outgoing.why = repr(error)
            return outgoing, False

    def _begin(self, outgoing: OutgoingRead) -> bool:
        channel = outgoing.session.sender
        if channel is None or channel.error is not None:
            outgoing.why = "the data plane is gone"
            return False
        if outgoing.begun == len(outgoing.boxes):  # the last of it is on its way
            return False
        box, tag = outgoing.boxes[outgoing.begun], outgoing.number << 32 | outgoing.begun
        if channel.sends_in_place and self._caches.in_pieces(box):
            if outgoing.packing or not channel.send_pieces(partial(self._caches.pieces, box), tag):
                return False
            outgoing.begun += 1
            return True
        slot = channel.acquire()
        if slot is None:
            return False
        try:
            copy = self._caches.pack(slot.address, box, slot.tensor.device, alone=len(self._outgoing) == 1)
        except Exception:
            channel.give_back(slot)
            raise
        outgoing.packing.append(PackedChunk(copy, channel, slot, self._caches.nbytes(box), tag))
        outgoing.begun += 1
        return True

    @staticmethod
    def _send(outgoing: OutgoingRead) -> bool:
        """Hand what has been packed to the channel, in order."""
        sent = False
        while outgoing.packing and outgoing.packing[0].copy.done and not outgoing.why:
            packed = outgoing.packing[0]
            if packed.copy.error:
                outgoing.why = f"a chunk could not be packed: {packed.copy.error}"
                break
            outgoing.packing.popleft()
            packed.channel.send(packed.slot, packed.nbytes, packed.tag)
            sent = True
        return sent

    def end(self, outgoing: OutgoingRead) -> bool:
        """Send no more of it; whether its last access to the pages is over. If not, ``drained`` tells of it later.
        Reading by a socket happens on this very thread."""
        self._outgoing.remove(outgoing)
        if outgoing.reading:
            assert outgoing.session.sender is not None
            outgoing.session.sender.stop_reading()
        sent = outgoing.session.sent
        sent[outgoing.number] = outgoing.sent
        while len(sent) > ENDED_READS:
            sent.popitem(last=False)
        if self._gave_back(outgoing):
            return True
        self._ended.append(outgoing)
        return False

    def drained(self) -> list[OutgoingRead]:
        """Reads that have ended before, whose last access to the pages is over since the last call."""
        if not self._ended:
            return []
        drained = [outgoing for outgoing in self._ended if self._gave_back(outgoing)]
        self._ended = [outgoing for outgoing in self._ended if outgoing not in drained]
        return drained

    @staticmethod
    def _gave_back(outgoing: OutgoingRead) -> bool:
        """Give slots back that nothing packs into any more; whether these are all."""
        while outgoing.packing and outgoing.packing[0].copy.done:
            packed = outgoing.packing.popleft()
            packed.channel.give_back(packed.slot)
        return not outgoing.packing

    def flush(self, session: Session, cancel: messages.Cancel) -> int:
        """After a cancelled read has ended: how many of its chunks D may wait for. Receives that D has posted beyond
        what was sent are answered by empty messages, for they cannot be taken back.

        Raises:
            ProtocolError: it names more chunks than a read may have.
        """
        sent = session.sent.get(cancel.read, 0)
        if cancel.posted > sent and session.sender is not None:
            if cancel.posted > MAX_CHUNKS:
                raise ProtocolError(f"Cancel names {cancel.posted} posted chunks, limit {MAX_CHUNKS}")
            session.sender.flush(cancel.read << 32 | chunk for chunk in range(sent, cancel.posted))
            sent = session.sent[cancel.read] = cancel.posted
        return sent
