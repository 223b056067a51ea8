"""Requests to engines over kept connections, with aiohttp's client.

What is added to it: a caller sees how far a request has come (``RequestProgress``), an answer may take as long as its
connection lives, and a fault of this machine is no fault of an engine (``OwnFaultError``).
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
from aiohappyeyeballs import AddrInfoType
from multidict import CIMultiDict
from yarl import URL

from kvferry.router.request_bodies import WINDOW_BYTES, Body, pieces_of

IDLE_SECONDS = 2.0
"""A kept connection is used again for so long. uvicorn, vLLM's server, closes one after 5 s. A request that is on its
way meanwhile fails, and nobody knows whether the engine has it: no second try is made, so stay well below."""
MAX_ANSWER_BYTES = 256 << 20  # Bound on an answer that is read as a whole
RECEIVED_BYTES = 16 << 10  # Of an answer that nobody takes, about so many wait here, and twice so many in the kernel
HEAD_BYTES = 64 << 10  # Bound on each line of the head of an answer, or of a request
_OWN_FAULTS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""Seconds, seconds, and tries: a host that is gone is noticed, however long an engine computes in silence."""
_AUTOMATIC = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class HttpError(Exception):
    """An engine gave no answer, or not all of it: no connection, a broken one, or no HTTP."""


class OwnFaultError(HttpError):
    """This machine has no descriptor, port or memory for a connection: no fault of the engine."""


def _socket(found: AddrInfoType) -> socket.socket:
    """For a connection to an address that was found."""
    made = socket.socket(*found[:3])
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * RECEIVED_BYTES)
    for option, value in _KEEPALIVE:
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


@dataclass(eq=False)
class RequestProgress:
    """How far one request has come."""

    sent: bool = False  # It has a connection, so that the engine may have it
    answered: bool = False  # The head of the answer was received
    at: float = 0.0  # Since when it waits for the next one, by ``time.monotonic``
    tokens: float = 0.0  # Of its prompt
    held: bool = False  # It does not wait for the engine
    passed: bool = False  # Perhaps the engine counts nothing of it
    given_up: str = ""  # Why the router waits no longer
    connection: aiohttp.connector.Connection | None = None

    def go_on(self) -> None:
        """It waits for the engine from now on."""
        self.held, self.at = False, time.monotonic()

    def give_up(self, why: str) -> None:
        """End it: its connection closes, and who waits for an answer gets HttpError."""
        if self.connection is not None and self.connection.transport is not None:
            self.given_up = why
            self.connection.transport.abort()


_progress: ContextVar[RequestProgress] = ContextVar("progress")


class _Connector(aiohttp.TCPConnector):
    async def connect(self, *args: Any, **kwargs: Any) -> aiohttp.connector.Connection:
        progress = _progress.get()
        progress.connection = await super().connect(*args, **kwargs)
        progress.sent = True
        return progress.connection


class Answer:
    """The head of an engine's answer, and its body as it arrives. Close each answer."""

    def __init__(self, response: aiohttp.ClientResponse, over: Callable[[], object], progress: RequestProgress) -> None:
        self.status, self.headers, self._over, self._progress = response.status, response.headers, over, progress
        self.response, self._broken = response, False

    @property
    def whole(self) -> bool:
        """All of it was received."""
        return self.response.content.at_eof() and not self._broken

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises HttpError."""
        try:
            while piece := await self.response.content.readany():
                self._progress.answered = self._progress.held = True  # by a client that takes it slowly, perhaps
                yield piece
                self._progress.go_on()
        except (aiohttp.ClientError, OSError) as error:
            self._broken = True
            raise HttpError(self._progress.given_up or said(error)) from None

    async def body(self, most: int | None = None) -> bytes:
        """All of it. Raises HttpError, also where it is longer than ``most``, or ``MAX_ANSWER_BYTES``."""
        pieces, size, most = [], 0, most or MAX_ANSWER_BYTES
        async for piece in self.pieces():
            pieces.append(piece)
            size += len(piece)
            if size > most:
                raise HttpError(f"an answer of over {most} bytes")
        return b"".join(pieces)

    def close(self) -> None:
        """Where it has not ended the connection closes, and the engine aborts the request."""
        self._over()
        self.response.close()


class HttpClient:
    """Sends requests to any engine. Use it in one event loop."""

    def __init__(self) -> None:
        self.under_way: dict[RequestProgress, str] = {}  # Requests with a ``progress``, and their engines
        self.session: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, base: str, path: str, *, body: Body | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None, progress: RequestProgress | None = None, connect: float,
    ) -> Answer:  # fmt: skip
        """The head of an answer. Raises HttpError: there is none. ``base``: URL of the engine, ``http://HOST:PORT``.
        ``body``: sent as JSON, or in pieces as it is. ``connect``: seconds that a connection may take."""
        if self.session is None:
            connector = _Connector(limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_socket)
            self.session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False,
                skip_auto_headers=_AUTOMATIC, max_line_size=HEAD_BYTES, max_field_size=HEAD_BYTES,
                read_bufsize=RECEIVED_BYTES,
            )  # fmt: skip
            self.session._retry_connection = False  # a body in pieces is there once
        legs, progress = self.under_way if progress else {}, progress or RequestProgress()
        _progress.set(progress)
        sent: CIMultiDict[str] = CIMultiDict(headers or {})
        data: Any = body
        if isinstance(body, dict):
            pieces = [memoryview(piece) for piece in pieces_of(body)]
            size = sum(map(len, pieces))
            sent["content-length"] = str(size)
            data = b"".join(pieces) if size <= WINDOW_BYTES else _windows(pieces)
        limit = aiohttp.ClientTimeout(total=None, sock_connect=connect)
        how: dict[str, Any] = {"headers": sent, "timeout": limit, "allow_redirects": False, "data": data}
        legs[progress], over, progress.at = base, partial(legs.pop, progress, None), time.monotonic()
        try:
            response = await self.session.request(method, URL(base + path, encoded=True), **how)
            progress.answered, progress.at = True, time.monotonic()
            return Answer(response, over, progress)
        except BaseException as error:
            over()
            if not isinstance(error, aiohttp.ClientError | OSError | ValueError):
                raise
            number = getattr(getattr(error, "os_error", error), "errno", None)
            if number in _OWN_FAULTS:
                fault = f"the router has no connection to spare ({errno.errorcode[number]}); try again"
                raise OwnFaultError(fault) from None
            raise HttpError(progress.given_up or said(error)) from None

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()


async def _windows(pieces: list[memoryview]) -> AsyncIterator[memoryview]:
    """A large body: no copy of it is made, and nobody waits for it."""
    for piece in pieces:
        for at in range(0, len(piece), WINDOW_BYTES):
            yield piece[at : at + WINDOW_BYTES]


def said(error: BaseException) -> str:
    """Why there is no answer, or not all of it, in one line."""
    if isinstance(error, aiohttp.ClientConnectorError):
        # asyncio has words of its own, and OpenSSL numbers
        number = 0 if isinstance(error.os_error, ssl.SSLError) else error.os_error.errno or 0
        return f"no connection: {os.strerror(number) if number > 0 else error.os_error.strerror or error.os_error}"
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "no connection in the time for it"
    ended = aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionResetError
    if isinstance(error, ended) or getattr(error, "errno", None) == errno.ECONNRESET:
        return "the engine closed the connection"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"no HTTP answer: {' '.join(error.message.split())}"
    return f"{type(error).__name__}: {error}"
