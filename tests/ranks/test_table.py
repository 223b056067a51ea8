"""The tables of docs/compatibility.md rest on the matrix as it is, and show what did not pass."""

from __future__ import annotations

from matrix import BLOCKS, CONTEXT, PARALLEL, cells
from pairing import LAYOUTS
from table import load, render

CELLS = cells()


def test_the_tables_are_of_this_matrix() -> None:
    """The tracked file is the one that the tables are made from."""
    outcomes = load()
    assert set(outcomes) == {str(cell.pairing) for cell in CELLS}, "run all of tests/ranks/test_matrix.py again"
    shown = render(outcomes)
    assert "✗" not in shown and shown.count("✓") == sum(
        len(forms) ** 2 for forms in (PARALLEL, LAYOUTS, BLOCKS, CONTEXT)
    )
    outcomes[str(CELLS[0].pairing)] = "failed"
    assert "✗" in render(outcomes)
    del outcomes[str(CELLS[-1].pairing)]
    assert "|  |" in render(outcomes)
