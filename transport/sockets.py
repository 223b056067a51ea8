"""Sockets that a poll loop watches, and new connections: those that have not said what they must, and those that have,
and that no channel has taken yet."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from kvferry.transport.fair_table import FairTable
from kvferry.transport.wake import HELD_UP_SECONDS, RunningClock, Waker

SESSION_BYTES = 16
SECRET_BYTES = 2 * SESSION_BYTES
CHANNEL_BYTES = 16
HELLO_BYTES = SECRET_BYTES + CHANNEL_BYTES
HELLO_SECONDS = 10.0
"""A new connection must have said all that it must within this time."""
WAIT_SECONDS = 30.0
MAX_UNAUTHENTICATED = 256
"""Bound on the connections of one listener that have not said what they must."""
MAX_WAITING = 1024
"""Bound on the connections that have sent their hello and that no channel has taken yet. One more connection closes
the oldest of them, and one more of the same session closes that session's."""
_ADMITS = 64
"""Connections accepted by one call, before other sockets are served."""
_NO_DESCRIPTOR_SECONDS = 1.0
SILENCE_SECONDS = 30.0
"""A host that acknowledges or answers nothing for this long counts as gone: hosts stand still for seven seconds."""

READABLE, WRITABLE, ENDED = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP
"""The events of a socket. ENDED: the peer will send no more bytes; received bytes may still be unread."""
EXHAUSTED: Final = object()
"""What a handler returns that has done all that it can before its socket is ready once more, and whose work no other
channel waits for. The caller may then sleep without another look."""


def tune(sock: socket.socket, silence: float = SILENCE_SECONDS) -> None:
    """Set the options of a TCP socket that does not block, whose messages leave at once, and whose end must be noticed:
    the kernel ends it when its peer acknowledges nothing for ``silence`` seconds."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1e3))


class Sockets:
    """Sockets with a handler each, behind one epoll descriptor; ``selectors`` has no ENDED."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[Callable[[], object], int]] = {}  # the handler, and the events

    @property
    def fd(self) -> int:
        """The epoll descriptor, readable while an event of any watched socket holds."""
        return self._epoll.fileno()

    def watch(self, sock: socket.socket | Waker, handler: Callable[[], object], events: int = READABLE) -> None:
        """Call ``handler`` when any of ``events`` holds for the socket, or when it is broken. It may return
        ``EXHAUSTED``."""
        fd = sock.fileno()
        watched = self._watched.get(fd)
        if watched is None:
            self._epoll.register(fd, events)
        elif watched[1] != events:
            self._epoll.modify(fd, events)
        self._watched[fd] = handler, events

    def mute(self, sock: socket.socket) -> None:
        """Stop watching; the socket stays open."""
        if self._watched.pop(sock.fileno(), None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(sock.fileno())

    def drop(self, sock: socket.socket) -> None:
        """Stop watching and close. Idempotent."""
        self.mute(sock)
        sock.close()

    def progress(self, seconds: float = 0) -> bool:
        """Call the handlers of the ready sockets; wait for one for ``seconds`` at most. Returns whether any socket was
        ready whose handler has not returned ``EXHAUSTED``."""
        more = False
        for fd, _ in self._epoll.poll(seconds):
            if fd in self._watched:  # an earlier handler of this round may have dropped it
                more |= self._watched[fd][0]() is not EXHAUSTED
        return more

    def close(self) -> None:
        self._watched.clear()
        self._epoll.close()


@dataclass(slots=True, eq=False)
class Stranger:
    """A new connection. ``said``: what it has sent so far. ``deadline``: of all that is said, by ``Strangers.now``.
    ``network``: whose it is, see ``_network``."""

    sock: socket.socket
    deadline: float
    network: bytes
    said: bytes = b""


class Strangers:
    """Accepts connections and keeps each one until it has said what it must, for ``HELLO_SECONDS`` at most. Where more
    than ``MAX_UNAUTHENTICATED`` are kept, the oldest ones of the address with the most connections are closed.

    Over TCP the kernel keeps a connection back until its first bytes are here: one that sends nothing takes no place,
    and one that says all at once takes none either, however many others come.

    Args:
        sockets: watch the listener and the connections.
        listener: a non-blocking socket that is bound; it listens from now on.
        hear: called with a connection that may be ready. Returns whether it stays here; else the callee has it, or has
            closed it. An OSError closes it.
        welcome: returns whether a new connection may be accepted at all.
    """

    def __init__(
        self,
        sockets: Sockets,
        listener: socket.socket,
        hear: Callable[[Stranger], bool],
        *,
        welcome: Callable[[socket.socket], bool] = lambda sock: True,
    ) -> None:
        self._sockets, self._listener, self._hear, self._welcome = sockets, listener, hear, welcome
        self._kept: FairTable[Stranger, Stranger] = FairTable(MAX_UNAUTHENTICATED)
        self._clock, self._shut_until = RunningClock(), 0.0
        if listener.family != socket.AF_UNIX:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, int(HELLO_SECONDS))
        listener.listen(socket.SOMAXCONN)
        sockets.watch(listener, self._admit)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def now(self) -> float:
        """The time of the thread's last turn. While it was held up it has heard nobody, and nobody is late."""
        return self._clock.now

    def expire(self) -> float:
        """Close the connections whose deadline has passed. Returns the seconds until this must be called again."""
        now = self._clock.turn()
        if self._shut_until and now >= self._shut_until:
            self._shut_until = 0.0
            self._sockets.watch(self._listener, self._admit)
        left = self._shut_until - now if self._shut_until else HELLO_SECONDS
        for stranger in self._kept.values() if self._kept.cost else ():
            if now < stranger.deadline:  # those that follow came later
                left = min(left, HELD_UP_SECONDS)  # a longer turn could not be told from one that was held up
                break
            self._close(stranger)
        self._clock.sleeps(left)
        return left

    def close(self) -> None:
        for stranger in self._kept.values():
            self._close(stranger)
        self._sockets.drop(self._listener)

    def _close(self, stranger: Stranger) -> None:
        self._kept.pop(stranger)
        self._sockets.drop(stranger.sock)

    def _admit(self) -> None:
        for _ in range(_ADMITS):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor is left; the listener would stay readable
                self._shut_until = self._clock.turn() + _NO_DESCRIPTOR_SECONDS
                self._sockets.mute(self._listener)
                return
            sock.setblocking(False)
            if not self._welcome(sock):
                sock.close()
                continue
            stranger = Stranger(sock, self._clock.turn() + HELLO_SECONDS, _network(address))
            if self._stays(stranger):
                for each in self._kept.put(stranger.network, stranger, stranger):
                    self._sockets.drop(each.sock)

    def _ready(self, stranger: Stranger) -> None:
        if not self._stays(stranger):
            self._kept.pop(stranger)

    def _stays(self, stranger: Stranger) -> bool:
        try:
            stays = self._hear(stranger)
            if stays:
                self._sockets.watch(stranger.sock, partial(self._ready, stranger))
            return stays
        except (OSError, MemoryError):
            self._sockets.drop(stranger.sock)
            return False


def _network(address: object) -> bytes:
    """Whose connections compete for places: those of one IPv4 address, or of one IPv6 network of 64 bits, which a host
    may have to itself. Empty for a Unix socket."""
    if not isinstance(address, tuple):
        return b""
    number = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return (mapped or number).packed[:8]


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


class _Waiting(NamedTuple):
    """A connection that has sent its hello."""

    sock: socket.socket
    deadline: float
    session: bytes


class PendingConnections:
    """Accepts connections and keeps each one until its channel takes it.

    A new connection sends its hello: a secret and the id of its channel, ``HELLO_BYTES`` in all. It
    then sends nothing until it is served, or it is closed. At most ``MAX_UNAUTHENTICATED + MAX_WAITING`` connections
    are held, one of each session.

    Args:
        sockets, listener, welcome: as ``Strangers`` takes them.
        secrets: made the secrets of the plane's offers, of which every peer must send its own.
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
        self._sockets, self._secrets, self._arrived = sockets, secrets, arrived
        self.waiting: dict[bytes, _Waiting] = {}  # by channel, oldest first
        self._of_session: dict[bytes, bytes] = {}  # the channel of each session's waiting connection
        self.strangers = Strangers(sockets, listener, self._hear, welcome=welcome)

    def take(self, channel: bytes) -> socket.socket | None:
        """The connection of that channel, if it has sent its hello and is still open; it is watched for reading."""
        waiting = self.waiting.pop(channel, None)
        if waiting is None:
            return None
        del self._of_session[waiting.session]
        return waiting.sock

    def expire(self) -> None:
        """Close the connections whose deadline has passed."""
        self.strangers.expire()
        for channel in [c for c, waiting in self.waiting.items() if waiting.deadline < self.strangers.now]:
            self._cut(channel)

    def close(self) -> None:
        self.strangers.close()
        for channel in list(self.waiting):
            self._cut(channel)

    def _hear(self, stranger: Stranger) -> bool:
        try:
            said = stranger.sock.recv(HELLO_BYTES - len(stranger.said))
        except BlockingIOError:
            return True
        stranger.said += said
        if said and len(stranger.said) < HELLO_BYTES:
            return True
        secret, channel = stranger.said[:SECRET_BYTES], stranger.said[SECRET_BYTES:]
        session = self._secrets.session(secret) if len(channel) == CHANNEL_BYTES else None
        if session is None or channel in self.waiting:
            self._sockets.drop(stranger.sock)
            return False
        if session in self._of_session:
            self._cut(self._of_session[session])
        elif len(self.waiting) >= MAX_WAITING:
            self._cut(next(iter(self.waiting)))
        self.waiting[channel] = _Waiting(stranger.sock, self.strangers.now + WAIT_SECONDS, session)
        self._of_session[session] = channel
        self._sockets.watch(stranger.sock, lambda: self._cut(channel))  # before it is served, it may only close
        self._arrived(channel)
        return False

    def _cut(self, channel: bytes) -> None:
        """Close a connection that has sent its hello."""
        sock = self.take(channel)
        if sock is not None:
            self._sockets.drop(sock)
