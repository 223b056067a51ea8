"""The budget of lines by folder, which a change must raise by hand where it needs more room."""

from __future__ import annotations

import subprocess
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUDGET: dict[str, int] = tomllib.loads(Path(__file__).with_name("budget.toml").read_text())["lines"]
COUNTED = (".py", ".html", ".cu", ".c")


def folder_of(file: str) -> str | None:
    """The most particular folder of the budget that has this file."""
    return max((name for name in BUDGET if file.startswith(f"{name}/")), key=len, default=None)


def lines_by_folder() -> Counter[str]:
    """Of the files that git has."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counts: Counter[str] = Counter()
    for file in filter(None, listed.split("\0")):
        folder = folder_of(file)
        if folder and file.endswith(COUNTED) and (ROOT / file).is_file():
            counts[folder] += (ROOT / file).read_bytes().count(b"\n")
    return counts


def over(counts: Counter[str], budget: dict[str, int]) -> list[str]:
    return [f"{name} has {counts[name]} lines, at most {most}" for name, most in budget.items() if counts[name] > most]


def test_no_folder_has_more_lines_than_its_budget() -> None:
    assert over(lines_by_folder(), BUDGET) == [], "shorten it, or raise its number in budget.toml and say what for"


def test_a_folder_that_grows_is_noticed() -> None:
    counts = lines_by_folder()
    assert over(counts + Counter({"cli": BUDGET["cli"]}), BUDGET) != []
    assert over(counts, {"cli": counts["cli"] - 1}) and not over(counts, {"cli": counts["cli"]})


def test_every_folder_of_the_product_has_a_budget() -> None:
    """Also those of connector, each by itself; ``connector`` is its settings alone."""
    inside = {f"connector/{path.name}" for path in (ROOT / "connector").iterdir() if any(path.glob("*.py"))}
    wanted = {
        "connector",
        "cli",
        "transport",
        "transport/planes",
        "transport/control",
        "kernels",
        "router",
        "tests",
        "benchmarks",
    }
    assert set(BUDGET) == inside | wanted
    assert all(lines_by_folder()[name] > 0 for name in BUDGET), "a folder that is gone"
