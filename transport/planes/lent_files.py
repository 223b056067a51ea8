"""Files that P lends to a D of another process namespace, which cannot open them through P's process.

P listens on a Unix socket in the abstract namespace. D sends the secret of P's offer, which it has by the control
connection: so it has an admitted key. Each side asks the kernel whether the other one is the same user, and the socket
exists only inside one network namespace. It stays open as long as P's process and the channel: its end is their end.

A message of P: ``NUMBER``, the descriptor's number in P's process, and with it the descriptor.
"""

from __future__ import annotations

import array
import errno
import os
import secrets
import socket
import stat
import struct
import weakref
from functools import partial

from kvferry.transport.channels import PulledChannel
from kvferry.transport.errors import (
    NotConnectedError,
    PlaneBusyError,
    PlaneUnavailableError,
    ProtocolError,
    TransportError,
)
from kvferry.transport.peer_process import Ends, PeerProcess
from kvferry.transport.sockets import CHANNEL_BYTES, PendingConnections, Secrets, Sockets

NAME_PREFIX, NAME_BYTES = b"\0kvferry-", 16
"""The name of P's socket: this prefix, which is abstract, and the hexadecimal digits of so many random bytes."""
SOCKET_NAME_BYTES = len(NAME_PREFIX) + 2 * NAME_BYTES
NUMBER = struct.Struct("<I")
_MOST_FILES = 4
_DIGITS = frozenset(b"0123456789abcdef")
_lent: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""The sockets of this process. A child that it forks must not seem to be P."""


def _close_lent() -> None:
    for sock in list(_lent):
        sock.close()


os.register_at_fork(after_in_child=_close_lent)


def listen_unix() -> tuple[socket.socket, bytes]:
    """A new abstract Unix socket that keeps the bounds of messages, and its name. The caller listens on it."""
    name = NAME_PREFIX + secrets.token_hex(NAME_BYTES).encode()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    listener.bind(name)
    return listener, name


def connect_unix(plane: str, name: bytes, secret: bytes) -> tuple[socket.socket, bytes]:
    """D: a socket that is connected to P's and has sent its hello, and the id of its channel. A Unix socket connects
    without a wait, so D's hello arrives before D's payload.

    Raises:
        ProtocolError: ``name`` has not the form that P gives it, and might be the path of a file.
        PlaneBusyError: P's queue of new connections is full.
        PlaneUnavailableError: P is not there, or is another user's.
    """
    if not name.startswith(NAME_PREFIX) or not _DIGITS.issuperset(name[len(NAME_PREFIX) :]):
        raise ProtocolError(f"{plane} offer: {name!r} is no name of a KVFerry socket")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    channel = secrets.token_bytes(CHANNEL_BYTES)
    try:
        sock.connect(name)
        sock.send(secret + channel, socket.MSG_NOSIGNAL)
    except OSError as error:
        sock.close()
        text = f"{plane}: the prefill rank cannot be reached ({error.strerror}): "
        if isinstance(error, BlockingIOError):
            raise PlaneBusyError(text + "too many processes are connecting to it right now") from None
        text += "it is on another host or in another network namespace, or gone"
        raise PlaneUnavailableError(text) from None
    if not same_user(sock):
        sock.close()
        raise PlaneUnavailableError(f"{plane}: the prefill rank's socket is another user's")
    return sock, channel


def connection(pending: PendingConnections | None, channel: bytes) -> socket.socket:
    """P: the connection of a channel whose hello is sent before its payload. Raises NotConnectedError: it is not here
    yet."""
    sock = None if pending is None else pending.take(channel)
    if sock is None:
        raise NotConnectedError("the decode rank of this channel never connected, or was refused")
    return sock


def same_user(sock: socket.socket) -> bool:
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def receive_fds(sock: socket.socket) -> tuple[bytes, list[int], int]:
    """One message with the descriptors that came with it, which the caller closes, and its flags."""
    fds = array.array("i")
    data, ancillary, flags, _ = sock.recvmsg(256, socket.CMSG_LEN(4 * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds), flags


class Lender:
    """P's end: it listens from the first offer on. ``sockets`` is polled by the caller."""

    def __init__(self) -> None:
        self.sockets = Sockets()
        self._secrets = Secrets()
        self._pending: PendingConnections | None = None
        self._name = b""

    def offer(self) -> tuple[bytes, bytes]:
        """The name of the socket, and a secret for one D."""
        if self._pending is None:
            listener, self._name = listen_unix()
            self._pending = PendingConnections(self.sockets, listener, self._secrets, welcome=same_user)
        return self._name, self._secrets.new()

    def accept(self, channel: bytes) -> LendingChannel:
        """The channel of a D that has connected. Raises NotConnectedError: it is not here yet."""
        self.progress()
        return LendingChannel(self.sockets, connection(self._pending, channel))

    def progress(self) -> bool:
        moved = self.sockets.progress()
        if self._pending is not None:
            self._pending.expire()
        return moved

    def close(self) -> None:
        if self._pending is not None:
            self._pending.close()
        self.sockets.close()


class LendingChannel(PulledChannel):
    """P's end of a channel, while which D has P's files."""

    def __init__(self, sockets: Sockets, sock: socket.socket) -> None:
        self._sockets, self._sock = sockets, sock
        _lent.add(sock)
        sockets.watch(sock, partial(sockets.drop, sock))  # D sends nothing: it is gone

    def lend(self, fd: int) -> None:
        if self._sock.fileno() < 0:
            raise TransportError("the decode rank is gone")
        try:
            socket.send_fds(self._sock, [NUMBER.pack(fd)], [fd], socket.MSG_NOSIGNAL)
        except OSError as error:
            raise TransportError(f"the decode rank is gone: {error.strerror}") from None

    def _close(self) -> None:
        self._sockets.drop(self._sock)


class BorrowedFiles(PeerProcess):
    """D's end: a P whose process has no number here. Its files come over the socket, whose end is P's end. ``channel``:
    the id by which P finds the socket. Raises as ``connect_unix``."""

    def __init__(self, plane: str, name: bytes, secret: bytes) -> None:
        self._sock, self.channel = connect_unix(plane, name, secret)
        self._files: dict[int, int] = {}
        self._broken = False  # P has sent what it may not
        super().__init__(0, self._sock.fileno())

    @property
    def ended(self) -> bool:
        with self._lock:
            return self.fd < 0 or not self._receive()

    def check_holds_end(self, ends: Ends | None) -> None:
        """P has made the secret, and only told it over the control connection."""

    def open_file(self, fd: int) -> int:
        with self._lock:
            if self.fd >= 0:
                self._receive()
            if fd not in self._files:
                raise FileNotFoundError(errno.ENOENT, "the prefill engine has not lent it")
            found = os.fstat(self._files[fd])
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            return os.open(f"/proc/self/fd/{self._files[fd]}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def close(self) -> None:
        with self._lock:
            self.fd = -1
            self._sock.close()
            while self._files:
                os.close(self._files.popitem()[1])

    def _receive(self) -> bool:
        """Receive what is here. Returns whether P lives."""
        while not self._broken:
            try:
                data, fds, flags = receive_fds(self._sock)
            except BlockingIOError:
                return True
            except OSError:
                return False
            number: int = NUMBER.unpack(data)[0] if len(data) == NUMBER.size else -1
            whole = number >= 0 and len(fds) == 1 and not flags & socket.MSG_CTRUNC
            if not whole or number in self._files or len(self._files) == _MOST_FILES:
                for fd in fds:
                    os.close(fd)
                self._broken = True
                break
            self._files[number] = fds[0]
        return False
