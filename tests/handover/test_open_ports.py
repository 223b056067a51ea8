"""On which ports a rank listens, and what its data planes are told of each other."""

from __future__ import annotations

import socket
import subprocess
import sys

import msgspec
import pytest

from kvferry.connector.config import Settings
from kvferry.connector.engine import worker_setup
from kvferry.connector.engine.worker_setup import make_planes
from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.plane import Plane, PlaneContext
from kvferry.transport.planes.shm import ShmOffer, ShmPlane
from kvferry.transport.registry import make_plane
from tests.handover.scenario import OURS, PATIENT, THEIRS, TOKENS, RankGroup, begin, ended, has_all
from tests.support.rank_process import RemoteRank, remote_peer
from tests.support.ranks import Rank, load_plan, on_its_thread, wait
from tests.transport.test_planes_hosts import listening_ports, our_address

LOOPBACK = "0100007F"
CONNECTS = """
import contextlib, os, socket, sys
with contextlib.suppress(OSError):
    os.setuid(65534)
held = []
while True:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        sock.connect(chr(0) + sys.argv[1])
        held = [*held[-500:], sock]
"""
"""A process that connects to P's Unix socket, as another user where it can become one."""


def hand_over(p: RemoteRank, d: Rank) -> None:
    p.fill(THEIRS, TOKENS)
    token = p.grant("req-p", THEIRS, TOKENS)
    d.worker.post(load_plan("req-d", token, remote_peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: "req-d" in d.received, [d]) and not d.failed and has_all(d)


def test_by_itself_a_rank_has_a_control_port_and_a_tcp_data_port(group: RankGroup) -> None:
    """No port of UCX or ZMQ, before a hand-over and after it."""
    p, d = group.process(engine_id="engine-p"), group.rank(engine_id="engine-d")
    assert [address for address, _ in listening_ports(p.process.pid)] == [LOOPBACK] * 2
    hand_over(p, d)
    assert [address for address, _ in listening_ports(p.process.pid)] == [LOOPBACK] * 2


@pytest.mark.ucx
def test_on_one_host_ucx_listens_on_loopback_from_the_first_hand_over_on(group: RankGroup) -> None:
    own = {"plane": "ucx", "side_channel_host": our_address()}
    p, d = group.process(engine_id="engine-p", **own), group.rank(engine_id="engine-d", **own)
    ((control, port),) = listening_ports(p.process.pid)
    assert port == p.address.port and control != LOOPBACK
    hand_over(p, d)
    data = [address for address, number in listening_ports(p.process.pid) if number != port]
    assert data and set(data) == {LOOPBACK}


def test_a_plane_is_told_of_the_others(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are there, and those that may come: not those that this rank cannot have."""
    told: dict[str, frozenset[str]] = {}

    def make(name: str, context: PlaneContext) -> Plane:
        told[name] = context.others
        if name == "cma":
            raise PlaneUnavailableError("cma: not here")
        return make_plane(name, context)

    caches = group.rank().context.caches
    monkeypatch.setattr(worker_setup, "preferred_planes", lambda device: ("cma", "shm", "tcp"))
    monkeypatch.setattr(worker_setup, "make_plane", make)
    planes, missing = make_planes(Settings(), caches)
    for plane in planes:
        plane.close()
    assert told == {"cma": {"shm", "tcp"}, "shm": {"tcp"}, "tcp": {"shm"}} and missing == {"cma": "not here"}


def test_processes_that_only_connect_keep_no_decode_engine_from_shm(group: RankGroup) -> None:
    """4 of them keep the queue of P's socket full; without a second look at both ends 6 of 6 loads failed."""
    p = group.rank(engine_id="engine-p", plane="shm", **PATIENT)
    p.fill(THEIRS, TOKENS)
    plane, names = p.context.plane("shm"), list[bytes]()
    assert isinstance(plane, ShmPlane)
    on_its_thread(p, lambda: names.append(msgspec.msgpack.decode(plane.offer(), type=ShmOffer).name))
    name = names[0].decode()
    crowd = [subprocess.Popen([sys.executable, "-c", CONNECTS, name[1:]]) for _ in range(4)]
    try:
        assert wait(lambda: is_full(name))
        for number in range(6):
            d = group.rank(engine_id=f"engine-{number}", plane="shm", **PATIENT)
            begin(p, d, f"{number}")
            assert ended(p, d, f"{number}") and all(each.poll() is None for each in crowd)
    finally:
        for each in crowd:
            each.kill()
            each.wait()


def is_full(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.connect(name)
        except BlockingIOError:
            return True
        return False
