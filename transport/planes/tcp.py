"""The TCP data plane: scattered pages of P to scattered pages of D, with no staging in between.

P passes a vector of its pages to the kernel, D passes a vector of its own pages, and one stream carries the messages.
Without a pack and an unpack 64 MiB in blocks of 8 KiB move at 4.4 GB/s over loopback, through UCX and staging slots at
2.9 GB/s. Where the pieces of a page are too short for a vector, either side uses a slot, independently of the other.

D connects to P and sends the secret of P's offer and the channel's id. The stream has no other authentication, unless
the engine of P or of D wants its bytes encrypted. Then every message goes through slots, see ``Cipher``.

Between GPUs a channel has several such connections where both ends have cores for their threads, see ``tcp_flows``.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvferry.transport.channels import DChannel, Pieces, Received, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import ProtocolError
from kvferry.transport.plane import PlaneContext, decode_payload
from kvferry.transport.planes.socket_plane import AwaitedSender, ConnectingReceiver, SocketAttach, SocketPlane
from kvferry.transport.planes.tcp_flows import (
    CHANGED,
    COMPLETE,
    GONE,
    HEADER,
    KEY_BYTES,
    LATE,
    SILENT,
    TAG_BYTES,
    UNREACHABLE,
    Cipher,
    FlowsReceiver,
    FlowsSender,
    FlowThreads,
    aead,
    ciphers_of,
    end_with_process,
    misfit,
    most_flows,
    most_threads,
    said_by_d,
)
from kvferry.transport.sockets import (
    CHANNEL_BYTES,
    ENDED,
    EXHAUSTED,
    HELLO_BYTES,
    READABLE,
    SECRET_BYTES,
    SILENCE_SECONDS,
    WRITABLE,
)
from kvferry.transport.staging import SlotPool
from kvferry.transport.wake import RateLimitedLog

_limited = RateLimitedLog(logging.getLogger("vllm.kvferry.tcp"))

_SCRATCH_BYTES = 256 << 10
_GPU_WINDOW = 3
"""Slots of one channel that a GPU packs, that wait, or that are on the link."""
_FEW_GPU_BYTES = 4 << 20
"""Messages of a prompt that is computed, between caches on GPUs: 10.5 GB/s by four flows over loopback, 9.9 with 8 MiB.
Slots have 8 MiB, for while P computes, its engine may wait 0.5 ms for the interpreter with each message of any size."""
BYTES_PER_TURN = 32 << 20
"""Bytes moved on one channel before the other channels are served."""


# --- memory in pieces ---------------------------------------------------------------------------------------------

MAX_PIECES = 1024
"""IOV_MAX of Linux."""

RECEIVE_BYTES = 256 << 10
"""Bytes that one call receives at most: during its copy the sender's packets queue up at the socket, and calls of 1 MiB
are slower over loopback, 3.4 against 4.5 GB/s."""

_libc = ctypes.CDLL(None, use_errno=True)
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


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
    ``short``: the last call moved fewer bytes than it could have: the socket had no more, or takes no more."""

    __slots__ = ("_ends", "_header", "_iov", "done", "nbytes", "short")

    def __init__(self, pieces: Pieces) -> None:
        addresses, nbytes = pieces
        self._iov: npt.NDArray[np.uint64] = np.empty((len(addresses), 2), dtype=np.uint64)
        self._iov[:, 0] = addresses
        self._iov[:, 1] = nbytes
        self._ends = np.cumsum(nbytes)
        self._header = _MsgHdr()
        self.nbytes = int(self._ends[-1])
        self.done = 0
        self.short = False

    @property
    def left(self) -> int:
        """Bytes that have not moved yet."""
        return self.nbytes - self.done

    def send(self, sock: socket.socket) -> int:
        """Send the bytes that the socket takes now. Raises OSError as ``socket.send`` does: BlockingIOError if full."""
        return self._call(_libc.sendmsg, sock, self.nbytes)

    def receive(self, sock: socket.socket) -> int:
        """Receive the bytes that are there; 0 at the end of the stream. Raises OSError as ``socket.recv`` does."""
        return self._call(_libc.recvmsg, sock, RECEIVE_BYTES)

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
        moved = int(function(sock.fileno(), ctypes.addressof(header), _FLAGS))
        number = ctypes.get_errno()
        self._iov[first] = address, nbytes
        if moved < 0:
            if number == errno.EINTR:
                return self._call(function, sock, limit)
            raise OSError(number, os.strerror(number))  # Python makes it a BlockingIOError, ConnectionResetError, ...
        self.short = moved < int(self._ends[first + count - 1]) - self.done
        self.done += moved
        return moved


def repeated(buffer: npt.NDArray[np.uint8], nbytes: int) -> Pieces:
    """Pieces with ``nbytes`` bytes in all, each of them in the same buffer."""
    count = -(-nbytes // buffer.nbytes)
    sizes = np.full(count, buffer.nbytes, dtype=np.int64)
    sizes[-1] = nbytes - buffer.nbytes * (count - 1)
    return Pieces(np.full(count, buffer.ctypes.data, dtype=np.int64), sizes)


# --- messages -------------------------------------------------------------------------------------------------------


class Outgoing:
    """A message that P sends. ``slot`` becomes free afterwards; ``paged``: its bytes are read from pages.

    Args:
        pieces: its bytes, which stay in place until the message was sent or ``stop_reading`` was called.
        slot: the slot that holds them, unless they are in pages.
    """

    __slots__ = ("_header", "paged", "slot", "tag", "vector")

    def __init__(self, tag: int, pieces: Pieces, slot: Slot | None) -> None:
        self.tag, self.slot, self.paged = tag, slot, slot is None
        self._header = np.frombuffer(HEADER.pack(tag, int(pieces.nbytes.sum())), dtype=np.uint8)
        self.vector = Vector(together(self._of_header(HEADER.size), pieces, whole(COMPLETE)))

    def stop_reading(self, instead: Callable[[int], Pieces]) -> None:
        """Read no page any more: the unsent rest becomes ``instead(number of bytes)``, zeros, and the last byte 0."""
        self.paged = False
        head = max(0, HEADER.size - self.vector.done)
        rest = instead(self.vector.left - head)
        self.vector = Vector(together(self._of_header(head), rest) if head else rest)

    def _of_header(self, nbytes: int) -> Pieces:
        """The last bytes of the header."""
        return whole(self._header[HEADER.size - nbytes :])


@dataclass(slots=True)
class Arriving:
    """A message whose bytes come in. ``slot`` where it goes to one; ``reported``: the bytes that ``poll`` reports, 0
    for a message that had no place; ``None``: ``poll`` does not report the message."""

    tag: int
    vector: Vector
    slot: Slot | None
    reported: int | None


def together(*parts: Pieces) -> Pieces:
    """The pieces of all ``parts``, one after the other."""
    return Pieces(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def whole(of: npt.NDArray[np.uint8]) -> Pieces:
    """The bytes of an array, as pieces."""
    return Pieces(np.array([of.ctypes.data]), np.array([of.nbytes]))


# --- the plane ------------------------------------------------------------------------------------------------------


class TcpOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    port: Annotated[int, Meta(gt=0, lt=65536)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]


class TcpAttach(SocketAttach, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``encrypts``: D wants its bytes encrypted. ``flows``: how many D can have. Where they are several, P's reply is a
    ``TcpFlows``, else the key, if any."""

    encrypts: bool = False
    flows: Annotated[int, Meta(ge=1, le=64)] = 1


class TcpFlows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """P's reply. ``hellos``: of the connections beside the first one. ``keys``: one for each connection, or none."""

    hellos: tuple[Annotated[bytes, Meta(min_length=HELLO_BYTES, max_length=HELLO_BYTES)], ...]
    keys: tuple[Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)], ...]


class TcpSendChannel(AwaitedSender):
    """P's end. One message is on its way at a time; those of slots that were sent meanwhile wait. With a ``cipher``
    every message goes through a slot, where it is encrypted."""

    def __init__(self, plane: TcpPlane, channel: bytes, slot_bytes: int, cipher: Cipher | None = None) -> None:
        super().__init__(plane.send_pool, channel, slot_bytes, plane.window)
        self.sends_in_place = cipher is None
        self._cipher = cipher
        self._plane = plane
        self._message: Outgoing | None = None
        self._waiting: deque[tuple[Slot, int, int]] = deque()

    @property
    def in_use(self) -> int:
        return super().in_use + (self._message is not None and self._message.slot is None)

    @property
    def ready(self) -> bool:
        """Whether a message may begin now."""
        return self.open and self._message is None and not self._waiting

    @property
    def reading(self) -> int | None:
        message = self._message
        return message.tag if message is not None and message.paged else None

    def connected(self, sock: socket.socket) -> None:
        end_with_process(sock)
        super().connected(sock)
        self._plane.sockets.watch(sock, self.on_readable)

    def send_pieces(self, pieces: Callable[[], Pieces], tag: int) -> bool:
        if self._cipher is not None:
            return super().send_pieces(pieces, tag)
        if not self.ready:
            return False
        self._message = Outgoing(tag, pieces(), None)
        self._write()
        return True

    def stop_reading(self) -> None:
        message = self._message
        if message is not None and message.paged:  # the stream goes on, and its last byte marks the message
            message.stop_reading(partial(repeated, self._plane.zeros))

    def on_readable(self) -> None:
        assert self.sock is not None
        if why := said_by_d(self.sock):
            self.fail(why)

    def _transmit(self, slot: Slot, nbytes: int, tag: int) -> None:
        self._waiting.append((slot, nbytes, tag))
        self._go_on()

    def _go_on(self) -> None:
        """Send the waiting messages for as long as the socket takes bytes."""
        while self.open and self._message is None and self._waiting:
            slot, nbytes, tag = self._waiting.popleft()
            if self._cipher is not None:
                nbytes = self._cipher.seal(slot, nbytes, HEADER.pack(tag, nbytes + TAG_BYTES))
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
            self.fail(f"tcp: the decode rank is gone: {error.strerror}")
            return
        if message.vector.left:
            self._plane.sockets.watch(sock, self._on_writable, READABLE | WRITABLE)
            return
        self._message = None
        if message.slot is not None:
            self.free(message.slot.index)
        self._plane.sockets.watch(sock, self.on_readable)

    def _on_writable(self) -> object:
        self._write()
        self._go_on()
        if self.open:
            self.on_readable()
        return EXHAUSTED

    def _give_up(self) -> None:
        self._message = None
        self._waiting.clear()
        super()._give_up()
        if self.sock is not None:
            self._plane.sockets.mute(self.sock)

    def _close(self) -> None:
        self._give_up()
        self._plane.drop(self, self.sock)


class TcpRecvChannel(ConnectingReceiver):
    """D's end. It receives a message into the memory of ``into``, or into a slot."""

    late, unreachable = LATE, UNREACHABLE

    def __init__(self, plane: TcpPlane, sock: socket.socket, hello: bytes) -> None:
        super().__init__(plane, sock, hello)
        self.cipher: Cipher | None = None  # P's answer may bring one
        self._plane, self.few_bytes = plane, plane.few_bytes
        self._header = np.zeros(HEADER.size, dtype=np.uint8)
        self._complete = np.zeros(1, dtype=np.uint8)  # the last byte of the last message
        self._head = Vector(whole(self._header))
        self._arriving: Arriving | None = None
        self._received_at = 0.0

    @property
    def in_message(self) -> bool:
        """Whether a part of a message is here."""
        return self._arriving is not None or bool(self._head.done)

    def connected(self) -> None:
        self._plane.sockets.watch(self.sock, self.on_readable)

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
            arriving.vector = Vector(together(self._plane.nowhere(arriving.vector.left - 1), whole(self._complete)))

    def _close(self) -> None:
        self._plane.drop(self, self.sock)
        self.release_arrived()
        self._drop_arriving()

    def _give_up(self) -> None:
        self._plane.sockets.mute(self.sock)
        self._drop_arriving()

    @property
    def starved(self) -> bool:
        """A message is here and there is no slot for it."""
        return self._head.left == 0 and self._arriving is None and self.error is None

    def check(self, now: float) -> bool:
        """Fail where P stopped in the middle of a message. Where a message waited for a slot and a slot is free now, go
        on. Returns whether it went on."""
        if self.starved:
            if self._begin():
                self.connected()
                self.on_readable()
                return True
        elif self.in_message and self.error is None and now > self._received_at + SILENCE_SECONDS:
            self.fail(SILENT)
        return False

    def on_readable(self) -> None:
        """Receive the bytes that have arrived, at most ``BYTES_PER_TURN``."""
        left = BYTES_PER_TURN
        try:
            while left > 0 and self.error is None and not self.closed:
                if self._head.left:
                    got = self._head.receive(self.sock)
                elif self._arriving is None and not self._begin():
                    return  # no slot is free
                else:
                    assert self._arriving is not None
                    got = self._arriving.vector.receive(self.sock)
                if got == 0:
                    self._gone()
                    return
                left -= got
                self._received_at = time.monotonic()
                if self._arriving is not None and not self._arriving.vector.left:
                    self._finish()
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(f"tcp: the prefill rank is gone: {error.strerror}")

    def _begin(self) -> bool:
        """A header has arrived: choose the memory of its message. False where no slot is free for it now."""
        tag, nbytes = HEADER.unpack(self._header.tobytes())
        expected = self.expected.get(tag)
        more = TAG_BYTES if self.cipher is not None else 0
        if why := misfit(tag, nbytes, more, expected, self._plane.slot_bytes):
            self.fail(why)
            return False
        slot, reported = None, nbytes - more if expected is not None else None
        if expected is None:
            pieces = self._plane.nowhere(nbytes)
        elif expected.into is not None and self.cipher is None:
            try:
                pieces = expected.into()
            except Exception:  # the error affects this message only
                _limited.exception("place", "kvferry: no place for a message")
                pieces, reported = self._plane.nowhere(nbytes), 0
        else:
            slot = self._plane.recv_pool.take()
            if slot is None:
                self._plane.sockets.watch(self.sock, self._gone, ENDED)
                return False
            pieces = Pieces(np.array([slot.address]), np.array([nbytes]))
        self.expected.pop(tag, None)
        self._arriving = Arriving(tag, Vector(together(pieces, whole(self._complete))), slot, reported)
        return True

    def _gone(self) -> None:
        self.fail(GONE)

    def _finish(self) -> None:
        arriving, self._arriving = self._arriving, None
        assert arriving is not None
        self._head = Vector(whole(self._header))
        if self.cipher is not None and not self._decrypted(self.cipher, arriving):
            return
        slot = arriving.slot
        release: Callable[[], None] = partial(self._plane.recv_pool.put, slot) if slot else lambda: None
        if arriving.reported is None:
            release()
            return
        nbytes = arriving.reported if self._complete[0] else 0
        self.arrived.append(Received(arriving.tag, slot.address if slot else 0, nbytes, release, placed=slot is None))

    def _decrypted(self, cipher: Cipher, arriving: Arriving) -> bool:
        """Decrypt a message in its slot; False where it is not what P sent, which ends the channel."""
        if arriving.slot is None:
            cipher.skip()
            return True
        header = self._header.tobytes()
        if self._complete[0] and cipher.open(arriving.slot, HEADER.unpack(header)[1], header):
            return True
        self._plane.recv_pool.put(arriving.slot)
        self.fail(CHANGED)
        return False

    def _drop_arriving(self) -> None:
        arriving, self._arriving = self._arriving, None
        if arriving is not None and arriving.slot is not None:
            self._plane.recv_pool.put(arriving.slot)


class TcpPlane(SocketPlane):
    """For caches of a GPU, whose pages no socket reads, every message goes through page-locked slots. In host memory
    only messages of short pieces need slots."""

    name: ClassVar[str] = "tcp"

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context.slot_bytes)
        if context.encrypt:
            aead()
        gpu = context.memory.device.type == "cuda"
        self.window = _GPU_WINDOW if gpu else 1
        self.send_pool, self.recv_pool = (
            SlotPool(context.slot_bytes, context.staging_bytes, page_locked=gpu) for _ in range(2)
        )
        self.few_bytes = _FEW_GPU_BYTES if gpu else RecvChannel.few_bytes
        self.flows = most_flows(context.memory.device)
        """The most flows of one channel."""
        self.threads = FlowThreads(self.sockets)
        self._encrypts = context.encrypt
        self.zeros: npt.NDArray[np.uint8] = np.zeros(_SCRATCH_BYTES, dtype=np.uint8)
        self._waste: npt.NDArray[np.uint8] = np.empty(_SCRATCH_BYTES, dtype=np.uint8)
        self._host = context.host

    def offer(self) -> bytes:
        return msgspec.msgpack.encode(TcpOffer(self.listen_tcp(self._host), self.secrets.new()))

    def connect(self, offer: bytes, host: str) -> tuple[RecvChannel, bytes]:
        theirs = decode_payload(offer, TcpOffer, "tcp offer")
        sock = self.connect_tcp(host, theirs.port)
        new, flows = self.new_attach(), self._flows(self.flows)
        attach = TcpAttach(new.channel, new.slot_bytes, self._encrypts, flows)
        hello = theirs.secret + attach.channel
        channel: TcpRecvChannel | FlowsReceiver
        if flows > 1:
            channel = FlowsReceiver(self, sock, hello, (host, theirs.port), flows)
        else:
            channel = TcpRecvChannel(self, sock, hello)
        self.channels[channel] = None
        return channel, msgspec.msgpack.encode(attach)

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, TcpAttach, "tcp attach")
        self.check_new(attach)
        flows = self._flows(attach.flows)
        encrypts = self._encrypts or attach.encrypts
        keys = tuple(secrets.token_bytes(KEY_BYTES) for _ in range(flows if encrypts else 0))
        hellos = tuple(self.secrets.new() + secrets.token_bytes(CHANNEL_BYTES) for _ in range(flows - 1))
        slot_bytes = min(self.slot_bytes, attach.slot_bytes) - (TAG_BYTES if keys else 0)
        ciphers = ciphers_of(keys, flows)
        channel: TcpSendChannel | FlowsSender
        if flows > 1:
            ids = (attach.channel, *(hello[SECRET_BYTES:] for hello in hellos))
            channel = FlowsSender(self, attach.channel, slot_bytes, dict(zip(ids, ciphers, strict=True)))
        else:
            channel = TcpSendChannel(self, attach.channel, slot_bytes, ciphers[0])
        self.await_connection(channel)
        return channel, msgspec.msgpack.encode(TcpFlows(hellos, keys)) if attach.flows > 1 else b"".join(keys)

    def finish(self, channel: DChannel, reply: bytes) -> None:
        assert isinstance(channel, TcpRecvChannel | FlowsReceiver)
        if isinstance(channel, FlowsReceiver):
            theirs = decode_payload(reply, TcpFlows, "tcp reply")
            flows = len(theirs.hellos) + 1
            if flows > channel.wanted or len(theirs.keys) not in (0, flows):
                raise ProtocolError(
                    f"tcp: Attached carries {flows} flows, limit {channel.wanted}, and {len(theirs.keys)} keys"
                )
            keys = theirs.keys
        else:
            if len(reply) not in (0, KEY_BYTES):
                raise ProtocolError(f"tcp: Attached carries a key of {len(reply)} bytes, expected {KEY_BYTES}")
            keys = (reply,) if reply else ()
        if not keys and self._encrypts:
            raise ProtocolError("tcp: Attached carries no key, and the setting encrypt is on")
        channel.encrypted = bool(keys)
        if isinstance(channel, FlowsReceiver):
            channel.finish(theirs.hellos, ciphers_of(keys, flows))
        elif keys:
            channel.cipher = Cipher(*keys)

    def _flows(self, wanted: int) -> int:
        """The flows that a new channel may have: one where the plane has too many already."""
        several = [channel for channel in self.channels if isinstance(channel, FlowsSender | FlowsReceiver)]
        left = most_threads(self.send_pool.capacity) - len(self.threads.flows) - sum(one.to_start for one in several)
        return max(1, min(wanted, self.flows, left))

    def progress(self) -> bool:
        moved = super().progress()
        if self.threads.waiting:  # calls for which no flow has woken this thread
            self.threads.serve()
        now = time.monotonic()
        for channel in self.receivers(TcpRecvChannel):
            if channel.check(now):  # the channel has a slot now; at the next shortage other channels come first
                moved = True
                self.channels[channel] = self.channels.pop(channel)
        for several in self.receivers(FlowsReceiver):
            if several.supply():
                moved = True
                self.channels[several] = self.channels.pop(several)
        return moved

    def arm(self) -> bool:
        senders = (channel for channel in self.channels if isinstance(channel, AwaitedSender))
        self.threads.short_of_slots = not self.send_pool.free or any(one.in_use >= one.window for one in senders)
        if self.threads.waiting:
            return False
        receivers: list[TcpRecvChannel | FlowsReceiver] = [
            *self.receivers(TcpRecvChannel),
            *self.receivers(FlowsReceiver),
        ]
        return not (self.recv_pool.free and any(channel.starved for channel in receivers))

    def _close(self) -> None:
        self.threads.close()
        super()._close()

    def nowhere(self, nbytes: int) -> Pieces:
        """Memory for received bytes that belong to no message any more."""
        return repeated(self._waste, nbytes)
