"""The command ``kvferry top``: its options, and its loop."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.live import Live

from kvferry.cli.top.engine_figures import EngineRow
from kvferry.cli.top.poll import MAX_ENGINES, WINDOW_SECONDS, Engines, metrics_url
from kvferry.cli.top.view import table
from kvferry.transport.errors import UsageError

WIDTH = 140
"""Columns where the output is no terminal."""


def top(urls: Sequence[str], *, interval: float, once: bool, as_json: bool) -> bool:
    """Poll until Ctrl-C, or twice.

    Returns:
        Whether an engine answered at the last poll.

    Raises:
        UsageError: a URL is none, or there are too many.
    """
    pages = list(dict.fromkeys(metrics_url(url) for url in urls))
    if len(pages) > MAX_ENGINES:
        raise UsageError(f"{len(pages)} engines, at most {MAX_ENGINES} fit")
    rows: list[EngineRow] = []
    engines = Engines(pages, window=0.0 if once else WINDOW_SECONDS)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    try:
        rows = engines.poll()
        if once:
            time.sleep(interval)
            rows = engines.poll()
            _print(console, rows, as_json)
        elif as_json or not console.is_terminal:
            while True:
                time.sleep(interval)
                rows = engines.poll()
                _print(console, rows, as_json)
        else:
            with Live(table(rows), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    rows = engines.poll()
                    live.update(table(rows), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        engines.close()
    return not all(row.down for row in rows)


def _print(console: Console, rows: Sequence[EngineRow], as_json: bool) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(rows)), flush=True)
    else:
        console.print(table(rows))
