"""To which addresses D connects."""

from __future__ import annotations

import pytest

from kvferry.connector.config import load_settings
from kvferry.transport.errors import ConfigError
from kvferry.transport.host import AllowedPeers

LISTED = AllowedPeers(["10.1.0.0/16", "192.0.2.7", "fd00::/8"])


@pytest.mark.parametrize("address", ["10.1.0.1", "10.1.255.255", "192.0.2.7", "fd12::1", "::ffff:10.1.2.3"])
def test_addresses_of_the_list(address: str) -> None:
    assert LISTED.refusal(address) == ""


@pytest.mark.parametrize(
    "address",
    ["10.2.0.1", "192.0.2.8", "127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "0.0.0.0", "fe80::1%lo"],
)
def test_other_addresses(address: str) -> None:
    refusal = LISTED.refusal(address)
    assert refusal.startswith(f"{address} is not an allowed peer")
    assert "allowed_peers (KVFERRY_ALLOWED_PEERS)" in refusal and "10.1.0.0/16, 192.0.2.7/32, fd00::/8" in refusal


def test_loopback_and_all() -> None:
    loopback = AllowedPeers(("127.0.0.0/8", "::1/128"))
    assert not loopback.refusal("127.0.0.5") and not loopback.refusal("::1") and loopback.refusal("10.0.0.1")
    assert not AllowedPeers(None).refusal("10.0.0.1")
    assert "no network" in AllowedPeers(()).refusal("127.0.0.1")


def test_the_setting() -> None:
    environ = {"KVFERRY_ALLOWED_PEERS": "10.1.0.0/16, 192.0.2.7"}
    assert load_settings({}, environ).allowed_peers == ("10.1.0.0/16", "192.0.2.7")
    assert load_settings({"allowed_peers": ["10.9.0.0/16"]}, environ).allowed_peers == ("10.9.0.0/16",)
    for wrong in ("10.1.0.1/16", "p.example", "", "10.0.0.0/33"):
        with pytest.raises(ConfigError, match=r"^allowed_peers: [^\n]*expected an address or a network"):
            load_settings({"allowed_peers": [wrong]}, {})
