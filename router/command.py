"""The command ``kvferry router``."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import re
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvloop
from prometheus_client import disable_created_metrics
from pythonjsonlogger.json import JsonFormatter

from kvferry.connector.config import unknown_variables
from kvferry.router.app import App, Limits
from kvferry.router.engines import EnginePool, Role
from kvferry.router.health import Checks
from kvferry.router.legs import LegTimeouts, log
from kvferry.router.membership import DnsName, EnginesFile, Source
from kvferry.router.router import Router
from kvferry.transport.errors import UsageError, check_positive, quoted, quoted_url
from kvferry.transport.limited_log import LimitedLines
from kvferry.transport.tracing import open_tracer

LINE = "%(asctime)s %(name)s %(levelname)s %(message)s"
OWN_DESCRIPTORS = 256  # For listeners, names, files, and connections that are refused
_ENDPOINT = re.compile(r"(https?|grpc)://([^@/\s]*@)?(\[[0-9a-fA-F:.]+\]|[^@/:\[\]\s]+)(:[1-9]\d{0,4})?(/\S*)?")


def router(
    prefill: Sequence[str] | None, decode: Sequence[str] | None, engines_file: Path | None, *, host: str, port: int,
    serial: bool, always: bool, prefix_reads: bool, connect_timeout: float, prefill_timeout: float,
    abandoned_prefill_timeout: float, health_interval: float, max_requests: int, max_body_mib: int,
    otlp_traces_endpoint: str, log_level: str, log_json: bool,
) -> None:  # fmt: skip
    """Serve until SIGTERM or Ctrl-C; requests in flight end first. Raises KVFerryError: an argument is not usable."""
    timeouts = connect_timeout, prefill_timeout, abandoned_prefill_timeout
    names = "--connect-timeout", "--prefill-timeout", "--abandoned-prefill-timeout", "--health-interval"
    for name, seconds in zip(names, (*timeouts, health_interval), strict=True):
        check_positive(name, seconds)
    if otlp_traces_endpoint and not _ENDPOINT.fullmatch(otlp_traces_endpoint):
        shown = quoted_url(otlp_traces_endpoint)
        raise UsageError(f"--otlp-traces-endpoint is {shown}, expected a URL such as http://127.0.0.1:4317")
    lines = logging.StreamHandler()
    lines.setFormatter((JsonFormatter if log_json else logging.Formatter)(LINE))
    if log_level != "debug":
        lines.addFilter(LimitedLines())
    logging.basicConfig(level=log_level.upper(), handlers=[lines])
    for name, wrong in unknown_variables().items():
        log.warning("%s: %s; remove it, or correct its name", name, wrong)
    given = (prefill or (), Role.PREFILL), (decode or (), Role.DECODE)
    sources: list[Source] = [DnsName(url, role) for urls, role in given for url in urls if url.startswith("dns:")]
    if engines_file is not None:
        file = EnginesFile(engines_file)
        try:
            asyncio.run(file.named())
        except (OSError, UsageError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"the {file} is not usable: {why}") from None
        sources.append(file)
    fixed = [[url for url in urls if not url.startswith("dns:")] for urls, _ in given]
    if not decode and engines_file is None:
        raise UsageError("no decode engine is named: --decode http://HOST:PORT, or --engines-file")
    disable_created_metrics()  # type: ignore[no-untyped-call]
    engines, tracer = EnginePool(*fixed), open_tracer(otlp_traces_endpoint)
    app = App(
        Router(engines, LegTimeouts(*timeouts), serial=serial, always=always, prefix_reads=prefix_reads, tracer=tracer),
        limits=limits_of(max_requests, max_body_mib << 20), checks=Checks(health_interval, timeout=health_interval),
        sources=sources,
    )  # fmt: skip
    with suppress(KeyboardInterrupt):
        uvloop.run(_serve(app, host, port, engines))


async def _serve(app: App, host: str, port: int, engines: EnginePool) -> None:
    """Raises UsageError."""
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    try:
        await app.bind(host=host, port=port)
    except (OSError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise UsageError(f"port {port} of {host} is in use; give --port") from None
        why = (error.strerror or str(error)) if isinstance(error, OSError) else "it is no name of a host"
        raise UsageError(f"port {port} of {quoted(host)} cannot be bound: {why}; give --host or --port") from None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    await app.start()
    p, d = (len(engines.of(role)) for role in (Role.PREFILL, Role.DECODE))
    log.info("serving on http://%s:%d: %d P, %d D", f"[{host}]" if ":" in host else host, port, p, d)
    gc.freeze()  # what was made until now stays
    await over.wait()
    for number in (signal.SIGTERM, signal.SIGINT):  # the second one ends it at once
        loop.remove_signal_handler(number)
    await app.stop()


def limits_of(requests: int, body_bytes: int) -> Limits:
    """For as many descriptors as this process may have: of a request, its own connection and one for each leg, and
    again so many that are kept; the rest is for connections without a request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OWN_DESCRIPTORS + 5 * requests
    soft = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    served = min(requests, max(1, (soft - OWN_DESCRIPTORS) // 5))
    return Limits(served, body_bytes)
