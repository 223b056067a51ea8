"""The identity and the addresses of this host, and its other processes."""

from __future__ import annotations

import errno
import hashlib
import ipaddress
import os
import resource
import select
import socket
import stat
from functools import cache
from pathlib import Path

MOST_FILES = 1 << 16
"""Open files that a process with thousands of links needs at most."""


@cache
def host_id() -> str:
    """A string that is the same for all processes that share a loopback interface: one boot of one kernel, one network
    namespace. Empty where the system does not report them.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=8).hexdigest()


def is_ours(address: str) -> bool:
    """Whether a numeric address belongs to this host: a connection to it stays in this kernel. On a host that lets
    programs bind any address (``ip_nonlocal_bind``), only the loopback addresses count."""
    if ipaddress.ip_address(address).is_loopback:
        return True
    version = 6 if ":" in address else 4
    try:
        if Path(f"/proc/sys/net/ipv{version}/ip_nonlocal_bind").read_text().strip() != "0":
            return False
        with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def open_peer_file(pid: int, fd: int) -> int:
    """A descriptor, for reading, of the file that another process of this host has open as ``fd``; the caller closes
    it. The kernel admits only processes that may look into that process's memory (proc(5), ``/proc/pid/fd``).

    Raises:
        OSError: no permission, no such file, or not a regular file: to read another kind of file might block.
    """
    ours = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(ours).st_mode):
        os.close(ours)
        raise OSError(errno.EINVAL, "not a regular file")
    return ours


class PeerProcess:
    """Another process of this host. ``fd`` becomes readable when it ends, and is negative once closed.

    Raises:
        OSError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.fd = os.pidfd_open(pid)

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        poll = select.poll()  # select() takes no descriptor of 1024 or more
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close ``fd``. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it, because each link takes one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
