"""The part of ``summary.py`` about ``streaming.py`` and ``gpu_streaming.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_summary
import streaming_tables
from tables import load, policy_sentence

COMPARED = (
    "The first token of each way is compared with that of P alone in the same turn, and so is P's prefill: by the "
    "clock, and by the time of the thread of P's engine on its core."
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


def one_gpu() -> str:
    """The same where P and D share a GPU."""
    result = load("gpu_streaming_one_gpu")
    rows = result["rows"]
    return "\n\n".join(
        [
            f"{policy_sentence('recompute')} {gpu_summary.machine(result, *gpu_summary.PACKAGES, 'vllm')}",
            "Two vLLM engines on one GPU, which runs their kernels in turn, `benchmarks/gpu_streaming.py --gpus 0 0`: "
            f"the form of Llama-8B, {result['kv_kib_per_token']:.0f} KiB of KV per token, steps of {result['chunk']} "
            f"tokens, CUDA graphs, `tcp` over loopback, medians of {_samples(rows)} turns. {COMPARED} `discarded`: D "
            "throws away what it receives, so that only P uses the GPU. The share is of the bytes that were in D's "
            f"pages when P's last step ended.{_left_out(result)}{_runs(result)}",
            streaming_tables.table(rows),
            "What was to be reached:",
            streaming_tables.target_table(result["targets"]),
        ]
    )


def _samples(rows: list[dict[str, Any]]) -> str:
    return f"{min(row['samples'] for row in rows)} to {max(row['samples'] for row in rows)}"


def _runs(result: dict[str, Any]) -> str:
    """What is said of a result that was put together from several runs; empty for one run."""
    return f" Of several runs: {'; '.join(result['runs'])}." if "runs" in result else ""


def _left_out(result: dict[str, Any]) -> str:
    return "".join(f" Not measured: {line.rstrip(':')}." for line in result["left_out"])
