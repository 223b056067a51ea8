"""A data plane whose channels are connections: P listens on one socket for all consumers, D connects. A plane adds its
offer and its channels."""

from __future__ import annotations

import os
import select
import socket
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.transport.channels import Channel
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
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
    """P's end of a channel whose connections may arrive after D's payload. ``ids``: what D's hellos name. ``missing``:
    those whose connections are not here; they must be by ``deadline``, of ``time.monotonic``."""

    late = "the decode rank's connection did not come"

    def __init__(self, pool: SlotPool, ids: tuple[bytes, ...], slot_bytes: int, window: int) -> None:
        super().__init__(pool, slot_bytes, window)
        self.ids, self.missing = ids, {*ids}
        self.deadline = time.monotonic() + CONNECT_SECONDS

    @property
    def open(self) -> bool:
        return super().open and not self.missing

    @property
    def incomplete(self) -> bool:
        return bool(self.missing)

    @abstractmethod
    def connected(self, sock: socket.socket, channel_id: bytes) -> None:
        """The connection with this id is here."""


class ConnectingReceiver(PushReceiver):
    """D's end of a channel, whose TCP connections are being made. ``deadline``: when they must stand, by
    ``time.monotonic``."""

    late = f"no connection to the prefill rank's data port in {CONNECT_SECONDS:g} s; is a firewall between?"

    def __init__(self, plane: SocketPlane, sock: socket.socket, hello: bytes) -> None:
        super().__init__()
        self.plane_name, self.sock, self.incomplete = plane.name, sock, 0
        self.dial(plane, sock, hello)

    def dial(self, plane: SocketPlane, sock: socket.socket, hello: bytes) -> None:
        """A connection is being made: ``connected`` is called when it stands, and the hello is sent."""
        self.incomplete += 1
        self.deadline = time.monotonic() + CONNECT_SECONDS
        plane.sockets.watch(sock, partial(self._on_connected, sock, hello), WRITABLE)

    def _on_connected(self, sock: socket.socket, hello: bytes) -> None:
        """The connection stands, or could not be made."""
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if number:
                raise OSError(number, os.strerror(number))
            tune(sock)
            sock.send(hello, socket.MSG_NOSIGNAL)  # so few bytes always fit
        except OSError as error:
            why = f"the prefill rank's data port cannot be reached: {error.strerror}; is a firewall between?"
            self.fail(f"{self.plane_name}: {why}")
            return
        self.incomplete -= 1
        self.connected(sock)

    @abstractmethod
    def connected(self, sock: socket.socket) -> None:
        """A connection stands, and its hello is sent."""


class SocketPlane(PushPlane):
    """``pending``: P's new connections; ``None`` before ``listen``. ``secrets``: each offer has one, which D sends."""

    def __init__(self, slot_bytes: int) -> None:
        super().__init__(slot_bytes)
        self.sockets = Sockets()
        self.pending: PendingConnections | None = None
        self.secrets = Secrets()
        self._port = 0
        self._next_look = 0.0

    def listen(self, listener: socket.socket, welcome: Callable[[socket.socket], bool] = lambda sock: True) -> None:
        """P: accept connections on a bound, non-blocking socket; see ``PendingConnections``."""
        self.pending = PendingConnections(self.sockets, listener, self.secrets, welcome=welcome, arrived=self._join)

    def listen_tcp(self, host: str) -> int:
        """P: listen at the local address ``host``. Returns the port, which the system chooses at the first call. Raises
        PlaneUnavailableError: it is no address of this host."""
        if not self._port:
            listener, address = self._tcp_socket(host)
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
            self._join(channel_id)

    def _join(self, channel_id: bytes) -> None:
        """Join a channel and its connection once both are here, and none that came too late."""
        assert self.pending is not None
        for channel in self.channels:
            if isinstance(channel, AwaitedSender) and channel_id in channel.missing and channel.error is None:
                if (sock := self.pending.take(channel_id)) is not None:
                    tune(sock)
                    channel.missing.remove(channel_id)
                    channel.connected(sock, channel_id)
                return

    def connect_tcp(self, host: str, port: int) -> socket.socket:
        """D: a socket that begins to connect to a numeric address; it is writable when it has connected, or failed.
        Raises PlaneUnavailableError: there is no way to it."""
        sock, address = self._tcp_socket(host, port, socket.AI_NUMERICHOST)
        try:
            sock.connect(address)
        except BlockingIOError:
            pass  # the connection is being made
        except OSError as error:
            sock.close()
            raise PlaneUnavailableError(f"{self.name}: {host} cannot be reached: {error.strerror}") from None
        return sock

    def _tcp_socket(self, host: str, port: int = 0, flags: int = 0) -> tuple[socket.socket, Any]:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
            family, _, _, _, address = found[0]
            return socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK), address
        except OSError as error:
            raise PlaneUnavailableError(f"{self.name}: {host!r} is no address: {error.strerror}") from None

    def drop(self, channel: Channel, sock: socket.socket | None) -> None:
        """Forget a channel that closes, and close its socket. Idempotent."""
        self.channels.pop(channel, None)
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
        for channel in [one for one in self.channels if isinstance(one, AwaitedSender | ConnectingReceiver)]:
            if channel.incomplete and now > channel.deadline and channel.error is None:
                channel.fail(f"{self.name}: {channel.late}")
                moved = True
        return moved

    def arm(self) -> bool:
        return True  # the epoll descriptor is level-triggered

    def _close(self) -> None:
        if self.pending is not None:
            self.pending.close()
        self.sockets.close()
