"""Engines at run time: named by a file or by a DNS name, both looked at again every few seconds.

A source's engines are compared with what it named at the last look: those new to it are added, those that it names no
longer are drained and then forgotten.

A file has one engine a line, ``prefill http://HOST:PORT`` or ``decode http://HOST:PORT``; ``#`` begins a comment.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from kvferry.router.engines import EngineState, Role, engine_url
from kvferry.router.legs import log
from kvferry.router.router import Router
from kvferry.transport.errors import UsageError, quoted_url

Named = dict[str, Role]  # Engines by URL
LOOK_SECONDS = 3.0


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
        return engines_of(self._path.read_text(errors="replace"))


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
    if not named:
        raise UsageError("it names no engine")
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
            wrong = ""
            try:
                self._take_over(source, await source.named(), state)
            except (OSError, UsageError) as error:
                wrong = str(getattr(error, "strerror", None) or error)
            if wrong and self._errors.get(source) != wrong:  # once, until it is over or another one
                log.error("the %s is not usable, and nothing is changed: %s", source, wrong)
            self._errors[source] = wrong

    async def watch(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look(EngineState.DOWN)

    def _take_over(self, source: Source, named: Named, state: EngineState) -> None:
        engines, before = self._router.engines, self._named[source]
        for url in before.keys() - named.keys():
            engine = engines.get(url)
            if engine is not None:
                engines.leave(engine)
                log.info("%s engine %s is drained: the %s names it no longer", engine.role, url, source)
            del before[url]
        for url, role in named.items():
            if before.get(url) is not role:
                engines.add(url, role, state)
                log.info("%s engine %s is named by the %s", role, url, source)
                before[url] = role
