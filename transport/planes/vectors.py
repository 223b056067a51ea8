"""Memory in pieces, in the form of ``sendmsg`` and ``recvmsg``, so that scattered pages need no staging."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.transport.channels import Pieces

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
