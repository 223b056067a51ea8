"""Tests and benchmarks reach private names of the product in tests/support/inside.py alone."""

from __future__ import annotations

import ast
import re
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


def is_own(node: ast.expr) -> bool:
    """Whether it is ``self``, ``cls`` or ``super()``."""
    name = node.func if isinstance(node, ast.Call) else node
    return isinstance(name, ast.Name) and name.id in ("self", "cls", "super")


def defined(tree: ast.Module) -> Iterator[str]:
    """The private names of functions, classes, variables and attributes of a file."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield from filter(is_private, [name])
            case ast.Name(id=name, ctx=ast.Store()):
                yield from filter(is_private, [name])
            case ast.Attribute(value=value, attr=name, ctx=ast.Store()) if is_own(value):
                yield from filter(is_private, [name])


def reached(tree: ast.Module) -> Iterator[str]:
    """The private names that a file reaches for in objects and modules that are not its own."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name) and not is_own(value):
                yield from () if ast.unparse(value) == "torch.cuda" else (name,)
            case ast.ImportFrom(module=str(module)) if module.startswith("kvferry."):
                yield from (alias.name for alias in node.names)
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called), args=[_, ast.Constant(value=name), *_]
            ):
                yield from (name,) if called in PATCHING and isinstance(name, str) else ()


def test_no_private_name_of_the_product_is_reached_elsewhere() -> None:
    """Of those that no test and no benchmark has too. What does not name any is not parsed."""
    private = {
        name for top in PRODUCT for path in (ROOT / top).rglob("*.py") for name in defined(parsed(path))
    } - LISTED
    trees = {
        path: parsed(path)
        for top in ("tests", "benchmarks")
        for path in sorted((ROOT / top).rglob("*.py"))
        if not private.isdisjoint(re.findall(r"\b_\w+", path.read_text()))
    }
    private -= {name for tree in trees.values() for name in defined(tree)}
    found = {
        path.relative_to(ROOT).as_posix(): names
        for path, tree in trees.items()
        if path.name != "inside.py" and (names := private.intersection(reached(tree)))
    }
    assert found == {}, "look through tests/support/inside.py"


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize(
    "line",
    ["thread._x", "monkeypatch.setattr(thread, '_x', 1)", "from kvferry.a import _x", "half.worker._x.post(1)"],
)
def test_a_reach_is_seen(line: str) -> None:
    assert "_x" in reached(ast.parse(line)) and "_x" not in reached(ast.parse("self._x"))
