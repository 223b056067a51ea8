"""The tables of docs/compatibility.md, made from the result file that ``sweep.py --matrix`` writes.

python tests/ranks/table.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from tests.ranks.matrix import BLOCKS, CONTEXT, PARALLEL, TABLES, Cell, cells
from tests.ranks.pairing import LAYOUTS

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "matrix.json"
FORMS = {"parallel": tuple(PARALLEL), "layout": LAYOUTS, "block": tuple(BLOCKS), "context": tuple(CONTEXT)}
TITLES = {
    "parallel": "Tensor-parallel (TP) and pipeline-parallel (PP) sizes. A mark stands for hand-overs with heads "
    "divided between the ranks, with replicated heads, with MLA, with recurrent states, and, where there are pipeline "
    "stages, with MLA layers beside other layers:",
    "layout": "Layouts of vLLM 0.32, by the order of layers, blocks, heads, tokens (N) and content in memory:",
    "block": "Tokens in a block:",
    "context": "Decode context parallelism (DCP). A mark stands for hand-overs with MLA, with heads, and with both; "
    "with equal and with different interleaves of the tokens on the two sides:",
}


def load() -> dict[str, str]:
    """Outcome by name of the pairing."""
    outcomes: dict[str, str] = json.loads(RESULTS.read_text())
    return outcomes


def save(outcomes: dict[str, str]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(dict(sorted(outcomes.items())), indent=1) + "\n")


def mark(found: list[Cell], outcomes: dict[str, str]) -> str:
    """Of one place in a table: passed, failed, or empty where no test ran."""
    ended = [outcomes.get(str(cell.pairing)) for cell in found]
    if not ended or None in ended:
        return ""
    return "✓" if set(ended) == {"passed"} else "✗"


def render(outcomes: dict[str, str]) -> str:
    """All tables: rows are P's form, columns D's."""
    parts, every = [], cells()
    for table in TABLES:
        lines = [["P \\ D", *FORMS[table]], ["---"] * (1 + len(FORMS[table]))]
        for row in FORMS[table]:
            places = [[c for c in every if (c.table, c.row, c.column) == (table, row, d)] for d in FORMS[table]]
            lines.append([row, *(mark(found, outcomes) for found in places)])
        parts.append(f"{TITLES[table]}\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(render(load()))
