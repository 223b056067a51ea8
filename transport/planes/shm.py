"""The shared-memory data plane, for two processes of one host.

P makes one arena of slots per channel, packs into a slot, and sends a record over a socket; D unpacks straight from the
slot and sends a record back. Where the caches of P or D lie on a GPU, its kernels pack or unpack, and the arena is
page-locked.

The socket is a Unix socket in the abstract namespace: it needs no name in a file system, so SIGKILL leaves nothing
behind; it exists only inside one network namespace, so that another container or host cannot be mistaken for this one;
it carries the arena's descriptor; and it ends when the peer ends.

Bytes on the socket, little endian: D sends ``secret`` and ``channel``; P answers with the arena's descriptor and
``GEOMETRY``; then P sends ``FILLED`` and D ``FREED`` records, each within the other's slot count.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import torch
from msgspec import Meta

from kvferry.transport import cuda
from kvferry.transport.channels import CPU, Received, RecvChannel, SendChannel, Slot
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import PlaneContext, decode_payload
from kvferry.transport.planes.lent_files import (
    SOCKET_NAME_BYTES,
    connect_unix,
    connection,
    listen_unix,
    receive_fds,
    same_user,
)
from kvferry.transport.planes.push import PushReceiver, WindowedSender
from kvferry.transport.planes.socket_plane import SocketAttach, SocketPlane
from kvferry.transport.registry import DEFAULT_SLOT_BYTES, GPU_SLOT_BYTES
from kvferry.transport.sockets import EXHAUSTED, SECRET_BYTES
from kvferry.transport.staging import SlotPool

MAX_SLOTS = 8
"""Slots of one channel; more slots would only use more of the cache."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
GEOMETRY = struct.Struct("<QI")
"""Slot bytes, number of slots."""
FILLED = struct.Struct("<QII")
"""Tag, slot index, bytes in it."""
FREED = struct.Struct("<I")
"""Slot index."""


class ShmOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``name``: of P's socket."""

    name: Annotated[bytes, Meta(min_length=SOCKET_NAME_BYTES, max_length=SOCKET_NAME_BYTES)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    uid: Annotated[int, Meta(ge=0, lt=1 << 32)]


class Arena:
    """``num_slots`` slots of ``slot_bytes`` in a sealed memfd that one process writes and another maps read-only.

    ``close``, or the end of the last tensor on it, unmaps the arena. For caches of a GPU ``device`` its memory is
    page-locked from the mapping to just before the unmapping.
    """

    def __init__(
        self, mapping: mmap.mmap, slot_bytes: int, num_slots: int, device: torch.device, *, read_only: bool
    ) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._mapping: mmap.mmap | None = mapping
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] | None = np.frombuffer(mapping, dtype=np.uint8)
        self._address: int = self._bytes.ctypes.data
        if device.type == "cuda":
            cuda.register_host(self._address, len(mapping), device, read_only=read_only)
            # Every tensor on the memory holds this array, and the array holds the mapping. A weak reference to the
            # mapping itself would end only after the unmapping.
            weakref.finalize(self._bytes, cuda.unregister_host, self._address, device).atexit = False

    @classmethod
    def create(cls, slot_bytes: int, num_slots: int, device: torch.device = CPU) -> tuple[Arena, int]:
        """A new arena and its file descriptor, which the caller closes. Raises TransportError: there is no memory or no
        descriptor for it, or it cannot be page-locked."""
        with contextlib.ExitStack() as on_error:
            try:
                fd = os.memfd_create("kvferry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                on_error.callback(os.close, fd)
                os.ftruncate(fd, slot_bytes * num_slots)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
                mapping = mmap.mmap(fd, slot_bytes * num_slots)
            except OSError as error:
                raise TransportError(f"shm: no shared memory can be had: {error.strerror}") from None
            arena = cls(mapping, slot_bytes, num_slots, device, read_only=False)
            on_error.pop_all()
            return arena, fd

    @classmethod
    def attach(cls, fd: int, slot_bytes: int, num_slots: int, device: torch.device = CPU) -> Arena:
        """The arena behind a peer's descriptor, read-only. Takes over ``fd``. Raises ProtocolError: the file is not as
        the peer described it, or could shrink while it is mapped (SIGBUS). Raises TransportError: it cannot be mapped,
        or not page-locked."""
        try:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                raise ProtocolError("shm: the peer's descriptor is no memfd") from None
            size = os.fstat(fd).st_size
            if not seals & fcntl.F_SEAL_SHRINK or size != slot_bytes * num_slots:
                raise ProtocolError(
                    f"shm: the peer's memory is {size} bytes with seals {seals:#x}, "
                    f"expected {num_slots} sealed slots of {slot_bytes}"
                )
            try:
                mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
            except OSError as error:
                raise TransportError(f"shm: the peer's memory cannot be mapped: {error.strerror}") from None
            return cls(mapping, slot_bytes, num_slots, device, read_only=True)
        finally:
            os.close(fd)

    def address(self, index: int) -> int:
        """Address of a slot's first byte."""
        return self._address + index * self.slot_bytes

    def tensor(self) -> torch.Tensor:
        """uint8 [num_slots * slot_bytes] of an arena that was created here; keeps the mapping alive."""
        return torch.from_numpy(self._bytes)

    def close(self) -> None:
        """Unmap the arena, at once or as soon as the last tensor on it is gone. Idempotent."""
        self._bytes = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a slot's tensor is alive: the mapping ends with it
                mapping.close()


def _receive(channel: ShmChannel, form: struct.Struct, take: Callable[..., None]) -> object:
    """Call ``take`` with the fields of each record that has arrived. The channel fails where the peer is gone, where a
    record is torn, and where ``take`` raises ProtocolError."""
    try:
        for _ in range(8 * MAX_SLOTS):  # a peer that sends without end must not keep us here
            data = channel.sock.recv(256)
            if not data:
                raise ConnectionResetError
            if len(data) != form.size:
                raise ProtocolError(f"shm: a record of {len(data)} bytes, expected {form.size}")
            take(*form.unpack(data))
    except BlockingIOError:
        return EXHAUSTED
    except OSError:
        channel.fail(f"shm: the {channel.peer} closed the channel or died")
    except ProtocolError as error:
        channel.fail(str(error))
    return None


def _send(channel: ShmChannel, record: bytes) -> None:
    try:
        channel.sock.send(record, socket.MSG_NOSIGNAL)
    except OSError as error:
        channel.fail(f"shm: the {channel.peer} is gone: {error}")


class ShmSendChannel(WindowedSender):
    """P's end. Its slots lie in the arena, which stays mapped until the last acquired slot is back."""

    peer: ClassVar[str] = "decode rank"

    def __init__(self, plane: ShmPlane, sock: socket.socket, arena: Arena) -> None:
        pool = SlotPool(arena.slot_bytes, arena.num_slots * arena.slot_bytes, slab=arena.tensor())
        super().__init__(pool, arena.slot_bytes, arena.num_slots)
        self._plane, self.sock, self._arena = plane, sock, arena

    def give_back(self, slot: Slot) -> None:
        super().give_back(slot)
        self._unmap_if_done()

    def on_readable(self) -> object:
        """The decode rank freed slots, or is gone."""
        return _receive(self, FREED, self._freed)

    def _freed(self, index: int) -> None:
        if not self.free(index):
            raise ProtocolError(f"shm: the decode rank freed slot {index}, which it does not hold")

    def _transmit(self, slot: Slot, nbytes: int, tag: int) -> None:
        _send(self, FILLED.pack(tag, slot.index, nbytes))

    def _give_up(self) -> None:
        self._plane.sockets.mute(self.sock)
        super()._give_up()

    def _close(self) -> None:
        self._plane.drop(self, self.sock)
        super()._give_up()
        self._unmap_if_done()

    def _unmap_if_done(self) -> None:
        if self.closed and not self.acquired:  # no kernel packs into a slot
            self.pool.clear()
            self._arena.close()
            self._plane.left_bytes += self._arena.slot_bytes * self._arena.num_slots


class ShmRecvChannel(PushReceiver):
    """D's end. D reads messages from the slots into which P packed them."""

    plane_name = "shm"
    peer: ClassVar[str] = "prefill rank"

    def __init__(self, plane: ShmPlane, sock: socket.socket) -> None:
        super().__init__()
        self._plane = plane
        self.sock = sock
        self._arena: Arena | None = None
        self._held: set[int] = set()

    def on_readable(self) -> object:
        """The prefill rank sent its memory, filled slots, or is gone."""
        try:
            if self._arena is None and not self._take_arena():
                return None
        except (ProtocolError, TransportError) as error:
            self.fail(str(error))
            return None
        return _receive(self, FILLED, self._filled)

    def _take_arena(self) -> bool:
        try:
            data, fds, flags = receive_fds(self.sock)
        except BlockingIOError:
            return False
        except OSError:
            data, fds, flags = b"", [], 0
        if not data and not fds:
            self.fail("shm: the prefill rank refused the channel or died")
            return False
        if len(fds) != 1 or len(data) != GEOMETRY.size or flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(
                f"shm: {len(data)} bytes and {len(fds)} descriptors, expected the prefill rank's memory"
            )
        slot_bytes, num_slots = GEOMETRY.unpack(data)
        if slot_bytes > self._plane.slot_bytes or not 0 < num_slots <= MAX_SLOTS:
            os.close(fds[0])
            raise ProtocolError(
                f"shm: the prefill rank made {num_slots} slots of {slot_bytes} bytes, which is too large"
            )
        self._arena = Arena.attach(fds[0], slot_bytes, num_slots, self._plane.device)
        return True

    def _filled(self, tag: int, index: int, nbytes: int) -> None:
        arena = self._arena
        assert arena is not None
        if index >= arena.num_slots or index in self._held or not 0 < nbytes <= arena.slot_bytes:
            raise ProtocolError(f"shm: the prefill rank filled slot {index} with {nbytes} bytes, which cannot be")
        expected = self.check_size(tag, nbytes)
        self._held.add(index)
        if expected is None:  # forgotten, or never announced
            self._release(index)
        else:
            del self.expected[tag]
            self.arrived.append(Received(tag, arena.address(index), nbytes, partial(self._release, index)))

    def _release(self, index: int) -> None:
        self._held.remove(index)
        if self.closed:
            self._unmap_if_done()
        elif self.error is None:
            _send(self, FREED.pack(index))

    def _give_up(self) -> None:
        self._plane.sockets.mute(self.sock)

    def _close(self) -> None:
        self._plane.drop(self, self.sock)
        self.release_arrived()
        self._unmap_if_done()

    def _unmap_if_done(self) -> None:
        if self._arena is not None and not self._held:
            self._arena.close()


ShmChannel = ShmSendChannel | ShmRecvChannel


class ShmPlane(SocketPlane):
    """Shared memory of this host; ``slot_bytes`` above the default is lowered to it."""

    name: ClassVar[str] = "shm"
    same_host: ClassVar[bool] = True

    def __init__(self, context: PlaneContext) -> None:
        most = DEFAULT_SLOT_BYTES if context.memory.device.type == "cpu" else GPU_SLOT_BYTES
        super().__init__(min(context.slot_bytes, most))
        self._limit_bytes = self.left_bytes = context.staging_bytes
        self.device = context.memory.device
        self._name = b""

    @property
    def staging_bytes(self) -> int:
        return self._limit_bytes - self.left_bytes  # D's slots are P's slots

    def offer(self) -> bytes:
        if not self._name:
            listener, self._name = listen_unix()
            self.listen(listener, welcome=same_user)
        return msgspec.msgpack.encode(ShmOffer(self._name, self.secrets.new(), os.getuid()))

    def connect(self, offer: bytes, host: str) -> tuple[RecvChannel, bytes]:
        theirs = decode_payload(offer, ShmOffer, "shm offer")
        if theirs.uid != os.getuid():
            raise PlaneUnavailableError(f"shm: the prefill rank runs as uid {theirs.uid}, we run as {os.getuid()}")
        sock, channel_id = connect_unix(self.name, theirs.name, theirs.secret)
        channel = ShmRecvChannel(self, sock)
        self.channels[channel] = None
        self.sockets.watch(sock, channel.on_readable)
        return channel, msgspec.msgpack.encode(SocketAttach(channel_id, self.slot_bytes))

    def accept(self, payload: bytes) -> tuple[SendChannel, bytes]:
        attach = decode_payload(payload, SocketAttach, "shm attach")
        self.progress()
        sock = connection(self.pending, attach.channel)
        slot_bytes = min(self.slot_bytes, attach.slot_bytes)
        num_slots = min(MAX_SLOTS, max(2, self.left_bytes // (2 * slot_bytes)))
        nbytes = slot_bytes * num_slots
        if nbytes > self.left_bytes:
            self.sockets.drop(sock)
            raise TransportError(
                f"shm: staging memory is used up by {len(self.channels)} channels; raise staging_bytes"
            )
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.sockets.drop, sock)
            arena, fd = Arena.create(slot_bytes, num_slots, self.device)
            on_error.callback(arena.close)
            try:
                socket.send_fds(sock, [GEOMETRY.pack(slot_bytes, num_slots)], [fd], socket.MSG_NOSIGNAL)
            except OSError as error:
                raise TransportError(f"shm: the decode rank is gone: {error}") from None
            finally:
                os.close(fd)
            on_error.pop_all()
        self.left_bytes -= nbytes
        channel = ShmSendChannel(self, sock, arena)
        self.channels[channel] = None
        self.sockets.watch(sock, channel.on_readable)
        return channel, b""
