"""A small router for disaggregated prefill and decode: each request first to a prefill engine, then to a decode engine.

    python examples/lib/pd_router.py --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000

The prefill leg is the client's request cut down to one token and marked with the six keys of ``kv_transfer_params``
that vLLM's connectors know. What P answers under ``kv_transfer_params`` goes verbatim to D, whose answer is streamed
to the client. Both legs carry one ``X-Request-Id``.

- P fails (no connection, an error, too late, no parameters): D gets the request alone and prefills by itself.
- The client goes away: the decode leg is cancelled. The prefill leg may end, within ``Timeouts.abandoned_prefill``; its
  parameters go to D all the same, for one token: else P would hold the prompt's blocks until its lease ends.
- A kept connection breaks before a byte of the answer: the leg is sent once more, on a connection of its own.
- ``kv_transfer_params`` of clients are dropped: they name hosts that D would connect to.

Several ``--prefill`` and ``--decode`` take turns. It keeps no state: run as many routers as you like.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

log = logging.getLogger("pd_router")
T = TypeVar("T")

PREFILL_TAG: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Hop-by-hop headers and those that httpx and uvicorn set anew.
_OWN_HEADERS = {
    "connection", "content-length", "date", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "server",
    "te", "trailer", "transfer-encoding", "upgrade", "x-request-id", "accept-encoding",
}  # fmt: skip


class ClientGoneError(Exception):
    """The client closed its connection."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds. ``prefill`` bounds the whole prefill leg, ``abandoned_prefill`` the rest of it where the client is gone.
    D's answer is not bounded, only how long it may be silent."""

    connect: float = 3.0
    prefill: float = 120.0
    abandoned_prefill: float = 10.0
    decode_silence: float = 600.0
    cool_down: float = 5.0


@dataclass
class Attempt:
    """How far the sending of one request has come. ``fresh``: it has made a connection of its own. ``asked``: the
    request is sent. ``answered``: a byte of the answer was received."""

    fresh: bool = False
    asked: bool = False
    answered: bool = False

    async def trace(self, event: str, info: dict[str, Any]) -> None:
        """httpcore's ``trace`` extension."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self.fresh = True
            _note_reads(info["return_value"])
        self.asked = self.asked or event == "http11.send_request_body.complete"


_attempt: ContextVar[Attempt | None] = ContextVar("_attempt", default=None)
"""The attempt whose task is running: httpcore reads a connection in the task of the request."""


def _note_reads(stream: Any) -> None:
    """Have the attempts that read this connection know of the bytes that come. httpcore reports whole heads only."""
    read = stream.read

    async def noted(*args: Any, **kwargs: Any) -> bytes:
        data: bytes = await read(*args, **kwargs)
        attempt = _attempt.get()
        if data and attempt is not None:
            attempt.answered = True
        return data

    stream.read = noted


class Pool:
    """Engines that take turns; one that failed is passed over for a while."""

    def __init__(self, urls: Sequence[str], cool_down: float) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self._turn = itertools.cycle(self.urls)
        self._until: dict[str, float] = {}
        self._cool_down = cool_down

    def pick(self) -> str | None:
        """The next one that did not fail just now; None where all did."""
        now = time.monotonic()
        for _ in self.urls:
            url = next(self._turn)
            if self._until.get(url, 0) <= now:
                return url
        return None

    def failed(self, url: str) -> None:
        self._until[url] = time.monotonic() + self._cool_down


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The prefill leg of a request: one token, one choice, not streamed, marked for hand-over."""
    leg = {k: v for k, v in body.items() if k not in ("stream_options", "min_tokens", "best_of", "use_beam_search")}
    leg |= {"stream": False, "max_tokens": 1, "n": 1, "kv_transfer_params": dict(PREFILL_TAG)}
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg


def can_hand_over(body: dict[str, Any]) -> bool:
    """Whether the request holds one prompt; one set of parameters cannot name several."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int)):
        return True
    return len(prompt) == 1


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away.

    Raises:
        ClientGoneError: it did.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for future in (task, watch):
            if not future.done():
                future.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await future


class Router:
    """The legs of a request. Between start-up and shutdown of the app are open: ``http``, which keeps connections, and
    ``http_fresh``, which does not."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], timeouts: Timeouts | None = None) -> None:
        self.timeouts = timeouts or Timeouts()
        self.prefill = Pool(prefill, self.timeouts.cool_down)
        self.decode = Pool(decode, self.timeouts.cool_down)
        self.http: httpx.AsyncClient
        self.http_fresh: httpx.AsyncClient
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, request: Request) -> Response:
        """One completion or chat completion."""
        try:
            body = json.loads(await request.body())
        except ValueError:
            body = None
        except ClientDisconnect:
            log.info("the client is gone before its request was read")
            return Response(status_code=499)
        if not isinstance(body, dict):
            return _error(400, "the body is not a JSON object")
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        headers = {k: v for k, v in request.headers.items() if k not in _OWN_HEADERS} | {"x-request-id": request_id}
        body.pop("kv_transfer_params", None)
        path = request.url.path
        try:
            params = await self._prefill_leg(request, path, body, headers) if can_hand_over(body) else None
            if params is not None:
                body["kv_transfer_params"] = params
            return await self._decode_leg(request, path, body, headers)
        except ClientGoneError:
            log.info("%s: the client is gone", request_id)
            return Response(status_code=499)

    async def _prefill_leg(
        self, request: Request, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """The parameters for D, or None: D then prefills by itself. Raises ClientGoneError."""
        request_id = headers["x-request-id"]
        url = self.prefill.pick()
        if url is None:
            log.warning("%s: no prefill engine answers, decode only", request_id)
            return None
        send = self._send(url + path, prefill_body(body), headers, Attempt(), silence=None)
        leg = self._start(asyncio.wait_for(send, self.timeouts.prefill))
        try:
            response = await unless_gone(request, asyncio.shield(leg))
        except ClientGoneError:
            self._start(self._abandon(leg, path, body, headers))
            raise
        except (httpx.HTTPError, TimeoutError) as error:
            self.prefill.failed(url)
            log.warning("%s: prefill at %s failed, decode only: %s", request_id, url, _why(error))
            return None
        if response.status_code != 200:
            # A 4xx is the request's fault, and D says so itself.
            if response.status_code >= 500:
                self.prefill.failed(url)
            log.warning("%s: prefill at %s answered %d, decode only", request_id, url, response.status_code)
            return None
        params = _params_of(response)
        if params is None:
            log.info("%s: prefill at %s handed nothing over, decode only", request_id, url)
        return params

    async def _abandon(
        self, leg: asyncio.Task[httpx.Response], path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> None:
        """The client is gone during the prefill leg: have P's lease released once P has answered. P aborts what takes
        longer, as its connection is closed."""
        try:
            params = _params_of(await asyncio.wait_for(leg, self.timeouts.abandoned_prefill))
        except (httpx.HTTPError, TimeoutError):
            return
        if params is not None:
            await self._let_go(path, body | {"kv_transfer_params": params}, headers)

    async def _let_go(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        """P has finished, D was not asked, and the client is gone: D loads the prompt and so releases P's lease."""
        url = self.decode.pick() or self.decode.urls[0]
        leg = prefill_body(body) | {"kv_transfer_params": body["kv_transfer_params"]}
        try:
            await self._send(url + path, leg, headers, Attempt(), silence=self.timeouts.decode_silence)
        except httpx.HTTPError as error:
            log.warning("%s: P holds its blocks until its lease ends: %s", headers["x-request-id"], _why(error))

    async def _decode_leg(self, request: Request, path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
        """D's answer. Raises ClientGoneError."""
        url = self.decode.pick() or self.decode.urls[0]
        attempt = Attempt()
        send = self._send(url + path, body, headers, attempt, silence=self.timeouts.decode_silence, stream=True)
        try:
            answer = await unless_gone(request, send)
            streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
            if not streamed:
                await unless_gone(request, answer.aread())
        except ClientGoneError:
            if not attempt.asked and "kv_transfer_params" in body:
                self._start(self._let_go(path, body, headers))
            raise
        except httpx.HTTPError as error:
            self.decode.failed(url)
            log.error("%s: decode at %s failed: %s", headers["x-request-id"], url, _why(error))
            return _error(502, f"decode engine {url} failed: {_why(error)}")
        kept = {k: v for k, v in answer.headers.items() if k not in _OWN_HEADERS and k != "content-encoding"}
        kept["x-request-id"] = headers["x-request-id"]
        if not streamed:
            return Response(answer.content, answer.status_code, kept)
        return StreamingResponse(self._relay(answer, url, headers["x-request-id"]), answer.status_code, kept)

    async def _send(
        self, url: str, body: dict[str, Any], headers: dict[str, str], attempt: Attempt, *,
        silence: float | None, stream: bool = False,
    ) -> httpx.Response:  # fmt: skip
        """An engine's answer, its body too unless ``stream``; on a fresh connection where a kept one breaks before a
        byte of the answer. Raises httpx.HTTPError."""
        _attempt.set(attempt)
        how: dict[str, Any] = {"timeout": self._timeout(silence), "extensions": {"trace": attempt.trace}}
        message = self.http.build_request("POST", url, json=body, headers=headers, **how)
        try:
            return await self.http.send(message, stream=stream)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            if attempt.fresh or attempt.answered:
                raise
            log.info("%s: a kept connection to %s broke, once more: %s", headers["x-request-id"], url, _why(error))
        attempt.asked = False
        return await self.http_fresh.send(message, stream=stream)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` so that it may outlive its request."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _relay(self, answer: httpx.Response, url: str, request_id: str) -> AsyncIterator[bytes]:
        try:
            async for piece in answer.aiter_bytes():
                yield piece
        except httpx.HTTPError as error:  # too late for a status: say it in the stream, and end it without [DONE]
            self.decode.failed(url)
            log.error("%s: decode at %s broke off: %s", request_id, url, _why(error))
            yield b"data: " + _error(502, f"decode engine {url} broke off: {_why(error)}").body + b"\n\n"
        finally:
            await answer.aclose()  # closes the connection where D has not finished: D aborts the request

    async def health(self, request: Request) -> Response:
        """200 while a decode engine answers; ``degraded`` where no prefill engine does."""
        prefill, decode = [await self._alive(pool.urls) for pool in (self.prefill, self.decode)]
        ok = any(decode.values())
        status = "down" if not ok else "ok" if any(prefill.values()) else "degraded"
        return JSONResponse({"status": status, "prefill": prefill, "decode": decode}, 200 if ok else 503)

    async def _alive(self, urls: Sequence[str]) -> dict[str, bool]:
        async def ask(url: str) -> bool:
            with suppress(httpx.HTTPError):
                return (await self.http_fresh.get(f"{url}/health", timeout=self._timeout(3.0))).status_code == 200
            return False

        return dict(zip(urls, await asyncio.gather(*map(ask, urls)), strict=True))

    async def models(self, request: Request) -> Response:
        """What the decode engine serves."""
        url = self.decode.pick() or self.decode.urls[0]
        try:
            answer = await self.http_fresh.get(f"{url}/v1/models", timeout=self._timeout(10.0))
        except httpx.HTTPError as error:
            return _error(502, f"decode engine {url} failed: {_why(error)}")
        return Response(answer.content, answer.status_code, media_type="application/json")

    @staticmethod
    def _client(kept: int) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=kept)
        return httpx.AsyncClient(limits=limits, trust_env=False)

    def _timeout(self, read: float | None) -> httpx.Timeout:
        return httpx.Timeout(read, connect=self.timeouts.connect)

    def app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with self._client(kept=100) as self.http, self._client(kept=0) as self.http_fresh:
                yield

        routes = [
            Route("/v1/completions", self.serve, methods=["POST"]),
            Route("/v1/chat/completions", self.serve, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", self.health),
        ]
        return Starlette(routes=routes, lifespan=lifespan)


def _params_of(response: httpx.Response) -> dict[str, Any] | None:
    with suppress(ValueError, AttributeError):
        params = response.json().get("kv_transfer_params")
        return params if isinstance(params, dict) and params else None
    return None


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _error(status: int, message: str) -> JSONResponse:
    kind = "BadRequestError" if status < 500 else "BadGatewayError"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", action="append", required=True, help="URL of a prefill engine; may be repeated")
    parser.add_argument("--decode", action="append", required=True, help="URL of a decode engine; may be repeated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    for name, text in (
        ("connect", "for a connection to an engine"),
        ("prefill", "for P's answer, then decode only"),
        ("abandoned-prefill", "for P's answer where the client is gone"),
    ):
        default = getattr(Timeouts, name.replace("-", "_"))
        parser.add_argument(f"--{name}-timeout", type=float, default=default, help=f"seconds {text}")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    timeouts = Timeouts(args.connect_timeout, args.prefill_timeout, args.abandoned_prefill_timeout)
    router = Router(args.prefill, args.decode, timeouts)
    uvicorn.run(router.app(), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
