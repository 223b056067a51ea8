"""Reading another process: the right one or none, gone or not; an address that is not its own."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from kvferry.transport.channels import ByteRanges, Copy, PageRead
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes import cma
from kvferry.transport.planes.cma import CmaChannel, CmaPlane
from kvferry.transport.planes.pull import MemoryFileAddress, PullOffer
from tests.support.fork_server import Program, fork_server

CHILD = """
import sys, ctypes
from kvferry.transport.channels import CPU
from kvferry.transport.plane import PlaneContext, PlaneMemory
from kvferry.transport.planes.cma import CmaPlane
block = ctypes.create_string_buffer(bytes(range(256)) * 32768)
address = ctypes.addressof(block)
plane = CmaPlane(PlaneContext("127.0.0.1", 1 << 20, 4 << 20, memory=PlaneMemory(CPU, ((address, 8 << 20),))))
print(plane.offer().hex(), plane.accept(b"")[1].hex(), address, flush=True)
sys.stdin.read()
"""


class Child(NamedTuple):
    """A P in another process: its offer, its reply to any D, and the address of its one KV cache."""

    process: Program
    offer: bytes
    reply: bytes
    address: int

    def join(self, plane: CmaPlane) -> CmaChannel:
        channel, _ = plane.connect(self.offer, "127.0.0.1")
        plane.finish(channel, self.reply)
        return channel


@pytest.fixture
def child() -> Iterator[Child]:
    with fork_server().start("-c", CHILD, text=True) as process:
        offer, reply, address = process.stdout.readline().split()
        yield Child(process, bytes.fromhex(offer), bytes.fromhex(reply), int(address))


@pytest.fixture
def plane() -> Iterator[CmaPlane]:
    plane = CmaPlane(PlaneContext("127.0.0.1", 1 << 20, 4 << 20))
    yield plane
    plane.close()
    plane.close()


class Read(PageRead):
    """These ranges and no others."""

    def __init__(self, dst: np.ndarray, src: np.ndarray, nbytes: np.ndarray) -> None:
        self._ranges = ByteRanges(dst, src, nbytes)

    def byte_ranges(self) -> ByteRanges:
        return self._ranges

    def launch(self) -> Copy:
        raise AssertionError("no kernel reads another process's host memory")


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def ended(plane: CmaPlane, copy: Copy) -> Copy:
    """The copy, once it has ended."""
    end = time.monotonic() + 60
    while not copy.done:
        assert time.monotonic() < end and plane.active and not plane.arm()
        plane.progress()
    assert plane.arm() and not plane.active
    return copy


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_scattered_runs_arrive(child: Child, plane: CmaPlane, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cma, "thread_count", lambda: threads)
    reader, count = child.join(plane), 32768
    into = np.zeros(256 * count, dtype=np.uint8)
    order = np.random.default_rng(1).permutation(count)
    read = Read(into.ctypes.data + 256 * np.arange(count), child.address + 256 * order, np.full(count, 256))
    copy = ended(plane, reader.read(read))
    assert not copy.error and copy.moved == 256 * count
    assert (into.reshape(count, 256) == np.arange(256, dtype=np.uint8)).all()


def helper_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvferry-cma")]


@pytest.mark.parametrize("started", range(cma.MAX_THREADS - 1))
def test_without_helper_threads_the_plane_copies_alone(
    child: Child, plane: CmaPlane, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system starts some of the helper threads and refuses the next one: the thread limit of a container."""
    monkeypatch.setattr(cma, "thread_count", lambda: cma.MAX_THREADS)
    monkeypatch.setattr(cma, "helper_pool", functools.cache(cma.helper_pool.__wrapped__))
    before, attempts, start = helper_threads(), 0, threading.Thread.start

    def limited_start(thread: threading.Thread) -> None:
        nonlocal attempts
        if thread.name.startswith("kvferry-cma"):
            attempts += 1
            if attempts > started:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited_start)
    reader = child.join(plane)
    for _ in range(2):  # the second copy must not try again
        into = np.zeros(8 << 20, dtype=np.uint8)
        offsets = np.arange(0, 8 << 20, 1 << 20)
        read = Read(into.ctypes.data + offsets, child.address + offsets, np.full(8, 1 << 20))
        copy = ended(plane, reader.read(read))
        assert not copy.error and copy.moved == 8 << 20
        assert (into.reshape(-1, 256) == np.arange(256, dtype=np.uint8)).all()
    assert attempts == started + 1
    end = time.monotonic() + 300
    while len(left := helper_threads()) > len(before) and time.monotonic() < end:
        time.sleep(0.01)
    assert set(left) <= set(before), "the threads that did start have ended"


def test_descriptors_beyond_those_of_select(child: Child, plane: CmaPlane) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    held: list[int] = []
    try:
        held += [os.dup(0) for _ in range(1100)]
        reader = child.join(plane)
        assert reader.process.fd > 1024
        child.process.kill()
        child.process.wait(60)
        assert plane.progress() and not plane.pollables()
        assert isinstance(reader.error, TransportError)
        into = np.zeros(8, dtype=np.uint8)
        copy = ended(plane, reader.read(Read(column(into.ctypes.data), column(child.address), column(8))))
        assert "failed" in copy.error and copy.peer_lost
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_copies_take_turns_and_each_can_be_cancelled(
    child: Child, plane: CmaPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cma, "TURN_BYTES", 1000)
    channels = [child.join(plane) for _ in range(2)]
    into = np.zeros((4, 2560), dtype=np.uint8)
    offsets = 256 * np.arange(10)

    def begin(channel: cma.CmaChannel, row: np.ndarray) -> Copy:
        return channel.read(Read(row.ctypes.data + offsets, child.address + offsets, np.full(10, 256)))

    copies = [begin(channels[number // 2], row) for number, row in enumerate(into)]
    for expected in ([768, 0, 0, 0], [768, 768, 0, 0], [768, 768, 768, 0], [768, 768, 768, 768], [1536, 768, 768, 768]):
        assert plane.progress()
        assert [copy.moved for copy in copies] == expected
    channels[0].cancel(copies[1])
    channels[1].close()
    assert [copy.done for copy in copies] == [False, True, True, True]
    assert all("cancelled" in copy.error for copy in copies[1:])
    ended(plane, copies[0])
    assert [int((row != 0).any(axis=-1)) for row in into] == [1, 1, 1, 1]
    assert (into[0].reshape(10, 256) == np.arange(256)).all() and not into[1:, 768:].any()
    channels[0].cancel(copies[0])
    assert not copies[0].error, "a copy that has ended stays as it is"


def changed(offer: bytes, changes: Mapping[str, object]) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(msgspec.msgpack.decode(offer, type=PullOffer), **changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"host_id": "elsewhere"}, "another host"),
        ({"host_id": ""}, "another host"),
        ({"pid": 1 << 29}, "be found"),
        ({"pids": 1}, "in another process namespace"),
    ],
)
def test_another_host_or_no_process_is_refused(
    child: Child, plane: CmaPlane, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(PlaneUnavailableError, match=named) as caught:
        plane.connect(changed(child.offer, changes), "127.0.0.1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xc0", b"\x82", bytes(cma.MAX_VECTORS)])
def test_a_reply_that_names_another_file_is_refused(plane: CmaPlane, content: bytes) -> None:
    """A file that is not P's description: D looks at it, and at no address that it might name."""
    file = os.memfd_create("other")
    os.write(file, content)
    channel, _ = plane.connect(plane.offer(), "127.0.0.1")
    with pytest.raises(ProtocolError, match="cma memory"):
        plane.finish(channel, msgspec.msgpack.encode(MemoryFileAddress(file)))
    with pytest.raises(ProtocolError, match="cma reply"):
        plane.finish(channel, content)
    os.close(file)


def open_pidfds() -> int:
    """Only descriptors of the kind at issue: the garbage of other tests in this process may go at any moment."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += "pidfd" in os.readlink(f"/proc/self/fd/{number}")
    return found


def test_a_refused_connect_leaves_no_descriptor_behind(child: Child, plane: CmaPlane) -> None:
    gc.collect()
    before = open_pidfds()
    channel = child.join(plane)
    assert open_pidfds() == before + 1
    for changes in ({"host_id": "elsewhere"}, {"pid": 1 << 29}) * 5:
        with pytest.raises(PlaneUnavailableError):
            plane.connect(changed(child.offer, changes), "127.0.0.1")
    with pytest.raises(PlaneUnavailableError):
        plane.finish(channel, msgspec.msgpack.encode(MemoryFileAddress(1 << 20)))
    assert open_pidfds() == before + 1
    plane.close()
    assert open_pidfds() == before
