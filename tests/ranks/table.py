"""The pairings of docs/compatibility.md, from the result file that ``sweep.py --matrix`` writes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.ranks.matrix import BLOCKS, CONTEXT, PARALLEL, PREFILL_CONTEXT, TABLES, cells
from tests.ranks.pairing import LAYOUTS

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "matrix.json"
FORMS = {
    "parallel": tuple(PARALLEL), "layout": LAYOUTS, "block": tuple(BLOCKS),
    "context": tuple(CONTEXT | PREFILL_CONTEXT),
}  # fmt: skip
TITLES = {
    "parallel": "tensor-parallel (TP) and pipeline-parallel (PP) sizes: heads divided between ranks, replicated heads, "
    "MLA, recurrent states; with stages also MLA layers beside others",
    "layout": "layout of vLLM 0.32, by the order of layers, blocks, heads, tokens (N) and content in memory",
    "block": "tokens in a block",
    "context": "decode context parallelism (DCP): MLA, heads, and both; equal and different interleaves of the tokens; "
    "prefill context parallelism (PCP): MLA",
}


def load() -> dict[str, str]:
    """Outcome by name of the pairing."""
    outcomes: dict[str, str] = json.loads(RESULTS.read_text())
    return outcomes


def save(outcomes: dict[str, str]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(dict(sorted(outcomes.items())), indent=1) + "\n")


def render(outcomes: dict[str, str]) -> str:
    """One row for each table of pairings. A pair of forms passed if all of its hand-overs did."""
    lines = ["| P and D may differ in | forms, each to each | pairs of forms | hand-overs |", "|---|---|---|---|"]
    every = cells()
    for table in TABLES:
        ended: dict[tuple[str, str], list[bool]] = {}
        for cell in (cell for cell in every if cell.table == table):
            ended.setdefault((cell.row, cell.column), []).append(outcomes.get(str(cell.pairing)) == "passed")
        passed = [one for place in ended.values() for one in place]
        pairs = f"{sum(map(all, ended.values()))} of {len(FORMS[table]) ** 2} passed"
        forms = "; ".join(FORMS[table])
        lines.append(f"| {TITLES[table]} | {forms} | {pairs} | {sum(passed)} of {len(passed)} passed |")
    return "\n".join(lines)
