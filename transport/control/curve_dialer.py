"""D's connections with keys: ZMQ, encrypted by CURVE. All of them share one ROUTER, because libzmq bounds the sockets
of a process (1023), and each socket takes descriptors."""

from __future__ import annotations

import contextlib
import errno
import time

import zmq

from kvferry.transport.control import framing
from kvferry.transport.control.dialer import NOBODY_LISTENS, Connection, Dialer, Refusal
from kvferry.transport.control.keys import Keys, configure_client
from kvferry.transport.control.unread_bytes import UnreadBytesGuard
from kvferry.transport.control.zap_auth import HANDSHAKE_FAILED, TOO_MANY, Monitor, unwatch

LANES = 6
_REST_SECONDS = 2.0
"""How long events of a closed connection may still come."""
_CHECKS = 64
"""Connections whose unread bytes are looked at in one turn; a look takes microseconds."""
_CHECK_SECONDS = 0.25
_EVENTS = (
    zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_FAILED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
)


class CurveConnection(Connection):
    """One connection of a shared socket, which names it by ``identity``."""

    def __init__(self, dialer: CurveDialer, host: str, port: int, key: bytes | None, timeout: float) -> None:
        super().__init__(dialer, host, port, timeout)
        self._curve = dialer
        self._key = key
        self.identity = dialer.next_identity()
        self.endpoint = ""
        self.lane: Lane | None = None
        self.filter = framing.Filter(f"connection to {host}:{port}", dialer.max_message_bytes, self.dropped)

    def on_event(self, event: int, value: int) -> None:
        """Handle an event of this connection's endpoint."""
        if event == zmq.EVENT_CONNECTED:
            self.fd = value
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.establish()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            if value == int(TOO_MANY):
                self.lose("the peer refused us: it has as many peers as it takes")
            else:
                self.lose(f"the peer refused us: it does not admit our key {self._curve.keys.fingerprint}")
        elif event & HANDSHAKE_FAILED or (event == zmq.EVENT_DISCONNECTED and not self.connected):
            self.lose(
                "the peer hung up during the handshake; it is no KVFerry control port, it is insecure, it has as many "
                "peers as it takes, or its key is not the one that it has named"
            )
        elif event == zmq.EVENT_DISCONNECTED and value == self.fd:
            self.lose("the peer is gone")
        elif event == zmq.EVENT_CLOSED:
            self.lose(NOBODY_LISTENS)

    def _connect(self, address: str) -> None:
        assert self._key is not None, "a connection without a key is lost from the start"
        self.endpoint = framing.url(address, self.port)
        lane = self._curve.lane_for(self.endpoint)
        if lane is None:
            raise OSError(errno.EBUSY, f"{LANES} connections lead there")
        lane.connect(self, address, self._key, self._timeout)
        self.lane = lane

    def _transmit(self, frames: list[bytes]) -> int:
        if self.lane is None:
            return errno.EHOSTUNREACH
        return framing.send(self.lane.socket, [self.identity, framing.pack(frames)])

    def _shut(self) -> None:
        lane, self.lane = self.lane, None
        if lane is not None:
            lane.disconnect(self)


class Lane:
    """One ROUTER with its monitor. libzmq names a connection in events by its endpoint alone, and ends all connections
    of an endpoint when one is lost, so that a lane has one connection for each endpoint."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, max_message_bytes: int) -> None:
        self._keys = keys
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        framing.tune(self.socket, max_message_bytes)
        self.socket.router_mandatory = True
        self.socket.reconnect_ivl = -1  # messages for one incarnation of P must not reach the next
        self.monitor = Monitor(self.socket, int(_EVENTS))
        self.by_identity: dict[bytes, CurveConnection] = {}
        self._by_endpoint: dict[str, CurveConnection] = {}
        self._rests_until: dict[str, float] = {}
        self._unread = UnreadBytesGuard()
        self._check_next: list[CurveConnection] = []
        self._check_at = 0.0

    def takes(self, endpoint: str, now: float) -> bool:
        """Whether a connection to ``endpoint`` can be made, and no event of an earlier one can still come."""
        return endpoint not in self._by_endpoint and self._rests_until.get(endpoint, 0.0) <= now

    def connect(self, connection: CurveConnection, address: str, key: bytes, timeout: float) -> None:
        """Begin to connect. libzmq copies the socket's options into each connection. Raises ZMQError."""
        configure_client(self.socket, self._keys, key)
        self.socket.ipv6 = ":" in address
        seconds = framing.silence(address)
        framing.keep_watch(self.socket, seconds)
        self.socket.tcp_maxrt = int(seconds * 1e3)  # for TCP a peer that does not read does not answer
        self.socket.connect_timeout = max(1, int(timeout * 1e3))
        self.socket.setsockopt(zmq.CONNECT_ROUTING_ID, connection.identity)
        self.socket.connect(connection.endpoint)
        self.by_identity[connection.identity] = self._by_endpoint[connection.endpoint] = connection

    def disconnect(self, connection: CurveConnection) -> None:
        """End a connection and forget it."""
        self.by_identity.pop(connection.identity, None)
        self._by_endpoint.pop(connection.endpoint, None)
        self._unread.forget(connection.fd)
        now = time.monotonic()
        for endpoint, until in list(self._rests_until.items())[:2]:
            if until <= now:
                del self._rests_until[endpoint]
        self._rests_until.pop(connection.endpoint, None)
        self._rests_until[connection.endpoint] = now + _REST_SECONDS
        with contextlib.suppress(zmq.ZMQError):  # libzmq has ended it already
            self.socket.disconnect(connection.endpoint)

    def receive(self, now: float) -> bool:
        """Handle the events and the messages that have arrived. Returns whether there were any."""
        events = self.monitor.read_endpoints()
        for event, value, endpoint in events:
            connection = self._by_endpoint.get(endpoint)
            if connection is not None:
                connection.on_event(event, value)
        moved, nbytes = bool(events), 0
        for _ in range(framing.BATCH):
            if nbytes >= framing.BATCH_BYTES or not framing.waiting(self.socket):
                break
            try:
                identity, *frames = framing.rest(self.socket, [self.socket.recv(zmq.NOBLOCK)], framing.FRAMES + 1)
            except zmq.ZMQError:  # the socket or the context is closed
                break
            moved, nbytes = True, nbytes + sum(map(len, frames))
            connection = self.by_identity.get(identity)
            if connection is not None:
                self._unread.served.add(connection.fd)
                message = connection.filter.unpack(frames)
                if message is not None:
                    connection.deliver(message)
        if now >= self._check_at:
            self._check_at = now + _CHECK_SECONDS
            self._check_unread(now)
        return moved

    def _check_unread(self, now: float) -> None:
        """End connections that send without end; some are looked at in each call, all of them in turn."""
        if not self._check_next:
            self._check_next = list(self.by_identity.values())
        some, self._check_next = self._check_next[:_CHECKS], self._check_next[_CHECKS:]
        by_fd = {connection.fd: connection for connection in some if connection.lane is not None}
        for fd in self._unread.over([(fd, connection.port) for fd, connection in by_fd.items() if fd >= 0], now):
            for connection in [each for each in self.by_identity.values() if each.fd == fd]:
                connection.lose("many bytes arrived and no whole message")

    def close(self) -> None:
        """Close the sockets."""
        unwatch(self.socket)
        self.socket.close(0)
        self.monitor.close()


class CurveDialer(Dialer):
    """See :func:`kvferry.transport.control.dialer.make_dialer`."""

    def __init__(self, keys: Keys, max_message_bytes: int, refusal: Refusal) -> None:
        super().__init__(keys, max_message_bytes, refusal)
        self.keys = keys
        # All that libzmq needs it gets now: where no descriptor is left later, it ends the process.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._spare: list[Lane] = []
        try:
            while len(self._spare) < LANES:
                self._spare.append(Lane(self._context, keys, max_message_bytes))
        except zmq.ZMQError:
            self._context.destroy(0)  # what is left open holds up whoever collects it
            raise
        self._lanes: list[Lane] = []
        self._serial = 0

    def next_identity(self) -> bytes:
        """A name that no other connection of this dialer has or had."""
        self._serial += 1
        return b"k" + self._serial.to_bytes(8, "big")

    def lane_for(self, endpoint: str) -> Lane | None:
        """A lane for one more connection to ``endpoint``; None where all have one."""
        now = time.monotonic()
        for lane in self._lanes:
            if lane.takes(endpoint, now):
                return lane
        if not self._spare:
            return None
        lane = self._spare.pop()
        self._lanes.append(lane)
        self.pollables += [lane.socket, lane.monitor.socket]
        return lane

    def _new(self, host: str, port: int, key: bytes | None, timeout: float) -> Connection:
        return CurveConnection(self, host, port, key, timeout)

    def _receive(self) -> bool:
        now, moved = time.monotonic(), False
        for lane in self._lanes:
            moved |= lane.receive(now)
        return moved

    def _close(self) -> None:
        for lane in self._lanes:
            for connection in list(lane.by_identity.values()):
                connection.close()
        for lane in (*self._lanes, *self._spare):
            lane.close()
        self._context.term()
