"""The HTTP server of a router: OpenAI's API, health, metrics, the status page, and the engines at run time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kvferry.router.admin import Admin
from kvferry.router.engines import Role
from kvferry.router.health import Checks, HealthChecks
from kvferry.router.http_client import HttpError
from kvferry.router.legs import ClientGoneError, ClientRequest, log, why
from kvferry.router.membership import Membership, Source
from kvferry.router.request_bodies import NOT_JSON
from kvferry.router.router import OWN_HEADERS, Router, error_response
from kvferry.router.spans import begin_request, end_request
from kvferry.router.status_page import page

BODY_SECONDS = 60.0
"""How long a client may take to send its request."""
_OWN_HEADERS = {name.encode() for name in OWN_HEADERS}


@dataclass(frozen=True)
class Limits:
    """``requests``: in flight, of all clients together. ``body_bytes``: of one request; ``all_body_bytes``: of all
    requests in flight, at least those of one."""

    requests: int = 4096
    body_bytes: int = 64 << 20
    all_body_bytes: int = 1 << 30


class RefusedError(Exception):
    """A request that no engine is asked for. ``headers``: of the answer."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class Completions:
    """The ASGI application that answers completions and chat completions."""

    def __init__(self, router: Router, limits: Limits) -> None:
        self._router, self._limits = router, limits
        self._body_bytes = 0  # of all requests that are not over

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        router, metrics = self._router, self._router.metrics
        began, first_byte, status, gone = router.clock(), None, 499, False

        async def noted(message: Any) -> None:
            nonlocal first_byte, status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif first_byte is None:
                first_byte = router.clock() - began
            await send(message)

        asked: ClientRequest | None = None
        metrics.in_flight += 1
        try:
            try:
                if metrics.in_flight > self._limits.requests:
                    message = f"{self._limits.requests} requests are in flight, which is the router's limit; try again"
                    raise RefusedError(429, message, retry_after="1")
                asked = await self._read(scope, receive)
                await (await router.answer(asked))(scope, receive, noted)
            except RefusedError as error:
                refusal = error_response(error.status, str(error), connection="close", **error.headers)
                await refusal(scope, receive, noted)
        except ClientGoneError:
            gone = True
            if asked is None:
                log.info("a client is gone before its request was read")
            else:
                log.info("%s: the client is gone", asked.id)
        except Exception:
            log.exception("a request failed by a fault of the router")
            if asked is not None:
                asked.broken = "the router failed; its log says why"
            if status == 499:
                await error_response(500, "the router failed; its log says why")(scope, receive, noted)
        finally:
            metrics.in_flight -= 1
            now = router.clock()
            metrics.answered(status, now, first_byte, now - began)
            if asked is not None:
                end_request(asked.span, None if gone else status, first_byte, asked.broken)
                asked.gone.cancel()
                asked.drop()
            router.forget_gone()

    async def _read(self, scope: Any, receive: Any) -> ClientRequest:
        """Raises ClientGoneError, RefusedError."""
        headers: dict[str, str] = {}
        request_id = ""
        for raw_name, raw_value in scope["headers"]:
            if raw_name == b"x-request-id":
                request_id = raw_value.decode("latin-1")
            if raw_name not in _OWN_HEADERS:
                name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
                headers[name] = f"{headers[name]}, {value}" if name in headers else value
        headers["x-request-id"] = request_id or uuid.uuid4().hex
        with ExitStack() as held:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    content = await self._content(receive, held)
            except TimeoutError:
                raise RefusedError(408, f"the body did not arrive in {BODY_SECONDS:g} s") from None
            try:
                body = msgspec.json.decode(content)
            except NOT_JSON as error:
                raise RefusedError(400, f"the body is not a JSON object: {why(error)}") from None
            if not isinstance(body, dict):
                raise RefusedError(400, f"the body is not a JSON object but of type {type(body).__name__}")
            body.pop("kv_transfer_params", None)
            span = begin_request(self._router.tracer, headers, scope["path"])
            asked = ClientRequest(scope["path"], body, headers, asyncio.ensure_future(_gone(receive)), span)
            asked.over = held.pop_all().close
        asked.hold()
        return asked

    async def _content(self, receive: Any, held: ExitStack) -> bytes:
        """Until ``held`` closes, its bytes count among those of all bodies."""
        pieces, size, limits = [], 0, self._limits
        most = max(limits.all_body_bytes, limits.body_bytes)
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            self._count(len(pieces[-1]))
            held.callback(self._count, -len(pieces[-1]))
            if size > limits.body_bytes:
                raise RefusedError(413, f"the body has over {limits.body_bytes} bytes, which is the router's limit")
            if self._body_bytes > most:
                text = f"the bodies of all requests have over {most} bytes, which is the router's limit; try again"
                raise RefusedError(503, text, retry_after="1")
            if not message.get("more_body"):
                return b"".join(pieces)

    def _count(self, body_bytes: int) -> None:
        self._body_bytes += body_bytes


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def make_app(
    router: Router,
    *,
    limits: Limits | None = None,
    checks: Checks | None = None,
    sources: Sequence[Source] = (),
    admin_token: str = "",
) -> Starlette:
    """The application.

    Args:
        checks: None: engines' health is not checked.
        sources: what names engines at run time.
        admin_token: who shows it may change the engines; empty: nobody.
    """
    membership = Membership(router, sources)
    admin = Admin(router, admin_token)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await membership.look()
        health = None if checks is None else HealthChecks(router, checks)
        loops = [asyncio.ensure_future(membership.watch())] if sources else []
        if health is not None:
            await health.first_round()
            loops.append(asyncio.ensure_future(health.watch()))
        try:
            yield
        finally:
            if router.tasks:  # leases that are still to be released
                await asyncio.wait(set(router.tasks), timeout=router.timeouts.abandoned_prefill)
            for loop in loops:
                loop.cancel()
                with suppress(asyncio.CancelledError):
                    await loop
            router.http.close()
            if router.tracer is not None:
                await asyncio.to_thread(router.tracer.close)

    async def health(request: Request) -> Response:
        """200 while a decode engine is up; ``degraded`` where no prefill engine is."""
        up = {role: {e.url: e.usable(router.clock()) for e in router.engines.of(role)} for role in Role}
        ok = any(up[Role.DECODE].values())
        status = "down" if not ok else "ok" if any(up[Role.PREFILL].values()) else "degraded"
        return JSONResponse({"status": status} | up, 200 if ok else 503)

    async def models(request: Request) -> Response:
        """What the decode engines serve."""
        seat = router.engines.take_decode(router.clock())
        if seat is None:
            return error_response(503, "no decode engine takes requests; see /health")
        headers = {k: v for k, v in request.headers.items() if k not in OWN_HEADERS}
        try:
            url, connect = seat.engine.url, router.timeouts.connect
            answer = await router.http.send("GET", url, "/v1/models", headers=headers, connect=connect, silence=10.0)
            return Response(await answer.body(), answer.status, media_type="application/json")
        except HttpError as error:
            return error_response(502, f"decode engine {seat.engine.url} failed: {why(error)}")
        finally:
            seat.release()

    async def metrics(request: Request) -> Response:
        return Response(router.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(request: Request) -> Response:
        return JSONResponse(router.metrics.status(router.clock()))

    async def status_page(request: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(page(), headers={"content-security-policy": policy})

    async def no_route(request: Request, error: Exception) -> Response:
        code = error.status_code if isinstance(error, HTTPException) else 500
        return error_response(code, f"{request.method} {request.url.path}: {getattr(error, 'detail', 'failed')}")

    completions = Completions(router, limits or Limits())
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/router/status", status),
        Route("/router/engines", admin.serve, methods=["GET", "POST", "DELETE"]),
        Route("/", status_page),
    ]
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: no_route})
