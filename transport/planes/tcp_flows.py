"""The flows of plane ``tcp``: a flow is one connection of a channel, and what moves messages over it.

A message: ``HEADER``, its bytes, and a last byte, ``COMPLETE``.

The transfer thread moves a channel of one flow. Where there are several, each has a thread at either end, one call of
which moves a whole slot; other threads have the interpreter meanwhile. All else the transfer thread does (``tell``).
Messages of different flows may come in any order.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvferry.transport.channels import Pieces, Received, Slot
from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.limited_log import RateLimitedLog
from kvferry.transport.planes.push import Expected
from kvferry.transport.sockets import ENDED, EXHAUSTED, READABLE, SILENCE_SECONDS, WRITABLE, Sockets
from kvferry.transport.wake import Waker, keep_time_exactly

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from kvferry.transport.planes.tcp import TcpRecvChannel, TcpSendChannel

logger = logging.getLogger("vllm.kvferry.tcp")
_limited = RateLimitedLog(logger)

BYTES_PER_TURN = 32 << 20
"""Bytes that the transfer thread receives on one channel before the other channels are served."""

GONE = "tcp: the prefill rank closed the channel or died"
STOPPED = f"tcp: the prefill rank stopped in the middle of a message, {SILENCE_SECONDS:g} s ago"

# --- memory in pieces ---------------------------------------------------------------------------------------------

MAX_PIECES = 1024
"""IOV_MAX of Linux."""

RECEIVE_BYTES = 256 << 10
"""Bytes that one call receives at most: during its copy the sender's packets queue up at the socket, and calls of 1 MiB
are slower over loopback, 3.4 against 4.5 GB/s."""

_libc = ctypes.CDLL(None, use_errno=True)
_FLAGS = (socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, socket.MSG_WAITALL | socket.MSG_NOSIGNAL)


class _MsgHdr(ctypes.Structure):
    _fields_ = [
        ("msg_name", ctypes.c_void_p),
        ("msg_namelen", ctypes.c_uint),
        ("msg_iov", ctypes.c_void_p),
        ("msg_iovlen", ctypes.c_size_t),
        ("msg_control", ctypes.c_void_p),
        ("msg_controllen", ctypes.c_size_t),
        ("msg_flags", ctypes.c_int),
    ]


for _function in (_libc.sendmsg, _libc.recvmsg):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]


class Vector:
    """Pieces of memory that a socket works through from the first byte to the last. Their owner keeps them alive.
    ``waits``: a call waits for the socket, and moves all. ``short``: the last call moved fewer bytes than it could
    have: the socket had no more, or takes no more."""

    __slots__ = ("_ends", "_header", "_iov", "_waits", "done", "nbytes", "short")

    def __init__(self, pieces: Pieces, *, waits: bool = False) -> None:
        addresses, nbytes = pieces
        self._iov: npt.NDArray[np.uint64] = np.empty((len(addresses), 2), dtype=np.uint64)
        self._iov[:, 0] = addresses
        self._iov[:, 1] = nbytes
        self._ends = np.cumsum(nbytes)
        self._header = _MsgHdr()
        self.nbytes = int(self._ends[-1])
        self.done = 0
        self.short, self._waits = False, waits

    @property
    def left(self) -> int:
        return self.nbytes - self.done

    def send(self, sock: socket.socket) -> int:
        """Send the bytes that the socket takes now. Raises OSError as ``socket.send`` does: BlockingIOError if full."""
        return self._call(_libc.sendmsg, sock, self.nbytes)

    def receive(self, sock: socket.socket) -> int:
        """Receive the bytes that are there; 0 at the end of the stream. Raises OSError as ``socket.recv`` does."""
        return self._call(_libc.recvmsg, sock, self.nbytes if self._waits else RECEIVE_BYTES)

    def _call(self, function: Any, sock: socket.socket, limit: int) -> int:
        first = int(np.searchsorted(self._ends, self.done, side="right"))
        begin = int(self._ends[first - 1]) if first else 0
        address, nbytes = self._iov[first]
        skip = np.uint64(self.done - begin)
        self._iov[first] = address + skip, nbytes - skip  # the piece in which the last call stopped
        header = self._header
        header.msg_iov = self._iov.ctypes.data + 16 * first
        count = min(MAX_PIECES, len(self._iov) - first)
        if limit < self.left:
            count = max(1, min(count, int(np.searchsorted(self._ends, self.done + limit)) - first))
        header.msg_iovlen = count
        moved = int(function(sock.fileno(), ctypes.addressof(header), _FLAGS[self._waits]))
        number = ctypes.get_errno()
        self._iov[first] = address, nbytes
        if moved < 0:
            if number == errno.EINTR:
                return self._call(function, sock, limit)
            raise OSError(number, os.strerror(number))  # Python makes it a BlockingIOError, ConnectionResetError, ...
        self.short = moved < int(self._ends[first + count - 1]) - self.done
        self.done += moved
        return moved


_ZEROS: npt.NDArray[np.uint8] = np.zeros(256 << 10, dtype=np.uint8)
_WASTE: npt.NDArray[np.uint8] = np.empty(256 << 10, dtype=np.uint8)


def nowhere(nbytes: int, buffer: npt.NDArray[np.uint8] = _WASTE) -> Pieces:
    """Memory for ``nbytes`` received bytes that belong to no message any more: pieces which are all in one buffer."""
    count = -(-nbytes // buffer.nbytes)
    sizes = np.full(count, buffer.nbytes, dtype=np.int64)
    sizes[-1] = nbytes - buffer.nbytes * (count - 1)
    return Pieces(np.full(count, buffer.ctypes.data, dtype=np.int64), sizes)


def together(*parts: Pieces) -> Pieces:
    """The pieces of all ``parts``, one after the other."""
    return Pieces(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def whole(of: npt.NDArray[np.uint8]) -> Pieces:
    """The bytes of an array, as pieces."""
    return Pieces(np.array([of.ctypes.data]), np.array([of.nbytes]))


# --- messages -------------------------------------------------------------------------------------------------------

HEADER = struct.Struct("<QQ")
"""The tag, and the number of bytes that follow without the last byte."""
COMPLETE: npt.NDArray[np.uint8] = np.ones(1, dtype=np.uint8)
"""The last byte of a message whose bytes are all P's. Zero where P stopped reading its pages before they were sent: P's
control message about that goes over another socket, and may arrive later."""


class Outgoing:
    """A message that P sends: the first ``nbytes`` of ``slot``, which becomes free afterwards, or, without a slot,
    pages. ``paged``: its bytes are still read from pages. ``vector``: what is to be sent, once it has begun."""

    vector: Vector

    def __init__(self, tag: int, nbytes: int, slot: Slot | None = None) -> None:
        self.tag, self.nbytes, self.slot, self.paged = tag, nbytes, slot, slot is None

    def begin(self, pieces: Pieces, *, waits: bool = False) -> Outgoing:
        """Its bytes are these, which stay in place until the message was sent or ``stop_reading`` was called."""
        self._header = np.frombuffer(HEADER.pack(self.tag, int(pieces.nbytes.sum())), dtype=np.uint8)
        self.vector = Vector(together(whole(self._header), pieces, whole(COMPLETE)), waits=waits)
        return self

    def stop_reading(self) -> None:
        """Read no page any more: the unsent rest becomes zeros, also the last byte."""
        self.paged = False
        head = max(0, HEADER.size - self.vector.done)
        rest = nowhere(self.vector.left - head, _ZEROS)
        self.vector = Vector(together(whole(self._header[HEADER.size - head :]), rest) if head else rest)


@dataclass(slots=True)
class Arriving:
    """A message whose bytes come in. ``expected``: its announcement; ``None``: D drops it. ``slot``: where it goes to
    one. ``reported``: the bytes that ``poll`` reports, 0 for a message that had no place."""

    tag: int
    expected: Expected | None
    vector: Vector
    slot: Slot | None
    reported: int


# --- encryption -----------------------------------------------------------------------------------------------------

KEY_BYTES = 32
TAG_BYTES = 16
"""What a message grows by."""


class Cipher:
    """One end of an encrypted channel: AES-256-GCM with a key of the channel's own.

    P makes the key, and D has it by the control connection, which is encrypted. Only P sends on the channel, so each
    key and nonce is used once: the nonce is the number of the message. The header of a message is authenticated with
    it. So bytes that were changed, left out, repeated or moved are never taken for P's.

    Over it, ``tcp`` moves twice the bytes in a second that ``zmq`` moves over CURVE (benchmarks/planes/planes.py). The
    kernel's TLS would need its module on both hosts. Raises PlaneUnavailableError: this machine lacks the package
    ``cryptography``, or its version is too old."""

    def __init__(self, key: bytes) -> None:
        self._aead = aead()(key)
        self._messages = 0

    def seal(self, slot: Slot, nbytes: int, header: bytes) -> int:
        """P: encrypt the first ``nbytes`` of a slot in place. Returns their number with the authentication tag."""
        memory = slot.tensor.numpy().data
        self._aead.encrypt_into(self._nonce(), memory[:nbytes], header, memory[: nbytes + TAG_BYTES])
        return nbytes + TAG_BYTES

    def open(self, slot: Slot, nbytes: int, header: bytes) -> bool:
        """D: decrypt the first ``nbytes`` of a slot in place. Whether they are what P sent."""
        from cryptography.exceptions import InvalidTag

        memory = slot.tensor.numpy().data
        try:
            self._aead.decrypt_into(self._nonce(), memory[:nbytes], header, memory[: nbytes - TAG_BYTES])
        except InvalidTag:
            return False
        return True

    def skip(self) -> None:
        """D: a message was received and is not needed."""
        self._messages += 1

    def _nonce(self) -> bytes:
        self._messages += 1
        return self._messages.to_bytes(12, "big")


def aead() -> type[AESGCM]:
    """Raises PlaneUnavailableError where this machine cannot encrypt."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise PlaneUnavailableError(f"tcp: the setting encrypt needs the package cryptography: {error}") from None
    if not hasattr(AESGCM, "encrypt_into"):
        raise PlaneUnavailableError("tcp: the setting encrypt needs a newer version of the package cryptography")
    return AESGCM


# --- threads --------------------------------------------------------------------------------------------------------


class FlowThreads:
    """The ``flows`` of a plane whose threads run, and the calls of theirs that the transfer thread is to make.
    ``short_of_slots``: a channel of P may wait for a slot. The transfer thread sets it before it sleeps."""

    def __init__(self, sockets: Sockets) -> None:
        self.flows: set[Flow] = set()
        self.told: deque[Callable[[], object]] = deque()
        self.short_of_slots = False
        self._waker = Waker()
        sockets.watch(self._waker, self.serve)

    def tell(self, call: Callable[[], object], *, now: bool = True) -> None:
        """By any thread; the calls are made in order. ``now`` False: the transfer thread may sleep on, unless it sleeps
        ``short_of_slots``. While it runs it takes the interpreter from P's engine."""
        self.told.append(call)
        if now or self.short_of_slots:  # after the call is there: the transfer thread looks in the other order
            self._waker.wake()

    def serve(self) -> object:
        """Make the calls of the flows' threads. What they bring is looked at in the same turn."""
        self._waker.drain()
        try:
            while self.told:
                self.told.popleft()()
        finally:
            if self.told:  # after an error the others are made in the next turn
                self._waker.wake()
        return EXHAUSTED

    def close(self, seconds: float = 1.0) -> None:
        """All channels are closed: wait so long at most for their flows to let go of their slots."""
        until = time.monotonic() + seconds
        for flow in self.flows:
            flow.ended.wait(max(0.0, until - time.monotonic()))
        self.serve()
        self._waker.close()


# --- flows ----------------------------------------------------------------------------------------------------------


class Flow(ABC):
    """One connection ``sock`` of a channel. ``cipher``: of this flow alone."""

    peer: str

    def __init__(self, channel: TcpSendChannel | TcpRecvChannel, sock: socket.socket, cipher: Cipher | None) -> None:
        self.channel, self.sock, self.cipher = channel, sock, cipher
        self.threaded = channel.threaded
        self.ending = False
        self.ended = threading.Event()
        self._threads, self._sockets = channel.plane.threads, channel.plane.sockets
        self._words: SimpleQueue[None] = SimpleQueue()  # each lets the thread look whether it may go on
        sock.setblocking(self.threaded)

    def start(self) -> None:
        """Where the system has no thread for the flow, its channel fails."""
        if self.threaded:
            try:
                threading.Thread(target=self.work, name="kvferry-tcp-flow", daemon=True).start()
            except RuntimeError as error:
                self.channel.fail(f"tcp: no thread can be had for a flow: {error}")
                self.release()
                return
            self._threads.flows.add(self)
        self.watch()

    @abstractmethod
    def move(self) -> None:
        """Move what there is. Raises OSError or TransportError: the flow is at its end, but for a BlockingIOError."""

    @abstractmethod
    def watch(self) -> None:
        """Have the transfer thread watch the connection."""

    def tell(self, call: Callable[[], object], *, now: bool = True) -> None:
        """Have the transfer thread make a call: this is that thread where the flow has none."""
        if self.threaded:
            self._threads.tell(call, now=now)
        else:
            call()

    def run(self) -> None:
        """Move what can be moved at once, by the transfer thread."""
        try:
            with contextlib.suppress(BlockingIOError):
                self.move()
        except (OSError, TransportError) as error:
            self.channel.fail(self._why(error))

    def work(self) -> None:
        """What the thread does."""
        keep_time_exactly()
        why = ""
        try:
            while not self.ending:
                with contextlib.suppress(BlockingIOError):  # nothing came for some time
                    self.move()
        except (OSError, TransportError) as error:
            why = self._why(error)
        except Exception as error:
            logger.exception("kvferry: unexpected error in a flow of tcp")
            why = f"tcp: unexpected error in a flow: {error!r}"
        self.tell(partial(self._over, why))
        self.ended.set()

    def end(self) -> None:
        """Move nothing any more. Idempotent, does not block; slots that a thread uses are free once it has ended."""
        self.ending = True
        self._sockets.mute(self.sock)
        if self.threaded:
            with contextlib.suppress(OSError):  # the connection has ended already
                self.sock.shutdown(socket.SHUT_RDWR)
            self._words.put(None)
        else:
            self.release()

    def release(self) -> None:
        """No thread uses the connection and the slots of this flow: free them. Idempotent."""
        self._sockets.drop(self.sock)

    def _over(self, why: str) -> None:
        """The thread has ended."""
        if not self.channel.closed:
            self.channel.fail(why)
        self._threads.flows.discard(self)
        self.release()

    def _why(self, error: Exception) -> str:
        return f"tcp: the {self.peer} rank is gone: {error.strerror}" if isinstance(error, OSError) else str(error)


class SendFlow(Flow):
    """P's end. ``todo``: messages in slots that have not begun, ``message``: the one that has. ``left``: bytes of
    slots that are not sent."""

    peer = "decode"
    channel: TcpSendChannel

    def __init__(self, channel: TcpSendChannel, sock: socket.socket, cipher: Cipher | None) -> None:
        super().__init__(channel, sock, cipher)
        self.left = 0
        self.message: Outgoing | None = None
        self.todo: deque[Outgoing] = deque()
        # At the end of this process the kernel would first deliver the unsent bytes, and a D that takes no bytes at
        # that time would not notice our death.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def watch(self) -> None:
        events = READABLE if self.threaded or self.message is None else READABLE | WRITABLE
        self._sockets.watch(self.sock, self._ready, events)

    def send(self, message: Outgoing) -> None:
        """Send a message in a slot after those before it."""
        self.left += message.nbytes
        self.todo.append(message)
        if self.threaded:
            self._words.put(None)
        elif self.message is None:
            self.run()

    def run(self) -> None:
        super().run()
        if not self.ending:
            self.watch()

    def move(self) -> None:
        if self.threaded:
            self._words.get()
        while message := self.message or self._next():
            vector = message.vector
            while vector.left:
                vector.send(self.sock)
                if vector.short and not self.threaded:
                    raise BlockingIOError
            self.message = None
            self.tell(partial(self.sent, message), now=False)

    def sent(self, message: Outgoing) -> None:
        """A message has left its slot, or will not."""
        if message.slot is not None:
            self.left -= message.nbytes
            self.channel.free(message.slot.index)

    def release(self) -> None:
        super().release()
        if self.message is not None:
            self.todo.appendleft(self.message)
            self.message = None
        while self.todo:
            self.sent(self.todo.popleft())

    def _next(self) -> Outgoing | None:
        """Begin the next message in a slot."""
        if self.ending or not self.todo:
            return None
        message = self.message = self.todo.popleft()
        slot, nbytes = message.slot, message.nbytes
        assert slot is not None
        if self.cipher is not None:
            nbytes = self.cipher.seal(slot, nbytes, HEADER.pack(message.tag, nbytes + TAG_BYTES))
        return message.begin(Pieces(np.array([slot.address]), np.array([nbytes])), waits=self.threaded)

    def _ready(self) -> object:
        """The connection takes bytes, or has ended: D sends nothing."""
        if not self.threaded:
            self.run()
        if self.ending:
            return EXHAUSTED
        try:
            data = self.sock.recv(256, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return EXHAUSTED
        except OSError as error:
            self.channel.fail(self._why(error))
        else:
            did = "sent what it may not" if data else "closed the channel or died"
            self.channel.fail(f"tcp: the decode rank {did}")
        return None


class ReceiveFlow(Flow):
    """D's end. ``starved``: a header is here, and no slot for its message."""

    peer = "prefill"
    channel: TcpRecvChannel

    def __init__(self, channel: TcpRecvChannel, sock: socket.socket, cipher: Cipher | None) -> None:
        super().__init__(channel, sock, cipher)
        self.starved = False
        self.header, self._complete = np.zeros(HEADER.size, dtype=np.uint8), np.zeros(1, dtype=np.uint8)
        self.arriving: Arriving | None = None
        self._head = Vector(whole(self.header), waits=self.threaded)
        self._received_at = 0.0
        if self.threaded:
            timeval = struct.pack("@ll", int(SILENCE_SECONDS), int(SILENCE_SECONDS % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def watch(self) -> None:
        """A thread receives by itself, and without a slot nothing may be received: watch then for the end only."""
        if self.threaded or self.starved:
            self._sockets.watch(self.sock, self.channel.gone, ENDED)
        else:
            self._sockets.watch(self.sock, self.run)

    def check(self, now: float) -> bool:
        """Fail where P stopped in the middle of a message. Where a message waited for a slot and a slot is free now, go
        on. Returns whether it went on."""
        if self.starved:
            self.place()
            return not self.starved
        # A thread hears it from its socket: here its bytes could be seen before the time at which they came.
        if not self.threaded and (self.arriving or self._head.done) and now > self._received_at + SILENCE_SECONDS:
            self.channel.fail(STOPPED)
        return False

    def place(self) -> None:
        """By the transfer thread: a header is here. Choose the memory of its message, or be ``starved``."""
        if not self.ending:
            try:
                self.arriving = self._placed()
            except TransportError as error:
                self.channel.fail(str(error))
            self.starved = self.arriving is None
        if not self.ending:
            self._received_at = time.monotonic()
            self.watch()
            if self.threaded and not self.starved:
                self._words.put(None)

    def _placed(self, *, by_thread: bool = False) -> Arriving | None:
        """``None``: no slot is free. A flow's thread itself takes only a message that is announced, and a slot that was
        used before; by the transfer thread's next turn D has announced all that it has asked for. A thread writes slots
        only, for it cannot let go of pages at once, see ``stop_writing``. Raises TransportError: it may not be."""
        plane = self.channel.plane
        tag, nbytes = HEADER.unpack(self.header.tobytes())
        expected = self.channel.expected.get(tag)
        more = TAG_BYTES if self.cipher is not None else 0
        if not more < nbytes <= plane.slot_bytes or (expected is not None and expected.nbytes + more != nbytes):
            wanted = f"expected {expected.nbytes}" if expected else f"limit {plane.slot_bytes - more}"
            raise TransportError(f"tcp: message {tag:#x} has {nbytes - more} bytes, {wanted}")
        slot, reported = None, nbytes - more
        if expected is None:
            if by_thread:
                return None
            pieces = nowhere(nbytes)
        elif expected.into is not None and self.cipher is None and not self.threaded:
            try:
                pieces = expected.into()
            except Exception:  # the error affects this message only
                _limited.exception("place", "kvferry: no place for a message")
                pieces, reported = nowhere(nbytes), 0
        else:
            slot = plane.recv_pool.reuse() if by_thread else plane.recv_pool.take()
            if slot is None:
                return None
            pieces = Pieces(np.array([slot.address]), np.array([nbytes]))
        vector = Vector(together(pieces, whole(self._complete)), waits=self.threaded)
        return Arriving(tag, expected, vector, slot, reported)

    def stop_writing(self, expected: Expected) -> None:
        """Write nothing to the memory of ``into`` any more; by the transfer thread, as all that writes there."""
        arriving = self.arriving
        if arriving is not None and arriving.expected is expected and arriving.slot is None:
            left = arriving.vector.left - 1
            arriving.vector = Vector(together(nowhere(left), whole(self._complete))) if left > 0 else arriving.vector

    def move(self) -> None:
        left = BYTES_PER_TURN
        while not self.ending:
            vector = self._head if self.arriving is None else self.arriving.vector
            if vector.left and left > 0:
                try:
                    got = vector.receive(self.sock)
                except BlockingIOError:
                    if self.threaded and (self.arriving or vector.done):
                        raise TransportError(STOPPED) from None
                    raise
                if not got:
                    raise TransportError(GONE)
                self._received_at = time.monotonic()
                left -= got
            elif vector.left:
                return
            elif self.arriving is not None:
                self._finish(self.arriving)
            elif self.threaded:
                self.arriving = self._placed(by_thread=True)
                if self.arriving is None:
                    self.tell(self.place)
                    self._words.get()
            else:
                self.place()
                if self.starved:
                    return

    def _finish(self, arriving: Arriving) -> None:
        """All bytes of a message are here."""
        came = bool(self._complete[0])
        if self.cipher is not None:
            header = self.header.tobytes()
            if arriving.slot is None:
                self.cipher.skip()
            elif not came or not self.cipher.open(arriving.slot, HEADER.unpack(header)[1], header):
                raise TransportError(
                    "tcp: an encrypted message is not what the prefill rank sent: it was changed on its way"
                )
        self._head, self.arriving = Vector(whole(self.header), waits=self.threaded), None
        self.tell(partial(self._take, arriving, came))

    def _take(self, arriving: Arriving, came: bool) -> None:
        """All bytes of a message are here, and they are P's unless ``came`` is false."""
        channel, slot, tag = self.channel, arriving.slot, arriving.tag
        release: Callable[[], None] = partial(channel.plane.recv_pool.put, slot) if slot else lambda: None
        if channel.closed or arriving.expected is None or channel.expected.get(tag) is not arriving.expected:
            release()  # forgotten meanwhile, or sent twice
            return
        del channel.expected[tag]
        nbytes = arriving.reported if came else 0
        channel.arrived.append(Received(tag, slot.address if slot else 0, nbytes, release, placed=slot is None))

    def release(self) -> None:
        super().release()
        arriving, self.arriving = self.arriving, None
        if arriving is not None and arriving.slot is not None:
            self.channel.plane.recv_pool.put(arriving.slot)
