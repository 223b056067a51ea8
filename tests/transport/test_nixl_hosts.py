"""NIXL's plane between two network namespaces, over TCP: a link that swallows everything, and a restart meanwhile.

A link that is down sends nothing and refuses nothing, as a host does that lost its power. The plane does not see that;
the link of the control plane does, by its life signs, and closes the channel. Here the test does so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.faults.outages import ADDRESS, Hosts
from tests.transport.plane_process import MESSAGE, Peer, announce, carry

pytestmark = [pytest.mark.root, pytest.mark.nixl]


class Peers(Hosts):
    """Two network namespaces with a link between them, and a peer in each."""

    def __init__(self) -> None:
        super().__init__()
        self.peers = {role: self.start(role) for role in "pd"}

    def start(self, role: str) -> Peer:
        return Peer("nixl", "cpu", ADDRESS[role], self.names[role])

    def restart_p(self) -> None:
        self.peers["p"].kill()
        self.peers["p"] = self.start("p")

    def join(self, id: str) -> tuple[Peer, Peer]:
        p, d = self.peers.values()
        payload = d("connect", id=id, offer=p("offer"), host=ADDRESS["p"])
        d("finish", id=id, reply=p("accept", id=id, payload=payload))
        return p, d

    def moving(self) -> None:
        """A channel on which messages move."""
        p, d = self.join("a")
        announce(p, d, [(tag, MESSAGE) for tag in range(1, 5000)], "a")
        d.until(lambda s: len(s["good"]["a"]) >= 3)

    def carries(self) -> None:
        """A new channel carries messages, and all slots come back."""
        p, d = self.join("again")
        carry(p, d, range(10**6, 10**6 + 20), id="again")
        for peer in (p, d):
            peer.until(lambda s: s["retired"] == 0 and not s["bad"])

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        super().close()


@pytest.fixture(scope="module")
def both() -> Iterator[Peers]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this container may make no network namespace")
    hosts = Peers()
    yield hosts
    hosts.close()


@pytest.mark.parametrize("restarts", [False, True], ids=["healed", "restarted"])
def test_a_link_that_swallows_everything(both: Peers, restarts: bool) -> None:
    """D's READs stay under way, and keep their slots; the others go on. When the link is back they come back."""
    both.moving()
    both.down()
    both.peers["d"]("close", id="a")  # as D does when no life sign has come
    if restarts:
        both.restart_p()
    else:
        both.peers["p"]("close", id="a")
    both.up()
    both.carries()
    for peer in both.peers.values():
        peer("reset")
