"""The two ends of a TCP channel: one stream of messages, one after the other."""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvferry.transport.channels import ExpectingChannel, Pieces, Received, Slot
from kvferry.transport.planes.tcp_cipher import TAG_BYTES, Cipher
from kvferry.transport.planes.tcp_messages import HEADER, Arriving, Outgoing, byte, together
from kvferry.transport.planes.vectors import Vector, repeated
from kvferry.transport.socket_plane import CONNECT_SECONDS, AwaitedChannel
from kvferry.transport.sockets import ENDED, EXHAUSTED, READABLE, SILENCE_SECONDS, WRITABLE, tune

if TYPE_CHECKING:
    from kvferry.transport.planes.tcp import TcpPlane

logger = logging.getLogger("vllm.kvferry.tcp")

_BYTES_PER_TURN = 32 << 20
"""Bytes moved on one channel before the other channels are served."""


class TcpSendChannel(AwaitedChannel):
    """P's end. One message is on its way at a time; nothing can be sent before D's connection has arrived.

    ``_taken`` counts the slots that are being packed, ``_waiting`` holds the slots that were sent meanwhile. With a
    ``cipher`` every message goes through a slot, where it is encrypted.
    """

    def __init__(self, plane: TcpPlane, channel: bytes, slot_bytes: int, cipher: Cipher | None = None) -> None:
        super().__init__(channel, slot_bytes)
        self.sends_in_place = cipher is None
        self._cipher = cipher
        self.sock: socket.socket | None = None
        self._plane = plane
        self._message: Outgoing | None = None
        self._taken = 0
        self._waiting: deque[tuple[Slot, int, int]] = deque()
        self._closed = False

    @property
    def reading(self) -> int | None:
        message = self._message
        return message.tag if message is not None and message.paged else None

    def connected(self, sock: socket.socket) -> None:
        """D's connection has arrived."""
        self.sock = sock
        # Ends the stream at once when this process ends: otherwise the kernel would first deliver the unsent bytes, and
        # a D that takes no bytes at that time would not notice our death.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        tune(sock)
        self._plane.sockets.watch(sock, self.on_readable)

    def acquire(self) -> Slot | None:
        used = self._taken + len(self._waiting) + (self._message is not None)
        if not self._open or used >= self._plane.window:
            return None
        slot = self._plane.send_pool.take()
        self._taken += slot is not None
        return slot

    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        assert 0 < nbytes <= slot.nbytes
        if not self._open:  # the connection broke after ``acquire``
            self.give_back(slot)
            return
        self._taken -= 1
        self._waiting.append((slot, nbytes, tag))
        self._go_on()

    def send_pieces(self, pieces: Callable[[], Pieces], tag: int) -> bool:
        if self._cipher is not None:
            return super().send_pieces(pieces, tag)
        if not self.ready:
            return False
        self._message = Outgoing(tag, pieces(), None)
        self._write()
        return True

    def give_back(self, slot: Slot) -> None:
        self._taken -= 1
        self._plane.send_pool.put(slot)

    def stop_reading(self) -> None:
        message = self._message
        if message is not None and message.paged:  # the stream goes on, and its last byte marks the message
            message.stop_reading(partial(repeated, self._plane.zeros))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._forget_messages()
            self._plane.drop(self, self.sock)

    def _give_up(self) -> None:
        self._forget_messages()
        if self.sock is not None:
            self._plane.sockets.mute(self.sock)

    def on_readable(self) -> None:
        """D sends nothing, so its stream has ended."""
        assert self.sock is not None
        try:
            data = self.sock.recv(256)
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(f"tcp: the consumer is gone: {error.strerror}")
            return
        self.fail("tcp: the consumer sent what it may not" if data else "tcp: the consumer closed the channel or died")

    @property
    def ready(self) -> bool:
        """Whether a message may begin now."""
        return self._open and self._message is None and not self._waiting

    @property
    def _open(self) -> bool:
        return self.sock is not None and self.error is None and not self._closed

    def _go_on(self) -> None:
        """Send the waiting messages for as long as the socket takes bytes."""
        while self._open and self._message is None and self._waiting:
            slot, nbytes, tag = self._waiting[0]
            if self._cipher is not None:
                nbytes = self._cipher.seal(slot, nbytes, HEADER.pack(tag, nbytes + TAG_BYTES))
            del self._waiting[0]
            self._message = Outgoing(tag, Pieces(np.array([slot.address]), np.array([nbytes])), slot)
            self._write()

    def _write(self) -> None:
        message, sock = self._message, self.sock
        assert sock is not None
        if message is None:
            return
        try:
            while message.vector.left:
                message.vector.send(sock)
                if message.vector.short:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(f"tcp: the consumer is gone: {error.strerror}")
            return
        if message.vector.left:
            self._plane.sockets.watch(sock, self._on_writable, READABLE | WRITABLE)
            return
        self._forget_message()
        self._plane.sockets.watch(sock, self.on_readable)

    def _on_writable(self) -> object:
        self._write()
        self._go_on()
        if self.error is None and not self._closed:
            self.on_readable()
        return EXHAUSTED

    def _forget_message(self) -> None:
        message, self._message = self._message, None
        if message is not None and message.slot is not None:
            self._plane.send_pool.put(message.slot)

    def _forget_messages(self) -> None:
        self._forget_message()
        for slot, _, _ in self._waiting:
            self._plane.send_pool.put(slot)
        self._waiting.clear()


class TcpRecvChannel(ExpectingChannel):
    """D's end. It receives a message into the memory of ``into``, or into a slot."""

    def __init__(self, plane: TcpPlane, sock: socket.socket, hello: bytes) -> None:
        super().__init__()
        self.cipher: Cipher | None = None  # P's answer may bring one
        self._plane = plane
        self._sock = sock
        self._hello = hello
        self.deadline = time.monotonic() + CONNECT_SECONDS
        self._header = np.zeros(HEADER.size, dtype=np.uint8)
        self._whole = np.zeros(1, dtype=np.uint8)  # the last byte of the last message
        self._head = self._new_head()
        self._arriving: Arriving | None = None
        self._received_at = 0.0
        self._closed = False
        plane.sockets.watch(sock, self.on_connected, WRITABLE)

    def forget(self, tag: int) -> None:
        self.stop_writing(tag)
        super().forget(tag)
        if self._arriving is not None and self._arriving.tag == tag:
            self._arriving.reported = None

    def stop_writing(self, tag: int) -> None:
        expected = self.expected.get(tag)
        if expected is not None:
            expected.into = partial(self._plane.nowhere, expected.nbytes)
        arriving = self._arriving
        if arriving is not None and arriving.tag == tag and arriving.slot is None and arriving.vector.left > 1:
            arriving.vector = Vector(together(self._plane.nowhere(arriving.vector.left - 1), byte(self._whole)))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._plane.drop(self, self._sock)
            self.release_arrived()
            self._drop_arriving()

    def _give_up(self) -> None:
        self._plane.sockets.mute(self._sock)
        self._drop_arriving()

    @property
    def starved(self) -> bool:
        """A message is here and there is no slot for it."""
        return self._head.left == 0 and self._arriving is None and self.error is None

    def check(self, now: float) -> bool:
        """Fail where no connection is made in time, or P stopped in the middle of a message. Where a message waited for
        a slot and a slot is free now, go on. Returns whether it went on."""
        if self.error is not None:
            return False
        if self._hello and now > self.deadline:
            waited = f"{CONNECT_SECONDS:g} s"
            self.fail(f"tcp: no connection to the producer's data port in {waited}; is a firewall between?")
        elif self.starved:
            if self._begin():
                self._plane.sockets.watch(self._sock, self.on_readable)
                self.on_readable()
                return True
        elif (self._arriving is not None or self._head.done) and now > self._received_at + SILENCE_SECONDS:
            self.fail(f"tcp: the producer stopped in the middle of a message, {SILENCE_SECONDS} s ago")
        return False

    def on_connected(self) -> None:
        """The connection exists, or could not be made: send the secret."""
        number = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if number:
                raise OSError(number, os.strerror(number))
            tune(self._sock)
            sent = self._sock.send(self._hello, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(f"tcp: the producer's data port cannot be reached: {error.strerror}; is a firewall between?")
            return
        self._hello = self._hello[sent:]
        if not self._hello:
            self._plane.sockets.watch(self._sock, self.on_readable)

    def on_readable(self) -> None:
        """Receive the bytes that have arrived, at most ``_BYTES_PER_TURN``."""
        left = _BYTES_PER_TURN
        try:
            while left > 0 and self.error is None and not self._closed:
                if self._head.left:
                    got = self._head.receive(self._sock)
                elif self._arriving is None and not self._begin():
                    return  # no slot is free
                else:
                    assert self._arriving is not None
                    got = self._arriving.vector.receive(self._sock)
                if got == 0:
                    self.fail("tcp: the producer closed the channel or died")
                    return
                left -= got
                self._received_at = time.monotonic()
                if self._arriving is not None and not self._arriving.vector.left:
                    self._finish()
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(f"tcp: the producer is gone: {error.strerror}")

    def _new_head(self) -> Vector:
        return Vector(Pieces(np.array([self._header.ctypes.data]), np.array([HEADER.size])))

    def _begin(self) -> bool:
        """A header has arrived: choose the memory of its message. False where no slot is free for it now."""
        tag, nbytes = HEADER.unpack(self._header.tobytes())
        expected = self.expected.get(tag)
        more = TAG_BYTES if self.cipher is not None else 0
        if not more < nbytes <= self._plane.slot_bytes or (expected and expected.nbytes + more != nbytes):
            wanted = f"expected {expected.nbytes}" if expected else f"limit {self._plane.slot_bytes - more}"
            self.fail(f"tcp: message {tag:#x} has {nbytes - more} bytes, {wanted}")
            return False
        slot, reported = None, nbytes - more if expected is not None else None
        if expected is None:
            pieces = self._plane.nowhere(nbytes)
        elif expected.into is not None and self.cipher is None:
            try:
                pieces = expected.into()
            except Exception:  # the error affects this message only
                logger.exception("kvferry: no place for a message")
                pieces, reported = self._plane.nowhere(nbytes), 0
        else:
            slot = self._plane.recv_pool.take()
            if slot is None:
                self._plane.sockets.watch(self._sock, self._on_end, ENDED)
                return False
            pieces = Pieces(np.array([slot.address]), np.array([nbytes]))
        self.expected.pop(tag, None)
        self._arriving = Arriving(tag, Vector(together(pieces, byte(self._whole))), slot, reported)
        return True

    def _on_end(self) -> None:
        self.fail("tcp: the producer closed the channel or died")

    def _finish(self) -> None:
        arriving, self._arriving = self._arriving, None
        assert arriving is not None
        self._head = self._new_head()
        if self.cipher is not None and not self._decrypted(self.cipher, arriving):
            return
        if arriving.reported is None:
            if arriving.slot is not None:
                self._plane.recv_pool.put(arriving.slot)
            return
        nbytes = arriving.reported if self._whole[0] else 0
        if arriving.slot is None:
            self.arrived.append(Received(arriving.tag, 0, nbytes, _nothing, placed=True))
        else:
            release = partial(self._plane.recv_pool.put, arriving.slot)
            self.arrived.append(Received(arriving.tag, arriving.slot.address, nbytes, release))

    def _decrypted(self, cipher: Cipher, arriving: Arriving) -> bool:
        """Decrypt a message in its slot; False where it is not what P sent, which ends the channel."""
        if arriving.slot is None:
            cipher.skip()
            return True
        header = self._header.tobytes()
        if self._whole[0] and cipher.open(arriving.slot, HEADER.unpack(header)[1], header):
            return True
        self._plane.recv_pool.put(arriving.slot)
        self.fail("tcp: an encrypted message is not what the producer sent: it was changed on its way")
        return False

    def _drop_arriving(self) -> None:
        arriving, self._arriving = self._arriving, None
        if arriving is not None and arriving.slot is not None:
            self._plane.recv_pool.put(arriving.slot)


def _nothing() -> None:
    """A message in place holds no slot."""
