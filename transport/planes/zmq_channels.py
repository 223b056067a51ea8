"""The two ends of a ZMQ channel, and their messages.

Frames: P to D ``[b"m" + tag + nbytes, bytes]``; D to P ``[b"h"]`` (hello) and ``[b"c" + tag]`` (credit). Numbers are
little endian.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq
from zmq.utils import z85

from kvferry.transport.channels import ExpectingChannel, Received, SendChannel, Slot
from kvferry.transport.errors import ProtocolError
from kvferry.transport.sockets import SILENCE_SECONDS
from kvferry.transport.staging import SlotPool

if TYPE_CHECKING:
    from kvferry.transport.planes.zmq import ZmqPlane

_HEADER = struct.Struct("<cQQ")
"""Kind, tag, number of bytes."""
_CREDIT = struct.Struct("<cQ")
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


class End:
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


class ZmqSendChannel(SendChannel):
    """P's end. A slot is in use until D has returned its credit and ZMQ uses it no more."""

    starved = False

    def __init__(self, plane: ZmqPlane, secret: bytes, slot_bytes: int, window: int) -> None:
        self.slot_bytes = slot_bytes
        self._plane = plane
        self._window = window
        self._taken = 0
        self._sent: dict[int, tuple[Slot, Any]] = {}
        self._fd: int | None = None  # of D's connection, once its hello has come
        self._open: set[int] = set()  # the descriptors of all connections, also those of strangers
        self._deadline = time.monotonic() + CONNECT_SECONDS
        self._closed = False
        self.end = End(plane, _MAX_CREDIT_BYTES, ":" in plane.host, int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED))
        self.end.socket.curve_server = True
        self.end.socket.curve_secretkey = secret
        host = f"[{plane.host}]" if ":" in plane.host else plane.host
        try:
            self.end.socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError:
            self.end.close()
            raise
        self.port = int(self.end.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def acquire(self) -> Slot | None:
        if self._closed or self.error is not None or self._fd is None or self._taken >= self._window:
            return None
        slot = self._plane.send_pool.take()
        self._taken += slot is not None
        return slot

    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        assert 0 < nbytes <= slot.nbytes
        if self._closed or self.error is not None:
            self.give_back(slot)
            return
        data = memoryview(slot.tensor.numpy())[:nbytes]  # type: ignore[arg-type]
        try:
            self.end.socket.send(_HEADER.pack(b"m", tag, nbytes), zmq.SNDMORE | zmq.NOBLOCK)
            tracker = self.end.socket.send(data, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            self.fail(f"zmq: the consumer is gone: {error}")
            self.give_back(slot)
            return
        self._sent[tag] = (slot, tracker)

    def give_back(self, slot: Slot) -> None:
        self._taken -= 1
        self._plane.send_pool.put(slot)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._plane.drop(self)
            self._give_up()
            self.end.close()

    def progress(self) -> bool:
        """Take the consumer's messages, and look whether it is there; ``True`` if there was anything."""
        moved = False
        for _ in range(2 * self._window):
            try:
                frame = self.end.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                break
            moved = True
            self._on_message(frame)
            if self.error is not None:
                return True
        for event, fd in self.end.events():
            moved = True
            (self._open.add if event == zmq.EVENT_ACCEPTED else self._open.discard)(fd)
        if self._fd is not None and self._fd not in self._open:
            self.fail("zmq: the consumer closed the channel or died")
        if self._fd is None and time.monotonic() > self._deadline:
            self.fail(f"zmq: the consumer did not connect within {CONNECT_SECONDS:g} s")
        return moved

    def _on_message(self, frame: zmq.Frame) -> None:
        """Handle a hello or a credit."""
        said = frame.bytes
        if said == b"h" and self._fd is None:
            self._fd = int(frame.get("__fd"))
            return
        if len(said) == _CREDIT.size and said[:1] == b"c":
            sent = self._sent.pop(_CREDIT.unpack(said)[1], None)
            if sent is not None:  # D has the whole message, so nothing reads the slot any more
                self.give_back(sent[0])
                return
        self.fail(f"zmq: the consumer sent {said[:16]!r}, expected the credit of a message")

    def _give_up(self) -> None:
        for sent in self._sent.values():
            self._taken -= 1
            self._plane.put_later(*sent)
        self._sent.clear()


class ZmqRecvChannel(ExpectingChannel):
    """D's end. ``_waiting``: messages that are here and wait for a page-locked slot."""

    encrypted = True

    def __init__(self, plane: ZmqPlane, host: str, window: int) -> None:
        super().__init__()
        self._plane = plane
        self.window = window
        self._waiting: deque[tuple[int, zmq.Frame]] = deque()
        self._held = 0  # messages without a credit
        self._closed = False
        self._deadline: float | None = None
        self._host = self._where = host
        lost = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED
        self.end = End(plane, plane.slot_bytes, ":" in host, int(lost))

    def open(self, port: int, key: bytes) -> None:
        """Connect to P. Raises zmq.ZMQError."""
        self._where = f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"
        self._deadline = time.monotonic() + CONNECT_SECONDS
        self.end.socket.curve_publickey, self.end.socket.curve_secretkey = zmq.curve_keypair()
        self.end.socket.curve_serverkey = z85.encode(key)
        self.end.socket.connect(f"tcp://{self._where}")
        self.end.socket.send(b"h", zmq.NOBLOCK)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            self.release_arrived()
            self._plane.drop(self)
            self.end.close()

    def progress(self) -> bool:
        """Receive the messages of the producer; ``True`` if there were any."""
        moved = self._copy_waiting()
        for _ in range(2 * self.window):
            try:
                frames = self.end.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                break
            moved = True
            try:
                self._on_message(frames)
            except ProtocolError as error:
                self.fail(str(error))
            if self.error is not None:
                return True
        for event, _ in self.end.events():
            moved = True
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._deadline = None
                continue
            reason = (
                "closed the channel or died" if event == zmq.EVENT_DISCONNECTED else "cannot be reached, or refused"
            )
            self.fail(f"zmq: the producer at {self._where} {reason}")
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.fail(f"zmq: the producer at {self._where} did not answer within {CONNECT_SECONDS:g} s")
        return moved

    @property
    def starved(self) -> bool:
        """Whether a received message waits for a slot."""
        return bool(self._waiting) and self.error is None

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        head = frames[0].bytes
        if len(frames) != 2 or len(head) != _HEADER.size or head[:1] != b"m":
            raise ProtocolError(f"zmq: the producer sent {len(frames)} frames, the first is {head[:16]!r}")
        _, tag, nbytes = _HEADER.unpack(head)
        frame = frames[1]
        self._held += 1
        if self._held > self.window:
            raise ProtocolError(f"zmq: the producer sent more than {self.window} messages without credit")
        if len(frame) != nbytes or not nbytes:
            raise ProtocolError(f"zmq: message {tag:#x} has {len(frame)} bytes, its header has {nbytes}")
        expected = self.expected.get(tag)
        if expected is None:  # forgotten, or never announced
            self._credit(tag)
        elif expected.nbytes != nbytes:
            raise ProtocolError(f"zmq: message {tag:#x} has {nbytes} bytes, expected {expected.nbytes}")
        elif self._plane.recv_pool is not None:
            self._waiting.append((tag, frame))
            self._copy_waiting()
        else:
            del self.expected[tag]
            held = [frame]  # the frame owns the bytes until it is released
            self.arrived.append(Received(tag, _address(frame), nbytes, partial(self._release, tag, held)))

    def _copy_waiting(self) -> bool:
        """Copy waiting messages into slots for as long as slots are free. Returns whether it handled any message."""
        before, pool = len(self._waiting), self._plane.recv_pool
        while self._waiting and pool is not None:
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
            self.arrived.append(Received(tag, slot.address, nbytes, partial(self._put, tag, slot, pool)))
        return len(self._waiting) < before

    def _release(self, tag: int, held: list[zmq.Frame]) -> None:
        held.clear()
        self._credit(tag)

    def _put(self, tag: int, slot: Slot, pool: SlotPool) -> None:
        pool.put(slot)
        self._credit(tag)

    def _credit(self, tag: int) -> None:
        self._held -= 1
        if self._closed or self.error is not None:
            return
        try:
            self.end.socket.send(_CREDIT.pack(b"c", tag), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.fail(f"zmq: the producer at {self._where} is gone: {error}")

    def _give_up(self) -> None:
        self._waiting.clear()


def _address(frame: zmq.Frame) -> int:
    """The address of the first byte of a frame that is not empty."""
    return int(np.frombuffer(frame.buffer, dtype=np.uint8).ctypes.data)
