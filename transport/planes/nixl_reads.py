"""D's half of plane ``nixl``: its end of a channel, its slots, the Ps that it reads from, and its READs."""

from __future__ import annotations

import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import torch
from msgspec import Meta

from kvferry.transport.channels import Channel, Received, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.planes.nixl_agent import NixlAgent, NixlRead
from kvferry.transport.planes.socket_plane import ConnectingReceiver
from kvferry.transport.sockets import ENDED, READABLE, WRITABLE, Sockets
from kvferry.transport.staging import SlotPool

if TYPE_CHECKING:
    from kvferry.transport.planes.nixl import NixlPlane

_Address = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Count = Annotated[int, Meta(ge=1, le=1 << 20)]

READY = struct.Struct("!IQQQ")
"""P: a message is ready in slot (index), in this use of the slot, of so many bytes, under this tag."""
FREE = struct.Struct("!I")
"""D: it needs the slot no more."""
GOODBYE = 0xFFFFFFFF
"""P, as the slot of the last message: this channel ends, P's process lives on."""
_MOST_READY = 4096
"""Bound on the messages of one channel that are ready and wait for a slot of D."""
MOST_UNSENT = 256 << 10
"""Bound on the bytes that wait in one channel until the peer reads its connection."""
_READ_BYTES = 64 << 10
_LOOK_SECONDS = (50e-6, 2e-3)
"""D looks at its READs after a part of the time since the last one ended, within these bounds."""
_LOOK_PART = 1 / 2
_MOST_PEERS = 256
"""Peers without a channel whose connections D keeps."""
_USE_BYTES = 8


class NixlSlots(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P's slots: slot i is the ``slot_bytes`` from ``address + i * slot_bytes`` on; the number of its use is the word
    at ``uses + 8 * i``. ``device``: the index of P's GPU, ``None`` for host memory."""

    address: _Address
    slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    count: _Count
    uses: _Address
    device: Annotated[int, Meta(ge=0, le=1024)] | None


class NixlReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P's agent. ``metadata``: what NIXL needs for the slots and for the numbers of their uses. The checksum keeps
    damaged bytes from NIXL."""

    agent: Annotated[str, Meta(min_length=1, max_length=64)]
    metadata: Annotated[list[Annotated[bytes, Meta(max_length=24 << 10)]], Meta(min_length=2, max_length=2)]
    checksum: Annotated[int, Meta(ge=0, lt=1 << 32)]
    slots: NixlSlots


class Ready(NamedTuple):
    """A message that lies in P's slot ``slot``. ``use``: the number of this use of the slot."""

    slot: int
    use: int
    nbytes: int
    tag: int


@dataclass(slots=True, eq=False)
class NixlSource:
    """A P whose slots D READs, and NIXL's connection to it, which outlives the channels: a new one costs milliseconds.

    It is closed when no channel and no READ uses it any more, if P may be dead.

    Attributes:
        agent: P's agent.
        checksum: of its metadata.
        users: the channels and READs that use it.
        doubted: a channel was lost without a word of P, and P has answered no new one since.
        broken: a READ has failed, or could not begin; D gives it no new channel.
    """

    agent: str
    slots: NixlSlots
    checksum: int
    users: int = 0
    doubted: bool = False
    broken: bool = False


class Words:
    """The words of a fixed size that one end of a channel receives, and the bytes that it still has to send."""

    def __init__(
        self, sockets: Sockets, channel: Channel, sock: socket.socket, form: struct.Struct, serve: Callable[[], None]
    ) -> None:
        """``sock`` is connected. ``serve`` is called when it is ready."""
        self.sock, self.to_send = sock, b""
        self._sockets, self._channel, self._form, self._serve = sockets, channel, form, serve
        self._received = b""
        self._watch()

    def _watch(self) -> None:
        events = READABLE | ENDED | (WRITABLE if self.to_send else 0)
        self._sockets.watch(self.sock, self._serve, events)

    def send(self, data: bytes = b"") -> None:
        """Send as much as the socket takes now, and the rest when it is writable."""
        waited = bool(self.to_send)
        if len(self.to_send) > MOST_UNSENT:
            self._channel.fail("nixl: the peer does not read its connection")
            return
        self.to_send += data
        try:
            while self.to_send:
                self.to_send = self.to_send[self.sock.send(self.to_send, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._channel.fail(f"nixl: the connection broke: {error.strerror}")
            return
        if waited != bool(self.to_send):
            self._watch()

    def receive(self) -> list[tuple[int, ...]]:
        """The words that have arrived. At the end of the stream the channel gets an error."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            self._channel.fail(f"nixl: the connection broke: {error.strerror}")
            return []
        if not data:
            self._channel.fail("nixl: the peer closed the channel or died")
            return []
        data = self._received + data
        whole = len(data) - len(data) % self._form.size
        self._received = data[whole:]
        return list(self._form.iter_unpack(data[:whole]))


class NixlRecvChannel(ConnectingReceiver):
    """D's end. ``source``: P's slots; ``None`` until P has replied. ``ready``: messages that lie in P's slots.
    ``_lives_on``: P's process does, for P or we ended the channel in good order."""

    late = "the producer's data port does not answer; is a firewall between?"
    unreachable = "the producer cannot be reached: %s"
    words: Words

    def __init__(self, plane: NixlPlane, sock: socket.socket, hello: bytes) -> None:
        super().__init__(plane, sock, hello)
        self.source: NixlSource | None = None
        self.receiving: set[int] = set()
        self.ready: deque[Ready] = deque()
        self._lives_on = False
        self._plane = plane

    def posted(self) -> set[int]:
        return set(self.receiving)

    def connected(self) -> None:
        self.words = Words(self._plane.sockets, self, self.sock, READY, self._serve)

    def _serve(self) -> None:
        self.words.send()
        for fields in self.words.receive():
            ready = Ready(*fields)
            if ready.slot == GOODBYE:
                self._lives_on = True
                self.fail("nixl: the producer closed the channel")
                return
            try:
                self._check(ready)
            except ProtocolError as error:
                self.fail(str(error))
                return
            self.ready.append(ready)

    def _check(self, ready: Ready) -> None:
        """Raises ProtocolError where P may not have sent this."""
        if self.source is None:
            raise ProtocolError("nixl: the producer sends before its reply")
        slots = self.source.slots
        if ready.slot >= slots.count or not 0 < ready.nbytes <= min(slots.slot_bytes, self._plane.slot_bytes):
            raise ProtocolError(
                f"nixl: the producer announces {ready.nbytes} bytes in slot {ready.slot} of {slots.count}"
            )
        if len(self.ready) >= _MOST_READY:
            raise ProtocolError(f"nixl: the producer has announced more than {_MOST_READY} messages")
        self.check_size(ready.tag, ready.nbytes)

    @property
    def may_fetch(self) -> bool:
        """Whether a message waits, and only for a slot."""
        return bool(self.ready) and len(self.receiving) < self._plane.receives and self.error is None

    def next_ready(self) -> Ready | None:
        """The next message that is expected; those that are not are dropped."""
        while self.may_fetch:
            ready = self.ready.popleft()
            try:
                expected = self.check_size(ready.tag, ready.nbytes)
            except ProtocolError as error:  # expected after it was announced
                self.fail(str(error))
                return None
            if expected is not None:
                del self.expected[ready.tag]
                self.receiving.add(ready.tag)
                return ready
            self.words.send(FREE.pack(ready.slot))
        return None

    def fetched(self, slot: Slot, ready: Ready) -> None:
        """The bytes of a message are in our slot, and they are the message's."""
        self.receiving.discard(ready.tag)
        self.words.send(FREE.pack(ready.slot))
        release = partial(self._plane.release, slot)
        self.arrived.append(Received(ready.tag, slot.address, ready.nbytes, release, device=slot.tensor.device))

    def _give_up(self) -> None:
        self.ready.clear()
        self._plane.sockets.drop(self.sock)
        self._plane.reads.leave(self, lives_on=self._lives_on)

    def _close(self) -> None:
        self.expected.clear()
        self.release_arrived()
        if self.error is None:
            self._lives_on = True
            self._give_up()
        self._plane.drop(self, None)


@dataclass(slots=True)
class Fetch:
    """A message that D reads: first its bytes into ``slot``, then, once they are there, the number of the use of P's
    slot. The bytes are the message only if P has not begun a new use of the slot before they had been read."""

    read: NixlRead
    slot: Slot
    channel: NixlRecvChannel
    source: NixlSource
    ready: Ready
    checking: bool = False
    retired: bool = False


class NixlReads:
    """``channels`` are those of the plane, in the order in which they are served; ``pool`` are D's slots."""

    def __init__(self, agent: NixlAgent, pool: SlotPool, channels: dict[Channel, None]) -> None:
        self._pool = pool
        self.sources: dict[str, NixlSource] = {}
        self.fetches: list[Fetch] = []
        """READs under way, in the order in which they began."""
        self._agent, self._channels = agent, channels
        self._uses_seen = torch.zeros(pool.capacity, dtype=torch.int64)
        self._prepared = False
        self._moved_at = 0.0

    def prepare(self) -> None:
        """Allocate and register the slots.

        Raises:
            TransportError: there is no memory, or NIXL refused.
        """
        if not self._prepared:
            self._pool.prepare()
            assert self._pool.slab is not None
            self._agent.start()
            self._agent.register(self._pool.slab)
            self._agent.register(self._uses_seen.view(torch.uint8))
            self._prepared = True

    # --- the Ps -----------------------------------------------------------------------------------------------------

    def join(self, channel: NixlRecvChannel, reply: NixlReply) -> None:
        """P has replied: the channel reads from that P.

        Raises:
            PlaneUnavailableError: this P cannot be read from now.
            ProtocolError: the reply is damaged.
        """
        if zlib.crc32(b"".join(reply.metadata)) != reply.checksum:
            raise ProtocolError("nixl reply: the metadata is damaged")
        source = self.sources.get(reply.agent)
        if source is not None and source.broken:
            raise PlaneUnavailableError("nixl: the last connection to this P is not closed yet")
        if source is not None and (source.slots, source.checksum) != (reply.slots, reply.checksum):
            raise PlaneUnavailableError("nixl: another P has the agent name of this one")
        if source is None:
            try:
                for metadata in reply.metadata:
                    self._agent.load(reply.agent, metadata)
            except TransportError as error:
                self._agent.forget(reply.agent)
                raise PlaneUnavailableError(str(error)) from None
            self._agent.connect(reply.agent)
            source = self.sources[reply.agent] = NixlSource(reply.agent, reply.slots, reply.checksum)
        source.users += 1
        source.doubted = False  # P has just answered; if the connection has broken, a READ fails
        channel.source = source

    def leave(self, channel: NixlRecvChannel, *, lives_on: bool) -> None:
        """A channel has ended: its READs under way keep their slots until they end. ``lives_on``: P's process has not
        ended."""
        for fetch in self.fetches:
            if fetch.channel is channel and not fetch.retired:
                fetch.retired = True
                self._pool.retire(fetch.slot)
        if channel.source is not None:
            channel.source.doubted |= not lives_on
            self._leave(channel.source)

    def _break(self, source: NixlSource, reason: str) -> None:
        """The connection to a P has broken: all of its channels fail."""
        source.broken = True
        for channel in [c for c in self._receivers() if c.source is source]:
            channel.fail(reason)

    def _leave(self, source: NixlSource) -> None:
        """One user less. An unused connection is closed if P may be dead; else the oldest one is, if there are many."""
        source.users -= 1
        if source.users:
            return
        self.sources[source.agent] = self.sources.pop(source.agent)
        if not (source.doubted or source.broken):
            unused = [found for found in self.sources.values() if not found.users]
            if len(unused) <= _MOST_PEERS:
                return
            source = unused[0]
        self._agent.forget(source.agent)
        del self.sources[source.agent]

    # --- READs ------------------------------------------------------------------------------------------------------

    def _receivers(self) -> Iterable[NixlRecvChannel]:
        return (channel for channel in self._channels if isinstance(channel, NixlRecvChannel))

    @property
    def may_begin(self) -> bool:
        """Whether a message waits that could be read now."""
        return bool(self._pool.free) and any(channel.may_fetch for channel in self._receivers())

    def begin(self) -> bool:
        """Begin to READ as many messages as there are slots for; the channels take turns."""
        began = False
        for channel in [c for c in self._receivers() if c.may_fetch]:
            while self._pool.free and (ready := channel.next_ready()) is not None:
                began = True
                source, slot = channel.source, self._pool.take()
                assert source is not None and slot is not None
                address = source.slots.address + ready.slot * source.slots.slot_bytes
                try:
                    read = self._agent.read(slot.tensor[: ready.nbytes], source.agent, address, source.slots.device)
                except TransportError as error:
                    self._pool.put(slot)
                    self._break(source, str(error))
                    break
                source.users += 1
                self.fetches.append(Fetch(read, slot, channel, source, ready))
                self._moved_at = time.monotonic()
            if channel in self._channels:
                self._channels[channel] = self._channels.pop(channel)
        return began

    def look(self) -> bool:
        """Take the READs that have ended a step further. READs from one P end nearly in the order in which they began,
        and each look costs a call of UCX: those behind one that is under way are not looked at."""
        moved = False
        waiting: set[NixlSource] = set()
        for fetch in list(self.fetches):
            ended = None if fetch.source in waiting else fetch.read.ended()
            if ended is None:
                if not fetch.retired:  # which may never end, while P serves other channels
                    waiting.add(fetch.source)
                continue
            moved = True
            self.fetches.remove(fetch)
            if ended and self._goes_on(fetch):
                self.fetches.append(fetch)
            else:
                self._finish(fetch, ok=ended)
        if moved:
            self._moved_at = time.monotonic()
        return moved

    def look_in(self) -> float:
        """Seconds until the next look; 0 while no READ is under way."""
        if not self.fetches:
            return 0.0
        least, most = _LOOK_SECONDS
        return min(most, max(least, (time.monotonic() - self._moved_at) * _LOOK_PART))

    def _goes_on(self, fetch: Fetch) -> bool:
        """The bytes are here: begin to READ the number of the slot's use. ``False``: that is not needed, or done."""
        if fetch.checking or fetch.retired or fetch.channel.error is not None:
            return False
        seen = self._uses_seen[fetch.slot.index :][:1].view(torch.uint8)
        source = fetch.source
        try:
            fetch.read = self._agent.read(seen, source.agent, source.slots.uses + _USE_BYTES * fetch.ready.slot, None)
        except TransportError as error:
            self._break(source, str(error))
            return False
        fetch.checking = True
        return True

    def _finish(self, fetch: Fetch, *, ok: bool) -> None:
        """No READ of this message is under way any more."""
        channel, source = fetch.channel, fetch.source
        if ok and fetch.checking and channel.error is None and not channel.closed:
            if int(self._uses_seen[fetch.slot.index]) == fetch.ready.use:
                self._leave(source)
                channel.fetched(fetch.slot, fetch.ready)
                return
            channel.fail("nixl: the producer gave the slot of a message to another one")
        self._pool.put(fetch.slot)
        if not ok:
            self._break(source, "nixl: a READ failed: the producer is gone")
        self._leave(source)

    def end_all(self) -> None:
        """NIXL has ended all READs."""
        for fetch in self.fetches:
            self._pool.put(fetch.slot)
        self.fetches.clear()
        self.sources.clear()
