"""Messages over one TLS connection, for both ends of the control plane, and their bounds.

A message is a head, the sizes of its three frames, and the frames. A message of three empty frames is a keep-alive: P
returns it, and nobody else sees it.
"""

from __future__ import annotations

import re
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvferry.transport.errors import TransportError
from kvferry.transport.fair_table import FairTable
from kvferry.transport.host import is_ours
from kvferry.transport.sockets import READABLE, SILENCE_SECONDS, WRITABLE, Sockets

SILENCE_HERE_SECONDS = 300.0
"""How long a peer on this host may send nothing; the kernel reports at once when a process of this host ends. Where
other threads spin on all cores with ``sched_yield``, as vLLM's workers do, a thread has been seen to wait 48 seconds
for a core (Linux 6.18)."""
MAX_HELD_BYTES = 16 << 20
"""Bytes of unfinished and of unsent messages that one end holds, over all of its connections."""
MESSAGE_BYTES = 256
"""What an unsent message takes beside its bytes."""
ADMITTED, FULL = b"\1", b"\3"
"""What P says once it knows D's key; at the last one it ends the connection."""
ANSWER, HEARD = b"kvferry ", re.compile(rb"(?:kvfer)?ry ([0-9a-f]{12})")
"""What P says to one who does not know its key, before its fingerprint and the end. OpenSSL may have read five bytes of
it, as the head of a record."""
KEEP_ALIVE = [b"", b"", b""]
_HEAD = struct.Struct(">BBI")
_RECORD_BYTES = 16 << 10
"""Bytes of one read: those of the largest TLS record, so that OpenSSL keeps nothing that no poll would tell of."""
_READS = 64
"""Reads of one turn for one large message; others are served between."""


def silence(address: str) -> float:
    """Seconds for which a peer at ``address`` may send nothing."""
    return SILENCE_HERE_SECONDS if is_ours(address) else SILENCE_SECONDS


class Shared:
    """What all connections of one end share: ``sockets`` watches them.

    Where they hold too many bytes, connections of the address that holds most are put into ``excess``, to be ended.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes
        self.sockets = Sockets()
        self.excess: list[Stream] = []
        self._held: FairTable[Stream, Stream] = FairTable(MAX_HELD_BYTES + max_message_bytes, largest=True)

    def count(self, stream: Stream, size: int) -> None:
        """Take note of the bytes that a connection holds."""
        if size:
            self.excess += self._held.put(stream.address.encode(), stream, stream, size)
        else:
            self._held.pop(stream)


class StreamEndedError(TransportError):
    """A connection that must be closed. ``reason``: "gone" or "oversize"."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Stream:
    """One connection: cuts the bytes that arrive into messages, and queues those that leave.

    Attributes:
        address: the numeric address of the peer.
        identity: the listener's name of the connection.
        heard_at: when bytes last arrived, by ``time.monotonic``.
    """

    def __init__(
        self, sock: ssl.SSLSocket, address: str, shared: Shared, serve: Callable[[Stream], None], identity: bytes = b""
    ) -> None:
        self.address, self.identity, self.heard_at = address, identity, time.monotonic()
        self.sock, self._shared = sock, shared
        self._serve: Callable[[], object] = partial(serve, self)
        self._arrived = bytearray()
        self._missing = 0  # bytes of the message whose head has come
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._counted = 0  # bytes that ``shared`` knows of
        self._broken = False  # whether nothing can be sent any more
        shared.sockets.watch(sock, self._serve)

    def receive(self) -> list[list[bytes]]:
        """The messages that are whole. Reads once, or for some milliseconds where a large message is on its way; sends
        what is queued.

        Raises:
            StreamEndedError: the peer has closed the connection, or sends a message that is too large.
        """
        if self._unsent:
            self._flush()  # where it fails, what the peer has said before still counts
        found: list[list[bytes]] = []
        for _ in range(_READS):
            try:
                data = self.sock.recv(_RECORD_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            except OSError as error:
                raise StreamEndedError("gone", f"the peer is gone ({error.strerror or error})") from None
            if not data:
                raise StreamEndedError("gone", "the peer is gone")
            self.heard_at = time.monotonic()
            self._arrived += data
            self._missing -= len(data)
            if self._missing <= 0:
                found = self._cut()
                if found or not self._missing:
                    break
        self._count()
        if self._broken and not found:
            raise StreamEndedError("gone", "the peer is gone")
        return found

    def _cut(self) -> list[list[bytes]]:
        found = []
        at = self._missing = 0
        while len(self._arrived) - at >= _HEAD.size:
            first, second, third = _HEAD.unpack_from(self._arrived, at)
            if first + second + third > self._shared.max_message_bytes:
                text = f"a message of {first + second + third} bytes, limit {self._shared.max_message_bytes}"
                raise StreamEndedError("oversize", text)
            body = at + _HEAD.size
            end = body + first + second + third
            if len(self._arrived) < end:
                self._missing = end - len(self._arrived)
                break
            frames = bytes(self._arrived[body:end])
            found.append([frames[:first], frames[first : first + second], frames[first + second :]])
            at = end
        del self._arrived[:at]
        return found

    def send(self, frames: list[bytes]) -> bool:
        """Send a message, or queue it until the peer reads. Returns whether the connection stands."""
        if self._broken:
            return False
        first, second, third = frames
        data = memoryview(b"".join((_HEAD.pack(len(first), len(second), len(third)), *frames)))
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        return self._flush()

    def close(self) -> None:
        """Close the connection; forget what has arrived and what is queued. Idempotent."""
        self._arrived.clear()
        self._unsent.clear()
        self._unsent_bytes = 0
        self._count()
        self._shared.sockets.drop(self.sock)
        self._serve = lambda: None  # no circle of references is left

    def _flush(self) -> bool:
        """Send what is queued, as far as the peer reads. Returns whether the connection stands."""
        try:
            while self._unsent and not self._broken:
                sent = self.sock.send(self._unsent[0])
                self._unsent_bytes -= sent
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:
            self._broken, self._unsent_bytes = True, 0
            self._unsent.clear()
        self._count()
        if not self._broken:  # watching costs nothing where the events are the same
            self._shared.sockets.watch(self.sock, self._serve, READABLE | WRITABLE if self._unsent else READABLE)
        return not self._broken

    def _count(self) -> None:
        size = len(self._arrived) + self._unsent_bytes + MESSAGE_BYTES * len(self._unsent)
        if size != self._counted:
            self._counted = size
            self._shared.count(self, size)
