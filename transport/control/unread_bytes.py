"""Ends connections that send without end. Linux only (``TCP_INFO``).

ZMQ bounds the size of a frame and the number of queued messages, but not the number of frames of one message: a peer
that never sends the last frame makes libzmq keep all frames. So KVFerry reads from the kernel how many bytes arrived on
each connection since its last whole message.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.transport.control import framing

_BYTES_RECEIVED = 128
"""Offset of ``tcpi_bytes_received`` (Linux 4.1 and later) in ``struct tcp_info``."""
_HEARTBEAT_BYTES_PER_SECOND = 128.0
"""More than the heartbeats of both directions take, encrypted."""
_SMALL = 64 << 10
"""Unread bytes whose age does not matter."""


def _open(fd: int, port: int) -> socket.socket | None:
    """A second handle of a connection from or to ``port``; None where ``fd`` is another file by now."""
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        handle = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    with contextlib.suppress(OSError, IndexError):
        if port in (handle.getsockname()[1], handle.getpeername()[1]):
            return handle
    handle.close()
    return None


def bytes_received(fd: int, port: int) -> int | None:
    """Bytes that ever arrived on the TCP connection ``fd``; None where the number cannot be read."""
    handle = _open(fd, port)
    if handle is None:
        return None
    with handle:
        try:
            info = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
        except OSError:
            return None
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]) if len(info) >= _BYTES_RECEIVED + 8 else None


def shutdown_connection(fd: int, port: int) -> bool:
    """Shut the TCP connection ``fd`` down, if it still is a connection of ``port``; libzmq then closes it."""
    handle = _open(fd, port)
    if handle is None:
        return False
    with handle, contextlib.suppress(OSError):
        handle.shutdown(socket.SHUT_RDWR)
    return True


@dataclass(slots=True)
class _Count:
    at_message: float  # bytes at the last message, plus heartbeats since
    unread: float
    since: float  # when the oldest unread byte may have come
    looked: float


class UnreadBytesGuard:
    """Counts the bytes that arrived on each connection since its last whole message.

    ``limit`` bounds one connection, and the sum over all connections. ``served``: the connections on which a whole
    message has come since they were looked at; the caller adds them.
    """

    def __init__(self, limit: int = framing.MAX_UNFINISHED_BYTES) -> None:
        self.limit = limit
        self.served: set[int] = set()
        self._counts: dict[int, _Count] = {}

    def forget(self, fd: int) -> None:
        """The connection ``fd`` is gone."""
        self._counts.pop(fd, None)
        self.served.discard(fd)

    def over(self, connections: Iterable[tuple[int, int]], now: float) -> list[int]:
        """Look at some connections, each a descriptor and a port. Returns those to end: their unread bytes are too many
        or too old, or are the most where those of all connections together are too many."""
        found = []
        for fd, port in connections:
            total = bytes_received(fd, port)
            if total is None:
                continue
            count = self._counts.get(fd)
            if count is None or fd in self.served:  # of a new connection every byte counts
                count = self._counts[fd] = _Count(float(total) if fd in self.served else 0.0, 0.0, now, now)
                self.served.discard(fd)
            count.at_message = min(total, count.at_message + _HEARTBEAT_BYTES_PER_SECOND * (now - count.looked))
            count.looked = now
            count.unread = total - count.at_message
            if count.unread <= _SMALL:
                count.since = now
            elif count.unread > self.limit or now - count.since > framing.UNFINISHED_SECONDS:
                found.append(fd)
        excess = sum(count.unread for count in self._counts.values()) - self.limit
        for fd, count in sorted(self._counts.items(), key=lambda item: -item[1].unread) if excess > 0 else ():
            if excess <= 0:
                break
            excess -= count.unread
            if fd not in found:
                found.append(fd)
        return found
