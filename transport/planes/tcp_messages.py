"""Messages on a TCP channel: ``HEADER``, bytes that lie in pieces of memory, and a last byte, ``COMPLETE``; and their
encryption.

Memory in pieces has the form of ``sendmsg`` and ``recvmsg``, so that scattered pages need no staging.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvferry.transport.channels import Pieces, Slot
from kvferry.transport.errors import PlaneUnavailableError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAX_PIECES = 1024
"""IOV_MAX of Linux."""

RECEIVE_BYTES = 256 << 10
"""Bytes that one call receives at most. During its copy the sender's packets queue up at the socket: with calls of
256 KiB / 512 KiB / 1 MiB, 64 MiB over loopback in pieces of 8 KiB moved at 4.5 / 4.5 / 3.4 GB/s. Sending needs no such
limit."""

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

HEADER = struct.Struct("<QQ")
"""The tag, and the number of bytes that follow without the last byte."""
COMPLETE: npt.NDArray[np.uint8] = np.ones(1, dtype=np.uint8)
"""The last byte of a message whose bytes are all P's. Zero where P stopped reading its pages before they were sent: P's
control message about that goes over another socket, and may arrive later."""


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
        self.vector = Vector(together(self._of_header(HEADER.size), pieces, byte(COMPLETE)))

    def stop_reading(self, instead: Callable[[int], Pieces]) -> None:
        """Read no page any more: the unsent rest becomes ``instead(number of bytes)``, zeros, and the last byte 0."""
        self.paged = False
        head = max(0, HEADER.size - self.vector.done)
        rest = instead(self.vector.left - head)
        self.vector = Vector(together(self._of_header(head), rest) if head else rest)

    def _of_header(self, nbytes: int) -> Pieces:
        """The last bytes of the header."""
        return Pieces(np.array([self._header.ctypes.data + HEADER.size - nbytes]), np.array([nbytes]))


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


def byte(of: npt.NDArray[np.uint8]) -> Pieces:
    """The one byte of an array, as pieces."""
    return Pieces(np.array([of.ctypes.data]), np.array([1]))


# --- encryption -----------------------------------------------------------------------------------------------------

KEY_BYTES = 32
TAG_BYTES = 16
"""What a message grows by."""


def new_key() -> bytes:
    """P: the key of a new channel."""
    return secrets.token_bytes(KEY_BYTES)


class Cipher:
    """One end of an encrypted channel: AES-256-GCM with a key of the channel's own.

    P makes the key, and D has it by the control connection, which is encrypted. Only P sends on the channel, so each
    key and nonce is used once: the nonce is the number of the message. The header of a message is authenticated with
    it. So bytes that were changed, left out, repeated or moved are never taken for P's.

    Over it, ``tcp`` moves twice the bytes in a second that ``zmq`` moves over CURVE (benchmarks/planes/planes.py).
    The kernel's TLS would need its module on both hosts.

    Raises:
        PlaneUnavailableError: this machine lacks the package ``cryptography``, or its version is too old.
    """

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
