"""docs/promises.md: every promise and every fault has its row, every cell says something, and every test that is named
exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text()
FOLDER = re.compile(r"`((?:tests|benchmarks)/[\w/.*]*)`")
NAMED = re.compile(r"`((?:tests|benchmarks)/[\w/.]+\.py)(?:::(\w+))?`")
NOTE = re.compile(r"(?<![\w`])\(([a-z])\)")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading, without its own heading."""
    lines = [line for line in PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def rows() -> list[list[str]]:
    return table("Faults")


@cache
def names_in(file: str) -> frozenset[str]:
    path = ROOT / file
    if not path.exists():
        return frozenset()
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


def missing(text: str) -> list[str]:
    """The tests and files in a text that do not exist."""
    found = NAMED.findall(text)
    return [
        f"{file}::{test}" for file, test in found if not (ROOT / file).exists() or (test and test not in names_in(file))
    ]


def test_every_promise_has_tests_that_exist() -> None:
    promises = table("Promises")
    assert len(promises) > 50
    for promise, tests, *planted in promises:
        named = [name for name, _ in NAMED.findall(tests)] + FOLDER.findall(tests)
        assert promise and named and len(planted) == 1, promise
        assert [name for name in named if not list(ROOT.glob(name))] == [], promise


def test_every_fault_has_a_row_and_every_cell_says_something() -> None:
    assert [row[0] for row in rows()] == [f"F{number}" for number in range(1, 26)]
    for row in rows():
        assert len(row) == 6 and all(NAMED.search(cell) or NOTE.search(cell) for cell in row[2:]), row[0]
        assert NAMED.search(row[2]), f"{row[0]}: a fault in host memory has a test"


def test_tests_that_are_named_exist() -> None:
    assert missing(PAGE) == []
    assert missing("`tests/packaging/test_none.py` `tests/packaging/test_promises.py::test_none`") == [
        "tests/packaging/test_none.py::", "tests/packaging/test_promises.py::test_none",
    ]  # fmt: skip


def test_notes_are_there_and_are_used() -> None:
    table = " ".join(" ".join(row) for row in rows())
    assert set(NOTE.findall(table)) == set(re.findall(r"^- \(([a-z])\) ", PAGE, re.MULTILINE))
