"""The NIXL data plane: P packs into slots, and D READs each slot with one one-sided operation, over RDMA where it is.

Only slots are registered, never the caches. A message goes so::

    P: pack into a slot ── ready: slot, its use, bytes, tag ──▶ D: READ the slot; READ the number of the slot's use
    P: the slot is free ◀── free: slot ────────────────────────  D: unpack from its own slot

The words go over one TCP connection for each channel, the bytes by READ: docs/data-planes.md says why not by WRITE.
P may use its slots again at any time: it changes the number of the slot's use first, and D, which reads this number
after the bytes, takes no bytes of which it does not know that the number had not changed. One READ of both would not
do: UCX may split it over several lanes.

UCX does not check what it parses, and D gives P's metadata to native code, so the plane is used only where the control
connection is authenticated.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import torch
from msgspec import Meta

from kvferry.transport.channels import Channel, DChannel, Received, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import PlaneContext, decode_payload
from kvferry.transport.planes.nixl_agent import NixlAgent, NixlRead
from kvferry.transport.planes.push import windows
from kvferry.transport.planes.socket_plane import AwaitedSender, ConnectingReceiver, SocketAttach, SocketPlane
from kvferry.transport.planes.ucx_settings import choose_lanes, nixl_release, refuse_nixl
from kvferry.transport.sockets import CHANNEL_BYTES, ENDED, READABLE, SECRET_BYTES, WRITABLE, Sockets
from kvferry.transport.staging import SlotPool
from kvferry.transport.wake import Timer

_WINDOWS, _GPU_WINDOWS = (8, 6), (6, 4)
"""Slots of one channel that P has in use, and READs of one channel that D has under way."""
_CLOSE_SECONDS = 0.5
"""Bound on the wait for the READs under way when the plane closes."""
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
_LOOK_SECONDS, _LOOK_PART = (50e-6, 2e-3), 1 / 2
"""D looks at its READs after a part of the time since the last one ended, within these bounds."""
_MOST_PEERS = 256
"""Peers without a channel whose connections D keeps."""
_USE_BYTES = 8

_Address = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class NixlOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``release`` and ``lanes`` must be D's own: NIXL's formats are not those of other releases."""

    port: Annotated[int, Meta(gt=0, lt=65536)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    release: Annotated[str, Meta(max_length=64)]
    lanes: Annotated[str, Meta(max_length=256)]


class NixlSlots(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P's slots: slot i is the ``slot_bytes`` from ``address + i * slot_bytes`` on; the number of its use is the word
    at ``uses + 8 * i``. ``device``: the index of P's GPU, ``None`` for host memory."""

    address: _Address
    slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    count: Annotated[int, Meta(ge=1, le=1 << 20)]
    uses: _Address
    device: Annotated[int, Meta(ge=0, le=1024)] | None


class NixlReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P's agent. ``metadata``: what NIXL needs for the slots and for the numbers of their uses. The checksum keeps
    damaged bytes from NIXL."""

    agent: Annotated[str, Meta(min_length=1, max_length=64)]
    metadata: Annotated[list[Annotated[bytes, Meta(max_length=24 << 10)]], Meta(min_length=2, max_length=2)]
    checksum: Annotated[int, Meta(ge=0, lt=1 << 32)]
    slots: NixlSlots


class UsedSlots(SlotPool):
    """P's slots. ``uses``: the number of the present use of each, int64 [capacity]. It changes before anything else can
    be written to the slot."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.uses = torch.zeros(self.capacity, dtype=torch.int64)

    def put(self, slot: Slot) -> None:
        self.uses[slot.index] += 1
        super().put(slot)


class Words:
    """The words of a fixed size that one end of a channel receives, and the bytes that it still has to send. ``take``
    is called with the fields of each word, while the channel has no error."""

    def __init__(
        self, sockets: Sockets, channel: Channel, sock: socket.socket, form: struct.Struct, take: Callable[..., None]
    ) -> None:
        self.sock, self.to_send = sock, b""
        self._sockets, self._channel, self._form, self._take = sockets, channel, form, take
        self._received = b""
        self._watch()

    def _watch(self) -> None:
        self._sockets.watch(self.sock, self._serve, READABLE | ENDED | (WRITABLE if self.to_send else 0))

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

    def _serve(self) -> None:
        self.send()
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._channel.fail(f"nixl: the connection broke: {error.strerror}")
            return
        if not data:
            self._channel.fail("nixl: the peer closed the channel or died")
            return
        data = self._received + data
        whole = len(data) - len(data) % self._form.size
        self._received = data[whole:]
        for fields in self._form.iter_unpack(data[:whole]):
            if self._channel.error is None:
                self._take(*fields)


class NixlSendChannel(AwaitedSender):
    """P's end. A slot is in use until D says that it is free, or the channel ends."""

    words: Words

    def __init__(self, plane: NixlPlane, channel_id: bytes, slot_bytes: int) -> None:
        super().__init__(plane.send_pool, (channel_id,), slot_bytes, plane.window)
        self._plane = plane
        self.sock: socket.socket | None = None

    def connected(self, sock: socket.socket, channel_id: bytes) -> None:
        self.sock = sock
        self.words = Words(self._plane.sockets, self, sock, FREE, self._freed)

    def _transmit(self, slot: Slot, nbytes: int, tag: int) -> None:
        self.words.send(READY.pack(slot.index, int(self._plane.send_pool.uses[slot.index]), nbytes, tag))

    def _freed(self, index: int) -> None:
        if not self.free(index):
            self.fail(f"nixl: the decode rank gave back slot {index}, which it does not have")

    def _give_up(self) -> None:
        super()._give_up()
        if self.sock is not None:
            self._plane.sockets.drop(self.sock)

    def _close(self) -> None:
        if self.error is None:
            if self.sock is not None:
                self.words.send(READY.pack(GOODBYE, 0, 0, 0))
            self._give_up()
        self._plane.drop(self, None)


class Ready(NamedTuple):
    """A message that lies in P's slot ``slot``. ``use``: the number of this use of the slot."""

    slot: int
    use: int
    nbytes: int
    tag: int


@dataclass(slots=True, eq=False)
class NixlSource:
    """A P whose slots D READs, and NIXL's connection to it, which outlives the channels: a new one costs milliseconds.
    It is closed when no channel and no READ uses it any more, if P may be dead."""

    agent: str
    slots: NixlSlots
    checksum: int
    """Of P's metadata."""
    users: int = 0
    """The channels and READs that use it."""
    doubted: bool = False
    """A channel was lost without a word of P, and P has answered no new one since."""
    broken: bool = False
    """A READ has failed, or could not begin; D gives it no new channel."""


class NixlRecvChannel(ConnectingReceiver):
    """D's end. ``source``: P's slots; ``None`` until P has replied. ``ready``: messages that lie in P's slots.
    ``lives_on``: P's process does, for P or we ended the channel in good order."""

    words: Words

    def __init__(self, plane: NixlPlane, sock: socket.socket, hello: bytes) -> None:
        super().__init__(plane, sock, hello)
        self.source: NixlSource | None = None
        self.receiving: set[int] = set()
        self.ready: deque[Ready] = deque()
        self.lives_on = False
        self._plane = plane

    def connected(self, sock: socket.socket) -> None:
        self.words = Words(self._plane.sockets, self, sock, READY, self._announced)

    def _announced(self, *fields: int) -> None:
        ready = Ready(*fields)
        try:
            if ready.slot == GOODBYE:
                self.lives_on = True
                raise ProtocolError("nixl: the prefill rank closed the channel")
            self._check(ready)
        except ProtocolError as error:
            self.fail(str(error))
        else:
            self.ready.append(ready)

    def _check(self, ready: Ready) -> None:
        """Raises ProtocolError where P may not have sent this."""
        if self.source is None:
            raise ProtocolError("nixl: the prefill rank sends before its reply")
        slots = self.source.slots
        if ready.slot >= slots.count or not 0 < ready.nbytes <= min(slots.slot_bytes, self._plane.slot_bytes):
            raise ProtocolError(
                f"nixl: the prefill rank announces {ready.nbytes} bytes in slot {ready.slot} of {slots.count}"
            )
        if len(self.ready) >= _MOST_READY:
            raise ProtocolError(f"nixl: the prefill rank has announced more than {_MOST_READY} messages")
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
        self._plane.leave(self)

    def _close(self) -> None:
        self.expected.clear()
        self.release_arrived()
        if self.error is None:
            self.lives_on = True
            self._give_up()
        self._plane.drop(self, None)


@dataclass(slots=True)
class MessageRead:
    """A message that D reads: first its bytes into ``slot``, then, once they are there, the number of the use of P's
    slot. The bytes are the message only if P has not begun a new use of the slot before they had been read."""

    read: NixlRead
    slot: Slot
    channel: NixlRecvChannel
    source: NixlSource
    ready: Ready
    checking: bool = False

    @property
    def wanted(self) -> bool:
        """Whether its channel stands. Else the READ keeps its slot until it ends, which can neither be had sooner nor
        waited for."""
        return self.channel.error is None and not self.channel.closed


class NixlPlane(SocketPlane):
    """The NIXL data plane of one process. Each direction has half of the staging memory.

    The slots lie in the memory of the GPU where the lanes carry that, else in host memory. ``sources``: the Ps that D
    reads from, by agent. ``fetches``: READs under way, in the order in which they began. Raises PlaneUnavailableError:
    no RDMA port is up, or NIXL is not installed or does not start."""

    name: ClassVar[str] = "nixl"

    @classmethod
    def check_host(cls, host: str) -> None:
        nixl_release()
        choose_lanes(host, os.environ)

    def __init__(self, context: PlaneContext) -> None:
        refuse_nixl(context.host, os.environ, context.others)
        device = context.memory.device
        on_gpu = device.type != "cpu"
        self._lanes = choose_lanes(context.host, os.environ)
        self._release = nixl_release()[1]
        half = context.staging_bytes // 2
        super().__init__(min(context.slot_bytes, half))
        self._host = context.host
        self.window, self.receives = windows(_GPU_WINDOWS if on_gpu else _WINDOWS, half, self.slot_bytes)
        where = device if on_gpu and self._lanes.gpu_slots else torch.device("cpu")
        locked = on_gpu and where.type == "cpu"
        self.send_pool: UsedSlots = UsedSlots(self.slot_bytes, half, where, page_locked=locked, in_one_piece=True)
        self.recv_pool = SlotPool(self.slot_bytes, half, where, page_locked=locked, in_one_piece=True)
        self._agent = NixlAgent(self._lanes)
        if self._lanes.rdma:
            self._agent.start()  # over TCP, which opens a port, UCX does not start before the first hand-over
        self.sources: dict[str, NixlSource] = {}
        self.fetches: list[MessageRead] = []
        self._uses_seen = torch.zeros(self.recv_pool.capacity, dtype=torch.int64)
        self._may_read = False  # whether D's slots are registered
        self._moved_at = 0.0
        self._reply: bytes = b""
        self._timer = Timer()

    def lanes_to(self, host: str) -> str:
        return self._lanes.shown

    def slower_because(self, offer: bytes, *, reached: bool) -> str:
        return "" if self._lanes.rdma else f"it has no RDMA: {self._lanes.shown}"

    def offer(self) -> bytes:
        port = self.listen_tcp(self._host)
        return msgspec.msgpack.encode(NixlOffer(port, self.secrets.new(), self._release, self._lanes.kind))

    def connect(self, offer: bytes, host: str) -> tuple[RecvChannel, bytes]:
        theirs = decode_payload(offer, NixlOffer, "nixl offer")
        if theirs.release != self._release:
            raise PlaneUnavailableError(
                f"nixl: the prefill engine has NIXL {theirs.release[:64]!r}, this host {self._release}; install "
                "the same on both"
            )
        if theirs.lanes != self._lanes.kind:
            raise PlaneUnavailableError(
                f"nixl: the prefill engine's lanes are {theirs.lanes[:256]!r}, ours {self._lanes.kind!r}"
            )
        try:
            self.prepare_to_read()
        except TransportError as error:
            raise PlaneUnavailableError(f"nixl: {str(error).removeprefix('nixl: ')}") from None
        sock = self.connect_tcp(host, theirs.port)
        attach = SocketAttach(secrets.token_bytes(CHANNEL_BYTES), self.slot_bytes)
        channel = NixlRecvChannel(self, sock, theirs.secret + attach.channel)
        self.channels[channel] = None
        return channel, msgspec.msgpack.encode(attach)

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, SocketAttach, "nixl attach")
        self.check_new(attach)
        if not self._reply:
            self._reply = msgspec.msgpack.encode(self._prepare_to_send())
        channel = NixlSendChannel(self, attach.channel, min(self.slot_bytes, attach.slot_bytes))
        self.await_connection(channel)
        return channel, self._reply

    def finish(self, channel: DChannel, reply: bytes) -> None:
        assert isinstance(channel, NixlRecvChannel)
        if channel.error is not None:  # it has given up what it had; it must get no source any more
            raise PlaneUnavailableError(str(channel.error))
        source = channel.source = self._source_of(decode_payload(reply, NixlReply, "nixl reply"))
        source.users += 1
        source.doubted = False  # P has just answered; if the connection has broken, a READ fails

    def _prepare_to_send(self) -> NixlReply:
        """P: allocate and register the slots. Returns the reply to every D."""
        pool = self.send_pool
        pool.prepare()
        slab = pool.slab
        assert slab is not None
        self._agent.start()
        metadata = [self._agent.register(slab), self._agent.register(pool.uses.view(torch.uint8))]
        device = slab.device.index if slab.is_cuda else None
        slots = NixlSlots(slab.data_ptr(), self.slot_bytes, pool.capacity, pool.uses.data_ptr(), device)
        return NixlReply(self._agent.name, metadata, zlib.crc32(b"".join(metadata)), slots)

    def prepare_to_read(self) -> None:
        """D: allocate and register the slots. Raises TransportError: there is no memory, or NIXL refused."""
        if not self._may_read:
            self.recv_pool.prepare()
            assert self.recv_pool.slab is not None
            self._agent.start()
            self._agent.register(self.recv_pool.slab)
            self._agent.register(self._uses_seen.view(torch.uint8))
            self._may_read = True

    def _source_of(self, reply: NixlReply) -> NixlSource:
        """D: the P of this reply. Raises PlaneUnavailableError: this P cannot be read from now. Raises ProtocolError:
        the reply is damaged."""
        if zlib.crc32(b"".join(reply.metadata)) != reply.checksum:
            raise ProtocolError("nixl reply: the metadata is damaged")
        source = self.sources.get(reply.agent)
        if source is None:
            try:
                for metadata in reply.metadata:
                    self._agent.load(reply.agent, metadata)
            except TransportError as error:
                self._agent.forget(reply.agent)
                raise PlaneUnavailableError(str(error)) from None
            self._agent.connect(reply.agent)
            source = self.sources[reply.agent] = NixlSource(reply.agent, reply.slots, reply.checksum)
        elif source.broken:
            raise PlaneUnavailableError("nixl: the last connection to this prefill engine is not closed yet")
        elif (source.slots, source.checksum) != (reply.slots, reply.checksum):
            raise PlaneUnavailableError("nixl: another prefill engine has the agent name of this one")
        return source

    def leave(self, channel: NixlRecvChannel) -> None:
        """D: a channel has ended."""
        if channel.source is not None:
            channel.source.doubted |= not channel.lives_on
            self._leave(channel.source)

    def _break(self, source: NixlSource, reason: str) -> None:
        """The connection to a P has broken: all of its channels fail."""
        source.broken = True
        for channel in self.receivers(NixlRecvChannel):
            if channel.source is source:
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

    def release(self, slot: Slot) -> None:
        """D: a message was unpacked."""
        self.recv_pool.put(slot)
        if not self.closed:
            self._begin()

    def pollables(self) -> list[tuple[int, int]]:
        return [] if self.closed else [*super().pollables(), (self._timer.fd, select.POLLIN)]

    @property
    def active(self) -> bool:
        return bool(self.channels or self.fetches)

    def progress(self) -> bool:
        if self.closed:
            return False
        moved = super().progress()
        if self.fetches:
            moved |= self.look()
        return self._begin() | moved

    def arm(self) -> bool:
        if self.closed:
            return True
        seconds = 0.0
        if self.fetches:
            least, most = _LOOK_SECONDS
            seconds = min(most, max(least, (time.monotonic() - self._moved_at) * _LOOK_PART))
        self._timer.set(seconds)
        return not (self.recv_pool.free and any(channel.may_fetch for channel in self.receivers(NixlRecvChannel)))

    def _begin(self) -> bool:
        """D: begin to READ as many messages as there are slots for; the channels take turns."""
        began = False
        for channel in [c for c in self.receivers(NixlRecvChannel) if c.may_fetch]:
            while self.recv_pool.free and (ready := channel.next_ready()) is not None:
                began = True
                source, slot = channel.source, self.recv_pool.take()
                assert source is not None and slot is not None
                address = source.slots.address + ready.slot * source.slots.slot_bytes
                try:
                    read = self._agent.read(slot.tensor[: ready.nbytes], source.agent, address, source.slots.device)
                except TransportError as error:
                    self.recv_pool.put(slot)
                    self._break(source, str(error))
                    break
                source.users += 1
                self.fetches.append(MessageRead(read, slot, channel, source, ready))
                self._moved_at = time.monotonic()
            if channel in self.channels:
                self.channels[channel] = self.channels.pop(channel)
        return began

    def look(self) -> bool:
        """D: take the READs that have ended a step further. READs from one P end nearly in the order in which they
        began, and each look costs a call of UCX: those behind one that is under way are not looked at."""
        moved = False
        waiting: set[NixlSource] = set()
        for fetch in list(self.fetches):
            ended = None if fetch.source in waiting else fetch.read.ended()
            if ended is None:
                if fetch.wanted:  # else it may never end, while P serves other channels
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

    def _goes_on(self, fetch: MessageRead) -> bool:
        """The bytes are here: begin to READ the number of the slot's use. ``False``: that is not needed, or done."""
        if fetch.checking or not fetch.wanted:
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

    def _finish(self, fetch: MessageRead, *, ok: bool) -> None:
        """No READ of this message is under way any more."""
        channel, source = fetch.channel, fetch.source
        if ok and fetch.checking and fetch.wanted:
            if int(self._uses_seen[fetch.slot.index]) == fetch.ready.use:
                self._leave(source)
                channel.fetched(fetch.slot, fetch.ready)
                return
            channel.fail("nixl: the prefill rank gave the slot of a message to another one")
        self.recv_pool.put(fetch.slot)
        if not ok:
            self._break(source, "nixl: a READ failed: the prefill rank is gone")
        self._leave(source)

    def _close(self) -> None:
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self.fetches and time.monotonic() < deadline:
            self.look()
        super()._close()
        self._agent.close()  # ends the READs under way
        for fetch in self.fetches:
            self.recv_pool.put(fetch.slot)
        self.fetches.clear()
        self.sources.clear()
        self._timer.close()
