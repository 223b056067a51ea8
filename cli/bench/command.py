"""The command ``kvferry bench``: the planes of this machine on the geometry of a model. ``bench`` measures."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from kvferry.cli.bench.ceilings import Ceiling, ceilings
from kvferry.cli.bench.cells import Cell, PlaneFailedError, measure
from kvferry.cli.doctor.planes import look
from kvferry.cli.files import check_writable, read_model_config, write_file
from kvferry.cli.plan.calibrate import measured_costs
from kvferry.cli.plan.model_shape import ModelShape, model_shape
from kvferry.cli.plan.plot import svg_chart
from kvferry.cli.plan.time_model import Calibration
from kvferry.cli.rank_pair.form import ELEMENT_BYTES, CacheForm
from kvferry.cli.rank_pair.pair import RankPair
from kvferry.connector.config import Settings
from kvferry.connector.geometry.topology import TpKVTopology
from kvferry.transport.errors import ConfigError, KVFerryError
from kvferry.transport.registry import plane_spec, plane_specs

LLAMA_8B = ModelShape(("full",) * 32, 32, 8, 512, "bfloat16")
"""Llama-3.1-8B, where no model is named."""
PROMPTS = (256, 1024, 4096)
MAX_ROUNDS, MAX_TOKENS = 1000, 1 << 22
MIB = 1 << 20
PIECES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10)
"""Bytes of the pieces whose rates ``--calibration`` takes."""
CALIBRATED_BYTES = 64 * MIB
FAILED, BAD_INPUT = 1, 2
MEMORY = {"cpu": "host", "cuda": "gpu"}

Layout = Literal["HND", "NHD"]


class BenchRow(msgspec.Struct, frozen=True):
    """One cell. Times in milliseconds."""

    plane: str
    tokens: int
    nbytes: int
    p50_ms: float
    p95_ms: float
    gb_per_second: float
    samples_ms: list[float]


class BenchResult(msgspec.Struct, frozen=True):
    """What ``--json`` writes. ``failed``: by plane, why it was not measured."""

    form: str
    machine: dict[str, str]
    model: dict[str, Any]
    p: CacheForm
    d: CacheForm
    rows: list[BenchRow]
    ceilings: list[Ceiling]
    failed: list[str]


def bench(
    *, model: Path | None, kv_dtype: str, tp: int, p_block_size: int, d_block_size: int, p_layout: Layout,
    d_layout: Layout, prompt: list[int] | None, plane: list[str] | None, device: Literal["auto", "cpu", "cuda"],
    rounds: int, json_file: Path | None, plot: Path | None, calibration: Path | None,
) -> None:  # fmt: skip
    """Measure hand-overs between two ranks of this machine, over each data plane, on the caches of a model."""
    try:
        check_writable(json_file, plot, calibration)
        shape = LLAMA_8B if model is None else model_shape(read_model_config(model), kv_dtype)
        prompts = sorted(set(prompt or PROMPTS))
        _check("--prompt", prompts[0], 1, MAX_TOKENS)
        _check("--prompt", prompts[-1], 1, MAX_TOKENS)
        _check("--rounds", rounds, 3, MAX_ROUNDS)
        where = _device(device)
        p = cache_form(shape, tp, prompts[-1], p_block_size, p_layout)
        d = cache_form(shape, tp, prompts[-1], d_block_size, d_layout)
        _check_memory(where, p.token_bytes * prompts[-1])
        planes, missing = _planes(plane, where)
        if plane and not planes:
            raise PlaneFailedError("not measured: " + "; ".join(missing))
        result = _measured(shape, p, d, planes, missing, prompts, rounds, where)
        _print(Console(), result, where)
        if json_file is not None:
            write_file(json_file, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        if plot is not None:
            write_file(plot, _plotted(result).encode())
        if calibration is not None:
            write_file(calibration, msgspec.json.format(_calibrated(planes, where, rounds), indent=1) + b"\n")
    except (KVFerryError, PlaneFailedError) as error:
        typer.echo(f"kvferry: {error}", err=True)
        raise typer.Exit(BAD_INPUT if isinstance(error, KVFerryError) else FAILED) from None
    if result.failed or not result.rows:
        raise typer.Exit(FAILED)


def cache_form(shape: ModelShape, tp: int, tokens: int, block_tokens: int, layout: Layout) -> CacheForm:
    """The cache of the first rank of an engine. Raises ConfigError."""
    if set(shape.layers) - {"full", "mla"} or shape.state is not None:
        raise ConfigError(
            "kvferry bench has caches of models whose layers all keep the KV of all tokens; this one has windows, or "
            "layers without KV: leave --model out"
        )
    _check("--tp", tp, 1, shape.attention_heads)
    if shape.attention_heads % tp:
        raise ConfigError(f"--tp is {tp}, expected a divisor of the {shape.attention_heads} attention heads")
    _check("a block size", block_tokens, 1, 1 << 16)
    if shape.content_bytes % ELEMENT_BYTES:
        raise ConfigError(
            f"one head of a token has {shape.content_bytes} bytes, expected a multiple of {ELEMENT_BYTES}"
        )
    _, heads = TpKVTopology.head_interval(0, tp, shape.total_heads)
    return CacheForm(shape.num_layers, heads, shape.content_bytes // ELEMENT_BYTES, tokens, block_tokens, layout)


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value}, expected {least} to {most}")


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch sees no GPU; give --device cpu")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _check_memory(device: torch.device, nbytes: int) -> None:
    """P and D each have the longest prompt, and its pattern beside it. Raises ConfigError: they have no room."""
    free = _free_bytes()
    if device.type == "cpu" and 3 * nbytes > free:
        raise ConfigError(
            f"the longest prompt has {nbytes // MIB} MiB and needs three times as much, {free // MIB} MiB are free; "
            "give a smaller --prompt"
        )


def _free_bytes() -> int:
    """Of host memory."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise ConfigError("/proc/meminfo has no line MemAvailable; expected that of Linux")


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


def _progress() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _measured(
    shape: ModelShape, p: CacheForm, d: CacheForm, planes: Sequence[str], missing: list[str], prompts: Sequence[int],
    rounds: int, device: torch.device,
) -> BenchResult:  # fmt: skip
    rows: list[BenchRow] = []
    failed = list(missing)
    pair = RankPair("127.0.0.1")
    try:
        with _progress() as progress:
            task = progress.add_task("", total=len(planes) * len(prompts) * (rounds + 1))
            for plane in planes:
                progress.update(task, description=plane)
                try:
                    cells = measure(pair, plane, device, (p, d), prompts, rounds, lambda: progress.advance(task))
                except PlaneFailedError as error:
                    failed.append(str(error))
                    continue
                failed += [f"{cell.plane}: {cell.wrong} bytes are wrong on D" for cell in cells if cell.wrong]
                rows += map(_row, cells)
            progress.update(task, description="ceilings")
            found = ceilings(device, p.token_bytes * prompts[-1], min(rounds, 5))
    finally:
        pair.close()
    machine = {
        "python": platform.python_version(), "torch": str(torch.__version__), "system": platform.platform(),
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else f"{platform.machine()} host memory",
    }  # fmt: skip
    return BenchResult("kvferry-bench-1", machine, msgspec.to_builtins(shape), p, d, rows, found, failed)


def _row(cell: Cell) -> BenchRow:
    p50, p95 = (float(value) for value in np.percentile(cell.seconds, [50, 95]))
    samples = [round(seconds * 1e3, 4) for seconds in cell.seconds]
    rate = cell.nbytes / p50 / 1e9
    return BenchRow(
        cell.plane, cell.tokens, cell.nbytes, round(p50 * 1e3, 4), round(p95 * 1e3, 4), round(rate, 3), samples
    )


def _calibrated(planes: Sequence[str], device: torch.device, rounds: int) -> bytes:
    """The costs of each plane. Raises PlaneFailedError, ConfigError."""
    costs = {}
    pair = RankPair("127.0.0.1")
    try:
        with _progress() as progress:
            task = progress.add_task("", total=len(planes) * (len(PIECES) + 1) * (rounds + 1))
            for plane in planes:
                progress.update(task, description=f"costs of {plane}")
                by_piece: dict[int, tuple[int, list[float]]] = {}
                nothing: list[float] = []
                for piece in PIECES:
                    form = CacheForm(8, 1, piece // 16 // ELEMENT_BYTES, CALIBRATED_BYTES // 8 * 16 // piece)
                    prompts = [form.tokens] if nothing else [1, form.tokens]
                    cells = measure(pair, plane, device, (form, form), prompts, rounds, lambda: progress.advance(task))
                    nothing = nothing or cells[0].seconds
                    by_piece[piece] = cells[-1].nbytes, cells[-1].seconds
                costs[f"{plane}/{MEMORY[device.type]}"] = measured_costs(
                    nothing, by_piece, plane_spec(plane).load().turn_bytes
                )
    finally:
        pair.close()
    if not costs:
        raise ConfigError("--calibration: no plane was measured")
    measured = {"by": "kvferry bench", "python": platform.python_version(), "argv": " ".join(sys.argv[1:])[:1000]}
    return msgspec.json.encode(Calibration("kvferry-calibration-1", measured, costs))


# --- output ---------------------------------------------------------------------------------------------------------


def _print(console: Console, result: BenchResult, device: torch.device) -> None:
    p, d = result.p, result.d
    forms = (
        f"{p.layout}, blocks of {p.block_tokens}"
        if (p.layout, p.block_tokens) == (d.layout, d.block_tokens)
        else (f"{p.layout}, blocks of {p.block_tokens} to {d.layout}, blocks of {d.block_tokens}")
    )
    table = Table(
        title=f"Hand-overs of one rank, {MEMORY[device.type]} memory: {p.layers} layers, {p.heads} heads; {forms}"
    )
    for name in ("plane", "tokens", "MiB", "ms p50", "ms p95", "GB/s"):
        table.add_column(name, justify="left" if name == "plane" else "right")
    for row in result.rows:
        table.add_row(
            row.plane, str(row.tokens), f"{row.nbytes / MIB:.1f}", f"{row.p50_ms:.2f}", f"{row.p95_ms:.2f}",
            f"{row.gb_per_second:.2f}",
        )  # fmt: skip
    table.add_section()
    for ceiling in result.ceilings:
        table.add_row(ceiling.what, "", f"{ceiling.nbytes / MIB:.1f}", "", "", f"{ceiling.gb_per_second:.2f}")
    console.print(table)
    for why in result.failed:
        typer.echo(f"kvferry: not measured: {why}", err=True)


def _plotted(result: BenchResult) -> str:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in result.rows:
        lines.setdefault(row.plane, []).append((float(row.tokens), row.p50_ms / 1e3))
    if not lines:
        raise ConfigError("--plot: no plane was measured")
    return svg_chart("Hand-over of one rank", "prompt tokens", "seconds", lines)
