"""The command ``kvferry bench``: hand-overs of a pair of ranks over the planes of this machine, on the caches of a
model, beside what the machine reaches without KVFerry."""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from rich.console import Console
from rich.progress import track

from kvferry.cli.doctor.planes import look
from kvferry.cli.plan.model import ModelShape, model_shape, uniform_shape
from kvferry.cli.rank_pair import ELEMENT_BYTES, CacheForm, RankPair, device_of
from kvferry.cli.terminal import FailedError, check_writable, complain, read_model_config, table, write_json
from kvferry.connector.config import Settings
from kvferry.connector.geometry.topology import TpKVTopology
from kvferry.transport.errors import ConfigError
from kvferry.transport.registry import plane_spec, plane_specs

LLAMA_8B = uniform_shape(32, 32, 8, 512, "bfloat16")
"""Llama-3.1-8B, where no model is named."""
PROMPTS = (256, 1024, 4096)
STEADY = 2.0
"""Where the slowest hand-over of a cell takes so many times as long as the fastest, its figures are noise."""
MIB = 1 << 20
MAX_COPIED_BYTES = 256 * MIB
PLANE_SECONDS, HANDOVER_SECONDS = 120.0, 60.0
"""Bounds on the start of two ranks, and on one hand-over with the check of its bytes."""
MEMORY = {"cpu": "host", "cuda": "gpu"}


class BenchRow(msgspec.Struct):
    """Hand-overs of one prompt length over one plane. ``wrong_bytes``: of the first, which is not counted."""

    plane: str
    tokens: int
    nbytes: int
    p50_ms: float
    gb_per_second: float
    samples_ms: list[float]
    wrong_bytes: int = 0


class BenchResult(msgspec.Struct, frozen=True):
    """What ``--json`` writes."""

    form: str
    machine: dict[str, str]
    model: dict[str, Any]
    caches: CacheForm  # Of either rank
    rows: list[BenchRow]
    copy_gb_per_second: float  # Of the longest prompt in one contiguous copy, without KVFerry
    failed: list[str]  # By plane, why it was not measured


def bench(
    *, model: Path | None, kv_dtype: str, tp: int, prompt: list[int] | None, plane: list[str] | None,
    device: Literal["auto", "cpu", "cuda"], rounds: int, json_file: Path | None,
) -> bool:  # fmt: skip
    """Measure, print, and write the files that are asked for. Returns whether all was measured. Raises KVFerryError,
    FailedError."""
    check_writable(json_file)
    shape = LLAMA_8B if model is None else model_shape(read_model_config(model), kv_dtype)
    prompts = sorted(set(prompt or PROMPTS))
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch sees no GPU; give --device cpu")
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    where = torch.device("cuda" if on_gpu else "cpu")
    form = cache_form(shape, tp, prompts[-1])
    _check_memory(where, form.token_bytes * prompts[-1])
    planes, missing = _planes(plane, where)
    if plane and not planes:
        raise FailedError("not measured: " + "; ".join(missing))
    result = _measured(shape, form, planes, missing, prompts, rounds, where)
    _print(result, where)
    write_json(json_file, result)
    return bool(result.rows) and not result.failed


# --- input ----------------------------------------------------------------------------------------------------------


def cache_form(shape: ModelShape, tp: int, tokens: int) -> CacheForm:
    """The cache of the first rank of an engine. Raises ConfigError."""
    kv, *others = shape.kv
    if others or kv.window:
        raise ConfigError(
            "kvferry bench has caches of models whose layers all keep the KV of all tokens; this one has windows: "
            "leave --model out"
        )
    if shape.attention_heads % tp:
        raise ConfigError(f"--tp is {tp}, expected a divisor of the {shape.attention_heads} attention heads")
    _, heads = TpKVTopology.head_interval(0, tp, kv.total_heads)
    return CacheForm(shape.num_layers, heads, kv.content_bytes // ELEMENT_BYTES, tokens)


def _check_memory(device: torch.device, nbytes: int) -> None:
    """P and D each have the longest prompt, and its pattern beside it. Raises ConfigError: they have no room."""
    found = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
    free = int(found[1]) << 10 if found else 0
    if device.type == "cpu" and 3 * nbytes > free:
        raise ConfigError(
            f"the longest prompt has {nbytes // MIB} MiB and needs three times as much, {free // MIB} MiB are free; "
            "give a smaller --prompt"
        )


def _planes(wanted: Sequence[str] | None, device: torch.device) -> tuple[list[str], list[str]]:
    """The planes to measure, and why others of ``wanted`` cannot be. Raises KVFerryError: there is no such plane."""
    settings = Settings()
    specs = [plane_spec(name) for name in wanted] if wanted else [s for s in plane_specs() if s.use(device) is not None]
    found, missing = [], []
    for spec in specs:
        why = look(spec, device, settings)[0] if spec.use(device) else f"it carries no {MEMORY[device.type]} memory"
        if not why:
            found.append(spec.name)
        elif wanted:
            missing.append(f"{spec.name}: {why}")
    return found, missing


# --- hand-overs -----------------------------------------------------------------------------------------------------


def measure(
    pair: RankPair, plane: str, device: torch.device, form: CacheForm, prompts: Sequence[int], rounds: int
) -> list[BenchRow]:  # fmt: skip
    """The rows of one plane. Raises FailedError: the plane cannot be measured; the pair is closed then."""

    def deadline() -> float:
        return time.monotonic() + HANDOVER_SECONDS

    rows = []
    try:
        pair.start(plane, device, form, time.monotonic() + PLANE_SECONDS)
        for tokens in prompts:
            nbytes = pair.hand_over(tokens, deadline())[0]
            wrong = pair.differing(tokens, deadline())
            seconds = [pair.hand_over(tokens, deadline())[1] for _ in range(rounds)]
            p50, samples = statistics.median(seconds), [round(each * 1e3, 4) for each in seconds]
            rate = round(nbytes / p50 / 1e9, 3)
            rows.append(BenchRow(plane, tokens, nbytes, round(p50 * 1e3, 4), rate, samples, wrong))
        pair.stop(deadline())
    except FailedError as error:
        pair.close()
        raise FailedError(f"{plane}: {error}") from None
    return rows


def _measured(
    shape: ModelShape, form: CacheForm, planes: Sequence[str], failed: list[str], prompts: Sequence[int], rounds: int,
    device: torch.device,
) -> BenchResult:  # fmt: skip
    rows: list[BenchRow] = []
    with closing(RankPair("127.0.0.1")) as pair:
        for plane in track(planes, "planes", console=Console(stderr=True), transient=True):
            try:
                rows += measure(pair, plane, device, form, prompts, rounds)
            except FailedError as error:
                failed.append(str(error))
    nbytes = min(form.token_bytes * prompts[-1], MAX_COPIED_BYTES)
    copied = nbytes / statistics.median(_copy_seconds(device, nbytes) for _ in range(min(rounds, 5))) / 1e9
    failed += [f"{row.plane}: {row.wrong_bytes} bytes arrived wrong" for row in rows if row.wrong_bytes]
    machine = {
        "python": platform.python_version(), "torch": str(torch.__version__), "system": platform.platform(),
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else f"{platform.machine()} host memory",
    }  # fmt: skip
    return BenchResult("kvferry-bench-3", machine, msgspec.to_builtins(shape), form, rows, copied, failed)


def _copy_seconds(device: torch.device, nbytes: int) -> float:
    """A copy from one tensor to another, the pages of both touched before."""
    source, target = (torch.zeros(nbytes, dtype=torch.uint8, device=device_of(device, side)) for side in "pd")
    begun = 0.0
    for _ in range(2):
        begun = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(target.device)
    return time.perf_counter() - begun


# --- output ---------------------------------------------------------------------------------------------------------


def _print(result: BenchResult, device: torch.device) -> None:
    form = result.caches
    drawn = table(
        f"Hand-overs of one rank, {MEMORY[device.type]} memory: {form.layers} layers, {form.heads} heads",
        ("plane", "tokens", "MiB", "ms p50", "ms least", "ms most", "GB/s"),
        (
            (row.plane, str(row.tokens), f"{row.nbytes / MIB:.1f}", f"{row.p50_ms:.2f}", f"{min(row.samples_ms):.2f}",
             f"{max(row.samples_ms):.2f}", f"{row.gb_per_second:.2f}")
            for row in result.rows
        ),
        left=("plane",),
    )  # fmt: skip
    drawn.add_section()
    drawn.add_row("one contiguous copy", "", "", "", "", "", f"{result.copy_gb_per_second:.2f}")
    Console().print(drawn)
    spread = max((max(row.samples_ms) / min(row.samples_ms) for row in result.rows), default=1.0)
    if spread > STEADY:
        least = len(result.rows[0].samples_ms)
        complain(
            f"the slowest of {least} hand-overs took up to {spread:.0f} times as long as the fastest, so medians and "
            "rates say little; let nothing else run here, and give more --rounds"
        )
    for why in result.failed:
        complain(f"not measured: {why}")
