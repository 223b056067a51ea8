"""NIXL's plane between two network namespaces, over TCP: a peer that dies, a link that swallows everything, a restart.

A link that is down sends nothing and refuses nothing, as a host does that lost its power. The plane does not see that;
the link of the control plane does, by its life signs, and closes the channel. Here the test does so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import python_path
from tests.support.served import eventually
from tests.transport.plane_process import MESSAGE, SLOT, STAGING, Peer, announce, carry

pytestmark = [pytest.mark.root, pytest.mark.nixl]
P, D = "10.77.0.1", "10.77.0.2"


class Hosts:
    """Two network namespaces with a link between them, named by their addresses, and a peer in each."""

    def __init__(self) -> None:
        self.names = {address: f"kvferry-nixl-{os.getpid()}-{end}" for end, address in (("p", P), ("d", D))}
        self.peers: dict[str, NamespacePeer] = {}
        for name in self.names.values():
            ip("netns", "add", name)
        p, d = self.names.values()
        ip("-n", p, "link", "add", "kvn0", "type", "veth", "peer", "name", "kvn0", "netns", d)
        for address, name in self.names.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "kvn0")
            for device in ("lo", "kvn0"):
                ip("-n", name, "link", "set", device, "up")
        self._until_up()
        for address in self.names:
            self.start(address)

    def link(self, state: str) -> None:
        ip("-n", self.names[P], "link", "set", "kvn0", state)
        if state == "up":
            self._until_up()
        for name in self.names.values():  # else a search for the other's address that began before fails after it
            ip("-n", name, "neigh", "flush", "dev", "kvn0")

    def _until_up(self) -> None:
        """The kernel takes a moment, in which UCX finds no device."""
        show = [["ip", "-n", name, "-oneline", "link", "show", "kvn0"] for name in self.names.values()]
        eventually(lambda: all(b"state UP" in subprocess.check_output(each) for each in show), "the link is up")

    def start(self, address: str) -> None:
        """A new peer, in the place of one that was killed."""
        self.peers[address] = NamespacePeer(self.names[address], address)

    def join(self, id: str) -> None:
        p, d = self.peers[P], self.peers[D]
        payload = d("connect", id=id, offer=p("offer"), host=P)
        d("finish", id=id, reply=p("accept", id=id, payload=payload))

    def moving(self) -> None:
        """A channel on which messages move."""
        self.join("a")
        announce(self.peers[P], self.peers[D], [(tag, MESSAGE) for tag in range(1, 5000)], "a")
        self.peers[D].until(lambda s: len(s["good"]["a"]) >= 3)

    def carries(self) -> None:
        """A new channel carries messages, and all slots come back."""
        self.join("again")
        carry(self.peers[P], self.peers[D], range(10**6, 10**6 + 20), id="again")
        for peer in self.peers.values():
            peer.until(lambda s: s["retired"] == 0 and not s["bad"])

    def close(self) -> None:
        for peer in self.peers.values():
            peer.kill()
        for name in self.names.values():
            ip("netns", "delete", name)


class NamespacePeer(Peer):
    """A process in a network namespace that serves the plane at its address."""

    def __init__(self, namespace: str, address: str) -> None:
        script = str(Path(__file__).with_name("plane_peer.py"))
        program = [sys.executable, script, "nixl", str(SLOT), str(STAGING), "cpu", address]
        self.process = subprocess.Popen(  # type: ignore[assignment]
            ["ip", "netns", "exec", namespace, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": python_path()},
        )  # fmt: skip
        self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def both() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this container may make no network namespace")
    hosts = Hosts()
    yield hosts
    hosts.close()


@pytest.fixture
def hosts(both: Hosts) -> Iterator[Hosts]:
    yield both
    for peer in both.peers.values():
        peer("reset")


@pytest.mark.parametrize("victim", [P, D])
def test_a_peer_that_dies_is_noticed_and_a_new_one_is_served(hosts: Hosts, victim: str) -> None:
    hosts.moving()
    hosts.peers[victim].kill()
    survivor = hosts.peers[D if victim == P else P]
    survivor.until(lambda s: s["errors"]["a"] is not None)
    survivor.close("a")
    hosts.start(victim)
    hosts.carries()


@pytest.mark.parametrize("restarts", [False, True], ids=["healed", "restarted"])
def test_a_link_that_swallows_everything(hosts: Hosts, restarts: bool) -> None:
    """D's READs stay under way, and keep their slots; the others go on. When the link is back they come back."""
    hosts.moving()
    hosts.link("down")
    hosts.peers[D].close("a")  # as D does when no life sign has come
    if restarts:
        hosts.peers[P].kill()
        hosts.start(P)
    else:
        hosts.peers[P].close("a")
    hosts.link("up")
    hosts.carries()
