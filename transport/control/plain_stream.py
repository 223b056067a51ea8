"""Messages over a bare TCP connection, for the setting ``insecure``; both ends of the control plane use it.

libzmq is not used here: a peer of a ZMQ socket without CURVE can end this process (a chosen routing id makes libzmq
abort). A message is a head, with a mark and the sizes of three frames, and the frames. Every bound is exact.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import OrderedDict, deque

import zmq

from kvferry.transport.control import framing

_HEAD = struct.Struct(">4sBBI")
_MARK = b"KVF\x01"
ZMTP_SIGNATURE = b"\xff"
"""The first byte of a ZMQ peer."""
_READ_BYTES, _LARGE_READ_BYTES = 16 << 10, 1 << 20
"""Bytes of one read, and of one read of a large message. A connection gets one read in a turn, so that others are
served beside it, and so that a turn handles some thousand messages at most."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


def tune(sock: socket.socket, silence: float) -> None:
    """Make a connection non-blocking, and let the kernel end it when its peer acknowledges nothing for ``silence``
    seconds."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1e3))


class Streams:
    """The bounds that all connections of one end share: bytes of unfinished messages, and bytes not yet sent."""

    def __init__(self, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes
        self.unfinished: OrderedDict[PlainStream, None] = OrderedDict()  # the longest unfinished message first
        self.unfinished_bytes = 0
        self.unsent: OrderedDict[PlainStream, None] = OrderedDict()
        self.unsent_bytes = 0

    def excess(self, now: float) -> list[tuple[PlainStream, str]]:
        """The streams to end, each with the reason: those whose message is unfinished for too long, and the longest
        unfinished or unsent ones while all together are too many bytes."""
        found: dict[PlainStream, str] = {}
        left = self.unfinished_bytes
        for stream in self.unfinished:
            if left <= framing.MAX_UNFINISHED_BYTES and now - stream.begun <= framing.UNFINISHED_SECONDS:
                break
            found[stream] = "flood"
            left -= stream.unfinished_bytes
        left = self.unsent_bytes
        for stream in self.unsent:
            if left <= framing.MAX_UNFINISHED_BYTES:
                break
            found[stream] = "full"
            left -= stream.unsent_bytes
        return list(found.items())


class StreamEndedError(Exception):
    """A connection that must be closed. ``reason``: "gone", "oversize", "handshake" (not our framing)."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class PlainStream:
    """One connection: cuts the bytes that arrive into messages, and queues those that leave."""

    def __init__(self, sock: socket.socket, streams: Streams) -> None:
        self.sock = sock
        self.begun = 0.0
        self.messages = 0  # whole messages that have arrived
        self._streams = streams
        self._arrived = bytearray()
        self._missing = 0  # bytes of the message whose head has come
        self._unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0

    @property
    def unfinished_bytes(self) -> int:
        return len(self._arrived)

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent)

    def receive(self) -> list[list[bytes]]:
        """Read once. Returns the messages that are whole.

        Raises:
            StreamEndedError: the peer has closed the connection, or what it sends is no message.
        """
        try:
            data = self.sock.recv(min(max(_READ_BYTES, self._missing), _LARGE_READ_BYTES))
        except BlockingIOError:
            return []
        except OSError as error:
            raise StreamEndedError("gone", f"the peer is gone ({error.strerror})") from None
        if not data:
            raise StreamEndedError("gone", "the peer is gone")
        self._streams.unfinished_bytes -= len(self._arrived)
        self._arrived += data
        try:
            return self._cut()
        finally:
            self._streams.unfinished_bytes += len(self._arrived)
            if not self._arrived:
                self._streams.unfinished.pop(self, None)
            elif self not in self._streams.unfinished:
                self.begun = time.monotonic()
                self._streams.unfinished[self] = None

    def _cut(self) -> list[list[bytes]]:
        found = []
        at = self._missing = 0
        while len(self._arrived) - at >= _HEAD.size:
            mark, first, second, third = _HEAD.unpack_from(self._arrived, at)
            if mark != _MARK:
                raise StreamEndedError("handshake", self._no_message())
            if first + second + third > self._streams.max_message_bytes:
                text = f"a message of {first + second + third} bytes, limit {self._streams.max_message_bytes}"
                raise StreamEndedError("oversize", text)
            end = at + _HEAD.size + first + second + third
            if len(self._arrived) < end:
                self._missing = end - len(self._arrived)
                break
            body = bytes(self._arrived[at + _HEAD.size : end])
            found.append([body[:first], body[first : first + second], body[first + second :]])
            at = end
        if found:
            del self._arrived[:at]
            self.messages += len(found)
            self._streams.unfinished.pop(self, None)  # what follows is another message, with a time of its own
        elif self._arrived[: len(_MARK)] != _MARK[: len(self._arrived)]:
            raise StreamEndedError("handshake", self._no_message())
        return found

    def _no_message(self) -> str:
        if self._arrived[:1] == ZMTP_SIGNATURE:
            return "the peer uses keys, and this engine is insecure; set `insecure` on both sides, or on none"
        return "the peer is no KVFerry control port or engine"

    def send(self, frames: list[bytes], *, later: bool = False) -> int:
        """Send a message, or queue it; only queue it where ``later``. Returns 0, or the error number."""
        if len(self._unsent) >= framing.SEND_QUEUE:
            return int(zmq.EAGAIN)
        first, second, third = frames
        data = memoryview(_HEAD.pack(_MARK, len(first), len(second), len(third)) + b"".join(frames))
        if not self._unsent:
            self._streams.unsent[self] = None
        self._unsent.append(data)
        self._count_unsent(len(data))
        return 0 if later else self.flush()

    def flush(self) -> int:
        """Send what is queued, as far as the peer reads. Returns 0, or the error number."""
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent[0])
            except BlockingIOError:
                return 0
            except OSError as error:
                return error.errno or 1
            self._count_unsent(-sent)
            rest = self._unsent[0][sent:]
            if rest:
                self._unsent[0] = rest
            else:
                self._unsent.popleft()
        self._streams.unsent.pop(self, None)
        return 0

    def _count_unsent(self, size: int) -> None:
        self.unsent_bytes += size
        self._streams.unsent_bytes += size

    def drop(self) -> None:
        """Forget what has arrived and what is queued."""
        self._streams.unfinished_bytes -= len(self._arrived)
        self._streams.unfinished.pop(self, None)
        self._arrived.clear()
        self._count_unsent(-self.unsent_bytes)
        self._streams.unsent.pop(self, None)
        self._unsent.clear()
