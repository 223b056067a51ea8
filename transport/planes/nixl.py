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
import select
import socket
import time
import zlib
from typing import Annotated, Any, ClassVar

import msgspec
import torch
from msgspec import Meta

from kvferry.transport.channels import DChannel, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.plane import PlaneContext, decode_payload
from kvferry.transport.planes.nixl_agent import NixlAgent
from kvferry.transport.planes.nixl_reads import (
    FREE,
    GOODBYE,
    READY,
    NixlReads,
    NixlRecvChannel,
    NixlReply,
    NixlSlots,
    Words,
)
from kvferry.transport.planes.push import windows
from kvferry.transport.planes.socket_plane import AwaitedSender, SocketAttach, SocketPlane
from kvferry.transport.planes.ucx_settings import choose_lanes, nixl_release, refuse_nixl
from kvferry.transport.sockets import SECRET_BYTES
from kvferry.transport.staging import SlotPool
from kvferry.transport.wake import Timer

_WINDOWS, _GPU_WINDOWS = (8, 6), (6, 4)
"""Slots of one channel that P has in use, and READs of one channel that D has under way."""
_CLOSE_SECONDS = 0.5
"""Bound on the wait for the READs under way when the plane closes."""


class NixlOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``release`` and ``lanes`` must be D's own: NIXL's formats are not those of other releases."""

    port: Annotated[int, Meta(gt=0, lt=65536)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    release: Annotated[str, Meta(max_length=64)]
    lanes: Annotated[str, Meta(max_length=256)]


class UsedSlots(SlotPool):
    """P's slots. ``uses``: the number of the present use of each, int64 [capacity]. It changes before anything else can
    be written to the slot."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.uses = torch.zeros(self.capacity, dtype=torch.int64)

    def use_of(self, slot: Slot) -> int:
        return int(self.uses[slot.index])

    def put(self, slot: Slot) -> None:
        self.uses[slot.index] += 1
        super().put(slot)


class NixlSendChannel(AwaitedSender):
    """P's end. A slot is in use until D says that it is free, or the channel ends."""

    words: Words

    def __init__(self, plane: NixlPlane, channel_id: bytes, slot_bytes: int) -> None:
        super().__init__(plane.send_pool, channel_id, slot_bytes, plane.window)
        self._plane = plane

    def connected(self, sock: socket.socket) -> None:
        super().connected(sock)
        self.words = Words(self._plane.sockets, self, sock, FREE, self._serve)

    def _transmit(self, slot: Slot, nbytes: int, tag: int) -> None:
        self.words.send(READY.pack(slot.index, self._plane.send_pool.use_of(slot), nbytes, tag))

    def _serve(self) -> None:
        self.words.send()
        for (index,) in self.words.receive():
            if not self.free(index):
                self.fail(f"nixl: the consumer gave back slot {index}, which it does not have")
                return

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


class NixlPlane(SocketPlane):
    """The NIXL data plane of one process. Each direction has half of the staging memory.

    The slots lie in the memory of the GPU where the lanes carry that, else in host memory. D's half is ``reads``.

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
        self._host = context.host
        self.window, self.receives = windows(_GPU_WINDOWS if on_gpu else _WINDOWS, half, self.slot_bytes)
        where = device if on_gpu and self._lanes.gpu_slots else torch.device("cpu")
        locked = on_gpu and where.type == "cpu"
        self.send_pool: UsedSlots = UsedSlots(self.slot_bytes, half, where, page_locked=locked, in_one_piece=True)
        self.recv_pool = SlotPool(self.slot_bytes, half, where, page_locked=locked, in_one_piece=True)
        self._agent = NixlAgent(self._lanes)
        if self._lanes.rdma:
            self._agent.start()  # over TCP, which opens a port, UCX does not start before the first hand-over
        self.reads = NixlReads(self._agent, self.recv_pool, self.channels)
        self._reply: bytes = b""
        self._timer = Timer()

    def lanes_to(self, host: str) -> str:
        return self._lanes.shown

    @property
    def retired_slots(self) -> int:
        """The number of slots of closed channels into which a READ may still write."""
        return self.recv_pool.retired

    def slower_because(self, offer: bytes, *, reached: bool) -> str:
        return "" if self._lanes.rdma else f"it has no RDMA: {self._lanes.shown}"

    def offer(self) -> bytes:
        port = self.listen_tcp(self._host)
        return msgspec.msgpack.encode(NixlOffer(port, self.new_secret(), self._release, self._lanes.kind))

    def connect(self, offer: bytes, host: str) -> tuple[RecvChannel, bytes]:
        theirs = decode_payload(offer, NixlOffer, "nixl offer")
        if theirs.release != self._release:
            raise PlaneUnavailableError(
                f"nixl: P has NIXL {theirs.release[:64]!r}, this host {self._release}; install the same on both"
            )
        if theirs.lanes != self._lanes.kind:
            raise PlaneUnavailableError(f"nixl: P's lanes are {theirs.lanes[:256]!r}, ours {self._lanes.kind!r}")
        try:
            self.reads.prepare()
        except TransportError as error:
            raise PlaneUnavailableError(f"nixl: {str(error).removeprefix('nixl: ')}") from None
        sock = self.connect_tcp(host, theirs.port)
        attach = self.new_attach()
        channel = NixlRecvChannel(self, sock, theirs.secret + attach.channel)
        self.channels[channel] = None
        return channel, msgspec.msgpack.encode(attach)

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, SocketAttach, "nixl attach")
        self.check_new(attach)
        reply = self._prepare_to_send()
        channel = NixlSendChannel(self, attach.channel, min(self.slot_bytes, attach.slot_bytes))
        self.await_connection(channel)
        return channel, reply

    def finish(self, channel: DChannel, reply: bytes) -> None:
        assert isinstance(channel, NixlRecvChannel)
        if channel.error is not None:  # it has given up what it had; it must get no source any more
            raise PlaneUnavailableError(str(channel.error))
        self.reads.join(channel, decode_payload(reply, NixlReply, "nixl reply"))

    def _prepare_to_send(self) -> bytes:
        """P: allocate and register the slots. Returns the reply to every D."""
        if not self._reply:
            self.send_pool.prepare()
            slab = self.send_pool.slab
            assert slab is not None
            self._agent.start()
            metadata = [self._agent.register(slab), self._agent.register(self.send_pool.uses.view(torch.uint8))]
            device = slab.device.index if slab.is_cuda else None
            uses = self.send_pool.uses.data_ptr()
            slots = NixlSlots(slab.data_ptr(), self.slot_bytes, self.send_pool.capacity, uses, device)
            checksum = zlib.crc32(b"".join(metadata))
            self._reply = msgspec.msgpack.encode(NixlReply(self._agent.name, metadata, checksum, slots))
        return self._reply

    def release(self, slot: Slot) -> None:
        """D: a message was unpacked."""
        self.recv_pool.put(slot)
        if not self.closed:
            self.reads.begin()

    def pollables(self) -> list[tuple[int, int]]:
        return [] if self.closed else [*super().pollables(), (self._timer.fd, select.POLLIN)]

    @property
    def active(self) -> bool:
        return bool(self.channels or self.reads.fetches)

    def progress(self) -> bool:
        if self.closed:
            return False
        moved = super().progress()
        if self.reads.fetches:
            moved |= self.reads.look()
        return self.reads.begin() | moved

    def arm(self) -> bool:
        if self.closed:
            return True
        self._timer.set(self.reads.look_in())
        return not self.reads.may_begin

    def _close(self) -> None:
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self.reads.fetches and time.monotonic() < deadline:
            self.reads.look()
        super()._close()
        self._agent.close()  # ends the READs under way
        self.reads.end_all()
        self._timer.close()
