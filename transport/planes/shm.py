"""The shared-memory data plane, for two processes of one host.

P makes one arena of slots per channel, packs into a slot, and sends a record over a socket; D unpacks straight from the
slot and sends a record back. Where the caches of P or D lie on a GPU, its kernels pack or unpack, and the arena is
page-locked.
The socket is a Unix socket in the abstract namespace: it needs no name in a file system, so SIGKILL leaves nothing
behind; it exists only inside one network namespace, so that another container or host cannot be mistaken for this one;
it carries the arena's descriptor; and it ends when the peer ends.

Bytes on the socket, little endian: D sends ``secret`` and ``channel``; P answers with the arena's descriptor and
``_GEOMETRY``; then P sends ``_FILLED`` and D ``_FREED`` records, each within the other's slot count.
"""

from __future__ import annotations

import array
import os
import secrets
import socket
import struct
from functools import partial
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from kvferry.transport.channels import ExpectingChannel, Received, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import PlaneContext, decode_payload
from kvferry.transport.planes.shm_arena import Arena
from kvferry.transport.socket_plane import SocketAttach, SocketPlane
from kvferry.transport.sockets import SECRET_BYTES

BEST_SLOT_BYTES = 4 << 20
"""Large enough for the fixed cost of a chunk not to count: a whole hand-over of 128 MiB takes 47 / 40 / 31 / 31 ms of
D's processor with slots of 1 / 2 / 4 / 8 MiB, though small slots stay in a core's cache."""
MAX_SLOTS = 8
"""Slots of one channel; more slots would only use more of the cache."""

_PREFIX, _NAME_BYTES = b"\0kvferry-", 16
"""The name of P's socket: this prefix, which is abstract, and the hexadecimal digits of so many random bytes."""
_DIGITS = frozenset(b"0123456789abcdef")
_GEOMETRY = struct.Struct("<QI")
"""Slot bytes, number of slots."""
_FILLED = struct.Struct("<QII")
"""Tag, slot index, bytes in it."""
_FREED = struct.Struct("<I")
"""Slot index."""


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``name``: of P's socket. It must have the form that P gives it, so that no path of a file is connected."""

    name: Annotated[bytes, Meta(min_length=len(_PREFIX) + 2 * _NAME_BYTES, max_length=len(_PREFIX) + 2 * _NAME_BYTES)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    uid: Annotated[int, Meta(ge=0, lt=1 << 32)]


class _Bell:
    """The socket of one channel, which sends and receives whole records."""

    def __init__(self, sock: socket.socket, record: struct.Struct) -> None:
        self.sock = sock
        self._record = record

    def ring(self, data: bytes) -> None:
        """Send one record. Raises OSError: the peer is gone, or left more records unread than there are slots."""
        self.sock.send(data, socket.MSG_NOSIGNAL)

    def ready(self) -> tuple[list[tuple[int, ...]], bool]:
        """The records that have arrived, and whether the peer is gone. Raises ProtocolError for a torn record."""
        records: list[tuple[int, ...]] = []
        for _ in range(8 * MAX_SLOTS):  # a peer that sends without end must not keep us here
            try:
                data = self.sock.recv(256)
            except BlockingIOError:
                return records, False
            except OSError:
                return records, True
            if not data:
                return records, True
            if len(data) != self._record.size:
                raise ProtocolError(f"shm: a record of {len(data)} bytes, expected {self._record.size}")
            records.append(self._record.unpack(data))
        return records, False


class ShmSendChannel(SendChannel):
    """P's end. Its slots lie in the arena, which stays mapped until the last acquired slot is back."""

    def __init__(self, plane: ShmPlane, sock: socket.socket, arena: Arena) -> None:
        self.slot_bytes = arena.slot_bytes
        self._plane = plane
        self._arena = arena
        self._bell = _Bell(sock, _FREED)
        self._slots = [Slot(arena.tensor(i), i) for i in range(arena.num_slots)]
        self._free = list(reversed(range(arena.num_slots)))
        self._taken: set[int] = set()
        self._sent: set[int] = set()
        self._closed = False

    def acquire(self) -> Slot | None:
        if self._closed or self.error is not None or not self._free:
            return None
        index = self._free.pop()
        self._taken.add(index)
        return self._slots[index]

    def send(self, slot: Slot, nbytes: int, tag: int) -> None:
        assert 0 < nbytes <= slot.nbytes
        if self._closed or self.error is not None:
            self.give_back(slot)
            return
        self._taken.remove(slot.index)
        self._sent.add(slot.index)
        try:
            self._bell.ring(_FILLED.pack(tag, slot.index, nbytes))
        except OSError as error:
            self.fail(f"shm: the consumer is gone: {error}")

    def give_back(self, slot: Slot) -> None:
        self._taken.remove(slot.index)
        self._free.append(slot.index)
        if self._closed:
            self._unmap_if_done()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._plane.drop(self, self._bell.sock)
            self._slots.clear()
            self._unmap_if_done()

    def on_readable(self) -> None:
        """The consumer freed slots, or is gone."""
        try:
            records, gone = self._bell.ready()
            for (index,) in records:
                if index not in self._sent:
                    raise ProtocolError(f"shm: the consumer freed slot {index}, which it does not hold")
                self._sent.remove(index)
                self._free.append(index)
        except ProtocolError as error:
            self.fail(str(error))
            return
        if gone:
            self.fail("shm: the consumer closed the channel or died")

    def _give_up(self) -> None:
        self._plane.sockets.mute(self._bell.sock)
        self._free.extend(self._sent)
        self._sent.clear()

    def _unmap_if_done(self) -> None:
        if not self._taken:  # and no kernel packs into a slot
            self._arena.close()
            self._plane._left_bytes += self._arena.slot_bytes * self._arena.num_slots


class ShmRecvChannel(ExpectingChannel):
    """D's end. D reads messages from the slots into which P packed them."""

    def __init__(self, plane: ShmPlane, sock: socket.socket) -> None:
        super().__init__()
        self._plane = plane
        self._sock = sock
        self._bell = _Bell(sock, _FILLED)
        self._arena: Arena | None = None
        self._held: set[int] = set()
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._plane.drop(self, self._sock)
            self.release_arrived()
            self._unmap_if_done()

    def on_readable(self) -> None:
        """The producer sent its memory, filled slots, or is gone."""
        try:
            if self._arena is None and not self._take_arena():
                return
            records, gone = self._bell.ready()
            for tag, index, nbytes in records:
                self._filled(tag, index, nbytes)
        except (ProtocolError, TransportError) as error:
            self.fail(str(error))
            return
        if gone:
            self.fail("shm: the producer closed the channel or died")

    def _take_arena(self) -> bool:
        try:
            data, fds, flags = _recv_fd(self._sock)
        except BlockingIOError:
            return False
        except OSError:
            data, fds, flags = b"", [], 0
        if not data and not fds:
            self.fail("shm: the producer refused the channel or died")
            return False
        if len(fds) != 1 or len(data) != _GEOMETRY.size or flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(f"shm: {len(data)} bytes and {len(fds)} descriptors, expected the producer's memory")
        slot_bytes, num_slots = _GEOMETRY.unpack(data)
        if slot_bytes > self._plane.slot_bytes or not 0 < num_slots <= MAX_SLOTS:
            os.close(fds[0])
            raise ProtocolError(f"shm: the producer made {num_slots} slots of {slot_bytes} bytes, which is too large")
        self._arena = Arena.attach(fds[0], slot_bytes, num_slots, self._plane._device)
        return True

    def _filled(self, tag: int, index: int, nbytes: int) -> None:
        arena = self._arena
        assert arena is not None
        if index >= arena.num_slots or index in self._held or not 0 < nbytes <= arena.slot_bytes:
            raise ProtocolError(f"shm: the producer filled slot {index} with {nbytes} bytes, which cannot be")
        expected = self.expected.pop(tag, None)
        if expected is not None and expected.nbytes != nbytes:
            raise ProtocolError(f"shm: message {tag:#x} has {nbytes} bytes, expected {expected.nbytes}")
        self._held.add(index)
        if expected is None:  # forgotten, or never announced
            self._release(index)
        else:
            self.arrived.append(Received(tag, arena.address(index), nbytes, partial(self._release, index)))

    def _release(self, index: int) -> None:
        self._held.remove(index)
        if self._closed:
            self._unmap_if_done()
        elif self.error is None:
            try:
                self._bell.ring(_FREED.pack(index))
            except OSError as error:
                self.fail(f"shm: the producer is gone: {error}")

    def _give_up(self) -> None:
        self._plane.sockets.mute(self._sock)

    def _unmap_if_done(self) -> None:
        if self._arena is not None and not self._held:
            self._arena.close()


class ShmPlane(SocketPlane):
    """Shared memory of this host; ``slot_bytes`` above ``BEST_SLOT_BYTES`` is lowered to it."""

    name: ClassVar[str] = "shm"
    same_host: ClassVar[bool] = True

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(min(context.slot_bytes, BEST_SLOT_BYTES))
        self._limit_bytes = self._left_bytes = context.staging_bytes
        self._device = context.memory.device
        self._name = b""

    @property
    def staging_bytes(self) -> int:
        return self._limit_bytes - self._left_bytes  # D's slots are P's slots

    def offer(self) -> bytes:
        if not self._name:
            name = _PREFIX + secrets.token_hex(_NAME_BYTES).encode()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            listener.bind(name)
            self.listen(listener, welcome=_same_user)
            self._name = name
        return msgspec.msgpack.encode(_Offer(self._name, self.new_secret(), os.getuid()))

    def connect(self, offer: bytes, host: str) -> tuple[RecvChannel, bytes]:
        theirs = decode_payload(offer, _Offer, "shm offer")
        if not theirs.name.startswith(_PREFIX) or not _DIGITS.issuperset(theirs.name[len(_PREFIX) :]):
            raise ProtocolError(f"shm offer: {theirs.name!r} is no name of a KVFerry socket")
        if theirs.uid != os.getuid():
            raise PlaneUnavailableError(f"shm: the producer runs as uid {theirs.uid}, we run as {os.getuid()}")
        try:
            sock, attach = self.connect_unix(socket.SOCK_SEQPACKET, theirs.name, theirs.secret)
        except OSError as error:
            reason = "it is on another host or in another network namespace, or gone"
            if isinstance(error, BlockingIOError):
                reason = "too many consumers are connecting to it right now"
            raise PlaneUnavailableError(f"shm: the producer cannot be reached ({error.strerror}): {reason}") from None
        if not _same_user(sock):
            sock.close()
            raise PlaneUnavailableError("shm: the producer's socket is another user's")
        channel = ShmRecvChannel(self, sock)
        self.channels[channel] = None
        self.sockets.watch(sock, channel.on_readable)
        return channel, msgspec.msgpack.encode(attach)

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, SocketAttach, "shm attach")
        sock = self.take_connection(attach.channel)
        slot_bytes = min(self.slot_bytes, attach.slot_bytes)
        num_slots = min(MAX_SLOTS, max(2, self._left_bytes // (2 * slot_bytes)))
        nbytes = slot_bytes * num_slots
        if nbytes > self._left_bytes:
            self.sockets.drop(sock)
            raise TransportError(
                f"shm: staging memory is used up by {len(self.channels)} channels; raise staging_bytes"
            )
        try:
            arena, fd = Arena.create(slot_bytes, num_slots, self._device)
        except TransportError:
            self.sockets.drop(sock)
            raise
        try:
            socket.send_fds(sock, [_GEOMETRY.pack(slot_bytes, num_slots)], [fd], socket.MSG_NOSIGNAL)
        except OSError as error:
            arena.close()
            self.sockets.drop(sock)
            raise TransportError(f"shm: the consumer is gone: {error}") from None
        finally:
            os.close(fd)
        self._left_bytes -= nbytes
        channel = ShmSendChannel(self, sock, arena)
        self.channels[channel] = None
        self.sockets.watch(sock, channel.on_readable)
        return channel, b""


def _same_user(sock: socket.socket) -> bool:
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def _recv_fd(sock: socket.socket) -> tuple[bytes, list[int], int]:
    fds = array.array("i")
    data, ancillary, flags, _ = sock.recvmsg(256, socket.CMSG_LEN(4 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds), flags
