"""D's connections without keys: bare TCP."""

from __future__ import annotations

import errno
import os
import socket as _socket
import time

import zmq

from kvferry.transport.control import framing
from kvferry.transport.control.dialer import NOBODY_LISTENS, Connection, Dialer, Refusal
from kvferry.transport.control.plain_stream import PlainStream, StreamEndedError, Streams, tune
from kvferry.transport.sockets import READABLE, WRITABLE, Sockets


class PlainConnection(Connection):
    """One TCP connection."""

    def __init__(self, dialer: PlainDialer, host: str, port: int, timeout: float) -> None:
        super().__init__(dialer, host, port, timeout)
        self._plain = dialer
        self._stream: PlainStream | None = None

    def _connect(self, address: str) -> None:
        sock = _socket.socket(_socket.AF_INET6 if ":" in address else _socket.AF_INET, _socket.SOCK_STREAM)
        tune(sock, framing.silence(address))
        error = sock.connect_ex((address, self.port))
        if error not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(error, os.strerror(error))
        self.fd = sock.fileno()
        self._stream = PlainStream(sock, self._plain.streams)
        self._plain.by_stream[self._stream] = self
        self._plain.sockets.watch(sock, self._progress, READABLE | WRITABLE)

    def _progress(self) -> None:
        stream = self._stream
        if stream is None:
            return
        if not self.connected:
            error = stream.sock.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
            if error:
                self.lose(f"{NOBODY_LISTENS} ({os.strerror(error)})")
                return
            try:
                stream.sock.getpeername()
            except OSError:  # not connected yet
                return
            self.establish()
        try:
            for frames in stream.receive():
                self.deliver(frames)
        except StreamEndedError as error:
            if error.reason == "gone" and not stream.messages:
                self.lose(
                    "the peer hung up before its first message; it is no KVFerry control port, it has as many peers as "
                    "it takes, or it has keys and this engine is insecure"
                )
            else:
                self.lose(str(error))
            return
        if stream.flush():
            self.lose("the peer is gone")
        else:
            self._watch(stream)

    def _watch(self, stream: PlainStream) -> None:
        events = READABLE | WRITABLE if stream.wants_to_write else READABLE
        self._plain.sockets.watch(stream.sock, self._progress, events)

    def _transmit(self, frames: list[bytes]) -> int:
        stream = self._stream
        if stream is None:
            return errno.EHOSTUNREACH
        failure = stream.send(frames, later=not self.connected)
        if failure and failure != zmq.EAGAIN:
            self.lose("the peer is gone")
        elif self.connected:
            self._watch(stream)
        return failure

    def _shut(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.drop()
            self._plain.by_stream.pop(stream, None)
            self._plain.sockets.drop(stream.sock)


class PlainDialer(Dialer):
    """See :func:`kvferry.transport.control.dialer.make_dialer`."""

    def __init__(self, max_message_bytes: int, refusal: Refusal) -> None:
        super().__init__(None, max_message_bytes, refusal)
        self.sockets = Sockets()
        self.pollables.append(self.sockets.fd)
        self.streams = Streams(max_message_bytes)
        self.by_stream: dict[PlainStream, PlainConnection] = {}

    def _new(self, host: str, port: int, key: bytes | None, timeout: float) -> Connection:
        return PlainConnection(self, host, port, timeout)

    def _receive(self) -> bool:
        if self._closed:
            return False
        moved = self.sockets.progress()
        for stream, reason in self.streams.excess(time.monotonic()):
            text = "it does not read" if reason == "full" else "many bytes arrived and no whole message"
            self.by_stream[stream].lose(text)
        return moved

    def _close(self) -> None:
        for connection in list(self.by_stream.values()):
            connection.close()
        self.sockets.close()
