"""D's end of the control plane."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket as _socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import zmq

from kvferry.transport.control import framing
from kvferry.transport.control.zap_auth import HANDSHAKE_FAILED, CurveKeys, Monitor, configure_curve, unwatch

_client: tuple[int, zmq.Context[zmq.Socket[bytes]]] | None = None
_client_lock = threading.Lock()


def _client_context() -> zmq.Context[zmq.Socket[bytes]]:
    """One context for all connections of the process; a new one after a fork, whose threads are gone."""
    global _client  # noqa: PLW0603
    with _client_lock:
        if _client is None or _client[0] != os.getpid():
            _client = (os.getpid(), zmq.Context())
        return _client[1]


class Connection:
    """D's end: a connection to one rank of P. It connects once; when it is lost, close it and make another.

    ``send`` may be called at once; the messages leave when the connection is established.

    Args:
        host: an address, or a name; a name is looked up on a thread of its own.
        port: P's control port.
        curve: the deployment's key pair, None without CURVE.
        max_message_bytes: bound on the sum of a message's frames.
        connect_timeout: seconds until a peer that does not answer counts as lost.
        refusal: says why there must be no connection to a numeric address; empty where there may be one. A name is
            resolved once, and the connection goes to the address that was judged.

    Attributes:
        socket, monitor: for ``zmq.Poller``; when ``monitor`` is readable call :meth:`poll_monitor`.
        address: the numeric address of ``host``, once it is known.
        connected: the connection is established.
        lost: the connection was established and is gone, or could not be made; final.
        reason: why the connection is lost, one line.
        dropped: the number of dropped messages by reason: "frames" and "oversize" are messages received, "full" and
            "gone" are messages not sent.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        curve: CurveKeys | None = None,
        max_message_bytes: int,
        connect_timeout: float = framing.CONNECT_TIMEOUT_SECONDS,
        refusal: Callable[[str], str] | None = None,
    ) -> None:
        self.host, self.port, self.connected, self.reason = host, port, False, ""
        self.dropped: Counter[str] = Counter()
        self._curve = curve is not None
        self._refusal = refusal
        self._lost = False
        self._deadline = time.monotonic() + connect_timeout
        self._timeout = connect_timeout
        self._filter = framing.Filter(f"connection to {host}:{port}", max_message_bytes, self.dropped)
        self._waiting: list[list[bytes]] = []  # sent before the name was resolved
        self.socket: zmq.Socket[bytes] = _client_context().socket(zmq.DEALER)
        framing.tune(self.socket, max_message_bytes)
        self.socket.reconnect_ivl = -1  # messages for one incarnation of P must not reach the next
        self.socket.connect_timeout = max(1, int(connect_timeout * 1e3))
        configure_curve(self.socket, curve, server=False)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self._monitor = Monitor(self.socket, events)
        self.monitor: zmq.Socket[bytes] = self._monitor.socket
        self.address = ""
        self._lookup: _Lookup | None = None
        if _numeric(host):
            self._connect(host)
        else:
            self._lookup = _Lookup(host)
            self._lookup.join(0.02)  # an answer from a file or a near cache takes less
            self._resolved()

    @property
    def lost(self) -> bool:
        """Whether the connection is gone for good; checks ``connect_timeout`` while it is being made."""
        if not self._lost and not self.connected and time.monotonic() > self._deadline:
            self.poll_monitor()
            if not self.connected:
                self._lose(f"no answer within {self._timeout:g} s; is the engine up, and the address the one to reach?")
        return self._lost

    def poll_monitor(self) -> None:
        """Read the events of the connection, and set ``connected``, ``lost`` and ``reason``."""
        self._resolved()
        for event, _ in self._monitor.read():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected = True
            elif event & HANDSHAKE_FAILED:
                self._lose(self._why(event))
            elif event == zmq.EVENT_DISCONNECTED:
                self._lose("the peer is gone" if self.connected else self._why(event))
            elif event == zmq.EVENT_CLOSED:
                self._lose("nobody listens there, or no way leads there; is the engine up, and its address told right?")

    def receive(self) -> list[list[bytes]]:
        """The messages that are there now, at most some hundreds; the poller reports further ones."""
        messages = []
        for _ in range(framing.BATCH):
            frames = framing.read(self.socket, framing.FRAMES)
            if frames is None:
                break
            if self._filter.passes(frames):
                messages.append(frames)
        return messages

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message. False: the connection is lost, or the queue is full because P does not read."""
        self._resolved()
        if self._lost:
            failure = errno.EHOSTUNREACH
        elif self._lookup is not None:
            failure = 0 if len(self._waiting) < framing.SEND_QUEUE else zmq.EAGAIN
            if not failure:
                self._waiting.append(frames)
        else:
            failure = framing.send(self.socket, frames)
        if failure:
            self.dropped["full" if failure == zmq.EAGAIN else "gone"] += 1
        return not failure

    def close(self) -> None:
        """Close the connection and drop unsent messages. Idempotent."""
        if not self.socket.closed:
            unwatch(self.socket)
            self.socket.close(0)
            self._monitor.close()
            self._lose("closed")

    def _lose(self, reason: str) -> None:
        if not self._lost:
            self._lost, self.connected = True, False
            self.reason = f"{self.host}:{self.port}: {reason}"

    def _why(self, event: int) -> str:
        """Why the handshake failed."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "the peer refused us: its CURVE key is another, or it has as many peers as it takes"
        # Either end may be the first to see a mismatch of mechanisms; the other end sees only a closed connection.
        return (
            "the peer hung up during the handshake; it is no KVFerry control port, or CURVE keys are set on one side "
            f"only or differ (this engine has {'keys' if self._curve else 'none'})"
        )

    def _connect(self, address: str) -> None:
        refused = "" if self._refusal is None else self._refusal(address)
        if refused:
            self._lose(refused)
            return
        self.address = address
        self.socket.ipv6 = ":" in address
        seconds = framing.silence(address)
        framing.keep_watch(self.socket, seconds)
        self.socket.tcp_maxrt = int(seconds * 1e3)  # for TCP a peer that does not read does not answer
        try:
            self.socket.connect(framing.url(address, self.port))
        except zmq.ZMQError as error:
            self._lose(f"not an address to connect to ({error})")
            return
        while self._waiting and framing.send(self.socket, self._waiting[0]) == 0:
            del self._waiting[0]

    def _resolved(self) -> None:
        lookup = self._lookup
        if lookup is not None and not lookup.is_alive() and not self._lost:
            self._lookup = None
            if lookup.address is None:
                self._lose(f"the name cannot be resolved ({lookup.error})")
            else:
                self._connect(lookup.address)


def _numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class _Lookup(threading.Thread):
    """Resolves a name. libzmq would do it on its I/O thread, and every other connection would wait for a dead DNS."""

    def __init__(self, host: str) -> None:
        super().__init__(name="kvferry-lookup", daemon=True)
        self.host = host
        self.address: str | None = None
        self.error = ""
        self.start()

    def run(self) -> None:
        try:
            self.address = str(_socket.getaddrinfo(self.host, None, type=_socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            self.error = str(error)
