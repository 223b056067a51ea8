"""The router under clients that are many, silent, large, or strange: honest ones are answered, and none is reset."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from kvferry.router import app as server
from kvferry.router.app import Limits
from kvferry.router.health import Checks
from tests.router.stand_ins import (
    COMPLETIONS,
    PLAIN,
    Engine,
    Site,
    decode_engine,
    prefill_engine,
    routed,
    router_process,
)
from tests.support.engines import ROUTER_PATIENCE
from tests.support.served import eventually


def silent(site: Site, count: int, stack: ExitStack, sent: bytes = b"") -> list[socket.socket]:
    return [stack.enter_context(site.raw(sent)) for _ in range(count)]


def closed(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def at_the_same_time(site: Site, count: int, full: threading.Event) -> list[int]:
    """Their statuses. The first 503 sets ``full``."""
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=count), **PLAIN) as client:

        async def ask(number: int) -> int:
            status = (await client.post(site.url + COMPLETIONS, json={"prompt": f"{number}"})).status_code
            if status == 503:
                full.set()
            return status

        return await asyncio.gather(*map(ask, range(count)))


def test_more_requests_than_descriptors_get_503_and_none_is_reset() -> None:
    """The limit was low when it started, and is raised as far as it goes: to 600, which is 68 requests."""
    full = threading.Event()

    async def answer(request: Request, body: dict[str, Any]) -> JSONResponse:
        while not full.is_set():
            await asyncio.sleep(0.05)
        return JSONResponse({"text": "from D"})

    d = Engine(answer)
    with d.running() as d_url, router_process("--decode", d_url, *ROUTER_PATIENCE, descriptors=600) as (site, process):
        eventually(lambda: site.healthy, "the router answers")
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3] == "600"
        found = asyncio.run(at_the_same_time(site, 130, full))
        assert set(found) == {200, 503} and found.count(200) >= 60
        assert set(asyncio.run(at_the_same_time(site, 30, full))) == {200}


def test_a_router_that_is_ended_ends_its_streams() -> None:
    go_on = threading.Event()
    d = decode_engine(go_on=go_on)
    with d.running() as d_url, router_process("--decode", d_url) as (site, process):
        eventually(lambda: site.healthy, "the router answers")
        with site.streaming() as response:
            lines = response.iter_lines()
            assert next(lines) == 'data: {"i": 0}'
            process.terminate()
            eventually(lambda: not site.healthy, "no new connections are taken")
            go_on.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_silent_connections_end_soon_where_half_of_the_descriptors_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 1000.0)
    with routed(prefill_engine(), decode_engine()) as front, ExitStack() as stack:
        before = silent(front, 1, stack)
        assert front.ask({"prompt": "x"}).status_code == 200, "it has been accepted, too"
        monkeypatch.setattr(resource, "getrlimit", lambda _: (2, 2))
        found = silent(front, 3, stack)
        eventually(lambda: all(map(closed, found)), "they are closed")
        assert front.ask({"prompt": "x"}).status_code == 200 and not closed(before[0])


def test_silent_connections_end_and_honest_ones_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    with routed(prefill_engine(), decode_engine()) as front, ExitStack() as stack:
        found = silent(front, 3, stack) + silent(front, 3, stack, b"POST /v1/completions HTTP/1.1\r\nHost:")
        assert front.ask({"prompt": "x"}).status_code == 200
        eventually(lambda: all(map(closed, found)), "all are closed")


def test_the_routers_own_fault_is_no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is down, or passed over."""
    p, d = prefill_engine(), decode_engine()
    with routed(p, d, cool_down=600, checks=Checks(0.1, failures=1, timeout=60)) as front:
        assert front.ask({"prompt": "x"}).status_code == 200

        tries = list[int]()

        async def none_left(*_: Any, **__: Any) -> Any:
            tries.append(1)
            raise OSError(24, "Too many open files")

        session = front.router.http.session
        assert session is not None
        monkeypatch.setattr(session.connector, "connect", none_left)
        refused = front.ask({"prompt": "y"})
        assert refused.status_code == 503 and "EMFILE" in refused.json()["error"]["message"]
        eventually(lambda: len(tries) > 8, "several health checks")
        assert front.get("/health").status_code == 200
        assert all(engine.usable(front.router.clock()) for engine in front.router.engines)
        monkeypatch.undo()
        assert front.ask({"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("given", ["i" * 60_000, "\u0085 \u009b31m", "a\tb", "\u00e9"])
def test_a_log_line_is_short_and_plain_whatever_the_id(given: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with routed(prefill_engine(status=503), decode_engine()) as front:
        for raw in (given.encode(), given.encode("latin-1")):
            headers = {b"x-request-id": raw}
            answer = front.post(b'{"prompt": "x"}', headers=headers)
            assert answer.status_code == 200 and answer.headers.get("x-request-id")
    lines = [line for line in caplog.messages if "prefill" in line]
    assert len(lines) == 4 and all(len(line) < 300 and line.isascii() and line.isprintable() for line in lines)


def test_a_large_body_takes_no_more_than_four_times_its_size() -> None:
    size = 48 << 20
    contents = [b'{"prompt": "' + b"\\n" * (size // 2) + b'"}', b'{"prompt": [' + b"[]," * (size // 3) + b"[]]}"]

    with decode_engine().running() as d_url, router_process("--decode", d_url) as (site, process):

        def peak_kib() -> int:
            return int(Path(f"/proc/{process.pid}/status").read_text().split("VmHWM:")[1].split()[0])

        eventually(lambda: site.healthy, "the router answers")
        site.ask({"prompt": "x"})
        before = peak_kib()
        assert [site.post(content).status_code for content in contents] == [200, 400]
        assert peak_kib() - before < 4 * size >> 10


def test_a_client_that_takes_nothing_of_its_answer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STALL_SECONDS", 0.5)

    async def endless(request: Request) -> AsyncIterator[bytes]:
        while not await request.is_disconnected():
            yield b"data: " + b"x" * 60_000 + b"\n\n"

    async def stream(request: Request, body: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(endless(request), media_type="text/event-stream")

    d = Engine(stream)
    with routed([], d) as front, ExitStack() as stack:
        content = b'{"prompt": "x", "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content)
        silent(front, 1, stack, head + content)
        assert d.arrived.wait(600)
        eventually(lambda: front.router.metrics.in_flight == 0, "it is given up", 60)


def test_clients_that_do_not_send_their_body_take_no_place() -> None:
    limits = Limits(requests=2)
    with routed(prefill_engine(), decode_engine(), limits=limits) as front, ExitStack() as stack:
        silent(front, 5, stack, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        for _ in range(5):
            assert front.ask({"prompt": "x"}).status_code == 200
