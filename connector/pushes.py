"""P's side of the data: the reads that it packs and sends, chunk by chunk, in turn.

Decides nothing: who may read is the lease's business, and its owner is told when a read has ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from kvferry.connector import protocol
from kvferry.connector.copies import Copy
from kvferry.connector.errors import GeometryError, ProtocolError
from kvferry.connector.sessions import Session
from kvferry.connector.site import Caches, Ids, Part
from kvferry.connector.spans import MAX_CHUNKS, check_spans
from kvferry.transport.plane import SendChannel, Slot

logger = logging.getLogger("vllm.kvferry.pushes")

ENDED_READS = 4096
"""Reads remembered per session after their end, so that a number is not used twice."""


class Packing(msgspec.Struct):
    """A chunk on its way into its slot."""

    copy: Copy
    channel: SendChannel
    slot: Slot
    nbytes: int
    tag: int


class Push(msgspec.Struct, eq=False):
    """A read on its way: ``begun`` of its ``parts`` have been packed and sent, but for those in ``packing``. ``why``:
    what broke it, empty if nothing did."""

    session: Session
    number: int
    token: bytes
    parts: list[Part]
    begun: int = 0
    packing: deque[Packing] = msgspec.field(default_factory=deque)
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
        return bool(self.why) or (self.sent == len(self.parts) and not self.reading)

    @property
    def reading(self) -> bool:
        """Whether its last message is still being read from pages."""
        channel = self.session.channel
        tag = None if channel is None else channel.reading
        return tag is not None and tag >> 32 == self.number


class Pushes:
    """All reads that this rank is sending."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._pushes: deque[Push] = deque()
        self._ended: list[Push] = []  # whose pages are still being packed from

    def __len__(self) -> int:
        return len(self._pushes)

    def of(self, wanted: Callable[[Push], bool]) -> list[Push]:
        """Those under way that are ``wanted``."""
        return [push for push in self._pushes if wanted(push)]

    def check(self, session: Session, ask: protocol.Ask, num_tokens: int, ids: Sequence[Ids]) -> None:
        """Whether an ask can be served from blocks ``ids`` (per region) that hold ``num_tokens``.

        Raises:
            GeometryError: its number was used before, or its spans are not ours, beyond the prompt or its blocks.
        """
        if ask.read in session.sent or self.of(lambda push: push.key == (session.identity, ask.read)):
            raise GeometryError(f"read {ask.read} was asked for before")
        for span in ask.spans:
            if span.share not in session.shares:  # each other one would cost a look at every token
                raise GeometryError(f"span of the tokens of {span.share}, which is none of that rank's")
        check_spans(ask.spans, self._caches.geometry, num_tokens)
        for span in ask.spans:
            self._caches.check_held(span.group, ids[span.group], span.token, span.token + span.num_tokens)

    def cut(self, ask: protocol.Ask, ids: Sequence[Ids], slot_bytes: int) -> list[Part]:
        """The chunks of a read, in the order of the wire. Raises GeometryError where one does not fit into a slot."""
        if ask.chunk_bytes > slot_bytes:
            raise GeometryError(f"chunk_bytes {ask.chunk_bytes} is more than the {slot_bytes} of a slot")
        parts: list[Part] = []
        for span in ask.spans:
            ours = self._caches.geometry.groups[span.group]
            whole = self._caches.part(span, span.group, span.layer, span.head, ids[span.group], ours.share)
            parts.extend(self._caches.cut(whole, span, ask.chunk_bytes, ours))
        return parts

    def start(self, push: Push) -> None:
        """Send it, in turn with the others."""
        self._pushes.append(push)

    def turn(self) -> tuple[Push, bool]:
        """Pack the next chunk of the read whose turn it is, and send what has been packed; whether anything was. A read
        that is ``over`` then waits for ``end``; without a free slot the next turn is another's."""
        push = self._pushes[0]
        self._pushes.rotate(-1)
        try:
            begun = self._begin(push)
            return push, self._send(push) or begun
        except Exception as error:  # an error of the copy is this read's, not everybody's
            logger.exception("kvferry: a chunk could not be packed and sent")
            push.why = repr(error)
            return push, False

    def _begin(self, push: Push) -> bool:
        channel = push.session.channel
        if channel is None or channel.error is not None:
            push.why = "the data plane is gone"
            return False
        if push.begun == len(push.parts):  # the last of it is on its way
            return False
        part, tag = push.parts[push.begun], push.number << 32 | push.begun
        if channel.gathers and self._caches.in_pieces(part):
            if push.packing or not channel.ready:
                return False
            channel.send_pieces(self._caches.pieces(part), tag)
            push.begun += 1
            return True
        slot = channel.acquire()
        if slot is None:
            return False
        try:
            copy = self._caches.pack(slot.address, part, slot.tensor.device, alone=len(self._pushes) == 1)
        except Exception:
            channel.give_back(slot)
            raise
        push.packing.append(Packing(copy, channel, slot, self._caches.nbytes(part), tag))
        push.begun += 1
        return True

    @staticmethod
    def _send(push: Push) -> bool:
        """Hand what has been packed to the channel, in order."""
        sent = False
        while push.packing and push.packing[0].copy.done and not push.why:
            packed = push.packing[0]
            if packed.copy.error:
                push.why = f"a chunk could not be packed: {packed.copy.error}"
                break
            push.packing.popleft()
            packed.channel.send(packed.slot, packed.nbytes, packed.tag)
            sent = True
        return sent

    def end(self, push: Push) -> bool:
        """Send no more of it; whether its last access to the pages is over. If not, ``drained`` tells of it later.
        Reading by a socket happens on this very thread."""
        self._pushes.remove(push)
        if push.reading:
            assert push.session.channel is not None
            push.session.channel.let_go()
        sent = push.session.sent
        sent[push.number] = push.sent
        while len(sent) > ENDED_READS:
            sent.popitem(last=False)
        if self._gave_back(push):
            return True
        self._ended.append(push)
        return False

    def drained(self) -> list[Push]:
        """Reads that have ended before, whose last access to the pages is over since the last call."""
        if not self._ended:
            return []
        drained = [push for push in self._ended if self._gave_back(push)]
        self._ended = [push for push in self._ended if push not in drained]
        return drained

    @staticmethod
    def _gave_back(push: Push) -> bool:
        """Give slots back that nothing packs into any more; whether these are all."""
        while push.packing and push.packing[0].copy.done:
            packed = push.packing.popleft()
            packed.channel.give_back(packed.slot)
        return not push.packing

    def flush(self, session: Session, cancel: protocol.Cancel) -> int:
        """After a cancelled read has ended: how many of its chunks D may wait for. Receives that D has posted beyond
        what was sent are answered by empty messages, for they cannot be taken back.

        Raises:
            ProtocolError: it names more chunks than a read may have.
        """
        sent = session.sent.get(cancel.read, 0)
        if cancel.posted > sent and session.channel is not None:
            if cancel.posted > MAX_CHUNKS:
                raise ProtocolError(f"Cancel names {cancel.posted} posted chunks, limit {MAX_CHUNKS}")
            session.channel.flush(cancel.read << 32 | chunk for chunk in range(sent, cancel.posted))
            sent = session.sent[cancel.read] = cancel.posted
        return sent
