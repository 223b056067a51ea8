"""The ZMQ data plane: slots travel as encrypted ZMQ messages, without copies by KVFerry.

Each channel is a pair of PAIR sockets with CURVE keys of its own, which P makes, and which the control connection
carries: who knows P's public key is the D of this session. ZMQ sends straight from P's slot, and D unpacks straight
from the frame that ZMQ received into. A GPU cannot read frames, so for its kernels D copies each frame into a
page-locked slot.

Credits bound the memory of both sides: P sends ``window`` messages, and one more for each that D has released. So no
queue of libzmq has a bound, and none ever stops its input: libzmq ends the process where a connection ends while its
input is stopped (stream_engine_base.cpp, ``_io_error``).

Frames: P to D ``[b"m" + tag + nbytes, bytes]``; D to P ``[b"h"]`` (hello) and ``[b"c" + tag]`` (credit). Numbers are
little endian.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import zmq
from msgspec import Meta
from zmq.utils import z85

from kvferry.transport.channels import DChannel, Received, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import PlaneContext, decode_payload
from kvferry.transport.planes.push import PushPlane, PushReceiver, WindowedSender
from kvferry.transport.sockets import SILENCE_SECONDS
from kvferry.transport.staging import SlotPool

_WINDOW = 8
"""Messages of one channel between P's pack and D's unpack; fewer where D's staging memory is short."""
MOST_SOCKETS = 16384
HEADER = struct.Struct("<cQQ")
"""Kind, tag, number of bytes."""
CREDIT = struct.Struct("<cQ")
"""Kind, tag."""
_EVENT = struct.Struct("=HI")
"""The first frame of a monitor's message: event, value (zmq_socket_monitor(3))."""
_CURVE_BYTES = 64
"""CURVE adds 33 bytes to a frame (command name, nonce, flags, MAC: RFC 26). libzmq includes them in ``maxmsgsize``."""
_MAX_CREDIT_BYTES = 4096
"""Bound on a message from D to P. A credit takes 9 bytes, a message of the CURVE handshake some hundred."""
CONNECT_SECONDS = 10.0
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_POLLIN = int(zmq.POLLIN)
_serial = itertools.count()


_contexts: set[zmq.Context[zmq.Socket[bytes]]] = set()
"""Those that have not ended. One that became garbage together with its sockets would hang the thread that collects it:
its finalizer waits until they are closed."""


class ZmqAttach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)]
    window: Annotated[int, Meta(ge=1, le=1024)]


class ZmqReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    port: Annotated[int, Meta(ge=1, le=65535)]
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]


class ZmqEnd:
    """One PAIR socket, and a monitor of its connection. Raises zmq.ZMQError where there is none.

    No heartbeat of libzmq: TCP notices a host that is gone, and the control plane a peer that does not answer.
    """

    def __init__(self, plane: ZmqPlane, max_message_bytes: int, ipv6: bool, events: int) -> None:
        self.socket: zmq.Socket[bytes] = plane.zmq.socket(zmq.PAIR)
        self.socket.linger = 0
        self.socket.ipv6 = ipv6
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.maxmsgsize = max_message_bytes + _CURVE_BYTES
        self.socket.handshake_ivl = int(CONNECT_SECONDS * 1e3)
        self.socket.tcp_keepalive, self.socket.tcp_keepalive_idle = 1, 5
        self.socket.tcp_keepalive_intvl, self.socket.tcp_keepalive_cnt = 5, 3
        self.socket.tcp_maxrt = int(SILENCE_SECONDS * 1e3)
        self.socket.reconnect_ivl = -1  # a lost connection stays lost
        address = f"inproc://kvferry-monitor-{next(_serial)}"
        self.socket.monitor(address, events)
        self._monitor: zmq.Socket[bytes] = plane.zmq.socket(zmq.PAIR)
        self._monitor.linger = self._monitor.rcvhwm = 0  # an event that is not taken would block libzmq's thread
        self._monitor.connect(address)

    def fds(self) -> list[int]:
        """Readable where there may be news."""
        return [] if self.socket.closed else [int(self.socket.fd), int(self._monitor.fd)]

    @property
    def has_news(self) -> bool:
        """Whether a message or an event waits."""
        return not self.socket.closed and (_readable(self.socket) or _readable(self._monitor))

    def events(self) -> list[tuple[int, int]]:
        """The events that have come, each with its value: for ACCEPTED and DISCONNECTED the descriptor."""
        found = []
        while _readable(self._monitor):
            found.append(_EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0]))
        return found

    def close(self) -> None:
        if not self.socket.closed:
            self.socket.monitor(None, 0)  # before the monitor closes, or libzmq blocks
            self._monitor.close(0)
            self.socket.close(0)


def _readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & _POLLIN)


class ZmqSendChannel(WindowedSender):
    """P's end. A slot is in use until D has returned its credit and ZMQ uses it no more."""

    starved = False

    def __init__(self, plane: ZmqPlane, secret: bytes, slot_bytes: int, window: int) -> None:
        super().__init__(plane.send_pool, slot_bytes, window)
        self._plane = plane
        self._by_tag: dict[int, tuple[Slot, Any]] = {}  # the slots that were sent, and ZMQ's trackers of them
        self._fd: int | None = None  # of D's connection, once its hello has come
        self._connections: set[int] = set()  # the descriptors of all of them, also those of strangers
        self._deadline = time.monotonic() + CONNECT_SECONDS
        self.end = ZmqEnd(plane, _MAX_CREDIT_BYTES, ":" in plane.host, int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED))
        self.end.socket.curve_server = True
        self.end.socket.curve_secretkey = secret
        host = f"[{plane.host}]" if ":" in plane.host else plane.host
        try:
            self.end.socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError:
            self.end.close()
            raise
        self.port = int(self.end.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @property
    def open(self) -> bool:
        return super().open and self._fd is not None

    def progress(self) -> bool:
        """Take the decode rank's messages, and look whether it is there; ``True`` if there was anything."""
        moved = False
        for _ in range(2 * self.window):
            try:
                frame = self.end.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                break
            moved = True
            self.on_message(frame)
            if self.error is not None:
                return True
        for event, fd in self.end.events():
            moved = True
            (self._connections.add if event == zmq.EVENT_ACCEPTED else self._connections.discard)(fd)
        if self._fd is None and time.monotonic() > self._deadline:
            self.fail(f"zmq: the decode rank did not connect within {CONNECT_SECONDS:g} s")
        elif self._fd is not None and self._fd not in self._connections:
            self.fail("zmq: the decode rank closed the channel or died")
        return moved

    def on_message(self, frame: zmq.Frame) -> None:
        """Handle a hello or a credit."""
        said = frame.bytes
        if said == b"h" and self._fd is None:
            self._fd = int(frame.get("__fd"))
            return
        if len(said) == CREDIT.size and said[:1] == b"c":
            sent = self._by_tag.pop(CREDIT.unpack(said)[1], None)
            if sent is not None:  # D has the whole message, so nothing reads the slot any more
                self.free(sent[0].index)
                return
        self.fail(f"zmq: the decode rank sent {said[:16]!r}, expected the credit of a message")

    def _transmit(self, slot: Slot, nbytes: int, tag: int) -> None:
        if tag in self._by_tag:  # D has asked again under one number, and holds the credit of the first message
            self.fail(f"zmq: message {tag:#x} is under way already")
            self.free(slot.index)
            return
        data = memoryview(slot.tensor.numpy())[:nbytes]  # type: ignore[arg-type]
        try:
            self.end.socket.send(HEADER.pack(b"m", tag, nbytes), zmq.SNDMORE | zmq.NOBLOCK)
            tracker = self.end.socket.send(data, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            self.fail(f"zmq: the decode rank is gone: {error}")
            self.free(slot.index)
            return
        self._by_tag[tag] = (slot, tracker)

    def _give_up(self) -> None:
        for slot, tracker in self._by_tag.values():
            del self.sent[slot.index]
            self._plane.busy.append((slot, tracker))
        self._by_tag.clear()

    def _close(self) -> None:
        self._plane.drop(self)
        self._give_up()
        self.end.close()


class ZmqRecvChannel(PushReceiver):
    """D's end. ``_waiting``: messages that are here and wait for a page-locked slot."""

    plane_name = "zmq"
    encrypted = True

    def __init__(self, plane: ZmqPlane, host: str, window: int) -> None:
        super().__init__()
        self._plane = plane
        self.window = window
        self._waiting: deque[tuple[int, zmq.Frame]] = deque()
        self._held = 0  # messages without a credit
        self.deadline = math.inf
        self._host = self._where = host
        lost = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED
        self.end = ZmqEnd(plane, plane.slot_bytes, ":" in host, int(lost))

    def open(self, port: int, key: bytes) -> None:
        """Connect to P. Raises zmq.ZMQError."""
        self._where = f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"
        self.deadline = time.monotonic() + CONNECT_SECONDS
        self.end.socket.curve_publickey, self.end.socket.curve_secretkey = zmq.curve_keypair()
        self.end.socket.curve_serverkey = z85.encode(key)
        self.end.socket.connect(f"tcp://{self._where}")
        with contextlib.suppress(zmq.Again):  # P has refused it already, as ``progress`` will see
            self.end.socket.send(b"h", zmq.NOBLOCK)

    def _close(self) -> None:
        self._waiting.clear()
        self.release_arrived()
        self._plane.drop(self)
        self.end.close()

    def progress(self) -> bool:
        """Receive the messages of the prefill rank; ``True`` if there were any."""
        moved = self._copy_waiting()
        for _ in range(2 * self.window):
            try:
                frames = self.end.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                break
            moved = True
            try:
                self.on_message(frames)
            except ProtocolError as error:
                self.fail(str(error))
            if self.error is not None:
                return True
        for event, _ in self.end.events():
            moved = True
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.deadline = math.inf
                continue
            died = event == zmq.EVENT_DISCONNECTED
            reason = "closed the channel or died" if died else "cannot be reached, or refused"
            self.fail(f"zmq: the prefill rank at {self._where} {reason}")
        if time.monotonic() > self.deadline:
            self.fail(f"zmq: the prefill rank at {self._where} did not answer within {CONNECT_SECONDS:g} s")
        return moved

    @property
    def starved(self) -> bool:
        """Whether a received message waits for a slot."""
        return bool(self._waiting) and self.error is None

    def on_message(self, frames: list[zmq.Frame]) -> None:
        head = frames[0].bytes
        if len(frames) != 2 or len(head) != HEADER.size or head[:1] != b"m":
            raise ProtocolError(f"zmq: the prefill rank sent {len(frames)} frames, the first is {head[:16]!r}")
        _, tag, nbytes = HEADER.unpack(head)
        frame = frames[1]
        self._held += 1
        if self._held > self.window:
            raise ProtocolError(f"zmq: the prefill rank sent more than {self.window} messages without credit")
        if len(frame) != nbytes or not nbytes:
            raise ProtocolError(f"zmq: message {tag:#x} has {len(frame)} bytes, its header has {nbytes}")
        if self.check_size(tag, nbytes) is None:  # forgotten, or never announced
            self._credit(tag)
        elif self._plane.copies_frames:
            self._waiting.append((tag, frame))
            self._copy_waiting()
        else:
            del self.expected[tag]
            held = [frame]  # the frame owns the bytes until it is released
            self.arrived.append(Received(tag, _address(frame), nbytes, partial(self._release, tag, held.clear)))

    def _copy_waiting(self) -> bool:
        """Copy waiting messages into slots for as long as slots are free. Returns whether it handled any message."""
        before, pool = len(self._waiting), self._plane.recv_pool
        while self._waiting:
            tag, frame = self._waiting[0]
            if tag not in self.expected:  # forgotten meanwhile
                self._waiting.popleft()
                self._credit(tag)
                continue
            try:
                slot = pool.take()
            except Exception as error:  # no page-locked memory: only this channel fails
                self.fail(f"zmq: no staging slot can be had: {error}")
                self._waiting.clear()
                break
            if slot is None:
                break
            self._waiting.popleft()
            nbytes = self.expected.pop(tag).nbytes
            ctypes.memmove(slot.address, _address(frame), nbytes)
            release = partial(self._release, tag, partial(pool.put, slot))
            self.arrived.append(Received(tag, slot.address, nbytes, release))
        return len(self._waiting) < before

    def _release(self, tag: int, free: Callable[[], None]) -> None:
        free()
        self._credit(tag)

    def _credit(self, tag: int) -> None:
        self._held -= 1
        if self.closed or self.error is not None:
            return
        try:
            self.end.socket.send(CREDIT.pack(b"c", tag), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.fail(f"zmq: the prefill rank at {self._where} is gone: {error}")

    def _give_up(self) -> None:
        self._waiting.clear()


def _address(frame: zmq.Frame) -> int:
    """The address of the first byte of a frame that is not empty."""
    return int(np.frombuffer(frame.buffer, dtype=np.uint8).ctypes.data)


ZmqChannel = ZmqSendChannel | ZmqRecvChannel


class ZmqPlane(PushPlane):
    """``context.staging_bytes`` bounds P's slots, and the frames that D holds; for caches on a GPU half of these bytes
    is for D's slots. ``busy``: slots for which no credit will come, each with the tracker that says when ZMQ needs it
    no more."""

    name: ClassVar[str] = "zmq"

    def __init__(self, context: PlaneContext) -> None:
        if not zmq.has("curve"):
            raise PlaneUnavailableError("zmq: this libzmq has no CURVE; install pyzmq from PyPI")
        slot_bytes, staging_bytes = context.slot_bytes, context.staging_bytes
        super().__init__(slot_bytes)
        gpu = context.memory.device.type == "cuda"
        self.send_pool = SlotPool(slot_bytes, staging_bytes, page_locked=gpu)
        self.recv_pool = SlotPool(slot_bytes, staging_bytes // 2, page_locked=gpu)
        self.copies_frames = gpu
        self.host = context.host
        self._window_left = max(1, (staging_bytes // 2 if gpu else staging_bytes) // slot_bytes)
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        self.zmq.max_sockets = MOST_SOCKETS
        _contexts.add(self.zmq)
        self.busy: list[tuple[Slot, Any]] = []

    def offer(self) -> bytes:
        return b""

    def connect(self, offer: bytes, host: str) -> tuple[ZmqRecvChannel, bytes]:
        if offer:
            raise ProtocolError(f"zmq: the offer has {len(offer)} bytes, expected none")
        window = min(_WINDOW, (self._window_left + 1) // 2)
        if window < 1:
            raise PlaneUnavailableError(
                f"zmq: staging memory is used up by {len(self.channels)} channels; raise staging_bytes"
            )
        try:
            channel = ZmqRecvChannel(self, host, window)
        except zmq.ZMQError as error:
            raise PlaneUnavailableError(f"zmq: no socket can be had: {error}") from None
        self._window_left -= window
        self.channels[channel] = None
        return channel, msgspec.msgpack.encode(ZmqAttach(self.slot_bytes, window))

    def accept(self, payload: bytes) -> tuple[ZmqSendChannel, bytes]:
        attach = decode_payload(payload, ZmqAttach, "zmq attach")
        public, secret = zmq.curve_keypair()
        try:
            channel = ZmqSendChannel(self, secret, min(self.slot_bytes, attach.slot_bytes), min(attach.window, _WINDOW))
        except zmq.ZMQError as error:
            raise TransportError(f"zmq: no socket can be had on {self.host}: {error}") from None
        self.channels[channel] = None
        return channel, msgspec.msgpack.encode(ZmqReply(channel.port, z85.decode(public)))

    def finish(self, channel: DChannel, reply: bytes) -> None:
        assert isinstance(channel, ZmqRecvChannel)
        theirs = decode_payload(reply, ZmqReply, "zmq reply")
        try:
            channel.open(theirs.port, theirs.key)
        except zmq.ZMQError as error:
            raise PlaneUnavailableError(f"zmq: no socket can be had: {error}") from None

    @property
    def _ends(self) -> list[ZmqChannel]:
        return [channel for channel in self.channels if isinstance(channel, ZmqChannel)]

    def pollables(self) -> list[tuple[int, int]]:
        return [(fd, select.POLLIN) for channel in self._ends for fd in channel.end.fds()]

    def progress(self) -> bool:
        moved = False
        for channel in self._ends:
            if channel.error is None:
                moved |= channel.progress()
        for sent in [sent for sent in self.busy if sent[1].done]:
            self.busy.remove(sent)
            self.send_pool.put(sent[0])
        return moved

    def arm(self) -> bool:
        """A descriptor of libzmq tells of news once; afterwards its socket must be asked."""
        live = [channel for channel in self._ends if channel.error is None]
        return not any(channel.end.has_news or (self.recv_pool.free and channel.starved) for channel in live)

    def _close(self) -> None:
        # ``term`` waits for libzmq's own thread, so another thread calls it.
        threading.Thread(target=self._end_context, name="kvferry-zmq-term", daemon=True).start()

    def _end_context(self) -> None:
        self.zmq.term()
        _contexts.discard(self.zmq)

    def drop(self, channel: ZmqChannel) -> None:
        """Forget a closed channel."""
        del self.channels[channel]
        self._window_left += channel.window if isinstance(channel, ZmqRecvChannel) else 0
