"""The ZMQ data plane, for hosts without UCX: the staging protocol over multipart messages, without copies of ours.

P binds one ROUTER; each channel of D connects one DEALER whose routing id is a secret that only P learns, through the
handshake. ZMQ sends straight from P's slot, and D unpacks straight from the frame that ZMQ received into; a GPU cannot
read frames, so for its kernels D copies each into a page-locked slot. What keeps the memory of both bounded is a
window: D returns a credit for every message it is done with.

Frames after the routing id: P to D ``[b"m" + tag + nbytes, bytes]``, ``[b"p"]`` (are you there) and ``[b"b"]`` (bye);
D to P ``[b"h"]`` (hello) and ``[b"c" + tag]`` (credit). Numbers are little endian.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch
import zmq
from msgspec import Meta

from kvferry.connector.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.framing import url
from kvferry.transport.gate import Monitor, unwatch
from kvferry.transport.plane import (
    CPU,
    ConfigureSocket,
    Plane,
    Received,
    RecvChannel,
    SendChannel,
    Slot,
    decode_payload,
)
from kvferry.transport.staging import SlotPool

_HEADER = struct.Struct("<cQQ")
"""Kind, tag, bytes."""
_CREDIT = struct.Struct("<cQ")
"""Kind, tag."""
_WINDOW = 8
"""Messages of one channel between P's pack and D's unpack; fewer where D's staging memory is short."""
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 5000, 20000
"""For hosts that fall silent; long, because a starved host is not a dead one, and the control plane asks oftener."""
_CONNECT_SECONDS = 10.0
_PING_SECONDS = 1.0
_WATCH_SECONDS = 0.005
_DEATH_SECONDS = 0.1
"""How long after a disconnect its channel may take to become unreachable."""
_BATCH = 256
"""Messages taken in by one call, so that a flood does not keep the caller from its other work."""
_CHANNEL_BYTES = 16
_MAX_REQUEST_BYTES = 4096
"""Of what D sends to P; credits take 9 bytes, the handshake of CURVE some hundred."""
_LOST = int(
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    port: Annotated[int, Meta(ge=1, le=65535)]


class _Attach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    channel: Annotated[bytes, Meta(min_length=_CHANNEL_BYTES, max_length=_CHANNEL_BYTES)]
    slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    window: Annotated[int, Meta(ge=1, le=1024)]


class ZmqSendChannel(SendChannel):
    """P's end. A slot is busy until D returned its credit and ZMQ let go of it."""

    def __init__(self, plane: ZmqPlane, attach: _Attach) -> None:
        self.slot_bytes = min(plane._slot_bytes, attach.slot_bytes)
        self._plane = plane
        self._id = attach.channel
        self._window = min(attach.window, _WINDOW)
        self._taken = 0
        self._sent: dict[int, tuple[Slot, Any]] = {}
        self._connected = False
        self._deadline = time.monotonic() + _CONNECT_SECONDS
        self._closed = False

    def acquire(self) -> Slot | None:
        if self._closed or self.error is not None or not self._connected or self._taken >= self._window:
            return None
        slot = self._plane._pool.take()
        self._taken += slot is not None
        return slot

    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        assert 0 < nbytes <= slot.nbytes
        if self._closed or self.error is not None:
            self.give_back(slot)
            return
        data = memoryview(slot.tensor.numpy())[:nbytes]  # type: ignore[arg-type]
        head = [self._id, _HEADER.pack(b"m", tag, nbytes)]
        try:
            self._plane._router().send_multipart(head, zmq.SNDMORE | zmq.NOBLOCK)
            tracker = self._plane._router().send(data, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            self._fail(TransportError(f"zmq: the consumer is gone: {error}"))
            self.give_back(slot)
            return
        self._sent[tag] = (slot, tracker)

    def give_back(self, slot: Slot) -> None:
        self._taken -= 1
        self._plane._pool.put(slot)

    def flush(self, tags: Iterable[int]) -> None:
        pass

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(zmq.ZMQError):
                self._plane._router().send_multipart([self._id, b"b"], zmq.NOBLOCK)
            self._plane._senders.pop(self._id, None)
            self._let_go()

    def on_message(self, frame: bytes) -> None:
        """A hello or a credit."""
        if frame == b"h":
            self._connected = True
            return
        if len(frame) == _CREDIT.size and frame[:1] == b"c":
            sent = self._sent.pop(_CREDIT.unpack(frame)[1], None)
            if sent is not None:  # it is all there, so nothing reads the slot any more
                self.give_back(sent[0])
                return
        self._fail(TransportError(f"zmq: the consumer sent {frame[:16]!r}, expected the credit of a message"))

    def extend(self, seconds: float) -> None:
        """Give the consumer more time to connect."""
        self._deadline += seconds

    def ping(self, now: float) -> None:
        """Find out whether the consumer is there: ZMQ says so only when something is sent to it."""
        if self.error is not None:
            return
        try:
            self._plane._router().send_multipart([self._id, b"p"], zmq.NOBLOCK)
            self._connected = True
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            if self._connected:
                self._fail(TransportError(f"zmq: the consumer closed the channel or died: {error}"))
            elif now > self._deadline:
                self._fail(TransportError(f"zmq: the consumer did not connect within {_CONNECT_SECONDS:g} s"))

    def _fail(self, error: TransportError) -> None:
        if self.error is None:
            self.error = error
            self._let_go()

    def _let_go(self) -> None:
        for sent in self._sent.values():
            self._taken -= 1
            self._plane._return(*sent)
        self._sent.clear()


class ZmqRecvChannel(RecvChannel):
    """D's end. ``_waiting``: messages that are here and wait for a page-locked slot."""

    def __init__(self, plane: ZmqPlane, host: str, port: int, window: int) -> None:
        self._plane = plane
        self.id = b"k" + secrets.token_bytes(_CHANNEL_BYTES - 1)  # ZMQ keeps ids that start with 0 to itself
        self.window = window
        self._expected: dict[int, int] = {}
        self._arrived: list[Received] = []
        self._waiting: deque[tuple[int, zmq.Frame]] = deque()
        self._closed = False
        self._deadline: float | None = time.monotonic() + _CONNECT_SECONDS
        self._where = f"{host}:{port}"
        self.socket = plane._socket(zmq.DEALER, server=False)
        self.socket.routing_id = self.id
        self.socket.rcvhwm = window + 8
        self.socket.maxmsgsize = plane._slot_bytes
        self.socket.reconnect_ivl = -1  # the producer listens already; a connection that is lost stays lost
        self.monitor = Monitor(self.socket, _LOST)
        self.socket.ipv6 = ":" in host
        try:
            self.socket.connect(url(host, port))
            self.socket.send(b"h", zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._shut()
            raise PlaneUnavailableError(f"zmq: the producer at {self._where} cannot be reached: {error}") from None

    def expect(self, tag: int, nbytes: int, into: object = None) -> None:
        self._expected[tag] = nbytes

    def poll(self) -> list[Received]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def posted(self) -> set[int]:
        return set()

    def forget(self, tag: int) -> None:
        self._expected.pop(tag, None)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            for message in self.poll():  # nobody will see these any more
                message.release()
            self._plane._receivers.discard(self)
            self._plane._window_left += self.window
            self._shut()

    def progress(self) -> bool:
        """Take in what the producer sent; ``True`` if that was anything."""
        moved = self._copy_waiting()
        for _ in range(2 * self.window):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                break
            moved = True
            try:
                self._on_message(frames)
            except ProtocolError as error:
                self._fail(TransportError(str(error)))
            if self.error is not None:
                return True
        for event, _ in self.monitor.read():
            moved = True
            reason = (
                "closed the channel or died" if event == zmq.EVENT_DISCONNECTED else "cannot be reached, or refused"
            )
            self._fail(TransportError(f"zmq: the producer at {self._where} {reason}"))
        return moved

    @property
    def starved(self) -> bool:
        """A message is here and waits for a slot."""
        return bool(self._waiting) and self.error is None

    def extend(self, seconds: float) -> None:
        """Give the producer more time to answer."""
        if self._deadline is not None:
            self._deadline += seconds

    def check(self, now: float) -> None:
        """Fail where the producer has never answered."""
        if self._deadline is not None and now > self._deadline:
            self._fail(
                TransportError(f"zmq: the producer at {self._where} did not answer within {_CONNECT_SECONDS:g} s")
            )

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        self._deadline = None
        head = frames[0].bytes
        if len(frames) == 1 and head == b"p":
            return
        if len(frames) == 1 and head == b"b":
            self._fail(TransportError(f"zmq: the producer at {self._where} closed the channel"))
            return
        if len(frames) != 2 or len(head) != _HEADER.size or head[:1] != b"m":
            raise ProtocolError(f"zmq: the producer sent {len(frames)} frames, the first is {head[:16]!r}")
        _, tag, nbytes = _HEADER.unpack(head)
        frame = frames[1]
        if len(frame) != nbytes or not nbytes:
            raise ProtocolError(f"zmq: message {tag:#x} has {len(frame)} bytes and says {nbytes}")
        expected = self._expected.get(tag)
        if expected is None:  # forgotten, or never announced
            self._credit(tag)
        elif expected != nbytes:
            raise ProtocolError(f"zmq: message {tag:#x} has {nbytes} bytes, expected {expected}")
        elif self._plane._recv_pool is not None:
            if len(self._waiting) >= self.window:
                raise ProtocolError(f"zmq: the producer sent more than {self.window} messages without credit")
            self._waiting.append((tag, frame))
            self._copy_waiting()
        else:
            del self._expected[tag]
            held = [frame]  # the frame owns the bytes until it is released
            self._arrived.append(Received(tag, _address(frame), nbytes, partial(self._release, tag, held)))

    def _copy_waiting(self) -> bool:
        """Copy messages into slots for as long as there are any; whether one moved on."""
        before, pool = len(self._waiting), self._plane._recv_pool
        while self._waiting and pool is not None:
            tag, frame = self._waiting[0]
            if tag not in self._expected:  # forgotten meanwhile
                self._waiting.popleft()
                self._credit(tag)
                continue
            try:
                slot = pool.take()
            except Exception as error:  # no page-locked memory: this channel's failure, not everybody's
                self._fail(TransportError(f"zmq: no staging slot can be had: {error}"))
                self._waiting.clear()
                break
            if slot is None:
                break
            self._waiting.popleft()
            nbytes = self._expected.pop(tag)
            ctypes.memmove(slot.address, _address(frame), nbytes)
            self._arrived.append(Received(tag, slot.address, nbytes, partial(self._put, tag, slot, pool)))
        return len(self._waiting) < before

    def _release(self, tag: int, held: list[zmq.Frame]) -> None:
        held.clear()
        self._credit(tag)

    def _put(self, tag: int, slot: Slot, pool: SlotPool) -> None:
        pool.put(slot)
        self._credit(tag)

    def _credit(self, tag: int) -> None:
        if self._closed or self.error is not None:
            return
        try:
            self.socket.send(_CREDIT.pack(b"c", tag), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._fail(TransportError(f"zmq: the producer at {self._where} is gone: {error}"))

    def _fail(self, error: TransportError) -> None:
        if self.error is None:
            self.error = error
            self._waiting.clear()

    def _shut(self) -> None:
        unwatch(self.socket)  # before its reader goes, or libzmq blocks
        self.monitor.close()
        self.socket.close(0)


class ZmqPlane(Plane):
    """One ROUTER for all consumers, one DEALER per producer.

    Args:
        host: the local address that the ROUTER binds to.
        slot_bytes: size of a slot; peers with different sizes use the smaller one.
        staging_bytes: bound for P's slots, and for the frames that D holds; for a GPU half of it is for D's slots.
        configure: called with every socket before it binds (``True``) or connects (``False``).
        device: where the caches are.
    """

    name: ClassVar[str] = "zmq"

    def __init__(
        self,
        host: str,
        slot_bytes: int,
        staging_bytes: int,
        configure: ConfigureSocket | None,
        device: torch.device = CPU,
    ) -> None:
        gpu = device.type == "cuda"
        self._host = host
        self._configure = configure
        self._slot_bytes = slot_bytes
        self._pool = SlotPool(slot_bytes, staging_bytes, page_locked=gpu)
        self._recv_pool = SlotPool(slot_bytes, staging_bytes // 2, page_locked=True) if gpu else None
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
        return self._pool.allocated_bytes + (self._recv_pool.allocated_bytes if self._recv_pool is not None else 0)

    def offer(self) -> bytes:
        if self._bound is None:
            self._bind()
        return msgspec.msgpack.encode(_Offer(self._port))

    def connect(self, offer: bytes, host: str) -> tuple[RecvChannel, bytes]:
        theirs = decode_payload(offer, _Offer, "zmq offer")
        window = min(_WINDOW, (self._window_left + 1) // 2)
        if window < 1:
            raise PlaneUnavailableError(
                f"zmq: staging memory is used up by {len(self._receivers)} channels; raise staging_bytes"
            )
        channel = ZmqRecvChannel(self, host, theirs.port, window)
        self._window_left -= window
        self._receivers.add(channel)
        return channel, msgspec.msgpack.encode(_Attach(channel.id, self._slot_bytes, window))

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, _Attach, "zmq attach")
        if attach.channel in self._senders:
            raise ProtocolError("zmq attach: this channel exists already")
        if self._bound is None:
            raise TransportError("zmq: a consumer answers an offer that was never made")
        channel = ZmqSendChannel(self, attach)
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
        if now - self._last_progress > _PING_SECONDS:  # time without the processor is held against nobody
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
        if self._recv_pool is not None and self._recv_pool.free and any(c.starved for c in self._receivers):
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
        # Waits for libzmq's own thread, and for a CURVE gate's, so not here.
        threading.Thread(target=self._context.term, name="kvferry-zmq-term", daemon=True).start()

    def _socket(self, kind: int, *, server: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.ipv6 = ":" in self._host
        socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS
        socket.handshake_ivl = int(_CONNECT_SECONDS * 1e3)
        if self._configure is not None:
            self._configure(socket, server)
        return socket

    def _bind(self) -> None:
        socket = self._socket(zmq.ROUTER, server=True)
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

    def _router(self) -> zmq.Socket[bytes]:
        assert self._bound is not None
        return self._bound

    def _serve(self) -> bool:
        """Take in what consumers sent; what comes from nobody we know is dropped."""
        moved = False
        for _ in range(_BATCH):
            try:
                frames = self._router().recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            moved = True
            channel = self._senders.get(frames[0])
            if channel is not None and channel.error is None:
                channel.on_message(frames[1] if len(frames) == 2 else b"")
        assert self._bound_monitor is not None
        if self._bound_monitor.read():  # somebody left, and ZMQ does not say who
            moved = True
            self._watch_until = time.monotonic() + _DEATH_SECONDS
            self._next_ping = 0.0
        return moved

    def _return(self, slot: Slot, tracker: Any) -> None:
        """A slot without credit: free once ZMQ has let go of it."""
        self._busy.append((slot, tracker))

    def _returned(self, slot: Slot, tracker: Any) -> bool:
        if not tracker.done:
            return False
        self._pool.put(slot)
        return True


def _address(frame: zmq.Frame) -> int:
    """Of the first byte of a frame that is not empty."""
    return int(np.frombuffer(frame.buffer, dtype=np.uint8).ctypes.data)
