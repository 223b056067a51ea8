"""HTTP/1.1 requests to engines over kept connections, with only what a router needs.

Beside a general client it takes a quarter of the time on a core, and a caller sees whether the whole request was sent
and whether a byte of the answer was received: ``RequestProgress``.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from ssl import SSLContext, create_default_context
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec

IDLE_SECONDS = 2.0
"""A kept connection is used again for so long. uvicorn, vLLM's server, closes one after 5 s. A request that is on its
way meanwhile fails, and nobody knows whether the engine has it: no second try is made, so stay well below."""
IDLE_CONNECTIONS = 256
"""Bound on the kept connections to one engine."""
MAX_HEAD_BYTES = 256 << 10
MAX_ANSWER_BYTES = 256 << 20
"""Bound on an answer that is read as a whole."""
UNREAD_BYTES = 256 << 10
"""So much of an answer may wait for its reader; then nothing more is read from the connection."""


class HttpError(Exception):
    """An engine gave no answer, or not all of it: no connection, a broken one, silence, or no HTTP."""


class SilenceError(HttpError):
    """An engine sent nothing for too long."""


@dataclass
class RequestProgress:
    """How far one request has come. ``answered``: a byte of the answer was received."""

    answered: bool = False
    _asked: bool = False
    _connection: _Connection | None = field(default=None, repr=False)

    @property
    def asked(self) -> bool:
        """The whole request has left this process."""
        if self._connection is not None and not self._asked:
            self._asked = self._connection.flushed
        return self._asked

    def reset(self) -> None:
        """Nothing is sent yet."""
        self.answered, self._asked, self._connection = False, False, None

    def begin(self, connection: _Connection) -> None:
        self._connection = connection

    def end(self) -> None:
        """The connection serves another request, or closes."""
        self._asked = self.asked
        self._connection = None


class Answer:
    """The head of an engine's answer, and its body as it arrives. Close each answer."""

    def __init__(self, connection: _Connection, silence: float | None) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._connection: _Connection | None = connection
        self._silence = silence
        self._pieces: deque[bytes] = deque()
        self._unread = 0
        self._whole = False
        self._error: HttpError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._on_end: Callable[[], None] | None = None

    def on_end(self, call: Callable[[], None]) -> None:
        """Call it when the whole answer was received, or closed; it may be called more than once."""
        self._on_end = call
        if self._whole:
            call()

    @property
    def whole(self) -> bool:
        """All of it was received."""
        return self._whole

    @property
    def broken(self) -> str:
        """Why it broke off; empty where it did not."""
        return "" if self._error is None else str(self._error)

    @property
    def streamed(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def wait(self) -> None:
        """Wait for news. Raises HttpError after a silence."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = None if self._silence is None else loop.call_later(self._silence, self._silent)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _silent(self) -> None:
        self.fail(SilenceError(f"nothing was received for {self._silence:g} s"))

    async def head(self) -> None:
        while not self.status and self._error is None:
            await self.wait()
        if self._error is not None:
            raise self._error

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises HttpError."""
        while True:
            if self._pieces:
                piece = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
                self._pieces.clear()
                self._unread = 0
                if self._connection is not None:
                    self._connection.resume()
                yield piece
            elif self._error is not None:
                raise self._error
            elif self._whole:
                return
            else:
                await self.wait()

    async def body(self) -> bytes:
        """All of the body. Raises HttpError."""
        found, size = [], 0
        async for piece in self.pieces():
            found.append(piece)
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                self.close()
                raise HttpError(f"an answer of over {MAX_ANSWER_BYTES} bytes")
        return b"".join(found)

    def close(self) -> None:
        """Without the whole body: the connection closes, and the engine aborts the request."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        if self._on_end is not None:
            self._on_end()

    # --- called by the connection

    def feed(self, piece: bytes) -> bool:
        """True: enough waits for the reader."""
        self._pieces.append(piece)
        self._unread += len(piece)
        self.wake()
        return self._unread > UNREAD_BYTES

    def complete(self) -> None:
        self._whole, self._connection = True, None
        self.wake()
        if self._on_end is not None:
            self._on_end()

    def fail(self, error: HttpError) -> None:
        if not self._whole and self._error is None:
            self._error = error
            self.close()
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(asyncio.Protocol):
    """One connection. ``answer``: of the request that it serves; None: it is kept for the next one."""

    def __init__(self, host: _Host) -> None:
        self._host = host
        self.open = False
        self.idle_since = 0.0
        self._transport: Any = None
        self._parser: Any = None
        self._answer: Answer | None = None
        self._progress: RequestProgress | None = None
        self._name: list[bytes] = []
        self._head_bytes = 0
        self._paused = False

    @property
    def flushed(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    @property
    def left(self) -> bool:
        """The server has closed it, also where the event loop has not seen that yet."""
        if self._transport.is_closing():
            return True
        closed = select.poll()
        closed.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(closed.poll(0))

    def send(self, message: bytes, progress: RequestProgress, silence: float | None) -> Answer:
        progress.begin(self)
        self._progress, self._answer = progress, Answer(self, silence)
        self._parser, self._head_bytes = httptools.HttpResponseParser(self), 0
        self._transport.write(message)
        return self._answer

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        self.open = False
        self._release()
        self._transport.abort()

    def _release(self) -> Answer | None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.end()
        answer, self._answer = self._answer, None
        return answer

    # --- asyncio.Protocol

    def connection_made(self, transport: Any) -> None:
        self._transport, self.open = transport, True

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # nothing was asked
            self.abort()
            return
        if self._progress is not None:
            self._progress.answered = True
        answer = self._answer
        if not answer.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
            if not answer.status and self._head_bytes > MAX_HEAD_BYTES:
                raise HttpError(f"a head of over {MAX_HEAD_BYTES} bytes")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.fail(HttpError(f"no HTTP answer: {error}"))
        except HttpError as error:
            answer.fail(error)

    def eof_received(self) -> bool:
        return False  # the transport closes itself

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        self._host.forget(self)
        answer = self._release()
        if answer is not None:
            why = "the engine closed the connection" if error is None else f"{type(error).__name__}: {error}"
            answer.fail(HttpError(why))

    # --- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._answer is not None:
            self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._answer is not None and status >= 200:
            self._answer.status = status
            self._answer.wake()

    def on_body(self, piece: bytes) -> None:
        if self._answer is not None and self._answer.feed(piece) and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._answer is None or not self._answer.status:  # 100 Continue
            return
        keep = self._parser.should_keep_alive()
        answer = self._release()
        if answer is not None:
            answer.complete()
        self.resume()
        if keep and self.open:
            self._host.keep(self)
        else:
            self.open = False
            self._transport.close()


class _Host:
    """The kept connections to one engine's server."""

    def __init__(self, url: SplitResult, tls: SSLContext | None) -> None:
        self._address = url.hostname or "", url.port or (443 if tls else 80)
        self._tls = tls
        self.prefix = url.path.rstrip("/")
        self.name = url.netloc.rpartition("@")[2]
        self._idle: deque[_Connection] = deque()

    def kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.open and not connection.left and time.monotonic() - connection.idle_since < IDLE_SECONDS:
                return connection
            connection.abort()
        return None

    async def connect(self, timeout: float) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                _, connection = await loop.create_connection(lambda: _Connection(self), *self._address, ssl=self._tls)
        except TimeoutError:
            raise HttpError(f"no connection in {timeout:g} s") from None
        except OSError as error:
            raise HttpError(f"no connection: {error.strerror or error}") from None
        return connection

    def keep(self, connection: _Connection) -> None:
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        while len(self._idle) > IDLE_CONNECTIONS or time.monotonic() - self._idle[0].idle_since > IDLE_SECONDS:
            self._idle.popleft().abort()

    def forget(self, connection: _Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()


class HttpClient:
    """Sends requests to any engine. Use it in one event loop."""

    def __init__(self) -> None:
        self._hosts: dict[str, _Host] = {}
        self._tls: SSLContext | None = None

    def _host(self, base: str) -> _Host:
        host = self._hosts.get(base)
        if host is None:
            url = urlsplit(base)
            if url.scheme == "https" and self._tls is None:
                self._tls = create_default_context()
            host = self._hosts[base] = _Host(url, self._tls if url.scheme == "https" else None)
        return host

    async def send(
        self, method: str, base: str, path: str, *, body: Any = None, headers: Mapping[str, str] | None = None,
        progress: RequestProgress | None = None, connect: float, silence: float | None,
    ) -> Answer:  # fmt: skip
        """The head of an answer.

        Args:
            base: URL of the engine, ``http://HOST:PORT``.
            body: sent as JSON.
            connect: seconds that a connection may take.
            silence: seconds without a byte of the answer.

        Raises:
            HttpError: there is no answer.
        """
        host = self._host(base)
        progress = progress or RequestProgress()
        content = b"" if body is None else msgspec.json.encode(body)
        lines = [f"{method} {host.prefix}{path} HTTP/1.1", f"host: {host.name}", f"content-length: {len(content)}"]
        if body is not None:
            lines.append("content-type: application/json")
        for name, value in (headers or {}).items():
            if name != "content-type":
                lines.append(f"{name}: {value}")
        message = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content
        progress.reset()
        connection = host.kept() or await host.connect(connect)
        answer = connection.send(message, progress, silence)
        try:
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    def forget(self, base: str) -> None:
        """The engine is gone: close its kept connections."""
        host = self._hosts.pop(base, None)
        if host is not None:
            host.close()

    def close(self) -> None:
        for base in list(self._hosts):
            self.forget(base)
