"""Clients that leave, lie or stall, over raw sockets; and honest ones beside them.

Each kind of ``KINDS`` is one connection. It ends by itself, or when ``over`` is set; what the server does with it is
not looked at, but it must not harm anybody else.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

PATH = b"/v1/completions"
BODY = {"model": "model", "prompt": [5, 6, 7] * 20, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
DEEP = 100_000
"""Brackets of a body that is JSON, but not one that a decoder takes."""


@dataclass
class Client:
    """One connection. ``over``: a client that stalls goes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    over: asyncio.Event
    rng: random.Random

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def read(self, most: int = 1 << 30) -> None:
        """Until the server closes, or so many bytes, or it is over."""
        reading = asyncio.ensure_future(self._read(most))
        ended = asyncio.ensure_future(self.over.wait())
        await asyncio.wait({reading, ended}, return_when=asyncio.FIRST_COMPLETED)
        for task in (reading, ended):
            task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await task

    async def _read(self, most: int) -> None:
        while most > 0 and (data := await self.reader.read(min(most, 1 << 16))):
            most -= len(data)

    def reset(self) -> None:
        """The connection ends with RST, as that of a client that is killed."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def head(length: int | str | None, *more: bytes, path: bytes = PATH) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path, b"Host: x", b"Content-Type: application/json", *more]
    if length is not None:
        lines.append(b"Content-Length: %s" % str(length).encode())
    return b"\r\n".join(lines) + b"\r\n\r\n"


def request(**more: Any) -> bytes:
    content = json.dumps(BODY | more).encode()
    return head(len(content)) + content


Kind = Callable[[Client], Awaitable[None]]


def sends(name: str, data: Callable[[random.Random], bytes], most: int = 1 << 30, *, half_closes: bool = False) -> Kind:
    """Sends this, then reads so many bytes and goes."""

    async def kind(client: Client) -> None:
        with suppress(OSError):
            await client.send(data(client.rng))
            if half_closes:
                client.writer.write_eof()
        await client.read(most)

    kind.__name__ = name
    return kind


def in_its_request(rng: random.Random) -> bytes:
    data = request()
    return data[: rng.randrange(1, len(data))]


def no_json(rng: random.Random) -> bytes:
    deep = (b"[" * DEEP, b'{"a":' * DEEP)
    content = rng.choice((b'{"prompt": ', b"[]", b"\xff\xfe\x00", b"", *deep, b'"\\ud83d"'))
    return head(len(content)) + content


def much(rng: random.Random) -> bytes:
    """A body of 1 MiB that is JSON of many small values: decoded, it has many times the bytes."""
    content = b'{"model": "model", "prompt": [' + b"[]," * ((1 << 20) // 3) + b"[]]}"
    return head(len(content)) + content


def another_length(rng: random.Random) -> bytes:
    more = (b"Transfer-Encoding: chunked",) if rng.random() < 0.3 else ()
    return head(rng.choice(("-5", "x", "+3", "1, 2", "0x10", 3)), *more) + b"zz\r\n" + request()


def no_http(rng: random.Random) -> bytes:
    return rng.choice((b"\x16\x03\x01\x02\x00\x01\x00", b"\0" * 4096, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))


def any_stream(rng: random.Random) -> bytes:
    return request(stream=rng.random() < 0.5)


async def is_killed(client: Client) -> None:
    await client.send(any_stream(client.rng))
    await asyncio.sleep(client.rng.uniform(0, 0.1))
    client.reset()


async def has_a_slow_head(client: Client) -> None:
    with suppress(OSError):
        for byte in request()[:60]:
            if client.over.is_set():
                return
            await client.send(bytes([byte]))
            with suppress(TimeoutError):
                await asyncio.wait_for(client.over.wait(), 0.3)


async def reads_nothing(client: Client) -> None:
    await client.send(request(stream=True, max_tokens=64))
    await client.over.wait()


KINDS: tuple[Kind, ...] = (
    sends("leaves_at_once", lambda rng: request(), 0),
    sends("leaves_in_its_request", in_its_request, 0),
    sends("leaves_in_its_answer", lambda rng: request(stream=True, max_tokens=64), 30),
    is_killed,
    sends("half_closes", any_stream, half_closes=True),
    sends("half_closes_in_its_request", lambda rng: request()[:-5], half_closes=True),
    sends("sends_no_json", no_json, 1),
    sends("sends_much", much, 1),
    sends("lies_about_its_length", another_length, 1),
    sends("speaks_no_http", no_http, 1),
    sends("announces_much", lambda rng: head(rng.choice((1 << 40, "9" * 30))) + b" " * (1 << 20), 1),
    sends("has_a_long_head", lambda rng: b"GET / HTTP/1.1\r\n" + b"X-A: " + b"a" * (1 << 20), 1),
    sends("is_silent", lambda rng: b""),
    has_a_slow_head,
    sends("has_a_slow_body", lambda rng: request()[:-20]),
    reads_nothing,
)
STALLING = KINDS[-6:]
"""A server may let these wait, for a while."""


@dataclass
class Crowd:
    """``count`` bad clients of one server, of all kinds in turn, all at the same time but for what the sockets' queue
    takes. ``refused``: why some could not connect; ``ended``: those that have ended by themselves, by kind."""

    host: str
    port: int
    count: int
    seed: int
    refused: list[str] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _connecting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(64))

    async def run(self) -> None:
        """Until all of them have ended; those that stall end when ``over`` is set."""
        await asyncio.gather(*(self._one(number) for number in range(self.count)))

    async def until_only_stalling_are_left(self) -> None:
        others = Counter(kind.__name__ for kind in map(self._kind, range(self.count)) if kind not in STALLING)
        while any(self.ended.get(name, 0) < count for name, count in others.items()):
            await asyncio.sleep(0.05)

    @staticmethod
    def _kind(number: int) -> Kind:
        return KINDS[number % len(KINDS)]

    async def _one(self, number: int) -> None:
        kind = self._kind(number)
        try:
            async with self._connecting:
                reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 12)
        except OSError as error:
            self.refused.append(repr(error))
        else:
            try:
                with suppress(OSError):
                    await kind(Client(reader, writer, self.over, random.Random(self.seed + number)))
            finally:
                writer.close()
        self.ended[kind.__name__] = self.ended.get(kind.__name__, 0) + 1


async def honest(host: str, port: int, body: dict[str, Any]) -> bytes:
    """The answer to one request on a connection of its own. Raises OSError, ValueError: none, or a bad one."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        content = json.dumps(body).encode()
        writer.write(head(len(content), b"Connection: close") + content)
        answer = await reader.read()
        while piece := await reader.read():
            answer += piece
    finally:
        writer.close()
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise ValueError(f"an honest request got {answer[:300]!r}")
    return answer
