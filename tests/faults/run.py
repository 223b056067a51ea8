"""Seeded faults between real P and D processes, until the time is over or one case breaks a promise.

    python tests/faults/run.py [--seconds 600] [--seed S] [--count N] [--pair NAME]
    make faults SECONDS_TO_RUN=600 SEED=...

Each seed is one case, which every pair runs. ``--seed S --count 1 --pair NAME`` repeats a case that failed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from tests.faults.cases import draw
from tests.faults.pair import Broken, FaultyPair

PAIRS: dict[str, dict[str, Any]] = {
    "tcp": {"plane": "tcp"},
    "zmq": {"plane": "zmq"},
    "checksum": {"plane": "tcp", "checksum": True},
    "encrypt": {"plane": "tcp", "encrypt": True},
    "shm": {"plane": "shm"},
    "ucx": {"plane": "ucx"},
}
"""Settings of P and D."""
DAMAGED = ("tcp", "zmq", "checksum", "encrypt")
"""The pairs whose data port the proxy stands before. Of the others it damages the control port only."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, help="of the first case; each further case adds one")
    parser.add_argument("--count", type=int, help="cases, instead of a time")
    parser.add_argument("--pair", choices=PAIRS, action="append", help="all, if none is named")
    args = parser.parse_args()
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    pairs = {name: FaultyPair(PAIRS[name]) for name in args.pair or PAIRS}
    end, number = time.monotonic() + args.seconds, 0
    try:
        while number < args.count if args.count else time.monotonic() < end or not number:
            for name, pair in pairs.items():
                case, begun = draw(seed + number, data=name in DAMAGED), time.monotonic()
                pair.strike(case)
                print(f"{name}: {case}: {time.monotonic() - begun:.1f} s", flush=True)
            number += 1
    except Broken as error:
        print(f"{error}\nrepeat it: python tests/faults/run.py --seed {seed + number} --count 1 --pair {name}")
        return 1
    finally:
        for name, pair in pairs.items():
            print(f"{name}: {dict(pair.outcomes)}", flush=True)
            pair.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
