"""The HTTP server of a router: a reverse proxy of D, and the router's own pages: health, metrics, status."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from kvferry.router.engines import Role
from kvferry.router.health import Checks, HealthChecks
from kvferry.router.http_client import HEAD_BYTES, HttpError, OwnFaultError, RequestProgress
from kvferry.router.legs import ClientRequest, log, why
from kvferry.router.membership import Membership, Source
from kvferry.router.page import page
from kvferry.router.request_bodies import (
    NEVER_SENT,
    NOT_JSON,
    RESPONSES,
    WITH_P,
    Body,
    HostNames,
    changes_engine,
    given,
    members,
    off_loop,
    without,
)
from kvferry.router.router import OF_A_CONNECTION, Reply, Router, error_response, json_response, kept_headers

STATUS, CANCELLED = "http.response.status_code", "kvferry.cancelled"
TRACE_CONTEXT = ("traceparent", "tracestate")
BODY_SECONDS = 60.0  # How long a client may take to send its request
HEAD_SECONDS = 20.0  # How long a connection may be without a request, or with less than the head of one
SILENT_SECONDS = 1.0  # The same, where half of the descriptors are taken
STALL_SECONDS = 120.0  # A client that takes nothing of its answer for so long is gone
BACKLOG = 128  # Connections that may wait to be accepted
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
OF_PAGE = {"content-type": "text/html; charset=utf-8", "content-security-policy": POLICY}
OF_METRICS = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}
OF_A_HOP = OF_A_CONNECTION | {"host", "expect"}
OF_A_LEG = OF_A_HOP | {"accept-encoding", "content-length", "x-request-id"}
"""Headers of a request that the router or its client sets anew; of a leg, whose answer the router reads, also these."""


@dataclass(frozen=True)
class Limits:
    requests: int = 4096  # In flight, of all clients together
    body_bytes: int = 64 << 20  # Of one request
    all_body_bytes: int = 256 << 20  # Of all requests in flight, at least those of one


class RefusedError(Exception):
    """A request that no engine is asked for. ``headers``: of the answer."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class App:
    """What a router serves: bind, start, and stop it. ``checks``: None: engines' health is not checked. ``sources``:
    what names engines at run time."""

    def __init__(
        self, router: Router, *, limits: Limits | None = None, checks: Checks | None = None,
        sources: Sequence[Source] = (),
    ) -> None:  # fmt: skip
        self._router, self._limits = router, limits or Limits()
        self._membership = Membership(router, sources)
        self._health = None if checks is None else HealthChecks(router, checks)
        self._body_bytes = 0  # of all requests that are not over
        self._loops: list[asyncio.Task[None]] = []
        self._pages: dict[str, Callable[[], web.Response]] = {
            "/": lambda: web.Response(text=page(self._status()), headers=OF_PAGE),
            "/health": self._show_health,
            "/metrics": lambda: web.Response(body=router.metrics.text(), headers=OF_METRICS),
            "/router/status": lambda: json_response(self._status()),
        }

    async def bind(self, **where: Any) -> None:
        """``where``: host and port, or sock, as ``loop.create_server`` takes them. Raises OSError, UnicodeError."""
        loop, self._server = asyncio.get_running_loop(), web.Server(self._answer, handler_cancellation=True)
        how: dict[str, Any] = {"max_line_size": HEAD_BYTES, "max_field_size": HEAD_BYTES, "auto_decompress": False}
        how |= {"loop": loop, "access_log": None, "keepalive_timeout": HEAD_SECONDS, "logger": _quiet}
        make = partial(_Connection, self._server, **how)
        self._listeners = await loop.create_server(make, **where, start_serving=False, backlog=BACKLOG)

    async def start(self) -> None:
        """Accept connections, once the engines are known."""
        await self._membership.look()
        loops = [self._membership.watch()]
        if self._health is not None:
            await self._health.round()
            loops.append(self._health.watch())
        self._loops = [asyncio.ensure_future(loop) for loop in loops]
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

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        show = self._pages.get(request.path)
        if show is None and not request.path.startswith("/router/"):
            response = await self._ask(request)
        elif show is None:
            response = error_response(404, f"the router has no {request.path[:200]}; see docs/routers.md")
        elif request.method not in ("GET", "HEAD"):
            response = error_response(405, f"{request.path} takes GET, HEAD", allow="GET, HEAD")
        else:
            response = show()
        await response.prepare(request)
        await response.write_eof()
        return response

    # --- what engines answer

    async def _ask(self, http: web.BaseRequest) -> web.StreamResponse:
        router, metrics = self._router, self._router.metrics
        began, gone, taken = router.clock(), False, 0
        asked: ClientRequest | None = None
        reply: Reply | None = None
        content, status = b"", 499
        try:
            self._check(http)
            if http.method == "POST" and http.path in WITH_P and "content-encoding" not in http.headers:
                asked, content = await self._read(http)
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
            return error_response(error.status, str(error), http.path, connection="close", **error.headers)
        except (asyncio.CancelledError, ConnectionError):
            gone = True
            log.info("%s: the client is gone", "a request that was not read" if asked is None else asked.name)
            raise
        except Exception:
            log.exception("a request failed by a fault of the router")
            status, said = 500, "the router failed; its log says why"
            if asked is None or reply is None:
                return error_response(500, said, http.path)
            return await reply.fail(500, said)
        finally:
            metrics.in_flight -= taken
            self._count(-len(content))
            now = router.clock()
            first = None if reply is None or reply.first is None else reply.first - began
            metrics.answered(status, first, now - began)
            if asked is not None:
                if asked.span is not None:
                    about: dict[str, Any] = {CANCELLED: True} if gone else {STATUS: status}
                    about |= {f"kvferry.{name}": text for name, text in asked.by.items()}
                    asked.span.end(about, asked.broken or (f"HTTP {status}" if status >= 500 else ""))
                asked.drop()

    def _check(self, http: web.BaseRequest) -> None:
        """Raises RefusedError."""
        if "websocket" in http.headers.get("upgrade", "").lower():
            raise RefusedError(501, "the router passes no WebSocket on: ask a decode engine itself")
        if not _target(http).startswith("/"):
            raise RefusedError(400, "no engine is asked for a target without a path")
        kind = http.headers.get("content-type", "").lower()
        if kind.startswith("multipart/") and re.search(r';\s*charset\s*=\s*"?(?!utf-?8"?\s*(;|$))', kind):
            raise RefusedError(415, "the fields of a form are UTF-8: leave charset out of its Content-Type")
        self._check_stored(http.path.startswith(f"{RESPONSES}/"))
        if changes_engine(_target(http).partition("?")[0]):
            raise RefusedError(403, f"{http.path[:200]} changes an engine: ask that engine itself")

    def _check_stored(self, asked: bool) -> None:
        """Of a response that an engine has stored. Raises RefusedError: which one has it is not known."""
        if asked and len(self._router.engines.of(Role.DECODE)) > 1:
            said = "which of several decode engines has stored a response is not known: send the whole conversation"
            raise RefusedError(400, said)

    async def _read(self, http: web.BaseRequest) -> tuple[ClientRequest | None, bytes]:
        """The request, or a body that is no JSON object, which is still counted among all. Raises RefusedError."""
        content, most = bytearray(), max(self._limits.all_body_bytes, self._limits.body_bytes)
        try:
            async for piece in _pieces(http, self._limits.body_bytes):
                content += piece
                self._count(len(piece))
                if self._body_bytes > most:
                    text = f"the bodies of all requests have over {most} bytes, which is the router's limit; try again"
                    raise RefusedError(503, text, retry_after="1")
            try:
                body = await off_loop(content, _parsed)
            except NOT_JSON as error:
                raise RefusedError(400, f"no engine is asked for such a body: {why(error)}") from None
            if body is None:
                return None, bytes(content)
            stored = given(body, "previous_response_id") or given(body, "background")
            self._check_stored(http.path == RESPONSES and stored)
            headers = _headers(http, OF_A_LEG)
            named = http.headers.get("x-request-id", "").encode(errors="ignore").decode()
            headers["x-request-id"] = named or uuid.uuid4().hex
            span = None
            if self._router.tracer is not None:
                about = {"url.path": http.path, "kvferry.request_id": headers["x-request-id"][:256]}
                span = self._router.tracer.begin("kvferry.request", headers, about)
                headers = {name: text for name, text in headers.items() if name not in TRACE_CONTEXT} | span.headers
            over = partial(self._count, -len(content))
            asked = ClientRequest(http.path, body, headers, _target(http), span, over)
        except BaseException:
            self._count(-len(content))
            raise
        asked.hold()
        return asked, b""

    def _count(self, body_bytes: int) -> None:
        self._body_bytes += body_bytes

    async def _pass_on(self, http: web.BaseRequest, content: bytes) -> web.StreamResponse:
        """The answer of a D as it is, to a request as it came. It is sent once. ``content``: its body, where that was
        read. Raises RefusedError."""
        router, refused = self._router, list[RefusedError]()
        progress = RequestProgress(held=http.body_exists, passed=True)

        async def body() -> AsyncIterator[bytes]:
            names = HostNames()
            try:
                async for piece in _pieces(http, self._limits.body_bytes, content):
                    if names.found(piece):
                        said = f"{' and '.join(NEVER_SENT)} name hosts that an engine would connect to: leave them out"
                        raise RefusedError(400, said)
                    yield piece
            except RefusedError as error:
                refused.append(error)
                raise
            progress.go_on()

        seat = router.engines.take_decode(router.clock())
        if seat is None:
            return error_response(503, "no decode engine takes requests; see /health", http.path)
        answer, begun, url = None, None, seat.engine.url
        try:
            how: dict[str, Any] = {"headers": _headers(http, OF_A_HOP), "connect": router.timeouts.connect}
            sent = body() if http.body_exists else None
            answer = await router.http.send(http.method, url, _target(http), body=sent, progress=progress, **how)
            headers = kept_headers(answer)
            if "location" in headers:  # the client asks the router again
                host = re.escape(answer.response.request_info.headers["host"])
                headers["location"] = re.sub(rf"^https?://{host}(?=/)", "", headers["location"])
            begun = web.StreamResponse(status=answer.status, reason=answer.response.reason, headers=headers)
            await begun.prepare(http)
            async for piece in answer.pieces():
                await begun.write(piece)
            await begun.write_eof()
            return begun
        except HttpError as error:
            said = f"decode engine {url} failed: {why(error)}"
            if not refused and not isinstance(error, OwnFaultError) and http.transport is not None:
                router.engines.failed(seat.engine, router.clock())
            if begun is not None:
                log.error("%s: %s", ascii(http.path[:200]), said)
                http.protocol.force_close()  # no whole answer may end here
                return begun
            if refused:
                raise refused[0] from None
            return error_response(503 if isinstance(error, OwnFaultError) else 502, said, http.path)
        finally:
            if answer is not None:
                answer.close()
            seat.release()

    # --- the router's own pages

    def _health_now(self) -> dict[str, Any]:
        """``degraded`` where no P is up, or where nothing is handed over."""
        router = self._router
        up: dict[str, Any] = {role: {e.url: e.usable(router.clock()) for e in router.engines.of(role)} for role in Role}
        ok = any(up[Role.DECODE].values())
        found = {engine.url: engine.handed_over.degraded for engine in router.engines if engine.handed_over.degraded}
        if ok and not any(up[Role.PREFILL].values()):
            found["prefill"] = "no prefill engine takes requests: decode engines prefill"
        status = "down" if not ok else "degraded" if found else "ok"
        if found:
            up["handed_over"] = found
        return {"status": status} | up

    def _status(self) -> dict[str, Any]:
        return self._router.metrics.status() | {"health": self._health_now()}

    def _show_health(self) -> web.Response:
        found = self._health_now()
        return json_response(found, 503 if found["status"] == "down" else 200)


_quiet = logging.getLogger("kvferry.router.strangers")
"""aiohttp tells of each bad head with a traceback: that is the client's mistake."""
_quiet.setLevel(logging.CRITICAL)


class _Connection(web.RequestHandler):
    """One whose client asks something and takes its answers. Without a further request aiohttp closes it."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1e3))
        # A new descriptor has the lowest number that is free.
        crowded = 2 * connected.fileno() > resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        seconds = SILENT_SECONDS if crowded else HEAD_SECONDS
        self._unasked = asyncio.get_running_loop().call_later(seconds, self._close_unasked)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._unasked.cancel()  # it holds this connection, and what its requests had read
        super().connection_lost(exc)

    def _close_unasked(self) -> None:
        if not self._request_count:
            self.force_close()

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Of a head that is none."""
        super().handle_error(request, status, exc, message)  # raises where an answer has begun
        response = error_response(status, why(ValueError(message or "the router failed; its log says why")))
        response.force_close()
        return response


def _parsed(content: bytes | bytearray) -> Body | None:
    """The body without what a client may not send. Raises NOT_JSON."""
    body = members(content)
    return None if body is None else without(body, NEVER_SENT)


async def _pieces(http: web.BaseRequest, most: int, read: bytes = b"") -> AsyncIterator[bytes]:
    """The body as it arrives. ``read``: it was read before. Raises RefusedError."""
    if read:
        yield read
    if http.headers.get("expect", "").lower() == "100-continue":
        await http.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    left, size = asyncio.get_running_loop().time() + BODY_SECONDS, 0
    while not http.content.at_eof():
        try:
            async with asyncio.timeout_at(left):
                piece = await http.content.readany()
        except TimeoutError:
            raise RefusedError(408, f"the body did not arrive in {BODY_SECONDS:g} s") from None
        size += len(piece)
        if size > most:
            raise RefusedError(413, f"the body has over {most} bytes, which is the router's limit")
        yield piece


def _target(http: web.BaseRequest) -> str:
    """Path and query as they came, also of a whole URL."""
    return http.raw_path if http.raw_path.startswith("/") else http.path_qs


def _headers(request: web.BaseRequest, but: set[str]) -> dict[str, str]:
    """Those for an engine. One that came several times is one list."""
    found: dict[str, str] = {}
    but = but | {name.strip() for name in request.headers.get("connection", "").lower().split(",")}
    for cased, value in request.headers.items():
        name = cased.lower()
        if name in found:
            found[name] += ("; " if name == "cookie" else ", ") + value
        elif name not in but:
            found[name] = value
    return found
