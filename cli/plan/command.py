"""The command ``kvferry plan``: files and options in, tables and JSON out."""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from kvferry.cli.plan.handover import Deployment, Pair, PlannedRead, plan_handover
from kvferry.cli.plan.model import ModelShape, model_shape
from kvferry.cli.plan.time_model import Calibration, PromptPlan, default_calibration, prompt_plan
from kvferry.cli.terminal import check_writable, read_model_config, table, write_json
from kvferry.transport.errors import ConfigError, PlaneUnavailableError, check_positive
from kvferry.transport.registry import GPU, HOST, best_slot_bytes, best_staging_bytes, plane_spec

PROMPTS = (128, 1024, 8192, 32768)
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
LINK = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTkmgt]?)(B/s|Bps|bits?/s|b/s|bps|bit|b|bE|)\s*")
Layout = Literal["HND", "NHD"]


class PlanResult(msgspec.Struct, frozen=True):
    """What ``--json`` writes. ``costs_of``: the plane whose costs were taken, another one where ``plane`` was not
    measured. ``reads``: those of the longest prompt."""

    form: str
    model: dict[str, Any]
    p: Deployment
    d: Deployment
    plane: str
    costs_of: str
    link_bytes_per_second: float | None
    prefill_tokens_per_second: float
    calibration: Calibration
    reads: list[PlannedRead]
    prompts: list[PromptPlan]


def plan(
    *, model: Path, prefill_tokens_per_second: float, p_tp: int, d_tp: int, p_pp: int, d_pp: int,
    p_block_size: int, d_block_size: int, p_layout: Layout, d_layout: Layout, kv_dtype: str,
    plane: str | None, link: str | None, prompt: list[int] | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Plan, print, and write the file that is asked for. Raises KVFerryError."""
    check_writable(json_file)
    plane = plane or ("cuda_ipc/gpu" if link is None else "tcp/gpu")  # what a default installation takes
    costs_by_plane = default_calibration()
    costs, costs_of = costs_by_plane.costs(plane), costs_by_plane.measured_as(plane)
    shape = model_shape(read_model_config(model), kv_dtype)
    p, d = Deployment(p_tp, p_pp, p_block_size, p_layout), Deployment(d_tp, d_pp, d_block_size, d_layout)
    pair = Pair(shape, p, d, _slot_bytes(plane))
    rate = inf if link is None else bytes_per_second(link)
    if costs_of != plane and link is None:
        raise ConfigError(f"--plane {plane} has not been measured: give --link")
    check_positive("--prefill-tokens-per-second", prefill_tokens_per_second)
    prompts = sorted(set(prompt or PROMPTS))
    plans = [prompt_plan(pair, tokens, costs, rate, prefill_tokens_per_second) for tokens in prompts]
    reads = list(plan_handover(pair, prompts[-1]))
    _print(shape, reads, plans, plane, costs_of)
    given = None if link is None else rate
    result = PlanResult(
        "kvferry-plan-2", msgspec.to_builtins(shape), p, d, plane, costs_of, given, prefill_tokens_per_second,
        costs_by_plane, reads, plans,
    )  # fmt: skip
    write_json(json_file, result)


def bytes_per_second(text: str) -> float:
    """A rate as ``12.5GB/s``, or in bits as ``100Gbps``, ``25Gb/s`` or ``400G``, with decimal prefixes. Raises
    ConfigError: it is none."""
    number, found = 0.0, LINK.fullmatch(text)
    if found and (found[2] or found[3].endswith("s")):
        number = float(found[1]) * UNITS[found[2].upper()] / (1 if found[3].startswith("B") else 8)
    if not 0 < number < inf:
        raise ConfigError(f"--link {text!r} is no rate, expected one above 0 as in 12.5GB/s, 100Gbps or 400G")
    return number


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


def _print(shape: ModelShape, reads: list[PlannedRead], plans: list[PromptPlan], plane: str, costs_of: str) -> None:
    kept = f"{shape.token_bytes} bytes of KV a token in {shape.num_layers} layers"
    kept += "".join(f", in {len(kv.layers)} of them for {kv.window} tokens" for kv in shape.kv if kv.window)
    console = Console()
    console.print(kept, soft_wrap=True)
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
