"""The wait of ``kvferry drain``: until an engine has no request and holds no lease."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client.samples import Sample

from kvferry.cli.metrics_page import PageError, fetch_samples, server_url
from kvferry.cli.terminal import FailedError
from kvferry.transport.errors import UsageError

POLL_SECONDS = 0.5
SAY_SECONDS = 10.0
"""How often ``wait_until_idle`` says what it waits for."""
_HELD = "vllm:kv_cache_usage_perc"
"""The share of the KV blocks that requests and leases hold, 0 to 1."""


def wait_until_idle(
    url: str, *, quiet: float, timeout: float, say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
) -> None:  # fmt: skip
    """Poll the engine's metrics until they show nothing for ``quiet`` seconds, which must cover the time that a request
    needs from the router into the engine. ``say`` is given a line at once where it is busy, then every ``SAY_SECONDS``.

    Raises UsageError: the URL, the page's figures, or the times are not usable; FailedError: the engine is gone; or it
    is not idle, or does not answer, and so may be busy, and the time is over.
    """
    server = server_url(url)
    if timeout < quiet:
        raise UsageError(f"--timeout {timeout:g} is shorter than --quiet {quiet:g}; give a longer one")
    end, say_next = clock() + timeout, clock()
    since: float | None = None  # the begin of the polls that showed nothing, up to now
    while True:
        asked = clock()
        try:
            busy = _business(url, fetch_samples(server))
        except PageError as error:
            if error.gone:
                text = "nothing listens there; it has ended, or it has not begun, or the URL is another one"
                raise FailedError(f"{url} has nothing to drain: {text}") from None
            busy = str(error)
        since = None if busy else asked if since is None else since
        now = clock()
        if since is not None and now - since >= quiet:
            return
        if now >= end:
            raise FailedError(f"{url} is not idle after {timeout:g} s: {busy or f'not for {quiet:g} s yet'}")
        if busy and now >= say_next:
            say(f"waiting for {url}: {busy}")
            say_next = now + SAY_SECONDS
        sleep(POLL_SECONDS)


def _business(url: str, page: Iterable[Sample]) -> str:
    """What the engines of a page have to do; empty where there is nothing."""
    figures: dict[str, list[float]] = {}
    for sample in page:
        figures.setdefault(sample.name, []).append(sample.value)
    if _HELD not in figures:
        raise UsageError(
            f"{url} has no sample of {_HELD} on its /metrics page; expected a vLLM server that was started without "
            "--disable-log-stats"
        )
    running, waiting = (sum(figures.get(f"vllm:num_requests_{name}", ())) for name in ("running", "waiting"))
    held = max(figures[_HELD])
    if not (running or waiting or held):
        return ""
    held_text = f"{held:.2%} of its KV blocks are held by requests and leases"
    return f"{running:g} request(s) run, {waiting:g} wait, {held_text}"
