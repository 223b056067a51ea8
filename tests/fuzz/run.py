"""Mutated inputs for every decoder and for every listening port of real P and D processes.

    python tests/fuzz/run.py [--count 10000000] [--port-seconds 240] [--seed S] [--only WORD] [--json FILE]

The decoders run in ``--processes`` processes, each with a seed of its own; then the ports, one after the other. An
input must raise no other error than a documented one, take 50 ms of the processor at most, and 64 MiB of memory at
most, over all inputs; afterwards a hand-over between the same processes must succeed. A failure prints its input; it is
kept in ``FOUND`` of ``tests/fuzz/honest.py`` by the commit that mends the fault.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / ".typing"))

from benchmarks.harness import report  # noqa: E402
from tests.fuzz import in_process, ports  # noqa: E402
from tests.support.pair import run_parser  # noqa: E402

Rows = dict[str, in_process.Outcome]


def own_runtime() -> None:
    """The engines of this run, and no others, share a key file."""
    folder = tempfile.mkdtemp(prefix="kvferry-fuzz-")
    os.environ["XDG_RUNTIME_DIR"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def decode(job: tuple[int, int, float, str]) -> Rows:
    os.nice(5)
    return in_process.fuzz(*job)


def together(parts: list[Rows]) -> Rows:
    """The outcomes of several processes as one."""
    total: Rows = {}
    for part in parts:
        for name, found in part.items():
            total.setdefault(name, in_process.Outcome()).add(found)
    return total


def main() -> int:
    parser = run_parser(__doc__, seconds=3600.0, count=10_000_000)
    parser.add_argument("--port-seconds", type=float, default=240.0, help="of all ports together")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="decoders and ports whose name contains this word")
    options = parser.parse_args()
    print(f"fuzz: seed {options.seed}", flush=True)
    own_runtime()
    began, each = time.monotonic(), options.count // options.processes
    jobs = [(options.seed + n, each, options.seconds, options.only) for n in range(options.processes)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        decoders = together(pool.map(decode, jobs, chunksize=1))
    decoder_seconds = time.monotonic() - began
    chosen = [target for target in ports.targets() if options.only in target.name]
    by_kind = {"decoder": decoders, "port": ports.fuzz(options.seed, sys.maxsize, options.port_seconds, chosen)}
    rows: list[dict[str, Any]] = [
        {"kind": kind, "name": name, "inputs": row.inputs, "worst_ms": round(row.worst_s * 1e3, 3),
         "worst_mib": round(row.worst_bytes / 2**20, 2), "failures": len(row.failures)}
        for kind, found in by_kind.items()
        for name, row in found.items()
    ]  # fmt: skip
    print(f"{'decoder or port':<42} {'inputs':>12} {'worst ms':>9} {'worst MiB':>10}")
    for row in rows:
        print(
            f"{row['name']:<42} {row['inputs']:>12,} {row['worst_ms']:>9.1f} {row['worst_mib']:>10.1f}"
            f"{'  FAILED' if row['failures'] else ''}"
        )
    for found in by_kind.values():
        for name, outcome in found.items():
            for failure in outcome.failures.values():
                print(f"FAILED: {name}: {failure}")
    figures = {
        "inputs": sum(row["inputs"] for row in rows),
        "failures": sum(row["failures"] for row in rows),
        "decoder_inputs_per_s": round(sum(row.inputs for row in decoders.values()) / decoder_seconds),
        "seconds": round(time.monotonic() - began, 1),
        "worst_ms": max(row["worst_ms"] for row in rows),
        "worst_mib": max(row["worst_mib"] for row in rows),
    }
    for name, value in figures.items():
        print(f"{name:<24} {value:,}")
    if figures["failures"]:
        print(f"repeat: python tests/fuzz/run.py --seed {options.seed} --count {options.count}")
    arguments = {"count": options.count, "port_seconds": options.port_seconds, "seed": options.seed}
    report.write(options.json, {"figures": figures, "rows": rows, "arguments": arguments})
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
