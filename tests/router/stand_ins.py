"""Real HTTP servers that stand in for engines, the router in front of them, and its clients."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.router.app import App
from kvferry.router.engines import EnginePool, EngineState, Role
from kvferry.router.legs import LegTimeouts
from kvferry.router.request_bodies import PREFILL_TAG
from kvferry.router.router import Router
from tests.support.engines import free_port, python_path
from tests.support.served import eventually

COMPLETIONS = "/v1/completions"
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p-0", "kvferry": {"v": 1, "token": "00ff"}, "odd": [1, None]}


@contextmanager
def served(app: Starlette | App, listener: socket.socket | None = None) -> Iterator[str]:
    """The app behind a real socket, a new one or this one, in a thread; its URL."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
    if isinstance(app, App):
        with _router_served(app, listener) as url:
            yield url
        return
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    host, port = listener.getsockname()
    url = f"http://{host}:{port}"
    while not server.started:
        time.sleep(0.005)
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


@contextmanager
def _router_served(app: App, listener: socket.socket) -> Iterator[str]:
    begun = threading.Event()

    async def serve() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(over.set))
        await app.bind(sock=listener)
        await app.start()
        begun.set()
        await over.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(app.stop(), 10)

    stop: list[Callable[[], Any]] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert begun.wait(60)
    host, port = listener.getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        stop[0]()
        thread.join(20)
        listener.close()


class Engine:
    """Records requests; ``answer`` makes the response of one. ``refused``: bodies that are no JSON object, and their
    content types."""

    def __init__(self, answer: Callable[[Request, dict[str, Any]], Any]) -> None:
        self.seen: list[tuple[dict[str, Any], dict[str, str], str]] = []
        self.refused: list[tuple[bytes, str | None]] = []
        self.arrived, self.aborted = threading.Event(), threading.Event()
        self._answer = answer
        names = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
        routes = [Route(name, self._serve, methods=["POST"]) for name in names]
        self.health = lambda: 200
        routes += [
            Route("/health", lambda _: Response(status_code=self.health())),
            Route("/v1/models", lambda _: JSONResponse({"data": ["m"]})),
        ]
        self.app = Starlette(routes=routes)

    def running(self) -> AbstractContextManager[str]:
        return served(self.app)

    async def _serve(self, request: Request) -> Response:
        try:
            body = await request.json()
            assert isinstance(body, dict)
        except (ValueError, RecursionError, AssertionError):
            self.refused.append((await request.body(), request.headers.get("content-type")))
            return JSONResponse({"error": {"message": "no JSON object"}}, 400)
        self.seen.append((body, dict(request.headers), request.url.path))
        self.arrived.set()
        return await self._answer(request, body)

    async def until_gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.aborted.set()


def prefill_engine(
    delay: float = 0.0, status: int = 200, params: Any = PARAMS, go_on: threading.Event | None = None
) -> Engine:
    """``go_on``: what the answer waits for, unless the client goes away before."""

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        if delay or go_on is not None:
            gone = asyncio.ensure_future(engine.until_gone(request))
            deadline = time.monotonic() + delay
            while not gone.done() and not (time.monotonic() > deadline if go_on is None else go_on.is_set()):
                await asyncio.sleep(0.005)
            gone.cancel()
        return JSONResponse({"kv_transfer_params": params, "choices": []}, status)

    engine = Engine(answer)
    return engine


def decode_engine(
    pieces: int = 3,
    gap: float = 0.0,
    before: float = 0.0,
    break_after: int | None = None,
    go_on: threading.Event | None = None,
) -> Engine:
    """``go_on``: what each piece but the first waits for."""

    async def stream(request: Request) -> AsyncIterator[bytes]:
        try:
            for i in range(pieces):
                if i == break_after:
                    raise ConnectionError("planted")
                yield f'data: {{"i": {i}}}\n\n'.encode()
                await asyncio.sleep(gap)
                if go_on is not None and not await asyncio.to_thread(go_on.wait, 60):
                    raise TimeoutError("the client has not got the first piece")
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            engine.aborted.set()
            raise

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        if before:
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.until_gone(request), before)
        if body.get("stream"):
            return StreamingResponse(stream(request), media_type="text/event-stream")
        return JSONResponse({"text": "from D"}, headers={"x-from": "d"})

    engine = Engine(answer)
    return engine


def make_router(
    prefill: Sequence[str], decode: Sequence[str], timeouts: LegTimeouts | None = None, *, cool_down: float = 5.0,
    **options: Any,
) -> Router:  # fmt: skip
    return Router(EnginePool(prefill, decode, cool_down=cool_down), timeouts, **options)


@dataclass(frozen=True)
class Site:
    """A router's HTTP server, and what its clients do."""

    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> httpx.Response:
        return ask(self.url, body, path, **headers)

    def request(self, method: str, path: str, **how: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, trust_env=False, timeout=800, **how)

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, content: Any, **how: Any) -> httpx.Response:
        """A completion whose body is these bytes."""
        return self.request("POST", COMPLETIONS, content=content, **how)

    def streaming(self, **more: Any) -> AbstractContextManager[httpx.Response]:
        body = {"prompt": "x", "stream": True} | more
        return httpx.stream("POST", self.url + COMPLETIONS, json=body, trust_env=False, timeout=800)

    @property
    def healthy(self) -> bool:
        try:
            return self.get("/health").status_code == 200
        except httpx.ConnectError:
            return False

    def raw(self, sent: bytes = b"") -> socket.socket:
        """A connection on which these bytes are sent."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(sent)
        return connection


@dataclass(frozen=True)
class Front(Site):
    """A router that is served in this process, and the URLs of its engines."""

    router: Router
    p: list[str]
    d: list[str]

    def idle(self) -> None:
        """Wait until no task is left, as of a lease that is released."""
        eventually(lambda: not self.router.tasks, "nothing is left")


@contextmanager
def routed(
    p: Any, d: Any, timeouts: LegTimeouts | None = None, *, cool_down: float = 5.0, serial: bool = False,
    tracer: Any = None, **app: Any,
) -> Iterator[Front]:  # fmt: skip
    """A router before ``p`` and ``d``, each an ``Engine``, a ``RawEngine``, a URL, or several of these."""
    with ExitStack() as stack:
        urls = [
            [each if isinstance(each, str) else stack.enter_context(each.running())
             for each in (stands if isinstance(stands, list) else [stands])]
            for stands in (p, d)
        ]  # fmt: skip
        router = make_router(urls[0], urls[1], timeouts, cool_down=cool_down, serial=serial, tracer=tracer)
        yield Front(stack.enter_context(served(App(router, **app))), router, *urls)


@contextmanager
def router_process(
    *arguments: str, descriptors: int = 0, environment: Mapping[str, str] = {}, stderr: int | None = None
) -> Iterator[tuple[Site, subprocess.Popen[bytes]]]:
    """``kvferry router`` with so many descriptors, and its process. It may not serve yet."""
    port = free_port()
    command = [sys.executable, "-m", "kvferry.cli.main", "router", "--port", str(port), *arguments]

    def bound() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(descriptors, 64), descriptors))

    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": python_path(), **environment}, stderr=stderr,
        preexec_fn=bound,  # noqa: PLW1509
    )  # fmt: skip
    try:
        yield Site(f"http://127.0.0.1:{port}"), process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def ask(url: str, body: dict[str, Any], path: str = COMPLETIONS, **headers: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=800) as client:
        return client.post(url + path, json=body, headers=headers)


_TAKEN: list[socket.socket] = []


def closed_port() -> int:
    """A port that refuses connections until the process ends: it is bound, so no other listener gets it."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    _TAKEN.append(bound)
    return int(bound.getsockname()[1])


def gone() -> str:
    return f"http://127.0.0.1:{closed_port()}"


def leave_after(url: str, body: dict[str, Any], event: threading.Event) -> None:
    """Send a request and close the connection once ``event`` is set."""

    async def go() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=800) as client:
            task = asyncio.ensure_future(client.post(url + COMPLETIONS, json=body))
            assert await asyncio.to_thread(event.wait, 60)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(go())


class Client(threading.Thread):
    """A request whose answer is waited for by ``result``."""

    def __init__(self, url: str, body: dict[str, Any], **headers: str) -> None:
        super().__init__(daemon=True)
        self._ask = lambda: ask(url, body, **headers)
        self.start()

    def run(self) -> None:
        self.answer = self._ask()

    def result(self) -> Any:
        self.join(60)
        return self.answer


# --- connections that break


BODIES = {"P": {"kv_transfer_params": PARAMS, "choices": []}, "D": {"text": "from D"}}


def answer_of(role: str) -> bytes:
    body = json.dumps(BODIES[role]).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@dataclass
class RawEngine:
    """Answers requests on kept connections. ``breaks``: for a connection's number and the request's number on it, the
    bytes after which the connection ends; None: a whole answer. ``seen``: both numbers of each request. ``closed``: a
    connection has ended."""

    role: str
    breaks: Callable[[int, int], bytes | None]
    end: str = "closed"
    seen: list[tuple[int, int]] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[str]:
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            listener.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            for connection in range(1000):
                accepted, _ = listener.accept()
                threading.Thread(target=self._run, args=(accepted, connection), daemon=True).start()

    def _run(self, accepted: socket.socket, connection: int) -> None:
        self._serve(accepted, connection)
        self.closed.set()

    def _serve(self, accepted: socket.socket, connection: int) -> None:
        with accepted, accepted.makefile("rb") as lines, suppress(OSError):
            number = 0
            while True:
                length = 0
                while (line := lines.readline()).strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                if not line:
                    return
                lines.read(length)
                self.seen.append((connection, number))
                last = self.breaks(connection, number)
                accepted.sendall(answer_of(self.role) if last is None else last)
                if last is not None:
                    if self.end == "reset":
                        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                number += 1


# --- both legs at once


PLACE = {"remote_engine_id": "p-0", "remote_host": "10.0.0.1", "remote_port": 5600, "remote_key": "0a1b2c3d4e5f"}
PUSH = {"do_remote_prefill": True, "transfer_mode": "push", **PLACE, "remote_num_tokens": 3, "kvferry": {"token": "00"}}


class Scripted:
    """An engine whose requests wait for ``go_on``, once ``held``, and then get ``answer(body)``. ``gone``: clients that
    left while they waited."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.held = answer, False
        self.go_on = threading.Event()
        self.gone = 0
        self.engine = Engine(self._serve)

    async def _serve(self, request: Request, body: dict[str, Any]) -> Response:
        if self.held:
            gone = asyncio.ensure_future(self.engine.until_gone(request))
            while not self.go_on.is_set():
                if gone.done():
                    self.gone += 1
                    return Response()
                await asyncio.sleep(0.005)
            gone.cancel()
        answer: Response = self.answer(body)
        return answer

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for body, _, _ in self.engine.seen]

    @property
    def params(self) -> list[dict[str, Any] | None]:
        return [body.get("kv_transfer_params") for body in self.bodies]


def answer_of_p(params: Any = PUSH) -> JSONResponse:
    return JSONResponse({"id": "cmpl-p", "choices": [], "kv_transfer_params": params})


def stream_of_d(*chunks: tuple[str, list[int]], finish: str = "length") -> Response:
    """Of a completion whose chunks have these texts and token ids."""

    def lines() -> Iterator[bytes]:
        for number, (text, ids) in enumerate(chunks):
            choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": None, "prompt_token_ids": None}
            choice |= {} if number else {"prompt_token_ids": [1, 2, 3]}
            choice |= {"finish_reason": finish} if number == len(chunks) - 1 else {}
            event = {"id": "cmpl-d", "created": 2, "object": "text_completion", "model": "m", "choices": [choice]}
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


class Served:
    """P, D and a router before them."""

    front: Front

    def __init__(self, **options: Any) -> None:
        self.p = Scripted(lambda body: answer_of_p())
        self.d = Scripted(lambda body: JSONResponse({"text": "from D"}))
        self.options = options

    @contextmanager
    def running(self) -> Iterator[Served]:
        with routed(self.p.engine, self.d.engine, cool_down=0.0, **self.options) as self.front:
            self.url, self.router, self.ask = self.front.url, self.front.router, self.front.ask
            self.d_url, self.nothing_left = self.front.d[0], self.front.idle
            yield self

    def learn(self) -> None:
        """The first request to P, by which the router knows it."""
        assert self.ask({"prompt": "x"}).json() == {"text": "from D"}
        assert self.p.params[-1] == PREFILL_TAG and self.d.params[-1] == PUSH
        self.p.engine.arrived.clear()
        self.d.engine.arrived.clear()

    def decode_engines(self, *urls: str) -> None:
        """From now on, in this order."""
        engines = self.router.engines
        for engine in engines.of(Role.DECODE):
            engines.move(engine, EngineState.LEAVING)
        for url in urls:
            engines.add(url, Role.DECODE, EngineState.UP)
