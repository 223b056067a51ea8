"""This host, its addresses, and the networks to which its engines connect."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import resource
import socket
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kvferry.transport.errors import ConfigError, quoted

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MOST_FILES = 1 << 16
"""Open files that a process with thousands of links needs at most."""


@cache
def host_id() -> str:
    """The same for all processes that share a loopback interface: one boot of one kernel, one network namespace. Empty
    where the system does not report them."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=8).hexdigest()


def process_namespace() -> int:
    """The same for all processes that have numbers for each other; 0 where the system does not report it."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


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
    """The numeric address of ``host``, which may be a name. Blocks. Raises OSError: there is none; one line."""
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no name of a host"
        raise OSError(f"host {quoted(host)} does not resolve: {why}") from None


def raise_file_limit() -> int:
    """Let this process open as many files as the system allows it, because each link takes one. Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


class AllowedPeers:
    """Decides whether this engine may connect to an address: requests name the addresses of their P, and clients may
    send requests.

    Args:
        networks: in CIDR notation, or single addresses. ``None``: every address is allowed.

    Raises:
        ConfigError: one of ``networks`` is no network; one line.
    """

    def __init__(self, networks: Sequence[str] | None) -> None:
        self._networks = None if networks is None else tuple(_network(text) for text in networks)

    def refusal(self, address: str) -> str:
        """Why this engine does not connect to a numeric address; empty where it may."""
        if self._networks is None:
            return ""
        number = ipaddress.ip_address(address)
        mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
        if any((mapped or number) in network for network in self._networks):
            return ""
        allowed = ", ".join(map(str, self._networks)) or "no network"
        return f"{address} is not an allowed peer: allowed_peers (KVFERRY_ALLOWED_PEERS) of this engine is {allowed}"


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"allowed_peers: {quoted(text)}: {error}; expected an address or a network such as 10.1.0.0/16"
        ) from None


def is_loopback(host: str) -> bool:
    """Whether a host, an address or a name, is a loopback address as it stands. No name is resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
