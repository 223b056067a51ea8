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
from dataclasses import dataclass, field

_BYTES_RECEIVED = 128
"""Offset of ``tcpi_bytes_received`` (Linux 4.1 and later) in ``struct tcp_info``."""
_HEARTBEAT_BYTES_PER_SECOND = 64.0


def _open(fd: int, port: int) -> socket.socket | None:
    """A second handle of a connection that was accepted at ``port``; None where ``fd`` is another file by now."""
    try:
        handle = socket.socket(fileno=os.dup(fd))
    except OSError:
        return None
    with contextlib.suppress(OSError, IndexError):
        if handle.getsockname()[1] == port:
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


@dataclass
class UnreadBytesGuard:
    """Counts the bytes that arrived on each connection since its last whole message.

    ``served``: the connections on which a message came. The receiving thread adds them (a set's ``add`` is atomic).
    """

    limit: int
    served: set[int] = field(default_factory=set)
    _since: dict[int, float] = field(default_factory=dict)  # bytes at the last message, plus heartbeats since

    def over(self, connections: list[int], port: int, seconds: float) -> list[int]:
        """The connections with more than ``limit`` unserved bytes; ``seconds`` have passed since the last call."""
        found = []
        alive = set(connections)
        self._since = {fd: since for fd, since in self._since.items() if fd in alive}
        for fd in connections:
            total = bytes_received(fd, port)
            if total is None:
                continue
            since = self._since.get(fd, 0.0) + _HEARTBEAT_BYTES_PER_SECOND * seconds
            if fd in self.served or since > total:  # a whole message, an idle peer, or a new connection
                self.served.discard(fd)
                since = float(total)
            self._since[fd] = since
            if total - since > self.limit:
                found.append(fd)
        return found
