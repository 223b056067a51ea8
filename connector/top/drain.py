"""The wait of ``kvferry drain``: until an engine has no request and holds no lease."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.connector.top.engine_figures import EngineFigures
from kvferry.connector.top.poll import EngineDownError, fetch, metrics_url
from kvferry.transport.errors import UsageError

POLL_SECONDS = 0.5


class BusyError(Exception):
    """The time is over, and the engine has requests, holds leases, or does not answer; one line."""


def wait_until_idle(
    url: str,
    *,
    quiet: float,
    timeout: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Poll the engine's metrics until they show nothing for ``quiet`` seconds, at most ``timeout`` seconds.

    An engine that does not answer may be busy, so it does not count as idle.

    Args:
        url: of the vLLM server.
        quiet: seconds; it must cover the time that a request needs from the router into the engine, and the time that
            the router needs after P's answer to ask D.
        timeout: seconds.
        clock: seconds, never going back.
        sleep: waits for so many seconds.

    Raises:
        UsageError: the URL is of another form, or the page does not have vLLM's figures.
        BusyError: the engine was not idle in time.
    """
    page, end = metrics_url(url), clock() + timeout
    since: float | None = None  # the begin of the polls that showed nothing, up to now
    while True:
        asked = clock()
        try:
            busy = _business(url, fetch(page))
        except EngineDownError as error:
            busy = str(error)
        since = None if busy else asked if since is None else since
        now = clock()
        if since is not None and now - since >= quiet:
            return
        if now >= end:
            raise BusyError(f"{url} is not idle after {timeout:g} s: {busy or f'not for {quiet:g} s yet'}")
        sleep(POLL_SECONDS)


def _business(url: str, figures: EngineFigures) -> str:
    """What the engine has to do; empty where there is nothing."""
    if figures.kv_cache_usage is None:
        raise UsageError(
            f"{url} has no sample of vllm:kv_cache_usage_perc on its /metrics page; expected a vLLM server that was "
            "started without --disable-log-stats"
        )
    if not (figures.running or figures.waiting or figures.kv_cache_usage):
        return ""
    held = f"{figures.kv_cache_usage:.2%} of its KV blocks are held by requests and leases"
    return f"{figures.running:g} request(s) run, {figures.waiting:g} wait, {held}"
