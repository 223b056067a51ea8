"""The router under clients that are many, silent, large, or strange: honest ones are answered, and none is reset."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from kvferry.router import app as server
from kvferry.router import command
from kvferry.router.app import App, Limits
from kvferry.router.engines import EngineState, Role
from kvferry.router.health import Checks
from tests.router.stand_ins import Engine, ask, decode_engine, make_router, prefill_engine, routed, served
from tests.support.engines import free_port, python_path
from tests.support.served import eventually


@contextmanager
def router_process(d_url: str, descriptors: int | None = None) -> Iterator[tuple[str, int]]:
    """The command, with so many descriptors; its URL and process id."""
    port = free_port()
    arguments = [sys.executable, "-m", "kvferry.cli.main", "router", "--port", str(port), "--decode", d_url]

    def bound() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(descriptors, 64), descriptors))

    process = subprocess.Popen(arguments, env=os.environ | {"PYTHONPATH": python_path()}, preexec_fn=bound)  # noqa: PLW1509
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: answers(url), "the router answers")
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health", trust_env=False).status_code == 200
    except httpx.ConnectError:
        return False


def silent(url: str, count: int, stack: ExitStack, sent: bytes = b"") -> list[socket.socket]:
    port = int(url.rpartition(":")[2])
    found = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]
    for each in found:
        each.sendall(sent)
    return found


def closed(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def at_the_same_time(url: str, count: int) -> list[int]:
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(trust_env=False, timeout=300, limits=limits) as client:
        asked = [client.post(url + "/v1/completions", json={"prompt": f"{n}"}) for n in range(count)]
        return [answer.status_code for answer in await asyncio.gather(*asked)]


def test_more_requests_than_descriptors_get_503_and_none_is_reset() -> None:
    """The limit was low when it started, and is raised as far as it goes."""
    d = decode_engine(before=0.5)
    with served(d.app) as d_url, router_process(d_url, 600) as (url, pid):
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3] == "600"
        found = asyncio.run(at_the_same_time(url, 200))
        assert set(found) == {200, 503} and found.count(200) >= 60
        assert set(asyncio.run(at_the_same_time(url, 30))) == {200}


def test_a_router_that_is_ended_ends_its_streams() -> None:
    go_on = threading.Event()
    d = decode_engine(go_on=go_on)
    with served(d.app) as d_url, router_process(d_url) as (url, pid):
        body = {"prompt": "x", "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, trust_env=False, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines) == 'data: {"i": 0}'
            os.kill(pid, signal.SIGTERM)
            eventually(lambda: not answers(url), "no new connections are taken")
            go_on.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_limits_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: given.append(pair))
    for before, served_requests in (
        ((1024, 4096), 768),
        ((1024, 1 << 20), 4096),
        ((1024, -1), 4096),
        ((1 << 20, 1 << 20), 4096),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, before=before: before)
        limits = command._limits(4096, 1)
        soft = given[-1][0]
        assert limits.requests == served_requests and limits.idle >= served_requests
        assert 3 * limits.requests + limits.idle + command.OWN_DESCRIPTORS <= soft


def test_silent_connections_end_and_honest_ones_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(server, "TICK_SECONDS", 0.1)
    with routed(prefill_engine(), decode_engine()) as url, ExitStack() as stack:
        found = silent(url, 3, stack) + silent(url, 3, stack, b"POST /v1/completions HTTP/1.1\r\nHost:")
        assert ask(url, {"prompt": "x"}).status_code == 200
        eventually(lambda: all(map(closed, found)), "all are closed")


def test_a_router_that_stood_still_closes_no_connection_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(server, "TICK_SECONDS", 0.1)

    async def go() -> bytes:
        app = App(make_router([], []))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await app.bind(sock=listener)
            await app.start()
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            while not app._idle:
                await asyncio.sleep(0)
            time.sleep(1.5)
            for _ in range(10):
                await asyncio.sleep(0)  # the router runs again before the client does
            writer.write(b"GET /router/status HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = await reader.read(12)
            writer.close()
            await app.stop()
            return answer

    assert asyncio.run(go()) == b"HTTP/1.1 200"


def test_of_many_silent_connections_the_oldest_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TICK_SECONDS", 0.1)
    go_on = threading.Event()
    p, d = prefill_engine(), decode_engine(go_on=go_on)
    with routed(p, d, limits=Limits(idle=5)) as url, ExitStack() as stack:
        body = {"prompt": "x", "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, trust_env=False, timeout=60) as response:
            lines = response.iter_lines()
            assert next(lines) == 'data: {"i": 0}'
            found = silent(url, 20, stack)
            eventually(lambda: sum(map(closed, found)) == 15, "all but five are closed")
            assert all(map(closed, found[:15]))
            go_on.set()
            assert [line for line in lines if line][-1] == "data: [DONE]", "one with a request is not silent"


def test_the_routers_own_fault_is_no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is down, or passed over, and ``/health`` says what is missing."""
    p, d = prefill_engine(), decode_engine()
    with served(p.app) as p_url, served(d.app) as d_url:
        router = make_router([p_url], [d_url], cool_down=600)
        with served(App(router, checks=Checks(0.1, failures=1, timeout=60))) as url:
            assert ask(url, {"prompt": "x"}).status_code == 200

            async def none_left(*_: Any, **__: Any) -> Any:
                raise OSError(24, "Too many open files")

            session = router.http._session
            assert session is not None
            monkeypatch.setattr(session._connector, "connect", none_left)
            refused = ask(url, {"prompt": "y"})
            assert refused.status_code == 503 and "EMFILE" in refused.json()["error"]["message"]
            time.sleep(0.5)  # several health checks
            health = httpx.get(url + "/health", trust_env=False)
            assert health.status_code == 200 and "EMFILE" in health.json()["router"]
            assert all(engine.usable(router.clock()) for engine in router.engines)
            monkeypatch.undo()
            assert ask(url, {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("given", ["i" * 60_000, "\u0085 \u009b31m", "a\tb", "\u00e9"])
def test_a_log_line_is_short_and_plain_whatever_the_id(given: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with routed(prefill_engine(status=503), decode_engine()) as url:
        for raw in (given.encode(), given.encode("latin-1")):
            headers = {b"x-request-id": raw}
            answer = httpx.post(url + "/v1/completions", json={"prompt": "x"}, headers=headers, trust_env=False)
            assert answer.status_code == 200 and answer.headers.get("x-request-id")
    lines = [line for line in caplog.messages if "prefill" in line]
    assert len(lines) == 4 and all(len(line) < 300 and line.isascii() and line.isprintable() for line in lines)


@pytest.mark.parametrize("after", ["head", "part", "whole"])
def test_a_client_that_closes_its_half_leaves_no_traceback(after: str, caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"prompt": "x", "stream": true}'
    sent = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    sent += {"head": b"", "part": body[:9], "whole": body}[after]
    p, d = prefill_engine(), decode_engine(pieces=100, gap=0.01)
    with routed(p, d) as url, ExitStack() as stack:
        for connection in silent(url, 3, stack, sent):
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(60)
            while connection.recv(1 << 16):
                pass
        assert ask(url, {"prompt": "x"}).status_code == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR" or record.exc_info]


def test_a_large_body_takes_no_more_than_four_times_its_size() -> None:
    size = 48 << 20
    contents = [b'{"prompt": "' + b"\\n" * (size // 2) + b'"}', b'{"prompt": [' + b"[]," * (size // 3) + b"[]]}"]

    def peak_kib() -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])

    with served(decode_engine().app) as d_url, router_process(d_url) as (url, pid):
        ask(url, {"prompt": "x"})
        before = peak_kib()
        found = [httpx.post(url + "/v1/completions", content=one, trust_env=False, timeout=300) for one in contents]
        assert [answer.status_code for answer in found] == [200, 400]
        assert peak_kib() - before < 4 * size >> 10


def test_a_client_that_takes_nothing_of_its_answer_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STALL_SECONDS", 0.5)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"data: " + b"x" * 60_000 + b"\n\n"

    async def stream(request: Request, body: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(endless(), media_type="text/event-stream")

    router = make_router([], [])
    with served(Engine(stream).app) as d_url, served(App(router)) as url, ExitStack() as stack:
        router.engines.add(d_url, Role.DECODE, EngineState.UP)
        content = b'{"prompt": "x", "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content)
        silent(url, 1, stack, head + content)
        eventually(lambda: router.metrics.in_flight == 1, "it is answered")
        eventually(lambda: router.metrics.in_flight == 0, "it is given up", 60)


def test_clients_that_do_not_send_their_body_take_no_place() -> None:
    limits = Limits(requests=2, idle=2)
    with routed(prefill_engine(), decode_engine(), limits=limits) as url, ExitStack() as stack:
        silent(url, 5, stack, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        for _ in range(5):
            assert ask(url, {"prompt": "x"}).status_code == 200
