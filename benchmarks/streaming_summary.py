"""The part of ``summary.py`` about ``streaming.py`` and ``gpu_streaming.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_summary
import streaming_tables
from tables import load, policy_sentence

COMPARED = (
    "P's prefill is compared with that of P alone in the same turn: by the clock, and by the time of the thread of P's "
    "engine on its core."
)


def over_a_link(machine: Callable[[dict[str, Any]], str]) -> str:
    """What a client waits for over a slow link, by way, and what of the targets is met. ``machine``: names it."""
    result = load("streaming")
    rows = result["rows"]
    return "\n\n".join(
        [
            f"{policy_sentence('recompute')} Machine: {machine(result)}. Its load when the measurement began: "
            f"{result['load_before']:.1f}, from other work.",
            "Two vLLM engines in two network namespaces whose link sends at most so many GB/s, "
            f"`benchmarks/streaming.py`: KVFerry over `tcp`, {result['kv_kib_per_token']:.0f} KiB of KV per token, "
            f"steps of {result['chunk']} tokens, medians of {_samples(rows)} turns in which all ways have a prompt "
            f"each. {result['cores']}. {COMPARED} The share is of the bytes that had come over the link when P's "
            f"last step ended.{_left_out(result)}",
            streaming_tables.table(rows),
            "What was to be reached:",
            streaming_tables.target_table(result["targets"]),
            "Steps without a token, and threads with more than 1 % of a core:",
            streaming_tables.core_table([row for row in rows if (row["tokens"], row["gb_per_s"]) == (2000, 1.25)]),
            f"![both legs in time]({gpu_summary.PLOTS}/streaming.png)",
        ]
    )


def two_gpus() -> str:
    """The same between two GPUs."""
    result = load("gpu_streaming")
    rows = result["rows"]
    return "\n\n".join(
        [
            f"{policy_sentence('recompute')} {gpu_summary.machine(result, *gpu_summary.PACKAGES, 'vllm')}",
            f"Two vLLM engines per row, each on its own GPU of one host, `benchmarks/gpu_streaming.py`: the form of "
            f"Llama-8B, {result['kv_kib_per_token']:.0f} KiB of KV per token, steps of {result['chunk']} tokens, CUDA "
            f"graphs, `tcp` over loopback, medians of {_samples(rows)} turns. {COMPARED} The share is of the bytes "
            f"that were in D's pages when P's last step ended.{_left_out(result)}",
            streaming_tables.table(rows),
            "What was to be reached:",
            streaming_tables.target_table(result["targets"]),
            f"![both legs in time]({gpu_summary.PLOTS}/gpu_streaming.png)",
        ]
    )


def _samples(rows: list[dict[str, Any]]) -> str:
    return f"{min(row['samples'] for row in rows)} to {max(row['samples'] for row in rows)}"


def _left_out(result: dict[str, Any]) -> str:
    return "".join(f" Not measured: {line.rstrip(':')}." for line in result["left_out"])
