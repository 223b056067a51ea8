"""Mutated inputs for every decoder and for every listening port of real P and D processes.

    python tests/fuzz/run.py [--count 10000000] [--port-seconds 240] [--seed S] [--only WORD] [--json FILE]

The decoders run in ``--processes`` processes, each with a seed of its own; then the ports, one after the other. An
input must raise no other error than a documented one, take 50 ms of the processor at most, and 64 MiB of memory at
most, over all inputs; afterwards a hand-over between the same processes must succeed. A failure prints its input; it is
kept in ``tests/fuzz/found.py`` by the commit that mends the fault.
"""

from __future__ import annotations

import argparse
import atexit
import multiprocessing
import os
import random
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


def shown(rows: Rows) -> str:
    lines = [f"{'decoder or port':<42} {'inputs':>12} {'worst ms':>9} {'worst MiB':>10}"]
    for name, row in rows.items():
        worst = f"{row.worst_s * 1e3:>9.1f} {row.worst_bytes / 2**20:>10.1f}"
        lines.append(f"{name:<42} {row.inputs:>12,} {worst}{'  FAILED' if row.failures else ''}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000_000, help="inputs of the decoders, all together")
    parser.add_argument("--seconds", type=float, default=3600.0, help="the decoders end after this time in any case")
    parser.add_argument("--port-seconds", type=float, default=240.0, help="of all ports together")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 16))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="decoders and ports whose name contains this word")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    print(f"fuzz: seed {options.seed}", flush=True)
    own_runtime()
    began = time.monotonic()
    jobs = [
        (options.seed + n, options.count // options.processes, options.seconds, options.only)
        for n in range(options.processes)
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        decoders = together(pool.map(decode, jobs, chunksize=1))
    decoder_seconds = time.monotonic() - began
    print(shown(decoders), flush=True)
    began = time.monotonic()
    chosen = [target for target in ports.targets() if options.only in target.name]
    port_rows = ports.fuzz(options.seed, sys.maxsize, options.port_seconds, chosen) if chosen else {}
    print(shown(port_rows))
    port_seconds = time.monotonic() - began
    rows = decoders | port_rows
    for name, row in rows.items():
        for failure in row.failures.values():
            print(f"FAILED: {name}: {failure}")
    failures = sum(len(row.failures) for row in rows.values())
    figures = {
        "inputs": sum(row.inputs for row in rows.values()),
        "failures": failures,
        "decoder_inputs_per_s": round(sum(row.inputs for row in decoders.values()) / decoder_seconds),
        "seconds": round(decoder_seconds + port_seconds, 1),
        "worst_ms": round(1e3 * max(row.worst_s for row in rows.values()), 2),
        "worst_mib": round(max(row.worst_bytes for row in rows.values()) / 2**20, 1),
    }
    for name, value in figures.items():
        print(f"{name:<24} {value:,}")
    if failures:
        print(f"repeat: python tests/fuzz/run.py --seed {options.seed} --count {options.count}")

    def rounded(found: Rows, kind: str) -> list[dict[str, Any]]:
        return [
            {"kind": kind, "name": name, "inputs": row.inputs, "worst_ms": round(row.worst_s * 1e3, 3),
             "worst_mib": round(row.worst_bytes / 2**20, 2), "failures": len(row.failures)}
            for name, row in found.items()
        ]  # fmt: skip

    arguments = {"count": options.count, "port_seconds": options.port_seconds, "seed": options.seed}
    document = {"figures": figures, "rows": rounded(decoders, "decoder") + rounded(port_rows, "port")}
    report.write(options.json, document | {"arguments": arguments})
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
