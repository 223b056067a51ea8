"""Health checks in the background: an engine that fails several is left out until one passes. Beside them, what each
decode engine says of the prompts that it was handed, and whether an engine moves for which a request waits."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import closing
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvferry.router.engines import Engine, EngineState, Role
from kvferry.router.handed_over import SERIES, counts_of
from kvferry.router.http_client import Answer, HttpError, OwnFaultError, RequestProgress
from kvferry.router.legs import log
from kvferry.router.router import Router

MAX_PAGE_BYTES, MAX_LINE_BYTES = 8 << 20, 4 << 10
"""Of a page of metrics; and of one of its lines that are of interest, for the parser's time grows with its square."""
TOKENS_PER_SECOND = 1000.0
"""A step that computes this few moves no counter until it ends."""
LEFT_OUT_SECONDS = 30.0  # An engine that stands still is tried again after so long


@dataclass(frozen=True)
class Checks:
    interval: float = 3.0  # Seconds between two checks of an engine
    failures: int = 3  # So many in a row, and the engine is down; or so many without a movement, and it stands still
    timeout: float = 3.0  # Seconds that one check may take
    still: float = 5.0  # Without a movement for less, no engine stands still, however frequent the checks


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
            await asyncio.gather(asyncio.sleep(self._checks.interval), self.round(self._checks.failures))

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
        """What a D has counted, and whether an engine moves for which a request waits. Where its page cannot be had,
        nothing is known anew."""
        router, handed_over, limit = self._router, engine.handed_over, self._checks.timeout
        since = time.monotonic() - self._checks.interval  # what came after it may have moved nothing yet
        under_way = [leg for leg, url in router.http.under_way.items() if url == engine.url]
        legs = [leg for leg in under_way if leg.sent and not leg.held and leg.at <= since]
        if legs or (engine.role is Role.DECODE and engine.state is not EngineState.DOWN):
            moved = False  # also where nobody answers
            try:
                async with asyncio.timeout(limit):
                    answer = await router.http.send("GET", engine.url, "/metrics", connect=limit)
                    moved = True
                    with closing(answer):
                        lines, page = _lines_of(answer, await answer.body(MAX_PAGE_BYTES))
                    moved, engine.page = page is None or page != engine.page, page
                    counts = await asyncio.to_thread(counts_of, lines)
                if engine.role is Role.DECODE:
                    handed_over.take(counts)
                    handed_over.unreadable = False
            except OwnFaultError:
                moved = True  # nobody knows
            except (HttpError, TimeoutError):
                pass
            except Exception as error:  # the parser raises many kinds, and no page may end the checks of all engines
                if not handed_over.unreadable:
                    handed_over.unreadable = True
                    log.warning("%s engine %s: its page of metrics is unusable: %.200r", engine.role, engine.url, error)
            self._judge(engine, legs, moved=moved)
        else:
            engine.still = 0
        if bool(handed_over.degraded) != handed_over.logged:
            handed_over.logged = not handed_over.logged
            if handed_over.degraded:
                said = "%s engine %s: %s; see docs/troubleshooting.md"
                log.warning(said, engine.role, engine.url, handed_over.degraded)
            else:
                log.info("%s engine %s: prompts are handed over again", engine.role, engine.url)

    def _judge(self, engine: Engine, legs: list[RequestProgress], *, moved: bool) -> None:
        """Give up ``legs``, which wait, of an engine that stands still. A D that has begun an answer, or that no other
        one can replace, gets as long as a prefill. A request that was only passed on tells nothing of an engine."""
        router = self._router
        waits = not all(leg.passed for leg in legs) or (bool(legs) and engine.state is EngineState.DOWN)
        engine.still = engine.still + 1 if waits and not moved else 0
        still = engine.still * self._checks.interval
        patience = max(self._checks.still, self._checks.failures * self._checks.interval)
        patience += max((leg.tokens for leg in legs), default=0.0) // TOKENS_PER_SECOND
        if not waits or still < patience:
            return
        why = f"it stands still: nothing on its /metrics has changed for {still:.0f} s while a request waits"
        if engine.passed_over_until <= router.clock():
            log.warning("%s engine %s is left out: %s", engine.role, engine.url, why)
        router.engines.failed(engine, router.clock(), LEFT_OUT_SECONDS)
        for leg in legs:
            last = engine.role is Role.DECODE and (leg.answered or not router.another_decode([engine]))
            if not last or still >= router.timeouts.prefill:
                leg.give_up(why)


def _lines_of(answer: Answer, page: bytes) -> tuple[str, int | None]:
    """The lines of a page that are of interest, and a hash of all that the engine counts, which is not what its server
    does; None: of nothing. Raises HttpError: it is no page, or a line is too long."""
    if answer.status != 200:
        raise HttpError(f"/metrics answered {answer.status}")
    lines = page.split(b"\n")
    found = [line for line in lines if line.startswith(SERIES)]
    if any(len(line) > MAX_LINE_BYTES for line in found):
        raise HttpError("a line of its page of metrics is too long")
    counted = b"".join(line for line in lines if line.startswith(b"vllm:"))
    return b"\n".join(found).decode(), xxh3_64_intdigest(counted) if counted else None
