"""The folders of the product: imports go downwards, one folder imports vLLM, no public class name exists twice."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BELOW = {
    "transport": "",
    "kernels": "transport",
    "geometry": "kernels transport",
    "binding": "geometry kernels transport",
    "wire": "geometry kernels transport",
    "pages": "wire geometry kernels transport",
    "prefill_side": "pages wire geometry kernels transport",
    "decode_side": "pages wire geometry kernels transport",
    "step_loads": "pages wire geometry kernels transport",
    "engine": "prefill_side decode_side step_loads pages wire geometry kernels transport",
    "vllm": "engine step_loads wire geometry transport",
    "router": "transport",
    "cli": "router vllm engine prefill_side decode_side step_loads pages wire geometry binding kernels transport",
}
"""The folders that a folder's modules import from, beside its own. The two sides do not know each other."""
CONFIG = "geometry transport"
"""What connector/config.py imports from; every folder may import it."""
TOPS = ("connector", "cli", "transport", "kernels", "router")
MOST_FILES = 15


def modules() -> list[Path]:
    return sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))


def floor(parts: tuple[str, ...]) -> str:
    """The folder of a module by its path below the repository: "config" for connector/config.py."""
    return parts[1].removesuffix(".py") if parts[0] == "connector" and len(parts) > 1 else parts[0]


def imports(path: Path) -> list[tuple[str, ...]]:
    """The modules of ours that a file imports, also inside functions, as paths below the repository."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: imports are absolute"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [tuple(name.split(".")[1:]) for name in names if name.startswith("kvferry.")]
    return [parts for parts in found if parts != ("connector",)]


def test_no_circle_of_folders() -> None:
    """In the order of ``BELOW`` each folder comes after those that it imports from."""
    names = list(BELOW)
    for name, below in BELOW.items():
        assert all(names.index(other) < names.index(name) for other in below.split()), name


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    own = floor(path.relative_to(ROOT).parts)
    allowed = (CONFIG if own == "config" else f"{BELOW[own]} config").split()
    for parts in imports(path):
        assert floor(parts) in (own, *allowed), f"{own} imports {'.'.join(parts)}"


def test_folders_are_small() -> None:
    counts = Counter(path.relative_to(ROOT).parent.as_posix() for path in modules() if path.name != "__init__.py")
    assert {name: count for name, count in counts.items() if count > MOST_FILES} == {}


def test_the_command_starts_without_torch() -> None:
    """PyTorch takes more than a second to import."""
    code = "import sys, kvferry.cli.main, kvferry.cli.top.drain; sys.exit('torch' in sys.modules)"
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


FOLDERS = {path.parent.relative_to(ROOT).as_posix() for path in modules()} - set(TOPS) | {"cli"}


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_every_folder_has_a_docstring(folder: str) -> None:
    assert importlib.import_module(f"kvferry.{folder}".replace("/", ".")).__doc__


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
