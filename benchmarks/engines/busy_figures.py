"""Rows, ratios and figures of ``busy.py`` from what its turns measured."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

from benchmarks.engines.busy_turns import BusyPair, Sample
from benchmarks.engines.engine_pair import OURS, THEIRS, Marks
from benchmarks.harness import pages, report

BUSY = 32
"""Decoding sequences of the busy D that figures are of."""
SIZES = {"2k": 2001, "8k": 8001, "32k": 32001}
LOADS = {"busy": BUSY, "idle": 0}
TARGETS = {f"{load}_ttft_vs_nixl_{size}": 1.0 for load in LOADS for size in SIZES} | {
    f"gap_p99_vs_nixl_{size}": 1.15 for size in SIZES
}
"""The most that each may be."""
Row = dict[str, Any]


def copy_ms(marks: Marks) -> float | None:
    """From the first copy's begin to the last one's end: on the GPU where that is known, else for the host."""
    begin, end = marks["on_gpu"] if "on_gpu" in marks else (marks.get("begun"), marks.get("ended"))
    return None if begin is None or end is None else (end - begin) * 1e3


def rows_of(pair: BusyPair) -> list[Row]:
    """One row for each cell and prompt length."""
    cells = dict.fromkeys((sample.cell, sample.tokens) for sample in pair.measured)
    return [row_of(pair, [s for s in pair.measured if (s.cell, s.tokens) == key]) for key in cells]


def row_of(pair: BusyPair, samples: list[Sample]) -> Row:
    cell = samples[0].cell
    gaps, local_gaps = ([gap for s in samples for gap in getattr(s, name)] for name in ("gaps", "local_gaps"))
    quiet = pair.quiet.get(cell, [])
    loaded, local = ([round(sample.ttft(which), 3) for sample in samples] for which in ("loaded", "local"))
    copies = [ms for sample in samples if (ms := copy_ms(sample.loaded)) is not None]
    return {
        "connector": pair.connector, "order": cell.order, "sequences": cell.sequences, "tokens": samples[0].tokens,
        "samples": len(samples), "ttft_ms": report.percentile(loaded, 50),
        "local_ttft_ms": report.percentile(local, 50), "copy_ms": report.percentile(copies, 50),
        "ways": dict(sorted(Counter(sample.loaded["way"] for sample in samples).items())),
        "in_sequence": pair.in_sequence[cell.order], "gaps": len(gaps), "quiet_gaps": len(quiet),
        **report.spread("gap", gaps), **report.spread("local_gap", local_gaps), **report.spread("quiet", quiet),
        "all_ttft_ms": loaded, "all_local_ttft_ms": local,
    }  # fmt: skip


def summed_up(rows: list[Row]) -> tuple[dict[str, float], dict[str, float]]:
    """Ratios of both connectors, and KVFerry's figures; those of which a cell was not measured are left out."""
    found = {(r["connector"], r["order"], r["sequences"], r["tokens"]): r for r in rows}
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {}
    for (load, sequences), (size, tokens) in product(LOADS.items(), SIZES.items()):
        ours, theirs = (found.get((connector, "fresh", sequences, tokens)) for connector in (OURS, THEIRS))
        for what, name in (
            ("ttft_ms", f"{load}_ttft"),
            ("local_ttft_ms", f"{load}_local_ttft"),
            ("gap_p99_ms", "gap_p99"),
        ):
            if ours and ours[what] is not None:
                figures[f"{name}_ms_{size}"] = ours[what]
                if theirs and theirs[what]:
                    ratios[f"{name}_vs_nixl_{size}"] = round(ours[what] / theirs[what], 4)
    return ratios, figures


def result_of(rows: list[Row]) -> Row:
    ratios, figures = summed_up(rows)
    return {"ratios": ratios, "figures": figures, "rows": rows}


def show(result: Row) -> None:
    """Print the table, then ratios and figures with their targets."""
    rows = sorted(result["rows"], key=lambda r: (r["order"], r["sequences"], r["tokens"], r["connector"]))
    print(
        pages.table(rows, {"connector": "{connector}", "samples": "{samples}", **pages.OF["gpu-busy-one-gpu"].columns})
    )
    for name, value in (result["ratios"] | result["figures"]).items():
        limit = TARGETS.get(name)
        verdict = "" if limit is None else f"<= {limit:g}  {'reached' if value <= limit else 'NOT REACHED'}"
        print(f"{name:38}{value:10.3f}   {verdict}".rstrip())
