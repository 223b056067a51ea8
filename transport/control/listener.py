"""P's end of the control plane: the interface, and the address to bind."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket as _socket
from abc import ABC, abstractmethod
from collections import Counter

import zmq

from kvferry.transport.control import framing
from kvferry.transport.control.keys import Keys
from kvferry.transport.errors import ConfigError


class Listener(ABC):
    """P's end: receives messages from any number of peers, and sends each peer its answers.

    Attributes:
        port, endpoint: the port, and the address ``tcp://address:port``, on which it listens.
        socket: a ZMQ socket or a descriptor, for ``zmq.Poller``.
        dropped: the number of refusals by reason: "handshake", "key", "peers", "half-open" and "flood" are connections;
            "frames", "oversize" and "identity" are messages received; "gone" and "full" are messages not sent.
    """

    port: int
    endpoint: str
    socket: zmq.Socket[bytes] | int
    dropped: Counter[str]

    @abstractmethod
    def receive(self) -> list[tuple[bytes, list[bytes], str]]:
        """``(identity, frames, address)`` of the messages that are there now, at most some hundreds; the poller
        reports more.

        The identity names one connection: a D that reconnects gets a new one. ``address`` is the numeric address from
        which that connection came, which no message chooses; empty where libzmq does not report it.
        """

    @abstractmethod
    def send(self, identity: bytes, frames: list[bytes]) -> bool:
        """Queue a message for one peer. False: the peer is gone, or its queue is full because it does not read."""

    @property
    @abstractmethod
    def peers(self) -> int:
        """The number of connections on which a message has come, and which are open now."""

    @abstractmethod
    def close(self) -> None:
        """Close the listener and drop unsent messages. Idempotent."""


def listen(
    host: str, port: int, *, keys: Keys | None, max_message_bytes: int, max_peers: int = framing.MAX_PEERS
) -> Listener:
    """Listen for the ranks of D.

    Args:
        host: the one address to bind, or a name of it; never all interfaces.
        port: 0 finds a free one.
        keys: only peers with these keys are admitted, and all traffic is encrypted. None: every peer is admitted.
        max_message_bytes: bound on the sum of a message's frames.
        max_peers: connections at once; at most half of the process's limit of open files.

    Raises:
        ConfigError: the port is in use, the address is not ours, or means all interfaces; one line.
    """
    from kvferry.transport.control.curve_listener import CurveListener
    from kvferry.transport.control.plain_listener import PlainListener

    address = _own_address(host)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = min(max_peers, files // 2) if files > 0 else max_peers
    try:
        if keys is None:
            return PlainListener(address, port, max_message_bytes, limit)
        return CurveListener(address, port, keys, max_message_bytes, limit)
    except (zmq.ZMQError, OSError) as error:
        raise ConfigError(_bind_failure(host, port, error)) from None


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


def _bind_failure(host: str, port: int, error: zmq.ZMQError | OSError) -> str:
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
