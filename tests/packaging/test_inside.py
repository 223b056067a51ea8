"""Tests and benchmarks reach private names of the product in tests/support/inside.py alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("connector", "cli", "transport", "kernels", "router")
LISTED = {"_make_src_and_dst_indices", "_registry", "_token_to_req_indices_cache"}
"""Names of vLLM's: a utility that engines without vLLM call so, and two that only vLLM's objects have here."""
PATCHING = ("setattr", "getattr", "hasattr", "delattr", "object")
"""Calls whose second argument is a name."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tops: tuple[str, ...]) -> set[str]:
    """The private names of functions, classes, variables and attributes below these folders."""
    found = set()
    for path in (path for top in tops for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
                found.add(node.attr)
    return set(filter(is_private, found))


def is_own(node: ast.expr) -> bool:
    """Whether it is ``self``, ``cls`` or ``super()``."""
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id in ("self", "cls", "super")


def reached(tree: ast.Module) -> Iterator[str]:
    """The private names that a file reaches for in objects and modules that are not its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_own(node.value) and ast.unparse(node.value) != "torch.cuda":
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvferry."):
            yield from (alias.name for alias in node.names)
        elif (
            isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in PATCHING and len(node.args) > 1
        ):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


@pytest.fixture(scope="module")
def private() -> set[str]:
    """Private names of the product that no test and no benchmark has too."""
    return defined(PRODUCT) - defined(("tests", "benchmarks")) - LISTED


def test_no_private_name_of_the_product_is_reached_elsewhere(private: set[str]) -> None:
    found = []
    for path in (path for top in ("tests", "benchmarks") for path in sorted((ROOT / top).rglob("*.py"))):
        names = private.intersection(reached(ast.parse(path.read_text())))
        found += [f"{path.relative_to(ROOT)}: {name}" for name in names if path.name != "inside.py"]
    assert found == [], "look through tests/support/inside.py"


@pytest.mark.parametrize(
    "line",
    [
        "thread._plans",
        "monkeypatch.setattr(thread, '_plans', 1)",
        "from kvferry.connector.engine.loop import _plans",
        "half.worker._plans.post(1)",
    ],
)
def test_a_reach_is_seen(private: set[str], line: str) -> None:
    assert "_plans" in private.intersection(reached(ast.parse(line)))
    assert "_plans" not in set(reached(ast.parse("self._plans")))
