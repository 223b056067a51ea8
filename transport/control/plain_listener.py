"""P's end of the control plane without keys: bare TCP connections."""

from __future__ import annotations

import itertools
import logging
import socket as _socket
import time
from collections import Counter
from functools import partial

import zmq

from kvferry.transport.control import framing
from kvferry.transport.control.listener import Listener
from kvferry.transport.control.plain_stream import PlainStream, StreamEndedError, Streams, tune
from kvferry.transport.sockets import READABLE, WRITABLE, Sockets
from kvferry.transport.wake import RateLimitedLog

_log = RateLimitedLog(logging.getLogger("vllm.kvferry.transport"))
_ACCEPTS = 64
"""Connections accepted by one call, before messages are served."""
_NO_DESCRIPTOR_SECONDS = 0.2
_REASONS = {
    "half-open": "too many connections have sent no message yet",
    "peers": "as many peers are connected as the limit allows",
    "late": "it sent no message in time",
    "flood": "many bytes arrived and no whole message",
    "full": "it does not read its answers",
}


class _Peer:
    def __init__(self, identity: bytes, stream: PlainStream, address: str, now: float) -> None:
        self.identity = identity
        self.stream = stream
        self.address = address
        self.accepted = now


class PlainListener(Listener):
    """See :func:`kvferry.transport.control.listener.listen`."""

    socket: int

    def __init__(self, address: str, port: int, max_message_bytes: int, limit: int) -> None:
        self.dropped: Counter[str] = Counter()
        self._limit = limit
        family = _socket.AF_INET6 if ":" in address else _socket.AF_INET
        self._server = _socket.socket(family, _socket.SOCK_STREAM)
        try:
            self._server.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            self._server.bind((address, port))
            self._server.listen(_socket.SOMAXCONN)
        except OSError:
            self._server.close()
            raise
        self._server.setblocking(False)
        self.port = int(self._server.getsockname()[1])
        self.endpoint = framing.url(address, self.port)
        self._streams = Streams(max_message_bytes)
        self._sockets = Sockets()
        self._peers: dict[bytes, _Peer] = {}
        self._half_open: dict[bytes, _Peer] = {}  # no whole message has come yet; oldest first
        self._serial = itertools.count(1)
        self._arrived: list[tuple[bytes, list[bytes], str]] = []
        self._arrived_bytes = 0
        self._shut_until = 0.0
        self._closed = False
        self.socket = self._sockets.fd
        self._sockets.watch(self._server, self._accept)

    def receive(self) -> list[tuple[bytes, list[bytes], str]]:
        if self._closed:
            return []
        self._sockets.progress()
        self._expire()
        found, self._arrived, self._arrived_bytes = self._arrived, [], 0
        return found

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        peer = self._peers.get(identity)
        if peer is None:
            self.dropped["gone"] += 1
            return False
        failure = peer.stream.send(frames)
        if failure:
            self.dropped["full" if failure == zmq.EAGAIN else "gone"] += 1
            if failure != zmq.EAGAIN:
                self._end(peer)
            return False
        self._watch(peer)
        for stream, reason in self._streams.excess(time.monotonic()):
            self._end_stream(stream, reason)
        return identity in self._peers

    @property
    def peers(self) -> int:
        return len(self._peers) - len(self._half_open)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for peer in list(self._peers.values()):
                self._end(peer)
            self._sockets.drop(self._server)
            self._sockets.close()

    def _accept(self) -> None:
        now = time.monotonic()
        for _ in range(_ACCEPTS):
            try:
                sock, address = self._server.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left; the listening socket would stay readable
                self._end_oldest("half-open")
                self._shut_until = now + _NO_DESCRIPTOR_SECONDS
                self._sockets.mute(self._server)
                return
            tune(sock, framing.SILENCE_HERE_SECONDS)
            identity = next(self._serial).to_bytes(8, "big")
            peer = _Peer(identity, PlainStream(sock, self._streams), address[0].removeprefix("::ffff:"), now)
            self._peers[identity] = self._half_open[identity] = peer
            if len(self._half_open) > framing.MAX_HALF_OPEN:
                self._end_oldest("half-open")
            elif len(self._peers) > self._limit:
                self._end_oldest("half-open" if len(self._half_open) > 1 else "peers")
            if identity in self._peers:
                self._watch(peer)

    def _end_oldest(self, reason: str) -> None:
        if self._half_open:
            self._refuse(next(iter(self._half_open.values())), reason)

    def _watch(self, peer: _Peer) -> None:
        events = READABLE | WRITABLE if peer.stream.wants_to_write else READABLE
        self._sockets.watch(peer.stream.sock, partial(self._serve, peer), events)

    def _serve(self, peer: _Peer) -> None:
        try:
            if len(self._arrived) < framing.BATCH and self._arrived_bytes < framing.BATCH_BYTES:
                frames = peer.stream.receive()
                if frames:
                    self._arrived_bytes += sum(len(each[2]) for each in frames)
                    self._half_open.pop(peer.identity, None)
                    self._arrived += [(peer.identity, each, peer.address) for each in frames]
        except StreamEndedError as error:
            if error.reason == "gone" and peer.identity not in self._half_open:
                self._end(peer)
            else:
                self._refuse(peer, error.reason if error.reason == "oversize" else "handshake", str(error))
            return
        if peer.stream.flush():
            self._end(peer)
        else:
            self._watch(peer)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._half_open:
            oldest = next(iter(self._half_open.values()))
            if now - oldest.accepted <= framing.HANDSHAKE_SECONDS:
                break
            self._refuse(oldest, "handshake", _REASONS["late"])
        for stream, reason in self._streams.excess(now):
            self._end_stream(stream, reason)
        if self._shut_until and now >= self._shut_until:
            self._shut_until = 0.0
            self._sockets.watch(self._server, self._accept)

    def _end_stream(self, stream: PlainStream, reason: str) -> None:
        for peer in list(self._peers.values()):
            if peer.stream is stream:
                self._refuse(peer, reason)

    def _refuse(self, peer: _Peer, reason: str, text: str = "") -> None:
        self.dropped[reason] += 1
        label = f"control port {self.endpoint}"
        _log.warning(f"{label} {reason}", "%s: connection ended: %s", label, text or _REASONS[reason])
        self._end(peer)

    def _end(self, peer: _Peer) -> None:
        self._peers.pop(peer.identity, None)
        self._half_open.pop(peer.identity, None)
        peer.stream.drop()
        self._sockets.drop(peer.stream.sock)
