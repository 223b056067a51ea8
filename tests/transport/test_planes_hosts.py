"""Data planes between hosts, and connections to their ports before P serves them."""

from __future__ import annotations

import base64
import contextlib
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from zmq.utils import z85

from kvferry.transport import sockets
from kvferry.transport.channels import CPU
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes import lent_files, shm, tcp, ucx_settings
from kvferry.transport.planes.shm import ShmPlane
from kvferry.transport.planes.tcp import TcpPlane
from kvferry.transport.planes.zmq import ZmqRecvChannel, ZmqSendChannel
from kvferry.transport.registry import make_plane, plane_specs, preferred_planes
from kvferry.transport.sockets import CHANNEL_BYTES, PendingConnections, Secrets
from tests.support.fork_server import fork_server
from tests.transport.plane_pair import Pair

SLOT, STAGING = 1 << 20, 16 << 20
CONTEXT = PlaneContext("127.0.0.1", SLOT, STAGING)
RDMA = {"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true"}
PRELUDE = f"""
import base64, os, sys
from kvferry.transport.errors import PlaneUnavailableError
from kvferry.transport.plane import PlaneContext
from kvferry.transport.registry import make_plane
CONTEXT = PlaneContext("127.0.0.1", {SLOT}, {STAGING})
"""


def test_ucx_settings_leave_the_users_alone() -> None:
    ours = ucx_settings.settings_for("127.0.0.1", {}, here=False)
    assert ours["TCP_TX_SEG_SIZE"] == "512k"
    users = ucx_settings.settings_for("127.0.0.1", {"UCX_TCP_TX_SEG_SIZE": "8k", "UCX_NET_DEVICES": "eth7"}, here=True)
    assert "TCP_TX_SEG_SIZE" not in users and "NET_DEVICES" not in users
    assert users["TCP_RX_SEG_SIZE"] == "512k"


def test_a_spec_says_what_its_class_does() -> None:
    assert {spec.name: spec.pulls for spec in plane_specs()} == {s.name: s.load().pulls for s in plane_specs()}


def test_device_of_an_address() -> None:
    assert ucx_settings.device_of("127.0.0.1") == "lo"
    assert ucx_settings.device_of("127.0.0.99") == "lo"
    assert ucx_settings.device_of("192.0.2.77") is None
    assert ucx_settings.device_of("no such host.invalid") is None


def test_what_is_not_chosen_automatically() -> None:
    assert preferred_planes(CPU) == ("cma", "shm", "nixl", "tcp")
    assert preferred_planes(torch.device("cuda", 0)) == ("cuda_ipc", "ucx", "nixl", "shm", "tcp")


def test_ucx_has_no_tcp_port_beyond_the_host_but_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for hardware, environ in ((False, {}), (True, {}), (True, RDMA)):
        monkeypatch.setattr(ucx_settings, "active_ports", lambda hardware=hardware: ["mlx5_0:1"] * hardware)
        assert ucx_settings.settings_for("192.0.2.77", environ, here=True)["NET_DEVICES"] == "lo"
        afar = ucx_settings.settings_for("127.0.0.1", environ, here=False)
        assert (afar.get("NET_DEVICES"), afar.get("TLS")) == ((None, "^tcp") if environ else ("lo", None))
    assert "TLS" not in ucx_settings.settings_for("127.0.0.1", {**RDMA, "UCX_TLS": "all"}, here=False)
    with pytest.raises(PlaneUnavailableError, match=r"no network device is known by its address 192\.0\.2\.77"):
        ucx_settings.settings_for("192.0.2.77", {}, here=False)
    assert "NET_DEVICES" not in ucx_settings.settings_for("192.0.2.77", {"UCX_NET_DEVICES": "eth7"}, here=False)


def test_lanes_of_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_settings, "active_ports", lambda: ["mlx5_0:1"])

    def lanes(environ: dict[str, str], *, here: bool = False, on_gpu: bool = False) -> str:
        return ucx_settings.lanes_to("127.0.0.1", environ, here=here, on_gpu=on_gpu)

    assert lanes({"UCX_NET_DEVICES": "", "UCX_TLS": ""}) == "TCP on lo", "an empty variable is none"
    assert lanes({}) == lanes({}, here=True) == "TCP on lo" and lanes({}, here=True, on_gpu=True) == "CUDA IPC"
    assert lanes(RDMA) == "RDMA on mlx5_0:1" and lanes(RDMA | {"UCX_TLS": "rc"}) == "UCX_TLS=rc"


def listening_ports(pid: int) -> list[tuple[str, int]]:
    """Local addresses, in the kernel's hexadecimal, and ports on which a process listens by TCP."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the process has closed it
            link = os.readlink(fd)
            if link.startswith("socket:["):
                inodes.add(link[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.append((address, int(port, 16)))
    return found


def listening_addresses(pid: int) -> set[str]:
    return {address for address, _ in listening_ports(pid)}


PORTS = f"""{PRELUDE}
p, d = (make_plane(sys.argv[1], PlaneContext(sys.argv[2], 1 << 20, 16 << 20)) for _ in range(2))
offer = p.offer()
print("offered", flush=True)
sys.stdin.readline()
channel, payload = d.connect(offer, sys.argv[2])
sender, reply = p.accept(payload)
d.finish(channel, reply)
print("attached", flush=True)
sys.stdin.read()
"""


def our_address() -> str:
    """An address of this host on a device other than the loopback device; the test is skipped where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.7", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no network")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("name", ["zmq", "tcp", "shm", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_nothing_listens_beyond_the_host(name: str) -> None:
    with fork_server().start("-c", PORTS, name, "127.0.0.1") as process:
        for said in (b"offered\n", b"attached\n"):
            assert process.stdout.readline() == said
            assert listening_addresses(process.pid) <= {"0100007F"}
            process.stdin.write(b"\n")
            process.stdin.flush()


def test_ucx_missing_names_the_extra() -> None:
    script = """
sys.modules["ucxx"] = None
try: make_plane("ucx", CONTEXT)
except PlaneUnavailableError as error: print(error)
"""
    out = fork_server().run("-c", PRELUDE + script, timeout=800)
    assert out.returncode == 0 and "pip install 'kvferry[ucx]'" in out.stdout and out.stdout.count("\n") == 1


@pytest.mark.root
def test_shm_knows_another_network_namespace() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    p = make_plane("shm", CONTEXT)
    offer = base64.b64encode(p.offer()).decode()
    script = f"""
import ctypes
CLONE_NEWNET = 0x40000000
if ctypes.CDLL(None).unshare(CLONE_NEWNET): sys.exit("may make no network namespace")
try: make_plane("shm", CONTEXT).connect(base64.b64decode({offer!r}), "127.0.0.1"); print("connected")
except PlaneUnavailableError as error: print(error)
"""
    out = fork_server().run("-c", PRELUDE + script, timeout=800)
    p.close()
    if "may make no" in out.stderr:
        pytest.skip(out.stderr)
    assert "network namespace" in out.stdout and out.stdout.count("\n") == 1


@pytest.mark.root
def test_shm_lets_only_its_own_user_in() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    p = make_plane("shm", CONTEXT)
    offer = base64.b64encode(p.offer()).decode()
    script = f"""
os.setuid(65534)
os.getuid = lambda: 0  # get past our own check, to meet that of the peer
d = make_plane("shm", CONTEXT)
channel, _ = d.connect(base64.b64decode({offer!r}), "127.0.0.1")
print("connected", flush=True); sys.stdin.readline(); d.progress(); print(channel.error)
"""
    with fork_server().start("-c", PRELUDE + script) as process:
        assert process.stdout.readline() == b"connected\n"
        p.progress()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert b"refused the channel" in process.stdout.readline()
    p.close()


@pytest.fixture
def zmq_pair() -> Iterator[Pair]:
    with contextlib.closing(Pair("zmq", 16)) as pair:
        yield pair


def test_zmq_admits_only_who_knows_the_key_of_the_channel(zmq_pair: Pair) -> None:
    p, d, other = zmq_pair.p, zmq_pair.d, make_plane("zmq", CONTEXT)
    receiver, payload = d.connect(p.offer(), "127.0.0.1")
    sender, reply = p.accept(payload)
    assert not sender.pulls and not receiver.pulls
    guessed = msgspec.msgpack.decode(reply)
    stranger, _ = other.connect(p.offer(), "127.0.0.1")
    other.finish(stranger, msgspec.msgpack.encode(guessed | {"key": z85.decode(zmq.curve_keypair()[0])}))
    zmq_pair.turn(lambda: (other.progress(), stranger.error)[1])
    assert "cannot be reached, or refused" in str(stranger.error) and sender.error is None
    with socket.create_connection(("127.0.0.1", guessed["port"])) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        d.finish(receiver, reply)
        zmq_pair.carry(sender, receiver, 7).release()
    other.close()


def test_a_stranger_that_left_before_d_came_ends_no_channel(zmq_pair: Pair) -> None:
    """Its descriptor is D's then, and P hears of both at once."""
    p, d = zmq_pair.p, zmq_pair.d
    receiver, payload = d.connect(p.offer(), "127.0.0.1")
    sender, reply = p.accept(payload)
    assert isinstance(sender, ZmqSendChannel) and isinstance(receiver, ZmqRecvChannel)
    with socket.create_connection(("127.0.0.1", msgspec.msgpack.decode(reply)["port"])) as stranger:
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while stranger.recv(4096):
                pass
    d.finish(receiver, reply)
    end = time.monotonic() + 60
    while receiver.deadline != math.inf and time.monotonic() < end:  # D connects before P looks
        d.progress()
    sender.give_back(zmq_pair.acquired(sender))
    assert sender.error is None


def test_zmq_address_that_is_not_ours() -> None:
    plane = make_plane("zmq", PlaneContext("192.0.2.77", SLOT, STAGING))
    _, payload = plane.connect(plane.offer(), "127.0.0.1")
    with pytest.raises(TransportError, match=r"no socket can be had on 192\.0\.2\.77"):
        plane.accept(payload)
    plane.close()


def test_zmq_plane_that_nobody_closed_hangs_no_garbage_collection() -> None:
    script = """
import gc
plane = [make_plane("zmq", CONTEXT)]
plane[0].connect(b"", "127.0.0.1")
plane.append(plane)
del plane
gc.collect()
print("collected", flush=True)
os._exit(0)
"""
    out = fork_server().run("-c", PRELUDE + script, timeout=120)
    assert out.returncode == 0 and "collected" in out.stdout, out


@pytest.mark.ucx
def test_ucx_tells_when_there_is_no_way() -> None:
    script = """
os.environ["UCX_TLS"] = "self"
try: make_plane("ucx", CONTEXT).accept(base64.b64decode(sys.argv[1])); print("accepted")
except PlaneUnavailableError as error: print(error)
"""
    d = make_plane("ucx", CONTEXT)
    payload = base64.b64encode(d.connect(d.offer(), "127.0.0.1")[1]).decode()
    out = fork_server().run("-c", PRELUDE + script, payload, timeout=800)
    assert out.returncode == 0 and "cannot be reached from 127.0.0.1" in out.stdout, out
    d.close()


@pytest.mark.ucx
@pytest.mark.parametrize(
    ("flip", "error", "why"),
    [(0, PlaneUnavailableError, "same UCX release"), (76, ProtocolError, "address is damaged")],
)
def test_a_ucx_address_that_is_not_one_of_this_release_is_not_parsed(
    flip: int, error: type[Exception], why: str
) -> None:
    p = make_plane("ucx", CONTEXT)
    attach = msgspec.msgpack.decode(p.connect(p.offer(), "127.0.0.1")[1])
    address = bytearray(attach["address"])
    address[flip] ^= 0x0F
    attach |= {"address": bytes(address), "close_message": bytes(8)}
    if not flip:
        attach["checksum"] = zlib.crc32(address)
    with pytest.raises(error, match=why):
        p.accept(msgspec.msgpack.encode(attach))
    p.close()


PENDING = PlaneContext("127.0.0.1", 64 << 10, 1 << 20)


@pytest.fixture
def p() -> Iterator[TcpPlane]:
    with closing(TcpPlane(PENDING)) as plane:
        yield plane


def pending(p: TcpPlane) -> PendingConnections:
    assert p.pending is not None
    return p.pending


def offer_of(p: TcpPlane) -> tcp.TcpOffer:
    return msgspec.msgpack.decode(p.offer(), type=tcp.TcpOffer)


def visit(p: TcpPlane, secret: bytes, channel: int) -> socket.socket:
    """A connection that says a secret and is never attached."""
    sock = socket.create_connection(("127.0.0.1", offer_of(p).port))
    sock.sendall(secret + channel.to_bytes(CHANNEL_BYTES, "big"))
    before = set(pending(p).waiting)
    until(lambda: bool(set(pending(p).waiting) - before), p)
    return sock


def until(condition: Callable[[], bool], *planes: TcpPlane) -> None:
    """Serve the planes until the condition holds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        for plane in planes:
            plane.progress()


def kept(p: TcpPlane, sock: socket.socket) -> bool:
    """Whether P has left the connection open."""
    p.progress()
    sock.setblocking(False)
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_visitors_without_end_do_not_shut_others_out(p: TcpPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a secret of its own, from a Hello of its own; the oldest go, and who comes later is served."""
    monkeypatch.setattr(sockets, "MAX_WAITING", 20)
    visitors = [visit(p, offer_of(p).secret, number) for number in range(1, 60)]
    assert len(pending(p).waiting) == 20 and kept(p, visitors[-1]) and not kept(p, visitors[0])
    with closing(TcpPlane(PENDING)) as d:
        receiver, payload = d.connect(p.offer(), "127.0.0.1")
        sender, _ = p.accept(payload)
        until(lambda: sender.acquire() is not None, p, d)
        assert receiver.error is None and sender.error is None
    for each in visitors:
        each.close()


def test_a_session_has_one_waiting_connection(p: TcpPlane) -> None:
    ours, theirs = offer_of(p).secret, offer_of(p).secret
    assert ours != theirs
    other, first = visit(p, theirs, 1), visit(p, ours, 2)
    second = visit(p, ours, 3)
    assert [kept(p, each) for each in (other, first, second)] == [True, False, True]
    assert len(pending(p).waiting) == 2
    for each in (other, first, second):
        each.close()


def test_a_connection_that_is_taken_or_gone_frees_its_session(p: TcpPlane) -> None:
    secret = offer_of(p).secret
    gone = visit(p, secret, 1)
    gone.close()
    until(lambda: not pending(p).waiting, p)
    taken = visit(p, secret, 2)
    served = pending(p).take((2).to_bytes(CHANNEL_BYTES, "big"))
    assert served is not None
    assert pending(p).take(bytes(CHANNEL_BYTES)) is None
    again = visit(p, secret, 3)
    assert kept(p, taken), "the connection that waits now is the session's only one"
    for each in (again, taken, served):
        each.close()


def test_a_p_without_descriptors_refuses_a_channel_of_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with closing(ShmPlane(PENDING)) as p, closing(ShmPlane(PENDING)) as d:
        _, payload = d.connect(p.offer(), "127.0.0.1")
        monkeypatch.setattr("os.memfd_create", no_more)
        with pytest.raises(TransportError, match="no shared memory can be had: Too many open files"):
            p.accept(payload)


def test_secrets_are_of_one_maker() -> None:
    ours, theirs = Secrets(), Secrets()
    secret = ours.new()
    assert ours.session(secret) == secret[:16] and ours.session(ours.new()) != secret[:16]
    for wrong in (theirs.new(), bytes(32), secret[:16] + ours.new()[16:], secret[:31]):
        assert ours.session(wrong) is None


NAMES = (
    b"/tmp/kvferry-".ljust(41, b"0"),
    b"\0other-".ljust(41, b"0"),
    b"\0kvferry-" + b"/" * 32,
    b"\0kvferry-" + b"0" * 31,
)


def test_shm_connects_to_no_socket_of_another_name_or_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel names the user of the process that listens; the offer may say anything."""
    with closing(ShmPlane(PENDING)) as p, closing(ShmPlane(PENDING)) as d:
        offer = msgspec.msgpack.decode(p.offer(), type=shm.ShmOffer)
        for name in NAMES:
            with pytest.raises(ProtocolError, match="shm offer"):
                d.connect(msgspec.msgpack.encode({**msgspec.structs.asdict(offer), "name": name}), "127.0.0.1")
        monkeypatch.setattr(lent_files, "same_user", lambda sock: False)
        with pytest.raises(PlaneUnavailableError, match="another user's"):
            d.connect(msgspec.msgpack.encode(offer), "127.0.0.1")
