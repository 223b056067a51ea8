"""What a hand-over costs that moves next to nothing: one token, between two processes, handshake done before.

    python benchmarks/planes/empty_handover.py [--rounds 300] [--computing] [--json FILE]

Time is taken on D from the request to its report, in milliseconds. Beside it the processor time that an idle transfer
thread uses, as a share of one core. ``nixl`` goes over TCP here, unless ``UCX_TLS`` names other lanes.
With ``--computing`` D's main thread computes in Python until the report is there, in every other turn, and gives the
interpreter up only when it is told to.
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


def measure(plane: str, rounds: int, idle_seconds: float = 3.0, *, computes: bool = False) -> dict[str, Any]:
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
                if not computes:
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
        "plane": plane, "d_computes": computes, "ms_p50": round(statistics.median(rest), 3),
        "ms_p99": round(rest[int(0.99 * (len(rest) - 1))], 3), "ms_first": round(first, 3),
        "idle_percent_d": round(100 * idle["d"], 3), "idle_percent_p": round(100 * idle["p"], 3),
    }  # fmt: skip


def main() -> None:
    parser = report.options(__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--turns", type=int, default=5, help="of --computing")
    parser.add_argument("--computing", action="store_true", help="D waits, and D computes, in turn, over cma")
    args = parser.parse_args()
    cases = [(plane, False) for plane in PLANES]
    if args.computing:
        cases = [(PLANES[0], False), (PLANES[0], True)] * args.turns
    rows = []
    for plane, computes in cases:
        rows.append(measure(plane, args.rounds, 0.1 if args.computing else 3.0, computes=computes))
        report.line(rows[-1])
    figures = {}
    if args.computing:
        for name, of in (("d_waits", rows[::2]), ("d_computes", rows[1::2])):
            figures[f"{name}_ms_p50"] = statistics.median(row["ms_p50"] for row in of)
    else:
        figures = {f"empty_handover_ms_p50_{row['plane']}": row["ms_p50"] for row in rows}
        figures["empty_handover_ms_p50"] = rows[0]["ms_p50"]
        figures["idle_percent"] = max(row[f"idle_percent_{side}"] for row in rows for side in "dp")
    report.write(args.json, {"ratios": {}, "figures": figures, "rows": rows})


if __name__ == "__main__":
    main()
