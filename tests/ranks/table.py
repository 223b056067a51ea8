"""The support tables of the README, out of the result file that ``test_matrix.py`` writes.

python tests/ranks/table.py
"""

from __future__ import annotations

import json
from pathlib import Path

from matrix import BLOCKS, CONTEXT, PARALLEL, TABLES, Cell, cells
from pairing import LAYOUTS

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "matrix.json"
FORMS = {"parallel": tuple(PARALLEL), "layout": LAYOUTS, "block": tuple(BLOCKS), "context": tuple(CONTEXT)}
TITLES = {
    "parallel": "Ranks: each cell is a hand-over with heads split between the ranks, one with replicated heads, one "
    "with MLA, one with states, and, with pipeline stages, one with MLA layers beside others",
    "layout": "Layouts of vLLM 0.32",
    "block": "Tokens of a block",
    "context": "Decode context parallelism: each cell is a hand-over with MLA, one with heads, one with both, tokens "
    "shared out alike on both sides and not",
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
        parts.append(f"{TITLES[table]}:\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(render(load()))
