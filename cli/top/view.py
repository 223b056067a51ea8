"""The table of ``kvferry top``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvferry.cli.top.engine_figures import EngineRow, PlaneRates

COLUMNS = (
    "engine", "running", "waiting", "deferred", "plane", "hand-overs/s", "GB/s", "p50 ms", "p95 ms", "failed",
    "retries", "leases/s", "expired",
)  # fmt: skip
_LEFT = ("engine", "plane", "failed", "retries")


def table(rows: Sequence[EngineRow]) -> Group:
    """One line for each plane of each engine, or for the engine without hand-overs; below, why engines are down."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        drawn.add_column(column, justify="left" if column in _LEFT else "right", overflow="fold")
    for engine in rows:
        if engine.down:
            drawn.add_row(Text(engine.engine), "", "", "", Text("down", style="bold red"))
            continue
        planes: Sequence[PlaneRates | None] = engine.planes or (None,)
        for number, plane in enumerate(planes):
            own = number == 0
            drawn.add_row(
                Text(engine.engine if own else ""),
                *((str(engine.running), str(engine.waiting), str(engine.deferred)) if own else ("", "", "")),
                *_plane_cells(plane),
                Text(_counts(engine.failed) if own else "", style="red"),
                Text(_counts(engine.retried) if own else ""),
                f"{engine.leases_released_per_second:.1f}" if own else "",
                str(engine.leases_expired) if own else "",
            )
    reasons = [Text(f"{engine.engine}: {engine.down}", style="red") for engine in rows if engine.down]
    return Group(drawn, *reasons)


def _plane_cells(plane: PlaneRates | None) -> tuple[str, ...]:
    if plane is None:
        return ("-", "", "", "", "")
    quantiles = ("-" if value is None else f"{value:.1f}" for value in (plane.p50_ms, plane.p95_ms))
    return plane.plane, f"{plane.handovers_per_second:.1f}", f"{plane.bytes_per_second / 1e9:.2f}", *quantiles


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
