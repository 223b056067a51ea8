"""The costs of a data plane, fitted to measured hand-overs: the calibration of ``kvferry plan``.

    python benchmarks/plan/plan_fit.py

writes ``cli/plan/calibration.json``, the default calibration, from committed results: host memory from
``host_planes.json`` and ``empty_handover.json``, GPUs from ``gpu_planes.json``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.harness import pages
from benchmarks.planes.points import CORE, NIXL_PLANE
from kvferry.cli.plan.handover import Deployment, Pair, PlannedRead, plan_handover
from kvferry.cli.plan.model import uniform_shape
from kvferry.cli.plan.time_model import Calibration, PlaneCosts
from kvferry.transport.registry import best_slot_bytes, best_staging_bytes, plane_spec

PACKAGED = Path(__file__).resolve().parents[2] / "cli" / "plan" / "calibration.json"
DIGITS = 4
NO_SECONDS = 1e-12
"""A shorter time is what the rounding of numbers leaves of none: its digits depend on the processor."""
GPU_PLANES, HOST_PLANES = ("cuda_ipc", "ucx"), ("cma", "nixl", "shm", "tcp", "ucx", "zmq")
MOVED_BYTES = 64 << 20
"""Of each move in ``host_planes.json``, by its default."""


class Measured(NamedTuple):
    """Hand-overs of one form, each alone."""

    reads: Sequence[PlannedRead]
    p50: float
    p95: float  # The 99th percentile where that is what was measured


def fitted(rows: Sequence[Measured]) -> PlaneCosts:
    """The costs with the smallest squared relative errors, none below zero. All reads must end at one rank of D."""
    sizes = sorted({read.piece_bytes for row in rows for read in row.reads})
    matrix = np.zeros((len(rows), 2 + len(sizes)))
    for place, row in enumerate(rows):
        line = matrix[place]
        line[:2] = 1, sum(read.messages for read in row.reads)
        for read in row.reads:
            line[2 + sizes.index(read.piece_bytes)] += read.nbytes
        line /= row.p50
    costs = _least_squares(matrix, np.ones(len(rows)))
    fixed, message = (float(f"{cost:.{DIGITS}g}") if cost > NO_SECONDS else 0.0 for cost in costs[:2])
    rates = {size: float(f"{1 / cost:.{DIGITS}g}") for size, cost in zip(sizes, costs[2:], strict=True) if cost > 0}
    spread = statistics.median(row.p95 / row.p50 for row in rows)
    return PlaneCosts(fixed, message, rates, float(f"{max(1.0, spread):.{DIGITS}g}"))


def _least_squares(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least ``|matrix x - wanted|``, by descent in one coordinate after the other."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1
    unit = matrix / scale
    gram, target = unit.T @ unit, unit.T @ wanted
    x = np.zeros(matrix.shape[1])
    for _ in range(20_000):
        before = x.copy()
        for column in range(len(x)):
            if gram[column, column]:
                x[column] = max(0.0, x[column] + (target[column] - gram[column] @ x) / gram[column, column])
        if (x == before).all():
            break
    return x / scale


def slot_bytes(plane: str, device: str) -> int | None:
    """The most bytes of a message with the default settings; ``None`` where D reads P's pages."""
    if plane_spec(plane).load().pulls:
        return None
    where = torch.device(device)
    return best_slot_bytes(plane, where, best_staging_bytes(where))


def on_gpus(plane: str) -> list[Measured]:
    """The hand-overs of ``gpu_planes.json`` over a plane."""
    by_name = {point.name: point for point in CORE}
    rows = []
    for row in pages.load("gpu_planes")["rows"]:
        point = by_name.get(row["point"])
        if point is None or point.handovers > 1 or row["contender"] != plane:
            continue
        form = point.p
        shape = uniform_shape(form.layers, form.heads, form.heads, form.content, "bfloat16", form.kind)
        p, d = (Deployment(block_size=side.block, layout=side.order) for side in (point.p, point.d))
        reads = plan_handover(Pair(shape, p, d, slot_bytes(plane, "cuda")), point.tokens)
        rows.append(Measured(reads, row["ms_p50"] / 1e3, row["ms_p99"] / 1e3))
    return rows


def on_host(plane: str) -> list[Measured]:
    """The moves of ``host_planes.json`` over a plane, each of which took what ``empty_handover.json`` has beside it;
    of ``nixl`` those over TCP, which is what it has without RDMA hardware."""
    way = ("tcp", NIXL_PLANE) if plane == "nixl" else ("host", plane)
    (empty,) = (row for row in pages.load("empty_handover")["rows"] if row["plane"] == plane)
    rows = [_alone(0, 4096, [empty["ms_p50"] / 1e3], 0.0)]
    for row in pages.load("host_planes")["rows"]:
        if (row["link"], row["kind"]) == way:
            rows.append(_alone(MOVED_BYTES, row["block_kib"] << 10, row["seconds"], empty["ms_p50"] / 1e3))
    return rows


def _alone(nbytes: int, piece: int, seconds: Sequence[float], fixed: float) -> Measured:
    p50, p95 = np.percentile(seconds, [50, 95]).tolist()
    read = PlannedRead((0, 0), (0, 0), "full", 0, 0, 1, 0, 1, 1, 1, nbytes, piece)  # the rate has what messages cost
    return Measured([read], fixed + p50, fixed + p95)


def calibration() -> Calibration:
    """The default calibration."""
    host, gpu = (pages.load(name)["versions"] for name in ("host_planes", "gpu_planes"))
    planes = {f"{plane}/host": fitted(on_host(plane)) for plane in HOST_PLANES}
    planes |= {f"{plane}/gpu": fitted(on_gpus(plane)) for plane in GPU_PLANES}
    measured = {
        "host": f"benchmarks/results/host_planes.json and empty_handover.json: {host['cpus']} cores, {host['cpu']}; "
        "what messages cost is in the rates; nixl had TCP only",
        "gpu": f"benchmarks/results/gpu_planes.json: {gpu['gpus']}; p95_ratio is that of the p99",
    }
    return Calibration("kvferry-calibration-2", measured, planes)


def encoded(made: Calibration) -> bytes:
    return msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"


if __name__ == "__main__":
    PACKAGED.write_bytes(encoded(calibration()))
    print(PACKAGED)
