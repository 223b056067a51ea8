"""The ZMQ data plane, for hosts without UCX: slots travel as multipart messages, without copies by KVFerry.

P binds one ROUTER; each channel of D connects one DEALER. Its routing id is a secret that only P learns, through the
handshake. ZMQ sends straight from P's slot, and D unpacks straight from the frame that ZMQ received into. A GPU cannot
read frames, so for its kernels D copies each frame into a page-locked slot. A window bounds the memory of both sides: D
returns a credit for every message that it has released.
"""

from __future__ import annotations

import threading
import time
from typing import Annotated, Any, ClassVar

import msgspec
import zmq
from msgspec import Meta
from zmq.utils import z85

from kvferry.transport.channels import RecvChannel, SendChannel, Slot
from kvferry.transport.control.keys import configure_client
from kvferry.transport.control.routing_ids import new_router
from kvferry.transport.control.zap_auth import Monitor, configure_server, unwatch
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import Plane, PlaneContext, decode_payload
from kvferry.transport.planes.zmq_channels import CHANNEL_BYTES, CONNECT_SECONDS, ZmqRecvChannel, ZmqSendChannel
from kvferry.transport.staging import SlotPool

_WINDOW = 8
"""Messages of one channel between P's pack and D's unpack; fewer where D's staging memory is short."""
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5000, 20000
"""For hosts that fall silent. The times are long, because a busy host is not dead, and the control plane checks more
often."""
_PING_SECONDS = 1.0
_WATCH_SECONDS = 0.005
_DEATH_SECONDS = 0.1
"""How long after a disconnect ZMQ may still take messages for the channel."""
_BATCH = 256
"""Bound on the messages received by one call, so that many messages do not keep the caller from its other work."""
_MAX_REQUEST_BYTES = 4096
"""Bound on a message from D to P. A credit takes 9 bytes, a message of the CURVE handshake some hundred."""


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    port: Annotated[int, Meta(ge=1, le=65535)]
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]


class _Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    channel: Annotated[bytes, Meta(min_length=CHANNEL_BYTES, max_length=CHANNEL_BYTES)]
    slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    window: Annotated[int, Meta(ge=1, le=1024)]


class ZmqPlane(Plane):
    """One ROUTER for all consumers, one DEALER per producer. ``context.staging_bytes`` bounds P's slots, and the frames
    that D holds; for caches on a GPU half of these bytes is for D's slots."""

    name: ClassVar[str] = "zmq"

    def __init__(self, context: PlaneContext) -> None:
        if context.keys is None:
            raise PlaneUnavailableError("zmq: it needs keys, and this engine is insecure; remove the setting insecure")
        self._keys = context.keys
        gpu = context.memory.device.type == "cuda"
        slot_bytes, staging_bytes = context.slot_bytes, context.staging_bytes
        self.slot_bytes = slot_bytes
        self.send_pool = SlotPool(slot_bytes, staging_bytes, page_locked=gpu)
        self.recv_pool = SlotPool(slot_bytes, staging_bytes // 2, page_locked=True) if gpu else None
        self._host = context.host
        self._window_left = max(1, (staging_bytes // 2 if gpu else staging_bytes) // slot_bytes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self._bound: zmq.Socket[bytes] | None = None
        self._bound_monitor: Monitor | None = None
        self._port = 0
        self._senders: dict[bytes, ZmqSendChannel] = {}
        self._receivers: set[ZmqRecvChannel] = set()
        self._busy: list[tuple[Slot, Any]] = []
        self._last_progress = time.monotonic()
        self._next_ping = 0.0
        self._watch_until = 0.0
        self._closed = False

    @property
    def staging_bytes(self) -> int:
        return self.send_pool.allocated_bytes + (self.recv_pool.allocated_bytes if self.recv_pool is not None else 0)

    def offer(self) -> bytes:
        if self._bound is None:
            self._bind()
        return msgspec.msgpack.encode(_Offer(self._port, z85.decode(self._keys.public)))

    def connect(self, offer: bytes, host: str) -> tuple[RecvChannel, bytes]:
        theirs = decode_payload(offer, _Offer, "zmq offer")
        window = min(_WINDOW, (self._window_left + 1) // 2)
        if window < 1:
            raise PlaneUnavailableError(
                f"zmq: staging memory is used up by {len(self._receivers)} channels; raise staging_bytes"
            )
        try:
            channel = ZmqRecvChannel(self, host, theirs.port, theirs.key, window)
        except zmq.ZMQError as error:
            raise PlaneUnavailableError(f"zmq: no socket can be had: {error}") from None
        self._window_left -= window
        self._receivers.add(channel)
        return channel, msgspec.msgpack.encode(_Attach(channel.id, self.slot_bytes, window))

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, _Attach, "zmq attach")
        if attach.channel in self._senders:
            raise ProtocolError("zmq attach: this channel exists already")
        if self._bound is None:
            raise TransportError("zmq: a consumer answers an offer that was never made")
        slot_bytes, window = min(self.slot_bytes, attach.slot_bytes), min(attach.window, _WINDOW)
        channel = ZmqSendChannel(self, attach.channel, slot_bytes, window)
        self._senders[attach.channel] = channel
        channel.ping(time.monotonic())
        return channel, b""

    def pollables(self) -> list[tuple[int | zmq.Socket[bytes], int]]:
        sockets: list[zmq.Socket[bytes]] = []
        if self._bound is not None and self._bound_monitor is not None:
            sockets += [self._bound, self._bound_monitor.socket]
        for channel in self._receivers:
            if channel.error is None:
                sockets += [channel.socket, channel.monitor.socket]
        return [(socket, zmq.POLLIN) for socket in sockets]

    @property
    def active(self) -> bool:
        return bool(self._senders or self._receivers)

    def progress(self) -> bool:
        moved = False
        if self._bound is not None:
            moved = self._serve()
        for channel in list(self._receivers):
            if channel.error is None:
                moved |= channel.progress()
        now = time.monotonic()
        if now - self._last_progress > _PING_SECONDS:  # time in which this thread did not run does not count
            for sender in self._senders.values():
                sender.extend(now - self._last_progress)
            for channel in self._receivers:
                channel.extend(now - self._last_progress)
        self._last_progress = now
        if now >= self._next_ping:
            self._next_ping = now + (_WATCH_SECONDS if now < self._watch_until else _PING_SECONDS)
            for sender in list(self._senders.values()):
                sender.ping(now)
            for channel in list(self._receivers):
                channel.check(now)
        if self._busy:
            self._busy = [sent for sent in self._busy if not self._returned(*sent)]
        return moved

    def arm(self) -> bool:
        if self.recv_pool is not None and self.recv_pool.free and any(c.starved for c in self._receivers):
            return False
        return time.monotonic() >= self._watch_until

    def close(self) -> None:
        if self._closed:
            return
        for channel in [*self._senders.values(), *self._receivers]:
            channel.close()
        if self._bound is not None and self._bound_monitor is not None:
            unwatch(self._bound)
            self._bound_monitor.close()
            self._bound.close(0)
        self._bound = self._bound_monitor = None
        self._closed = True
        # ``term`` waits for libzmq's own thread and for a ZAP handler's thread, so another thread calls it.
        threading.Thread(target=self._context.term, name="kvferry-zmq-term", daemon=True).start()

    def drop(self, channel: ZmqSendChannel | ZmqRecvChannel) -> None:
        """Forget a closed channel."""
        if isinstance(channel, ZmqSendChannel):
            self._senders.pop(channel.id, None)
        else:
            self._receivers.discard(channel)
            self._window_left += channel.window

    def put_later(self, slot: Slot, tracker: Any) -> None:
        """Free a slot for which no credit will come, once ZMQ does not use it any more."""
        self._busy.append((slot, tracker))

    def router(self) -> zmq.Socket[bytes]:
        """The socket from which P sends."""
        assert self._bound is not None
        return self._bound

    def socket(self, kind: int, server: bytes | None = None) -> zmq.Socket[bytes]:
        """An encrypted socket that does not linger and that notices a silent host. ``server``: the raw public key of
        the peer that it connects to; ``None``: it admits connections."""
        socket = new_router(self._context) if kind == zmq.ROUTER else self._context.socket(kind)
        socket.linger = 0
        socket.ipv6 = ":" in self._host
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
        socket.handshake_ivl = int(CONNECT_SECONDS * 1e3)
        if server is None:
            configure_server(socket, self._keys)
        else:
            configure_client(socket, self._keys, server)
        return socket

    def _bind(self) -> None:
        socket = self.socket(zmq.ROUTER)
        socket.router_mandatory = 1
        socket.maxmsgsize = _MAX_REQUEST_BYTES
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            socket.close(0)
            raise PlaneUnavailableError(f"zmq: cannot listen on {self._host}: {error}") from None
        self._bound = socket
        self._bound_monitor = Monitor(socket, int(zmq.EVENT_DISCONNECTED))
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._port = int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])

    def _serve(self) -> bool:
        """Receive the messages of consumers, and drop messages of unknown channels."""
        moved = False
        for _ in range(_BATCH):
            try:
                frames = self.router().recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            moved = True
            channel = self._senders.get(frames[0])
            if channel is not None and channel.error is None:
                channel.on_message(frames[1] if len(frames) == 2 else b"")
        assert self._bound_monitor is not None
        if self._bound_monitor.read():  # a consumer disconnected, and ZMQ does not name it
            moved = True
            self._watch_until = time.monotonic() + _DEATH_SECONDS
            self._next_ping = 0.0
        return moved

    def _returned(self, slot: Slot, tracker: Any) -> bool:
        if not tracker.done:
            return False
        self.send_pool.put(slot)
        return True
