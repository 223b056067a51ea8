"""The data planes beside NIXL and the ceilings, between two GPUs or in host memory: GB/s of payload, of one run.

    python benchmarks/planes/planes.py [--json FILE] [--budget SECONDS] [--only NAME ...] [--points NAME ...]
    python benchmarks/planes/planes.py --device cpu [--json FILE] [--mib 64] [--kib 4 8 16 32 64]
    python benchmarks/planes/planes.py --encrypt [--json FILE]        (what encryption costs, on the CPU)

P and D of each contender are processes, each on a GPU of its own. In every round each contender moves every point once
or, where that is short, a few times; the order turns around from round to round (ABBA). The first move of a turn is not
counted where moves take less than 50 ms: caches and cores were another process's until then. Before it is timed, each
contender moves each point once and the bytes on D are compared with P's. Time is taken on D.

On GPUs a plane of ours is whole hand-overs between worker halves as an idle engine has them: from the posting of D's
step to the report of its load. ``nixl``: READs of P's blocks, layer by layer, from prepared lists; it cannot change
block size or layout (* in the table). ``nixl_best``: as many contiguous bytes in descriptors of 64 MiB. ``kernel``: the
copy that ``cuda_ipc`` makes, from launch to completion seen. ``peer_copy``: one contiguous copy. ``raw sockets``:
contiguous bytes of host memory by as many connections and threads as the plane ``tcp`` has (``--only tcp "raw
sockets"``). ``handover_ms``: a hand-over of one block of 16 tokens; ``first_handover_ms``: from a P that D has not met.
``--only NAME --device cpu --hand-overs`` tries these on a CPU, with few layers and tokens.

On the CPU a plane is moved by its channels: scattered blocks are packed on P and unpacked on D, each side one thread
and one process; ``tcp, flows``: with the threads that ``tcp`` has between GPUs. "host" leaves all libraries their
choice of transport, "tcp" sets UCX_TLS=tcp for all. NIXL's progress thread serves on P, and D polls; both are stopped
while others are at work.

``--encrypt``: ``tcp`` with and without the setting, and ``zmq``, in turn; ratios of the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import numpy as np

from benchmarks.harness import report
from benchmarks.harness.pages import rate, table
from benchmarks.planes import points as forms
from benchmarks.planes.points import FIRST, FIRST_POINT, ONE_BLOCK, Config, Contender, Point, channel
from benchmarks.planes.process import Pair, Process, ProcessError, gpus, introduce, transports, verify

MIN_ROUNDS = 5
TURN_SECONDS, TURN_MOVES = 0.02, 8
"""What a contender may take at a point in one round beyond its first move."""
LEAD_SECONDS = 0.05
"""Moves that take less are led by one that is not counted: it takes up to 0.3 ms more than those that follow it."""
FIXED_COST = (12, 25)
"""Times and hand-overs each, of the fixed cost."""
NEW_PEERS = {"cuda": 3, "cpu": 1}
STARTED = time.monotonic()


def log(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


class Run:
    """One run: pairs of processes, what they took, and what failed."""

    def __init__(self, contenders: list[Contender], points: tuple[Point, ...], device: Any) -> None:
        self.contenders, self.points, self.device = contenders, points, device
        self.largest = max(points, key=lambda point: point.nbytes)
        self.pairs: dict[str, Pair] = {}
        self._ready: set[str] = set()
        self._new_peers: dict[str, list[Process]] = {}
        self.seconds: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        self._turns: dict[tuple[str, str, str], tuple[int, int]] = {}  # moves that do not count, moves that do
        self.errors: dict[tuple[str, str, str], str] = {}
        self.figures: dict[str, float] = {}
        self.rounds = 0

    def taken(self, contender: Contender) -> tuple[Point, ...]:
        """On the CPU the ceilings know no blocks."""
        if self.device == "cpu" and contender.name in forms.BULK:
            return (self.largest,)
        return self.points

    # --- processes ----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """All processes at once."""
        for contender in self.contenders:
            if contender.pair in self.pairs:
                continue
            points = self.points
            if contender.kind == "plane":
                first = FIRST_POINT if self.device == "cuda" else forms.small([FIRST_POINT])[0]
                points += (first,)
                config = Config("plane", "source", self.device, (first,), contender.settings)
                self._new_peers[contender.name] = [
                    Process(config, gpus()[0], {}) for _ in range(NEW_PEERS[self.device])
                ]
                for process in self._new_peers[contender.name]:  # a P that D is not told of yet
                    process.tell("open")
            self.pairs[contender.pair] = Pair(contender, self.device, points)
        log(f"{sum(len(pair.ends) for pair in self.pairs.values())} processes started")
        for name, pair in self.pairs.items():
            try:
                pair.join()
                self._ready.add(name)
            except ProcessError as error:
                log(f"{name} does not start: {error}")
                for contender in (one for one in self.contenders if one.pair == name):
                    for point in self.points:
                        self.errors[contender.link, contender.name, point.name] = f"does not start: {error}"
        log("all are ready")

    def close(self) -> None:
        """All at once, too."""
        for pair in self.pairs.values():
            pair.end()
        others = [end for ends in self._new_peers.values() for end in ends]
        for end in others:
            end.end()
        for end in [*(end for pair in self.pairs.values() for end in pair.ends), *others]:
            end.close()

    # --- points -------------------------------------------------------------------------------------------------

    def attempt(self, contender: Contender, point: Point) -> None:
        """Move once more; the first time, verify and find out how often a turn may. An error is remembered."""
        key = contender.link, contender.name, point.name
        if key in self.errors:
            return
        pair = self.pairs[contender.pair]
        try:
            if key in self._turns:
                lead, repeats = self._turns[key]
                self.seconds[key] += pair.move(contender.name, point.name, lead + repeats)[lead:]
                return
            pair.verify(contender.name, point.name)
            (took,) = pair.move(contender.name, point.name)
            self._turns[key] = int(took < LEAD_SECONDS), max(1, min(TURN_MOVES, int(TURN_SECONDS / took)))
        except ProcessError as error:
            self.errors[key] = str(error)
            log(f"{contender.name} fails at {point.name}: {error}")

    def verify(self) -> None:
        for contender in self.contenders:
            for point in self.taken(contender):
                self.attempt(contender, point)
            log(f"{contender.name} over {contender.link} verified")

    def measure(self, rounds: int, until: float) -> None:
        """Rounds over all points, ``MIN_ROUNDS`` at least; after those none that begins later than ``until``."""
        while self.rounds < rounds and (self.rounds < MIN_ROUNDS or time.monotonic() < until):
            for point in self.points:
                for contender in self.contenders[:: -1 if self.rounds % 2 else 1]:
                    if point in self.taken(contender):
                        self.attempt(contender, point)
            self.rounds += 1
        log(f"{self.rounds} rounds")

    # --- figures of our planes ----------------------------------------------------------------------------------

    def measure_planes(self) -> None:
        """Fixed cost and first hand-over of planes that hand over; ``cuda_ipc``'s figures have no plane's name."""
        for contender in (one for one in self.contenders if one.kind == "plane" and one.pair in self._ready):
            prefix = "" if contender.name == "cuda_ipc" else f"{contender.name}_"
            try:
                self._first_handovers(contender, prefix)
                times, each = FIXED_COST
                pair = self.pairs[contender.pair]
                seconds = [s for _ in range(times) for s in pair.move(contender.name, ONE_BLOCK, each)]
                for percent in (50, 99):
                    self.figures[f"{prefix}handover_ms_p{percent}"] = 1e3 * float(np.percentile(seconds, percent))
            except ProcessError as error:
                self.errors[contender.link, contender.name, "small and first hand-overs"] = str(error)
                log(f"{contender.name}: small and first hand-overs fail: {error}")

    def _first_handovers(self, contender: Contender, prefix: str) -> None:
        target, times = self.pairs[contender.pair].target, []
        sources = self._new_peers[contender.name]
        for number, source in enumerate(sources):
            source.answer()
            introduce(source, target, f"new-{number}")
            times.append(verify(source, target, contender.name, FIRST, f"new-{number}"))
        for source in sources:  # not before: D takes down what it had for a peer that is gone
            source.end()
            source.close()
        self.figures[f"{prefix}first_handover_ms"] = 1e3 * statistics.median(times)

    # --- results ------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        """In host memory as ``plan_fit.py`` reads them, by link and block size; 0 KiB is in one piece."""
        found = []
        for contender in self.contenders:
            for point in self.taken(contender):
                key = contender.link, contender.name, point.name
                seconds, error = self.seconds[key], self.errors.get(key)
                if not seconds and error is None:
                    continue
                row: dict[str, Any] = {"point": point.name, "contender": contender.name, "bytes": point.nbytes}
                if contender.kind != "plane" and self.device == "cpu":
                    kib = 0 if contender.name in forms.BULK else point.p.block_bytes >> 10
                    row = {"link": contender.link, "kind": contender.name, "block_kib": kib, "seconds": seconds}
                if error is not None:
                    found.append(row | {"error": error})
                    continue
                p50, p99 = np.percentile(seconds, [50, 99]).tolist()
                row |= {"changes_form": contender.changes_form(point), "gb_per_s": point.nbytes / p50 / 1e9}
                found.append(row | {"ms_p50": p50 * 1e3, "ms_p99": p99 * 1e3, "samples": len(seconds)})
        return found

    def transports(self) -> dict[str, list[str]]:
        """What UCX chose in our processes that use it; they have ended, or it may not have been printed."""
        ucx = [pair for name, pair in self.pairs.items() if name.startswith("ucx over")]
        return {f"ucx, {end.config.role}": transports(end.text()) for pair in ucx for end in pair.ends}


def show(result: dict[str, Any]) -> None:
    """GB/s by contender and point, then figures."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for row in result["rows"]:
        name = row.get("contender") or f"{row['link']}: {row['kind']}"
        cells[name][row.get("point") or (f"{row['block_kib']} KiB" if row["block_kib"] else "contiguous")] = rate(row)
    points = dict.fromkeys(point for of_one in cells.values() for point in of_one)
    columns = {"GB/s": "{name}", **{point: f"{{{point}}}" for point in points}}
    print(table([{"name": name, **of_one} for name, of_one in cells.items()], columns))
    print("* moves P's pieces to blocks of P's form: the change of form is still to be made, and is not in the time")
    for name, value in result["figures"].items():
        print(f"{name:44}{value:10.3f}")
    for failure in result["failures"]:
        print(f"FAILED: {failure['contender']} at {failure['at']}: {failure['error'][:400]}")


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """``--encrypt``: by plane and block size, what AES-256-GCM and CURVE cost."""
    group = [channel("tcp"), channel("tcp, encrypt", encrypt=True), channel("zmq")]
    points = forms.host_points(options.mib, options.kib)
    rows: list[dict[str, Any]] = []
    run = Run(group, points, "cpu")
    found: dict[tuple[str, str], list[float]] = defaultdict(list)  # seconds, by plane and point
    try:
        run.open()
        run.verify()
        if run.errors:
            raise SystemExit(f"failed: {run.errors}")
        for number in range(options.rounds):
            for point in points:
                for one in group[:: -1 if number % 2 else 1]:
                    found[one.name, point.name] += run.pairs[one.pair].move(one.name, point.name)
    finally:
        run.close()
    for one in group:
        for point in points:
            ours, base = (found[name, point.name] for name in (one.name, group[0].name))
            rows.append({
                "plane": one.name, "base": group[0].name, "block_kib": point.p.block_bytes >> 10,
                "gb_per_s": round(point.nbytes / statistics.median(ours) / 1e9, 3),
                "of_base": round(statistics.median(b / a for a, b in zip(ours, base, strict=True)), 3),
            })  # fmt: skip
            report.line(rows[-1])
    return {"rows": rows, "mib": options.mib, "rounds": options.rounds}


def main() -> None:
    parser = report.options(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, help=f"at most, {MIN_ROUNDS} at least: 15, on the CPU 7")
    parser.add_argument("--budget", type=float, default=150, help="seconds after which no further round begins")
    parser.add_argument("--points", nargs="+", help="only these and those that figures need, by name")
    parser.add_argument("--only", nargs="+", help="only these contenders, by name")
    parser.add_argument("--hand-overs", action="store_true", help="on the CPU: what is measured on GPUs, in small")
    parser.add_argument("--encrypt", action="store_true", help="what encryption costs, on the CPU")
    parser.add_argument("--mib", type=int, default=64, help="MiB that one transfer moves on the CPU")
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="block sizes on the CPU")
    options = parser.parse_args()
    options.rounds = options.rounds or (15 if options.device == "cuda" or options.encrypt else 7)
    if options.encrypt:
        report.write(options.json, compare(options))
        return
    if options.device == "cuda" or options.hand_overs:
        contenders, points = forms.gpu_contenders(), forms.CORE
        needed = {ONE_BLOCK, *(options.points or ())}
        if unknown := needed - {point.name for point in points}:
            parser.error(f"--points: {unknown} unknown; known are {', '.join(point.name for point in points)}")
        points = tuple(point for point in points if options.points is None or point.name in needed)
        points = points if options.device == "cuda" else forms.small(points)
    else:
        contenders, points = forms.host_contenders(), forms.host_points(options.mib, options.kib)
    run = Run(forms.chosen(contenders, options.only), points, options.device)
    try:
        run.open()
        run.verify()
        run.measure_planes()
        run.measure(options.rounds, STARTED + options.budget)
    finally:
        run.close()
    result = {
        "figures": run.figures, "rounds": run.rounds, "device": options.device,
        "failures": [
            {"contender": f"{name} over {link}", "at": at, "error": error}
            for (link, name, at), error in run.errors.items()
        ],
        "ucx_transports": run.transports(), "rows": run.rows(),
    }  # fmt: skip
    show(result)
    report.write(options.json, result)


if __name__ == "__main__":
    main()
