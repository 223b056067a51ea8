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

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.harness import report
from tests.support.fork_server import Program, fork_server

RANK = str(Path(__file__).with_name("stale_reads_rank.py"))
LEASE_SECONDS = 0.05
AT_ONCE, BLOCKS = 3, 7
SLOWEST_SECONDS = 3 * LEASE_SECONDS
STOPPED_SECONDS = 1.6 * LEASE_SECONDS
FENCES = ("posted grant", "commit", "off")
PATIENCE_SECONDS = 120.0


class RankProcess:
    """One process of the races. Its answers, each with the name of the role, come to ``answers``."""

    def __init__(self, role: str, options: dict[str, Any], answers: SimpleQueue[tuple[str, dict[str, Any]]]) -> None:
        self.program: Program = fork_server().start(RANK, role, json.dumps(options), text=True)
        self.hello = json.loads(self.program.stdout.readline())
        self._role, self._answers = role, answers
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.program.stdout:
            self._answers.put((self._role, json.loads(line)))

    def order(self, **order: Any) -> None:
        """Send one order."""
        self.program.stdin.write(json.dumps(order) + "\n")
        self.program.stdin.flush()


def race(fence: str, count: int, seed: int, device: str) -> dict[str, Any]:
    """``count`` races under one fence.

    Raises:
        TimeoutError: a load was not reported, or a lease did not end.
    """
    rng, answers = random.Random(seed), SimpleQueue[tuple[str, dict[str, Any]]]()
    options = {"fence": fence, "lease_seconds": LEASE_SECONDS, "device": device}
    options["plane"] = "cma" if device == "cpu" else "cuda_ipc"
    p = RankProcess("p", options, answers)
    d = RankProcess("d", options | {"engine": p.hello["engine"]}, answers)
    ended: dict[int, dict[str, Any]] = {}
    reused: dict[int, dict[str, float]] = {}
    places, asked, stops = list(range(AT_ONCE)), 0, 0
    place_of: dict[int, int] = {}
    try:
        while len(ended) < count or len(reused) < count:
            while places and asked < count:
                place_of[asked] = places.pop()
                p.order(race=asked)
                asked += 1
            try:
                role, answer = answers.get(timeout=PATIENCE_SECONDS)
            except Empty:
                raise TimeoutError(f"{len(ended)} loads reported, {len(reused)} leases ended, of {count}") from None
            if "granted" in answer:
                number = answer["granted"]
                slow = rng.choice((0.0, rng.uniform(0.0, SLOWEST_SECONDS)))
                first = 8 * place_of[number]
                d.order(race=number, token=answer["token"], slow=slow, blocks=list(range(first, first + BLOCKS)))
                if rng.random() < 0.1:
                    stops += 1
                    time.sleep(rng.uniform(0.0, LEASE_SECONDS / 2))
                    d.program.send_signal(signal.SIGSTOP)
                    time.sleep(STOPPED_SECONDS)
                    d.program.send_signal(signal.SIGCONT)
            elif role == "p":
                reused[answer["reused"]] = answer
            else:
                ended[answer["race"]] = answer
                places.append(place_of[answer["race"]])
    finally:
        for process in (p, d):
            process.program.close()
    return {"fence": fence, "plane": options["plane"], "races": count, "stops": stops, **judged(ended, reused)}


def judged(ended: dict[int, dict[str, Any]], reused: dict[int, dict[str, float]]) -> dict[str, int]:
    """What became of the races. ``overlapped``: P overwrote the blocks between the beginning of D's copy and its end.
    ``stale``: the load was reported as done, and its bytes were not P's."""
    counts = Counter(dict.fromkeys(("done", "failed", "overlapped", "stale"), 0))
    for number, end in ended.items():
        counts["done" if end["done"] else "failed"] += 1
        counts["stale"] += end["done"] and not end["right"]
        if end["read"] is not None:
            begun, over = end["read"]
            counts["overlapped"] += reused[number]["begun"] < over and reused[number]["ended"] > begun
    return dict(counts)


def check(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the result of all races; empty where nothing is."""
    wrong = [f"{row['stale']} stale loads with the fence {row['fence']}" for row in rows if row["stale"]]
    wrong = [line for line in wrong if not line.endswith("off")]
    for row in rows:
        if 20 * row["overlapped"] < row["races"]:
            wrong.append(f"with the fence {row['fence']} only {row['overlapped']} of {row['races']} races overlapped")
        if row["fence"] == "off" and not row["stale"]:
            wrong.append("without a fence no load was stale: the races show nothing")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="races of each row")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--fence", choices=FENCES, action="append", help="all, if none is named")
    parser.add_argument("--json", type=Path)
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
