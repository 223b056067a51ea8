"""The part of ``summary.py`` about GPUs, made from the results of ``make bench-gpu``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comparison import compared_cells
from tables import COMPARED_HEADS, INTERVAL, RULE, load, policy_sentence, table

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
    "kernel": "copy kernel of `cuda_ipc`",
    "nixl_best": "NIXL, contiguous",
    "ucxx_raw": "UCXX, contiguous",
    "peer_copy": "CUDA peer copy, contiguous",
}
LONG = "_at_32k_tokens"
PACKAGES = ("torch", "triton", "ucxx-cu13", "libucx-cu13", "nixl-cu13")
CONNECTORS = ("KVFerryConnector", "NixlConnector")
NO_POLICY = "No vLLM engine takes part in this measurement, so no `kv_load_failure_policy` applies."
NO_INTERVAL = (
    "This result has no times of single requests, so no confidence intervals: differences of some milliseconds may be "
    "chance, as TTFT varies by as much from request to request."
)
PLOTS = "../benchmarks/results"
"""Seen from docs/."""


def machine(result: Mapping[str, Any], *packages: str) -> str:
    versions = result["versions"]
    installed = ", ".join(f"{name} {versions[name]}" for name in packages)
    return (
        f"Machine: {versions['gpus']}, driver {versions['driver']}, {versions['cpus']} cores ({versions['cpu']}), "
        f"Python {versions['python']}, {installed}."
    )


def figure() -> str:
    """The table of README.md: a whole hand-over over NVLink beside NIXL, for three forms of the KV cache."""
    result = load("gpu_planes")
    rows = {(row["point"], row["contender"]): row for row in result["rows"]}
    forms = {
        "pieces_8k": "same layout on P and D, pieces of 8 KiB",
        "pieces_32k": "same layout on P and D, pieces of 32 KiB",
        "tokens_8192": "Llama-8B, 64-token blocks and another layout on D",
    }
    lines = [
        [form, f"{rows[point, 'cuda_ipc']['bytes'] / 2**20:.0f}", *(_rate(rows, point, name) for name in COMPARED)]
        for point, form in forms.items()
    ]
    versions = result["versions"]
    whole = rows["tokens_8192", "nixl_best"]["gb_per_s"]
    return "\n\n".join(
        [
            f"GB/s from one GPU to another on one host ({versions['gpus']}, NVLink). The prompt has 8192 tokens. Its "
            "KV cache lies in 16-token blocks in random order. Median of "
            f"{result['rounds']} rounds. KVFerry: the whole hand-over. "
            f"NIXL {versions['nixl-cu13']}, same run: a READ with one descriptor for each piece.",
            table(["KV cache", "MiB", "KVFerry, `cuda_ipc`", "NIXL READ"], lines),
            f"`*` NIXL does not change the layout; the time for that is not counted. For one contiguous piece of 1 GiB "
            f"NIXL reaches {whole:.0f} GB/s. {NO_POLICY}",
        ]
    )


COMPARED = ("cuda_ipc", "nixl")


def rates(result: Mapping[str, Any]) -> str:
    """GB/s by point and contender; ``*`` where a change of layout is not included."""
    rows = {(row["point"], row["contender"]): row for row in result["rows"]}
    ran = {name for (_, name), row in rows.items() if "error" not in row}
    names = [name for name in CONTENDERS if name in ran]
    lines = []
    for point, label in POINTS.items():
        found = [rows[point, name] for name in names if (point, name) in rows]
        if found:
            cells = [_rate(rows, point, name) for name in names]
            lines.append([label, f"{found[0]['bytes'] / 2**20:.0f}", *cells])
    return table(["hand-over", "MiB", *(CONTENDERS[name] for name in names)], lines)


def _rate(rows: Rows, point: str, contender: str) -> str:
    row = rows.get((point, contender))
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    return f"{row['gb_per_s']:.{0 if row['gb_per_s'] >= 100 else 1}f}{'' if row['changes_form'] else '*'}"


def bandwidth() -> str:
    """GB/s between two GPUs, and the fixed times of a hand-over."""
    result = load("gpu_planes")
    chosen = {line.rsplit(", ", 1)[1] for lines in result["ucx_transports"].values() for line in lines if "GPU" in line}
    figures, ratios = result["figures"], result["ratios"]
    times = [
        ["one block of 16 tokens, median", "handover_ms_p50", "ucx_handover_ms_p50"],
        ["one block of 16 tokens, 99th percentile", "handover_ms_p99", "ucx_handover_ms_p99"],
        ["first hand-over from a new P", "first_handover_ms", "ucx_first_handover_ms"],
        ["64 MiB beside a Python thread that never releases the GIL", "cuda_ipc_gil_ms", "ucx_gil_ms"],
    ]
    shares = [
        ["whole hand-over over `cuda_ipc`", "cuda_ipc_handover_vs_peer_copy"],
        ["copy kernel of `cuda_ipc` alone", "cuda_ipc_vs_peer_copy"],
        ["whole hand-over over `ucx`", "ucx_vs_peer_copy"],
    ]
    return "\n\n".join(
        [
            f"{NO_POLICY} {machine(result, *PACKAGES)} UCX moves GPU memory with "
            f"{', '.join(sorted(chosen)) or 'host transports'}.",
            "GB/s from one GPU to the other, `benchmarks/gpu_planes.py`. Unless a row says otherwise: the KV cache of "
            "Llama-8B, in scattered blocks of 16 tokens on P, and in blocks of 64 tokens and another layout on D. "
            f"Medians of {result['rounds']} rounds. `cuda_ipc` and `ucx` are whole hand-overs: from the step that "
            "plans the load to the report that the load is complete. The copy kernel of `cuda_ipc` is timed from its "
            "launch to its end. A contiguous transfer moves the same number of bytes in one piece. `*`: block size and "
            "layout are not changed, and the time for that is not counted.",
            rates(result),
            f"![GB/s by prompt length and form]({PLOTS}/gpu_planes.png)",
            "Bandwidth as a share of one contiguous CUDA peer copy of 1 GiB:",
            table(
                ["transfer", "8192 tokens", "32768 tokens"],
                [[label, f"{ratios[name]:.2f}", f"{ratios[name + LONG]:.2f}"] for label, name in shares],
            ),
            "Milliseconds of small and first hand-overs, between KVFerry's halves without a vLLM engine:",
            table(
                ["hand-over", "`cuda_ipc`", "`ucx`"],
                [[label, *(f"{figures[name]:.2f}" for name in names)] for label, *names in times],
            ),
        ]
    )


def end_to_end() -> str:
    """Time to first token by prompt length and state of the block tables, both connectors."""
    result = load("gpu_e2e")
    mib = {(row["state"], row["tokens"]): row["mib"] for row in result["rows"] if row["state"] != "load"}
    lines = []
    for found in result["comparisons"]:
        key = found["state"], found["tokens"]
        lines.append([*map(str, key), f"{mib[key]:.0f}", *compared_cells(found)])
    has_intervals = all(found["ttft_difference_95_ms"] for found in result["comparisons"])
    figures = result["figures"]
    rounds = ", ".join(
        f"{figures[f'rounds_{state}']} rounds {state}" for state in dict.fromkeys(line[0] for line in lines)
    )
    first = [figures[name] for connector in CONNECTORS if (name := f"first_ttft_ms_{connector}") in figures]
    of_first = "TTFT with KV from a new P was not kept in this result."
    if first:
        pair = " and ".join(f"{ms:.0f} ms with {name}" for ms, name in zip(first, CONNECTORS, strict=True))
        of_first = f"TTFT with KV from a new P, at the longest prompt: {pair}."
    return "\n\n".join(
        [
            f"{policy_sentence(result['policy'])} {machine(result, *PACKAGES, 'vllm')}",
            "Two vLLM engines per connector, P on one GPU and D on the other, `benchmarks/gpu_e2e.py`. D is idle, and "
            f"the engines run {'with' if result.get('cuda_graphs') else 'without'} CUDA graphs. {RULE} {rounds}. "
            + (INTERVAL if has_intervals else NO_INTERVAL),
            "`fresh`: blocks that were never used, in the order of memory. `scattered`: after traffic of many short "
            "prompts. `emptied`: scattered, and vLLM's prefix cache was emptied, so that no block is evicted.",
            table(["block tables", "prompt tokens", "MiB", *COMPARED_HEADS], lines),
            of_first,
            f"![D's time to first token by prompt length, and of local hits]({PLOTS}/gpu_e2e.png)",
        ]
    )


def busy() -> str:
    """TTFT on a D that decodes, the way that loads went, and the gaps of the sequences that it decodes."""
    result = load("gpu_busy")
    found = {(row["sequences"], row["tokens"], row["connector"]): row for row in result["rows"]}
    lines = []
    for sequences, tokens in dict.fromkeys((sequences, tokens) for sequences, tokens, _ in found):
        ours, theirs = (found[sequences, tokens, connector] for connector in CONNECTORS)
        times = [f"{row[name]:.1f}" for name in ("ttft_ms", "local_ttft_ms") for row in (ours, theirs)]
        gaps = [_gaps(row, which) for which in ("gap", "local_gap", "quiet") for row in (ours, theirs)]
        lines.append([str(sequences), str(tokens), *times, _ways(ours), *gaps])
    both = ("KVFerry", "NIXL")
    head = ["D decodes", "prompt tokens", *(f"{what}, {one}, ms" for what in ("TTFT", "local hit") for one in both)]
    gap_heads = [f"{what}, {one}, ms" for what in ("gaps", "gaps, local hit", "gaps, quiet") for one in both]
    return "\n\n".join(
        [
            f"{policy_sentence(result['policy'])} {machine(result, *PACKAGES, 'vllm')}",
            "Two vLLM engines per connector, with CUDA graphs and asynchronous scheduling, `benchmarks/gpu_busy.py`. "
            "TTFT is D's time to first token with KV from P, local hit that of the same prompt from the prefix cache "
            "of the same D under the same load: medians. Gaps are the times between the tokens of the sequences that D "
            "decodes, 99th percentile / largest: within one period after a hand-over, after a local hit, and without "
            "either.",
            table([*head, "KVFerry's loads", *gap_heads], lines),
            f"![TTFT by prompt length, and hand-overs in time]({PLOTS}/gpu_busy.png)",
        ]
    )


QUIET_CONTENDERS = {
    "none": "no connector", "none#2": "no connector, another start", "empty": "empty connector", "kvferry": "KVFerry",
    "kvferry#2": "KVFerry, another start", "nixl": "NIXL",
}  # fmt: skip
QUIET_MODELS = {"narrow": "narrow", "8b": "Llama-8B's shape", "tiny": "two layers"}


def quiet_step() -> str:
    """Gaps and local hits of engines that hand nothing over, by connector."""
    return "\n\n".join(
        [
            policy_sentence(load("quiet_step")["policy"]),
            "Engines that hand nothing over, `benchmarks/quiet_step.py`: milliseconds, median / 99th percentile, of "
            "the gaps between tokens and of the time to first token of a prompt in the engine's own prefix cache. "
            "Two starts of the same engine show what is noise. On GPUs with CUDA graphs and asynchronous scheduling.",
            *map(_quiet_steps, ("quiet_step", "quiet_step_one_gpu", "quiet_step_one_gpu_8b", "quiet_step_cpu")),
        ]
    )


def _quiet_steps(name: str) -> str:
    result = load(name)
    rows = {(row["model"], row["sequences"], row["figure"], row["contender"]): row for row in result["rows"]}
    names = [name for name in QUIET_CONTENDERS if any(name == contender for *_, contender in rows)]
    lines = []
    for model, sequences, figure in dict.fromkeys((m, s, f) for m, s, f, _ in rows):
        what = "gap" if figure == "gap" else f"prefix hit, {figure.removeprefix('hit_')} tokens"
        found = [rows[model, sequences, figure, name] for name in names]
        cells = [f"{row['p50_ms']:.2f} / {row['p99_ms']:.2f}" for row in found]
        lines.append([QUIET_MODELS[model], str(sequences), what, str(found[0]["rounds"]), *cells])
    heads = ["model", "sequences", "what", "turns", *(QUIET_CONTENDERS[name] for name in names)]
    packages = ("torch", "vllm") if result["device"] == "cpu" else ("torch", "vllm", "nixl-cu13")
    rows_in_order = sorted(lines, key=lambda line: line[2] != "gap")
    return f"{machine(result, *packages)}\n\n{table(heads, rows_in_order)}"


def busy_one_gpu() -> str:
    """TTFT on a D that decodes and shares its GPU with P."""
    result = load("gpu_busy_one_gpu")
    lines = []
    for row in result["rows"]:
        times = [f"{row[name]:.1f}" for name in ("ttft_ms", "local_ttft_ms", "copy_ms")]
        gaps = [_gaps(row, which) for which in ("gap", "local_gap", "quiet")]
        lines.append([str(row["sequences"]), row["order"], str(row["tokens"]), *times, _ways(row), *gaps])
    heads = ["D decodes", "block tables", "prompt tokens", "TTFT, ms", "local hit, ms", "copy, ms", "loads"]
    heads += ["gaps, ms", "gaps, ms, local hit", "gaps, ms, quiet"]
    return "\n\n".join(
        [
            f"{policy_sentence(result['policy'])} {machine(result, *PACKAGES, 'vllm')}",
            "P and D on one GPU, KVFerry alone, the same benchmark and the same terms as above.",
            table(heads, lines),
            f"![TTFT by prompt length, and a hand-over in time]({PLOTS}/gpu_busy_one_gpu.png)",
        ]
    )


def _gaps(row: Mapping[str, Any], which: str) -> str:
    p99, largest = row[f"{which}_p99_ms"], row[f"{which}_max_ms"]
    return "" if p99 is None else f"{p99:.1f} / {largest:.1f}"


def _ways(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {way}" for way, count in row["ways"].items())


def checksums() -> str:
    """What checksums add to the copies of a GPU."""
    result = load("checksum.gpu")
    rows = [
        [
            row["copy"], f"{row['mib']} MiB", str(row["sms"] or "all"), f"{row['ms_without']:.3f}",
            f"{row['ms_with']:.3f}", f"{100 * row['added_share_of_link']:.1f}",
        ]
        for row in result["rows"]
    ]  # fmt: skip
    return "\n\n".join(
        [
            f"{NO_POLICY} {machine(result, *PACKAGES[:2])}",
            "The copies of a slot with and without the setting `checksum` on one GPU, `benchmarks/checksum.py --device "
            f"cuda`: medians of {result['rounds']} turns. The last column is the added time as a share of the time "
            "that these bytes take over NVLink at 370 GB/s. While the engine computes, a copy has `copy_sms` SMs.",
            table(["copy", "slot", "SMs", "ms without", "ms with", "added, % of the link's time"], rows),
        ]
    )


def under_load() -> str:
    """What clients of either pair of engines measured with several requests at a time."""
    result = load("gpu_e2e")
    rows = [row for row in result["rows"] if row["state"] == "load"]
    first = rows[0]
    lines = [
        [row["connector"], *(f"{row[name]:.4g}" for name in ("ttft_p50", "ttft_p99", "tpot_p50", "per_second"))]
        for row in rows
    ]
    return "\n\n".join(
        [
            policy_sentence(result["policy"]),
            f"vLLM's `bench serve` through a router, on the machine above: {first['requests']} prompts of "
            f"{first['tokens']} tokens, {first['output']} output tokens each, {first['beside']} requests at a time, in "
            "the order of the runs. The runs last seconds, which is too short to compare the time per output token.",
            table(["connector", "TTFT median, ms", "TTFT p99, ms", "time per output token, ms", "requests/s"], lines),
        ]
    )


def slow_down() -> str:
    """What hand-overs cost a decode loop, by the SMs that they may take."""
    result = load("interference")
    setup = result["setup"]
    found = {(row["sms"], row["side"], row["arriving"]): row for row in result["rows"]}
    lines = []
    for sms in sorted({sms for sms, _, _ in found}):
        cells = [
            f"{found[sms, side, arriving]['slowdown_percent_mean']:.1f}"
            for side in "DP"
            for arriving in ("rate", "back_to_back")
        ]
        moved = found[sms, "D", "back_to_back"]["gb_per_s_moved"]
        lines.append([f"{sms}{' (default)' if sms == setup['default_sms'] else ''}", *cells, f"{moved:.0f}"])
    rate = f"{setup['rate']:g} a second, %"
    heads = ["SMs", f"D, {rate}", "D, without pause, %", f"P, {rate}", "P, without pause, %", "GB/s without pause"]
    return "\n\n".join(
        [
            f"{NO_POLICY} {machine(result, *PACKAGES[:2])}",
            "Slow-down of the mean step of a decode loop (64 sequences of 2048 tokens, the layers of Llama-8B) while "
            f"hand-overs of 1 GiB arrive over `{setup['plane']}`, by the number of SMs that a copy may take "
            "(`copy_sms`), `benchmarks/interference.py`:",
            table(heads, lines),
            f"![slow-down and rates by SMs]({PLOTS}/interference.png)",
        ]
    )
