"""The router's HTTP client between raw sockets: what it knows of a request's progress, and what bounds it has."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from kvferry.router import http_client
from kvferry.router.http_client import HttpClient, HttpError, RequestProgress, SilenceError

HEAD = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def engine(serve: Callable[[socket.socket], object]) -> Iterator[str]:
    """Each connection is given to ``serve`` and closed after it."""

    def accept() -> None:
        with suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                with accepted, suppress(OSError):
                    serve(accepted)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


async def send(client: HttpClient, url: str, body: Any = None, silence: float | None = 60, **how: Any) -> bytes:
    answer = await client.send("POST", url, "/x", body=body, connect=60, silence=silence, **how)
    return await answer.body()


def sent(url: str, **how: Any) -> bytes:
    async def go() -> bytes:
        client = HttpClient()
        try:
            return await send(client, url, **how)
        finally:
            client.close()

    return asyncio.run(go())


def answers(*pieces: bytes, more: threading.Event | None = None) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        for number, piece in enumerate(pieces):
            if number and more is not None:
                more.wait(60)
            connection.sendall(piece)

    return serve


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + b"content-length: 5\r\n\r\nhello",),
        (HEAD, b"Content-Length: 5\r\n\r", b"\nhe", b"llo"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length: 5\r\n\r\nhello",),
    ],
)
def test_answers_of_every_form(pieces: tuple[bytes, ...]) -> None:
    with engine(answers(*pieces)) as url:
        assert sent(url) == b"hello"


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ((b"SSH-2.0\r\n",), "no HTTP answer"),
        ((HEAD + b"content-length: 9\r\n\r\nhello",), "closed the connection"),
        ((HEAD + b"x: " + b"y" * 300_000,), "a head of over"),
        ((), "closed the connection"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(pieces: tuple[bytes, ...], why: str) -> None:
    with engine(answers(*pieces)) as url, pytest.raises(HttpError, match=why):
        sent(url)


def test_an_answer_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 1000)
    with (
        engine(answers(HEAD + b"content-length: 5000\r\n\r\n" + b"x" * 5000)) as url,
        pytest.raises(HttpError, match="1000"),
    ):
        sent(url)


@pytest.mark.parametrize("pieces", [(), (HEAD + b"content-length: 9\r\n\r\nhello",)])
def test_silence_is_an_error(pieces: tuple[bytes, ...]) -> None:
    over = threading.Event()
    with engine(answers(*pieces, b"late", more=over) if pieces else lambda c: over.wait(60)) as url:
        with pytest.raises(SilenceError):
            sent(url, silence=0.1)
        over.set()


def test_a_request_is_asked_once_all_of_it_has_left() -> None:
    """The engine reads nothing of a large one; the connection's buffers are full."""
    go_on = threading.Event()

    def serve(connection: socket.socket) -> None:
        go_on.wait(60)
        while b"end" not in connection.recv(1 << 20):
            pass
        connection.sendall(HEAD + b"content-length: 0\r\n\r\n")

    async def go(url: str) -> None:
        client, progress = HttpClient(), RequestProgress()
        leg = asyncio.ensure_future(send(client, url, body="x" * (64 << 20) + "end", progress=progress))
        while progress._connection is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not progress.asked and not progress.answered
        go_on.set()
        await leg
        assert progress.asked and progress.answered
        client.close()

    with engine(serve) as url:
        asyncio.run(go(url))


def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    """Also where the event loop has not seen its end: a request on it would be lost, and could not be sent again."""
    connections, close, closed = [], threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        connections.append(connection)
        connection.recv(1 << 16)
        connection.sendall(HEAD + b"content-length: 0\r\n\r\n")
        close.wait(60)
        connection.close()
        closed.set()

    async def go(url: str) -> None:
        client = HttpClient()
        await send(client, url)
        close.set()
        closed.wait(60)  # nothing else runs in this loop
        await send(client, url)
        client.close()

    with engine(serve) as url:
        asyncio.run(go(url))
    assert len(connections) == 2


@pytest.mark.parametrize(("idle", "connections"), [(0.9, 1), (1.1, 2)])
def test_a_connection_is_kept_for_less_time_than_an_engine_keeps_it(
    idle: float, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen = [0.0], []
    monkeypatch.setattr(http_client, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def serve(connection: socket.socket) -> None:
        seen.append(connection)
        while connection.recv(1 << 16):
            connection.sendall(HEAD + b"content-length: 0\r\n\r\n")

    async def go(url: str) -> None:
        client = HttpClient()
        await send(client, url)
        now[0] += idle * http_client.IDLE_SECONDS
        await send(client, url)
        client.close()

    with engine(serve) as url:
        asyncio.run(go(url))
    assert len(seen) == connections
    assert uvicorn.Config(None).timeout_keep_alive / 2 > http_client.IDLE_SECONDS  # type: ignore[arg-type]


def test_a_slow_reader_holds_the_engine_up() -> None:
    """What waits here is bounded; all of it arrives."""
    size, written = 64 << 20, []

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % size)
        for _ in range(64):
            connection.sendall(b"x" * (1 << 20))
            written.append(1)

    async def go(url: str) -> int:
        client = HttpClient()
        answer = await client.send("GET", url, "/", connect=60, silence=60)
        await asyncio.sleep(0.5)
        assert len(written) < 64 and answer._unread < 2 * http_client.UNREAD_BYTES
        total = 0
        async for piece in answer.pieces():
            total += len(piece)
        client.close()
        return total

    with engine(serve) as url:
        assert asyncio.run(go(url)) == size
