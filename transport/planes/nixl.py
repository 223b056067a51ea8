"""The NIXL data plane: P packs into slots, and D READs each slot with one one-sided operation, over RDMA where it is.

Only slots are registered, never the caches. A message goes so::

    P: pack into a slot ── ready: slot, its use, bytes, tag ──▶ D: READ the slot; READ the number of the slot's use
    P: the slot is free ◀── free: slot ────────────────────────  D: unpack from its own slot

The words go over one TCP connection for each channel, the bytes by READ. NIXL has no descriptor to wait for, and its
notifications can only be polled; the connection is also what wakes the transfer thread, and what tells of a peer that
died. While D has READs under way it looks at them when a timer expires.

READ and not WRITE, because an operation under way cannot be called back: after NIXL has forgotten a peer, that peer's
WRITEs still arrive. A WRITE of a P that was given up could so change a slot of D that holds another P's message. A READ
writes only where D itself let it, and D keeps the slot until the READ has ended. P on its side may use its slots again
at any time: it changes the number of the slot's use first, and D, which reads this number after the bytes, takes no
bytes of which it does not know that the number had not changed.

UCX does not check what it parses, and D gives P's metadata to native code, so the plane is used only where the control
connection is authenticated (``PlaneSpec.needs_keys``).
"""

from __future__ import annotations

import os
import time
import zlib
from typing import ClassVar

import msgspec
import torch
import zmq

from kvferry.transport.channels import DChannel, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import PlaneContext, decode_payload
from kvferry.transport.planes.nixl_agent import NixlAgent, choose_lanes, nixl_release
from kvferry.transport.planes.nixl_channels import Fetch, NixlRecvChannel, NixlSendChannel
from kvferry.transport.planes.nixl_messages import NixlOffer, NixlReply, NixlSlots, NixlSource
from kvferry.transport.planes.one_ucx import refuse_nixl
from kvferry.transport.socket_plane import SocketAttach, SocketPlane
from kvferry.transport.staging import SlotPool
from kvferry.transport.timer import Timer

_WINDOWS, _GPU_WINDOWS = (8, 6), (6, 4)
"""Slots of one channel that P has in use, and READs of one channel that D has under way."""
_LOOK_SECONDS = (50e-6, 2e-3)
"""D looks at its READs after a quarter of the time since the last one ended, within these bounds."""
_CONNECT_SECONDS = 30.0
"""D's connection must come within this time."""
_CLOSE_SECONDS = 0.5
"""Bound on the wait for the READs under way when the plane closes."""
_MOST_PEERS = 256
"""Peers without a channel whose connections D keeps."""
_USE_BYTES = 8


class NixlPlane(SocketPlane):
    """The NIXL data plane of one process. Each direction has half of the staging memory.

    The slots lie in the memory of the GPU where the lanes carry that, else in host memory.

    Raises:
        PlaneUnavailableError: no RDMA port is up, or NIXL is not installed or does not start.
    """

    name: ClassVar[str] = "nixl"

    def __init__(self, context: PlaneContext) -> None:
        refuse_nixl(context.host, os.environ, context.others)
        device = context.memory.device
        on_gpu = device.type != "cpu"
        self._lanes = choose_lanes(context.host, os.environ)
        self._release = nixl_release()[1]
        half = context.staging_bytes // 2
        super().__init__(min(context.slot_bytes, half))
        self._host, self._port = context.host, 0
        most = max(1, half // self.slot_bytes - 1)  # a peer that stops must not hold every slot
        self.window, self.receives = (min(n, most) for n in (_GPU_WINDOWS if on_gpu else _WINDOWS))
        where = device if on_gpu and self._lanes.gpu_slots else torch.device("cpu")
        locked = on_gpu and where.type == "cpu"
        self.send_pool, self._recv_pool = (
            SlotPool(self.slot_bytes, half, where, page_locked=locked, in_one_piece=True) for _ in range(2)
        )
        self._uses = torch.zeros(self.send_pool.capacity, dtype=torch.int64)
        self._uses_seen = torch.zeros(self._recv_pool.capacity, dtype=torch.int64)
        self._agent = NixlAgent(self._lanes)
        if self._lanes.rdma:
            self._agent.start()
        self._reply: bytes = b""
        self._receiving = False
        self._sources: dict[str, NixlSource] = {}
        self._fetches: list[Fetch] = []
        self._awaited: dict[bytes, NixlSendChannel] = {}
        self._timer = Timer()
        self._moved_at = 0.0

    def lanes_to(self, host: str) -> str:
        return self._lanes.shown

    @property
    def retired_slots(self) -> int:
        """The number of slots of closed channels into which a READ may still write."""
        return self._recv_pool.retired

    @property
    def staging_bytes(self) -> int:
        return sum(pool.slab.numel() for pool in (self.send_pool, self._recv_pool) if pool.slab is not None)

    @property
    def agent(self) -> NixlAgent:
        """The agent. Over TCP, which opens a port, its UCX does not start before the first hand-over."""
        self._agent.start()
        return self._agent

    def slower_because(self, offer: bytes, *, reached: bool) -> str:
        return "" if self._lanes.rdma else f"it has no RDMA: {self._lanes.shown}"

    # --- handshake --------------------------------------------------------------------------------------------------

    def offer(self) -> bytes:
        if not self._port:
            self._port = self.listen_tcp(self._host, arrived=self._came)
        return msgspec.msgpack.encode(NixlOffer(self._port, self.new_secret(), self._release, self._lanes.kind))

    def connect(self, offer: bytes, host: str) -> tuple[RecvChannel, bytes]:
        theirs = decode_payload(offer, NixlOffer, "nixl offer")
        if theirs.release != self._release:
            raise PlaneUnavailableError(
                f"nixl: P has NIXL {theirs.release[:64]!r}, this host {self._release}; install the same on both"
            )
        if theirs.lanes != self._lanes.kind:
            raise PlaneUnavailableError(f"nixl: P's lanes are {theirs.lanes[:256]!r}, ours {self._lanes.kind!r}")
        try:
            self._prepare_to_receive()
        except TransportError as error:
            raise PlaneUnavailableError(f"nixl: {str(error).removeprefix('nixl: ')}") from None
        sock = self.connect_tcp(host, theirs.port)
        attach = self.new_attach()
        channel = NixlRecvChannel(self, sock, theirs.secret + attach.channel)
        self.channels[channel] = None
        return channel, msgspec.msgpack.encode(attach)

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, SocketAttach, "nixl attach")
        if self.pending is None:
            raise TransportError("nixl: a consumer answers an offer that was never made")
        if any(isinstance(c, NixlSendChannel) and c.id == attach.channel for c in self.channels):
            raise ProtocolError("nixl attach: this channel exists already")
        reply = self._prepare_to_send()
        slot_bytes = min(self.slot_bytes, attach.slot_bytes)
        channel = NixlSendChannel(self, attach.channel, slot_bytes, time.monotonic() + _CONNECT_SECONDS)
        self.channels[channel] = None
        self._awaited[attach.channel] = channel
        self._came(attach.channel)  # D's connection may be here before its Attach, or after
        return channel, reply

    def finish(self, channel: DChannel, reply: bytes) -> None:
        assert isinstance(channel, NixlRecvChannel)
        if channel.error is not None:  # it has given up what it had; it must get no source any more
            raise PlaneUnavailableError(str(channel.error))
        theirs = decode_payload(reply, NixlReply, "nixl reply")
        if zlib.crc32(b"".join(theirs.metadata)) != theirs.checksum:
            raise ProtocolError("nixl reply: the metadata is damaged")
        source = self._sources.get(theirs.agent)
        if source is not None and source.broken:
            raise PlaneUnavailableError("nixl: the last connection to this P is not closed yet")
        if source is not None and (source.slots, source.checksum) != (theirs.slots, theirs.checksum):
            raise PlaneUnavailableError("nixl: another P has the agent name of this one")
        if source is None:
            try:
                for metadata in theirs.metadata:
                    self.agent.load(theirs.agent, metadata)
            except TransportError as error:
                self.agent.forget(theirs.agent)
                raise PlaneUnavailableError(str(error)) from None
            self.agent.connect(theirs.agent)
            source = self._sources[theirs.agent] = NixlSource(theirs.agent, theirs.slots, theirs.checksum)
        source.channels += 1
        source.lives_on = False
        channel.source = source

    def _prepare_to_send(self) -> bytes:
        """P: allocate and register the slots. Returns the reply to every D."""
        if not self._reply:
            self.send_pool.prepare()
            slab = self.send_pool.slab
            assert slab is not None
            metadata = [self.agent.register(slab), self.agent.register(self._uses.view(torch.uint8))]
            device = slab.device.index if slab.is_cuda else None
            slots = NixlSlots(slab.data_ptr(), self.slot_bytes, self.send_pool.capacity, self._uses.data_ptr(), device)
            checksum = zlib.crc32(b"".join(metadata))
            self._reply = msgspec.msgpack.encode(NixlReply(self.agent.name, metadata, checksum, slots))
        return self._reply

    def _prepare_to_receive(self) -> None:
        """D: allocate and register the slots."""
        if not self._receiving:
            self._recv_pool.prepare()
            assert self._recv_pool.slab is not None
            self.agent.register(self._recv_pool.slab)
            self.agent.register(self._uses_seen.view(torch.uint8))
            self._receiving = True

    def _came(self, channel_id: bytes) -> None:
        """Join a channel and its connection once both are here."""
        assert self.pending is not None
        channel = self._awaited.get(channel_id)
        sock = self.pending.take(channel_id) if channel is not None else None
        if channel is not None and sock is not None:
            del self._awaited[channel_id]
            channel.connected(sock)

    # --- P's slots --------------------------------------------------------------------------------------------------

    def use_of(self, slot: Slot) -> int:
        """The number of the present use of a slot of P."""
        return int(self._uses[slot.index])

    def free(self, slot: Slot) -> None:
        """A slot of P is free. Its number changes before anything else can be written there."""
        self._uses[slot.index] += 1
        self.send_pool.put(slot)

    # --- D's READs --------------------------------------------------------------------------------------------------

    def release(self, slot: Slot) -> None:
        """A message was unpacked."""
        self._recv_pool.put(slot)
        if not self._closed:
            self._fetch()

    def _fetch(self) -> bool:
        """Begin to READ as many messages as there are slots for; the channels take turns."""
        began = False
        for channel in [c for c in self.channels if isinstance(c, NixlRecvChannel) and c.may_fetch]:
            while self._recv_pool.free and (ready := channel.next_ready()) is not None:
                began = True
                source, slot = channel.source, self._recv_pool.take()
                assert source is not None and slot is not None
                address = source.slots.address + ready.slot * source.slots.slot_bytes
                try:
                    read = self.agent.read(slot.tensor[: ready.nbytes], source.agent, address, source.slots.device)
                except TransportError as error:
                    self._recv_pool.put(slot)
                    self._break(source, str(error))
                    break
                source.fetches += 1
                self._fetches.append(Fetch(read, slot, channel, ready))
                self._moved_at = time.monotonic()
            if channel in self.channels:
                self.channels[channel] = self.channels.pop(channel)
        return began

    def _look(self) -> bool:
        """Take the READs that have ended a step further."""
        moved = False
        for fetch in list(self._fetches):
            ended = fetch.read.ended()
            if ended is None:
                continue
            moved = True
            if not (ended and self._goes_on(fetch)):
                self._fetches.remove(fetch)
                self._finish(fetch, ok=ended)
        if moved:
            self._moved_at = time.monotonic()
        return moved

    def _goes_on(self, fetch: Fetch) -> bool:
        """The bytes are here: begin to READ the number of the slot's use. ``False``: that is not needed, or done."""
        source = fetch.channel.source
        if fetch.checking or fetch.retired or fetch.channel.error is not None:
            return False
        assert source is not None
        seen = self._uses_seen[fetch.slot.index :][:1].view(torch.uint8)
        try:
            fetch.read = self.agent.read(seen, source.agent, source.slots.uses + _USE_BYTES * fetch.ready.slot, None)
        except TransportError as error:
            self._break(source, str(error))
            return False
        fetch.checking = True
        return True

    def _finish(self, fetch: Fetch, *, ok: bool) -> None:
        """No READ of this message is under way any more."""
        channel, source = fetch.channel, fetch.channel.source
        assert source is not None
        source.fetches -= 1
        if ok and fetch.checking and channel.error is None and not channel.closed:
            if int(self._uses_seen[fetch.slot.index]) == fetch.ready.use:
                channel.fetched(fetch)
                return
            channel.fail("nixl: the producer gave the slot of a message to another one")
        (self._recv_pool.revive if fetch.retired else self._recv_pool.put)(fetch.slot)
        if not ok:
            self._break(source, "nixl: a READ failed: the producer is gone")
        self._let_go(source)

    def _break(self, source: NixlSource, reason: str) -> None:
        """The connection to a P has broken: all of its channels fail."""
        source.broken = True
        for channel in [c for c in self.channels if isinstance(c, NixlRecvChannel) and c.source is source]:
            channel.fail(reason)

    def leave(self, channel: NixlRecvChannel) -> None:
        """A channel of D has ended: its READs under way keep their slots until they end."""
        for fetch in self._fetches:
            if fetch.channel is channel and not fetch.retired:
                fetch.retired = True
                self._recv_pool.retire(fetch.slot)
        if channel.source is not None:
            channel.source.channels -= 1
            self._let_go(channel.source)

    def _let_go(self, source: NixlSource) -> None:
        """Close the connection to a P that nothing uses, if P is gone; or the oldest such, if there are many."""
        if source.channels or source.fetches or self._sources.get(source.agent) is not source:
            return
        if source.broken or not source.lives_on:
            self._forget(source)
            return
        self._sources[source.agent] = self._sources.pop(source.agent)
        idle = [found for found in self._sources.values() if not (found.channels or found.fetches)]
        if len(idle) > _MOST_PEERS:
            self._forget(idle[0])

    def _forget(self, source: NixlSource) -> None:
        self.agent.forget(source.agent)
        del self._sources[source.agent]

    # --- poll loop --------------------------------------------------------------------------------------------------

    def pollables(self) -> list[tuple[int | zmq.Socket[bytes], int]]:
        return [] if self._closed else [*super().pollables(), (self._timer.fd, zmq.POLLIN)]

    @property
    def active(self) -> bool:
        return bool(self.channels or self._fetches)

    def progress(self) -> bool:
        if self._closed:
            return False
        moved = super().progress()
        now = time.monotonic()
        for late in [channel for channel in self._awaited.values() if now > channel.deadline]:
            late.fail("nixl: the consumer's connection did not come")
            moved = True
        for channel in [c for c in self.channels if isinstance(c, NixlRecvChannel) and c.is_late(now)]:
            channel.fail("nixl: the producer's data port does not answer; is a firewall between?")
            moved = True
        if self._fetches:
            moved |= self._look()
        moved |= self._fetch()
        return moved

    def arm(self) -> bool:
        if self._closed:
            return True
        if self._fetches:
            least, most = _LOOK_SECONDS
            self._timer.set(min(most, max(least, (time.monotonic() - self._moved_at) / 4)))
        else:
            self._timer.set(0)
        waits = any(isinstance(c, NixlRecvChannel) and c.may_fetch for c in self.channels)
        return not (waits and self._recv_pool.free)

    def stop_awaiting(self, channel: NixlSendChannel) -> None:
        """P: no connection is awaited for a channel any more."""
        self._awaited.pop(channel.id, None)

    def close(self) -> None:
        if self._closed:
            return
        for channel in list(self.channels):
            channel.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._fetches and time.monotonic() < deadline:
            self._look()
        super().close()
        self._agent.close()  # ends the READs under way
        for fetch in self._fetches:
            self._recv_pool.revive(fetch.slot)
        self._fetches.clear()
        self._sources.clear()
        self._timer.close()
