"""The ZMQ data plane: slots travel as encrypted ZMQ messages, without copies by KVFerry.

Each channel is a pair of PAIR sockets with CURVE keys of its own, which P makes, and which the control connection
carries: who knows P's public key is the D of this session. ZMQ sends straight from P's slot, and D unpacks straight
from the frame that ZMQ received into. A GPU cannot read frames, so for its kernels D copies each frame into a
page-locked slot.

Credits bound the memory of both sides: P sends ``window`` messages, and one more for each that D has released. So no
queue of libzmq has a bound, and none ever stops its input: libzmq ends the process where a connection ends while its
input is stopped (stream_engine_base.cpp, ``_io_error``).
"""

from __future__ import annotations

import select
import threading
from typing import Annotated, Any, ClassVar

import msgspec
import zmq
from msgspec import Meta
from zmq.utils import z85

from kvferry.transport.channels import DChannel, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import Plane, PlaneContext, decode_payload
from kvferry.transport.planes.zmq_channels import ZmqRecvChannel, ZmqSendChannel
from kvferry.transport.staging import SlotPool

_WINDOW = 8
"""Messages of one channel between P's pack and D's unpack; fewer where D's staging memory is short."""
MOST_SOCKETS = 16384


class _Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    window: Annotated[int, Meta(ge=1, le=1024)]


class _Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    port: Annotated[int, Meta(ge=1, le=65535)]
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]


class ZmqPlane(Plane):
    """``context.staging_bytes`` bounds P's slots, and the frames that D holds; for caches on a GPU half of these bytes
    is for D's slots."""

    name: ClassVar[str] = "zmq"

    def __init__(self, context: PlaneContext) -> None:
        if not zmq.has("curve"):
            raise PlaneUnavailableError("zmq: this libzmq has no CURVE; install pyzmq from PyPI")
        gpu = context.memory.device.type == "cuda"
        slot_bytes, staging_bytes = context.slot_bytes, context.staging_bytes
        self.slot_bytes = slot_bytes
        self.send_pool = SlotPool(slot_bytes, staging_bytes, page_locked=gpu)
        self.recv_pool = SlotPool(slot_bytes, staging_bytes // 2, page_locked=True) if gpu else None
        self.host = context.host
        self._window_left = max(1, (staging_bytes // 2 if gpu else staging_bytes) // slot_bytes)
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self.zmq.max_sockets = MOST_SOCKETS
        self._channels: dict[ZmqSendChannel | ZmqRecvChannel, None] = {}
        self._busy: list[tuple[Slot, Any]] = []
        self._closed = False

    @property
    def staging_bytes(self) -> int:
        return self.send_pool.allocated_bytes + (self.recv_pool.allocated_bytes if self.recv_pool is not None else 0)

    def offer(self) -> bytes:
        return b""

    def connect(self, offer: bytes, host: str) -> tuple[ZmqRecvChannel, bytes]:
        if offer:
            raise ProtocolError(f"zmq: the offer has {len(offer)} bytes, expected none")
        window = min(_WINDOW, (self._window_left + 1) // 2)
        if window < 1:
            raise PlaneUnavailableError(
                f"zmq: staging memory is used up by {len(self._channels)} channels; raise staging_bytes"
            )
        try:
            channel = ZmqRecvChannel(self, host, window)
        except zmq.ZMQError as error:
            raise PlaneUnavailableError(f"zmq: no socket can be had: {error}") from None
        self._window_left -= window
        self._channels[channel] = None
        return channel, msgspec.msgpack.encode(_Attach(self.slot_bytes, window))

    def accept(self, payload: bytes) -> tuple[ZmqSendChannel, bytes]:
        attach = decode_payload(payload, _Attach, "zmq attach")
        public, secret = zmq.curve_keypair()
        try:
            channel = ZmqSendChannel(self, secret, min(self.slot_bytes, attach.slot_bytes), min(attach.window, _WINDOW))
        except zmq.ZMQError as error:
            raise TransportError(f"zmq: no socket can be had on {self.host}: {error}") from None
        self._channels[channel] = None
        return channel, msgspec.msgpack.encode(_Reply(channel.port, z85.decode(public)))

    def finish(self, channel: DChannel, reply: bytes) -> None:
        assert isinstance(channel, ZmqRecvChannel)
        theirs = decode_payload(reply, _Reply, "zmq reply")
        try:
            channel.open(theirs.port, theirs.key)
        except zmq.ZMQError as error:
            raise PlaneUnavailableError(f"zmq: no socket can be had: {error}") from None

    def pollables(self) -> list[tuple[int, int]]:
        return [(fd, select.POLLIN) for channel in self._channels for fd in channel.end.fds()]

    @property
    def active(self) -> bool:
        return bool(self._channels)

    def progress(self) -> bool:
        moved = False
        for channel in list(self._channels):
            if channel.error is None:
                moved |= channel.progress()
        if self._busy:
            self._busy = [sent for sent in self._busy if not self._returned(*sent)]
        return moved

    def arm(self) -> bool:
        """A descriptor of libzmq tells of news once; afterwards its socket must be asked."""
        slots = self.recv_pool is not None and bool(self.recv_pool.free)
        live = [channel for channel in self._channels if channel.error is None]
        return not any(channel.end.has_news or (slots and channel.starved) for channel in live)

    def close(self) -> None:
        if self._closed:
            return
        for channel in list(self._channels):
            channel.close()
        self._closed = True
        # ``term`` waits for libzmq's own thread, so another thread calls it.
        threading.Thread(target=self.zmq.term, name="kvferry-zmq-term", daemon=True).start()

    def drop(self, channel: ZmqSendChannel | ZmqRecvChannel) -> None:
        """Forget a closed channel."""
        if channel in self._channels:
            del self._channels[channel]
            self._window_left += channel.window if isinstance(channel, ZmqRecvChannel) else 0

    def put_later(self, slot: Slot, tracker: Any) -> None:
        """Free a slot for which no credit will come, once ZMQ does not use it any more."""
        self._busy.append((slot, tracker))

    def _returned(self, slot: Slot, tracker: Any) -> bool:
        if not tracker.done:
            return False
        self.send_pool.put(slot)
        return True
