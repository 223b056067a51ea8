"""Races between a slow reader and the reuse of the blocks that it reads: whether a stale read is ever taken for good.

    python tests/faults/stale_reads.py [--count 1000] [--seed 1] [--device cpu|cuda] [--json FILE]

P and D are processes with real ranks and no model. D reads P's memory by itself: over ``cma``, or over ``cuda_ipc``
with ``--device cuda``, where one GPU is enough for both. P has 24 blocks and leases of 50 ms, and overwrites the blocks
of a lease in the moment in which it ends. Reads take up to three leases, and at times D's process is stopped (SIGSTOP)
for longer than a lease. D compares the bytes of each load that is reported as done.

Three rows: with the fence of posted grants, with the fence of the commit, and with no fence. The last row is the
planted fault: it must have stale loads, or the race shows nothing.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.harness import report
from tests.support.pair import run_parser
from tests.support.remote import Remote

LEASE_SECONDS = 0.05
AT_ONCE, BLOCKS = 3, 7
SLOWEST_SECONDS = 3 * LEASE_SECONDS
STOPPED_SECONDS = 1.6 * LEASE_SECONDS
FENCES = ("posted grant", "commit", "off")
PATIENCE_SECONDS = 120.0


def race(fence: str, count: int, seed: int, device: str) -> dict[str, Any]:
    """``count`` races under one fence.

    Raises:
        TimeoutError: a load was not reported, or a lease did not end.
    """
    rng, plane = random.Random(seed), "cma" if device == "cpu" else "cuda_ipc"
    options = {"fence": fence, "lease_seconds": LEASE_SECONDS, "device": device, "plane": plane}
    p, d = (Remote(f"tests.faults.stale_reads_rank:{kind}", **options) for kind in ("Producer", "Decoder"))
    p.answer(), d.answer()
    engine = p.call("where")
    ended: dict[int, dict[str, Any]] = {}
    reused: dict[int, dict[str, float]] = {}
    places, asked, stops = list(range(AT_ONCE)), 0, 0
    place_of: dict[int, int] = {}
    try:
        while len(ended) < count or len(reused) < count:
            while places and asked < count:
                place_of[asked] = places.pop()
                p.order("grant", race=asked)
                asked += 1
            if not wait([p.connection, d.connection], PATIENCE_SECONDS):
                raise TimeoutError(f"{len(ended)} loads reported, {len(reused)} leases ended, of {count}")
            for event in [*p.events(), *d.events()]:
                number = event["race"]
                if "token" in event:
                    slow, first = rng.choice((0.0, rng.uniform(0.0, SLOWEST_SECONDS))), 8 * place_of[number]
                    blocks = list(range(first, first + BLOCKS))
                    d.order("load", race=number, token=event["token"], slow=slow, blocks=blocks, engine=engine)
                    if rng.random() < 0.1:
                        stops += 1
                        time.sleep(rng.uniform(0.0, LEASE_SECONDS / 2))
                        d.process.send_signal(signal.SIGSTOP)
                        time.sleep(STOPPED_SECONDS)
                        d.process.send_signal(signal.SIGCONT)
                elif "begun" in event:
                    reused[number] = event
                else:
                    ended[number] = event
                    places.append(place_of[number])
    finally:
        for process in (p, d):
            process.close()
    counts = Counter(dict.fromkeys(("done", "failed", "overlapped", "stale"), 0))
    for number, end in ended.items():
        counts["done" if end["done"] else "failed"] += 1
        counts["stale"] += end["done"] and not end["right"]
        if end["read"] is not None:  # P overwrote the blocks between the beginning of D's copy and its end
            begun, over = end["read"]
            counts["overlapped"] += reused[number]["begun"] < over and reused[number]["ended"] > begun
    return {"fence": fence, "plane": plane, "races": count, "stops": stops, **counts}


def check(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the result of all races; empty where nothing is."""
    wrong = []
    for row in rows:
        fence = row["fence"]
        if row["stale"] and fence != "off":
            wrong.append(f"{row['stale']} stale loads with the fence {fence}")
        if 20 * row["overlapped"] < row["races"]:
            wrong.append(f"with the fence {fence} only {row['overlapped']} of {row['races']} races overlapped")
        if fence == "off" and not row["stale"]:
            wrong.append("without a fence no load was stale: the races show nothing")
    return wrong


def main() -> int:
    parser = run_parser(__doc__, count=1000)
    parser.set_defaults(seed=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--fence", choices=FENCES, action="append", help="all, if none is named")
    args = parser.parse_args()
    rows = []
    for fence in args.fence or FENCES:
        rows.append(race(fence, args.count, args.seed, args.device))
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    wrong = check(rows)
    print("\n".join(wrong) or "no stale read was taken for good, and without the fence some were")
    settings = {"blocks": 24, "lease_seconds": LEASE_SECONDS, "slowest_seconds": SLOWEST_SECONDS, "seed": args.seed}
    report.write(args.json, {"settings": settings, "rows": rows})
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
