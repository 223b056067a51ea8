"""The part of ``summary.py`` that is about GPUs, out of what ``make bench-gpu`` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_tables import E2E_TARGETS, INTERFERENCE_TARGETS, TARGETS, reached
from tables import load, table

Rows = Mapping[tuple[str, str], Mapping[str, Any]]

POINTS = {
    "tokens_128": "128 tokens",
    "tokens_1024": "1024 tokens",
    "tokens_8192": "8192 tokens",
    "tokens_32768": "32768 tokens",
    "llama_70b_tp4": "8192 tokens, a rank of Llama-70B at TP4",
    "mla": "8192 tokens, MLA of 61 layers",
    "pieces_8k": "8192 tokens, same form, pieces of 8 KiB",
    "pieces_32k": "8192 tokens, same form, pieces of 32 KiB",
    "at_once_16": "16 times 1024 tokens at once",
}
CONTENDERS = {
    "cuda_ipc": "`cuda_ipc`",
    "ucx": "`ucx`",
    "nixl": "NIXL",
    "torch": "torch",
    "kernel": "copy of `cuda_ipc`",
    "nixl_best": "NIXL, one piece",
    "ucxx_raw": "UCXX, one piece",
    "peer_copy": "peer copy, one piece",
}
LONG = "_at_32k_tokens"
PACKAGES = ("torch", "triton", "ucxx-cu13", "libucx-cu13", "nixl-cu13")
CONNECTORS = ("KVFerryConnector", "NixlConnector")


def machine(planes: Mapping[str, Any], engines: Mapping[str, Any]) -> str:
    versions = planes["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in PACKAGES)
    chosen = {line.rsplit(", ", 1)[1] for lines in planes["ucx_transports"].values() for line in lines if "GPU" in line}
    return (
        f"{versions['gpus']}, driver {versions['driver']}, {versions['cpus']} cores ({versions['cpu']}), "
        f"Python {versions['python']}, {packages}, vllm {engines['versions']['vllm']}; "
        f"UCX moves GPU memory by its {', '.join(sorted(chosen)) or 'host transports'}"
    )


def rates(result: Mapping[str, Any]) -> str:
    """GB/s by point and contender; ``*`` where the change of form is still to be made."""
    rows = {(row["point"], row["contender"]): row for row in result["rows"]}
    lines = []
    for point, label in POINTS.items():
        found = [rows[point, contender] for contender in CONTENDERS if (point, contender) in rows]
        if found:
            cells = [_rate(rows, point, contender) for contender in CONTENDERS]
            lines.append([label, f"{found[0]['bytes'] / 2**20:.0f}", *cells])
    return table(["hand-over", "MiB", *CONTENDERS.values()], lines)


def _rate(rows: Rows, point: str, contender: str) -> str:
    row = rows.get((point, contender))
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    return f"{row['gb_per_s']:.{0 if row['gb_per_s'] >= 100 else 1}f}{'' if row['changes_form'] else '*'}"


def end_to_end(result: Mapping[str, Any]) -> str:
    """Hand-over time per prompt length and state of the block tables, both connectors."""
    found = {(row["state"], row["tokens"], row["connector"]): row for row in result["rows"] if row["state"] != "load"}
    lines = []
    for state, tokens in dict.fromkeys((state, tokens) for state, tokens, _ in found):
        pair = [found[state, tokens, connector] for connector in CONNECTORS]
        cells = [f"{row['handover_ms']:.1f} ({row['handover_p99_ms']:.1f})" for row in pair]
        lines.append([state, str(tokens), f"{pair[0]['mib']:.0f}", *cells])
    return table(["block tables", "prompt tokens", "MiB", *(f"{connector}, ms" for connector in CONNECTORS)], lines)


def under_load(result: Mapping[str, Any]) -> list[str]:
    """What clients of either pair saw beside others, where that was measured."""
    rows = [row for row in result["rows"] if row["state"] == "load"]
    if not rows:
        return []
    first = rows[0]
    lines = [
        [row["connector"], *(f"{row[name]:.4g}" for name in ("ttft_p50", "ttft_p99", "tpot_p50", "per_second"))]
        for row in rows
    ]
    return [
        f"Under load: vLLM's `bench serve` through a router, {first['requests']} prompts of {first['tokens']} tokens "
        f"with {first['output']} to answer, {first['beside']} at a time, in the order of the runs. "
        "They last seconds, and a step of these engines takes as long as the Python of its host: a look at whole "
        "services, too short to compare the time per token:",
        table(["connector", "TTFT ms", "p99", "per token ms", "requests/s"], lines),
    ]


def slow_down(result: Mapping[str, Any]) -> list[str]:
    """What hand-overs cost a decode loop, by the SMs that they may take."""
    found = {(row["sms"], row["side"], row["arriving"]): row for row in result["rows"]}
    lines = []
    for sms in sorted({sms for sms, _, _ in found}):
        cells = [
            f"{found[sms, side, arriving]['slowdown_percent_mean']:.1f}"
            for side in "DP"
            for arriving in ("rate", "back_to_back")
        ]
        moved = found[sms, "D", "back_to_back"]["gb_per_s_moved"]
        lines.append([f"{sms}{' (default)' if sms == result['setup']['default_sms'] else ''}", *cells, f"{moved:.0f}"])
    rate = result["setup"]["rate"]
    heads = ["SMs", f"D, {rate:g} a second, %", "D, one after the other, %"]
    heads += [f"P, {rate:g} a second, %", "P, one after the other, %", "moved then, GB/s"]
    return [
        "Slow-down of the mean step of a decode loop (64 sequences of 2048 tokens, Llama-8B's layers) while hand-overs "
        "of 1 GiB arrive over `cuda_ipc`, by the SMs that a copy may take (`benchmarks/interference.py`, a run of its "
        f"own on {result['versions']['gpus']}, {result['versions']['cpus']} cores):",
        table(heads, lines),
        "![slow-down and rates by SMs](benchmarks/results/interference.png)",
    ]


def targets(*measured: tuple[Mapping[str, tuple[str, float]], Mapping[str, Any]]) -> str:
    """What each benchmark is to reach, and whether its result does."""
    lines = []
    for limits, result in measured:
        values = result["ratios"] | result["figures"]
        for name, (sign, limit) in limits.items():
            value = values.get(name)
            said = (
                ["not measured", ""]
                if value is None
                else [f"{value:.3g}", "yes" if reached((sign, limit), value) else "no"]
            )
            lines.append([f"`{name}`", f"{'≥' if sign == '>=' else '≤'} {limit:g}", *said])
    return table(["ratio or figure", "target", "measured", "reached"], lines)


def parts() -> list[str]:
    """Paragraphs and tables."""
    planes, engines = load("gpu_planes"), load("gpu_e2e")
    measured = [(TARGETS, planes), (E2E_TARGETS, engines)]
    beside = load("interference")
    measured.append((INTERFERENCE_TARGETS, beside))
    rounds = engines["figures"]["rounds_fresh"], engines["figures"]["rounds_scattered"]
    first = [engines["figures"][f"first_handover_ms_{connector}"] for connector in CONNECTORS]
    copy, in_a_row = (planes["ratios"][f"cuda_ipc_vs_peer_copy{at}"] for at in (LONG, "_in_a_row"))
    handover, longer, ucx, moving, moving_longer = (
        planes["ratios"][f"{name}_vs_peer_copy{at}"]
        for name, at in (
            ("cuda_ipc_handover", ""), ("cuda_ipc_handover", LONG), ("ucx", LONG), ("ucx_moving", ""),
            ("ucx_moving", LONG),
        )
    )  # fmt: skip
    raw = planes["ratios"][f"ucx_moving_vs_raw_ucxx{LONG}"]
    return [
        f"On {machine(planes, engines)}.",
        "GB/s from one GPU to the other, Llama-8B in scattered blocks of 16 tokens, on D of 64 and in another layout, "
        f"medians of {planes['rounds']} rounds (`benchmarks/gpu_planes.py`). `cuda_ipc` and `ucx` are whole "
        "hand-overs, from D's step to the report of its load; the copy of `cuda_ipc` alone is from its launch to its "
        "end; what is in one piece is as many contiguous bytes. At a `*`, block size and layout are still to be "
        "changed, and the time for that is not counted:",
        rates(planes),
        "![GB/s by prompt length and form](benchmarks/results/gpu_planes.png)",
        "Two vLLM engines on two GPUs, milliseconds that a hand-over adds to D's time to first token, medians with the "
        f"99th percentile, of {rounds[0]} rounds on fresh block tables and {rounds[1]} on scattered ones, both with "
        f"`kv_load_failure_policy` {engines['policy']} (`benchmarks/gpu_e2e.py`). `emptied`: scattered as well, of "
        "blocks that hold nothing, so that vLLM evicts none. The time to first token varies by some milliseconds from "
        "request to request, so that small differences say little:",
        end_to_end(engines),
        "![hand-over time and D's time to first token by prompt length](benchmarks/results/gpu_e2e.png)",
        *under_load(engines),
        f"The first one from a new peer, at the longest prompt: {first[0]:.0f} ms, with NixlConnector "
        f"{first[1]:.0f} ms.",
        *slow_down(beside),
        "What this is to reach, and whether it does. Ratios named `_vs_` are of bandwidths, at 8192 tokens unless the "
        "name says more, those of `cuda_ipc` to a peer copy and to NIXL at its best of its copy alone, "
        "`handover_vs_nixl` of times at the longest prompt. Whole hand-overs over `cuda_ipc` reach "
        f"{handover:.2f} of the peer copy at 8192 tokens and {longer:.2f} at 32768, over `ucx` {ucx:.2f} at 32768. "
        f"From P's first step for the data on, `ucx` reaches {moving:.2f} and {moving_longer:.2f}, the latter being "
        f"{raw:.2f} of raw UCXX. "
        f"The copy of `cuda_ipc` reaches {copy:.3f} at 32768 tokens; at 8192, where four follow each other, so without "
        f"the steps before and after, {in_a_row:.3f}. "
        "`handover_ms` is a hand-over of one block, "
        "`gil_ms` one of 64 MiB beside a thread of D's that never lets the GIL go, `first_handover_ms` the first one "
        "from a new peer, all three between KVFerry's halves without engines:",
        targets(*measured),
    ]
