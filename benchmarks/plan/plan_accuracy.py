"""What ``kvferry plan`` predicts beside what hand-overs take, on this host: planes, geometries, 1 to 16 at once.

    python benchmarks/plan/plan_accuracy.py [--rounds 15] [--planes cma shm tcp] [--json FILE]

P's ranks and D's rank are processes with real caches, without a model. The costs of a plane are fitted to one half of
its cases; the other half is predicted. Each case comes once in every round, so noise of the host meets all of them.
Time is taken on D, from the request to the report.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.harness import report
from benchmarks.plan import plan_fit
from benchmarks.plan.plan_fit import Measured
from kvferry.cli.plan.handover import Deployment, Pair, PlannedRead, plan_handover
from kvferry.cli.plan.model import uniform_shape
from kvferry.cli.plan.time_model import PlaneCosts, finish_seconds, work_of
from kvferry.connector.config import Settings
from tests.support.pair import RemoteRank, remote_peer
from tests.support.ranks import Rank, load_plan

LAYERS, HEADS, CONTENT = 16, 8, 64
SHAPE = uniform_shape(LAYERS, HEADS, HEADS, 4 * CONTENT, "int32")
"""16 layers x 8 KV heads x 256 bytes: 32 KiB for each token."""
CACHE_TOKENS = 8192
TOKENS, AT_ONCE = (64, 512, 2048), (1, 4, 16)
GEOMETRIES = {
    "equal": (Deployment(), Deployment()),
    "another layout": (Deployment(), Deployment(layout="HND")),
    "blocks of 16 to 32": (Deployment(layout="HND"), Deployment(block_size=32, layout="HND")),
    "TP 2 to 1": (Deployment(tp_size=2, layout="HND"), Deployment(layout="HND")),
}


class Case(NamedTuple):
    geometry: str
    tokens: int
    at_once: int


CASES = [Case(*case) for case in product(GEOMETRIES, TOKENS, AT_ONCE) if case[1] * case[2] <= CACHE_TOKENS]


class Ranks:
    """P's ranks and D's rank of one geometry over one plane."""

    def __init__(self, plane: str, geometry: str) -> None:
        p, d = GEOMETRIES[geometry]
        self.p = [
            RemoteRank(settings={"plane": plane}, tp_rank=rank, tp_size=p.tp_size, **self._form(p))
            for rank in range(p.tp_size)
        ]
        self.d = Rank(settings=Settings(plane=plane), engine_id=f"engine-d {geometry}", **self._form(d))
        self.blocks = p.block_size, d.block_size
        self.rng = np.random.default_rng(0)
        self.count = 0

    @staticmethod
    def _form(deployment: Deployment) -> dict[str, Any]:
        return {
            "layers": LAYERS, "total_heads": HEADS, "content": CONTENT, "layout": deployment.layout,
            "block_size": deployment.block_size, "blocks": CACHE_TOKENS // deployment.block_size,
        }  # fmt: skip

    def seconds(self, case: Case) -> list[float]:
        """Seconds of each of the hand-overs of a case, in the order in which they ended."""
        theirs, ours = (
            self.rng.permutation(CACHE_TOKENS // size)[: case.at_once * case.tokens // size].reshape(case.at_once, -1)
            for size in self.blocks
        )
        plans = {}
        for n in range(case.at_once):
            self.count += 1
            name = f"r{self.count}"
            token = self.p[0].grant(name, theirs[n].tolist(), case.tokens)
            for rank in self.p[1:]:
                rank.grant(name, theirs[n].tolist(), case.tokens, token)
            plans[name] = load_plan(name, token, remote_peer(self.p), ours[n].tolist(), 0, case.tokens)
        time.sleep(0.002)  # P's step that grants has ended
        took: dict[str, float] = {}
        begun = time.perf_counter()
        for plan in plans.values():
            self.d.worker.post(plan)
        while len(took) < case.at_once:
            self.d.poll()
            now = time.perf_counter() - begun
            took |= {name: now for name in plans.keys() & self.d.received - took.keys()}
            time.sleep(5e-5)
        if self.d.failed:
            raise SystemExit(f"{case}: {len(self.d.failed)} hand-overs failed")
        return list(took.values())

    def close(self) -> None:
        for rank in self.p:
            rank.close()
        self.d.close()


def measure(plane: str, rounds: int) -> dict[Case, list[list[float]]]:
    """By case, the seconds of its hand-overs in each round after the first."""
    found: dict[Case, list[list[float]]] = defaultdict(list)
    ranks = {}
    try:
        for geometry in GEOMETRIES:
            ranks[geometry] = Ranks(plane, geometry)
        gc.collect()
        gc.freeze()  # as vLLM does: a full collection takes 200 ms
        for number in range(rounds + 1):
            print(f"{plane}: round {number} of {rounds}", file=sys.stderr, flush=True)
            for case in CASES:
                seconds = ranks[case.geometry].seconds(case)
                if number:
                    found[case].append(seconds)
    finally:
        for each in ranks.values():
            each.close()
    return found


def planned(plane: str, case: Case) -> Sequence[PlannedRead]:
    p, d = GEOMETRIES[case.geometry]
    return plan_handover(Pair(SHAPE, p, d, plan_fit.slot_bytes(plane, "cpu")), case.tokens)


def predicted(plane: str, case: Case, costs: PlaneCosts) -> tuple[float, float]:
    """Median and 95th percentile of the seconds of a case."""
    work = work_of(planned(plane, case), costs)
    ends = [finish_seconds(work, costs, n, case.at_once) for n in range(1, case.at_once + 1)]
    return statistics.median(ends), float(np.percentile(ends, 95)) * (1 + (costs.p95_ratio - 1) / case.at_once**0.5)


def repeat(rounds: list[list[float]]) -> dict[str, float]:
    """How far the percentiles of every second round are from those of the others."""
    halves = np.percentile(rounds[::2], [50, 95]), np.percentile(rounds[1::2], [50, 95])
    return dict(zip(("repeat_p50", "repeat_p95"), np.abs(halves[0] / halves[1] - 1).tolist(), strict=True))


def row_of(plane: str, case: Case, rounds: list[list[float]]) -> Measured:
    flat = [seconds for one in rounds for seconds in one]
    p50, p95 = np.percentile(flat, [50, 95]).tolist()
    name = f"{case.geometry}, {case.tokens} tokens"
    return Measured(name, planned(plane, case), case.at_once, (case.at_once + 1) / 2, p50, p95)


def run(planes: Sequence[str], rounds: int) -> dict[str, Any]:
    """What ``--json`` writes."""
    rows: list[dict[str, Any]] = []
    for plane in planes:
        by_round = measure(plane, rounds)
        measured = {case: row_of(plane, case, seconds) for case, seconds in by_round.items()}
        half = {case for place, case in enumerate(CASES) if place % 2 == 0}
        costs = plan_fit.fitted([measured[case] for case in CASES if case in half], plan_fit.turn_bytes(plane))
        for case, row in measured.items():
            p50, p95 = predicted(plane, case, costs)
            rows.append(
                {"plane": f"{plane}/host", "geometry": case.geometry, "tokens": case.tokens, "at_once": case.at_once,
                 "fitted": case in half, "measured_p50_ms": row.p50 * 1e3, "measured_p95_ms": row.p95 * 1e3,
                 "predicted_p50_ms": p50 * 1e3, "predicted_p95_ms": p95 * 1e3, **repeat(by_round[case])}
            )  # fmt: skip
    for plane in plan_fit.GPU_PLANES:
        rows += on_gpus(plane)
    return {"ratios": {}, "figures": figures(rows), "rows": rows}


def on_gpus(plane: str) -> list[dict[str, Any]]:
    """The rows of ``gpu_planes.json``, which have no p95: every second one is predicted from the others."""
    measured = plan_fit.on_gpus(plane)
    costs = plan_fit.fitted(measured[::2], plan_fit.turn_bytes(plane))
    return [
        {"plane": f"{plane}/gpu", "geometry": row.name, "at_once": row.at_once, "fitted": place % 2 == 0,
         "measured_p50_ms": row.p50 * 1e3,
         "predicted_p50_ms": finish_seconds(work_of(row.reads, costs), costs, row.at_once, row.at_once) * 1e3}
        for place, row in enumerate(measured)
    ]  # fmt: skip


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the cases that were predicted: the share within the bounds, and the median and largest error; and the share of
    which one half of the rounds is within these bounds of the other half."""
    found: dict[str, float] = {}
    for plane in sorted({row["plane"] for row in rows}):
        mine = [row for row in rows if row["plane"] == plane and not row["fitted"]]
        for name, bound in (("p50", 0.10), ("p95", 0.20)):
            if f"measured_{name}_ms" not in mine[0]:
                continue
            of, within = f"{plane}_{name}", f"within_{round(100 * bound)}_percent"
            errors = [abs(row[f"predicted_{name}_ms"] / row[f"measured_{name}_ms"] - 1) for row in mine]
            found[f"{of}_{within}"] = statistics.mean(error <= bound for error in errors)
            if f"repeat_{name}" in mine[0]:
                found[f"{of}_repeats_{within}"] = statistics.mean(row[f"repeat_{name}"] <= bound for row in mine)
            found[f"{of}_median_error"], found[f"{of}_largest_error"] = statistics.median(errors), max(errors)
    return found


def main() -> None:
    parser = report.options(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--planes", nargs="+", default=["cma", "shm", "tcp"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = run(args.planes, args.rounds)
    for row in [row for row in result["rows"] if not row["fitted"]]:
        report.line(row)
    for name, value in result["figures"].items():
        print(f"{name:36}{value:8.3f}")
    report.write(args.json, result)


if __name__ == "__main__":
    main()
