"""The command ``kvferry top``: its options, its loop, and its table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.cli.terminal import print_json
from kvferry.cli.top.figures import NOT_LOADED, EngineRow, PlaneRates
from kvferry.cli.top.poll import MAX_ENGINES, WINDOW_SECONDS, Engines, metrics_url
from kvferry.transport.errors import UsageError

WIDTH = 160
"""Columns where the output is no terminal."""
COLUMNS = (
    "engine", "running", "waiting", "deferred", "loaded", "tokens", "plane", "hand-overs/s", "GB/s", "p50 ms", "p95 ms",
    "not loaded", "retries", "leases/s", "expired",
)  # fmt: skip
_LEFT = ("engine", "plane", "not loaded", "retries")


def top(urls: Sequence[str], *, interval: float, once: bool, as_json: bool) -> bool:
    """Poll until Ctrl-C, or twice. Returns whether an engine answered at the last poll. Raises UsageError: a URL is
    none, or there are too many."""
    pages = list(dict.fromkeys(metrics_url(url) for url in urls))
    if len(pages) > MAX_ENGINES:
        raise UsageError(f"{len(pages)} engines, at most {MAX_ENGINES} fit")
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    rows: list[EngineRow] = []
    engines = Engines(pages, window=0.0 if once else WINDOW_SECONDS)
    try:
        rows = engines.poll()
        if console.is_terminal and not once and not as_json:
            with Live(table(rows), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    rows = engines.poll()
                    live.update(table(rows), refresh=True)
        while True:
            time.sleep(interval)
            rows = engines.poll()
            if as_json:
                print_json(rows)
            else:
                console.print(table(rows))
            if once:
                break
    except KeyboardInterrupt:
        pass
    finally:
        engines.close()
    return not all(row.down or row.router for row in rows)


def table(rows: Sequence[EngineRow]) -> Group:
    """One line for each plane of each engine, or for the engine without hand-overs; below, which prefixes engines have
    read, what routers say of their sources, and why engines are down."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        drawn.add_column(column, justify="left" if column in _LEFT else "right", overflow="fold")
    for engine in rows:
        if engine.router:
            continue
        if engine.down:
            drawn.add_row(Text(engine.engine), *[""] * 5, Text("down", style="bold red"))
            continue
        planes: Sequence[PlaneRates | None] = engine.planes or (None,)
        for number, plane in enumerate(planes):
            own = number == 0
            drawn.add_row(
                Text(engine.engine if own else ""),
                *((str(engine.running), str(engine.waiting), str(engine.deferred)) if own else ("", "", "")),
                *(_loaded_cells(engine) if own else ("", "")),
                *_plane_cells(plane),
                Text(_counts(engine.not_loaded or engine.failed) if own else "", style="red"),
                Text(_counts(engine.retried) if own else ""),
                f"{engine.leases_released_per_second:.1f}" if own else "",
                str(engine.leases_expired) if own else "",
            )
    reasons = [Text(f"{engine.engine}: {engine.down}", style="red") for engine in rows if engine.down]
    return Group(drawn, *(Text(line) for engine in rows for line in _prefix_lines(engine)), *reasons)


def _prefix_lines(engine: EngineRow) -> Iterator[str]:
    read, tokens = (engine.prefixes.get(name, 0) for name in ("loaded", "tokens"))
    if asked := read + sum(engine.prefixes.get(result, 0) for result in NOT_LOADED):
        yield f"{engine.engine} has read a prefix for {read} of {asked} requests that named sources: {tokens} tokens"
    for reader, sources in engine.sources.items():
        yield f"{engine.engine}: requests to {reader}, by the source of a prefix that they named: {_counts(sources)}"
    if engine.router and not engine.sources:
        yield f"{engine.engine} is a router that has named no source of a prefix"


def _loaded_cells(engine: EngineRow) -> tuple[str, str]:
    """Since the start of the engine: prompts that it loaded, of those with parameters of a P, and the share of all
    prompt tokens that it need not compute for that. ``plain``: it had only prompts without."""
    asked = sum(engine.prompts.get(result, 0) for result in ("loaded", *NOT_LOADED))
    loaded, tokens = engine.prompts.get("loaded", 0), sum(engine.tokens.values())
    none = ("plain" if engine.prompts else "-") if engine.kvferry else "[red]no-kvferry[/]"
    share = f"{engine.tokens.get('external_kv_transfer', 0) / tokens:.1%}" if tokens else "-"
    return f"{loaded}/{asked}" if asked else none, share


def _plane_cells(plane: PlaneRates | None) -> tuple[str, ...]:
    if plane is None:
        return ("-", "", "", "", "")
    quantiles = ("-" if value is None else f"{value:.1f}" for value in (plane.p50_ms, plane.p95_ms))
    return plane.plane, f"{plane.handovers_per_second:.1f}", f"{plane.bytes_per_second / 1e9:.2f}", *quantiles


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
