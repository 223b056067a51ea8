"""Sockets that a plane watches, and pending connections: new connections that have not sent the secret yet."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

SESSION_BYTES = 16
SECRET_BYTES = 2 * SESSION_BYTES
CHANNEL_BYTES = 16
HELLO_SECONDS = 5.0
"""A new connection must send its hello within this time."""
WAIT_SECONDS = 30.0
MAX_UNAUTHENTICATED = 64
"""Bound on the connections that have not sent their hello. One more connection closes the oldest of them."""
MAX_WAITING = 1024
"""Bound on the connections that have sent their hello and that no channel has taken yet. One more connection closes
the oldest of them, and one more of the same session closes that session's."""
_ADMITS = 64
"""Connections accepted by one call, before other sockets are served."""
_NO_DESCRIPTOR_SECONDS = 1.0
SILENCE_SECONDS = 30
"""A host that acknowledges nothing for this long counts as gone."""


READABLE, WRITABLE, ENDED = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP
"""The events of a socket. ENDED: the peer will send no more bytes; received bytes may still be unread."""


EXHAUSTED: Final = object()
"""What a handler returns that has done all that it can before its socket is ready once more, and whose work no other
channel waits for. The caller may then sleep without another look."""


def tune(sock: socket.socket) -> None:
    """Set the options of a TCP socket whose end must be noticed, and whose messages leave at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_SECONDS * 1000)


class Sockets:
    """Sockets with a handler each, behind one epoll descriptor."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self._events: dict[int, int] = {}

    @property
    def fd(self) -> int:
        """The epoll descriptor, readable while an event of any watched socket holds."""
        return self._epoll.fileno()

    def watch(self, sock: socket.socket, handler: Callable[[], object], events: int = READABLE) -> None:
        """Call ``handler`` when any of ``events`` holds for the socket, or when it is broken. It may return
        ``EXHAUSTED``."""
        fd = sock.fileno()
        watched = self._events.get(fd)
        if watched is None:
            self._epoll.register(fd, events)
        elif watched != events:
            self._epoll.modify(fd, events)
        self._handlers[fd], self._events[fd] = handler, events

    def mute(self, sock: socket.socket) -> None:
        """Stop watching; the socket stays open."""
        if self._handlers.pop(sock.fileno(), None) is not None:
            del self._events[sock.fileno()]
            with contextlib.suppress(OSError):
                self._epoll.unregister(sock.fileno())

    def drop(self, sock: socket.socket) -> None:
        """Stop watching and close. Idempotent."""
        self.mute(sock)
        sock.close()

    def progress(self) -> bool:
        """Call the handlers of the ready sockets, without waiting. Returns whether any socket was ready whose handler
        has not returned ``EXHAUSTED``."""
        more = False
        for fd, _ in self._epoll.poll(0):
            handler = self._handlers.get(fd)
            if handler is not None:  # an earlier handler of this round may have dropped it
                more |= handler() is not EXHAUSTED
        return more

    def close(self) -> None:
        self._handlers.clear()
        self._events.clear()
        self._epoll.close()


@dataclass(slots=True)
class _Pending:
    sock: socket.socket
    deadline: float
    said: bytes = b""
    session: bytes = b""


class Secrets:
    """Makes and checks secrets, one for each session with a peer, without a table of them: a secret is a random session
    id and its MAC."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def new(self) -> bytes:
        """A secret, ``SECRET_BYTES``."""
        session = secrets.token_bytes(SESSION_BYTES)
        return session + self._mac(session)

    def session(self, secret: bytes) -> bytes | None:
        """The session of a secret; ``None`` for bytes that ``new`` has not made."""
        session = secret[:SESSION_BYTES]
        return session if hmac.compare_digest(self._mac(session), secret[SESSION_BYTES:]) else None

    def _mac(self, session: bytes) -> bytes:
        return hashlib.blake2b(session, key=self._key, digest_size=SESSION_BYTES).digest()


class PendingConnections:
    """Accepts connections and keeps each one until its channel takes it.

    A new connection sends its hello: a secret and the id of its channel, ``SECRET_BYTES + CHANNEL_BYTES`` in all. It
    then sends nothing until it is served. A connection that sends other bytes, or no hello within ``HELLO_SECONDS``, is
    closed. At most ``MAX_UNAUTHENTICATED + MAX_WAITING`` connections are held, one of each session.

    Args:
        sockets: the sockets that watch the listener and the connections.
        listener: a non-blocking, listening socket.
        secrets: made the secrets of the plane's offers, of which every peer must send its own.
        welcome: returns whether a new connection may be accepted at all.
        arrived: called with the channel id of a connection that has sent its hello.
    """

    def __init__(
        self,
        sockets: Sockets,
        listener: socket.socket,
        secrets: Secrets,
        *,
        welcome: Callable[[socket.socket], bool] = lambda sock: True,
        arrived: Callable[[bytes], None] = lambda channel: None,
    ) -> None:
        self._sockets = sockets
        self._listener = listener
        self._secrets = secrets
        self._welcome = welcome
        self._arrived = arrived
        self._strangers: dict[int, _Pending] = {}
        self._waiting: dict[bytes, _Pending] = {}  # by channel, oldest first
        self._of_session: dict[bytes, bytes] = {}  # the channel of each session's waiting connection
        self._shut_until = 0.0
        sockets.watch(listener, self._admit)

    def take(self, channel: bytes) -> socket.socket | None:
        """The connection of that channel, if it has sent its hello and is still open; it is watched for reading."""
        visitor = self._forget(channel)
        return None if visitor is None else visitor.sock

    def expire(self) -> None:
        """Close the connections whose deadline has passed."""
        now = time.monotonic()
        for fd in [fd for fd, visitor in self._strangers.items() if visitor.deadline < now]:
            self._sockets.drop(self._strangers.pop(fd).sock)
        for channel in [c for c, visitor in self._waiting.items() if visitor.deadline < now]:
            self._cut(channel)
        if self._shut_until and now > self._shut_until:
            self._shut_until = 0.0
            self._sockets.watch(self._listener, self._admit)

    def close(self) -> None:
        for visitor in [*self._strangers.values(), *self._waiting.values()]:
            self._sockets.drop(visitor.sock)
        self._strangers.clear()
        self._waiting.clear()
        self._of_session.clear()
        self._sockets.drop(self._listener)

    def _admit(self) -> None:
        for _ in range(_ADMITS):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left; the listener would stay readable
                self._shut_until = time.monotonic() + _NO_DESCRIPTOR_SECONDS
                self._sockets.mute(self._listener)
                return
            sock.setblocking(False)
            if not self._welcome(sock):
                sock.close()
                continue
            if len(self._strangers) >= MAX_UNAUTHENTICATED:
                self._sockets.drop(self._strangers.pop(next(iter(self._strangers))).sock)
            visitor = self._strangers[sock.fileno()] = _Pending(sock, time.monotonic() + HELLO_SECONDS)
            self._sockets.watch(sock, lambda visitor=visitor: self._mark_ready(visitor))  # type: ignore[misc]
            self._mark_ready(visitor)

    def _mark_ready(self, visitor: _Pending) -> None:
        try:
            said = visitor.sock.recv(SECRET_BYTES + CHANNEL_BYTES - len(visitor.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        visitor.said += said
        if said and len(visitor.said) < SECRET_BYTES + CHANNEL_BYTES:
            return
        del self._strangers[visitor.sock.fileno()]
        secret, channel = visitor.said[:SECRET_BYTES], visitor.said[SECRET_BYTES:]
        session = self._secrets.session(secret) if len(channel) == CHANNEL_BYTES else None
        if session is None or channel in self._waiting:
            self._sockets.drop(visitor.sock)
            return
        if session in self._of_session:
            self._cut(self._of_session[session])
        elif len(self._waiting) >= MAX_WAITING:
            self._cut(next(iter(self._waiting)))
        visitor.deadline, visitor.session = time.monotonic() + WAIT_SECONDS, session
        self._waiting[channel], self._of_session[session] = visitor, channel
        self._sockets.watch(visitor.sock, lambda: self._cut(channel))  # before it is served, it may only close
        self._arrived(channel)

    def _forget(self, channel: bytes) -> _Pending | None:
        visitor = self._waiting.pop(channel, None)
        if visitor is not None:
            del self._of_session[visitor.session]
        return visitor

    def _cut(self, channel: bytes) -> None:
        """Close a connection that has sent its hello."""
        visitor = self._forget(channel)
        if visitor is not None:
            self._sockets.drop(visitor.sock)
