"""The measured rows of docs/comparison.md: KVFerry beside NIXL, from benchmarks/results/.

Nothing here has measured Mooncake or LMCache, so their columns say so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_summary import CONNECTORS, machine
from tables import load, table

RESULTS = "../benchmarks/results"
"""Seen from docs/."""
NOT_MEASURED = "not measured"
HEAD = ["what", "KVFerry", "NIXL, NixlConnector", "Mooncake", "LMCache", "result"]


def measured() -> str:
    """Rows of all results that have both, whichever is faster: of each the shortest and the longest prompt."""
    planes = load("gpu_planes")
    return "\n\n".join(
        [
            f"{machine(planes, 'nixl-cu13')} TTFT is that of vLLM {load('gpu_busy')['versions']['vllm']} on such GPUs, "
            f"or of vLLM on {load('e2e_vs_nixl')['versions']['cpus']} shared cores; of each measurement the shortest "
            "and the longest prompt. [benchmarks.md](benchmarks.md) has all rows, and says how each was measured.",
            table(HEAD, [*_bandwidth(planes), *_idle(), *_busy(), *_under_load(), *_on_cpu(), _rdma()]),
            "`*` NIXL does not change the layout; the time for that is not counted.",
        ]
    )


def _row(what: str, cells: Sequence[str], result: str) -> list[str]:
    ours, theirs = cells
    return [what, ours, theirs, NOT_MEASURED, NOT_MEASURED, f"[{result}]({RESULTS}/{result}.json)"]


def _by_length(what: str, where: str, times: Mapping[int, Mapping[str, float]], result: str) -> list[list[str]]:
    """``times``: by prompt tokens and connector."""
    return [
        _row(f"{what}, ms, {where}, {tokens} tokens", [f"{times[tokens][name]:.1f}" for name in CONNECTORS], result)
        for tokens in (min(times), max(times))
    ]


def _bandwidth(result: Mapping[str, Any]) -> list[list[str]]:
    rates = {(row["point"], row["contender"]): row["gb_per_s"] for row in result["rows"] if "error" not in row}
    forms = {
        "pieces_8k": "8192 tokens, same form, pieces of 8 KiB",
        "pieces_32k": "8192 tokens, same form, pieces of 32 KiB",
        "tokens_8192": "8192 tokens of Llama-8B, other blocks and layout on D",
    }
    rows = []
    for point, form in forms.items():
        mark = "*" if point == "tokens_8192" else ""
        ours, theirs = f"{rates[point, 'cuda_ipc']:.0f}", f"{rates[point, 'nixl']:.1f}{mark}"
        rows.append(_row(f"GB/s between two GPUs, {form}", (ours, theirs), "gpu_planes"))
    whole = f"{rates['tokens_8192', 'nixl_best']:.0f}"
    return [*rows, _row("GB/s between two GPUs, one contiguous piece of 1 GiB", (NOT_MEASURED, whole), "gpu_planes")]


def _idle() -> list[list[str]]:
    times: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for found in load("gpu_e2e")["comparisons"]:
        times[found["state"]][found["tokens"]] = found["ttft_ms"]
    return [
        row for state, each in times.items() for row in _by_length("TTFT", f"idle D, {state} blocks", each, "gpu_e2e")
    ]


def _busy() -> list[list[str]]:
    found = load("gpu_busy")["rows"]
    lines = []
    for what, name in (("TTFT", "ttft_ms"), ("gaps between tokens beside a hand-over, 99th percentile", "gap_p99_ms")):
        times: dict[int, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
        for row in found:
            if row[name] is not None:
                times[row["sequences"]][row["tokens"]][row["connector"]] = row[name]
        for sequences, each in sorted(times.items()):
            where = f"D with CUDA graphs that decodes {sequences} sequences"
            lines += _by_length(what, where, each, "gpu_busy")
    return lines


def _under_load() -> list[list[str]]:
    runs: dict[str, list[float]] = {connector: [] for connector in CONNECTORS}
    for row in load("gpu_e2e")["rows"]:
        if row["state"] == "load":
            runs[row["connector"]].append(row["ttft_p50"])
    cells = [" and ".join(f"{value:.0f}" for value in runs[connector]) for connector in CONNECTORS]
    return [_row("TTFT, ms, under `vllm bench serve`, 2000 tokens, 8 at a time, two runs each", cells, "gpu_e2e")]


def _on_cpu() -> list[list[str]]:
    times: dict[int, dict[int, dict[str, float]]] = defaultdict(dict)
    for found in load("e2e_vs_nixl")["comparisons"]:
        times[found["layers"]][found["tokens"]] = found["ttft_ms"]
    return [
        row
        for layers, each in times.items()
        for row in _by_length("TTFT", f"without a GPU, {layers} layers", each, "e2e_vs_nixl")
    ]


def _rdma() -> list[str]:
    return ["anything over RDMA hardware", *[NOT_MEASURED] * 4, "none"]
