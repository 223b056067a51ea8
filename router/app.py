"""The HTTP server of a router: OpenAI's API, health, metrics, the status page, and the engines at run time."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from aiohttp import web

from kvferry.router.engines import Role
from kvferry.router.health import Checks, HealthChecks
from kvferry.router.http_client import HEAD_BYTES, HttpError
from kvferry.router.legs import ClientRequest, log, why
from kvferry.router.membership import Admin, Membership, Source
from kvferry.router.metrics import SAMPLE_SECONDS, StatusHistory
from kvferry.router.request_bodies import NOT_JSON, RESPONSES, SMALL_BYTES, members, without, without_params
from kvferry.router.router import OWN_HEADERS, Reply, Router, error_response, json_response, kept_headers
from kvferry.router.spans import begin_request, end_request

BODY_SECONDS = 60.0  # How long a client may take to send its request
HEAD_SECONDS = 20.0
"""How long a connection may be without a request, or with less than the head of one: seconds in which this process ran,
because one that stood still has read nothing."""
STALL_SECONDS = 120.0  # A client that takes nothing of its answer for so long is gone
TICK_SECONDS = 1.0
BACKLOG = 128  # Connections that may wait to be accepted
FAULT_SECONDS = 30.0  # For so long ``/health`` names a fault of this machine
_RESPONSE = re.compile(r"/v1/responses/[A-Za-z0-9_-]{1,128}(/cancel)?")
PAGE = Path(__file__).with_name("status.html").read_text(encoding="utf-8")
"""What was handed over, rates, latencies and engines, from ``/router/status``."""
NEVER_SENT = ("kv_transfer_params", "ec_transfer_params")  # They name hosts that an engine would connect to
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Limits:
    """``requests``: in flight, of all clients together. ``body_bytes``: of one request; ``all_body_bytes``: of all
    requests in flight, at least those of one. ``idle``: connections without a request."""

    requests: int = 4096
    body_bytes: int = 64 << 20
    all_body_bytes: int = 256 << 20
    idle: int = 4096


class RefusedError(Exception):
    """A request that no engine is asked for. ``headers``: of the answer."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class App:
    """What a router serves: bind, start, and stop it. ``checks``: None: engines' health is not checked. ``sources``:
    what names engines at run time. ``admin_token``: who shows it may change the engines; empty: nobody."""

    def __init__(
        self, router: Router, *, limits: Limits | None = None, checks: Checks | None = None,
        sources: Sequence[Source] = (), admin_token: str = "",
    ) -> None:  # fmt: skip
        self._router, self._limits = router, limits or Limits()
        self._membership = Membership(router, sources)
        self._health = None if checks is None else HealthChecks(router, checks)
        self._history = StatusHistory()
        self._body_bytes = 0  # of all requests that are not over
        self.idle: dict[Any, float] = {}
        """Connections without a request or with a part of one, the oldest first, and how often they are looked at
        before they are closed."""
        self._loops: list[asyncio.Task[None]] = []
        admin = Admin(router, admin_token)
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/completions": {"POST": self._complete},
            "/v1/chat/completions": {"POST": self._complete},
            RESPONSES: {"POST": self._complete},
            "/v1/models": {"GET": self._pass_on},
            "/health": {"GET": self._say_health},
            "/metrics": {"GET": self._say_metrics},
            "/router/status": {"GET": self._say_status},
            "/router/engines": dict.fromkeys(("GET", "POST", "DELETE"), admin.serve),
            "/": {"GET": self._show_page},
        }

    async def bind(self, **where: Any) -> None:
        """``where``: host and port, or sock, as ``loop.create_server`` takes them. Raises OSError, UnicodeError."""
        self._server = _Server(
            self._serve, self.idle, handler_cancellation=True, access_log=None, auto_decompress=False, logger=_quiet,
            keepalive_timeout=inf, max_line_size=HEAD_BYTES, max_field_size=HEAD_BYTES,
        )  # fmt: skip
        make = asyncio.get_running_loop().create_server
        self._listeners = await make(self._server, **where, start_serving=False, backlog=BACKLOG)

    async def start(self) -> None:
        """Accept connections, once the engines are known."""
        await self._membership.look()
        self._loops.append(asyncio.ensure_future(self._membership.watch()))
        if self._health is not None:
            await self._health.round()
            self._loops.append(asyncio.ensure_future(self._health.watch()))
        self._loops.append(asyncio.ensure_future(self._watch_idle()))
        self._loops.append(asyncio.ensure_future(self._keep_history()))
        await self._listeners.start_serving()

    async def stop(self) -> None:
        """No new connections; return when all requests have ended, and all leases that are to be released."""
        self._listeners.close()
        self._server.pre_shutdown()
        await self._server.shutdown(None)
        if self._router.tasks:
            await asyncio.wait(set(self._router.tasks), timeout=self._router.timeouts.abandoned_prefill)
        for loop in self._loops:
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop
        await self._router.http.close()
        if self._router.tracer is not None:
            await asyncio.to_thread(self._router.tracer.close)

    async def _watch_idle(self) -> None:
        """Close what holds descriptors for nothing: the old ones, and where there are many the oldest."""
        before = 0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for connection in self.idle:
                self.idle[connection] -= TICK_SECONDS
            many = min(before, len(self.idle)) - self._limits.idle  # not those of a moment
            for number, (connection, seconds) in enumerate(list(self.idle.items())):
                if seconds <= 0 or number < many:
                    connection.force_close()
            before = len(self.idle)

    async def _keep_history(self) -> None:
        router = self._router
        while True:
            now = router.clock()
            self._history.take(now, router.metrics.status(now))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        if connection in self.idle:
            self.idle[connection] = inf  # its place among the others stays until all of the request is read
        try:
            response = await self._answer(request)
            await response.prepare(request)
            await response.write_eof()
            return response
        finally:
            if request.transport is not None:
                self.idle.pop(connection, None)
                self.idle[connection] = HEAD_SECONDS

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        handlers = self._routes.get(request.path)
        if _RESPONSE.fullmatch(request.path) or (handlers is not None and request.method == "OPTIONS"):
            return await self._pass_on(request)  # CORS is the engines' to decide
        if handlers is None:
            return error_response(404, f"there is no {request.path[:200]}; see docs/routers.md")
        handler = handlers.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            return error_response(405, f"{request.path} takes {', '.join(handlers)}", allow=", ".join(handlers))
        return await handler(request)

    # --- completions

    async def _complete(self, http: web.BaseRequest) -> web.StreamResponse:
        router, metrics = self._router, self._router.metrics
        began, gone, taken = router.clock(), False, 0
        asked: ClientRequest | None = None
        reply: Reply | None = None
        content, status = b"", 499
        try:
            asked, content = await self._read(http)
            self.idle.pop(http.protocol, None)
            taken = 1
            metrics.in_flight += 1
            if metrics.in_flight > self._limits.requests:
                message = f"{self._limits.requests} requests are in flight, for no more is there room; try again"
                raise RefusedError(503, message, retry_after="1")
            if asked is None:
                response = await self._pass_on(http, content)
            else:
                reply = Reply(router, asked, http)
                response = await router.answer(asked, reply)
            status = response.status
            return response
        except RefusedError as error:
            status = error.status
            return error_response(error.status, str(error), connection="close", **error.headers)
        except (asyncio.CancelledError, ConnectionError):
            gone = True
            log.info("%s: the client is gone", "a request that was not read" if asked is None else asked.name)
            raise
        except Exception:
            log.exception("a request failed by a fault of the router")
            status, said = 500, "the router failed; its log says why"
            if asked is None or reply is None:
                return error_response(500, said)
            asked.broken = said
            return await reply.fail(500, said)
        finally:
            metrics.in_flight -= taken
            self._count(-len(content))
            now = router.clock()
            first = None if reply is None or reply.first is None else reply.first - began
            metrics.answered(status, now, first, now - began)
            if asked is not None:
                end_request(asked.span, None if gone else status, first, asked.broken)
                asked.drop()

    async def _read(self, http: web.BaseRequest) -> tuple[ClientRequest | None, bytes]:
        """The request, or a body that is no JSON object, which is still counted. Raises RefusedError."""
        content = bytearray()
        try:
            try:
                async with nullcontext() if http.content.is_eof() else asyncio.timeout(BODY_SECONDS):
                    await self._receive(http, content)
                small = len(content) <= SMALL_BYTES
                body = members(content) if small else await asyncio.to_thread(members, content)
                body = None if body is None else without(body, NEVER_SENT)
            except TimeoutError:
                raise RefusedError(408, f"the body did not arrive in {BODY_SECONDS:g} s") from None
            except NOT_JSON as error:
                raise RefusedError(400, f"no engine is asked for such a body: {why(error)}") from None
            if body is None:
                return None, bytes(content)
            headers = _headers(http)
            given = http.headers.get("x-request-id", "").encode(errors="ignore").decode()
            headers["x-request-id"] = given or uuid.uuid4().hex
            span = begin_request(self._router.tracer, headers, http.path)
            asked = ClientRequest(http.path, body, headers, span, over=partial(self._count, -len(content)))
        except BaseException:
            self._count(-len(content))
            raise
        asked.hold()
        return asked, b""

    async def _receive(self, http: web.BaseRequest, content: bytearray) -> None:
        """Its bytes count among those of all bodies, until the caller says otherwise. Raises RefusedError."""
        limits = self._limits
        most = max(limits.all_body_bytes, limits.body_bytes)
        if http.headers.get("expect", "").lower() == "100-continue":
            await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while piece := await http.content.readany():
            content += piece
            self._count(len(piece))
            if len(content) > limits.body_bytes:
                raise RefusedError(413, f"the body has over {limits.body_bytes} bytes, which is the router's limit")
            if self._body_bytes > most:
                text = f"the bodies of all requests have over {most} bytes, which is the router's limit; try again"
                raise RefusedError(503, text, retry_after="1")

    def _count(self, body_bytes: int) -> None:
        self._body_bytes += body_bytes

    # --- all else

    async def _pass_on(self, request: web.BaseRequest, content: bytes | None = None) -> web.StreamResponse:
        """The answer of a D to a request that hands nothing over."""
        router = self._router
        self.idle.pop(request.protocol, None)
        seat = router.engines.take_decode(router.clock())
        if seat is None:
            return error_response(503, "no decode engine takes requests; see /health")
        try:
            how: dict[str, Any] = {"headers": _headers(request), "connect": router.timeouts.connect}
            answer = await router.http.send(request.method, seat.engine.url, request.path_qs, body=content, **how)
            try:
                body = await answer.body()
            finally:
                answer.close()
            shown = without_params(body) if router.prefix_reads else body  # it may be a response that D has stored
            headers = kept_headers(answer, None if shown is body else len(shown))
            return web.Response(body=shown, status=answer.status, headers=headers)
        except HttpError as error:
            return error_response(502, f"decode engine {seat.engine.url} failed: {why(error)}")
        finally:
            seat.release()

    async def _say_health(self, request: web.BaseRequest) -> web.StreamResponse:
        """200 while a decode engine is up; ``degraded`` where no P is, or where nothing is handed over."""
        router = self._router
        up: dict[str, Any] = {role: {e.url: e.usable(router.clock()) for e in router.engines.of(role)} for role in Role}
        ok = any(up[Role.DECODE].values())
        found = {engine.url: engine.handed_over.degraded for engine in router.engines if engine.handed_over.degraded}
        if not any(up[Role.PREFILL].values()):
            found["prefill"] = "no prefill engine takes requests: decode engines prefill"
        status = "down" if not ok else "degraded" if found else "ok"
        if found:
            up["handed_over"] = found
        if time.monotonic() - router.http.own_fault_at < FAULT_SECONDS:
            up["router"] = f"no connection to spare: {router.http.own_fault}"
        return json_response({"status": status} | up, 200 if ok else 503)

    async def _say_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self._router.metrics.text(), headers={"content-type": kind})

    async def _say_status(self, request: web.BaseRequest) -> web.StreamResponse:
        now = self._router.clock()
        return json_response(self._router.metrics.status(now) | {"history": self._history.columns(now)})

    async def _show_page(self, request: web.BaseRequest) -> web.StreamResponse:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return web.Response(text=PAGE, content_type="text/html", headers={"content-security-policy": policy})


_quiet = logging.getLogger("kvferry.router.strangers")
"""aiohttp tells of each bad head with a traceback: that is the client's mistake."""
_quiet.setLevel(logging.CRITICAL)


class _Server(web.Server):
    """Notes which connections have no request."""

    def __init__(self, handler: Any, idle: dict[Any, float], **options: Any) -> None:
        super().__init__(handler, **options)
        self._without_request = idle

    def connection_made(self, handler: Any, transport: Any) -> None:
        super().connection_made(handler, transport)
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1e3))
        self._without_request[handler] = HEAD_SECONDS

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._without_request.pop(handler, None)


def _headers(request: web.BaseRequest) -> dict[str, str]:
    """Those for an engine. One that came several times is one list."""
    found: dict[str, str] = {}
    for given, value in request.headers.items():
        name = given.lower()
        if name in found:
            found[name] += ("; " if name == "cookie" else ", ") + value
        elif name not in OWN_HEADERS:
            found[name] = value
    return found
