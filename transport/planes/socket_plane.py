"""A data plane of which every channel is one connection: P listens on one socket for all consumers, D connects.

Such planes share the listening socket and its pending connections, and the interface to the caller's poll loop. A plane
adds its offer and its channels.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from kvferry.transport.channels import Channel
from kvferry.transport.errors import NotConnectedError, PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.planes.push import PushPlane, PushReceiver, WindowedSender
from kvferry.transport.sockets import CHANNEL_BYTES, WRITABLE, PendingConnections, Secrets, Sockets, tune
from kvferry.transport.staging import SlotPool

CONNECT_SECONDS = 10.0
"""A connection that is being made must stand within this time."""
LOOK_SECONDS = 0.02
"""Between two looks at such deadlines."""


class SocketAttach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """D's payload for P's ``accept``: the id that D's connection sends in its hello, and the bytes of D's slots."""

    channel: Annotated[bytes, Meta(min_length=CHANNEL_BYTES, max_length=CHANNEL_BYTES)]
    slot_bytes: Annotated[int, Meta(ge=4096, le=1 << 40)]


class AwaitedSender(WindowedSender):
    """P's end of a channel whose TCP connection may arrive after D's payload. ``id``: what D's hello names. ``sock``:
    ``None`` until the connection is here, which must be by ``deadline``, of ``time.monotonic``."""

    def __init__(self, pool: SlotPool, channel_id: bytes, slot_bytes: int, window: int) -> None:
        super().__init__(pool, slot_bytes, window)
        self.id = channel_id
        self.sock: socket.socket | None = None
        self.deadline = time.monotonic() + CONNECT_SECONDS

    @property
    def open(self) -> bool:
        return super().open and self.sock is not None

    @property
    def ids(self) -> tuple[bytes, ...]:
        """What the hellos of its connections name; most channels have one."""
        return (self.id,)

    def joined(self, channel_id: bytes, sock: socket.socket) -> None:
        """The connection with this id is here."""
        self.connected(sock)

    def connected(self, sock: socket.socket) -> None:
        """D's connection is here."""
        self.sock = sock
        tune(sock)


class ConnectingReceiver(PushReceiver):
    """D's end of a channel, whose TCP connection ``sock`` is being made. ``deadline``: when it must stand, with others
    that are being made, by ``time.monotonic``; infinite once they stand."""

    late: ClassVar[str]
    unreachable: ClassVar[str]
    """The errors of a connection that is not there in time, or fails; the reason follows the second one."""

    def __init__(self, plane: SocketPlane, sock: socket.socket, hello: bytes) -> None:
        super().__init__()
        self.plane_name, self.sock = plane.name, sock
        self._dialing = 0
        self.dial(plane, sock, hello, self.connected)

    def dial(self, plane: SocketPlane, sock: socket.socket, hello: bytes, stands: Callable[[], None]) -> None:
        """A connection is being made: call ``stands`` when it stands, and the hello is sent."""
        self._dialing += 1
        self.deadline = time.monotonic() + CONNECT_SECONDS
        plane.sockets.watch(sock, partial(self._on_connected, sock, hello, stands), WRITABLE)

    def _on_connected(self, sock: socket.socket, hello: bytes, stands: Callable[[], None]) -> None:
        """The connection stands, or could not be made."""
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if number:
                raise OSError(number, os.strerror(number))
            tune(sock)
            sock.send(hello, socket.MSG_NOSIGNAL)  # so few bytes always fit
        except OSError as error:
            self.fail(f"{self.plane_name}: {self.unreachable % error.strerror}")
            return
        self._dialing -= 1
        if not self._dialing:
            self.deadline = inf
        stands()

    @abstractmethod
    def connected(self) -> None:
        """The connection stands, and the hello is sent."""


class SocketPlane(PushPlane):
    """``pending``: P's new connections; ``None`` before ``listen``. ``awaited``: P's channels without a connection.
    ``secrets``: each offer has one, which the D of that offer must send."""

    def __init__(self, slot_bytes: int) -> None:
        super().__init__(slot_bytes)
        self.awaited: dict[bytes, AwaitedSender] = {}
        self.sockets = Sockets()
        self.pending: PendingConnections | None = None
        self.secrets = Secrets()
        self._port = 0
        self._next_look = 0.0

    def listen(self, listener: socket.socket, welcome: Callable[[socket.socket], bool] = lambda sock: True) -> None:
        """P: accept connections on a bound, non-blocking socket; see ``PendingConnections``."""
        self.pending = PendingConnections(self.sockets, listener, self.secrets, welcome=welcome, arrived=self._join)

    def new_attach(self) -> SocketAttach:
        """D: the payload of a new channel."""
        return SocketAttach(secrets.token_bytes(CHANNEL_BYTES), self.slot_bytes)

    def listen_tcp(self, host: str) -> int:
        """P: listen at the local address ``host``. Returns the port, which the system chooses at the first call. Raises
        PlaneUnavailableError: it is no address of this host."""
        if self._port:
            return self._port
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise PlaneUnavailableError(f"{self.name}: {host!r} is no address: {error.strerror}") from None
        try:
            listener.bind(address)
            self.listen(listener)
        except OSError as error:
            listener.close()
            raise PlaneUnavailableError(f"{self.name}: cannot listen on {host}: {error.strerror}") from None
        self._port = int(listener.getsockname()[1])
        return self._port

    def check_new(self, attach: SocketAttach) -> None:
        """P: check D's payload for a channel of ``listen_tcp``. Raises TransportError: this P has made no offer. Raises
        ProtocolError: the channel exists already."""
        if self.pending is None:
            raise TransportError(f"{self.name}: a decode rank answers an offer that was never made")
        if any(attach.channel in channel.ids for channel in self.channels if isinstance(channel, AwaitedSender)):
            raise ProtocolError(f"{self.name} attach: this channel exists already")

    def await_connection(self, channel: AwaitedSender) -> None:
        """P: a new channel, whose connection may be here already."""
        self.channels[channel] = None
        for channel_id in channel.ids:
            self.awaited[channel_id] = channel
            self._join(channel_id)

    def _join(self, channel_id: bytes) -> None:
        """Join a channel and its connection once both are here."""
        assert self.pending is not None
        channel = self.awaited.get(channel_id)  # None: the connection came too late
        if channel is not None and channel.error is None and (sock := self.pending.take(channel_id)) is not None:
            del self.awaited[channel_id]
            channel.joined(channel_id, sock)

    def _forget(self, channel: AwaitedSender) -> None:
        """Await no connection of a channel any more."""
        for channel_id in channel.ids:
            self.awaited.pop(channel_id, None)

    def connect_tcp(self, host: str, port: int) -> socket.socket:
        """D: a socket that begins to connect to a numeric address; it is writable when it has connected, or failed.
        Raises PlaneUnavailableError: there is no way to it."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            family, _, _, _, address = found[0]
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise PlaneUnavailableError(f"{self.name}: {host!r} is no address: {error.strerror}") from None
        try:
            sock.connect(address)
        except BlockingIOError:
            pass  # the connection is being made
        except OSError as error:
            sock.close()
            raise PlaneUnavailableError(f"{self.name}: {host} cannot be reached: {error.strerror}") from None
        return sock

    def take_connection(self, channel: bytes) -> socket.socket:
        """P: the connection of a channel whose hello is sent before its payload, see ``lent_files``. Raises
        NotConnectedError: it is not here yet."""
        self.progress()
        sock = None if self.pending is None else self.pending.take(channel)
        if sock is None:
            raise NotConnectedError(f"{self.name}: the decode rank of this channel never connected, or was refused")
        return sock

    def drop(self, channel: Channel, sock: socket.socket | None) -> None:
        """Forget a channel that closes, and close its socket. Idempotent."""
        self.channels.pop(channel, None)
        if isinstance(channel, AwaitedSender):
            self._forget(channel)
        if sock is not None:
            self.sockets.drop(sock)

    def pollables(self) -> list[tuple[int, int]]:
        return [] if self.closed else [(self.sockets.fd, select.POLLIN)]

    def progress(self) -> bool:
        if self.closed:
            return False
        moved = self.sockets.progress()
        now = time.monotonic()
        if now < self._next_look:
            return moved
        self._next_look = now + LOOK_SECONDS
        if self.pending is not None:
            self.pending.expire()
        for sender in {sender for sender in self.awaited.values() if now > sender.deadline}:
            self._forget(sender)
            sender.fail(f"{self.name}: the decode rank's connection did not come")
            moved = True
        for receiver in [channel for channel in self.channels if isinstance(channel, ConnectingReceiver)]:
            if now > receiver.deadline and receiver.error is None:
                receiver.fail(f"{self.name}: {receiver.late}")
                moved = True
        return moved

    def arm(self) -> bool:
        return True  # the epoll descriptor is level-triggered

    def _close(self) -> None:
        if self.pending is not None:
            self.pending.close()
        self.sockets.close()
