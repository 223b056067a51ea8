"""100 P engines and 100 D engines in virtual time: hand-overs under faults and churn, and what became of them.

    python tests/simulation/run.py [--count N] [--seed S] [--processes N] [--json FILE]
    python tests/simulation/run.py --count N --seed S --processes 1       (the command that a failure prints)

Processes share the hand-overs; each has a fleet of its own and the seed ``S + n``. A seed, a count and a number of
engines always give the same run. Whatever is lost, left, late, reported twice or of other bytes ends a run.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".typing"))

import torch  # noqa: E402

from benchmarks.harness import report  # noqa: E402
from tests.simulation.fleet import Fleet  # noqa: E402
from tests.simulation.network import Violation  # noqa: E402

COLUMNS: Mapping[str, str] = {
    "outcomes": "requests of D",
    "failures": "loads of one rank that failed",
    "retries": "attempts of one rank that another attempt followed",
    "leases": "leases of one rank of P",
    "cases": "hand-overs",
    "faults": "faults",
}


def simulate(seed: int, count: int, engines: int, shown: bool = False) -> dict[str, Any]:
    """One fleet, to its end: its counts, or the violation. ``shown``: print how far it is, every ten seconds."""
    torch.set_num_threads(1)
    began, last = time.process_time(), time.monotonic()
    fleet = Fleet(seed, count, engines, engines)

    def progress(fleet: Fleet) -> None:
        nonlocal last
        if shown and time.monotonic() > last + 10:
            last = time.monotonic()
            cost = (time.process_time() - began) / max(1, fleet.begun)
            print(f"seed {seed}: {fleet.begun} of {count}, {cost * 1e3:.2f} ms each", file=sys.stderr, flush=True)

    violation = ""
    try:
        fleet.run(progress)
    except Violation as error:
        violation = str(error)
    figures = fleet.world.figures()
    released = sum(figures["counts"].get("num_released_leases", {}).values())
    return {
        "seed": seed,
        "violation": violation,
        "handovers": fleet.begun,
        "cpu_seconds": time.process_time() - began,
        "virtual_seconds": fleet.timeline.now,
        "packets": fleet.network.packets,
        "digest": fleet.digest,
        "outcomes": dict(fleet.world.outcomes),
        "failures": figures["counts"].get("num_failed_handovers", {}),
        "retries": figures["counts"].get("num_retries", {}),
        "leases": {"released": released} | figures["counts"].get("num_expired_leases", {}),
        "cases": dict(fleet.network.counts),
        "faults": dict(fleet.network.faults),
    }


def _simulate(job: tuple[int, int, int]) -> dict[str, Any]:
    gc.set_threshold(200_000, 50, 1000)  # of this process: each search for garbage looks at the whole fleet
    return simulate(*job, shown=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000, help="hand-overs of all processes together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--engines", type=int, default=100, help="of P, and of D, in each process")
    parser.add_argument("--json", type=Path, help="write the counts and versions to this file")
    options = parser.parse_args()
    share = options.count // options.processes
    print(f"seed {options.seed}: {options.processes} x {share} hand-overs, {options.engines} P x {options.engines} D")
    jobs = [(options.seed + n, share, options.engines) for n in range(options.processes)]
    began = time.monotonic()
    if len(jobs) == 1:
        results = [_simulate(jobs[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            results = pool.map(_simulate, jobs, chunksize=1)
    numbers = ("handovers", "cpu_seconds", "virtual_seconds", "packets")
    together: dict[str, Any] = {name: sum(result[name] for result in results) for name in numbers}
    together |= {name: dict(sum((Counter(r[name]) for r in results), Counter()).most_common()) for name in COLUMNS}
    for name, title in COLUMNS.items():
        print(f"{title}:", *(f"  {count:>10,}  {what}" for what, count in together[name].items()), sep="\n")
    seconds = time.monotonic() - began
    cost = together["cpu_seconds"] / max(1, together["handovers"]) * 1e3
    print(
        f"{together['handovers']:,} hand-overs, {together['packets']:,} packets, {together['virtual_seconds']:.0f} s of"
        f" virtual time, in {seconds:.0f} s; {cost:.2f} ms of CPU time for each"
    )
    failed = [result for result in results if result["violation"]]
    for result in failed:
        print(f"\nFAILED: {result['violation']}")
        command = f"python tests/simulation/run.py --seed {result['seed']} --count {share} --processes 1"
        print(f"repeat: {command} --engines {options.engines}")
    if options.json:
        document = {
            "figures": {"seconds": round(seconds, 1), "cpu_ms_per_handover": round(cost, 3), "violations": len(failed)},
            **{name: value for name, value in together.items() if name != "cpu_seconds"},
            "digests": [result["digest"] for result in results],
            "arguments": {"count": options.count, "seed": options.seed, "processes": options.processes,
                          "engines": options.engines},
            "versions": report.versions(),
        }  # fmt: skip
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
