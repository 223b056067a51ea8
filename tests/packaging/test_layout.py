"""The floors of the product: imports go downwards, one folder imports vLLM, no public class name exists twice."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = (
    "transport",
    "kernels",
    "geometry",
    "binding",
    "planning",
    "protocol",
    "transfer",
    "engine",
    "vllm",
    "rank_pair",
    "bench",
    "doctor",
    "top",
    "router",
)
"""From the ground up. A module imports from its own floor and from those below; the commands from all."""
BESIDE = ("binding", "planning", "router")
"""Floors that stand beside those above them: only the commands and the documentation import them."""
COMMANDS = "commands"
TOPS = ("connector", "transport", "kernels", "router")
ALONE = ("transport", "kernels", "router")
"""Top folders that are one floor."""


def modules() -> list[Path]:
    return sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))


def floor(parts: tuple[str, ...]) -> str | None:
    """The floor of a module by its path below the repository; ``None`` for connector/config.py, which all import."""
    if parts[0] in ALONE:
        return parts[0]
    name = parts[1].removesuffix(".py") if len(parts) > 1 else ""
    if name in ("cli", "plan_command", "bench_command", "command_files"):
        return COMMANDS
    return name if name in FLOORS else None


def imports(path: Path) -> list[tuple[str, ...]]:
    """The modules of ours that a file imports, also inside functions, as paths below the repository."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [tuple(name.split(".")[1:]) for name in names if name.startswith("kvferry.")]
    return [parts for parts in found if len(parts) > 1 or parts[0] in ALONE]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    own = floor(path.relative_to(ROOT).parts)
    for parts in imports(path):
        other = floor(parts)
        if own in ALONE:
            assert parts[0] != "connector", f"{'.'.join(parts)}: {own} knows nothing of connector"
        if own == "router":
            assert other in ("router", "transport"), f"{'.'.join(parts)} is imported by router"
        if own == COMMANDS:
            continue
        assert other != COMMANDS, f"{'.'.join(parts)} is a command"
        if own is None:
            assert other in (None, "transport", "geometry"), f"{'.'.join(parts)} is imported by connector/config.py"
        elif other is not None:
            assert FLOORS.index(other) <= FLOORS.index(own), f"{'.'.join(parts)} is above {own}"
            assert other not in BESIDE or own == other, f"{own} imports {'.'.join(parts)}"


def test_the_rows_of_transfer() -> None:
    """Its docstring names each module once, and imports go downwards."""
    folder = ROOT / "connector" / "transfer"
    rows = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert rows is not None
    table = [re.findall(r"[a-z_]+", line.split("|", 2)[2]) for line in rows.splitlines() if line.startswith("| ")][1:]
    places = [(name, place) for place, names in enumerate(table) for name in names]
    place_of = dict(places)
    assert sorted(name for name, _ in places) == sorted(path.stem for path in folder.glob("[a-z]*.py"))
    for name, place in places:
        ours = [parts[2] for parts in imports(folder / f"{name}.py") if parts[1:2] == ("transfer",) and len(parts) > 2]
        above = {other for other in ours if place_of.get(other, place) < place}
        assert not above, f"{name} imports {above}, which are above it"


def test_the_command_starts_without_torch() -> None:
    """PyTorch takes more than a second to import."""
    code = "import sys, kvferry.connector.cli, kvferry.connector.top.drain; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=800, check=False).returncode == 0


def test_vllm_is_imported_in_one_folder() -> None:
    importing = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            if any(name.split(".")[0] == "vllm" for name in names):
                importing.add(path.relative_to(ROOT).parent.as_posix())
    assert importing == {"connector/vllm"}


def test_no_public_class_name_exists_twice() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(path.relative_to(ROOT).as_posix())
    assert len(where) > 100
    assert not {name: paths for name, paths in where.items() if len(paths) > 1}


def test_every_term_of_the_glossary_that_is_a_type_exists() -> None:
    defined = {
        node.name
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    named = set(re.findall(r"`([A-Z][A-Za-z]+)`", (ROOT / "docs" / "glossary.md").read_text()))
    assert len(named) > 15 and not named - defined, f"no such type: {sorted(named - defined)}"


@pytest.mark.parametrize(
    "folder",
    [
        *(f"connector.{name}" for name in FLOORS if name not in ALONE),
        "transport.planes",
        "transport.control",
        "transport.bootstrap",
    ],
)
def test_every_folder_has_a_docstring(folder: str) -> None:
    assert importlib.import_module(f"kvferry.{folder}").__doc__


def test_no_deadline_goes_by_the_time_of_day() -> None:
    """The product reads no clock that somebody can set, so no message can carry its time either. Spans of a trace carry
    the time of day, and nothing else uses it."""
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("*.py")):
            if path == ROOT / "transport" / "tracing.py":
                continue
            tree = ast.parse(path.read_text())
            called = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            assert not called & {"time.time", "time.time_ns", "time.localtime", "datetime.now"}, path
            assert "datetime" not in {
                name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
            }


def test_make_lint_checks_the_types_of_every_file() -> None:
    """What mypy takes for its sources, with the settings of pyproject.toml, are the Python files that git has."""
    show = "from mypy.main import process_options; print(*(s.path for s in process_options([])[0]), sep='\\n')"
    checked = subprocess.run(
        [sys.executable, "-c", show], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = {ROOT / name for name in listed.split() if (ROOT / name).exists()}
    assert {(ROOT / name).resolve() for name in checked} >= wanted
    assert len(checked) == len(set(checked))
