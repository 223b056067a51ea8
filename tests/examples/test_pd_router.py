"""The router between real HTTP servers that stand in for engines: they record requests and answer by script."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.lib.pd_router import PREFILL_TAG, Router, Timeouts, prefill_body

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p-0", "kvferry": {"v": 1, "token": "00ff"}, "odd": [1, None]}


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    """The app behind a real socket, in a thread; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    while not server.started:
        time.sleep(0.005)
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


class Engine:
    """Records requests; ``answer`` makes the response of one."""

    def __init__(self, answer: Callable[[Request, dict[str, Any]], Any]) -> None:
        self.seen: list[tuple[dict[str, Any], dict[str, str], str]] = []
        self.arrived, self.aborted = threading.Event(), threading.Event()
        self._answer = answer
        names = ("/v1/completions", "/v1/chat/completions")
        routes = [Route(name, self._serve, methods=["POST"]) for name in names]
        routes += [Route("/health", lambda _: Response()), Route("/v1/models", lambda _: JSONResponse({"data": ["m"]}))]
        self.app = Starlette(routes=routes)

    async def _serve(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append((body, dict(request.headers), request.url.path))
        self.arrived.set()
        return await self._answer(request, body)

    async def until_gone(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.aborted.set()


def prefill_engine(delay: float = 0.0, status: int = 200, params: Any = PARAMS) -> Engine:
    async def answer(request: Request, body: dict[str, Any]) -> Response:
        if delay:
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.until_gone(request), delay)
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


@contextmanager
def routed(p: Engine, d: Engine, **timeouts: float) -> Iterator[str]:
    with (
        served(p.app) as p_url,
        served(d.app) as d_url,
        served(Router([p_url], [d_url], Timeouts(**timeouts)).app()) as url,
    ):
        yield url


def ask(url: str, body: dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=120) as client:
        return client.post(url + path, json=body, headers=headers)


@contextmanager
def streaming(url: str) -> Iterator[httpx.Response]:
    body = {"prompt": "x", "stream": True}
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream("POST", url + "/v1/completions", json=body) as response,
    ):
        yield response


def test_the_two_legs() -> None:
    p, d = prefill_engine(), decode_engine()
    body = {
        "prompt": "x",
        "max_tokens": 9,
        "max_completion_tokens": 9,
        "n": 3,
        "min_tokens": 4,
        "temperature": 0.5,
        "kv_transfer_params": {"remote_host": "attacker"},
    }
    with routed(p, d) as url:
        response = ask(url, body, authorization="Bearer k")
    assert response.json() == {"text": "from D"} and response.headers["x-from"] == "d"
    (to_p, p_headers, _), (to_d, d_headers, _) = p.seen[0], d.seen[0]
    assert to_p == {
        "prompt": "x",
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "temperature": 0.5,
        "stream": False,
        "kv_transfer_params": PREFILL_TAG,
    }
    assert to_d == body | {"kv_transfer_params": PARAMS}  # verbatim, and the client's own are gone
    assert p_headers["x-request-id"] == d_headers["x-request-id"] == response.headers["x-request-id"]
    assert p_headers["authorization"] == d_headers["authorization"] == "Bearer k"


def test_prefill_body_adds_no_chat_key_and_leaves_the_original() -> None:
    body = {"messages": [], "stream": True, "stream_options": {"include_usage": True}}
    leg = prefill_body(body)
    assert "max_completion_tokens" not in leg and "stream_options" not in leg and leg["stream"] is False
    assert body["stream"] is True


def test_request_id_of_the_client_is_kept() -> None:
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as url:
        assert ask(url, {"messages": []}, "/v1/chat/completions", **{"x-request-id": "mine"}).status_code == 200
    assert p.seen[0][1]["x-request-id"] == d.seen[0][1]["x-request-id"] == "mine"
    assert p.seen[0][2] == d.seen[0][2] == "/v1/chat/completions"


def test_streams_piece_by_piece() -> None:
    go_on = threading.Event()
    p, d = prefill_engine(), decode_engine(pieces=3, go_on=go_on)
    came = []
    with routed(p, d) as url, streaming(url) as response:
        for line in response.iter_lines():
            came.append(line)
            go_on.set()  # D makes the next piece only once the client has the first
    assert [line for line in came if line] == ['data: {"i": 0}', 'data: {"i": 1}', 'data: {"i": 2}', "data: [DONE]"]
    assert p.seen[0][0]["stream"] is False


@pytest.mark.parametrize("why", ["error", "late", "refused", "no params", "garbage params"])
def test_decode_only_where_prefill_fails(why: str) -> None:
    p = {
        "error": prefill_engine(status=503),
        "late": prefill_engine(delay=30),
        "no params": prefill_engine(params=None),
        "garbage params": prefill_engine(params="x"),
        "refused": prefill_engine(),
    }[why]
    d = decode_engine()
    with served(p.app) as p_url, served(d.app) as d_url:
        first = f"http://127.0.0.1:{_closed_port()}" if why == "refused" else p_url
        router = Router([first], [d_url], Timeouts(prefill=0.5, cool_down=600))
        with served(router.app()) as url:
            began = time.monotonic()
            theirs = {"do_remote_prefill": True, "remote_host": "attacker"}
            assert ask(url, {"prompt": "x", "kv_transfer_params": theirs}).json() == {"text": "from D"}
            assert time.monotonic() - began < 25, "the late answer was not waited for"
            assert ask(url, {"prompt": "y"}).json() == {"text": "from D"}
        if why == "late":
            assert p.aborted.wait(60), "the late prefill was not cancelled"
        if why in ("late", "error"):
            assert len(p.seen) == 1, "the engine that failed was asked again at once"
    assert all("kv_transfer_params" not in body for body, _, _ in d.seen) and len(d.seen) == 2


def test_several_prompts_in_one_request_are_decoded_only() -> None:
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as url:
        ask(url, {"prompt": ["a", "b"]})
        assert not p.seen
        ask(url, {"prompt": [1, 2, 3]})
        assert len(p.seen) == 1


def test_client_gone_during_prefill_cancels_it() -> None:
    p, d = prefill_engine(delay=30), decode_engine()
    with routed(p, d) as url:
        _leave_after(url, {"prompt": "x"}, p.arrived)
        assert p.aborted.wait(60)
        time.sleep(0.2)
        assert not d.seen


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_before_the_first_token_cancels_decode(stream: bool) -> None:
    p, d = prefill_engine(), decode_engine(before=30)
    with routed(p, d) as url:
        _leave_after(url, {"prompt": "x", "stream": stream}, d.arrived)
        assert d.aborted.wait(60)


def test_client_gone_in_mid_stream_cancels_decode() -> None:
    p, d = prefill_engine(), decode_engine(pieces=100, gap=0.1)
    with routed(p, d) as url:
        with streaming(url) as response:
            next(response.iter_lines())
        assert d.aborted.wait(60)
        assert ask(url, {"prompt": "y"}).json() == {"text": "from D"}


def test_client_gone_before_decode_was_asked_still_releases() -> None:
    """P has answered and D was not asked: D is sent the parameters, for P's blocks."""
    p, d = prefill_engine(), decode_engine()
    with served(d.app) as d_url:
        router = Router(["http://unused"], [d_url])

        async def go() -> None:
            async with httpx.AsyncClient(trust_env=False) as router.http:
                body = {"prompt": "x", "max_tokens": 50, "stream": True, "kv_transfer_params": PARAMS}
                router._let_go("/v1/completions", body, {"x-request-id": "r"})
                await asyncio.gather(*router._background)

        asyncio.run(go())
    assert d.seen[0][0]["kv_transfer_params"] == PARAMS and d.seen[0][0]["max_tokens"] == 1 and not p.seen


def test_decode_unreachable_is_one_clear_error() -> None:
    p = prefill_engine()
    with served(p.app) as p_url, served(Router([p_url], [f"http://127.0.0.1:{_closed_port()}"]).app()) as url:
        response = ask(url, {"prompt": "x"})
        assert response.status_code == 502 and "decode engine" in response.json()["error"]["message"]
        assert httpx.get(url + "/health", trust_env=False).status_code == 503


def test_decode_breaking_off_ends_the_stream_with_an_error() -> None:
    p, d = prefill_engine(), decode_engine(break_after=1)
    with routed(p, d) as url:
        lines = ask(url, {"prompt": "x", "stream": True}).text.split("\n\n")
    assert lines[0] == 'data: {"i": 0}'
    assert json.loads(lines[1].removeprefix("data: "))["error"]["code"] == 502
    assert "[DONE]" not in "".join(lines)


def test_errors_of_decode_and_bad_bodies_reach_the_client() -> None:
    async def refuse(request: Request, body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": "too long"}}, 400)

    with routed(prefill_engine(status=400), Engine(refuse)) as url:
        assert ask(url, {"prompt": "x"}).json() == {"error": {"message": "too long"}}
        bad = httpx.post(url + "/v1/completions", content=b"[1", trust_env=False)
        assert bad.status_code == 400 and "JSON" in bad.json()["error"]["message"]


def test_health_and_models() -> None:
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as url:
        assert httpx.get(url + "/v1/models", trust_env=False).json() == {"data": ["m"]}
        assert httpx.get(url + "/health", trust_env=False).json()["status"] == "ok"
    with served(d.app) as d_url, served(Router([f"http://127.0.0.1:{_closed_port()}"], [d_url]).app()) as url:
        health = httpx.get(url + "/health", trust_env=False)
        assert health.status_code == 200 and health.json()["status"] == "degraded"


def test_engines_take_turns() -> None:
    a, b, d = prefill_engine(), prefill_engine(), decode_engine()
    with (
        served(a.app) as a_url,
        served(b.app) as b_url,
        served(d.app) as d_url,
        served(Router([a_url, b_url], [d_url]).app()) as url,
    ):
        for _ in range(4):
            ask(url, {"prompt": "x"})
    assert len(a.seen) == len(b.seen) == 2


def _closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _leave_after(url: str, body: dict[str, Any], event: threading.Event) -> None:
    """Send a request and close the connection once ``event`` is set."""

    async def go() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=120) as client:
            task = asyncio.ensure_future(client.post(url + "/v1/completions", json=body))
            assert await asyncio.to_thread(event.wait, 60)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(go())
