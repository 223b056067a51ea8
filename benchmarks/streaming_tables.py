"""The tables of ``streaming.py`` and ``gpu_streaming.py``. Needs no engine: ``summary.py`` makes them from results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tables

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    head = ["engines", "tokens", "GB/s", "way", "first token, ms", "second, ms",
            "P's prefill, ms", "slower than alone, %", "on its core, %", "MiB", "at D at its end",
            "transfer, ms"]  # fmt: skip
    return tables.table(head, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    handed_over = row["mib"] >= 1
    return [
        row["name"], str(row["tokens"]), f"{row['gb_per_s']:g}" if row["gb_per_s"] else "", row["way"],
        f"{row['first_ms']:.0f}", f"{row['second_ms']:.0f}",
        f"{row['prefill_ms']:.0f}", f"{row['prefill_slower_percent']:+.1f}", f"{row['core_slower_percent']:+.1f}",
        f"{row['mib']:.0f}" if handed_over else "", f"{row['before_end']:.0%}" if handed_over else "",
        f"{row['moving_ms']:.0f}" if handed_over else "",
    ]  # fmt: skip


def target_table(verdicts: Sequence[Row]) -> str:
    cells = [
        [one["cell"], one["target"], f"{one['figure']:g}", one["limit"], "yes" if one["met"] else "no"]
        for one in verdicts
    ]
    return tables.table(["cell", "target", "measured", "limit", "met"], cells)


def core_table(rows: Sequence[Row]) -> str:
    """Which threads of the engines had a core, and how many steps computed nothing."""
    head = ["engines", "tokens", "GB/s", "way", "empty steps/s of P", "of D", "threads of P, % of a core", "of D"]
    cells = [
        [row["name"], str(row["tokens"]), f"{row['gb_per_s']:g}" if row["gb_per_s"] else "", row["way"],
         *(str(row["empty_steps"][engine]) for engine in ("P", "D")),
         *(", ".join(f"{name} {share:.0f}" for name, share in row["cores_percent"][engine].items())
           for engine in ("P", "D"))]
        for row in rows
    ]  # fmt: skip
    return tables.table(head, cells)
