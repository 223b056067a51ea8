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
from tests.transport.plane_process import SLOT, STAGING, Peer, all_good, announce

pytestmark = [pytest.mark.root, pytest.mark.nixl]
P, D = "10.77.0.1", "10.77.0.2"


class Hosts:
    """Two network namespaces with a link between them, named by their addresses."""

    def __init__(self) -> None:
        self.names = {address: f"kvferry-nixl-{os.getpid()}-{end}" for end, address in (("p", P), ("d", D))}
        self.peers: list[NamespacePeer] = []
        for name in self.names.values():
            ip("netns", "add", name)
        p, d = self.names.values()
        ip("-n", p, "link", "add", "kvn0", "type", "veth", "peer", "name", "kvn0", "netns", d)
        for address, name in self.names.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "kvn0")
            for device in ("lo", "kvn0"):
                ip("-n", name, "link", "set", device, "up")
        self._until_up()

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

    def start(self, address: str) -> NamespacePeer:
        peer = NamespacePeer(self.names[address], address)
        self.peers.append(peer)
        return peer

    def close(self) -> None:
        for peer in self.peers:
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


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this container may make no network namespace")
    hosts = Hosts()
    yield hosts
    hosts.close()


def join(p: Peer, d: Peer, id: str) -> None:
    payload = d("connect", id=id, offer=p("offer"), host=P)
    d("finish", id=id, reply=p("accept", id=id, payload=payload))


def carries(p: Peer, d: Peer, id: str, first: int) -> None:
    tags = list(range(first, first + 20))
    announce(p, d, [(tag, 1_000_000) for tag in tags], id)
    d.until(all_good(tags, id))


@pytest.mark.parametrize("victim", [P, D])
def test_a_peer_that_dies_is_noticed_and_a_new_one_is_served(hosts: Hosts, victim: str) -> None:
    p, d = hosts.start(P), hosts.start(D)
    join(p, d, "a")
    announce(p, d, [(tag, 1_000_000) for tag in range(1, 2000)], "a")
    d.until(lambda s: len(s["good"]["a"]) >= 3)
    dead, survivor = (p, d) if victim == P else (d, p)
    dead.kill()
    survivor.until(lambda s: s["errors"]["a"] is not None)
    survivor("close", id="a")
    survivor.until(lambda s: s["retired"] == 0)
    new = hosts.start(victim)
    p, d = (new, d) if victim == P else (p, new)
    join(p, d, "again")
    carries(p, d, "again", 10**6)


@pytest.mark.parametrize("restarts", [False, True], ids=["healed", "restarted"])
def test_a_link_that_swallows_everything(hosts: Hosts, restarts: bool) -> None:
    """D's READs stay under way, and keep their slots; the others go on. When the link is back they come back."""
    p, d = hosts.start(P), hosts.start(D)
    join(p, d, "a")
    announce(p, d, [(tag, 1_000_000) for tag in range(1, 5000)], "a")
    d.until(lambda s: len(s["good"]["a"]) >= 3)
    hosts.link("down")
    d("close", id="a")  # as D does when no life sign has come
    if restarts:
        p.kill()
        p = hosts.start(P)
    else:
        p("close", id="a")
    hosts.link("up")
    join(p, d, "again")
    carries(p, d, "again", 10**6)
    status = d.until(lambda s: s["retired"] == 0)
    assert not status["bad"]
