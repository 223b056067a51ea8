"""What a hand-over costs that moves next to nothing: one token, between two processes, handshake done before.

    python benchmarks/planes/empty_handover.py [--rounds 300] [--json FILE]

Time is taken on D from the request to its report, in milliseconds. Beside it the processor time that an idle transfer
thread uses, as a share of one core. ``nixl`` goes over TCP here, unless ``UCX_TLS`` names other lanes.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.harness import report
from kvferry.connector.config import Settings
from tests.support.pair import RemoteRank, remote_peer
from tests.support.ranks import Rank, load_plan

PLANES = ("cma", "shm", "tcp", "ucx", "zmq", "nixl")
SHAPE: dict[str, Any] = {"layers": 32, "total_heads": 8, "blocks": 64, "block_size": 32, "content": 64}
"""32 layers x 8 KV heads x 32 tokens x 256 bytes."""


def measure(plane: str, rounds: int, idle_seconds: float = 3.0) -> dict[str, Any]:
    """Median and p99 milliseconds, the first hand-over's, and the idle share of a core on D and on P."""
    torch.set_num_threads(1)
    p = RemoteRank(settings={"plane": plane}, **SHAPE)
    d = Rank(settings=Settings(plane=plane), engine_id="engine-d", **SHAPE)
    try:
        times = []
        for number in range(rounds + 1):
            name = f"r{number}"
            token = p.grant(name, [number % 64], 1)
            begun = time.perf_counter()
            d.worker.post(load_plan(name, token, remote_peer([p]), [63 - number % 64], 0, 1))
            while name not in d.received:
                d.poll()
                time.sleep(5e-5)
            times.append((time.perf_counter() - begun) * 1e3)
        if d.failed:
            raise RuntimeError(f"{len(d.failed)} of {rounds + 1} hand-overs failed")
        time.sleep(0.5)
        own, theirs, begun = time.process_time(), p.cpu_seconds(), time.perf_counter()
        time.sleep(idle_seconds)
        seconds = time.perf_counter() - begun
        idle = {"d": (time.process_time() - own) / seconds, "p": (p.cpu_seconds() - theirs) / seconds}
    finally:
        p.close()
        d.close()
    first, rest = times[0], sorted(times[1:])
    return {
        "plane": plane, "ms_p50": round(statistics.median(rest), 3),
        "ms_p99": round(rest[int(0.99 * (len(rest) - 1))], 3), "ms_first": round(first, 3),
        "idle_percent_d": round(100 * idle["d"], 3), "idle_percent_p": round(100 * idle["p"], 3),
    }  # fmt: skip


def main() -> None:
    parser = report.options(__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    rows = []
    for plane in PLANES:
        rows.append(measure(plane, args.rounds))
        report.line(rows[-1])
    report.write(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
