"""What P lends to a D of another process namespace, and a P that sends something else."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from kvferry.transport.errors import TransportError
from kvferry.transport.planes.lent_files import NUMBER, BorrowedFiles, Lender, listen_unix


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
