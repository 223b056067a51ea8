"""The command ``kvferry plan``: files and options in, tables, JSON and a plot out."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from kvferry.cli.plan.fleet import EngineModel, FleetPlanner, FleetReport, Targets
from kvferry.cli.plan.handover import Deployment, Pair, PlannedRead, plan_handover
from kvferry.cli.plan.model import ModelShape, model_shape
from kvferry.cli.plan.time_model import (
    Calibration,
    PromptPlan,
    decoded_calibration,
    default_calibration,
    handover_of,
    prompt_plan,
)  # fmt: skip
from kvferry.cli.plan.trace import TracedRequest, parsed_trace
from kvferry.cli.plot import svg_chart
from kvferry.cli.terminal import (
    FailedError,
    check_writable,
    read_file,
    read_model_config,
    table,
    write_file,
    write_json,
)
from kvferry.connector.config import Settings
from kvferry.transport.errors import ConfigError, PlaneUnavailableError, check_positive
from kvferry.transport.registry import GPU, HOST, best_slot_bytes, best_staging_bytes, plane_spec

PROMPTS = (128, 1024, 8192, 32768)
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}

Layout = Literal["HND", "NHD"]


class PlanResult(msgspec.Struct, frozen=True):
    """What ``--json`` writes. ``reads``: those of the longest prompt. ``fleet``: with ``--trace``."""

    form: str
    model: dict[str, Any]
    p: Deployment
    d: Deployment
    plane: str
    link_bytes_per_second: float | None
    calibration: Calibration
    reads: list[PlannedRead]
    prompts: list[PromptPlan]
    fleet: FleetReport | None = None


def plan(
    *, model: Path, prefill_tokens_per_second: float, p_tp: int, d_tp: int, p_pp: int, d_pp: int, p_block_size: int,
    d_block_size: int, p_layout: Layout, d_layout: Layout, kv_dtype: str, plane: str, link: str | None,
    calibration: Path | None, prompt: list[int] | None, trace: Path | None, p_engines: int | None,
    d_engines: int | None, ttft: float, tpot: float, percentile: float, step_ms: float | None,
    step_ms_per_sequence: float, d_sequences: int, p_cache_tokens: int | None, d_cache_tokens: int | None,
    json_file: Path | None, plot: Path | None,
) -> None:  # fmt: skip
    """Plan, print, and write the files that are asked for. Raises KVFerryError; FailedError: the targets are missed."""
    check_writable(json_file, plot)
    costs_by_plane = default_calibration() if calibration is None else decoded_calibration(read_file(calibration))
    costs = costs_by_plane.costs(plane)
    shape = model_shape(read_model_config(model), kv_dtype)
    p, d = Deployment(p_tp, p_pp, p_block_size, p_layout), Deployment(d_tp, d_pp, d_block_size, d_layout)
    pair = Pair(shape, p, d, _slot_bytes(plane))
    rate = inf if link is None else bytes_per_second(link)
    check_positive("--prefill-tokens-per-second", prefill_tokens_per_second)
    check_positive("--ttft", ttft)
    check_positive("--tpot", tpot)
    prompts = sorted(set(prompt or PROMPTS))
    check_positive("--prompt", prompts[0])
    plans = [prompt_plan(pair, tokens, costs, rate, prefill_tokens_per_second) for tokens in prompts]
    reads = list(plan_handover(pair, prompts[-1]))
    fleet, targets = None, Targets(ttft, tpot, percentile)
    if trace is not None:
        if step_ms is None:
            raise ConfigError("--trace needs --step-ms, the milliseconds of a step of D; give it")
        check_positive("--step-ms", step_ms)
        check_positive("--d-sequences", d_sequences)
        engines = EngineModel(
            prefill_tokens_per_second, step_ms / 1e3, step_ms_per_sequence / 1e3,
            Settings().lease_cap_seconds, d_sequences, p_cache_tokens, d_cache_tokens,
        )  # fmt: skip
        planner = FleetPlanner(_trace(trace), engines, handover_of(pair, costs, rate), percentile)
        fleet = _fleet(planner, p_engines, d_engines, targets)
    elif step_ms is not None:
        raise ConfigError("--step-ms is given without --trace; give --trace, or leave --step-ms out")
    _print(shape, reads, plans, plane)
    if fleet is not None:
        _print_fleet(fleet, None if p_engines is not None else targets)
    given = None if link is None else rate
    model_facts = msgspec.to_builtins(shape)
    result = PlanResult("kvferry-plan-1", model_facts, p, d, plane, given, costs_by_plane, reads, plans, fleet)
    write_json(json_file, result)
    if plot is not None:
        write_file(plot, _plotted(plans, plane).encode())
    if fleet is not None and not fleet.meets(targets):
        raise FailedError("this fleet does not meet the targets; leave out --p-engines and --d-engines")


def bytes_per_second(text: str) -> float:
    """A rate as ``12.5GB/s`` or ``100Gbit/s``, with decimal prefixes. Raises ConfigError: it is none."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(B|bit)/s\s*", text)
    number = float(found[1]) * UNITS[found[2]] / (8 if found[3] == "bit" else 1) if found else 0.0
    if not 0 < number < inf:
        raise ConfigError(f"--link {text!r} is no rate, expected one above 0 as in 12.5GB/s or 100Gbit/s")
    return number


# --- input ----------------------------------------------------------------------------------------------------------


def _trace(path: Path) -> list[TracedRequest]:
    try:
        return parsed_trace(read_file(path).splitlines())
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None


def _slot_bytes(plane: str) -> int | None:
    """The most bytes of a message with the default settings; ``None`` where D reads P's pages itself."""
    name, _, memory = plane.partition("/")
    device = GPU if memory == "gpu" else HOST
    try:
        spec = plane_spec(name)
        if spec.use(device) is None:
            raise ConfigError(f"--plane {plane}: {name} carries no caches in {memory} memory, only in {spec.memory}")
        return None if spec.pulls else best_slot_bytes(name, device, best_staging_bytes(device))
    except PlaneUnavailableError as error:
        raise ConfigError(f"--plane {plane}: {error}") from None


def _fleet(planner: FleetPlanner, num_p: int | None, num_d: int | None, targets: Targets) -> FleetReport:
    if num_p is None and num_d is None:
        return planner.fewest(targets)
    if num_p is None or num_d is None:
        raise ConfigError("only one of --p-engines and --d-engines is given; give both, or none to find them")
    return planner.report(num_p, num_d)


# --- output ---------------------------------------------------------------------------------------------------------


def _print(shape: ModelShape, reads: list[PlannedRead], plans: list[PromptPlan], plane: str) -> None:
    kept = f"{shape.token_bytes} bytes of KV a token in {shape.kv_layers} of {shape.num_layers} layers"
    if shape.window:
        windowed = shape.layers.count("sliding_window") + shape.layers.count("chunked_local")
        kept += f", in {windowed} of them for {shape.window} tokens"
    if shape.state is not None:
        kept += f"; {shape.state_bytes} bytes of states a request"
    console = Console()
    console.print(kept, soft_wrap=True)
    reads_table = table(
        f"Reads of one prompt of {plans[-1].tokens} tokens",
        ("rank of D", "reads from P", "cache", "layers", "heads", "messages", "MB", "bytes in one piece"),
        (
            (*(f"pp{stage} tp{rank}" for stage, rank in (read.d, read.p)), read.cache,
             f"{read.num_layers} in {read.first_layer}..{read.last_layer}",
             f"{read.first_head}..{read.first_head + read.num_heads - 1}",
             str(read.messages), f"{read.nbytes / 1e6:.2f}", str(read.piece_bytes))
            for read in reads
        ),
    )  # fmt: skip
    prompts_table = table(
        f"Hand-overs over {plane}, one at a time",
        ("tokens", "messages", "MB", "ms", "p95 ms", "prefill ms", "share of TTFT"),
        (
            (str(one.tokens), str(one.messages), f"{one.nbytes / 1e6:.2f}", f"{one.seconds * 1e3:.2f}",
             f"{one.p95_seconds * 1e3:.2f}", f"{one.prefill_seconds * 1e3:.1f}", f"{one.share:.1%}")
            for one in plans
        ),
    )  # fmt: skip
    console.print(reads_table)
    console.print(prompts_table)


def _print_fleet(fleet: FleetReport, sought: Targets | None) -> None:
    """``sought``: the targets for which the fewest engines were looked for."""
    console, name = Console(), f"p{fleet.percentile:g}"
    if sought is not None:
        console.print(
            f"Fewest engines for TTFT {sought.ttft:g} s and TPOT {sought.tpot:g} s at percentile "
            f"{sought.percentile:g}: {fleet.p_engines} P, {fleet.d_engines} D", soft_wrap=True,
        )  # fmt: skip
    rows = [
        ("TTFT p50", f"{fleet.ttft_p50:.3f} s"),
        (f"TTFT {name}", f"{fleet.ttft:.3f} s"),
        ("TPOT p50", f"{fleet.tpot_p50 * 1e3:.2f} ms"),
        (f"TPOT {name}", f"{fleet.tpot * 1e3:.2f} ms"),
        ("mean wait for P", f"{fleet.p_queue:.3f} s"),
        ("mean prefill", f"{fleet.prefill:.3f} s"),
        ("mean wait for D", f"{fleet.d_queue:.3f} s"),
        ("mean hand-over", f"{fleet.handover * 1e3:.2f} ms"),
        ("prompt tokens from P's prefix cache", f"{fleet.reused_tokens:.1%}"),
        ("P engines compute", f"{fleet.p_busy:.1%} of the time"),
        ("leases that expired", str(fleet.expired_leases)),
    ]
    title = f"{fleet.p_engines} P and {fleet.d_engines} D engines, {fleet.requests} requests"
    console.print(table(title, ("", "value"), rows, left=("",)))


def _plotted(plans: list[PromptPlan], plane: str) -> str:
    lines = {
        name: [(float(one.tokens), getattr(one, field)) for one in plans]
        for name, field in (
            ("hand-over", "seconds"), ("hand-over, p95", "p95_seconds"), ("prefill", "prefill_seconds"),
        )
    }  # fmt: skip
    return svg_chart(f"Hand-over over {plane}", "prompt tokens", "seconds", lines)
