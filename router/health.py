"""Health checks in the background: an engine that fails several is left out until one passes. Beside them, what each
decode engine says of the prompts that it was handed."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from kvferry.router.engines import Engine, EngineState, Role
from kvferry.router.handed_over import SERIES, counts_of
from kvferry.router.http_client import Answer, HttpError, OwnFaultError
from kvferry.router.legs import log
from kvferry.router.router import Router

MAX_PAGE_BYTES, MAX_KEPT_BYTES, MAX_LINE_BYTES = 32 << 20, 1 << 20, 4 << 10
"""Of a page of metrics; of its lines that are of interest; and of one of these, for the parser's time grows with the
square of it."""


@dataclass(frozen=True)
class Checks:
    """``interval``: seconds between two checks of an engine. ``failures``: so many in a row, and the engine is down.
    ``timeout``: seconds that one check may take."""

    interval: float = 5.0
    failures: int = 3
    timeout: float = 5.0


class HealthChecks:
    """Asks ``/health`` of each engine, and ``/metrics`` of each D."""

    def __init__(self, router: Router, checks: Checks) -> None:
        self._router, self._checks = router, checks

    async def round(self, threshold: int = 1) -> None:
        """Before the first request: an engine that does not answer is down at once."""
        checks = [self._check(engine, threshold) for engine in self._router.engines]
        await asyncio.gather(*checks, *map(self._look, self._router.engines))

    async def watch(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(self._checks.interval)
            await self.round(self._checks.failures)

    async def _check(self, engine: Engine, threshold: int) -> None:
        limit = self._checks.timeout
        try:
            async with asyncio.timeout(limit):
                answer = await self._router.http.send("GET", engine.url, "/health", connect=limit)
                await answer.body()
                answer.close()
            passed, what = answer.status == 200, f"/health answered {answer.status}"
        except OwnFaultError:
            return  # nobody knows, because this machine has no connection to spare
        except (HttpError, TimeoutError) as error:
            passed, what = False, str(error) or f"no answer of /health in {limit:g} s"
        if self._router.engines.checked(engine, passed, threshold):
            level = logging.INFO if passed else logging.WARNING
            log.log(level, "%s engine %s is %s: %s", engine.role, engine.url, engine.state, what)

    async def _look(self, engine: Engine) -> None:
        """What a D has counted. Where its page cannot be had, nothing is known anew."""
        handed_over, limit = engine.handed_over, self._checks.timeout
        if engine.role is Role.DECODE and engine.state is not EngineState.DOWN:
            try:
                async with asyncio.timeout(limit):
                    answer = await self._router.http.send("GET", engine.url, "/metrics", connect=limit)
                    try:
                        lines = await _lines_of(answer)
                    finally:
                        answer.close()
                    counts = await asyncio.to_thread(counts_of, lines)
                handed_over.take(counts)
                handed_over.unreadable = False
            except (HttpError, TimeoutError):
                pass
            except Exception as error:  # the parser raises many kinds, and no page may end the checks of all engines
                if not handed_over.unreadable:
                    handed_over.unreadable = True
                    log.warning("%s engine %s: its page of metrics is unusable: %.200r", engine.role, engine.url, error)
        if bool(handed_over.degraded) != handed_over.logged:
            handed_over.logged = not handed_over.logged
            if handed_over.degraded:
                said = f"{handed_over.degraded}; see docs/troubleshooting.md"
                log.warning("%s engine %s: %s", engine.role, engine.url, said)
            else:
                log.info("%s engine %s: prompts are handed over again", engine.role, engine.url)


async def _lines_of(answer: Answer) -> str:
    """The lines of a page that are of interest. Raises HttpError: it is none, or there is too much of it."""
    kept, rest, size, kept_size = list[bytes](), b"", 0, 0
    async for piece in answer.pieces():
        *lines, rest = (rest + piece).split(b"\n")
        rest = rest[: MAX_LINE_BYTES + 1]  # a longer line is too long already
        found = [line for line in lines if line.startswith(SERIES)]
        kept += found
        size, kept_size = size + len(piece), kept_size + sum(map(len, found))
        longest = max(map(len, found), default=0)
        if size > MAX_PAGE_BYTES or kept_size > MAX_KEPT_BYTES or longest > MAX_LINE_BYTES:
            raise HttpError("the page of metrics is too large")
    if answer.status != 200:
        raise HttpError(f"/metrics answered {answer.status}")
    return b"\n".join(kept).decode()
