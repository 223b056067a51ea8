"""Pairings at random, any form to any form.

    python tests/ranks/sweep.py [--count N] [--seed S]
    python tests/ranks/sweep.py --pairing NAME
    python tests/ranks/sweep.py --matrix          those of docs/compatibility.md, and writes how they ended

A seed always gives the same pairings. A failure is printed with the command that repeats that pairing alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from tests.ranks.compare import check
from tests.ranks.matrix import GPU_PLANES, PLANES, cells, save
from tests.ranks.pairing import Pairing, draw, parse
from tests.ranks.rank_host import RankProcesses


def drawn(seed: int, count: int, planes: tuple[str, ...]) -> list[Pairing]:
    """The pairings of a seed; the n-th does not depend on how many there are."""
    return [draw(random.Random(f"{seed} {n}"), planes) for n in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--pairing", help="this one only, by its name")
    parser.add_argument("--matrix", action="store_true", help="the pairings of docs/compatibility.md")
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs the caches lie on; 0: in host memory")
    options = parser.parse_args()
    planes: tuple[str, ...] = GPU_PLANES if options.gpus else PLANES
    if find_spec("ucxx"):
        planes = (*planes, "ucx")
    if options.pairing:
        pairings = [parse(options.pairing)]
    elif options.matrix:
        pairings = [cell.pairing for cell in cells()]
    else:
        pairings = drawn(options.seed, options.count, planes)
        print(f"seed {options.seed}: {options.count} pairings over {', '.join(planes)}", flush=True)
    processes, failed, begun = RankProcesses(options.gpus), 0, time.monotonic()
    outcomes = dict.fromkeys(map(str, pairings), "passed")
    try:
        for number, pairing in enumerate(pairings, 1):
            try:
                check(processes, pairing)
            except (AssertionError, RuntimeError) as error:
                failed += 1
                outcomes[str(pairing)] = "failed"
                print(f"FAILED {error}", flush=True)
            if number % 50 == 0 or number == len(pairings):
                print(f"{number} of {len(pairings)}, {failed} failed, {time.monotonic() - begun:.0f} s", flush=True)
        if options.matrix:
            save(outcomes)
    finally:
        processes.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
