"""Shared by the summaries of results: where the results are, tables in Markdown, the sentence about the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
RECOMMENDED_POLICY = "recompute"
"""What README.md recommends for ``kv_load_failure_policy``."""

NIXL, NIXL_THREAD = "nixl", "nixl, progress thread on D"
"""NIXL, whose progress thread on P serves; D polls in a loop, with or without a progress thread beside it."""
NIXL_PLANE = "nixl plane"
"""KVFerry's plane ``nixl``; ``NIXL`` is NIXL's own way."""
NIXL_RAW = {"nixl raw read": "READ", "nixl raw write": "WRITE"}
"""NIXL's operations of 4 MiB in one piece."""
RULE = (
    "TTFT is D's time to first token for a prompt whose KV comes from P. The difference is the median TTFT of KVFerry "
    "minus that of NIXL; below 0 KVFerry is faster. Local hit: the median time to first token of the same prompt from "
    "D's own prefix cache."
)
"""The rule of ``comparison.py``."""
INTERVAL = (
    "In parentheses the 95 % confidence interval of the difference: a percentile bootstrap with 10,000 resamples, "
    "which takes requests as independent."
)
COMPARED_HEADS = [
    "TTFT, KVFerry, ms", "TTFT, NIXL, ms", "difference, ms", "local hit, KVFerry, ms", "local hit, NIXL, ms",
]  # fmt: skip


def load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def policy_sentence(policy: str) -> str:
    """Under which ``kv_load_failure_policy`` vLLM engines were measured."""
    measured = f"Measured with `kv_load_failure_policy` `{policy}`"
    if policy == RECOMMENDED_POLICY:
        return f"{measured}, the policy that the README recommends."
    return f"{measured}, not with the `{RECOMMENDED_POLICY}` that the README recommends."
