"""D's end of the control plane: connections to ranks of P."""

from __future__ import annotations

import errno
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable

import zmq

from kvferry.transport.control import framing, lookup
from kvferry.transport.control.keys import Keys, UnknownKeyError, key_of_peer
from kvferry.transport.peer_process import Ends
from kvferry.transport.wake import Waker

Refusal = Callable[[str], str]
"""Says why there must be no connection to a numeric address; empty where there may be one. A name is resolved once, and
the connection goes to the address that was judged."""
NOBODY_LISTENS = "nobody listens there, or no way leads there; is the engine up, and its address told right?"


def _nobody() -> None:
    """No owner wants to hear of news."""


class Connection(ABC):
    """A connection to one rank of P. It connects once; when it is lost, close it and make another.

    ``send`` may be called at once; the messages leave when the connection is established.

    Attributes:
        host, port: as they were given.
        address: the numeric address of ``host``, once it is known.
        connected: the connection is established.
        reason: why the connection is lost, one line.
        fd: the descriptor of the TCP connection, once it is made.
        news: messages have arrived, or the connection was established or lost, since the last ``receive``.
        on_news: called where ``news`` becomes true. The owner sets it.
        dropped: the number of dropped messages by reason: "frames" and "oversize" are messages received, "full" and
            "gone" are messages not sent.
    """

    def __init__(self, dialer: Dialer, host: str, port: int, timeout: float) -> None:
        self.host, self.port = host, port
        self.address = ""
        self.connected = self.news = False
        self.on_news: Callable[[], None] = _nobody
        self.reason = ""
        self.dropped: Counter[str] = Counter()
        self.fd = -1
        self._dialer = dialer
        self._lost = False
        self._timeout, self._deadline = timeout, time.monotonic() + timeout
        self._unsent: list[list[bytes]] = []  # sent before the name was resolved
        self._inbox: deque[list[bytes]] = deque()
        self._lookup: lookup.Lookup | None = None

    @property
    def lost(self) -> bool:
        """Whether the connection was established and is gone, or could not be made; final. Checks the time-out."""
        if not self._lost and not self.connected and time.monotonic() > self._deadline:
            self._dialer.progress()
            if not self.connected:
                self.lose(f"no answer within {self._timeout:g} s; is the engine up, and the address the one to reach?")
        return self._lost

    @property
    def ends(self) -> Ends | None:
        """The two ends of the TCP connection; ``None`` where there is none, or the system does not tell them."""
        ends = Ends.of(self.fd)
        return ends if ends is not None and ends.theirs[1] == self.port else None

    def receive(self) -> list[list[bytes]]:
        """The messages that have arrived, in order."""
        self.news = False
        found = list(self._inbox)
        self._inbox.clear()
        return found

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message. False: the connection is lost, or the queue is full because P does not read."""
        if self._lost:
            failure = errno.EHOSTUNREACH
        elif self._lookup is not None:
            failure = 0 if len(self._unsent) < framing.SEND_QUEUE else int(zmq.EAGAIN)
            if not failure:
                self._unsent.append(frames)
        else:
            failure = self._transmit(frames)
            if failure and failure != zmq.EAGAIN:
                self._dialer.progress()  # the reason may have arrived
                self.lose("the peer is gone")
        if failure:
            self.dropped["full" if failure == zmq.EAGAIN else "gone"] += 1
        return not failure

    def close(self) -> None:
        """Close the connection and drop unsent messages. Idempotent."""
        self.on_news = _nobody  # the owner most often refers to this connection: no circle of references is left
        self.lose("closed")
        self._inbox.clear()

    # --- for the dialer -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, or look the name up first."""
        if lookup.is_numeric(self.host):
            self._open(self.host)
        else:
            self._lookup = lookup.look_up(self.host, self._dialer.waker.wake)
            self.resolve()

    def resolve(self) -> bool:
        """Connect if the name is resolved. Returns whether the look-up has ended."""
        found = self._lookup
        if found is None or not found.done:
            return found is None
        self._lookup = None
        if self._lost:
            return True
        if found.error:
            self.lose(f"the name cannot be resolved ({found.error})")
        else:
            self._open(found.address)
        return True

    def establish(self) -> None:
        if not self._lost:
            self.connected = True
            self._tell()

    def deliver(self, frames: list[bytes]) -> None:
        """A message has arrived."""
        self._inbox.append(frames)
        self._tell()

    def lose(self, reason: str) -> None:
        """End the connection. The first reason stays."""
        if not self._lost:
            self._lost, self.connected = True, False
            self.reason = f"{self.host}:{self.port}: {reason}"
            self._unsent.clear()
            self._shut()
            self._tell()

    def _tell(self) -> None:
        if not self.news:
            self.news = True
            self.on_news()

    def _open(self, address: str) -> None:
        refused = self._dialer.refusal(address)
        if refused:
            self.lose(refused)
            return
        self.address = address
        try:
            self._connect(address)
        except (zmq.ZMQError, OSError) as error:
            self.lose(f"not an address to connect to ({error.strerror or error})")
            return
        unsent, self._unsent = self._unsent, []
        for frames in unsent:
            self._transmit(frames)

    @abstractmethod
    def _connect(self, address: str) -> None:
        """Begin to connect. Raises ZMQError or OSError."""

    @abstractmethod
    def _transmit(self, frames: list[bytes]) -> int:
        """Queue a message. Returns 0, or the error number."""

    @abstractmethod
    def _shut(self) -> None:
        """Close the connection."""


class Dialer(ABC):
    """All connections of one rank of D. One thread uses it.

    ``news`` of a connection changes in ``progress`` only, which is called when one of ``pollables`` is readable, and
    from time to time.

    Attributes:
        pollables: sockets and descriptors for ``zmq.Poller``, to poll for reading.
    """

    def __init__(self, keys: Keys | None, max_message_bytes: int, refusal: Refusal) -> None:
        self.max_message_bytes, self.refusal = max_message_bytes, refusal
        self.waker = Waker()
        self.pollables: list[zmq.Socket[bytes] | int] = [self.waker.fd]
        self._keys = keys
        self._resolving: list[Connection] = []
        self._closed = False

    def connect(
        self, host: str, port: int, *, key: str, timeout: float = framing.CONNECT_TIMEOUT_SECONDS
    ) -> Connection:
        """Connect to a rank of P. Raises nothing: a connection that cannot be made is lost, with a reason.

        Args:
            host: an address, or a name.
            port: P's control port.
            key: the fingerprint of P's key; empty where P is insecure.
            timeout: seconds until a peer that does not answer counts as lost.
        """
        try:
            connection = self._new(host, port, key_of_peer(self._keys, key), timeout)
        except UnknownKeyError as error:
            connection = self._new(host, port, None, timeout)
            connection.lose(str(error))
            return connection
        connection.start()
        if not connection.resolve():
            self._resolving.append(connection)
        return connection

    def progress(self) -> bool:
        """Take in what has arrived, some milliseconds at most. Returns whether there was anything."""
        if self._resolving:
            self.waker.drain()
            self._resolving = [connection for connection in self._resolving if not connection.resolve()]
        return self._receive()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        if not self._closed:
            self._closed = True
            self._close()
            self.waker.close()

    @abstractmethod
    def _new(self, host: str, port: int, key: bytes | None, timeout: float) -> Connection: ...

    @abstractmethod
    def _receive(self) -> bool: ...

    @abstractmethod
    def _close(self) -> None: ...


def make_dialer(keys: Keys | None, *, max_message_bytes: int, refusal: Refusal = lambda address: "") -> Dialer:
    """D's end of the control plane. ``keys``: its connections are encrypted and admit only peers with these keys; None:
    nothing is encrypted. ``max_message_bytes``: bound on the sum of a message's frames."""
    from kvferry.transport.control.curve_dialer import CurveDialer
    from kvferry.transport.control.plain_dialer import PlainDialer

    if keys is None:
        return PlainDialer(max_message_bytes, refusal)
    return CurveDialer(keys, max_message_bytes, refusal)
