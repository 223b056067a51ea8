"""The command ``kvferry plan``: files and options in, tables and JSON out."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from rich.console import Console

from kvferry.cli.plan.engine_rates import MIN_PROMPT_TOKENS, MIN_PROMPTS, MIN_STEPS, EngineRate, read_rates
from kvferry.cli.plan.fleet import EngineModel, FleetPlanner, FleetReport, Targets
from kvferry.cli.plan.handover import INDEX_BLOCK, Deployment, Pair, PlannedRead, plan_handover
from kvferry.cli.plan.model import ModelShape, model_shape
from kvferry.cli.plan.time_model import (
    Calibration,
    PromptPlan,
    decoded_calibration,
    default_calibration,
    handover_of,
    prompt_plan,
)  # fmt: skip
from kvferry.cli.plan.trace import parsed_trace
from kvferry.cli.terminal import (
    FailedError,
    check_writable,
    read_file,
    read_model_config,
    table,
    write_json,
)
from kvferry.connector.config import Settings
from kvferry.transport.errors import ConfigError, PlaneUnavailableError, check_positive
from kvferry.transport.registry import GPU, HOST, best_slot_bytes, best_staging_bytes, plane_spec

PROMPTS = (128, 1024, 8192, 32768)
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
LINK = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTkmgt]?)(B/s|Bps|bits?/s|b/s|bps|bit|b|bE|)\s*")

Layout = Literal["HND", "NHD"]
T = TypeVar("T")


class PlanResult(msgspec.Struct, frozen=True):
    """What ``--json`` writes. ``costs_of``: the plane whose costs were taken, another one where ``plane`` was not
    measured. ``rates``: read from running engines. ``reads``: those of the longest prompt. ``fleet``: with ``--trace``.
    """

    form: str
    model: dict[str, Any]
    p: Deployment
    d: Deployment
    plane: str
    costs_of: str
    link_bytes_per_second: float | None
    prefill_tokens_per_second: float
    rates: list[EngineRate]
    calibration: Calibration
    reads: list[PlannedRead]
    prompts: list[PromptPlan]
    fleet: FleetReport | None = None


def plan(
    *, model: Path, prefill_tokens_per_second: float | None, sources: list[str] | None, p_tp: int, d_tp: int, p_pp: int,
    d_pp: int, p_block_size: int | None, d_block_size: int | None, p_layout: Layout, d_layout: Layout, kv_dtype: str,
    plane: str | None, link: str | None, calibration: Path | None, prompt: list[int] | None, trace: Path | None,
    p_engines: int | None, d_engines: int | None, ttft: float, tpot: float, percentile: float, step_ms: float | None,
    step_ms_per_sequence: float, d_sequences: int, p_cache_tokens: int | None, d_cache_tokens: int | None,
    json_file: Path | None,
) -> None:  # fmt: skip
    """Plan, print, and write the files that are asked for. Raises KVFerryError; FailedError: the targets are missed."""
    check_writable(json_file)
    plane = plane or ("cuda_ipc/gpu" if link is None else "tcp/gpu")  # what a default installation takes
    costs_by_plane = default_calibration() if calibration is None else _parsed(calibration, decoded_calibration)
    costs, costs_of = costs_by_plane.costs(plane), costs_by_plane.measured_as(plane)
    shape = model_shape(read_model_config(model), kv_dtype)
    usual = INDEX_BLOCK if any(kv.packing for kv in shape.kv) else 16
    p = Deployment(p_tp, p_pp, usual if p_block_size is None else p_block_size, p_layout)
    d = Deployment(d_tp, d_pp, usual if d_block_size is None else d_block_size, d_layout)
    pair = Pair(shape, p, d, _slot_bytes(plane))
    rate = inf if link is None else bytes_per_second(link)
    if costs_of != plane and link is None:
        raise ConfigError(f"--plane {plane} has not been measured: give --link, or --calibration with its costs")
    rates: list[EngineRate] = []
    if sources:
        prefill_tokens_per_second, step_ms, rates = _read(sources, prefill_tokens_per_second, step_ms, trace)
    if prefill_tokens_per_second is None:
        raise ConfigError("--prefill-tokens-per-second is missing; give it, or --from with the URL of a running P")
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
            raise ConfigError("--trace needs --step-ms, the milliseconds of a step of D; give it, or --from")
        check_positive("--step-ms", step_ms)
        check_positive("--d-sequences", d_sequences)
        engines = EngineModel(
            prefill_tokens_per_second, step_ms / 1e3, step_ms_per_sequence / 1e3,
            Settings().lease_cap_seconds, d_sequences, p_cache_tokens, d_cache_tokens,
        )  # fmt: skip
        requests = _parsed(trace, lambda text: parsed_trace(text.splitlines()))
        planner = FleetPlanner(requests, engines, handover_of(pair, costs, rate), percentile)
        fleet = _fleet(planner, p_engines, d_engines, targets)
    elif step_ms is not None:
        raise ConfigError("--step-ms is given without --trace; give --trace, or leave --step-ms out")
    _print(shape, reads, plans, plane, costs_of, rates)
    if fleet is not None:
        _print_fleet(fleet, None if p_engines is not None else targets)
    given = None if link is None else rate
    model_facts = msgspec.to_builtins(shape)
    result = PlanResult(
        "kvferry-plan-1", model_facts, p, d, plane, costs_of, given, prefill_tokens_per_second, rates, costs_by_plane,
        reads, plans, fleet,
    )  # fmt: skip
    write_json(json_file, result)
    if fleet is not None and not fleet.meets(targets):
        raise FailedError("this fleet does not meet the targets; leave out --p-engines and --d-engines")


def bytes_per_second(text: str) -> float:
    """A rate as ``12.5GB/s``, or in bits as ``100Gbps``, ``25Gb/s`` or ``400G``, with decimal prefixes. Raises
    ConfigError: it is none."""
    number, found = 0.0, LINK.fullmatch(text)
    if found and (found[2] or found[3].endswith("s")):
        number = float(found[1]) * UNITS[found[2].upper()] / (1 if found[3].startswith("B") else 8)
    if not 0 < number < inf:
        raise ConfigError(f"--link {text!r} is no rate, expected one above 0 as in 12.5GB/s, 100Gbps or 400G")
    return number


# --- input ----------------------------------------------------------------------------------------------------------


def _parsed(path: Path, parse: Callable[[bytes], T]) -> T:
    content = read_file(path)
    try:
        return parse(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(
    sources: list[str], prefill: float | None, step_ms: float | None, trace: Path | None
) -> tuple[float, float | None, list[EngineRate]]:
    """What is not given, from running engines: tokens per second of a prefill, and with a trace milliseconds of a step.
    Raises ConfigError: they have not done enough to say it."""
    found, used = read_rates(sources), []
    if prefill is None:
        if found.prefill is None:
            raise ConfigError(
                f"--from: no engine has computed {MIN_PROMPTS} prompts of {MIN_PROMPT_TOKENS} tokens in the mean; send "
                "some to P, or give --prefill-tokens-per-second"
            )
        prefill = found.prefill.value
        used.append(found.prefill)
    if step_ms is None and trace is not None:
        if found.step is None:
            raise ConfigError(f"--from: no engine has made {MIN_STEPS} steps; have D answer more, or give --step-ms")
        step_ms = found.step.value * 1e3
        used.append(found.step)
    return prefill, step_ms, used


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


def _print(
    shape: ModelShape, reads: list[PlannedRead], plans: list[PromptPlan], plane: str, costs_of: str,
    rates: list[EngineRate],
) -> None:  # fmt: skip
    kept = f"{shape.token_bytes} bytes of KV a token in {shape.kv_layers} of {shape.num_layers} layers"
    for kv in shape.kv:
        if kv.window:
            kept += f", in {len(kv.layers)} of them for {kv.window} tokens"
        elif kv.packing:
            kept += f", in {len(kv.layers)} of them {kv.content_bytes} for the index of sparse attention"
    if shape.state is not None:
        kept += f"; {shape.state_bytes} bytes of states a request"
    console = Console()
    console.print(kept, soft_wrap=True)
    for rate in rates:
        console.print(f"{rate.engine}: {rate.value:.4g} {rate.what}, the mean of {rate.count}", soft_wrap=True)
    if costs_of != plane:
        console.print(
            f"{plane} has not been measured: its times are a guess, by the costs of {costs_of} and --link",
            soft_wrap=True,
        )
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
