"""The generated parts of the documentation about measurements, made from benchmarks/results/.

    python benchmarks/harness/pages.py SECTION ...

``docs/generate.py`` writes them into README.md and docs/. ``make bench RESULTS=benchmarks/results`` measures the CPU
results again, ``make bench-gpu`` with the same option the GPU results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.harness.tables import (
    CPU_PACKAGES,
    GPU_PACKAGES,
    NO_POLICY,
    RESULTS,
    Columns,
    Row,
    load,
    machine,
    page,
    policy_sentence,
    table,
)
from kvferry.cli.plot import svg_chart

CONNECTORS = {"KVFerry": "KVFerryConnector", "NIXL": "NixlConnector"}

# --- planes -----------------------------------------------------------------------------------------------------------

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
    "cuda_ipc": "`cuda_ipc`", "ucx": "`ucx`", "nixl": "NIXL", "torch": "torch", "kernel": "copy kernel of `cuda_ipc`",
    "nixl_best": "NIXL, contiguous", "peer_copy": "CUDA peer copy, contiguous",
}  # fmt: skip


def by_point(result: Row) -> dict[str, dict[str, Row]]:
    """Rows of ``gpu_planes.json`` by point and contender."""
    found: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        found.setdefault(row["point"], {})[row["contender"]] = row
    return found


def rate(row: Row) -> str:
    """GB/s; ``*`` where a change of layout is not included."""
    if "error" in row:
        return "failed"
    return f"{row['gb_per_s']:.{0 if row['gb_per_s'] >= 100 else 1}f}{'' if row['changes_form'] else '*'}"


def rate_of(contender: str) -> Callable[[dict[str, Row]], str]:
    return lambda rows: rate(rows[contender]) if contender in rows else ""


WAYS = {
    "cuda_ipc": "KVFerry over cuda_ipc", "nixl": "NIXL, blocks of 16 tokens", "ucx": "KVFerry over ucx",
    "nixl_best": "NIXL, contiguous", "peer_copy": "CUDA copy, contiguous",
}  # fmt: skip
PICTURE = "gpu_planes.svg"


def gpu_planes_picture() -> str:
    """GB/s between two GPUs by the length of the prompt."""
    points = by_point(load("gpu_planes"))
    lengths = {name: float(name.split("_")[1]) for name in points if name.startswith("tokens_")}
    lines = {}
    for contender, name in WAYS.items():
        line = [(tokens, points[point][contender]["gb_per_s"]) for point, tokens in lengths.items()]
        lines[f"{name}: {line[-1][1]:.0f}"] = line
    title = f"The KV cache of one prompt between two GPUs ({load('gpu_planes')['versions']['gpus']})"
    return svg_chart(title, "prompt tokens (Llama-8B, 128 KiB of KV for each)", "GB/s", lines, log_y=False)


def mib(rows: dict[str, Row]) -> str:
    return f"{rows['cuda_ipc']['bytes'] / 2**20:.0f}"


def gpu_bandwidth() -> str:
    """GB/s between two GPUs, and the fixed times of a hand-over."""
    result = load("gpu_planes")
    points, figures = by_point(result), result["figures"]
    columns: Columns = {
        "hand-over": lambda rows: POINTS[rows["cuda_ipc"]["point"]], "MiB": mib,
        **{head: rate_of(name) for name, head in CONTENDERS.items()},
    }  # fmt: skip
    chosen = {line.rsplit(", ", 1)[1] for lines in result["ucx_transports"].values() for line in lines if "GPU" in line}
    times = ", ".join(
        f"{figures[f'{prefix}handover_ms_p50']:.2f} ms over `{plane}` (99th percentile "
        f"{figures[f'{prefix}handover_ms_p99']:.2f} ms; the first one from a new P "
        f"{figures[f'{prefix}first_handover_ms']:.0f} ms)"
        for plane, prefix in (("cuda_ipc", ""), ("ucx", "ucx_"))
    )
    return page(
        f"{NO_POLICY} {machine(result, GPU_PACKAGES)} UCX moves GPU memory with "
        f"{', '.join(sorted(chosen)) or 'host transports'}.",
        "GB/s from one GPU to the other, `benchmarks/planes/planes.py`. Unless a row says otherwise: the KV cache of "
        "Llama-8B, in scattered blocks of 16 tokens on P, and in blocks of 64 tokens and another layout on D. Medians "
        f"of {result['rounds']} rounds. `cuda_ipc` and `ucx` are whole hand-overs: from the step that plans the load "
        "to the report that the load is complete. The copy kernel of `cuda_ipc` is timed from its launch to its end. "
        "A contiguous transfer moves the same number of bytes in one piece. `*`: block size and layout are not "
        "changed, and the time for that is not counted.",
        f"![GB/s by the length of the prompt](pictures/{PICTURE})",
        table([points[point] for point in POINTS], columns),
        f"A hand-over of one block of 16 tokens, without a vLLM engine: {times}.",
    )


def cpu_bandwidth() -> str:
    """GB/s of scattered blocks, by plane and block size."""
    result = load("host_planes")
    names = {
        "nixl": "NIXL", "nixl plane": "`nixl`",
        "nixl raw read": "one NIXL READ of 4 MiB, four at a time", "memcpy": "memcpy",
        "nixl raw write": "one NIXL WRITE of 4 MiB, four at a time", "raw socket": "one plain TCP socket",
    }  # fmt: skip
    links = {"host": "same host", "tcp": "TCP, loopback"}
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in result["rows"]:
        found.setdefault((row["link"], row["kind"]), {})[row["block_kib"]] = row["gb_per_s"]
    sizes = sorted({kib for rates in found.values() for kib in rates} - {0})

    def of_size(kib: int) -> Callable[[Any], str]:
        return lambda one: f"{one[1][kib]:.1f}" if kib in one[1] else ""

    columns: Columns = {
        "link": lambda one: links[one[0][0]], "plane": lambda one: names.get(one[0][1], f"`{one[0][1]}`"),
        **{f"{kib} KiB": of_size(kib) for kib in sizes}, "contiguous": of_size(0),
    }  # fmt: skip
    empty, computing = load("empty_handover")["rows"], load("empty_handover_computing")["figures"]
    times = ", ".join(f"`{row['plane']}` {row['ms_p50']:.2f} ms" for row in empty)
    return page(
        f"{NO_POLICY} {machine(result)}",
        "GB/s of scattered blocks in host memory, between two processes, `benchmarks/planes/planes.py --device cpu`. "
        "NIXL is polled in a loop on D, without a progress thread beside it, which is its better form.",
        table(found.items(), columns),
        f"Time of a hand-over with almost no data, `benchmarks/planes/empty_handover.py`: {times}. Over `cma` in "
        f"another hour, with `--computing`: {computing['d_waits_ms_p50']:.2f} ms where D's main thread waits, "
        f"{computing['d_computes_ms_p50']:.2f} ms where it computes in Python without a break.",
    )


PAIRS: Columns = {
    "plane": "`{plane}`", "blocks": "{block_kib} KiB", "GB/s": "{gb_per_s:.2f}", "of": "`{base}`",
    "ratio": "{of_base:.2f}", "ratio by time on a core": "{core_of_base:.2f}",
}  # fmt: skip
TURNS = (
    "The planes take turns on a shared machine; the ratio is the median over all turns. The last column is the same "
    "ratio by the time on a core of P or of D, whichever takes longer: other work on the machine changes it less."
)


def checksums() -> str:
    """What checksums cost each plane, by block size."""
    result = load("checksum")
    return page(
        f"{NO_POLICY} {machine(result)}",
        "GB/s of scattered blocks in host memory with and without the setting `checksum`, between two processes, "
        f"`benchmarks/planes/planes.py --pairs checksum`: medians of {result['rounds']} rounds. {TURNS}",
        table([row for row in result["rows"] if row["plane"] != row["base"]], PAIRS),
    )


def encrypted() -> str:
    """What encryption costs between hosts."""
    result = load("encrypted_planes")
    columns = {head: cell for head, cell in PAIRS.items() if "core" not in head}
    return page(
        f"{NO_POLICY} {machine(result)}",
        "GB/s of scattered blocks in host memory, between two processes, TCP over loopback, `tcp` without and with "
        "the setting `encrypt`, and `zmq`, which always encrypts: `benchmarks/planes/planes.py --pairs encrypt`, "
        f"medians of {result['rounds']} rounds, in which the planes take turns on a shared machine.",
        table(result["rows"], columns),
    )


def keys() -> str:
    """What the control port costs."""
    result = load("control_round_trip")
    names = {"tls": "control port, TLS 1.3", "tcp": "bare TCP", "former": "the former one, ZMQ and CURVE"}
    columns: Columns = {
        "wire": lambda row: names[row["wire"]], "median": "{round_trip_us_p50:.0f}", "p99": "{round_trip_us_p99:.0f}",
        "computing, median": "{computing_us_p50:.0f}", "computing, p99": "{computing_us_p99:.0f}",
        "new connection, median": "{new_connection_us_p50:.0f}",
    }  # fmt: skip
    return page(
        f"{NO_POLICY} {machine(result)}",
        "Microseconds of an ask and its answer on the control port, alone and beside a thread of D that computes in "
        "Python, and of a new connection with its first answer, `benchmarks/planes/control_round_trip.py`: "
        f"{result['rounds']} rounds, in which the wires take turns.",
        table(result["rows"], columns),
    )


# --- engines ----------------------------------------------------------------------------------------------------------


def gaps(row: Row, which: str) -> str:
    """The 99th percentile and the largest; empty where D decodes nothing."""
    p99, largest = row[f"{which}_p99_ms"], row[f"{which}_max_ms"]
    return "" if p99 is None else f"{p99:.1f} / {largest:.1f}"


def ways(row: Row) -> str:
    return ", ".join(f"{count} {way}" for way, count in row["ways"].items())


def busy_cells(result: Row) -> dict[tuple[int, int], dict[str, Row]]:
    """Rows of ``gpu_busy.json`` by sequences, tokens and connector."""
    found: dict[tuple[int, int], dict[str, Row]] = {}
    for row in result["rows"]:
        found.setdefault((row["sequences"], row["tokens"]), {})[row["connector"]] = row
    return found


def of(name: str, connector: str) -> Callable[[Any], str]:
    return lambda cell: f"{cell[1][connector][name]:.1f}"


def gaps_of(which: str, connector: str) -> Callable[[Any], str]:
    return lambda cell: gaps(cell[1][connector], which)


BUSY: Columns = {"D decodes": lambda cell: str(cell[0][0]), "prompt tokens": lambda cell: str(cell[0][1])}


def end_to_end() -> str:
    """The table of README.md: the first token, and the gaps of the others, beside NIXL."""
    result = load("gpu_busy")
    columns: Columns = {
        **BUSY,
        **{f"TTFT, {one}, ms": of("ttft_ms", each) for one, each in CONNECTORS.items()},
        **{f"gaps, {one}, ms": gaps_of("gap", each) for one, each in CONNECTORS.items()},
    }
    return page(
        f"Two vLLM engines on {result['versions']['gpus']}, `kv_load_failure_policy` `{result['policy']}`. TTFT: D's "
        "time to first token, median. Gaps: of the sequences that D decodes, around a hand-over, 99th percentile / "
        "largest.",
        table(busy_cells(result).items(), columns),
    )


def gpu_busy() -> str:
    """TTFT on a D that decodes, the way that loads went, and the gaps of the sequences that it decodes."""
    result = load("gpu_busy")
    times, around = {"ttft_ms": "TTFT", "local_ttft_ms": "local hit"}, {"gap": "gaps", "local_gap": "gaps, local hit"}
    columns: Columns = {
        **BUSY,
        **{f"{head}, {one}, ms": of(name, each) for name, head in times.items() for one, each in CONNECTORS.items()},
        "KVFerry's loads": lambda cell: ways(cell[1]["KVFerryConnector"]),
        **{
            f"{head}, {one}, ms": gaps_of(which, each)
            for which, head in (around | {"quiet": "gaps, quiet"}).items() for one, each in CONNECTORS.items()
        },
    }  # fmt: skip
    return page(
        f"{policy_sentence(result['policy'])} {machine(result, (*GPU_PACKAGES, 'vllm'))}",
        "Two vLLM engines per connector, with CUDA graphs and asynchronous scheduling, `benchmarks/engines/busy.py`. "
        "TTFT is D's time to first token with KV from P, local hit that of the same prompt from the prefix cache of "
        "the same D under the same load: medians. Gaps are the times between the tokens of the sequences that D "
        "decodes, 99th percentile / largest: within one period after a hand-over, after a local hit, and without "
        "either.",
        table(busy_cells(result).items(), columns),
    )


def busy_one_gpu() -> str:
    """TTFT on a D that decodes and shares its GPU with P."""
    result = load("gpu_busy_one_gpu")
    columns: Columns = {
        "D decodes": "{sequences}", "block tables": "{order}", "prompt tokens": "{tokens}", "TTFT, ms": "{ttft_ms:.1f}",
        "local hit, ms": "{local_ttft_ms:.1f}", "copy, ms": "{copy_ms:.1f}", "loads": ways,
        "gaps, ms": partial(gaps, which="gap"), "gaps, ms, local hit": partial(gaps, which="local_gap"),
        "gaps, ms, quiet": partial(gaps, which="quiet"),
    }  # fmt: skip
    return page(
        f"{policy_sentence(result['policy'])} {machine(result, (*GPU_PACKAGES, 'vllm'))}",
        "P and D on one GPU, KVFerry alone, `benchmarks/engines/busy.py --gpus 0 0`, in the terms of "
        "[benchmarks.md](benchmarks.md#between-two-gpus-a-decoder-that-is-busy). `scattered`: hardly two blocks of a "
        "table lie side by side.",
        table(result["rows"], columns),
    )


QUIET_CONTENDERS = {
    "none": "no connector", "none#2": "no connector, another start", "empty": "empty connector", "kvferry": "KVFerry",
    "kvferry#2": "KVFerry, another start", "nixl": "NIXL",
}  # fmt: skip
QUIET_MODELS = {"narrow": "narrow", "8b": "Llama-8B's shape", "tiny": "two layers"}


def quiet_step() -> str:
    """Gaps and local hits of engines that hand nothing over, by connector."""
    parts = [
        policy_sentence(load("quiet_step")["policy"]),
        "Engines that hand nothing over, `benchmarks/engines/quiet_step.py`: milliseconds, median / 99th percentile, "
        "of the gaps between tokens and of the time to first token of a prompt in the engine's own prefix cache. Two "
        "starts of the same engine show what is noise. On GPUs with CUDA graphs and asynchronous scheduling.",
    ]
    for name in ("quiet_step", "quiet_step_one_gpu", "quiet_step_one_gpu_8b", "quiet_step_cpu"):
        result = load(name)
        cells: dict[tuple[str, int, str], dict[str, Row]] = {}
        for row in sorted(result["rows"], key=lambda row: row["figure"] != "gap"):
            cells.setdefault((row["model"], row["sequences"], row["figure"]), {})[row["contender"]] = row

        def times(contender: str) -> Callable[[Any], str]:
            return lambda cell: "{p50_ms:.2f} / {p99_ms:.2f}".format(**cell[1][contender])

        columns: Columns = {
            "model": lambda cell: QUIET_MODELS[cell[0][0]], "sequences": lambda cell: str(cell[0][1]),
            "what": lambda c: "gap" if c[0][2] == "gap" else f"prefix hit, {c[0][2].removeprefix('hit_')} tokens",
            "turns": lambda cell: str(cell[1]["none"]["rounds"]),
            **{head: times(one) for one, head in QUIET_CONTENDERS.items() if one in next(iter(cells.values()))},
        }  # fmt: skip
        packages = ("torch", "vllm") if result["device"] == "cpu" else ("torch", "vllm", "nixl-cu13")
        parts += [machine(result, packages), table(cells.items(), columns)]
    return page(*parts)


def handed(form: str) -> Callable[[Row], str]:
    """A cell that is empty where next to no KV went to D."""
    return lambda row: form.format(**row) if row["mib"] >= 1 else ""


STREAMED: Columns = {
    "engines": "{name}", "tokens": "{tokens}", "GB/s": lambda row: f"{row['gb_per_s']:g}" if row["gb_per_s"] else "",
    "way": "{way}",
    "first token, ms": "{first_ms:.0f}", "second, ms": "{second_ms:.0f}", "P's prefill, ms": "{prefill_ms:.0f}",
    "slower than alone, %": "{prefill_slower_percent:+.1f}", "on its core, %": "{core_slower_percent:+.1f}",
    "MiB": handed("{mib:.0f}"), "at D at its end": handed("{before_end:.0%}"),
    "transfer, ms": handed("{moving_ms:.0f}"),
}  # fmt: skip
TARGETS: Columns = {
    "cell": "{cell}", "target": "{target}", "measured": "{figure:g}", "limit": "{limit}",
    "met": lambda one: "yes" if one["met"] else "no",
}  # fmt: skip


def streaming(name: str, packages: Iterable[str], how: str) -> str:
    """What a client waits for, by way, and how much of the targets is met."""
    result = load(name)
    samples = [row["samples"] for row in result["rows"]]
    met = sum(one["met"] for one in result["targets"])
    return page(
        f"{policy_sentence('recompute')} {machine(result, packages)}",
        f"{how}: {result['kv_kib_per_token']:.0f} KiB of KV per token, steps of {result['chunk']} tokens, medians of "
        f"{min(samples)} to {max(samples)} turns in which all ways have a prompt each. P's prefill is compared with "
        "that of P alone in the same turn: by the clock, and by the time of the thread of P's engine on its core. The "
        "share is of the bytes that were at D when P's last step ended.",
        table(result["rows"], STREAMED),
        f"{met} of the {len(result['targets'])} targets that the benchmark prints are met.",
    )


def both(row: Row, one: str, other: str) -> str:
    """Two figures; empty where there is none."""
    found = [row[name] for name in (one, other) if row[name] is not None]
    return " / ".join(f"{value:.1f}" for value in found)


def of_way(way: str) -> Callable[[Row], str]:
    return lambda row: both(row, f"{way}_ms", f"{way}_p99_ms")


def of_gaps(which: str) -> Callable[[Row], str]:
    return lambda row: both(row, f"{which}_p50_ms", f"{which}_p99_ms")


PREFIX_TURNS: Columns = {
    "source decodes": "{sequences}", "prefix tokens": "{tokens}", "samples": "{samples}", "missed": "{missed}",
    "computed, ms": of_way("computed"), "own prefix cache, ms": of_way("own"), "read, ms": of_way("read"),
    "read over own, ms": lambda row: "" if row["over_own_ms"] is None else f"{row['over_own_ms']:.1f}",
    "gaps beside reads, ms": of_gaps("gap"), "quiet, ms": of_gaps("quiet"),
}  # fmt: skip
PREFIX_REPLAYS: Columns = {
    "conversation": "{form}", "source named": lambda row: "yes" if row["named"] else "no", "turns": "{turns}",
    "prompt tokens": "{prompt:.0f}", "new": "{new:.0f}", "computed": "{computed:.0f}",
    "computed but not new, most": "{most_over_new}", "TTFT, ms": "{ttft_ms:.1f}",
}  # fmt: skip


def prefix_reads() -> str:
    """Turns by where their prefix comes from, and an agent's conversations."""
    parts = []
    for name, packages, what in (
        ("gpu_prefix_reads", (*GPU_PACKAGES, "vllm"), "Llama-8B's shape on two GPUs, CUDA graphs, `cuda_ipc`"),
        ("prefix_reads", CPU_PACKAGES, "A tiny model on a CPU"),
    ):
        if not (RESULTS / f"{name}.json").exists():
            continue
        result = load(name)
        crossover = result["figures"].get("crossover_tokens")
        sooner = f"from {crossover} tokens on" if crossover else "at no length that was measured"
        parts += [
            f"{what}, settings `{json.dumps(result['kv_config'])}`. {machine(result, packages)} On idle engines a read "
            f"takes less than computing {sooner}.",
            table(result["rows"], PREFIX_TURNS),
            table(result["replays"], PREFIX_REPLAYS),
        ]
    return page(
        policy_sentence("recompute"),
        "Two vLLM engines with `prefix_reads`, `benchmarks/engines/prefix_reads.py`. Time to first token of a turn, "
        "in the engine's process, median / 99th percentile: its prefix is computed, is in the engine's own prefix "
        "cache, or is read from the other engine, the source; new tokens behind it. Reads that did not come are "
        "*missed*. Gaps of the sequences that the source decodes, median / 99th percentile. Conversations of an agent "
        "grow by 632 tokens a turn in the median: turns alternate between the engines, or P computes them and D "
        "answers; *new* has no KV on any engine, *computed* is what vLLM counts on the engine that computes the turn.",
        *parts,
    )


# --- all tokens -------------------------------------------------------------------------------------------------------


def wrong_tokens() -> str:
    """What became of hand-overs with planted failures, by kind."""
    result = load("wrong_tokens")
    figures, answered = result["figures"], result["answered"]
    columns: Columns = {
        "planted in the hand-over": "{planted}", "hand-overs": "{handovers}", "failed": "{failed}",
        "of these inside a step": "{failed_inside_step}", "loaded inside a step": "{loaded_inside_step}",
        "loaded beside the steps": "{loaded_beside}", "wrong tokens": "{wrong_tokens}", "wrong KV": "{wrong_kv}",
    }  # fmt: skip
    return page(
        f"{policy_sentence(result['policy'])} {machine(result)}",
        f"Two vLLM engines with a small model in fp32, plane `cma`, seed {result['seed']}, "
        "`tests/engine/wrong_tokens/run.py`. A failure is planted in one of ten hand-overs, and D schedules each step "
        f"while the step before runs, as on GPUs. The tokens and the KV of {sum(answered.values())} answers are "
        "compared with those of a plain engine. A cut, a killed P and a load that is given up also fail hand-overs "
        "beside them.",
        table([row for row in result["rows"] if row["handovers"]], columns),
        f"Requests that hung: {figures['hung']}. Blocks and leases held at the end: {figures['held_at_the_end']:g}. "
        "With `--selftest`, D takes each read for a good one, and the same comparison finds wrong tokens and KV.",
    )


def both_legs() -> str:
    """What became of hand-overs whose legs were sent at once."""
    result = load("both_legs")
    figures = result["figures"]
    columns: Columns = {
        "requests of D": "{handovers}", "loaded": "{loaded}", "load failed": "{failed}",
        "not loaded": "{computed_by_d}",
        "loads that began while P computed": "{loads_while_p_computes:.0f}",
        "preemptions on P": "{preemptions_of_p:.0f}", "wrong tokens": "{wrong_tokens}", "wrong KV": "{wrong_kv}",
    }  # fmt: skip
    return page(
        f"{policy_sentence(result['policy'])} {machine(result)}",
        f"The same engines and comparison, plane `{result['settings']['plane']}`, seed {result['seed']}, "
        f"`tests/engine/wrong_tokens/both_legs.py`, {figures['answers']:,} answers. P computes at most 64 tokens in a "
        f"step, in 36 blocks of 32 tokens; it is killed during {figures['p_killed']} hand-over.",
        table([figures], columns),
    )


def wrong_answers() -> str:
    """What became of requests under the faults that users reported, beside NIXL."""
    result = load("wrong_answers")
    order = {fault: number for number, fault in enumerate(dict.fromkeys(row["fault"] for row in result["rows"]))}
    names = {connector: name for name, connector in CONNECTORS.items()}
    columns: Columns = {
        "fault": lambda row: f"{row['fault']} ({row['source']})" if row["source"] else row["fault"],
        "connector": lambda row: names[row["connector"]], "requests": "{asked}", "right": "{right}",
        "errors": "{error}", "wrong": "{wrong}", "engine ended": "{engine_ends}",
        "seconds, median / longest": "{seconds_p50:.2f} / {seconds_max:.1f}",
    }  # fmt: skip
    return page(
        f"{policy_sentence(result['policy'])} {machine(result, ('vllm', 'nixl-cu13'))}",
        table(sorted(result["rows"], key=lambda row: order[row["fault"]]), columns),
    )


# --- router, plan -----------------------------------------------------------------------------------------------------


def router_cost() -> str:
    """What the router adds to a request."""
    result = load("router_cost")
    columns: Columns = {
        "answer": "{case}", "router, ms": "{through_router_ms_p50:.2f}", "direct, ms": "{direct_ms_p50:.2f}",
        "own cost, ms": "{own_cost_ms_p50:.2f}", "requests/s of a core": "{requests_per_core_second}",
    }  # fmt: skip
    waits = ", ".join(f"{wait:.0f} ms ({shape})" for shape, wait in result["waits"].items())
    return page(
        f"{NO_POLICY} {machine(result)}",
        "Milliseconds of a request through `kvferry router`, and of both legs sent to the engines directly, "
        "`benchmarks/router/router_cost.py`: medians, one request at a time, prompts of 2 KiB, engines that answer at "
        "once. The last column is the requests of 16 clients divided by the seconds that the router's process ran on "
        "a core.",
        table(result["rows"], columns),
        f"While the router reads a body of 60 MiB, others wait {waits} at most: the longest wait of a round, median "
        "of the rounds.",
    )


def where_to_prefill() -> str:
    """First tokens and gaps by who prefills, of simulated engines and of those that were measured."""
    parts = []
    for name, packages, what in (
        ("where_to_prefill", (), "Simulated engines"),
        ("gpu_where_to_prefill", (*GPU_PACKAGES, "vllm"), "Engines of vLLM on GPUs"),
        ("cpu_where_to_prefill", CPU_PACKAGES, "Engines of vLLM on a CPU"),
    ):
        if not (RESULTS / f"{name}.json").exists():
            continue
        result = load(name)
        parts += [f"{what}. {machine(result, packages) if packages else ''}".strip(), table(result["rows"], _who())]
    return page(
        "P and D, `benchmarks/router/where_to_prefill.py`. *Always*: P prefills all prompts. *Never*: D does. "
        "*Decides*: `kvferry router --choose`, and its mean time to the first token (TTFT) divided by the better "
        "one of always and never. *Aggregated*: as many engines without hand-overs. Gap: mean time from a token to the "
        "next one, and the 99th percentile. Conversations: 300 requests of a part of Mooncake's trace of them, sent at "
        "another rate. Turns: short ones of 60 to 300 tokens, long ones of 500 to 3,000. The simulated engines prefill "
        "20,000 tokens/s and take steps of 12 ms and 0.1 ms a sequence, where the table says nothing else; hand-overs "
        "of 128 KiB a token take what `kvferry plan` says.",
        *parts,
    )


USUAL = {None, "NVLink", "one host", "alike"}


def _who() -> Columns:
    def each(policy: str, figure: str, digits: int) -> Callable[[Any], str]:
        return lambda row: f"{row['policies'][policy][figure]:.{digits}f}"

    def gaps(policy: str) -> Callable[[Any], str]:
        return lambda row: f"{each(policy, 'gap_ms', 1)(row)} / {each(policy, 'gap_p99_ms', 0)(row)}"

    names = {"always": "always", "never": "never", "decide": "decides", "aggregated": "aggregated"}
    return {
        "load": lambda row: ", ".join([row["load"], *({row.get("link"), row.get("speeds")} - USUAL)]),
        "P + D": lambda row: row.get("engines", "1 + 1"),
        "requests/s": "{requests_per_second:g}",
        "D prefills": lambda row: f"{row['policies']['decide']['left_to_d']:.0%}",
        **{f"TTFT, ms, {name}": each(policy, "ttft_ms", 0) for policy, name in names.items()},
        "decides, to the better": "{ttft_to_better:.2f}",
        **{f"gap, ms, {name}": gaps(policy) for policy, name in names.items()},
    }


def odd_requests() -> str:
    """How many answers through a router are those of D alone, by path; and those that are not."""
    result = load("odd_requests")
    figures, versions = result["figures"], result["versions"]
    alike = {
        "equal": "equal", "but for rounding": "equal but for rounding",
        "events joined": "equal when its events are joined", "the router's own error": "the router's own error",
        "different": "different",
    }  # fmt: skip

    def count(name: str) -> Callable[[Any], str]:
        return lambda one: str(one[1].get(name, 0))

    columns: Columns = {
        "path": lambda one: f"`{one[0]}`", "answers": lambda one: str(sum(one[1].values())),
        **{head: count(name) for head, name in alike.items()},
    }  # fmt: skip
    names = dict.fromkeys(row["name"] + (", streamed" if row["streamed"] else "") for row in result["rows"])
    return page(
        f"{figures['requests']} requests, {figures['asked']} answers, {figures['differences']} differences. Machine: "
        f"{versions['cpus']} cores ({versions['cpu']}), vLLM {versions['vllm']}. "
        "`python tests/engine/odd_requests.py`: the official client asks D alone, and a router that asks P and D "
        "at once or one after the other, with and without a stream. Equal: byte for byte, but for ids and times. "
        "Rounding: of log probabilities, by 0.001 at most. Events joined: D itself had put several tokens into one "
        "event.",
        table(result["answers"].items(), columns),
        *([f"Different: {'; '.join(names)}."] if names else []),
    )


def router_fleet() -> str:
    """Honest requests among bad clients, and the router's memory and descriptors after each crowd."""
    result = load("router_fleet")
    figures, versions = result["figures"], result["versions"]
    columns: Columns = {
        "honest answers": "{honest}", "failed": "{failed}", "router's memory, MiB": "{resident_mib}",
        "its descriptors": "{descriptors}",
    }  # fmt: skip
    return page(
        f"2 P and 2 D of vLLM {versions['vllm']} on {versions['cpus']} cores ({versions['cpu']}), `vllm bench serve`, "
        "and 1,000 clients at a time that leave, lie or stall: `python tests/router/run_fleet.py`. "
        f"{figures['honest_lost']} honest requests lost, {figures['leases_that_ended_by_time']:g} leases ended by "
        "time. After each crowd:",
        table(result["rows"], columns),
    )


def plan_accuracy() -> str:
    """By plane, the shares within the bounds and the median errors, in percent."""
    result = load("plan_accuracy")
    figures, versions = result["figures"], result["versions"]
    predicted = [row for row in result["rows"] if not row["fitted"]]
    planes = sorted({row["plane"] for row in predicted}, key=lambda name: (name.endswith("/gpu"), name))

    def share(name: str, digits: int = 0) -> Callable[[str], str]:
        return lambda p: f"{100 * figures[f'{p}_{name}']:.{digits}f} %" if f"{p}_{name}" in figures else "not measured"

    columns: Columns = {
        "plane": lambda plane: f"`{plane}`",
        "p50 within 10 %": share("p50_within_10_percent"),
        "p50, the same measured twice": share("p50_repeats_within_10_percent"),
        "p50, median error": share("p50_median_error", 1),
        "p95 within 20 %": share("p95_within_20_percent"),
        "p95, the same measured twice": share("p95_repeats_within_20_percent"),
        "p95, median error": share("p95_median_error", 1),
    }
    hosts, gpus = (sum(row["plane"] == plane for row in predicted) for plane in ("cma/host", "cuda_ipc/gpu"))
    return page(
        f"How far predictions were off, of {hosts} cases of each plane in host memory, on {versions['cpus']} cores "
        f"({versions['cpu']}) with little other load, and of {gpus} cases of each plane of GPUs, between two GPUs of "
        "one host: the share of the cases whose predicted time was so close to the measured one, and the median error. "
        "The costs were fitted to none of these cases. *The same measured twice*: the share of the cases in which one "
        "half of the rounds was so close to the other half; a half has fewer hand-overs, so its percentiles scatter "
        "more.",
        table(planes, columns),
        "[plan_accuracy.json](../benchmarks/results/plan_accuracy.json) has all cases, "
        "[plan_accuracy.py](../benchmarks/plan/plan_accuracy.py) measures them.",
    )


def systems() -> str:
    """The measured rows of docs/comparison.md: KVFerry beside NIXL, whichever is faster, of the shortest and the
    longest prompt. Nothing here has measured Mooncake or LMCache, so their columns say so."""
    planes, busy = load("gpu_planes"), load("gpu_busy")
    points, no = by_point(planes), "not measured"
    rows = [
        (f"GB/s between two GPUs, {form}", rate(points[point]["cuda_ipc"]), rate(points[point]["nixl"]), "gpu_planes")
        for point, form in (
            ("pieces_8k", POINTS["pieces_8k"]), ("pieces_32k", POINTS["pieces_32k"]),
            ("tokens_8192", "8192 tokens of Llama-8B, other blocks and layout on D"),
        )
    ]  # fmt: skip
    whole = rate(points["tokens_8192"]["nixl_best"])
    rows.append(("GB/s between two GPUs, one contiguous piece of 1 GiB", no, whole, "gpu_planes"))
    found = {(row["sequences"], row["tokens"], row["connector"]): row for row in busy["rows"]}
    lengths = {tokens for _, tokens, _ in found}
    beside = "gaps between tokens beside a hand-over, 99th percentile"
    for what, name in (("TTFT", "ttft_ms"), (beside, "gap_p99_ms")):
        for sequences in sorted({sequences for sequences, _, _ in found}):
            for tokens in (min(lengths), max(lengths)):
                values = [found[sequences, tokens, connector][name] for connector in CONNECTORS.values()]
                if None not in values:
                    where = f"D with CUDA graphs that decodes {sequences} sequences, {tokens} tokens"
                    rows.append((f"{what}, ms, {where}", f"{values[0]:.1f}", f"{values[1]:.1f}", "gpu_busy"))
    columns: Columns = {
        "what": lambda row: row[0], "KVFerry": lambda row: row[1], "NIXL, NixlConnector": lambda row: row[2],
        "Mooncake": lambda row: no, "LMCache": lambda row: no,
        "result": lambda row: f"[{row[3]}](../benchmarks/results/{row[3]}.json)" if row[3] else "none",
    }  # fmt: skip
    return page(
        f"{machine(planes, ('nixl-cu13',))} TTFT is that of vLLM {busy['versions']['vllm']} on such GPUs; of each "
        "measurement the shortest and the longest prompt. [benchmarks.md](benchmarks.md) has all rows, and says how "
        "each was measured.",
        table([*rows, ("anything over RDMA hardware", no, no, "")], columns),
        "`*` NIXL does not change the layout; the time for that is not counted.",
    )


SECTIONS: dict[str, Callable[[], str]] = {
    "gpu-bandwidth": gpu_bandwidth,
    "gpu-busy": gpu_busy,
    "gpu-streaming": lambda: streaming(
        "gpu_streaming",
        (*GPU_PACKAGES, "vllm"),
        "Two vLLM engines per row, each on its own GPU of one host, `benchmarks/engines/streaming.py`, the form of "
        "Llama-8B, CUDA graphs, `tcp` over loopback",
    ),
}
"""Of docs/benchmarks.md."""
MORE: dict[str, Callable[[], str]] = {
    "gpu-busy-one-gpu": busy_one_gpu,
    "gpu-quiet-step": quiet_step,
    "cpu-streaming": lambda: streaming(
        "streaming",
        CPU_PACKAGES,
        "Two vLLM engines in two network namespaces whose link sends at most so many GB/s, "
        "`benchmarks/engines/streaming.py --device cpu`, KVFerry over `tcp`",
    ),
    "cpu-bandwidth": cpu_bandwidth,
    "encrypted": encrypted,
    "cpu-checksum": checksums,
    "keys": keys,
    "prefix-reads": prefix_reads,
    "router-cost": router_cost,
    "cpu-wrong-tokens": wrong_tokens,
    "cpu-both-legs": both_legs,
}
"""Of docs/measurements.md."""


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print((SECTIONS | MORE)[name]())
