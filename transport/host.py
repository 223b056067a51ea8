"""The identity and the addresses of this host."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import resource
import socket
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
    """Whether a numeric address belongs to this network namespace: a connection to it, or from it, stays in this
    kernel. An address that programs may bind although it is elsewhere (``ip_nonlocal_bind``) does not count."""
    try:
        if ipaddress.ip_address(address).is_loopback:
            return True
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            to = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0][4]
            probe.connect(to)  # sends nothing; the kernel chooses the source address
            return bool(probe.getsockname()[0] == address.partition("%")[0])  # to an address of ours from that address
    except (OSError, ValueError):
        return False


def numeric_address(host: str, port: int | None = None) -> str:
    """The numeric address of ``host``, which may be a name. Blocks. Raises OSError, UnicodeError: there is none."""
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it, because each link takes one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
