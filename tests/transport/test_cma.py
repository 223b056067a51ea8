"""Pages of another process of this host: ``cma``, lent files, and which process is at the other end."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import resource
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from kvferry.transport import peer_process
from kvferry.transport.channels import ByteRanges, Copy, PageRead
from kvferry.transport.errors import PeerUnreachableError, PlaneUnavailableError, ProtocolError, TransportError
from kvferry.transport.peer_process import Ends, PeerProcess
from kvferry.transport.plane import PlaneContext
from kvferry.transport.planes import cma
from kvferry.transport.planes.cma import CmaChannel, CmaPlane
from kvferry.transport.planes.lent_files import NUMBER, BorrowedFiles, Lender, listen_unix
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


@pytest.fixture
def opened() -> Iterator[list[int]]:
    """Descriptors to close."""
    fds: list[int] = []
    yield fds
    for fd in fds:
        os.close(fd)


def memfd(opened: list[int], content: bytes = b"content") -> int:
    opened.append(os.memfd_create("file"))
    os.write(opened[-1], content)
    return opened[-1]


def test_lent_files_are_opened_for_reading_until_p_closes(opened: list[int]) -> None:
    with closing(Lender()) as lender, closing(BorrowedFiles("cuda_ipc", *lender.offer())) as files:
        channel = lender.accept(files.channel)
        assert not files.ended
        file = memfd(opened)
        channel.lend(file)
        assert not files.ended, "a message is no end"
        opened.append(files.open_file(file))
        assert os.pread(opened[-1], 100, 0) == b"content"
        with pytest.raises(OSError):
            os.write(opened[-1], b"x")
        with pytest.raises(FileNotFoundError, match="has not lent it"):
            files.open_file(file + 1)
        channel.close()
        assert files.ended


def test_a_d_without_the_secret_gets_nothing(opened: list[int]) -> None:
    with closing(Lender()) as lender:
        name, _ = lender.offer()
        with closing(BorrowedFiles("cuda_ipc", name, secrets.token_bytes(32))) as files:
            with pytest.raises(TransportError, match="never connected, or was refused"):
                lender.accept(files.channel)
            assert files.ended


def test_a_d_that_is_gone_is_told_to_p(opened: list[int]) -> None:
    with closing(Lender()) as lender:
        files = BorrowedFiles("cuda_ipc", *lender.offer())
        channel = lender.accept(files.channel)
        files.close()
        assert files.ended
        lender.progress()
        assert not lender.progress(), "its socket is watched no more"
        with pytest.raises(TransportError, match="gone"):
            channel.lend(memfd(opened))


def test_a_child_of_p_does_not_seem_to_be_p() -> None:
    with closing(Lender()) as lender, closing(BorrowedFiles("cuda_ipc", *lender.offer())) as files:
        channel = lender.accept(files.channel)
        (wait, end), (begun, begins) = os.pipe(), os.pipe()
        if not (child := os.fork()):
            os.close(end)
            os.write(begins, b"x")
            os.read(wait, 1)
            os._exit(0)
        os.close(wait)
        os.read(begun, 1)
        channel.close()
        ended = files.ended
        os.close(end)
        os.waitpid(child, 0)
        os.close(begun)
        os.close(begins)
        assert ended


@pytest.mark.parametrize("what", ["no descriptor", "two descriptors", "short", "repeated", "too many"])
def test_a_p_that_sends_something_else_has_ended(what: str, opened: list[int]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        listener, name = listen_unix()
        stack.enter_context(listener)
        listener.listen()
        files = stack.enter_context(closing(BorrowedFiles("cuda_ipc", name, secrets.token_bytes(32))))
        p = stack.enter_context(listener.accept()[0])
        file = memfd(opened)
        sends: dict[str, list[tuple[bytes, list[int]]]] = {
            "no descriptor": [(NUMBER.pack(file), [])],
            "two descriptors": [(NUMBER.pack(file), [file, file])],
            "short": [(b"x", [file])],
            "repeated": [(NUMBER.pack(file), [file])] * 2,
            "too many": [(NUMBER.pack(number), [file]) for number in range(5)],
        }
        for data, fds in sends[what]:
            assert not files.ended
            socket.send_fds(p, [data], fds)
        assert files.ended and files.ended, "for good"
    assert len(os.listdir("/proc/self/fd")) == before + len(opened), "all descriptors that came are closed"


def test_what_is_no_file_is_not_opened(opened: list[int]) -> None:
    with closing(Lender()) as lender, closing(BorrowedFiles("cuda_ipc", *lender.offer())) as files:
        channel = lender.accept(files.channel)
        opened += os.pipe()
        channel.lend(opened[0])
        with pytest.raises(OSError, match="not a regular file"):
            files.open_file(opened[0])


P = """
import socket, sys
listener = socket.create_server((sys.argv[1], 0), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
print("accepted", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["127.0.0.1", "::1"])
def joined(request: pytest.FixtureRequest) -> Iterator[tuple[Program, socket.socket]]:
    """Another process, and our connection to it."""
    with (
        fork_server().start("-c", P, request.param, text=True) as process,
        socket.create_connection((request.param, int(process.stdout.readline()))) as ours,
    ):
        assert process.stdout.readline() == "accepted\n"
        yield process, ours


@pytest.mark.parametrize("way", ["sock_diag", "the table"])
def test_the_process_at_the_other_end_is_known(
    joined: tuple[Program, socket.socket], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_process, "ask_netlink" if way == "the table" else "search_table", lambda *args: 0)
    process, ours = joined
    ends = Ends.of(ours.fileno())
    assert ends is not None and ends.theirs == ours.getpeername()[:2]
    PeerProcess(process.pid).check_holds_end(ends)
    for pid in (os.getpid(), os.getppid()):  # ours holds this end
        with pytest.raises(PeerUnreachableError, match="is not at the other end"):
            PeerProcess(pid).check_holds_end(ends)


def test_a_process_that_has_ended_is_not_taken_for_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread closes while another asks: a file that is opened meanwhile may get the same number."""
    with fork_server().start("-c", "", text=True) as program:
        process = PeerProcess(program.pid)
        assert program.wait(60) == 0
    numbers: list[int] = []
    poll = select.poll

    def slow() -> select.poll:
        closer.start()
        closer.join(0.1)
        numbers.append(os.eventfd(0))
        return poll()

    closer = threading.Thread(target=process.close)
    monkeypatch.setattr(select, "poll", slow)
    assert process.ended
    closer.join(60)
    assert process.fd < 0 and process.ended
    os.close(numbers[0])


def test_no_connection_or_no_such_connection_is_nobody_s(joined: tuple[Program, socket.socket]) -> None:
    process, ours = joined
    ends = Ends.of(ours.fileno())
    assert ends is not None
    for wrong in (
        None,
        Ends(ends.theirs, ends.ours),
        Ends((ends.ours[0], 1), ends.theirs),
        Ends(("x", 1), ends.theirs),
    ):
        with pytest.raises(PeerUnreachableError):
            PeerProcess(process.pid).check_holds_end(wrong)
    before = len(os.listdir("/proc/self/fd"))
    file, (one, other) = os.memfd_create("file"), socket.socketpair()
    with one, other, socket.socket() as alone:
        assert [Ends.of(fd) for fd in (-1, 1 << 20, file, one.fileno(), alone.fileno())] == [None] * 5
    os.close(file)
    assert len(os.listdir("/proc/self/fd")) <= before, "a copy of the descriptor is left"


def test_the_end_of_a_process_counts_after_the_look() -> None:
    with fork_server().start("-c", "import sys; sys.stdin.read()", text=True) as process:
        peer = PeerProcess(process.pid)
        assert not peer.ended
        process.kill()
        process.wait(60)
        assert peer.ended
        with pytest.raises(OSError):
            peer.open_file(0)
        peer.close()
        peer.close()
        assert peer.ended


class Watch:
    """Tells whether a file was opened (inotify(7))."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self._fd, os.fsencode(path), 0x20) >= 0

    def opened(self) -> bool:
        try:
            return len(os.read(self._fd, struct.calcsize("iIII"))) > 0
        except BlockingIOError:
            return False


@pytest.mark.parametrize("kind", ["FIFO", "another user's", "folder", "device"])
def test_a_file_is_looked_at_before_it_is_opened(kind: str, tmp_path: Path) -> None:
    path = {"folder": tmp_path, "device": Path("/dev/zero")}.get(kind, tmp_path / "file")
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "another user's":
        if os.geteuid() != 0:
            pytest.skip("needs root")
        path.touch()
        os.chown(path, 65534, 65534)
    fd = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    watch = Watch(path)
    with pytest.raises(OSError, match=r"regular|user"):
        PeerProcess(os.getpid()).open_file(fd)
    assert not watch.opened()
    os.close(fd)


def test_a_regular_file_is_opened_for_reading() -> None:
    fd = os.memfd_create("file")
    os.write(fd, b"content")
    ours = PeerProcess(os.getpid()).open_file(fd)
    assert os.pread(ours, 100, 0) == b"content"
    with pytest.raises(OSError):
        os.write(ours, b"x")
    os.close(fd)
    os.close(ours)
