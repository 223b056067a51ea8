"""README.md and docs/: short pages, links that lead somewhere, true tables and quotations, promises, a whole site."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from markdown_it import MarkdownIt

from kvferry.connector.wire.metrics import FAILURE_KINDS, PROMPT_ENDS
from kvferry.connector.wire.series import PREFIX, SERIES
from kvferry.transport.registry import plane_names, preferred_planes

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("connector", "cli", "transport", "kernels", "router")
LIMITS = {
    "README.md": 120, "CONTRIBUTING.md": 60, "docs/architecture.md": 110, "docs/testing.md": 110,
    "connector/README.md": 30, "cli/README.md": 30, "transport/README.md": 30, "router/README.md": 30,
}  # fmt: skip
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PAGES += [str(page.relative_to(ROOT)) for folder in PRODUCT for page in sorted((ROOT / folder).rglob("README.md"))]
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
    found = re.search(r"`reason` of a load or an attempt is one of (.*?)\.", text)
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


@cache
def classes() -> dict[str, str]:
    """The code of each class of the product."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    return {node.name: ast.unparse(node) for node in nodes if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize("page", PAGES)
def test_modules_files_and_folders_that_are_named_exist(page: str) -> None:
    codes = CODE.findall(read(page))
    texts = set(templates().split("\n"))  # an attribute of a span is a text in the source
    modules = set(re.findall(r"\bkvferry(?:\.\w+)+", "\n".join(codes)))
    assert [name for name in sorted(modules) if not (exists(name) or name in texts)] == []
    tops = "connector|cli|transport|kernels|router|tests|examples|benchmarks|docs"
    files = [code for code in codes if re.fullmatch(rf"({tops})(/[\w.\-]+)+/?", code)]
    assert [name for name in files if "NAME" not in name and not (ROOT / name).exists()] == []
    named = [match for code in codes if (match := re.fullmatch(r"(\w+)\.(\w+)", code)) and match[1] in classes()]
    assert [one[0] for one in named if not re.search(rf"^    (def )?{one[2]}\b", classes()[one[1]], re.MULTILINE)] == []


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    codes = "\n".join(code for page in PAGES for code in CODE.findall(read(page)))
    assert {"demo", "test"} <= set(re.findall(r"\bmake ([a-z][\w-]*)", codes)) <= targets


PAGE = (ROOT / "docs" / "promises.md").read_text()
NAMED = re.compile(r"`((?:tests|benchmarks)/[\w/.*]*)(?:::(\w+))?`")
NOTE = re.compile(r"(?<![\w`])\(([a-z])\)")


def table_of(heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading, without its own heading."""
    lines = [line for line in PAGE.split(f"## {heading}\n")[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@cache
def names_in(file: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))


def missing_tests(text: str) -> list[str]:
    """The tests, files and folders in a text that do not exist."""
    return [
        f"{name}::{test}"
        for name, test in NAMED.findall(text)
        if not list(ROOT.glob(name)) or (test and test not in names_in(ROOT / name))
    ]


def test_every_promise_has_tests() -> None:
    groups = re.findall(r"^## (.+)$", PAGE, re.MULTILINE)[:-1]
    promises = {promise: tests for group in groups for promise, tests in table_of(group)}
    assert len(promises) > 50
    assert [one for one, tests in promises.items() if not (0 < len(one.split()) <= 20 and NAMED.search(tests))] == []
    assert {*re.findall(r"^\| (.+?) \| ", read("tests/planted_faults.md"), re.MULTILINE)} <= {*promises, "promise"}


def test_every_fault_has_a_row_and_every_cell_says_something() -> None:
    rows = table_of("Faults")
    assert [row[0] for row in rows] == [f"F{number}" for number in range(1, 26)]
    for row in rows:
        assert len(row) == 6 and all(NAMED.search(cell) or NOTE.search(cell) for cell in row[2:]), row[0]
        assert NAMED.search(row[2]), f"{row[0]}: a fault in host memory has a test"
    notes = set(NOTE.findall(" ".join(cell for row in rows for cell in row)))
    assert notes == set(re.findall(r"^- \(([a-z])\) ", PAGE, re.MULTILINE))


def test_tests_that_are_named_exist() -> None:
    assert missing_tests(PAGE + read("tests/planted_faults.md")) == []
    planted = "`tests/packaging/test_none.py` `tests/none/` `tests/packaging/test_docs.py::test_none`"
    assert len(missing_tests(planted)) == 3


CONFIG = ROOT / "mkdocs.yml"
SITE_PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)\"|<link\b(?![^>]*canonical)[^>]*href=\"([^\"]+)\""
)


def build(config: Path, target: Path) -> str:
    """What a strict build says where it fails; empty where it ended well. Not with --quiet, which hides warnings also
    from --strict."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=800)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    assert build(CONFIG, target) == ""
    return target


def test_nothing_is_fetched_from_another_host_and_pictures_are_shown(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(SITE_PAGES)
    fetched = {page: ["".join(found) for found in FETCHED.findall(page.read_text())] for page in pages}
    assert all(fetched.values())
    assert [url for urls in fetched.values() for url in urls if re.match(r"(?:\w+:)?//", url)] == []
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//", style.read_text()), style
    shown = [url for url in fetched[site / "docs" / "benchmarks.html"] if url.endswith(".svg")]
    assert shown and all((site / "docs" / url).is_file() for url in shown)


@pytest.mark.parametrize("page", [page for page in SITE_PAGES if page != "docs/api.md"])
def test_a_page_reads_as_it_does_in_the_repository(page: str, site: Path) -> None:
    """MkDocs' Markdown is not CommonMark: a list right behind a line of text is none for it."""
    expected = MarkdownIt("commonmark").enable("table").render((ROOT / page).read_text())
    path = site / ("index.html" if page == "README.md" else Path(page).with_suffix(".html"))
    shown = path.read_text().split('<article class="md-content__inner md-typeset">')[1].split("</article>")[0]
    for tag in ("li", "tr", "td", "pre", "code", "h1", "h2", "h3", "img", "ol", "ul", "strong"):
        assert len(re.findall(f"<{tag}[ >]", shown)) == len(re.findall(f"<{tag}[ >]", expected)), tag


def test_the_reference_has_each_name_with_its_members(site: Path) -> None:
    page = (site / "docs" / "api.html").read_text()
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    half = "kvferry.connector.scheduler.scheduler.SchedulerHalf"
    names += [f"{half}.take_plan", f"{half}.set_ranks", f"{half}.clock"]  # its own, of a base class, a field
    assert [name for name in names if f'id="{name}"' not in page] == []
    assert "Tokens of a block, on all ranks together" in page  # the comment behind a field
