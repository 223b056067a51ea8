"""docs/promises.md: every promise and every fault has its row, every cell says something, and every test that is named
exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text()
NAMED = re.compile(r"`((?:tests|benchmarks)/[\w/.*]*)(?:::(\w+))?`")
NOTE = re.compile(r"(?<![\w`])\(([a-z])\)")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading, without its own heading."""
    lines = [line for line in PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@cache
def names_in(file: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))


def missing(text: str) -> list[str]:
    """The tests, files and folders in a text that do not exist."""
    return [
        f"{name}::{test}"
        for name, test in NAMED.findall(text)
        if not list(ROOT.glob(name)) or (test and test not in names_in(ROOT / name))
    ]


def test_every_promise_has_tests() -> None:
    promises = table("Promises")
    assert len(promises) > 50
    for promise, tests, *planted in promises:
        assert promise and NAMED.search(tests) and len(planted) == 1, promise


def test_every_fault_has_a_row_and_every_cell_says_something() -> None:
    rows = table("Faults")
    assert [row[0] for row in rows] == [f"F{number}" for number in range(1, 26)]
    for row in rows:
        assert len(row) == 6 and all(NAMED.search(cell) or NOTE.search(cell) for cell in row[2:]), row[0]
        assert NAMED.search(row[2]), f"{row[0]}: a fault in host memory has a test"
    notes = set(NOTE.findall(" ".join(cell for row in rows for cell in row)))
    assert notes == set(re.findall(r"^- \(([a-z])\) ", PAGE, re.MULTILINE))


def test_tests_that_are_named_exist() -> None:
    assert missing(PAGE) == []
    planted = "`tests/packaging/test_none.py` `tests/none/` `tests/packaging/test_promises.py::test_none`"
    assert len(missing(planted)) == 3
