"""How long ``kvferry plan`` simulates a fleet: 12,031 requests over 100 P and 100 D engines, on one core.

    python benchmarks/plan_fleet.py [--trace FILE] [--engines 100] [--rounds 3] [--json FILE]

Without a trace, a synthetic one of as many requests as Mooncake's conversation trace has. The model is Llama-3.1-8B, P
has TP 2 and D has TP 1. The time to read the trace and the time to plan all hand-overs are in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

import report
import torch

from kvferry.cli.plan.fleet import EngineModel, Fleet
from kvferry.cli.plan.fleet_size import fleet_report
from kvferry.cli.plan.handover import Deployment, Pair
from kvferry.cli.plan.model import ModelShape
from kvferry.cli.plan.time_model import default_calibration, handover_of
from kvferry.cli.plan.trace import parsed_trace, synthetic_trace, trace_lines

REQUESTS, SECONDS = 12_031, 3537.0
"""Those of Mooncake's conversation trace."""
LLAMA = ModelShape(("full",) * 32, 32, 8, 512, "bfloat16")
ENGINES = EngineModel(20_000.0, 0.012, 0.0001, 600.0, 256, 400_000, 400_000)
LINK, SLOT = 12.5e9, 128 << 20


def measure(lines: list[bytes], engines: int) -> dict[str, Any]:
    """Seconds of one simulation, and what it found."""
    begun = time.perf_counter()
    trace = parsed_trace(lines)
    pair = Pair(LLAMA, Deployment(tp_size=2), Deployment(), SLOT)
    handover = handover_of(pair, default_calibration().costs("ucx/gpu"), LINK)
    records = Fleet(engines, engines, ENGINES, handover).run(trace)
    found = fleet_report(records, engines, engines, 95.0)
    return {
        "seconds": time.perf_counter() - begun, "requests": found.requests, "ttft_p50_s": found.ttft_p50,
        "ttft_p95_s": found.ttft, "tpot_p95_s": found.tpot, "reused_tokens": found.reused_tokens,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's form")
    parser.add_argument("--engines", type=int, default=100, help="P engines, and as many D engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    traces = {"synthetic": list(trace_lines(synthetic_trace(REQUESTS, SECONDS, 0)))}
    if args.trace is not None:
        traces[args.trace.name] = args.trace.read_bytes().splitlines()
    rows = []
    for name, lines in traces.items():
        rounds = [measure(lines, args.engines) for _ in range(args.rounds)]
        seconds = [one["seconds"] for one in rounds]
        rows.append(rounds[0] | {"trace": name, "seconds": statistics.median(seconds), "all_seconds": seconds})
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()))
    figures = {"plan_fleet_seconds": max(row["seconds"] for row in rows), "engines_of_each_side": args.engines}
    report.write(args.json, {"ratios": {}, "figures": figures, "rows": rows})


if __name__ == "__main__":
    main()
