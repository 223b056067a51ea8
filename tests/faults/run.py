"""Seeded faults between real P and D processes, until the time is over or one case breaks a promise.

    python tests/faults/run.py [--seconds 600] [--seed S] [--count N] [--pair NAME]
    make faults SECONDS_TO_RUN=600 SEED=...

Each seed is one case, which every pair runs. ``--seed S --count 1 --pair NAME`` repeats a case that failed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.harness import report
from tests.faults.pair import FaultyPair, draw
from tests.support.pair import Broken, run_parser

PAIRS: dict[str, dict[str, Any]] = {
    "tcp": {"plane": "tcp"},
    "zmq": {"plane": "zmq"},
    "encrypt": {"plane": "tcp", "encrypt": True},
    "shm": {"plane": "shm"},
    "ucx": {"plane": "ucx"},
}
"""Settings of P and D."""
DAMAGED = ("tcp", "zmq", "encrypt")
"""The pairs whose data port the proxy stands before. Of the others it damages the control port only."""


def main() -> int:
    parser = run_parser(__doc__, seconds=600.0)
    parser.add_argument("--pair", choices=PAIRS, action="append", help="all, if none is named")
    args = parser.parse_args()
    pairs = {name: FaultyPair(PAIRS[name]) for name in args.pair or PAIRS}
    end, number, failed = time.monotonic() + args.seconds, 0, 0
    try:
        while number < args.count if args.count else time.monotonic() < end or not number:
            for name, pair in pairs.items():
                case, begun = draw(args.seed + number, data=name in DAMAGED), time.monotonic()
                pair.strike(case)
                print(f"{name}: {case}: {time.monotonic() - begun:.1f} s", flush=True)
            number += 1
    except Broken as error:
        failed = 1
        print(f"{error}\nrepeat it: python tests/faults/run.py --seed {args.seed + number} --count 1 --pair {name}")
    finally:
        for name, pair in pairs.items():
            print(f"{name}: {dict(pair.outcomes)}", flush=True)
            pair.close()
    report.write(args.json, {"seed": args.seed, "rows": [{"pair": n, **pair.outcomes} for n, pair in pairs.items()]})
    return failed


if __name__ == "__main__":
    sys.exit(main())
