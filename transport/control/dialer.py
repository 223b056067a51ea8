"""D's end of the control plane: connections to ranks of P."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Container, Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import Literal, TypeVar

from kvferry.transport.blocking_calls import BlockingCalls
from kvferry.transport.control.keys import Keys, UnknownKeyError, greeting
from kvferry.transport.control.stream import (
    ADMITTED,
    FULL,
    HEARD,
    KEEP_ALIVE,
    Shared,
    Stream,
    StreamEndedError,
    silence,
)
from kvferry.transport.errors import TransportError, quoted
from kvferry.transport.host import numeric_address
from kvferry.transport.peer_process import Ends
from kvferry.transport.sockets import READABLE, WRITABLE, tune
from kvferry.transport.wake import Waker

Failure = Literal["", "unreachable", "key", "not_allowed"]
"""Why a connection could not be made: nobody answers there, one side does not admit the other's key, or D may not
connect there. Empty where it was made, or somebody answered and it ended before all was agreed."""
Refusal = Callable[[str], str]
"""Why there must be no connection to a numeric address; empty where there may be one."""
NOBODY_LISTENS = "nobody listens there, or no way leads there; is the engine up, and its address told right?"
CONNECT_TIMEOUT_SECONDS = 10.0
SEND_QUEUE = 1024
"""Messages that wait for a connection to be established."""
LOOK_SECONDS = 1.0
"""Seconds between two looks for peers that say nothing."""
NAMES = BlockingCalls("kvferry-dns", threads=8, waiting=1024)
T = TypeVar("T")


def _nobody() -> None:
    """In place of an owner's call."""


class Connection:
    """A connection to one rank of P. It connects once; when it is lost, close it and make another. Messages may be sent
    at once, and leave when it is established.

    Attributes:
        address: the numeric address of ``host``, once it is known.
        connected: it is established.
        reason: why it is lost, one line.
        failure: the same in one word, where it was never established.
        news: messages have arrived, or the connection was established or lost, since the last ``receive``.
        on_news: called where ``news`` becomes true. The owner sets it.
        resolving: it waits for a name.
    """

    def __init__(self, dialer: Dialer, host: str, port: int, key: str, timeout: float) -> None:
        self.host, self.port = host, port
        self.address = ""
        self.connected = self.news = self.resolving = False
        self.on_news: Callable[[], None] = _nobody
        self.reason = ""
        self.failure: Failure = "unreachable"
        self._dialer, self._key = dialer, key
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self.inbox: list[list[bytes]] = []
        self._waiting: list[list[bytes]] = []  # to be sent once the connection is established
        self._sock: socket.socket | None = None
        self._stream: Stream | None = None
        self._opening: Iterator[int] | None = self._open()
        self._patience, self._asked_at = 0.0, 0.0  # how long P may say nothing, and when it was asked

    @property
    def lost(self) -> bool:
        """Whether the connection was established and is gone, or could not be made; final. Checks the time-out."""
        if not self.reason and not self.connected and time.monotonic() > self._deadline:
            self._dialer.progress()
            if not self.connected:
                self.lose(f"no answer within {self._timeout:g} s; is the engine up, and the address the one to reach?")
        return bool(self.reason)

    @property
    def ends(self) -> Ends | None:
        """The two ends of the TCP connection; ``None`` where there is none, or the system does not tell them."""
        return None if self._sock is None else Ends.of(self._sock.fileno())

    def receive(self) -> list[list[bytes]]:
        """The messages that have arrived, in order."""
        self.news = False
        found, self.inbox = self.inbox, []
        return found

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message. False: the connection is lost, or too many wait for it to be established."""
        if self._stream is not None:
            sent = self._stream.send(frames)
            while not (sent or self.reason):  # what P has said before still counts
                self._serve(self._stream)
            return sent
        if self.reason or len(self._waiting) >= SEND_QUEUE:
            return False
        self._waiting.append(frames)
        return True

    def close(self) -> None:
        """Close the connection and drop unsent messages. Idempotent."""
        self.on_news = _nobody  # the owner most often refers to this connection: no circle of references is left
        self.lose("closed")
        self.inbox.clear()

    # --- for the dialer -----------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Open the connection as far as it goes now."""
        if self._opening is None:
            return
        try:
            events = next(self._opening, None)
        except (OSError, TransportError, UnknownKeyError) as error:
            if isinstance(error, UnknownKeyError):
                self.failure = "key"
            self.lose(str(error))
            return
        except Exception as error:  # a host or port that no caller has checked
            self.lose(f"it cannot be opened: {quoted(repr(error)[:200])}")
            return
        if events is None:
            self._opening, self.connected, self.failure = None, True, ""
            self._tell()
            waiting, self._waiting = self._waiting, []
            for frames in waiting:
                self.send(frames)
        elif events and self._sock is not None:
            self._dialer.shared.sockets.watch(self._sock, self.go_on, events)

    def _serve(self, stream: Stream) -> None:
        """Take in what has arrived."""
        try:
            for frames in stream.receive():
                if frames != KEEP_ALIVE:
                    self.inbox.append(frames)
                    self._tell()
        except StreamEndedError as error:
            self.lose(str(error))

    def look(self, now: float, excess: Container[Stream]) -> None:
        """Ask a peer that says nothing whether it is there, and give up one that does not answer, or holds too much."""
        stream = self._stream
        if stream is None:
            return
        quiet = now - stream.heard_at
        if stream in excess:
            self.lose("it sends bytes and no whole message, or does not read")
        elif self._asked_at <= stream.heard_at:
            if quiet > self._patience / 3:
                self._asked_at = now
                stream.send(KEEP_ALIVE)
        elif now - self._asked_at > self._patience * 2 / 3:
            self._serve(stream)  # where this thread was held up, an answer may lie there
            if self._asked_at > stream.heard_at:
                self.lose(f"the peer has said nothing for {quiet:.0f} s")

    def lose(self, reason: str) -> None:
        """End the connection. The first reason stays."""
        if self.reason:
            return
        self.reason, self.connected = reason, False
        self._opening = None
        self._waiting.clear()
        if self._stream is not None:
            self._stream.close()
        elif self._sock is not None:
            self._dialer.shared.sockets.drop(self._sock)
        self._stream = self._sock = None
        self._dialer.connections.pop(self, None)
        self._tell()

    def _tell(self) -> None:
        if not self.news:
            self.news = True
            self.on_news()

    def _open(self) -> Iterator[int]:
        """Open the connection, step by step. Yields the events that the next step waits for; 0 for a name.

        Raises:
            OSError, TransportError, UnknownKeyError: it cannot be opened.
        """
        keys = self._dialer.keys
        public, context = keys.find(self._key), keys.of_d
        self.address = yield from self._numeric()
        refused = self._dialer.refusal(self.address)
        if refused:
            self.failure = "not_allowed"
            raise TransportError(refused)
        sock = self._sock = socket.socket(socket.AF_INET6 if ":" in self.address else socket.AF_INET)
        self._patience = silence(self.address)
        tune(sock, self._patience)
        error = sock.connect_ex((self.address, self.port))
        if error == errno.EINPROGRESS:
            yield WRITABLE
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise TransportError(f"{NOBODY_LISTENS} ({os.strerror(error)})")
        self.failure, verdict, why = "", b"", "the peer hung up during the handshake; it is no KVFerry control port"
        try:
            named = greeting(public) + bytes.fromhex(keys.fingerprint)
            sock.send(named, socket.MSG_MORE)  # in one packet with the begin of the handshake
            self._dialer.shared.sockets.mute(sock)  # another object has its descriptor from now on
            tls = self._sock = context.wrap_socket(sock, do_handshake_on_connect=False)
            yield from _until_done(tls.do_handshake)
            if keys.proven(tls) != self._key:
                raise UnknownKeyError("its key is not the one that it has named")
            verdict = yield from _until_done(partial(tls.recv, 1))
            why = "the peer refused us: it has as many peers as it takes" if verdict == FULL else why
        except (OSError, ValueError) as error:
            with suppress(OSError):
                if theirs := HEARD.match(socket.socket.recv(self._sock or sock, 64)):
                    raise keys.unknown(f"{theirs[1].decode()}, expected {self._key}") from None
            if "UNKNOWN_CA" in (getattr(error, "reason", None) or ""):
                raise UnknownKeyError(
                    f"the peer, whose key is {self._key}, refused us: it does not admit our key {keys.fingerprint}; "
                    f"give both engines one key_file, or add our public key {keys.public} to peer_keys of the peer"
                ) from None
        if verdict != ADMITTED:
            raise TransportError(why)
        self._stream = Stream(tls, self.address, self._dialer.shared, self._serve)

    def _numeric(self) -> Generator[int, None, str]:
        """The numeric address of ``host``, which may be a name: a name server may be silent for long."""
        with suppress(ValueError):
            ipaddress.ip_address(self.host)
            return self.host
        call = NAMES.begin(partial(numeric_address, self.host), partial(self._dialer.resolved, self))
        self.resolving = True
        while not call.done:
            yield 0
        self.resolving = False
        if call.result is None:
            raise TransportError(call.error)
        return call.result


class Dialer:
    """All connections of one rank of D. One thread uses it, and calls ``progress`` when ``fd`` is readable, and from
    time to time: only there does ``news`` of a connection change.

    Args:
        keys: the connections admit only peers with these keys.
        max_message_bytes: bound on the sum of a message's frames.
        refusal: says to which addresses there must be no connection.
    """

    def __init__(self, keys: Keys, *, max_message_bytes: int, refusal: Refusal = lambda address: "") -> None:
        self.keys, self.refusal = keys, refusal
        self.shared = Shared(max_message_bytes)
        self.fd = self.shared.sockets.fd
        """A descriptor to poll for reading."""
        self.connections: dict[Connection, None] = {}  # that are not lost
        self._waker = Waker()
        self._resolved: deque[Connection] = deque()
        self._look_at = 0.0
        self._closed = False
        self.shared.sockets.watch(self._waker, self._go_on_resolved)

    def connect(self, host: str, port: int, *, key: str, timeout: float = CONNECT_TIMEOUT_SECONDS) -> Connection:
        """Connect to a rank of P at an address or a name, whose key has the fingerprint ``key``. Raises nothing: a
        connection that cannot be made is lost, with a reason; so is one without an answer for ``timeout`` seconds.
        """
        connection = Connection(self, host, port, key, timeout)
        self.connections[connection] = None
        connection.go_on()
        return connection

    def progress(self) -> bool:
        """Take in what has arrived, some milliseconds at most. Returns whether there was anything."""
        if self._closed:
            return False
        moved = self.shared.sockets.progress()
        now = time.monotonic()
        if self.shared.excess or now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            excess, self.shared.excess = self.shared.excess, []
            for connection in list(self.connections):
                connection.look(now, excess)
        return moved

    def close(self) -> None:
        """Close all connections. Idempotent."""
        if not self._closed:
            self._closed = True
            for connection in list(self.connections):
                connection.close()
            self._waker.close()
            self.shared.sockets.close()

    def resolved(self, connection: Connection) -> None:
        """A name is resolved. Any thread calls this."""
        self._resolved.append(connection)
        self._waker.wake()

    def _go_on_resolved(self) -> None:
        self._waker.drain()
        while self._resolved:
            connection = self._resolved.popleft()
            if connection.resolving:
                connection.go_on()


def _until_done(step: Callable[[], T]) -> Generator[int, None, T]:
    """What ``step`` returns once the socket lets it."""
    while True:
        try:
            return step()
        except ssl.SSLWantReadError:
            yield READABLE
        except ssl.SSLWantWriteError:
            yield WRITABLE
