"""Reading another process: the right one or none, gone or not; an address that is not its own."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.transport.channels import ByteRanges, Copy, PageRead
from kvferry.transport.errors import PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes import cma
from kvferry.transport.planes.cma import CmaPlane, _Offer
from tests.support.fork_server import Program, fork_server

import msgspec  # isort: skip

CHILD = """
import sys, ctypes
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes.cma import CmaPlane
plane = CmaPlane(PlaneContext("127.0.0.1", 1 << 20, 4 << 20))
block = ctypes.create_string_buffer(bytes(range(256)) * 32768)
print(plane.offer().hex(), ctypes.addressof(block), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[tuple[Program, bytes, int]]:
    with fork_server().start("-c", CHILD, text=True) as process:
        offer, address = process.stdout.readline().split()
        yield process, bytes.fromhex(offer), int(address)


CONTEXT = PlaneContext("127.0.0.1", 1 << 20, 4 << 20)


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


@pytest.mark.parametrize(("count", "threads"), [(1, 4), (4096, 4), (32768, 1), (32768, 2), (32768, 4)])
def test_scattered_runs_arrive(
    child: tuple[Program, bytes, int], count: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cma, "_threads", lambda: threads)
    _, offer, address = child
    plane = CmaPlane(CONTEXT)
    reader, _ = plane.connect(offer, "127.0.0.1")
    into = np.zeros(256 * count, dtype=np.uint8)
    order = np.random.default_rng(1).permutation(count)
    read = Read(into.ctypes.data + 256 * np.arange(count), address + 256 * order, np.full(count, 256))
    copy = ended(plane, reader.read(read))
    assert not copy.error and copy.moved == 256 * count
    assert (into.reshape(count, 256) == np.arange(256, dtype=np.uint8)).all()
    plane.close()
    plane.close()


def helper_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvferry-cma")]


@pytest.mark.parametrize("started", range(cma.MAX_THREADS - 1))
def test_without_helper_threads_the_plane_copies_alone(
    child: tuple[Program, bytes, int], started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system starts some of the helper threads and refuses the next one: the thread limit of a container."""
    _, offer, address = child
    monkeypatch.setattr(cma, "_threads", lambda: cma.MAX_THREADS)
    monkeypatch.setattr(cma, "_helpers", functools.cache(cma._helpers.__wrapped__))
    before, attempts, start = helper_threads(), 0, threading.Thread.start

    def limited_start(thread: threading.Thread) -> None:
        nonlocal attempts
        if thread.name.startswith("kvferry-cma"):
            attempts += 1
            if attempts > started:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited_start)
    plane = CmaPlane(CONTEXT)
    reader, _ = plane.connect(offer, "127.0.0.1")
    for _ in range(2):  # the second copy must not try again
        into = np.zeros(8 << 20, dtype=np.uint8)
        offsets = np.arange(0, 8 << 20, 1 << 20)
        copy = ended(plane, reader.read(Read(into.ctypes.data + offsets, address + offsets, np.full(8, 1 << 20))))
        assert not copy.error and copy.moved == 8 << 20
        assert (into.reshape(-1, 256) == np.arange(256, dtype=np.uint8)).all()
    assert attempts == started + 1
    end = time.monotonic() + 10
    while len(left := helper_threads()) > len(before) and time.monotonic() < end:
        time.sleep(0.01)
    assert set(left) <= set(before), "the threads that did start have ended"
    plane.close()


def test_descriptors_beyond_those_of_select(child: tuple[Program, bytes, int]) -> None:
    process, offer, _ = child
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    held: list[int] = []
    plane = CmaPlane(CONTEXT)
    try:
        held += [os.dup(0) for _ in range(1100)]
        reader, _ = plane.connect(offer, "127.0.0.1")
        assert reader.process.fd > 1024
        process.kill()
        process.wait(60)
        assert plane.progress()
        assert reader.error is not None
    finally:
        plane.close()
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_of_the_process_is_noticed(child: tuple[Program, bytes, int]) -> None:
    process, offer, address = child
    plane = CmaPlane(CONTEXT)
    reader, _ = plane.connect(offer, "127.0.0.1")
    assert not plane.progress()
    process.kill()
    process.wait(60)
    end = time.monotonic() + 60
    while not plane.progress() and time.monotonic() < end:
        time.sleep(0.01)
    assert isinstance(reader.error, TransportError)
    into = np.zeros(8, dtype=np.uint8)
    copy = ended(plane, reader.read(Read(column(into.ctypes.data), column(address), column(8))))
    assert "failed" in copy.error and copy.peer_lost
    assert plane.pollables() == []


def test_an_address_that_is_not_mapped(child: tuple[Program, bytes, int]) -> None:
    plane = CmaPlane(CONTEXT)
    reader, _ = plane.connect(child[1], "127.0.0.1")
    into = np.zeros(8, dtype=np.uint8)
    copy = ended(plane, reader.read(Read(column(into.ctypes.data), column(4096), column(8))))
    assert "Bad address" in copy.error and copy.peer_lost


def test_copies_take_turns_and_each_can_be_cancelled(
    child: tuple[Program, bytes, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cma, "TURN_BYTES", 1000)
    _, offer, address = child
    plane = CmaPlane(CONTEXT)
    channels = [plane.connect(offer, "127.0.0.1")[0] for _ in range(2)]
    into = np.zeros((4, 2560), dtype=np.uint8)
    offsets = 256 * np.arange(10)

    def begin(channel: cma.CmaChannel, row: np.ndarray) -> Copy:
        return channel.read(Read(row.ctypes.data + offsets, address + offsets, np.full(10, 256)))

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
    plane.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"secret": bytes(16)}, "another process namespace"),
        ({"host_id": "elsewhere"}, "another host"),
        ({"pid": 1 << 29}, "cannot be read"),
        ({"address": 4096}, "cannot be read"),
    ],
)
def test_another_process_is_not_taken_for_p(
    child: tuple[Program, bytes, int], changes: dict[str, object], named: str
) -> None:
    offer = msgspec.msgpack.decode(child[1], type=_Offer)
    with pytest.raises(PlaneUnavailableError, match=named) as caught:
        CmaPlane(CONTEXT).connect(msgspec.msgpack.encode(msgspec.structs.replace(offer, **changes)), "127.0.0.1")
    assert "\n" not in str(caught.value)


def test_garbage_is_refused() -> None:
    with pytest.raises(ProtocolError):
        CmaPlane(CONTEXT).connect(b"\x80\x04garbage", "127.0.0.1")


def open_pidfds() -> int:
    """Only descriptors of the kind at issue: the garbage of other tests in this process may go at any moment."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += "pidfd" in os.readlink(f"/proc/self/fd/{number}")
    return found


def test_a_refused_connect_leaves_no_descriptor_behind(child: tuple[Program, bytes, int]) -> None:
    offer = msgspec.msgpack.decode(child[1], type=_Offer)
    plane = CmaPlane(CONTEXT)
    gc.collect()
    before = open_pidfds()
    plane.connect(child[1], "127.0.0.1")
    assert open_pidfds() == before + 1
    for changes in ({"secret": bytes(16)}, {"address": 4096}) * 5:
        with pytest.raises(PlaneUnavailableError):
            plane.connect(msgspec.msgpack.encode(msgspec.structs.replace(offer, **changes)), "127.0.0.1")
    assert open_pidfds() == before + 1
    plane.close()
    assert open_pidfds() == before
