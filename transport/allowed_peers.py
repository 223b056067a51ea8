"""The networks to which this engine connects: requests name the addresses of their P, and clients may send requests."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from kvferry.transport.errors import ConfigError, quoted

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AllowedPeers:
    """Decides whether this engine may connect to an address.

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

    def refusal_without_keys(self, address: str) -> str:
        """As ``refusal``, for connections that no key protects: without networks, only loopback is allowed."""
        if self._networks is not None or is_loopback(address):
            return self.refusal(address)
        return f"{address} is no loopback address, and no key protects HTTP: name its network in allowed_peers"


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
