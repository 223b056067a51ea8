"""The two ends of a ZMQ channel, and their messages.

Frames after the routing id: P to D ``[b"m" + tag + nbytes, bytes]``, ``[b"p"]`` (ping) and ``[b"b"]`` (close);
D to P ``[b"h"]`` (hello) and ``[b"c" + tag]`` (credit). Numbers are little endian.
"""

from __future__ import annotations

import contextlib
import ctypes
import secrets
import struct
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from kvferry.transport.channels import ExpectingChannel, Received, SendChannel, Slot
from kvferry.transport.control.framing import url
from kvferry.transport.control.zap_auth import HANDSHAKE_FAILED, Monitor, unwatch
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError
from kvferry.transport.staging import SlotPool

if TYPE_CHECKING:
    from kvferry.transport.planes.zmq import ZmqPlane

_HEADER = struct.Struct("<cQQ")
"""Kind, tag, number of bytes."""
_CREDIT = struct.Struct("<cQ")
"""Kind, tag."""
CHANNEL_BYTES = 16
CURVE_BYTES = 64
"""CURVE adds 33 bytes to a frame (command name, nonce, flags, MAC: RFC 26). libzmq includes them in ``maxmsgsize``."""
CONNECT_SECONDS = 10.0
_LOST = int(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | HANDSHAKE_FAILED)


class ZmqSendChannel(SendChannel):
    """P's end. A slot is in use until D has returned its credit and ZMQ uses it no more."""

    def __init__(self, plane: ZmqPlane, channel: bytes, slot_bytes: int, window: int) -> None:
        self.slot_bytes = slot_bytes
        self.id = channel
        self._plane = plane
        self._window = window
        self._taken = 0
        self._sent: dict[int, tuple[Slot, Any]] = {}
        self._connected = False
        self._deadline = time.monotonic() + CONNECT_SECONDS
        self._closed = False

    def acquire(self) -> Slot | None:
        if self._closed or self.error is not None or not self._connected or self._taken >= self._window:
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
        head = [self.id, _HEADER.pack(b"m", tag, nbytes)]
        try:
            self._plane.router().send_multipart(head, zmq.SNDMORE | zmq.NOBLOCK)
            tracker = self._plane.router().send(data, zmq.NOBLOCK, copy=False, track=True)
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
            with contextlib.suppress(zmq.ZMQError):
                self._plane.router().send_multipart([self.id, b"b"], zmq.NOBLOCK)
            self._plane.drop(self)
            self._give_up()

    def on_message(self, frame: bytes) -> None:
        """Handle a hello or a credit."""
        if frame == b"h":
            self._connected = True
            return
        if len(frame) == _CREDIT.size and frame[:1] == b"c":
            sent = self._sent.pop(_CREDIT.unpack(frame)[1], None)
            if sent is not None:  # D has the whole message, so nothing reads the slot any more
                self.give_back(sent[0])
                return
        self.fail(f"zmq: the consumer sent {frame[:16]!r}, expected the credit of a message")

    def extend(self, seconds: float) -> None:
        """Give the consumer more time to connect."""
        self._deadline += seconds

    def ping(self, now: float) -> None:
        """Find out whether the consumer is there: ZMQ notices its absence only when something is sent to it."""
        if self.error is not None:
            return
        try:
            self._plane.router().send_multipart([self.id, b"p"], zmq.NOBLOCK)
            self._connected = True
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            if self._connected:
                self.fail(f"zmq: the consumer closed the channel or died: {error}")
            elif now > self._deadline:
                self.fail(f"zmq: the consumer did not connect within {CONNECT_SECONDS:g} s")

    def _give_up(self) -> None:
        for sent in self._sent.values():
            self._taken -= 1
            self._plane.put_later(*sent)
        self._sent.clear()


class ZmqRecvChannel(ExpectingChannel):
    """D's end. ``_waiting``: messages that are here and wait for a page-locked slot."""

    encrypted = True

    def __init__(self, plane: ZmqPlane, host: str, port: int, key: bytes, window: int) -> None:
        super().__init__()
        self._plane = plane
        self.id = b"k" + secrets.token_bytes(CHANNEL_BYTES - 1)  # ZMQ reserves ids that start with 0
        self.window = window
        self._waiting: deque[tuple[int, zmq.Frame]] = deque()
        self._closed = False
        self._deadline: float | None = time.monotonic() + CONNECT_SECONDS
        self._where = f"{host}:{port}"
        self.socket = plane.socket(zmq.DEALER, key)
        self.socket.routing_id = self.id
        self.socket.rcvhwm = window + 8
        self.socket.maxmsgsize = plane.slot_bytes + CURVE_BYTES
        self.socket.reconnect_ivl = -1  # the producer listens already; a lost connection stays lost
        self.monitor = Monitor(self.socket, _LOST)
        self.socket.ipv6 = ":" in host
        try:
            self.socket.connect(url(host, port))
            self.socket.send(b"h", zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._shut()
            raise PlaneUnavailableError(f"zmq: the producer at {self._where} cannot be reached: {error}") from None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._waiting.clear()
            self.release_arrived()
            self._plane.drop(self)
            self._shut()

    def progress(self) -> bool:
        """Receive the messages of the producer; ``True`` if there were any."""
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
                self.fail(str(error))
            if self.error is not None:
                return True
        for event, _ in self.monitor.read():
            moved = True
            reason = (
                "closed the channel or died" if event == zmq.EVENT_DISCONNECTED else "cannot be reached, or refused"
            )
            self.fail(f"zmq: the producer at {self._where} {reason}")
        return moved

    @property
    def starved(self) -> bool:
        """Whether a received message waits for a slot."""
        return bool(self._waiting) and self.error is None

    def extend(self, seconds: float) -> None:
        """Give the producer more time to answer."""
        if self._deadline is not None:
            self._deadline += seconds

    def check(self, now: float) -> None:
        """Fail where the producer has never answered."""
        if self._deadline is not None and now > self._deadline:
            self.fail(f"zmq: the producer at {self._where} did not answer within {CONNECT_SECONDS:g} s")

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        self._deadline = None
        head = frames[0].bytes
        if len(frames) == 1 and head == b"p":
            return
        if len(frames) == 1 and head == b"b":
            self.fail(f"zmq: the producer at {self._where} closed the channel")
            return
        if len(frames) != 2 or len(head) != _HEADER.size or head[:1] != b"m":
            raise ProtocolError(f"zmq: the producer sent {len(frames)} frames, the first is {head[:16]!r}")
        _, tag, nbytes = _HEADER.unpack(head)
        frame = frames[1]
        if len(frame) != nbytes or not nbytes:
            raise ProtocolError(f"zmq: message {tag:#x} has {len(frame)} bytes, its header has {nbytes}")
        expected = self.expected.get(tag)
        if expected is None:  # forgotten, or never announced
            self._credit(tag)
        elif expected.nbytes != nbytes:
            raise ProtocolError(f"zmq: message {tag:#x} has {nbytes} bytes, expected {expected.nbytes}")
        elif self._plane.recv_pool is not None:
            if len(self._waiting) >= self.window:
                raise ProtocolError(f"zmq: the producer sent more than {self.window} messages without credit")
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
        if self._closed or self.error is not None:
            return
        try:
            self.socket.send(_CREDIT.pack(b"c", tag), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.fail(f"zmq: the producer at {self._where} is gone: {error}")

    def _give_up(self) -> None:
        self._waiting.clear()

    def _shut(self) -> None:
        unwatch(self.socket)  # before the monitor closes, or libzmq blocks
        self.monitor.close()
        self.socket.close(0)


def _address(frame: zmq.Frame) -> int:
    """The address of the first byte of a frame that is not empty."""
    return int(np.frombuffer(frame.buffer, dtype=np.uint8).ctypes.data)
