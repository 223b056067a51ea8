"""The command ``kvferry top``: its options, and its loop."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.live import Live

from kvferry.connector.top.engine_figures import EngineRow
from kvferry.connector.top.poll import MAX_ENGINES, WINDOW_SECONDS, Engines, metrics_url
from kvferry.connector.top.view import table
from kvferry.transport.errors import UsageError

WIDTH = 140
"""Columns where the output is no terminal."""


def top(urls: Sequence[str], *, interval: float, once: bool, as_json: bool) -> None:
    """Poll until Ctrl-C, or twice.

    Raises:
        UsageError: a URL is none, or there are too many.
    """
    pages = list(dict.fromkeys(metrics_url(url) for url in urls))
    if len(pages) > MAX_ENGINES:
        raise UsageError(f"{len(pages)} engines, at most {MAX_ENGINES} fit")
    engines = Engines(pages, window=0.0 if once else WINDOW_SECONDS)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    try:
        rows = engines.poll()
        if once:
            time.sleep(interval)
            _print(console, engines.poll(), as_json)
        elif as_json:
            while True:
                time.sleep(interval)
                _print(console, engines.poll(), as_json)
        else:
            with Live(table(rows), console=console, screen=console.is_terminal, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(table(engines.poll()), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        engines.close()


def _print(console: Console, rows: Sequence[EngineRow], as_json: bool) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(rows)), flush=True)
    else:
        console.print(table(rows))
