"""Health checks in the background: an engine that fails several is left out until one passes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from kvferry.router.engines import Engine
from kvferry.router.http_client import HttpError, OwnFaultError
from kvferry.router.legs import log
from kvferry.router.router import Router


@dataclass(frozen=True)
class Checks:
    """``interval``: seconds between two checks of an engine. ``failures``: so many in a row, and the engine is down.
    ``timeout``: seconds that one check may take."""

    interval: float = 5.0
    failures: int = 3
    timeout: float = 5.0


class HealthChecks:
    """Asks ``/health`` of each engine."""

    def __init__(self, router: Router, checks: Checks) -> None:
        self._router, self._checks = router, checks

    async def round(self, threshold: int = 1) -> None:
        """Before the first request: an engine that does not answer is down at once."""
        await asyncio.gather(*(self._check(engine, threshold) for engine in self._router.engines))

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
