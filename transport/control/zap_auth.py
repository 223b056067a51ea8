"""Access to our ports: CURVE keys, the ZAP handler, and the count of connections.

libzmq asks a ZAP handler about every new connection of a socket that has a ZAP domain; one handler per context, at
a fixed in-process address (https://rfc.zeromq.org/spec/27/). It runs on a thread of its own that sleeps in a
blocking call. So a new connection never waits for the thread that serves, and that thread never waits for it.
"""

from __future__ import annotations

import itertools
import logging
import re
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from kvferry.transport.control import framing
from kvferry.transport.control.unread_bytes import UnreadBytesGuard, shutdown_connection
from kvferry.transport.errors import ConfigError, TransportError
from kvferry.transport.wake import RateLimitedLog

_log = RateLimitedLog(logging.getLogger("vllm.kvferry.transport"))
_serial = itertools.count()
_EVENT = struct.Struct("=Hi")
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
BACKLOG_SECONDS = 0.25
"""Seconds between two checks of the bytes that the connections of a guarded socket have sent."""
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_Z85_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@dataclass(frozen=True)
class CurveKeys:
    """The one key pair of a deployment, Z85 text of 40 characters each. A peer that holds the pair may connect.

    Raises:
        ConfigError: a key is not Z85, or the two are not a pair.
    """

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        for name, key in (("curve_public_key", self.public), ("curve_secret_key", self.secret)):
            if not _Z85_KEY.fullmatch(key):
                raise ConfigError(f"{name}: not a key, expected 40 characters of Z85 as zmq.curve_keypair() makes them")
        if not zmq.has("curve"):
            raise ConfigError("curve_public_key: this libzmq has no CURVE; install pyzmq from PyPI, or unset both keys")
        if zmq.curve_public(self.secret.encode()) != self.public.encode():
            raise ConfigError("curve_public_key is not the public half of curve_secret_key; give both of one pair")


def configure_curve(socket: zmq.Socket[bytes], keys: CurveKeys | None, *, server: bool) -> None:
    """Encrypt and authenticate ``socket``; call it before bind or connect. Nothing happens where ``keys`` is None.

    A server socket gets a :class:`ZapHandler` in its context, which admits only clients that hold the same pair.

    Raises:
        TransportError: the socket's context already has another ZAP handler.
    """
    if keys is None:
        return
    socket.curve_publickey = keys.public.encode()
    socket.curve_secretkey = keys.secret.encode()
    if server:
        socket.curve_server = True
        zap_handler_of(socket.context).guard(socket, keys)
    else:
        socket.curve_serverkey = keys.public.encode()


class Monitor:
    """A socket's connection events, ``(event, value)``, with libzmq's event numbers; ``socket`` is for a poller.

    Call :func:`unwatch` before the watched socket or this end is closed: an event that is never read blocks libzmq's
    thread for ever, and with it every socket of the context.
    """

    def __init__(self, watched: zmq.Socket[bytes], events: int) -> None:
        address = f"inproc://kvferry-monitor-{next(_serial)}"
        watched.monitor(address, events)
        self.socket: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
        self.socket.linger = 0
        self.socket.rcvhwm = 0  # a full queue would block libzmq's I/O thread, and with it every connection
        self.socket.connect(address)

    def read(self) -> list[tuple[int, int]]:
        """All events that have arrived and are not read yet."""
        events = []
        while (frames := framing.read(self.socket, 1)) is not None:
            events.append(_EVENT.unpack(frames[0]))
        return events

    def close(self) -> None:
        self.socket.close(0)


def unwatch(watched: zmq.Socket[bytes]) -> None:
    """End the events of a socket; the last one is MONITOR_STOPPED."""
    watched.monitor(None, 0)


@dataclass
class ServerSocket:
    """One server socket: the key and the limit of its connections, and the connections that its monitor reported.

    The owner sets ``port`` and ``label`` once it is bound, and adds to ``backlog.served``.
    """

    public: bytes | None  # raw CURVE key, None without CURVE
    limit: int | None
    dropped: Counter[str]
    label: str
    backlog: UnreadBytesGuard
    port: int = 0
    monitor: Monitor | None = None
    handshaking: list[int] = field(default_factory=list)  # file descriptors in the handshake, oldest first
    ready: set[int] = field(default_factory=set)
    failed: bool = False  # the next DISCONNECTED belongs to a failed handshake


class ZapHandler:
    """The ZAP handler of one context, which also watches its guarded sockets. Ends with the context's last use."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._guarded: dict[bytes, ServerSocket] = {}
        self._zap: zmq.Socket[bytes] = context.socket(zmq.REP)
        self._zap.linger = 0
        try:
            self._zap.bind(_ZAP_ADDRESS)  # before any guarded socket binds: without a handler libzmq admits all
        except zmq.ZMQError as error:
            self._zap.close(0)
            raise TransportError(
                f"another ZAP handler sits in this ZMQ context ({error}); use a context of its own"
            ) from None
        self._checked = self._next_check = time.monotonic()
        self._control_address = f"inproc://kvferry-gate-{next(_serial)}"
        self._inbox: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._inbox.linger = 0
        self._inbox.bind(self._control_address)
        self.ended = False
        self.thread = threading.Thread(target=self._run, name="kvferry-gate", daemon=True)
        self.thread.start()

    def guard(
        self,
        socket: zmq.Socket[bytes],
        keys: CurveKeys | None,
        *,
        limit: int | None = None,
        backlog_bytes: int = 0,
        dropped: Counter[str] | None = None,
        label: str = "data port",
    ) -> ServerSocket:
        """Admit only holders of ``keys``, and at most ``limit`` connections at once where ``limit`` is given.

        ``dropped`` counts the refusals: "handshake" (not ZMTP, another mechanism, too slow), "key", "peers", and
        "flood" (more than ``backlog_bytes`` arrived and no whole message).
        """
        domain = b"kvferry-%d" % next(_serial)
        public = None if keys is None else z85.decode(keys.public)
        entry = ServerSocket(
            public, limit, Counter() if dropped is None else dropped, label, UnreadBytesGuard(backlog_bytes)
        )
        socket.zap_domain = domain
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if limit is not None:
            wanted = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED
            entry.monitor = Monitor(socket, wanted | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        with self._lock:
            self._guarded[domain] = entry
        self._on_finished(b"look")
        return entry

    def connections(self) -> int:
        """The number of connections that have completed the handshake, over all guarded sockets with a limit."""
        with self._lock:
            return sum(len(entry.ready) for entry in self._guarded.values())

    def close(self) -> None:
        """End the thread. The guarded sockets must be unwatched and closed by now."""
        self._on_finished(b"end")
        self.thread.join(5.0)

    def _on_finished(self, word: bytes) -> None:
        if not self.ended:
            pipe: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
            pipe.linger = 100
            pipe.connect(self._control_address)
            pipe.send(word, zmq.NOBLOCK)
            pipe.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._inbox, zmq.POLLIN)
        try:
            while self._turn(poller):
                pass
        except zmq.ZMQError as error:
            if error.errno not in (zmq.ETERM, zmq.ENOTSOCK):
                _log.error("gate", "control port: the gate ended, new peers are refused: %s", error)
        finally:
            self.ended = True
            with self._lock:
                monitors = [entry.monitor for entry in self._guarded.values() if entry.monitor is not None]
            for end in (self._zap, self._inbox, *(monitor.socket for monitor in monitors)):
                end.close(0)

    def _turn(self, poller: zmq.Poller) -> bool:
        """Sleep until an event arrives, and handle it; False when the thread must end."""
        ready = dict(poller.poll(self._check_backlogs()))
        if self._inbox in ready and self._inbox.recv() == b"end":
            return False
        with self._lock:
            entries = list(self._guarded.items())
        for domain, entry in entries:
            if entry.monitor is not None and not self._watch(domain, entry, poller):
                poller.unregister(entry.monitor.socket)
                entry.monitor.close()
        if self._zap in ready:
            self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
        return True

    def _check_backlogs(self) -> int | None:
        """Shut down connections that send without end. Returns the milliseconds until the next check, or None where
        there is no connection."""
        now = time.monotonic()
        with self._lock:
            entries = [(entry, [*entry.handshaking, *entry.ready]) for entry in self._guarded.values() if entry.port]
        connections = sum(len(fds) for _, fds in entries)
        if now < self._next_check and connections:
            return int((self._next_check - now) * 1e3) + 1
        for entry, fds in entries:
            for fd in entry.backlog.over(fds, entry.port, now - self._checked):
                if shutdown_connection(fd, entry.port):
                    with self._lock:
                        self._count(entry, "flood")
        self._checked = now
        interval = BACKLOG_SECONDS * max(1.0, connections / 64)  # the check of one connection takes microseconds
        self._next_check = now + interval
        return int(interval * 1e3) if connections else None

    def _watch(self, domain: bytes, entry: ServerSocket, poller: zmq.Poller) -> bool:
        """Follow the connections of one socket; False when the socket is closed."""
        assert entry.monitor is not None
        if entry.monitor.socket not in poller:
            poller.register(entry.monitor.socket, zmq.POLLIN)
        for event, value in entry.monitor.read():
            if event == zmq.EVENT_MONITOR_STOPPED:
                with self._lock:
                    self._guarded.pop(domain, None)
                return False
            with self._lock:
                self._apply_link_state(entry, event, value)
        return True

    def _apply_link_state(self, entry: ServerSocket, event: int, value: int) -> None:
        """Apply one event. Only ACCEPTED and DISCONNECTED name the connection (by file descriptor).

        A handshake takes less than a millisecond, so a handshake that succeeded was the youngest. After a handshake
        that failed, the same I/O thread sends its DISCONNECTED at once.
        """
        if event == zmq.EVENT_ACCEPTED:
            entry.handshaking.append(value)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and entry.handshaking:
            entry.ready.add(entry.handshaking.pop())
        elif event & HANDSHAKE_FAILED:
            entry.failed = True
            if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # ``_judge`` has counted this refusal
                self._count(entry, "handshake")
        elif event == zmq.EVENT_DISCONNECTED:
            if value in entry.handshaking:
                entry.handshaking.remove(value)
                if not entry.failed:
                    self._count(entry, "handshake")
            elif entry.failed and entry.handshaking and value in entry.ready:  # wrongly taken for the youngest
                entry.ready.add(entry.handshaking.pop())
            entry.ready.discard(value)
            entry.failed = False

    def _count(self, entry: ServerSocket, reason: str) -> None:
        entry.dropped[reason] += 1
        _log.warning(
            f"{entry.label} {reason}",
            "%s: connection ended: %s",
            entry.label,
            {
                "handshake": "the handshake failed; not a KVFerry peer, or CURVE keys are set on one side only "
                "or are not the same",
                "key": "the peer holds another CURVE key; give both engines the same pair",
                "flood": f"{entry.backlog.limit} bytes arrived and no whole message",
                "peers": f"{entry.limit} peers are connected, and that is the limit",
            }[reason],
        )

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to one ZAP request: version, request id, status, text, user, metadata."""
        known = request[1] if len(request) > 1 else b""
        reason = self._judge(request)
        status = (b"200", b"OK") if reason is None else (b"400", reason.encode())
        return [b"1.0", known, *status, b"", b""]

    def _judge(self, request: list[bytes]) -> str | None:
        """Why this connection is refused; None where it is admitted."""
        if len(request) < 6 or request[0] != b"1.0":
            return "version"
        domain, mechanism, credentials = request[2], request[5], request[6:]
        with self._lock:
            entry = self._guarded.get(domain)
            if entry is None:
                return "domain"
            reason = None
            if entry.public is not None:
                if mechanism != b"CURVE" or credentials != [entry.public]:
                    reason = "key"
            elif mechanism != b"NULL":
                reason = "key"
            if reason is None and entry.limit is not None and len(entry.ready) >= entry.limit:
                reason = "peers"
            if reason is not None:
                self._count(entry, reason)
            return reason


_gates: dict[int, ZapHandler] = {}
_gates_lock = threading.Lock()


def zap_handler_of(context: zmq.Context[zmq.Socket[bytes]]) -> ZapHandler:
    """The ZAP handler of a context, made on first use."""
    with _gates_lock:
        gate = _gates.get(context.underlying)
        if gate is None or gate.ended:
            gate = _gates[context.underlying] = ZapHandler(context)
        return gate
