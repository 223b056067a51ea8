"""Engines of P and D that hand over for a long time, under aborts, kills, restarts, stops and a stranger's garbage.

    python tests/soak/run.py [--seconds 900] [--seed S] [--planes cma shm tcp zmq] [--json FILE] [--plot FILE]

For each plane one P and one D live for the whole run. Beside them, one P and one D of one plane after the other are
killed and started again on the same port. Hand-overs go over the planes in turn. The run fails where a load is reported
with other bytes, twice or not at all, where a block is missing at the end, or where a process grows (``flatness.py``).
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".typing"))

from benchmarks.harness import report  # noqa: E402
from tests.soak import flatness, result  # noqa: E402
from tests.soak.driver import PLANES, Soak  # noqa: E402


def outcomes(soak: Soak) -> str:
    names = sorted({name for counts in soak.by_plane.values() for name in counts})
    lines = [f"{'hand-overs that ended':<24}" + "".join(f"{plane:>9}" for plane in soak.planes)]
    lines += [f"  {name:<22}" + "".join(f"{soak.by_plane[p][name]:>9}" for p in soak.planes) for name in names]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--planes", nargs="+", default=PLANES, choices=PLANES)
    parser.add_argument("--leak", default="", choices=("", "descriptor", "memory", "lease"), help="plant a fault")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--plot", type=Path, help="write a plot to this PNG; needs matplotlib")
    options = parser.parse_args()
    print(f"soak: seed {options.seed}, {options.seconds:g} s over {', '.join(options.planes)}", flush=True)
    soak = Soak(options.seconds, options.seed, options.planes, options.leak)
    soak.run()
    print(outcomes(soak))
    print(flatness.table(result.verdicts(soak)))
    for name, value in result.figures(soak).items():
        print(f"{name:<28} {value:g}")
    failures = result.failures(soak)
    for failure in failures:
        print(f"FAILED: {failure}")
    if options.plot:
        from tests.soak.plot import plot

        plot(soak.samples, soak.lasted, options.plot)
    arguments = {"seconds": options.seconds, "seed": options.seed, "planes": list(options.planes)}
    report.write(options.json, result.document(soak) | {"arguments": arguments})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
