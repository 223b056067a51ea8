"""The budget of lines by folder, which a change must raise by hand where it needs more room."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUDGET: dict[str, int]
BUDGET, CLASSES = tomllib.loads(Path(__file__).with_name("budget.toml").read_text()).values()
COUNTED = (".py", ".html", ".cu", ".c")


def lines_by_folder() -> Counter[str]:
    """Of the files that git has, each by the most particular folder of the budget."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counts: Counter[str] = Counter()
    for file in filter(None, listed.split("\0")):
        folder = max((name for name in BUDGET if file.startswith(f"{name}/")), key=len, default="")
        if folder and file.endswith(COUNTED) and (ROOT / file).is_file():
            counts[folder] += (ROOT / file).read_bytes().count(b"\n")
    return counts


def test_no_folder_has_more_lines_than_its_budget() -> None:
    counts = lines_by_folder()
    over = {name: (counts[name], most) for name, most in BUDGET.items() if not 0 < counts[name] <= most}
    assert over == {}, "shorten it, or raise its number in budget.toml and say what for"


def test_the_product_has_no_more_classes_than_its_budget() -> None:
    files = [
        path for top in ("connector", "cli", "transport", "kernels", "router") for path in (ROOT / top).rglob("*.py")
    ]
    found = sum(isinstance(node, ast.ClassDef) for path in files for node in ast.walk(ast.parse(path.read_text())))
    assert 100 < found <= CLASSES["product"], "merge two, or raise the number in budget.toml and say what for"


def test_every_folder_of_the_product_has_a_budget() -> None:
    """Also those of connector, each by itself; ``connector`` is its settings alone."""
    inside = {f"connector/{path.name}" for path in (ROOT / "connector").iterdir() if any(path.glob("*.py"))}
    others = "connector cli transport transport/planes transport/control kernels router tests benchmarks"
    assert set(BUDGET) == inside | set(others.split())
