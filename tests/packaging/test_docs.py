"""README.md and docs/: pages that are short, links that lead somewhere, tables and quotations that are true."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.connector.wire.metrics import FAILURE_KINDS, PROMPT_ENDS
from kvferry.connector.wire.series import PREFIX, SERIES
from kvferry.transport.registry import plane_names, preferred_planes

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("connector", "cli", "transport", "kernels", "router")
LIMITS = {
    "README.md": 150, "CONTRIBUTING.md": 60, "docs/architecture.md": 64, "docs/glossary.md": 55, "docs/testing.md": 100,
    "docs/faults.md": 70, "connector/README.md": 30, "cli/README.md": 30, "transport/README.md": 30,
    "router/README.md": 30,
}  # fmt: skip
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PAGES += [f"{folder}/README.md" for folder in PRODUCT if (ROOT / folder / "README.md").exists()]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")


def read(page: str) -> str:
    return (ROOT / page).read_text()


def cells(page: str, column: int) -> list[str]:
    """One column of all tables of a page, without their headings."""
    found, previous = [], ""
    for line in read(page).splitlines():
        row = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        is_rule = set("".join(row)) <= set("-")
        if row and not is_rule and previous and column < len(row):
            found.append(row[column])
        previous = line if line.startswith("|") else ""
    return found


@cache
def trees() -> dict[Path, ast.Module]:
    """The product's source files, parsed."""
    return {path: ast.parse(path.read_text()) for top in PRODUCT for path in sorted((ROOT / top).rglob("*.py"))}


@cache
def templates() -> str:
    """All texts in the product's code, without docstrings, one a line; a value that is filled in is ``\\0``."""
    found = set()
    for tree in trees().values():
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in (node for node in ast.walk(tree) if id(node) not in docs):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.add("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%(?:\.\d+)?[sdrfgx]", "\0", node.value))
            elif isinstance(node, ast.ClassDef):
                found.add(f"{node.name}: ")  # an exception, as a traceback shows it
    return "\n".join(text.replace("\n", " ") for text in found)


def in_source(quoted: str) -> bool:
    """Whether one text of the source has this; ``...`` in it stands for one value, or for several in a row."""
    parts = [re.escape(part) for part in quoted.split("...")]
    return re.search("\0+".join(parts), templates()) is not None


def test_pages_are_short_and_reached_from_the_readme() -> None:
    assert [page for page, most in LIMITS.items() if len(read(page).splitlines()) > most] == []
    linked = {link.partition("#")[0] for link in LINK.findall(read("README.md"))}
    linked |= {f"docs/{link}" for link in LINK.findall(read("docs/library.md"))}
    assert {page for page in PAGES if page.startswith("docs/")} <= linked


@cache
def generator() -> dict[str, Any]:
    """What docs/generate.py defines. The folders and modules that it imports do not stay importable for other tests."""
    path, modules = list(sys.path), set(sys.modules)
    try:
        return runpy.run_path(str(ROOT / "docs" / "generate.py"))
    finally:
        sys.path[:] = path
        for name in sys.modules.keys() - modules:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{ROOT}/docs/"):
                del sys.modules[name]


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_as_their_generators_print_them(page: str) -> None:
    text = read(page)
    if page in generator()["REGIONS"]:
        assert generator()["filled"](page, text) == text, "run make docs"
    else:
        assert "<!-- generated " not in text or page == "CONTRIBUTING.md", "its tables are not generated"


def test_pictures_are_as_their_generators_draw_them() -> None:
    assert [name for name, make in generator()["PICTURES"].items() if read(name) != make()] == [], "run make docs"


def test_a_changed_table_and_one_without_end_are_noticed() -> None:
    text = read("docs/settings.md")
    assert generator()["filled"]("docs/settings.md", text.replace("`127.0.0.1`", "`0.0.0.0`")) == text
    with pytest.raises(generator()["PageError"]):
        generator()["filled"]("docs/settings.md", text.replace("<!-- end of settings -->", ""))


def quoted_lines() -> list[str]:
    """What docs/troubleshooting.md has in code in the first column of its tables, and log lines of all pages."""
    first = [code for cell in cells("docs/troubleshooting.md", 0) for code in CODE.findall(cell)]
    lines = [code for page in PAGES for code in CODE.findall(read(page)) if code.startswith("kvferry: ")]
    return list(dict.fromkeys(first + lines))


def test_quoted_log_lines_are_in_the_source() -> None:
    assert len(quoted_lines()) > 25
    assert [quoted for quoted in quoted_lines() if not in_source(quoted)] == []
    assert not in_source("kvferry: hand-over of ... ended: ... tokens") and not in_source("GPU ... has no ... access")


def test_metrics_and_reasons_that_a_page_names_exist() -> None:
    suffixes = {"counter": ("_total", ""), "gauge": ("",), "histogram": ("", "_bucket", "_sum", "_count")}
    names = {PREFIX + series.name + suffix for series in SERIES for suffix in suffixes[series.kind]}
    shown = {(page, name) for page in PAGES for name in re.findall(r"vllm:kvferry_\w+[a-z]", read(page))}
    assert len(shown) > len(SERIES) and not {(page, name) for page, name in shown if name not in names}
    text = read("docs/observability.md").replace("\n", " ")
    found = re.search(r"`reason` of a hand-over or an attempt is one of (.*?)\.", text)
    assert found is not None and CODE.findall(found[1]) == list(FAILURE_KINDS)
    explained = {code for cell in cells("docs/troubleshooting.md", 0) for code in CODE.findall(cell)}
    assert {reason for _, reason in PROMPT_ENDS if reason} <= explained


def test_planes_are_those_of_the_source() -> None:
    """The table and the orders of preference of docs/data-planes.md."""
    page = " ".join(read("docs/data-planes.md").split())
    assert {code for cell in cells("docs/data-planes.md", 0) for code in CODE.findall(cell)} == set(plane_names())
    gpu, host = re.search(r"caches on GPUs: (.+?)\. Caches in host memory: (.+?)\.", page).groups()  # type: ignore[union-attr]
    for kind, named in (("cuda", gpu), ("cpu", host)):
        assert tuple(CODE.findall(named)) == preferred_planes(torch.device(kind))


def exists(dotted: str) -> bool:
    """Whether ``kvferry.folder.module.Name`` is a module of the source, or a name in one; nothing is imported."""
    parts = dotted.split(".")[1:]
    for n in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:n])
        if (module := path.with_suffix(".py")).exists():
            name = re.escape(".".join(parts[n : n + 1]))
            return n == len(parts) or re.search(rf"^(?:class |def )?{name}\b", module.read_text(), re.M) is not None
        if path.is_dir():
            return n == len(parts)
    return False


@pytest.mark.parametrize("page", PAGES)
def test_modules_files_and_folders_that_are_named_exist(page: str) -> None:
    codes = CODE.findall(read(page))
    texts = set(templates().split("\n"))  # an attribute of a span is a text in the source
    modules = set(re.findall(r"\bkvferry(?:\.\w+)+", "\n".join(codes)))
    assert [name for name in sorted(modules) if not (exists(name) or name in texts)] == []
    tops = "connector|cli|transport|kernels|router|tests|examples|benchmarks|docs"
    files = [code for code in codes if re.fullmatch(rf"({tops})(/[\w.\-]+)+/?", code)]
    assert [name for name in files if "NAME" not in name and not (ROOT / name).exists()] == []


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    codes = "\n".join(code for page in PAGES for code in CODE.findall(read(page)))
    assert {"demo", "test"} <= set(re.findall(r"\bmake ([a-z][\w-]*)", codes)) <= targets
