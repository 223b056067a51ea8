"""The router's HTTP client between raw sockets: what it knows of a request's progress, and what bounds it has."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import aiohttp
import pytest
import uvicorn

from kvferry.router import http_client
from kvferry.router.http_client import Answer, HttpClient, HttpError

HEAD = b"HTTP/1.1 200 OK\r\n"
RESET = b"reset"
T = TypeVar("T")


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


async def answer(client: HttpClient, url: str, body: Any = None, **how: Any) -> Answer:
    return await client.send("POST", url, "/x", body=body, connect=60, **how)


async def send(client: HttpClient, url: str, body: Any = None, **how: Any) -> bytes:
    return await (await answer(client, url, body, **how)).body()


def with_client(go: Callable[[HttpClient, str], Coroutine[Any, Any, T]], serve: Callable[[socket.socket], object]) -> T:
    """What ``go`` makes of a client and the URL of such an engine."""

    async def run(url: str) -> T:
        client = HttpClient()
        try:
            return await go(client, url)
        finally:
            await client.close()

    with engine(serve) as url:
        return asyncio.run(run(url))


def answers(*pieces: bytes, more: threading.Event | None = None) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        for number, piece in enumerate(pieces):
            if number and more is not None:
                more.wait(60)
            if piece == RESET:  # with bytes unread that would be one too
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            connection.sendall(piece)

    return serve


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ((b"SSH-2.0\r\n",), "no HTTP answer"),
        ((HEAD + b"content-length: 9\r\n\r\nhello",), "closed the connection"),
        ((HEAD + b"x: " + b"y" * 300_000,), "no HTTP answer"),
        ((), "closed the connection"),
        ((RESET,), "closed the connection"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(pieces: tuple[bytes, ...], why: str) -> None:
    with pytest.raises(HttpError, match=why):
        with_client(send, answers(*pieces))


def test_an_answer_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(HttpError, match="1000"):
        with_client(send, answers(HEAD + b"content-length: 5000\r\n\r\n" + b"x" * 5000))


def test_an_answer_may_take_as_long_as_its_connection_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp gives an answer 300 s, unless it is told otherwise."""
    bounds = []
    request = aiohttp.ClientSession.request

    def noted(self: Any, *args: Any, timeout: aiohttp.ClientTimeout, **how: Any) -> Any:
        bounds.append((timeout.total, timeout.sock_read, timeout.connect))
        return request(self, *args, timeout=timeout, **how)

    monkeypatch.setattr(aiohttp.ClientSession, "request", noted)
    assert with_client(send, answers(HEAD + b"content-length: 5\r\n\r\nhello")) == b"hello"
    assert bounds == [(None, None, None)]


def test_a_host_that_is_gone_is_noticed_in_silence() -> None:
    """By its connection: TCP asks for a sign of life."""

    async def go(client: HttpClient, url: str) -> None:
        connection = (await answer(client, url)).response.connection
        assert connection is not None and connection.transport is not None
        connected = connection.transport.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60

    with_client(go, answers(HEAD + b"content-length: 1\r\n\r\n", b"", more=threading.Event()))


@pytest.mark.parametrize("head", [b"HTTP/1.1 302 Found\r\nlocation: /y\r\n", HEAD + b"content-encoding: gzip\r\n"])
def test_an_answer_is_taken_as_it_is(head: bytes) -> None:
    """Not followed, not unpacked, and its cookies are nobody's."""
    seen: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        while request := connection.recv(1 << 16):
            seen.append(request)
            connection.sendall(head + b"set-cookie: a=1\r\ncontent-length: 5\r\n\r\nhello")

    async def go(client: HttpClient, url: str) -> None:
        assert [await send(client, url) for _ in range(2)] == [b"hello"] * 2

    with_client(go, serve)
    assert len(seen) == 2 and not any(b"cookie" in request.lower() for request in seen)


def test_a_kept_connection_is_used_no_longer_than_half_as_long_as_a_server_keeps_it() -> None:
    """Who uses one that is closed meanwhile loses a request that cannot be sent again."""
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

    async def go(client: HttpClient, url: str) -> int:
        found = await answer(client, url)
        await asyncio.sleep(0.5)
        assert len(written) < 64 and found.response.content.total_bytes < 8 << 20
        return sum([len(piece) async for piece in found.pieces()])

    assert with_client(go, serve) == size
