"""The control plane's sockets: frames in, frames out, from one thread that polls; no call waits for a peer.

P has one :class:`Listener`, D one :class:`Connection` per rank of P. What the frames mean is not known here.
Peers are noticed to be gone by TCP and, when a host, a link or a process just stops, by heartbeats that libzmq's own
thread answers: a peer whose Python is busy for seconds stays alive, one that is stopped is lost after
``HEARTBEAT_SECONDS + HEARTBEAT_TIMEOUT_SECONDS``.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import resource
import socket as _socket
import threading
import time
from collections import Counter

import zmq

from kvferry.connector.errors import ConfigError
from kvferry.transport.gate import HANDSHAKE_FAILED, CurveKeys, Gate, Monitor, configure_curve, unwatch
from kvferry.transport.wake import RateLimitedLog, Waker

__all__ = ["Connection", "CurveKeys", "Listener", "RateLimitedLog", "Waker", "configure_curve"]

HEARTBEAT_SECONDS = 1.5
HEARTBEAT_TIMEOUT_SECONDS = 4.5
CONNECT_TIMEOUT_SECONDS = 5.0
HANDSHAKE_SECONDS = 5.0
FRAMES = 3
"""Frames of one message, the routing identity not counted."""
MAX_PEERS = 2048
MIN_BACKLOG_BYTES = 16 << 20
SEND_QUEUE, RECEIVE_QUEUE = 1024, 64
"""Messages that libzmq holds per connection; beyond, send() says False and the sender's TCP waits."""
_BATCH = 512
"""Messages of one receive() call: a flood must not keep the serving thread from its other work."""

_log = RateLimitedLog(logging.getLogger("vllm.kvferry.transport"))


def _tune(socket: zmq.Socket[bytes], max_message_bytes: int) -> None:
    socket.linger = 0
    socket.sndhwm, socket.rcvhwm = SEND_QUEUE, RECEIVE_QUEUE
    socket.maxmsgsize = max_message_bytes
    socket.handshake_ivl = int(HANDSHAKE_SECONDS * 1e3)
    socket.heartbeat_ivl = int(HEARTBEAT_SECONDS * 1e3)
    socket.heartbeat_timeout = int(HEARTBEAT_TIMEOUT_SECONDS * 1e3)
    socket.tcp_keepalive, socket.tcp_keepalive_idle = 1, 10
    socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 5, 3
    socket.tcp_maxrt = int((HEARTBEAT_SECONDS + HEARTBEAT_TIMEOUT_SECONDS) * 1e3)


def _url(address: str, port: int | str) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _read(socket: zmq.Socket[bytes], max_frames: int) -> list[bytes] | None:
    """One message, of which at most ``max_frames + 1`` frames are kept; None where there is none now."""
    try:
        return _rest(socket, [socket.recv(zmq.NOBLOCK)], max_frames)
    except zmq.ZMQError:  # EAGAIN, or the socket or the context is closed
        return None


def _rest(socket: zmq.Socket[bytes], frames: list[bytes], max_frames: int) -> list[bytes]:
    """``frames`` and those that follow in the same message; libzmq hands over whole messages only."""
    while socket.rcvmore:
        frame = socket.recv(zmq.NOBLOCK)
        if len(frames) <= max_frames:
            frames.append(frame)
    return frames


def _source(frame: zmq.Frame) -> int:
    """The file descriptor of the connection that a frame came by, -1 where libzmq does not say."""
    try:
        return int(frame.get("__fd"))
    except (zmq.ZMQError, ValueError):
        return -1


def _send(socket: zmq.Socket[bytes], frames: list[bytes]) -> int:
    """0, or the error number."""
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        return error.errno or errno.EIO
    return 0


class _Filter:
    """Drops what is not framed as our messages are, and counts it."""

    def __init__(self, label: str, max_message_bytes: int, dropped: Counter[str]) -> None:
        self._label, self._max, self.dropped = label, max_message_bytes, dropped

    def passes(self, frames: list[bytes]) -> bool:
        size = sum(map(len, frames))
        if len(frames) != FRAMES:
            return self._drop("frames", f"not {FRAMES} frames")
        if size > self._max:
            return self._drop("oversize", f"{size} bytes, limit {self._max}")
        return True

    def _drop(self, reason: str, text: str) -> bool:
        self.dropped[reason] += 1
        _log.warning(f"{self._label} {reason}", "%s: message dropped: %s", self._label, text)
        return False


class Listener:
    """P's end: takes messages of any number of peers, and answers each.

    Args:
        host: the one address to bind, or a name of it; never all interfaces.
        port: 0 finds a free one.
        curve: the deployment's key pair; only its holders get in. None: everybody who reaches the port.
        max_message_bytes: bound on the sum of a message's frames.
        max_peers: connections at once; at most half of the process's limit of open files.

    Attributes:
        port, endpoint: where it listens, ``tcp://address:port``.
        socket: for ``zmq.Poller``.
        dropped: what was not served, by reason: "handshake", "key" and "peers" are connections; "frames",
            "oversize" and "identity" are messages received; "gone" and "full" are messages not sent.

    Raises:
        ConfigError: a port in use, an address that is not ours, all interfaces; one line.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        curve: CurveKeys | None = None,
        max_message_bytes: int,
        max_peers: int = MAX_PEERS,
    ) -> None:
        address = _own_address(host)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.dropped: Counter[str] = Counter()
        # A context of its own: its I/O thread and its gate end with it.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        _tune(self.socket, max_message_bytes)
        self.socket.router_mandatory = True
        self.socket.ipv6 = ":" in address
        try:
            self._gate = Gate(self._context)
            if curve is not None:
                self.socket.curve_server = True
                self.socket.curve_publickey, self.socket.curve_secretkey = curve.public.encode(), curve.secret.encode()
            self._guarded = self._gate.guard(
                self.socket,
                curve,
                limit=min(max_peers, files // 2) if files > 0 else max_peers,
                backlog_bytes=max(MIN_BACKLOG_BYTES, 8 * max_message_bytes),
                dropped=self.dropped,
                label=f"control port {host}",
            )
            self.socket.bind(_url(address, port or "*"))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(_bind_failure(host, port, error)) from None
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.endpoint.rpartition(":")[2])
        self._guarded.port, self._guarded.label = self.port, f"control port {self.endpoint}"
        self._filter = _Filter(self._guarded.label, max_message_bytes, self.dropped)

    def receive(self) -> list[tuple[bytes, list[bytes]]]:
        """``(identity, frames)`` of the messages that are there now, at most some hundreds; the poller tells of more.

        The identity names one connection: a D that reconnects gets a new one.
        """
        messages = []
        for _ in range(_BATCH):
            try:
                first = self.socket.recv(zmq.NOBLOCK, copy=False)
                identity, *frames = _rest(self.socket, [first.bytes], FRAMES + 1)
            except zmq.ZMQError:  # EAGAIN, or closed
                break
            self._guarded.backlog.served.add(_source(first))
            if identity[:1] != b"\0" or len(identity) != 5:  # chosen by the peer; ours libzmq makes up
                self.dropped["identity"] += 1
            elif self._filter.passes(frames):
                messages.append((identity, frames))
        return messages

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        """Queue a message for one peer; False: it is gone, or its queue is full because it does not read."""
        failure = _send(self.socket, [identity, *frames])
        if failure:
            self.dropped["full" if failure == zmq.EAGAIN else "gone"] += 1
        return not failure

    @property
    def peers(self) -> int:
        """Peers connected now."""
        return self._gate.connections()

    def close(self) -> None:
        """Unsent messages are dropped. Idempotent."""
        if not self.socket.closed:
            unwatch(self.socket)
            self.socket.close(0)
            if hasattr(self, "_gate"):
                self._gate.close()
            self._context.term()


def _own_address(host: str) -> str:
    """The numeric address of ``host``; never one that means all interfaces."""
    try:
        found = _socket.getaddrinfo(host, None, type=_socket.SOCK_STREAM, flags=_socket.AI_PASSIVE)
        address = str(found[0][4][0])
        number = ipaddress.ip_address(address)
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(
            f"side_channel_host: {host!r} is not an address or the name of one ({error}); "
            "name an address of this host that peers reach"
        ) from None
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    if number.is_unspecified or (mapped is not None and mapped.is_unspecified) or not host:
        raise ConfigError(
            f"side_channel_host: {host!r} would listen on all interfaces; name the one address that peers reach"
        )
    return address


def _bind_failure(host: str, port: int, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"side_channel_port: port {port} of {host} is in use; "
            "give each engine on a host its own port, or 0 to find a free one"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return f"side_channel_host: {host} is not an address of this host; name one that `ip addr` lists"
    if error.errno == errno.EACCES:
        return f"side_channel_port: port {port} of {host} needs privileges; give one above 1023, or 0"
    return f"side_channel_host: cannot listen on {host} port {port}: {error}"


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

    Messages may be sent at once; they leave when the connection stands.

    Args:
        host: an address, or a name; a name is looked up on a thread of its own.
        port: P's control port.
        curve: the deployment's key pair, None without CURVE.
        max_message_bytes: bound on the sum of a message's frames.
        connect_timeout: seconds until a peer that does not answer counts as lost.

    Attributes:
        socket, monitor: for ``zmq.Poller``; when ``monitor`` is readable call :meth:`poll_monitor`.
        connected: the connection stands.
        lost: it stood and is gone, or could not be made; final.
        reason: why it is lost, one line.
        dropped: messages not passed on, by reason: "frames", "oversize"; not sent: "full", "gone".
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        curve: CurveKeys | None = None,
        max_message_bytes: int,
        connect_timeout: float = CONNECT_TIMEOUT_SECONDS,
    ) -> None:
        self.host, self.port, self.connected, self.reason = host, port, False, ""
        self.dropped: Counter[str] = Counter()
        self._curve = curve is not None
        self._lost = False
        self._deadline = time.monotonic() + connect_timeout
        self._timeout = connect_timeout
        self._filter = _Filter(f"connection to {host}:{port}", max_message_bytes, self.dropped)
        self._waiting: list[list[bytes]] = []  # sent before the name was known
        self.socket: zmq.Socket[bytes] = _client_context().socket(zmq.DEALER)
        _tune(self.socket, max_message_bytes)
        self.socket.reconnect_ivl = -1  # what was queued for one life of P must not reach the next
        self.socket.connect_timeout = max(1, int(connect_timeout * 1e3))
        configure_curve(self.socket, curve, server=False)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self._monitor = Monitor(self.socket, events)
        self.monitor: zmq.Socket[bytes] = self._monitor.socket
        self._lookup: _Lookup | None = None
        if _numeric(host):
            self._connect(host)
        else:
            self._lookup = _Lookup(host)
            self._lookup.join(0.02)  # an answer from a file or a near cache comes within it
            self._resolved()

    @property
    def lost(self) -> bool:
        """Whether the connection is gone for good; looks at the clock while it is being made."""
        if not self._lost and not self.connected and time.monotonic() > self._deadline:
            self.poll_monitor()
            if not self.connected:
                self._lose(f"no answer within {self._timeout:g} s; is the engine up, and the address the one to reach?")
        return self._lost

    def poll_monitor(self) -> None:
        """Take note of what happened to the connection: sets ``connected``, ``lost`` and ``reason``."""
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
        """The messages that are there now, at most some hundreds; the poller tells of more."""
        messages = []
        for _ in range(_BATCH):
            frames = _read(self.socket, FRAMES)
            if frames is None:
                break
            if self._filter.passes(frames):
                messages.append(frames)
        return messages

    def send(self, frames: list[bytes]) -> bool:
        """Queue a message; False: the connection is lost, or the queue is full because P does not read."""
        self._resolved()
        if self._lost:
            failure = errno.EHOSTUNREACH
        elif self._lookup is not None:
            failure = 0 if len(self._waiting) < SEND_QUEUE else zmq.EAGAIN
            if not failure:
                self._waiting.append(frames)
        else:
            failure = _send(self.socket, frames)
        if failure:
            self.dropped["full" if failure == zmq.EAGAIN else "gone"] += 1
        return not failure

    def close(self) -> None:
        """Unsent messages are dropped. Idempotent."""
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
        # On a mismatch of mechanisms either end may be the first to see it; the other is just hung up on.
        return (
            "the peer hung up during the handshake; it is no KVFerry control port, or CURVE keys are set on one side "
            f"only or differ (this engine has {'keys' if self._curve else 'none'})"
        )

    def _connect(self, address: str) -> None:
        self.socket.ipv6 = ":" in address
        try:
            self.socket.connect(_url(address, self.port))
        except zmq.ZMQError as error:
            self._lose(f"not an address to connect to ({error})")
            return
        while self._waiting and _send(self.socket, self._waiting[0]) == 0:
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
