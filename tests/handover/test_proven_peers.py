"""D reads the process that it talks with, and nothing else of it; no port is open that no plane needs."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.connector.config import Settings, load_keys
from kvferry.connector.prefill_side import session
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from kvferry.connector.worker import worker_setup
from kvferry.connector.worker.worker_setup import make_planes
from kvferry.transport.control.listener import Listener
from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.plane import Plane, PlaneContext
from kvferry.transport.planes import cma
from kvferry.transport.planes.shm import ShmOffer, ShmPlane
from kvferry.transport.registry import make_plane
from tests.handover.scenario import (
    OURS,
    PATIENT,
    THEIRS,
    TOKENS,
    RankGroup,
    another_works,
    begin,
    ended,
    has_all,
    is_wiped,
)
from tests.handover.test_lost_peers import far_and_near
from tests.support.fork_server import Program, fork_server
from tests.support.pair import RemoteRank, remote_peer
from tests.support.ranks import Rank, grant, load_plan, on_its_thread, wait
from tests.transport.test_planes_hosts import listening_ports, our_address

RELAY = Path(__file__).with_name("relay.py")
NOT_THE_END = "is not at the other end of the control connection"
Through = Callable[[RankAddress], PeerEngine]
Lines = pytest.LogCaptureFixture


def at(address: RankAddress) -> PeerEngine:
    return PeerEngine("engine-p", 1, 1, 30.0, (address,))


@pytest.fixture
def through() -> Iterator[Through]:
    """P behind a relay, a process of its own that passes on all that D and P say."""
    relays: list[Program] = []

    def relayed(address: RankAddress) -> PeerEngine:
        relays.append(fork_server().start(str(RELAY), str(address.port), text=True))
        return at(msgspec.structs.replace(address, port=int(relays[-1].stdout.readline())))

    yield relayed
    for relay in relays:
        relay.close()


def load(d: Rank, token: bytes, engine: PeerEngine, name: str = "req-d") -> bool:
    """Whether a load succeeds."""
    d.worker.post(load_plan(name, token, engine, OURS, 0, TOKENS))
    assert wait(lambda: name in d.received, [d])
    return name not in d.failed


def test_over_a_relay_to_a_real_p_no_memory_is_read(group: RankGroup, through: Through, caplog: Lines) -> None:
    """P's answer to any question of D is right."""
    p, d = group.process(plane="cma", engine_id="engine-p"), group.rank(plane="cma", engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    assert not load(d, p.grant("req-p", THEIRS, TOKENS), through(p.address)) and is_wiped(d, -1)
    assert wait(lambda: NOT_THE_END in caplog.text)  # the line follows the report
    assert load(d, p.grant("straight-p", THEIRS, TOKENS), remote_peer([p]), "straight-d") and has_all(d)


def test_over_a_relay_another_plane_is_chosen(group: RankGroup, through: Through) -> None:
    p, d = group.process(engine_id="engine-p"), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    assert load(d, p.grant("req-p", THEIRS, TOKENS), through(p.address)) and has_all(d) and d.plane == "shm"


def test_d_is_not_shown_its_own_memory_by_a_relay(group: RankGroup, through: Through, caplog: Lines) -> None:
    """A stranger that D connects to replays the offer that D makes to everybody on its host."""
    d = group.rank(plane="cma")
    d.fill(THEIRS, TOKENS)
    assert not load(d, grant([d], "req-p", THEIRS, TOKENS), through(d.address))
    assert wait(lambda: NOT_THE_END in caplog.text)


class ForgedP(threading.Thread):
    """Answers D's handshake, like ``like``, with an offer and a reply of its choice, and then with pages of its choice
    and a grant of all of them."""

    def __init__(self, like: Rank, offer: bytes, reply: bytes, base: int) -> None:
        super().__init__(daemon=True)
        self._context, self._offer, self._reply, self._base = like.context, offer, reply, base
        keys = load_keys(like.settings)
        self._listener = Listener("127.0.0.1", 0, keys=keys, max_message_bytes=8 << 20)
        self._ended = threading.Event()
        self.attached = False
        self.address = RankAddress(0, 0, "127.0.0.1", self._listener.port, b"f" * 16, keys.fingerprint)
        self.start()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            for identity, frames, _ in self._listener.receive():
                if (answer := self._answer(messages.decode_request(frames))) is not None:
                    self._listener.send(identity, messages.encode(answer))
        self._listener.close()

    def _answer(self, request: messages.Request) -> Any:
        context = self._context
        match request:
            case messages.Hello():
                return messages.Welcome(
                    engine_id="engine-p", incarnation=b"f" * 16, geometry=context.caches.geometry,
                    model=dict(context.model), planes=(messages.PlaneOffer("cma", self._offer),),
                )  # fmt: skip
            case messages.Attach():
                self.attached = True
                pages = tuple(
                    msgspec.structs.replace(each, bases=(self._base,) * len(each.bases))
                    for each in context.caches.page_layouts()
                )
                return messages.Attached(plane="cma", slot_bytes=1 << 20, payload=self._reply, pages=pages)
            case messages.Ask(read=read):
                blocks = (np.zeros(len(THEIRS), dtype=np.int32).tobytes(),)
                return messages.Grant(read=read, num_tokens=TOKENS, chunks=0, block_ids=blocks)
            case messages.Commit(read=read):
                return messages.Committed(read=read, ok=True)
        return None

    def end(self) -> None:
        self._ended.set()
        self.join(30)


@pytest.mark.parametrize("whose", ["a third process", "its own"])
def test_pages_that_a_forged_p_names_are_not_read(group: RankGroup, whose: str, caplog: Lines) -> None:
    d = group.rank(plane="cma", engine_id="engine-d")
    plane, private = d.context.plane("cma"), ctypes.create_string_buffer(b"-----BEGIN PRIVATE KEY-----" * 40_000)
    assert plane is not None
    offer, reply = plane.offer(), plane.accept(b"")[1]
    if whose == "a third process":
        third = group.process(plane="cma", engine_id="engine-e")
        offer = msgspec.msgpack.encode(msgspec.msgpack.decode(offer) | {"pid": third.process.pid})
    forged = ForgedP(d, offer, reply, ctypes.addressof(private))
    try:
        assert not load(d, b"t" * 16, at(forged.address)) and is_wiped(d, -1)
        if whose == "a third process":
            assert wait(lambda: NOT_THE_END in caplog.text) and not forged.attached
        else:  # this process is at the other end; yet its heap is none of its KV caches
            assert (
                wait(lambda: "are in no KV cache that the prefill engine has published" in caplog.text)
                and forged.attached
            )
    finally:
        forged.end()


PLANT = """
import ctypes, sys
planted = ctypes.create_string_buffer(b"B" * int(sys.argv[1]))
print(ctypes.addressof(planted), flush=True)
sys.stdin.read()
"""


def test_a_process_that_has_p_s_number_by_now_is_not_taken_for_p(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D finds P's posted grant and is stopped there. P is killed; nobody withdraws the grant. Another process gets P's
    number. D goes on before it hears of P's end."""
    p, d = far_and_near(group, "cma")
    token = p.grant("req-p", THEIRS, TOKENS)
    (link,) = d.consumer.links
    assert link.board is not None and wait(lambda: link.board.find(token) is not None, [d])
    read, planted, lock = cma.read_memory, [], threading.Lock()

    def stopped(pid: int, dst: Any, src: Any, nbytes: Any) -> None:
        """The system call with P's number, when that is the other process's: it reads there, at P's addresses."""
        with lock:  # threads share a large copy
            p.kill()
            first = src.min()
            planted.append(fork_server().start("-c", PLANT, str(int((src + nbytes).max() - first)), text=True))
            address = int(planted[-1].stdout.readline())
            read(planted[-1].pid, dst, src - first + address, nbytes)

    monkeypatch.setattr(cma, "read_memory", stopped)
    monkeypatch.setattr(cma, "WATCH_SECONDS", 1e9)
    monkeypatch.setattr(link, "serve", lambda now: [])
    try:
        assert not load(d, token, remote_peer([p])) and planted
        assert (d.read(OURS, TOKENS) == 0x42424242).any(), "the other process's bytes were read, and are not loaded"
    finally:
        for each in planted:
            each.close()


def test_another_host_learns_nothing_of_this_one(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a process nor a file, socket or address; and what it guesses is refused."""
    asked: list[str] = []
    monkeypatch.setattr(session, "is_ours", lambda address: bool(asked.append(address)))
    raw = group.raw(*group.pair(), attached=False)
    welcome = raw.greet()
    assert set(asked) == {"127.0.0.1"} and {offer.name for offer in welcome.planes} == {"tcp"}
    for plane in ("cma", "shm"):
        raw.send(messages.Attach(plane=plane, payload=b""))
        assert "joins processes of one host" in raw.answer(messages.AttachRefused).reason


def test_a_d_on_this_host_is_offered_its_planes_at_any_address_of_the_host(group: RankGroup) -> None:
    p, d = group.pair(of_p={"side_channel_host": "127.0.0.2"})
    another_works(p, d)
    assert d.plane == "cma"


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
