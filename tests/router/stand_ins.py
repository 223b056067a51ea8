"""Real HTTP servers that stand in for engines, the router in front of them, and its clients."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.router.app import App
from kvferry.router.engines import EnginePool
from kvferry.router.legs import LegTimeouts
from kvferry.router.router import Router

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


@contextmanager
def routed(p: Engine, d: Engine, **app: Any) -> Iterator[str]:
    with (
        served(p.app) as p_url,
        served(d.app) as d_url,
        served(App(make_router([p_url], [d_url]), **app)) as url,
    ):
        yield url


def ask(url: str, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=800) as client:
        return client.post(url + path, json=body, headers=headers)


@contextmanager
def streaming(url: str) -> Iterator[httpx.Response]:
    body = {"prompt": "x", "stream": True}
    with (
        httpx.Client(trust_env=False, timeout=800) as client,
        client.stream("POST", url + "/v1/completions", json=body) as response,
    ):
        yield response


_TAKEN: list[socket.socket] = []


def closed_port() -> int:
    """A port that refuses connections until the process ends: it is bound, so no other listener gets it."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    _TAKEN.append(bound)
    return int(bound.getsockname()[1])


def leave_after(url: str, body: dict[str, Any], event: threading.Event) -> None:
    """Send a request and close the connection once ``event`` is set."""

    async def go() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=800) as client:
            task = asyncio.ensure_future(client.post(url + "/v1/completions", json=body))
            assert await asyncio.to_thread(event.wait, 60)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(go())
