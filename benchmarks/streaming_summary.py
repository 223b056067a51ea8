"""The part of ``summary.py`` about ``streaming.py``."""

from __future__ import annotations

from typing import Any

import streaming_figures
from tables import load, policy_sentence


def streaming(machine: str, result: dict[str, Any]) -> str:
    """What a client waits for over a slow link, by way, and what of the targets is met."""
    rows = result["rows"]
    samples = f"{min(row['samples'] for row in rows)} to {max(row['samples'] for row in rows)}"
    left_out = "".join(f" Not measured: {line}." for line in result["left_out"])
    return "\n\n".join(
        [
            f"{policy_sentence('recompute')} Machine: {machine}. Its load when the measurement began: "
            f"{result['load_before']:.1f}, from other work.",
            "Two vLLM engines in two network namespaces whose link sends at most so many GB/s, "
            f"`benchmarks/streaming.py`: KVFerry over `tcp`, {result['kv_kib_per_token']:.0f} KiB of KV per token, "
            f"steps of {result['chunk']} tokens, medians of {samples} turns in which all ways have a prompt each. "
            f"{result['cores']}. P's prefill is compared with that of P alone in the same turn: by the clock, and "
            "by the time of P's thread on its core. The share is of the bytes that had come over the link when P's "
            f"last step ended.{left_out}",
            streaming_figures.table(rows),
            "What was to be reached:",
            streaming_figures.target_table(result["targets"]),
            "Steps without a token, and threads with more than 1 % of a core:",
            streaming_figures.core_table([row for row in rows if (row["tokens"], row["gb_per_s"]) == (2000, 1.25)]),
        ]
    )


def section(machine_of: Any) -> str:
    result = load("streaming")
    return streaming(machine_of(result), result)
