"""Engines of P and D that hand over for a long time, under aborts, kills, restarts and stops.

    python tests/soak/run.py [--seconds 900] [--seed S] [--planes cma shm tcp zmq] [--json FILE]

For each plane one P and one D live for the whole run. Beside them, one P and one D of one plane after the other are
killed and started again on the same port. Hand-overs go over the planes in turn. The run fails where a load is reported
with other bytes, twice or not at all, where a block is missing at the end, or where a process grows (``driver.py``).
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".typing"))

from benchmarks.harness import report  # noqa: E402
from tests.soak.driver import PLANES, Soak  # noqa: E402
from tests.support.pair import run_parser  # noqa: E402


def document(soak: Soak) -> dict[str, Any]:
    figures: dict[str, float] = {
        "seconds": soak.lasted,
        "handovers": sum(sum(counts.values()) for counts in soak.by_plane.values()),
        "loaded": sum(counts["loaded"] for counts in soak.by_plane.values()),
        "restarts": soak.restarts,
        "longest_turn_ms": max((s["turn_ms"] for part in soak.samples.values() for s in part), default=0.0),
    }
    faults = [name for name in sorted(soak.counts) if name.startswith(("restart", "stop"))]
    return {
        "figures": {name: round(value, 4) for name, value in figures.items()} | {"failures": len(soak.failures())},
        "outcomes": {plane: dict(counts.most_common()) for plane, counts in soak.by_plane.items()},
        "faults": {name: soak.counts[name] for name in faults},
        "rows": [asdict(verdict) | {"growth": verdict.growth} for verdict in soak.verdicts()],
    }


def main() -> int:
    parser = run_parser(__doc__, seconds=900.0)
    parser.add_argument("--planes", nargs="+", default=PLANES, choices=PLANES)
    parser.add_argument("--leak", default="", choices=("", "descriptor", "memory", "lease"), help="plant a fault")
    options = parser.parse_args()
    print(f"soak: seed {options.seed}, {options.seconds:g} s over {', '.join(options.planes)}", flush=True)
    soak = Soak(options.seconds, options.seed, options.planes, options.leak)
    soak.run()
    found = document(soak)
    for plane, outcomes in found["outcomes"].items():
        print(f"{plane}: {', '.join(f'{count} {name}' for name, count in outcomes.items())}")
    for verdict in soak.verdicts():
        print(verdict)
    for name, value in found["figures"].items():
        print(f"{name:<28} {value:g}")
    for failure in soak.failures():
        print(f"FAILED: {failure}")
    arguments = {"seconds": options.seconds, "seed": options.seed, "planes": list(options.planes)}
    report.write(options.json, found | {"arguments": arguments})
    return 1 if soak.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
