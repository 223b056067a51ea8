"""Engines at run time: named by a file or by a DNS name, both looked at again every few seconds, or by HTTP.

A source's engines are compared with what it named at the last look: those new to it are added, those that it names no
longer are drained and then forgotten. Between looks ``/router/engines`` may change any of them.

A file has one engine a line, ``prefill http://HOST:PORT`` or ``decode http://HOST:PORT``; ``#`` begins a comment.
Changes by HTTP, ``/router/engines``, need the admin token.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from kvferry.router.engines import MAX_ENGINES, EngineState, Role, engine_url
from kvferry.router.legs import log
from kvferry.router.request_bodies import NOT_JSON
from kvferry.router.router import Router, error_response, json_response
from kvferry.transport.errors import UsageError, quoted_url

Named = dict[str, Role]  # Engines by URL
LOOK_SECONDS = 3.0
MAX_FILE_BYTES = 1 << 20
MAX_BODY_BYTES = 64 << 10  # Of a request to ``/router/engines``


class Source(Protocol):
    """``named`` raises OSError, UsageError: it cannot be looked at now, and nothing changes."""

    async def named(self) -> Named: ...


class EnginesFile:
    """A file of engines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return f"engines file {self._path}"

    async def named(self) -> Named:
        with self._path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise UsageError(f"it has over {MAX_FILE_BYTES} bytes")
        return engines_of(content.decode(errors="replace"))


class DnsName:
    """All addresses of one name. ``url``: ``dns://NAME:PORT``."""

    def __init__(self, url: str, role: Role) -> None:
        try:
            parts = urlsplit(url)
            host, port, fits = parts.hostname, parts.port, parts.scheme == "dns" and parts.path in ("", "/")
        except ValueError:
            host, port, fits = None, None, False
        if not fits or not host or not port or "@" in url:
            raise UsageError(f"{quoted_url(url)} names no engines; expected dns://NAME:PORT")
        self._host, self._port, self._role = host, port, role

    def __str__(self) -> str:
        return f"DNS name {self._host} of {self._role} engines"

    async def named(self) -> Named:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        hosts = {str(address[0]) for *_, address in found}
        return {f"http://{f'[{host}]' if ':' in host else host}:{self._port}": self._role for host in sorted(hosts)}


def engines_of(text: str) -> Named:
    """What a file of engines names. Raises UsageError: a line is not as it should be, or there is no engine at all."""
    named: Named = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0] not in list(Role):
            raise UsageError(f"line {number} is {quoted_url(line)}; expected: prefill http://HOST:PORT, or decode ...")
        url = engine_url(words[1])
        if named.setdefault(url, Role(words[0])) != words[0]:
            raise UsageError(f"line {number} gives {url} a second role; name each engine once")
    if not named or len(named) > MAX_ENGINES:
        raise UsageError(f"it names {len(named)} engines; expected 1 to {MAX_ENGINES}")
    return named


class Membership:
    """Brings what the sources name to the router's engines."""

    def __init__(self, router: Router, sources: Sequence[Source]) -> None:
        self._router = router
        self._named: dict[Source, Named] = {source: {} for source in sources}
        self._errors: dict[Source, str] = {}

    async def look(self, state: EngineState = EngineState.UP) -> None:
        """Once at all sources. Engines of the first look take requests at once."""
        for source in self._named:
            try:
                wrong = self._take_over(source, await source.named(), state)
            except (OSError, UsageError) as error:
                wrong = f"is not usable, and nothing is changed: {getattr(error, 'strerror', None) or error}"
            if wrong and self._errors.get(source) != wrong:  # once, until it is over or another one
                log.error("the %s %s", source, wrong)
            self._errors[source] = wrong

    async def watch(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look(EngineState.JOINING)

    def _take_over(self, source: Source, named: Named, state: EngineState) -> str:
        """What is wrong with an engine that is named; the others are taken over. Those that leave make room."""
        engines, before, wrong = self._router.engines, self._named[source], ""
        for url in before.keys() - named.keys():
            engine = engines.get(url)
            if engine is not None:
                engines.move(engine, EngineState.LEAVING)
                log.info("%s engine %s is drained: the %s names it no longer", engine.role, url, source)
            del before[url]
        for url, role in named.items():
            if before.get(url) is not role:
                try:
                    engines.add(url, role, state)
                except UsageError as error:
                    wrong = wrong or f"names an engine that is not taken: {error}"
                else:
                    log.info("%s engine %s is named by the %s", role, url, source)
                    before[url] = role
        return wrong


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
