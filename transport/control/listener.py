"""P's end of the control plane."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket as _socket
from collections import Counter

import zmq

from kvferry.transport.control import framing
from kvferry.transport.control.zap_auth import CurveKeys, ZapHandler, unwatch
from kvferry.transport.errors import ConfigError


class Listener:
    """P's end: receives messages from any number of peers, and sends each peer its answers.

    Args:
        host: the one address to bind, or a name of it; never all interfaces.
        port: 0 finds a free one.
        curve: the deployment's key pair; only peers that hold it are admitted. None: every peer is admitted.
        max_message_bytes: bound on the sum of a message's frames.
        max_peers: connections at once; at most half of the process's limit of open files.

    Attributes:
        port, endpoint: the port, and the address ``tcp://address:port``, on which it listens.
        socket: for ``zmq.Poller``.
        dropped: the number of refusals by reason: "handshake", "key" and "peers" are connections; "frames",
            "oversize" and "identity" are messages received; "gone" and "full" are messages not sent.

    Raises:
        ConfigError: the port is in use, the address is not ours, or means all interfaces; one line.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        curve: CurveKeys | None = None,
        max_message_bytes: int,
        max_peers: int = framing.MAX_PEERS,
    ) -> None:
        address = _own_address(host)
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.dropped: Counter[str] = Counter()
        # A context of its own: its I/O thread and its ZAP handler end with it.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        framing.tune(self.socket, max_message_bytes)
        # Some peers are on this host. TCP reports the loss of another host; nothing here waits for a D that only hangs.
        framing.keep_watch(self.socket, framing.SILENCE_HERE_SECONDS)
        self.socket.router_mandatory = True
        self.socket.ipv6 = ":" in address
        try:
            self._gate = ZapHandler(self._context)
            if curve is not None:
                self.socket.curve_server = True
                self.socket.curve_publickey, self.socket.curve_secretkey = curve.public.encode(), curve.secret.encode()
            self._guarded = self._gate.guard(
                self.socket,
                curve,
                limit=min(max_peers, files // 2) if files > 0 else max_peers,
                backlog_bytes=max(framing.MIN_BACKLOG_BYTES, 8 * max_message_bytes),
                dropped=self.dropped,
                label=f"control port {host}",
            )
            self.socket.bind(framing.url(address, port or "*"))
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(_bind_failure(host, port, error)) from None
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(self.endpoint.rpartition(":")[2])
        self._guarded.port, self._guarded.label = self.port, f"control port {self.endpoint}"
        self._filter = framing.Filter(self._guarded.label, max_message_bytes, self.dropped)

    def receive(self) -> list[tuple[bytes, list[bytes]]]:
        """``(identity, frames)`` of the messages that are there now, at most some hundreds; the poller reports more.

        The identity names one connection: a D that reconnects gets a new one.
        """
        messages = []
        for _ in range(framing.BATCH):
            if not framing.waiting(self.socket):
                break
            try:
                first = self.socket.recv(zmq.NOBLOCK, copy=False)
                identity, *frames = framing.rest(self.socket, [first.bytes], framing.FRAMES + 1)
            except zmq.ZMQError:  # the socket or the context is closed
                break
            self._guarded.backlog.served.add(framing.source(first))
            if identity[:1] != b"\0" or len(identity) != 5:  # chosen by the peer, not made by libzmq
                self.dropped["identity"] += 1
            elif self._filter.passes(frames):
                messages.append((identity, frames))
        return messages

    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        """Queue a message for one peer. False: the peer is gone, or its queue is full because it does not read."""
        failure = framing.send(self.socket, [identity, *frames])
        if failure:
            self.dropped["full" if failure == zmq.EAGAIN else "gone"] += 1
        return not failure

    @property
    def peers(self) -> int:
        """The number of peers that are connected now."""
        return self._gate.connections()

    def close(self) -> None:
        """Close the listener and drop unsent messages. Idempotent."""
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
