"""Which process holds the other end of a connection, and what of it is opened."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.transport import peer_process
from kvferry.transport.errors import PeerUnreachableError
from kvferry.transport.peer_process import Ends, PeerProcess
from tests.support.fork_server import Program, fork_server

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
