"""Who may map P's memory, and what becomes of it, without a GPU: the driver's calls are this file's, all else is real.

The driver itself is met in tests/ranks/test_gpus.py and tests/gpu, on GPUs.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
import torch

from kvferry.transport import cuda
from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.plane import PlaneContext, PlaneMemory
from kvferry.transport.planes.cuda_ipc import CudaIpcPlane, IpcChannel, IpcMemory, IpcOffer
from kvferry.transport.planes.pull import MAX_FILE_BYTES, MemoryFileAddress
from tests.support.apart import need_namespaces
from tests.support.fork_server import fork_server

GPU = torch.device("cuda", 0)
SIZE = 1 << 20


def context(ranges: tuple[tuple[int, int], ...], synchronize: Callable[[], None] = lambda: None) -> PlaneContext:
    return PlaneContext("127.0.0.1", SIZE, SIZE, memory=PlaneMemory(GPU, ranges, synchronize))


class Driver:
    """One GPU's allocations, by the address at which P has them; mapped they lie ``SHIFT`` further on."""

    SHIFT = 1 << 40

    def __init__(self) -> None:
        self.secret = b""
        self.mapped: list[int] = []
        self.broken = ""
        self.size = SIZE

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("check_peer_access", "address_range", "ipc_handle", "open_handle", "read_bytes"):
            monkeypatch.setattr(cuda, name, getattr(self, name))
        monkeypatch.setattr(cuda, "bind_context", lambda device: None)
        monkeypatch.setattr(cuda, "device_uuid", lambda device: "GPU-0")
        monkeypatch.setattr(cuda, "allocate", lambda nbytes, device: torch.zeros(64, dtype=torch.uint8))
        monkeypatch.setattr(cuda, "close_handle", self.mapped.remove)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))

    def check_peer_access(self, device: torch.device, uuid: str) -> None:
        if self.broken == "no peer access":
            raise TransportError("GPU 0 has no peer access to GPU 1")

    def address_range(self, address: int) -> tuple[int, int]:
        return address // SIZE * SIZE, self.size

    def ipc_handle(self, base: int) -> bytes:
        if self.broken == "virtual":
            raise PlaneUnavailableError("the KV cache lies in virtual memory of CUDA")
        return base.to_bytes(8, "little").ljust(64, b"\0")

    def open_handle(self, handle: bytes) -> int:
        if self.broken == "gone":
            raise TransportError("cuIpcOpenMemHandle: CUDA_ERROR_INVALID_VALUE")
        self.mapped.append(int.from_bytes(handle[:8], "little") + self.SHIFT)
        return self.mapped[-1]

    def read_bytes(self, address: int, nbytes: int, device: torch.device) -> bytes:
        return bytes(nbytes) if self.broken == "other bytes" else self.secret


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    driver.install(monkeypatch)
    return driver


Make = Callable[..., CudaIpcPlane]


@pytest.fixture
def plane(driver: Driver) -> Iterator[Make]:
    made: list[CudaIpcPlane] = []

    def make(ranges: tuple[tuple[int, int], ...] = ((3 * SIZE + 5, 100), (7 * SIZE, 10)), synchronize=lambda: None):
        made.append(CudaIpcPlane(context(ranges, synchronize)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def memory_of(pid: int, reply: bytes) -> IpcMemory:
    """What a P has published."""
    fd = msgspec.msgpack.decode(reply, type=MemoryFileAddress).fd
    return msgspec.msgpack.decode(Path(f"/proc/{pid}/fd/{fd}").read_bytes(), type=IpcMemory)


class P(NamedTuple):
    """Another process: its offer, and its reply to any D."""

    offer: IpcOffer
    reply: bytes

    @property
    def memory(self) -> IpcMemory:
        return memory_of(self.offer.pid, self.reply)

    def join(self, plane: CudaIpcPlane) -> IpcChannel:
        channel, payload = plane.connect(encoded(self.offer), "127.0.0.1")
        assert payload == b""
        plane.finish(channel, self.reply)
        return channel


@pytest.fixture
def p(driver: Driver, tmp_path: Path) -> Iterator[P]:
    """The offer of another process, which holds two allocations."""
    script = """
import sys, pytest, torch
from tests.transport.test_cuda_ipc import SIZE, Driver, context
from kvferry.transport.planes.cuda_ipc import CudaIpcPlane
patch = pytest.MonkeyPatch()
Driver().install(patch)
plane = CudaIpcPlane(context(((3 * SIZE + 5, 100), (7 * SIZE, 10))))
print(plane.offer().hex(), plane.accept(b"")[1].hex(), flush=True)
sys.stdin.read()
"""
    with fork_server().start("-c", script, text=True) as process:
        offer, reply = map(bytes.fromhex, process.stdout.readline().split())
        p = P(msgspec.msgpack.decode(offer, type=IpcOffer), reply)
        driver.secret = p.memory.secret
        yield p


def encoded(offer: IpcOffer, **change: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(offer, **change))


def until(condition: Callable[[], bool], plane: CudaIpcPlane) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        plane.progress()
        time.sleep(1e-3)


def joined(p: P, d: CudaIpcPlane) -> IpcChannel:
    channel = p.join(d)
    until(lambda: channel.ready, d)
    return channel


def test_p_s_memory_is_mapped_once_and_found_at_our_addresses(driver: Driver, plane: Make, p: P) -> None:
    d = plane()
    channel = joined(p, d)
    assert len(driver.mapped) == 3, "two allocations and the probe"
    assert channel.translate(3 * SIZE + 5, 100) == 3 * SIZE + 5 + Driver.SHIFT
    assert channel.translate(7 * SIZE, 10) == 7 * SIZE + Driver.SHIFT
    for address, nbytes in ((7 * SIZE, 11), (5 * SIZE, 1), (3 * SIZE, 10), (3 * SIZE + 6, 100)):
        with pytest.raises(TransportError, match="in no KV cache that the prefill engine has published"):
            channel.translate(address, nbytes)
    channel.close()
    channel.close()
    until(lambda: not driver.mapped, d)


def test_it_is_unmapped_once_the_copies_have_ended(driver: Driver, plane: Make, p: P) -> None:
    ended = threading.Event()
    waited: list[bool] = []
    d = plane(synchronize=lambda: waited.append(ended.wait(60)))
    channel = joined(p, d)
    channel.close()
    time.sleep(0.2)
    assert not waited, "nothing waits for it"
    assert driver.mapped
    ended.set()
    until(lambda: not driver.mapped, d)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"host_id": "another"}, "another host or in another network namespace"),
        ({"host_id": ""}, "another host"),
        ({"pid": os.getpid()}, "this very process"),
        ({"pid": os.getpid(), "pids": 1}, "CUDA compares numbers"),
        ({"pid": 1 << 29}, "cannot be found"),
        ({"why": "no handles"}, "cannot be mapped: no handles"),
    ],
)
def test_whom_it_does_not_concern_is_refused(
    driver: Driver, plane: Make, p: P, change: dict[str, object], why: str
) -> None:
    with pytest.raises(PlaneUnavailableError, match=why):
        plane().connect(encoded(p.offer, **change), "127.0.0.1")
    assert not driver.mapped


def test_a_p_of_another_process_namespace_lends_its_files(driver: Driver, plane: Make) -> None:
    """The second file is as the board, which P lends when D has attached."""
    need_namespaces()
    script = """
from tests.support.apart import leave
leave()
import os, sys, pytest
from tests.transport.test_cuda_ipc import SIZE, Driver, context, memory_of
from kvferry.transport.planes.cuda_ipc import CudaIpcPlane
patch = pytest.MonkeyPatch()
Driver().install(patch)
plane = CudaIpcPlane(context(((3 * SIZE + 5, 100), (7 * SIZE, 10))))
print(plane.offer().hex(), flush=True)
channel, reply = plane.accept(bytes.fromhex(sys.stdin.readline()))
file = os.memfd_create("board")
os.write(file, b"content")
channel.lend(file)
print(reply.hex(), memory_of(os.getpid(), reply).secret.hex(), file, flush=True)
sys.stdin.read()
"""
    with closing(plane()) as d, fork_server().start("-c", script, text=True) as process:
        channel, payload = d.connect(bytes.fromhex(process.stdout.readline()), "127.0.0.1")
        process.stdin.write(payload.hex() + "\n")
        process.stdin.flush()
        reply, secret, file = process.stdout.readline().split()
        driver.secret = bytes.fromhex(secret)
        assert not d.progress() or channel.error is None
        d.finish(channel, bytes.fromhex(reply))
        until(lambda: channel.ready, d)
        assert channel.translate(7 * SIZE, 10) == 7 * SIZE + Driver.SHIFT
        ours = channel.process.open_file(int(file))
        assert os.pread(ours, 100, 0) == b"content" and not channel.process.ended
        os.close(ours)
        process.stdin.close()
        until(lambda: channel.error is not None, d)
        assert "died" in str(channel.error) and channel.process.ended


def test_what_cannot_be_lent_leaves_no_socket_behind(driver: Driver, plane: Make) -> None:
    """P's poll loop sees no end of a D that only reads nothing any more."""
    p, d = plane(), plane()
    offer = encoded(msgspec.msgpack.decode(p.offer(), type=IpcOffer), pids=1, pid=1)
    before = len(os.listdir("/proc/self/fd"))
    channel, payload = d.connect(offer, "127.0.0.1")
    assert isinstance(channel, IpcChannel)
    with socket.socket(fileno=os.dup(channel.process.fd)) as theirs:
        theirs.shutdown(socket.SHUT_RD)
        with pytest.raises(TransportError, match="gone"):
            p.accept(payload)
    channel.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_peer_access_is_told_before_anything_is_mapped(driver: Driver, plane: Make, p: P) -> None:
    driver.broken = "no peer access"
    with pytest.raises(PlaneUnavailableError, match="no peer access"):
        p.join(plane())


@pytest.mark.parametrize(
    ("broken", "why"),
    [("gone", "INVALID_VALUE"), ("other bytes", "not the bytes that the prefill engine wrote"), ("small", "smaller")],
)
def test_a_mapping_that_fails_is_the_channel_s_error(driver: Driver, plane: Make, p: P, broken: str, why: str) -> None:
    d = plane()
    driver.broken = broken
    if broken == "small":
        driver.size = SIZE // 2
    channel = p.join(d)
    until(lambda: channel.error is not None, d)
    assert why in str(channel.error) and "cannot be mapped" in str(channel.error) and not channel.ready
    channel.close()
    until(lambda: not driver.mapped, d)


def test_memory_without_handles_can_only_read_from_others(driver: Driver, plane: Make, p: P) -> None:
    driver.broken = "virtual"
    d = plane()
    assert "virtual memory" in d.cannot_serve
    assert msgspec.msgpack.decode(d.offer(), type=IpcOffer).why == d.cannot_serve
    joined(p, d)


def test_a_layer_in_several_allocations_is_not_offered(plane: Make) -> None:
    assert "several allocations" in plane(((SIZE - 10, 20),)).cannot_serve


def test_the_handles_are_not_in_the_offer(driver: Driver, plane: Make) -> None:
    made = plane()
    handle = driver.ipc_handle(3 * SIZE)
    assert handle not in made.offer()
    memory = memory_of(os.getpid(), made.accept(b"")[1])
    assert handle in [allocation.handle for allocation in memory.allocations]
    assert MAX_FILE_BYTES > 512 * 90 and len(memory.allocations) == 2
