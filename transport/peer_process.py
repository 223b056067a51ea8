"""Another process of this host: whether it is the one that D talks with, whether it lives, and its open files.

A plane that reads P's memory must read the process at the other end of D's control connection and no other one. No
message can prove that: a process between D and a real P can pass every message on. So D asks the kernel, which names
the socket at the other end of a TCP connection, and the process that has this socket open. What arrives on the
connection was then written by that process, and its own word about its own memory suffices. Between process namespaces
the kernel names no process; ``planes/lent_files.py`` has what D relies on there.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import stat
import struct
import threading
from contextlib import suppress
from typing import NamedTuple

from kvferry.transport.errors import PeerUnreachableError


class Ends(NamedTuple):
    """The two ends of a TCP connection of this process, each a numeric address and a port."""

    ours: tuple[str, int]
    theirs: tuple[str, int]

    @classmethod
    def of(cls, fd: int) -> Ends | None:
        """The ends of the connection ``fd``, which another thread may close meanwhile; ``None`` where it has none."""
        try:
            copy = os.dup(fd)
        except (OSError, OverflowError):
            return None
        try:
            handle = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            return None
        with handle, suppress(OSError):  # not connected
            if handle.family in (socket.AF_INET, socket.AF_INET6):
                return cls(handle.getsockname()[:2], handle.getpeername()[:2])
        return None


class PeerProcess:
    """Another process of this host. ``fd`` becomes readable when it ends, and is negative once closed.

    Raises:
        OSError: there is no such process.
    """

    def __init__(self, pid: int, fd: int | None = None) -> None:
        """``fd``: a descriptor that becomes readable with the end of the process; by default one is opened."""
        self.pid = pid
        self.fd = os.pidfd_open(pid) if fd is None else fd
        self._lock = threading.Lock()  # without it ``ended`` beside ``close`` could ask a file that got the same number

    @property
    def ended(self) -> bool:
        """Whether the process has ended, or ``close`` was called. While this is ``False``, ``pid`` is its number and no
        other process's: what was read by the number before was this process's. Any thread may ask."""
        with self._lock:
            if self.fd < 0:
                return True
            poll = select.poll()  # select() takes no descriptor of 1024 or more
            poll.register(self.fd, select.POLLIN)
            return bool(poll.poll(0))

    def check_holds_end(self, ends: Ends | None) -> None:
        """Check that this process has the other end of our connection ``ends`` open.

        Raises:
            PeerUnreachableError: it does not, or the system does not tell.
        """
        inode = None if ends is None else _inode_of_socket(ends.theirs, ends.ours)
        if not inode:
            raise PeerUnreachableError("the system does not tell which process is at the other end of the connection")
        try:
            held = self._has_open(f"socket:[{inode}]")
        except OSError as error:
            raise PeerUnreachableError(
                f"the prefill engine's process cannot be looked into: {error.strerror}"
            ) from None
        if not held or self.ended:
            raise PeerUnreachableError(
                f"process {self.pid} is not at the other end of the control connection: a proxy is between"
            )

    def open_file(self, fd: int) -> int:
        """A descriptor, for reading, of the regular file of our user that the process has open as ``fd``; the caller
        closes it. The kernel admits only processes that may look into that process's memory (proc(5),
        ``/proc/pid/fd``).

        Raises:
            OSError: no permission, no such file, another user's, no regular file, or the process has ended.
        """
        # O_PATH opens nothing: a FIFO would block, and a device may act on an open.
        place = os.open(f"/proc/{self.pid}/fd/{fd}", os.O_PATH | os.O_CLOEXEC)
        try:
            found = os.fstat(place)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if found.st_uid != os.geteuid():
                raise PermissionError(errno.EACCES, "another user's file")
            if self.ended:  # then the number may be another process's by now
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
            return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        finally:
            os.close(place)

    def close(self) -> None:
        """Close ``fd``. Idempotent."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1

    def _has_open(self, link: str) -> bool:
        folder = f"/proc/{self.pid}/fd"
        for name in os.listdir(folder):
            with suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(f"{folder}/{name}") == link:
                    return True
        return False


_NETLINK_SOCK_DIAG = 4
_REQUEST, _SOCK_DIAG_BY_FAMILY = 1, 20
_MESSAGE = struct.Struct("=IHHII")
"""``struct nlmsghdr``: bytes, type, flags, sequence, port."""
_ASKED = struct.Struct("=BBBBI")
"""The head of ``struct inet_diag_req_v2``: family, protocol, extensions, padding, states."""
_SOCKET_ID = struct.Struct("!HH16s16s12s")
"""``struct inet_diag_sockid``: ports, addresses, interface and cookie."""
_ANSWER = struct.Struct("=4x36s12x16xI")
"""``struct inet_diag_msg`` up to the inode: state, ports and addresses, the rest of the id, other numbers, inode."""
_ANY_COOKIE = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)


def _inode_of_socket(local: tuple[str, int], remote: tuple[str, int]) -> int:
    """The inode of the socket of this network namespace with these two addresses; 0 where there is none."""
    try:
        pair = [ipaddress.ip_address(address.partition("%")[0]).packed for address, _ in (local, remote)]
    except ValueError:
        return 0
    family = socket.AF_INET if len(pair[0]) == 4 else socket.AF_INET6
    return ask_netlink(family, pair, local[1], remote[1]) or search_table(family, pair, local[1], remote[1])


def ask_netlink(family: socket.AddressFamily, pair: list[bytes], local: int, remote: int) -> int:
    """Ask for one socket, see sock_diag(7). 0 also where the kernel has no such interface."""
    wanted = _SOCKET_ID.pack(local, remote, pair[0], pair[1], _ANY_COOKIE)
    asked = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + wanted
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_SOCK_DIAG) as netlink:
            netlink.send(_MESSAGE.pack(_MESSAGE.size + len(asked), _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0) + asked)
            answer = netlink.recv(4096)  # the kernel has answered when ``send`` returns
    except OSError:
        return 0
    if len(answer) < _MESSAGE.size + _ANSWER.size or _MESSAGE.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return 0
    found, inode = _ANSWER.unpack_from(answer, _MESSAGE.size)
    # Where the connection has ended at that end, the kernel answers with the socket that listens at the port. That may
    # be another process's by now.
    return int(inode) if found == wanted[:36] else 0


def search_table(family: socket.AddressFamily, pair: list[bytes], local: int, remote: int) -> int:
    """Search the table of all sockets, see proc(5), ``/proc/net/tcp``."""
    words = [struct.unpack(f"={len(packed) // 4}I", packed) for packed in pair]
    ends = ["".join(f"{word:08X}" for word in each) for each in words]
    wanted = f" {ends[0]}:{local:04X} {ends[1]}:{remote:04X} "
    try:
        with open("/proc/net/tcp" if family == socket.AF_INET else "/proc/net/tcp6") as table:
            found = next((line.split() for line in table if wanted in line), None)
    except OSError:
        return 0
    return int(found[9]) if found is not None and len(found) > 9 else 0
