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
LOOK_SECONDS = 1.0
"""After so long without a byte of an answer, and as often, the router looks whether its engine moves."""
PAGE_SECONDS = 2.0  # Of such a look
TOKENS_PER_SECOND = 1000.0
"""A step that computes this few moves no counter until it ends."""


@dataclass(frozen=True)
class Checks:
    interval: float = 5.0  # Seconds between two checks of an engine
    failures: int = 3  # So many in a row, and the engine is down
    timeout: float = 5.0  # Seconds that one check may take


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

    async def watch_requests(self) -> None:
        """Look at engines that let requests wait, and give up those of one that stands still."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)
            router, now = self._router, time.monotonic()
            late = now - began - LOOK_SECONDS  # this process stood still: no engine is to blame
            waiting: dict[str, list[RequestProgress]] = {}
            for leg, url in router.http.under_way.items():
                leg.at += late
                if leg.sent and not leg.held and now - leg.at >= LOOK_SECONDS:
                    waiting.setdefault(url, []).append(leg)
            looked = [each for each in router.engines if each.url in waiting or each.still_since is not None]
            there = await asyncio.gather(*(self._look(each, waits=True) for each in looked))
            for engine, answers in zip(looked, there, strict=True):
                for leg in waiting.get(engine.url, ()):
                    self._judge(engine, leg, answers)

    def _judge(self, engine: Engine, leg: RequestProgress, answers: bool) -> None:
        """``answers``: the engine takes connections. Where not, or where another one can be asked, the leg is given up
        soon; else as late as a prefill. One that was only passed on tells nothing of an engine."""
        router, now = self._router, time.monotonic()
        if leg.passed and answers and engine.still_since is None and engine.state is not EngineState.DOWN:
            return
        since = max(leg.at, engine.moved_at)
        patience = engine.patience + leg.tokens / TOKENS_PER_SECOND
        if answers and engine.role is Role.DECODE and (leg.answered or not router.another_decode([engine])):
            patience = max(patience, router.timeouts.prefill)
        if not leg.held and now - since >= patience:
            why = f"it stands still: nothing on its /metrics has changed for {now - since:.0f} s while a request waits"
            if router.engines.stands_still(engine, since, router.clock()):
                log.warning("%s engine %s is left out: %s", engine.role, engine.url, why)
            leg.give_up(why)

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

    async def _look(self, engine: Engine, *, waits: bool = False) -> bool:
        """What a D has counted, or whether an engine moves for which a request waits. Where its page cannot be had,
        nothing is known anew. Returns whether it takes connections."""
        router, handed_over, there, answer = self._router, engine.handed_over, True, None
        if waits or (engine.role is Role.DECODE and engine.state is not EngineState.DOWN):
            limit = PAGE_SECONDS if waits else self._checks.timeout
            try:
                async with asyncio.timeout(limit):
                    answer = await router.http.send("GET", engine.url, "/metrics", connect=limit)
                    with closing(answer):
                        lines, counted = _lines_of(answer, await answer.body(MAX_PAGE_BYTES))
                    if router.engines.moved(engine, counted, router.clock()):
                        log.info("%s engine %s goes on", engine.role, engine.url)
                    counts = await asyncio.to_thread(counts_of, lines)
                if engine.role is Role.DECODE:
                    handed_over.take(counts)
                    handed_over.unreadable = False
            except TimeoutError:
                pass
            except HttpError as error:
                there = answer is not None or isinstance(error, OwnFaultError)
                if there:  # nobody knows what it counts
                    router.engines.moved(engine, None, router.clock())
            except Exception as error:  # the parser raises many kinds, and no page may end the checks of all engines
                if not handed_over.unreadable:
                    handed_over.unreadable = True
                    log.warning("%s engine %s: its page of metrics is unusable: %.200r", engine.role, engine.url, error)
        if bool(handed_over.degraded) != handed_over.logged:
            handed_over.logged = not handed_over.logged
            if handed_over.degraded:
                said = "%s engine %s: %s; see docs/troubleshooting.md"
                log.warning(said, engine.role, engine.url, handed_over.degraded)
            else:
                log.info("%s engine %s: prompts are handed over again", engine.role, engine.url)
        return there


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
