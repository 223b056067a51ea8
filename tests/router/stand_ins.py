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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
PLAIN: dict[str, Any] = {"trust_env": False, "verify": False}
"""Of httpx's clients: without the certificates of the host, which take longer to load than a request."""
_CLIENTS = ThreadPoolExecutor(16)
PATIENT = LegTimeouts(connect=60.0, prefill=600.0, abandoned_prefill=600.0)
"""Of a router whose host may stand still for a while."""
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p-0", "kvferry": {"v": 1, "token": "00ff"}, "odd": [1, None]}


@contextmanager
def served(app: Starlette | App, listener: socket.socket | None = None) -> Iterator[str]:
    """The app behind a real socket, a new one or this one, in a thread; its URL."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
    begun, over = threading.Event(), threading.Event()

    async def router(app: App) -> None:
        await app.bind(sock=listener)
        await app.start()
        begun.set()
        while not over.is_set():
            await asyncio.sleep(0.005)
        with suppress(TimeoutError):
            await asyncio.wait_for(app.stop(), 10)

    async def engine(app: Starlette) -> None:
        how: dict[str, Any] = {"timeout_graceful_shutdown": 1, "timeout_keep_alive": 600}
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", **how))
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not over.is_set():
            if server.started:
                begun.set()
            await asyncio.sleep(0.005)
        server.should_exit = True
        await serving

    running = router(app) if isinstance(app, App) else engine(app)
    thread = threading.Thread(target=asyncio.run, args=(running,), daemon=True)
    thread.start()
    assert begun.wait(60)
    host, port = listener.getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        over.set()
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
        names = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
        routes = [Route(name, self._serve, methods=["POST"]) for name in names]
        self.health, self.metrics = lambda: 200, lambda: ""
        self.models: list[dict[str, Any]] = [{"id": "m"}]
        routes += [
            Route("/metrics", lambda _: Response(self.metrics())),
            Route("/health", lambda _: Response(status_code=self.health())),
            Route("/v1/models", lambda _: JSONResponse({"data": self.models})),
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

    async def until_gone(self, request: Request, go_on: threading.Event | None = None) -> bool:
        """Whether its client has gone away, before ``go_on`` is set."""

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.aborted.set()

        leaves = asyncio.ensure_future(gone())
        try:
            while not leaves.done() and not (go_on is not None and go_on.is_set()):
                await asyncio.wait({leaves}, timeout=None if go_on is None else 0.005)
            return leaves.done()
        finally:
            leaves.cancel()


def prefill_engine(
    delay: float = 0.0, status: int = 200, params: Any = PARAMS, go_on: threading.Event | None = None
) -> Engine:
    """``go_on``: what the answer waits for, unless the client goes away before."""

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        await asyncio.sleep(delay)
        if go_on is not None:
            await engine.until_gone(request, go_on)
        return JSONResponse({"kv_transfer_params": params, "choices": []}, status)

    engine = Engine(answer)
    return engine


def decode_engine(
    pieces: int = 3, gap: float = 0.0, before: float = 0.0, break_after: int | None = None,
    go_on: threading.Event | None = None,
) -> Engine:  # fmt: skip
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
        if before and body.get("max_tokens") != 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.until_gone(request), before)
        if body.get("stream"):
            return StreamingResponse(stream(request), media_type="text/event-stream")
        return JSONResponse({"text": "from D"}, headers={"x-from": "d"})

    engine = Engine(answer)
    return engine


def make_router(
    prefill: Sequence[str], decode: Sequence[str], timeouts: LegTimeouts = PATIENT, *, cool_down: float = 5.0,
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
        return self.request("POST", path, json=body, headers=headers)

    def begin(self, *body: Any, **headers: Any) -> Future[httpx.Response]:
        """``ask``, in a thread."""
        return _CLIENTS.submit(self.ask, *body, **headers)

    def request(self, method: str, path: str, **how: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=800, **PLAIN, **how)

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, content: Any, **how: Any) -> httpx.Response:
        """A completion whose body is these bytes."""
        return self.request("POST", COMPLETIONS, content=content, **how)

    def streaming(self, **more: Any) -> AbstractContextManager[httpx.Response]:
        body = {"prompt": "x", "stream": True} | more
        return httpx.stream("POST", self.url + COMPLETIONS, json=body, timeout=800, **PLAIN)

    @property
    def healthy(self) -> bool:
        try:
            return self.get("/health").status_code == 200
        except (httpx.NetworkError, httpx.RemoteProtocolError):  # it took the connection, and ended
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

    def decode_engines(self, *urls: str) -> None:
        """From now on, in this order."""
        engines = self.router.engines
        for engine in engines.of(Role.DECODE):
            engines.leave(engine)
        for url in urls:
            engines.add(url, Role.DECODE, EngineState.UP)

    def counts(self, name: str) -> dict[str, float]:
        """A counter of the router's, by its label."""
        found = self.router.metrics.registry.collect()
        (samples,) = (family.samples for family in found if family.name == f"kvferry_router_{name}")
        return {next(iter(one.labels.values())): one.value for one in samples if one.name.endswith("_total")}

    def idle(self) -> None:
        """Wait until no task is left, as of a lease that is released."""
        eventually(lambda: not self.router.tasks, "nothing is left")


@contextmanager
def routed(
    p: Any, d: Any, timeouts: LegTimeouts = PATIENT, *, cool_down: float = 5.0, serial: bool = False,
    always: bool = True, prefix_reads: bool = False, tracer: Any = None, **app: Any,
) -> Iterator[Front]:  # fmt: skip
    """A router before ``p`` and ``d``, each an ``Engine``, a ``RawEngine``, a URL, or several of these."""
    with ExitStack() as stack:
        urls = [
            [each if isinstance(each, str) else stack.enter_context(each.running())
             for each in (stands if isinstance(stands, list) else [stands])]
            for stands in (p, d)
        ]  # fmt: skip
        router = make_router(
            urls[0], urls[1], timeouts, cool_down=cool_down, serial=serial, always=always, prefix_reads=prefix_reads,
            tracer=tracer,
        )  # fmt: skip
        yield Front(stack.enter_context(served(App(router, **app))), router, *urls)


class Clients:
    """Four, with one request after the other, every second one streamed. ``lost``: answers that were not whole."""

    def __init__(self, front: Front) -> None:
        self.answered = 0
        self.lost: list[str] = []
        self._front, self._over = front, threading.Event()

    def go_on(self, number: int) -> None:
        while not self._over.is_set():
            number += 1
            stream = number % 2 == 0
            answer = self._front.ask({"prompt": f"{number}", "stream": stream})
            whole = answer.text.endswith("data: [DONE]\n\n") if stream else answer.json() == {"text": "from D"}
            if answer.status_code != 200 or not whole:
                self.lost.append(answer.text)
            self.answered += 1

    def more(self, requests: int) -> None:
        wanted = self.answered + requests
        eventually(lambda: self.answered >= wanted or self.lost, f"{requests} more requests are answered", 120)
        assert not self.lost

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [_CLIENTS.submit(self.go_on, 1000 * number) for number in range(4)]
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.result()


@contextmanager
def router_process(
    *arguments: str, descriptors: int = 0, environment: Mapping[str, str] = {}, stderr: int | None = None,
    program: Sequence[str] = ("-m", "kvferry.cli.main"),
) -> Iterator[tuple[Site, subprocess.Popen[bytes]]]:  # fmt: skip
    """``kvferry router`` with so many descriptors, and its process. It may not serve yet."""
    port = free_port()
    command = [sys.executable, *program, "router", "--port", str(port), *arguments]

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
        process.communicate(timeout=600)


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
        async with httpx.AsyncClient(timeout=800, **PLAIN) as client:
            task = asyncio.ensure_future(client.post(url + COMPLETIONS, json=body))
            assert await asyncio.to_thread(event.wait, 60)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(go())


# --- connections that break


BODIES = {"P": {"kv_transfer_params": PARAMS, "choices": []}, "D": {"text": "from D"}}


def answer_of(role: str) -> bytes:
    body = json.dumps(BODIES[role]).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@dataclass
class RawEngine:
    """Answers requests on kept connections. ``sent``: the bytes after which a connection ends, of its number and the
    request's number on it; None: a whole answer. ``seen``: both numbers of each request."""

    role: str
    sent: bytes | Callable[[int, int], bytes | None] | None = None
    end: str = "closed"
    seen: list[tuple[int, int]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            listener.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            for connection in range(1000):
                accepted, _ = listener.accept()
                threading.Thread(target=self._serve, args=(accepted, connection), daemon=True).start()

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
                last = self.sent(connection, number) if callable(self.sent) else self.sent
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
        if self.held and await self.engine.until_gone(request, self.go_on):
            self.gone += 1
            return Response()
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
            self.url, self.router = self.front.url, self.front.router
            self.ask, self.begin = self.front.ask, self.front.begin
            self.d_url, self.nothing_left = self.front.d[0], self.front.idle
            yield self

    def learn(self) -> None:
        """The first request to P, by which the router knows it."""
        assert self.ask({"prompt": "x"}).json() == {"text": "from D"}
        assert self.p.params[-1] == PREFILL_TAG and self.d.params[-1] == PUSH
        self.p.engine.arrived.clear()
        self.d.engine.arrived.clear()

    def held_by_both(self) -> Future[httpx.Response]:
        """A request that both engines have, and hold."""
        self.p.held = self.d.held = True
        client = self.begin({"prompt": "y"})
        assert self.p.engine.arrived.wait(60) and self.d.engine.arrived.wait(60)
        return client

    def decode_engines(self, *urls: str) -> None:
        self.front.decode_engines(*urls)
