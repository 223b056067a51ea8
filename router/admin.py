"""``/router/engines``: the engines of a router at run time. Changes need the admin token."""

from __future__ import annotations

import hmac
from typing import Any

import msgspec
from aiohttp import web

from kvferry.router.engines import EngineState, Role
from kvferry.router.legs import log
from kvferry.router.request_bodies import NOT_JSON
from kvferry.router.router import Router, error_response, json_response
from kvferry.transport.errors import UsageError, quoted_url

MAX_BODY_BYTES = 64 << 10


class Change(msgspec.Struct, forbid_unknown_fields=True):
    """What ``POST`` and ``DELETE`` send. ``role``: of a new engine, or the new role of a known one. ``drain``: it gets
    no new requests from now on; without it, it gets them again."""

    url: str
    role: Role | None = None
    drain: bool = False


class Admin:
    """``token``: empty: nothing can be changed."""

    def __init__(self, router: Router, token: str) -> None:
        self._router, self._token = router, token

    async def serve(self, request: web.BaseRequest) -> web.Response:
        if request.method == "GET":
            return self._engines()
        if not self._token:
            return error_response(403, "engines cannot be changed: the router was started without --admin-token-file")
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode(errors="replace")
        if not hmac.compare_digest(given, self._token.encode()):
            return error_response(401, "expected the header Authorization: Bearer TOKEN, with the admin token")
        content = bytearray()
        while piece := await request.content.readany():
            content += piece
            if len(content) > MAX_BODY_BYTES:
                return error_response(413, f"the body has over {MAX_BODY_BYTES} bytes", connection="close")
        try:
            change = msgspec.json.decode(content, type=Change)
            if request.method == "POST":
                self._change(change)
            else:
                self._apply(change.url, EngineState.LEAVING)
        except (*NOT_JSON, UsageError) as error:
            return error_response(400, str(error))
        return self._engines()

    def _engines(self) -> web.Response:
        return json_response({"engines": self._router.metrics.status(self._router.clock())["engines"]})

    def _change(self, change: Change) -> None:
        """Raises UsageError."""
        if change.role is not None:
            engine = self._router.engines.add(change.url, change.role)
            log.info("%s engine %s is set by an administrator", engine.role, engine.url)
        if change.drain or change.role is None:
            self._apply(change.url, EngineState.DRAINING if change.drain else EngineState.JOINING)

    def _apply(self, url: str, state: EngineState) -> None:
        """Raises UsageError: there is no such engine."""
        engine: Any = self._router.engines.get(url.strip().rstrip("/"))
        if engine is None:
            known = "GET /router/engines lists them; a new one needs a role"
            raise UsageError(f"there is no engine {quoted_url(url)}; {known}")
        self._router.engines.move(engine, state)
        log.info("%s engine %s is %s, by an administrator", engine.role, url, engine.state)
