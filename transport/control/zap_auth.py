"""Access to our ports: the ZAP handler, which checks CURVE keys, and the count of connections.

libzmq asks a ZAP handler about every new connection of a socket that has a ZAP domain; one handler per context, at
a fixed in-process address (https://rfc.zeromq.org/spec/27/). It runs on a thread of its own that sleeps in a
blocking call. So a new connection never waits for the thread that serves, and that thread never waits for it.
"""

from __future__ import annotations

import itertools
import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import zmq

from kvferry.transport.control import framing
from kvferry.transport.control.keys import Keys, fingerprint
from kvferry.transport.control.unread_bytes import UnreadBytesGuard, shutdown_connection
from kvferry.transport.errors import TransportError
from kvferry.transport.wake import RateLimitedLog

_log = RateLimitedLog(logging.getLogger("vllm.kvferry.transport"))
_serial = itertools.count()
_EVENT = struct.Struct("=Hi")
HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Not HANDSHAKE_FAILED_PROTOCOL. libzmq 4.3.5 sends this event also for a message that it cannot decrypt, and loses the
error number while it does so (``curve_mechanism_base.cpp``, ``decode``). It then keeps the connection, reads no more of
it, and aborts the process at the next heartbeat after the connection has ended. Without the event it ends the
connection, and DISCONNECTED tells so."""
UNREAD_SECONDS, HALF_OPEN_SECONDS = 0.25, 0.05
"""Seconds between two checks of the bytes that the connections of a guarded socket have sent, and that half-open ones
have sent."""
TOO_MANY = b"500"
"""The ZAP status of a refusal for another reason than the key."""
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_REASONS = {
    "handshake": "the handshake failed; not a KVFerry peer, or `insecure` is set on one side only",
    "half-open": "too many connections have sent no message yet",
    "flood": "many bytes arrived and no whole message",
}
_OTHER_KEY = (
    "the peer's key is {}, and this engine admits {}; give both engines one secret_key, or add the peer's public key "
    "to peer_keys"
)


def configure_server(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Encrypt a server socket and admit only the peers of ``keys``; call it before bind. The socket's context gets a
    :class:`ZapHandler`.

    Raises:
        TransportError: the socket's context already has another ZAP handler.
    """
    zap_handler_of(socket.context).guard(socket, keys)


class Monitor:
    """A socket's connection events, ``(event, value)``, with libzmq's event numbers; ``socket`` is for a poller.

    Call :func:`unwatch` before the watched socket or this end is closed: an event that is never read blocks libzmq's
    thread for ever, and with it every socket of the context.
    """

    def __init__(self, watched: zmq.Socket[bytes], events: int) -> None:
        address = f"inproc://kvferry-monitor-{next(_serial)}"
        watched.monitor(address, events)
        try:
            self.socket: zmq.Socket[bytes] = watched.context.socket(zmq.PAIR)
        except zmq.ZMQError:
            unwatch(watched)
            raise
        self.socket.linger = 0
        self.socket.rcvhwm = 0  # a full queue would block libzmq's I/O thread, and with it every connection
        self.socket.connect(address)

    def read(self) -> list[tuple[int, int]]:
        """All events that have arrived and are not read yet."""
        return [(event, value) for event, value, _ in self.read_endpoints()]

    def read_endpoints(self) -> list[tuple[int, int, str]]:
        """The same, each with the endpoint that the connection was made to or accepted at."""
        events = []
        while (frames := framing.read(self.socket, 1)) is not None:
            events.append((*_EVENT.unpack(frames[0]), frames[1].decode()))
        return events

    def close(self) -> None:
        self.socket.close(0)


def unwatch(watched: zmq.Socket[bytes]) -> None:
    """End the events of a socket; the last one is MONITOR_STOPPED."""
    watched.monitor(None, 0)


@dataclass
class ServerSocket:
    """One server socket: the keys that it admits, the limit of its connections, and the connections that its monitor
    reported, by file descriptor.

    The owner sets ``port`` and ``label`` once it is bound, and adds to ``served`` each connection on which a whole
    message has come (a set's ``add`` is atomic).
    """

    keys: Keys
    limit: int | None
    dropped: Counter[str]
    label: str
    unread: UnreadBytesGuard = field(default_factory=UnreadBytesGuard)
    half_open_unread: UnreadBytesGuard = field(default_factory=lambda: UnreadBytesGuard(framing.MAX_HALF_OPEN_BYTES))
    port: int = 0
    monitor: Monitor | None = None
    served: set[int] = field(default_factory=set)
    half_open: dict[int, None] = field(default_factory=dict)  # no whole message has come yet; oldest first
    ready: set[int] = field(default_factory=set)
    failed: int = 0  # handshakes that failed, whose DISCONNECTED has not come yet


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
        self._next_check = self._next_half_open_check = 0.0
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
        keys: Keys,
        *,
        limit: int | None = None,
        dropped: Counter[str] | None = None,
        label: str = "data port",
    ) -> ServerSocket:
        """Admit only the peers of ``keys``, and at most ``limit`` connections at once where ``limit`` is given.

        ``dropped`` counts the refusals: "handshake" (not ZMTP, another mechanism, too slow), "key", "peers",
        "half-open" (too many others have sent no message yet), and "flood" (many bytes and no whole message).
        """
        domain = b"kvferry-%d" % next(_serial)
        entry = ServerSocket(keys, limit, Counter() if dropped is None else dropped, label)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        socket.zap_domain = domain
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if limit is not None:
            wanted = zmq.EVENT_ACCEPTED | HANDSHAKE_FAILED
            entry.monitor = Monitor(socket, wanted | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
        with self._lock:
            self._guarded[domain] = entry
        self._tell(b"look")
        return entry

    def connections(self) -> int:
        """The number of connections on which a message has come, over all guarded sockets with a limit."""
        with self._lock:
            for entry in self._guarded.values():
                self._note_served(entry)
            return sum(len(entry.ready) for entry in self._guarded.values())

    def close(self) -> None:
        """End the thread. The guarded sockets must be unwatched and closed by now."""
        self._tell(b"end")
        self.thread.join(5.0)

    def _tell(self, word: bytes) -> None:
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
        ready = dict(poller.poll(self._check_unread()))
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

    def _check_unread(self) -> int | None:
        """End connections that send without end. Returns the milliseconds until the next check, or None where there is
        no connection."""
        now = time.monotonic()
        with self._lock:
            entries = [entry for entry in self._guarded.values() if entry.port]
            half_open, ready = sum(len(e.half_open) for e in entries), sum(len(e.ready) for e in entries)
            waits = []
            if half_open:
                if now >= self._next_half_open_check:
                    self._next_half_open_check = now + HALF_OPEN_SECONDS
                    for entry in entries:
                        self._note_served(entry)
                        self._check_some(entry, entry.half_open, entry.half_open_unread, now)
                waits.append(self._next_half_open_check - now)
            if ready:
                if now >= self._next_check:  # the check of one connection takes microseconds
                    self._next_check = now + UNREAD_SECONDS * max(1.0, ready / 64)
                    for entry in entries:
                        self._note_served(entry)
                        self._check_some(entry, entry.ready, entry.unread, now)
                waits.append(self._next_check - now)
        return int(min(waits) * 1e3) + 1 if waits else None

    def _check_some(self, entry: ServerSocket, fds: Iterable[int], guard: UnreadBytesGuard, now: float) -> None:
        for fd in guard.over([(fd, entry.port) for fd in fds], now):
            self._end(entry, fd, "flood")

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
                self._apply_event(entry, event, value)
        return True

    def _apply_event(self, entry: ServerSocket, event: int, value: int) -> None:
        """Apply one event. Only ACCEPTED and DISCONNECTED name the connection (by file descriptor). After a handshake
        that failed, its DISCONNECTED follows."""
        if event == zmq.EVENT_ACCEPTED:
            self._forget(entry, value)
            entry.half_open[value] = None
            self._note_served(entry)
            assert entry.limit is not None
            while entry.half_open and (
                len(entry.half_open) > framing.MAX_HALF_OPEN or len(entry.half_open) + len(entry.ready) > entry.limit
            ):
                self._end(entry, next(iter(entry.half_open)), "half-open")
        elif event & HANDSHAKE_FAILED:
            entry.failed += 1
            if event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # ``_judge`` has counted this refusal
                self._count(entry, "handshake")
        elif event == zmq.EVENT_DISCONNECTED:
            if entry.failed:
                entry.failed -= 1
            elif value in entry.half_open and value not in entry.served:
                self._count(entry, "handshake")
            self._forget(entry, value)

    @staticmethod
    def _forget(entry: ServerSocket, fd: int) -> None:
        entry.half_open.pop(fd, None)
        entry.ready.discard(fd)
        entry.served.discard(fd)
        entry.unread.forget(fd)
        entry.half_open_unread.forget(fd)

    @staticmethod
    def _note_served(entry: ServerSocket) -> None:
        """A connection on which a whole message has come is not half open any more."""
        while entry.served:  # the serving thread adds to it
            fd = entry.served.pop()
            entry.unread.served.add(fd)
            if fd in entry.half_open:
                del entry.half_open[fd]
                entry.half_open_unread.forget(fd)
                entry.ready.add(fd)

    def _end(self, entry: ServerSocket, fd: int, reason: str) -> None:
        """End a connection and count the reason."""
        entry.half_open.pop(fd, None)
        entry.unread.forget(fd)
        entry.half_open_unread.forget(fd)
        if shutdown_connection(fd, entry.port):
            self._count(entry, reason)

    def _count(self, entry: ServerSocket, reason: str, detail: str = "") -> None:
        entry.dropped[reason] += 1
        _log.warning(f"{entry.label} {reason}", "%s: connection ended: %s", entry.label, detail or _REASONS[reason])

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to one ZAP request: version, request id, status, text, user, metadata."""
        known = request[1] if len(request) > 1 else b""
        reason = self._judge(request)
        status = (b"200", b"OK") if reason is None else (TOO_MANY if reason == "peers" else b"400", reason.encode())
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
            self._note_served(entry)
            if mechanism != b"CURVE" or len(credentials) != 1 or credentials[0] not in entry.keys.raw_public_keys:
                name = fingerprint(credentials[0]) if mechanism == b"CURVE" and credentials else "none"
                self._count(entry, "key", _OTHER_KEY.format(name, entry.keys.shown))
                return "key"
            if entry.limit is not None and len(entry.ready) >= entry.limit:
                self._count(entry, "peers", f"{entry.limit} peers are connected, and that is the limit")
                return "peers"
        return None


_gates: dict[int, ZapHandler] = {}
_gates_lock = threading.Lock()


def zap_handler_of(context: zmq.Context[zmq.Socket[bytes]]) -> ZapHandler:
    """The ZAP handler of a context, made on first use."""
    with _gates_lock:
        gate = _gates.get(context.underlying)
        if gate is None or gate.ended:
            gate = _gates[context.underlying] = ZapHandler(context)
        return gate
