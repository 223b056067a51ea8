"""The data planes between two GPUs beside NIXL, memcpy per block, torch and the ceilings, medians of one run.

    python benchmarks/gpu_planes.py [--full] [--json FILE] [--plot FILE.png] [--budget SECONDS] [--only NAME ...]
    python benchmarks/gpu_planes.py --device cpu      (the same flow on a CPU, few layers and tokens)

P is a process on one GPU, D one on the other, for each contender. In every round each contender moves every point once
or, where that is short, a few times; the order turns around from round to round (ABBA). The first move of a turn is
not counted where moves take less than 50 ms: caches and GPUs were another process's until then. Before it is timed,
each contender moves each point once and the bytes on D are compared with P's.

``cuda_ipc``, ``ucx``: hand-overs between worker halves as an idle engine has them; from the posting of D's step to the
report of its load, so with ask, grant, copy and commit. ``ucx_moving``: the same from P's first step for the data on,
so what the plane itself takes: without D's way to its ask, and the ask's to P.
``nixl``, ``memcpy_async``: P's blocks, layer by layer; neither can change block size or layout (* in the table).
``nixl_best``: as many contiguous bytes in descriptors of 64 MiB. ``torch``: gather, peer copy, permute and scatter.
``kernel``: the copy that ``cuda_ipc`` makes over P's mapped pages, from launch to completion seen, for an idle engine
or with the SMs that its name says. Names that end in ``in_a_row``: four without a pause, so bandwidth without the steps
before and after. ``peer_copy``: one contiguous copy of as many bytes. ``ucxx_raw``: tagged messages
of 32 MiB. ``device_copy``, ``pack``, ``unpack``: on one GPU.

Ratios are of bandwidths, at 8k tokens (1 GiB) unless their name says more. Those of ``cuda_ipc`` to ceilings are of its
copy, launch to completion seen, as a transfer of NIXL's is from its posting to its end; with ``handover`` in the name
they are of the whole hand-over, as ``ucx``'s are and those to NIXL's scattered pieces. At 64 MiB the ceiling is that of
1 GiB. ``handover_ms``: a hand-over of one block of 16 tokens. ``gil_ms``: 64
MiB beside a thread in D's process that never lets the GIL go. ``first_handover_ms``: from a P process that D, which has
served others, has not met before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gpu_tables
import report
from gpu_cases import CORE, FIRST, FIRST_POINT, LONG, MAIN, MORE, ONE_BLOCK, SMALL, Config, Point, small
from gpu_methods import Method, chosen
from gpu_pairs import Pair, Process, ProcessError, gpus, introduce, move, transports, verify

MIN_ROUNDS = 5
TURN_SECONDS, TURN_MOVES = 0.02, 8
"""What a contender may take at a point in one round beyond its first move."""
LEAD_SECONDS = 0.05
"""Moves that take less are led by one that is not counted: it takes up to 0.3 ms more than those that follow it."""
FIXED_COST, GIL = (12, 25), (4, 10)
"""Times and hand-overs each, of the fixed cost and beside a busy thread."""
NEW_PEERS = {"cuda": 3, "cpu": 1}
MAX_RESTARTS = 2
MEASURED_PLANES = ("cuda_ipc", "cma", "ucx")
"""Of which fixed cost, first hand-over and cost beside a busy thread are taken. Figures without a plane's name are
``cuda_ipc``'s, on a CPU the first one's."""


def log(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", file=sys.stderr, flush=True)


STARTED = time.monotonic()


class Run:
    """One run: pairs of processes, what they took, and what failed."""

    def __init__(self, contenders: list[Method], points: tuple[Point, ...], options: argparse.Namespace) -> None:
        self.contenders, self.points = contenders, points
        self.main = next(point for point in points if point.name == MAIN)
        self.options = options
        self.pairs: dict[str, Pair] = {}
        self._makers: dict[str, Callable[[], Pair]] = {}
        self._restarts: dict[str, int] = defaultdict(int)
        self.ready: set[str] = set()
        self.new_peers: dict[str, list[Process]] = {}
        self.seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.repeats: dict[tuple[str, str], int] = {}
        self.leads: dict[tuple[str, str], int] = {}
        self.errors: dict[tuple[str, str], str] = {}
        self.figures: dict[str, float] = {}
        self.rounds = 0

    # --- processes ----------------------------------------------------------------------------------------------

    def _pair_of(self, contender: Method) -> str:
        return str(dict(contender.settings)["plane"]) if contender.pair == "plane" else contender.pair

    def _takes(self, contender: Method, point: Point) -> bool:
        return contender.takes(point, self.main)

    def open(self) -> None:
        """All processes at once."""
        device = self.options.device
        for contender in self.contenders:
            name = self._pair_of(contender)
            if name in self.pairs:
                continue
            points = tuple(point for point in self.points if self._takes(contender, point))
            if contender.pair in ("nixl", "mapped"):
                points = self.points  # each has a way that takes them all
            settings = (dict(self.options.set) if contender.settings else {}) | dict(contender.settings)
            if contender.name in MEASURED_PLANES:
                points += (self._first,)
                self.new_peers[name] = [self._new_peer(settings) for _ in range(NEW_PEERS[device])]
            environ = {"UCX_PROTO_INFO": "y"} if settings.get("plane") == "ucx" else {}
            alone = contender.pair in ("torch", "local")
            self._makers[name] = partial(Pair, contender.pair, device, points, settings, environ, alone)
            self.pairs[name] = self._makers[name]()
        log(f"{sum(len(pair.ends) for pair in self.pairs.values())} processes started")
        for name, pair in self.pairs.items():
            try:
                pair.join()
                self.ready.add(name)
            except ProcessError as error:
                log(f"{name} does not start: {error}")
                for contender in self.contenders:
                    if self._pair_of(contender) == name:
                        self.errors.update({(contender.name, p.name): f"does not start: {error}" for p in self.points})
        log("all are ready")

    @property
    def _first(self) -> Point:
        return FIRST_POINT if self.options.device == "cuda" else small([FIRST_POINT])[0]

    def _new_peer(self, settings: dict[str, Any]) -> Process:
        """A P that D is not told of yet."""
        config = Config("plane", "source", self.options.device, (self._first,), settings)
        process = Process(config, gpus()[0], {})
        process.tell("open")
        return process

    def _revive(self, name: str) -> None:
        """New processes where one has ended, so that one point does not cost a contender all others."""
        pair = self.pairs[name]
        if pair.alive or self._restarts[name] == MAX_RESTARTS:
            return
        self._restarts[name] += 1
        pair.kill()
        self.pairs[name] = self._makers[name]()
        try:
            self.pairs[name].join()
            log(f"{name} is started anew")
        except ProcessError as error:
            log(f"{name} does not start anew: {error}")

    def close(self) -> None:
        """All at once, too."""
        ends = [end for pair in self.pairs.values() for end in pair.ends]
        ends += [end for ends in self.new_peers.values() for end in ends]
        for end in ends:
            end.end()
        for end in ends:
            end.close()

    # --- points -------------------------------------------------------------------------------------------------

    def attempt(self, contender: Method, point: Point, repeats: int | None) -> None:
        """Move once more; ``repeats`` None verifies, and finds out how often a turn may. An error is remembered."""
        key = contender.name, point.name
        if key in self.errors:
            return
        pair = self.pairs[self._pair_of(contender)]
        try:
            if repeats is not None:
                lead = self.leads.get(key, 0)
                self.seconds[key] += pair.move(contender.name, point.name, lead + repeats)[lead:]
                return
            pair.verify(contender.name, point.name)
            (took,) = pair.move(contender.name, point.name)
            self.repeats[key] = max(1, min(TURN_MOVES, int(TURN_SECONDS / took)))
            self.leads[key] = int(took < LEAD_SECONDS)
        except ProcessError as error:
            self.errors[key] = str(error)
            log(f"{contender.name} fails at {point.name}: {error}")
            self._revive(self._pair_of(contender))

    def verify(self) -> None:
        for contender in self.contenders:
            for point in self.points:
                if self._takes(contender, point):
                    self.attempt(contender, point, None)
            log(f"{contender.name} verified")

    def measure(self, until: float) -> None:
        """Rounds over all points, ``MIN_ROUNDS`` at least; after those none that begins later than ``until``."""
        while self.rounds < self.options.rounds and (self.rounds < MIN_ROUNDS or time.monotonic() < until):
            order = self.contenders if self.rounds % 2 == 0 else self.contenders[::-1]
            for point in self.points:
                for contender in order:
                    if self._takes(contender, point):
                        self.attempt(contender, point, self.repeats.get((contender.name, point.name), 1))
            self.rounds += 1
        log(f"{self.rounds} rounds")

    # --- figures of our planes ----------------------------------------------------------------------------------

    def measure_planes(self) -> None:
        """Fixed cost, first hand-over, and the cost beside a busy thread."""
        names = [name for name in MEASURED_PLANES if name in self.ready]
        nameless = "cuda_ipc" if self.options.device == "cuda" else names[0] if names else ""
        for name in names:
            for take in (self._first_handovers, self._fixed_cost, self._beside_a_busy_thread):
                try:
                    take(name, "" if name == nameless else f"{name}_")
                except ProcessError as error:
                    what = take.__name__.strip("_")
                    self.errors[name, what] = str(error)
                    log(f"{name}: {what} fails: {error}")
        log("figures of our planes taken")

    def _first_handovers(self, name: str, prefix: str) -> None:
        pair = self.pairs[name]
        times = []
        for number, source in enumerate(self.new_peers[name]):
            source.answer()
            introduce(source, pair.target, f"new-{number}")
            times.append(verify(source, pair.target, name, FIRST, f"new-{number}"))
            again = move(source, pair.target, name, FIRST, 3, f"new-{number}")
            self.figures[f"{name}_second_handover_ms"] = 1e3 * statistics.median(again)
        for source in self.new_peers[name]:  # not before: D takes down what it had for a peer that is gone
            source.end()
            source.close()
        self.figures[f"{prefix}first_handover_ms"] = 1e3 * statistics.median(times)

    def _fixed_cost(self, name: str, prefix: str) -> None:
        times, each = FIXED_COST
        seconds = sorted(s for _ in range(times) for s in self.pairs[name].move(name, ONE_BLOCK, each))
        self.figures[f"{prefix}handover_ms_p50"] = 1e3 * statistics.median(seconds)
        self.figures[f"{prefix}handover_ms_p99"] = 1e3 * percentile(seconds, 0.99)

    def _beside_a_busy_thread(self, name: str, prefix: str) -> None:
        pair, (times, each) = self.pairs[name], GIL
        pair.target.ask("spin", on=True)
        try:
            seconds = [s for _ in range(times) for s in pair.move(name, SMALL, each)]
        finally:
            if pair.target.alive:
                pair.target.ask("spin", on=False)
        self.figures[f"{name}_gil_ms"] = 1e3 * statistics.median(seconds)
        self.figures[f"{name}_gil_ms_p99"] = 1e3 * percentile(sorted(seconds), 0.99)

    # --- results ------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for point in self.points:
            for contender in self.contenders:
                key = contender.name, point.name
                seconds = sorted(self.seconds[key])
                row: dict[str, Any] = {"point": point.name, "contender": contender.name, "bytes": point.nbytes}
                if key in self.errors:
                    found.append(row | {"error": self.errors[key]})
                elif seconds:
                    median = statistics.median(seconds)
                    found.append(
                        row
                        | {"changes_form": contender.changes_form(point), "gb_per_s": point.nbytes / median / 1e9}
                        | {"ms_p50": median * 1e3, "ms_p99": percentile(seconds, 0.99) * 1e3, "samples": len(seconds)}
                    )
        return found

    def transports(self) -> dict[str, list[str]]:
        """What UCX chose in each of our processes that uses it; they have ended, or it may not have been printed."""
        found = {}
        for name, pair in self.pairs.items():
            for end in pair.ends if name == "ucx" else ():
                found[f"ucx, {end.config.role}"] = transports(end.text())
        return found


def percentile(ordered: list[float], share: float) -> float:
    """The nearest rank; of few values, the largest."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarise(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The ratios that the project holds itself to, those whose both sides were measured."""
    rates = {(row["contender"], row["point"]): row["gb_per_s"] for row in rows if "error" not in row}
    pairs = {
        "cuda_ipc_vs_peer_copy": (("kernel", MAIN), ("peer_copy", MAIN)),
        "cuda_ipc_vs_peer_copy_in_a_row": (("kernel_in_a_row", MAIN), ("peer_copy_in_a_row", MAIN)),
        "cuda_ipc_vs_peer_copy_in_a_row_at_32k_tokens": (("kernel_in_a_row", LONG), ("peer_copy_in_a_row", LONG)),
        "cuda_ipc_16sm_vs_peer_copy": (("kernel_16sm", MAIN), ("peer_copy", MAIN)),
        "cuda_ipc_20sm_vs_peer_copy": (("kernel_20sm", MAIN), ("peer_copy", MAIN)),
        "cuda_ipc_32sm_vs_peer_copy": (("kernel_32sm", MAIN), ("peer_copy", MAIN)),
        "cuda_ipc_64mib_vs_peer_copy": (("kernel", SMALL), ("peer_copy", MAIN)),
        "cuda_ipc_64mib_vs_peer_copy_of_64mib": (("kernel", SMALL), ("peer_copy", SMALL)),
        "cuda_ipc_handover_vs_peer_copy": (("cuda_ipc", MAIN), ("peer_copy", MAIN)),
        "ucx_vs_peer_copy": (("ucx", MAIN), ("peer_copy", MAIN)),
        "ucx_vs_raw_ucxx": (("ucx", MAIN), ("ucxx_raw", MAIN)),
        "ucx_moving_vs_peer_copy": (("ucx_moving", MAIN), ("peer_copy", MAIN)),
        "ucx_moving_vs_raw_ucxx": (("ucx_moving", MAIN), ("ucxx_raw", MAIN)),
        "cuda_ipc_vs_nixl_8k": (("cuda_ipc", "pieces_8k"), ("nixl", "pieces_8k")),
        "cuda_ipc_vs_nixl_32k": (("cuda_ipc", "pieces_32k"), ("nixl", "pieces_32k")),
        "cuda_ipc_vs_nixl_best": (("kernel", MAIN), ("nixl_best", MAIN)),
        "cuda_ipc_handover_vs_nixl_best": (("cuda_ipc", MAIN), ("nixl_best", MAIN)),
        "pack_vs_device_copy": (("pack", MAIN), ("device_copy", MAIN)),
        "unpack_vs_device_copy": (("unpack", MAIN), ("device_copy", MAIN)),
    }
    for ours, ceiling in (
        ("kernel", "peer_copy"),
        ("cuda_ipc", "peer_copy"),
        ("ucx", "peer_copy"),
        ("ucx", "ucxx_raw"),
        ("ucx_moving", "peer_copy"),
        ("ucx_moving", "ucxx_raw"),
    ):
        of = {"kernel": "cuda_ipc", "cuda_ipc": "cuda_ipc_handover"}.get(ours, ours)
        to = {"ucxx_raw": "raw_ucxx"}.get(ceiling, ceiling)
        pairs[f"{of}_vs_{to}_at_32k_tokens"] = ((ours, LONG), (ceiling, LONG))
    return {name: rates[ours] / rates[than] for name, (ours, than) in pairs.items() if {ours, than} <= rates.keys()}


def setting(text: str) -> tuple[str, Any]:
    """``NAME=VALUE`` of our planes' settings."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, int(value) if value.isdigit() else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=15, help=f"at most, {MIN_ROUNDS} at least")
    parser.add_argument("--budget", type=float, default=150, help="seconds after which no further round begins")
    parser.add_argument("--full", action="store_true", help="more points")
    parser.add_argument(
        "--points", type=lambda text: text.split(","), help="only these and those that figures need, by name"
    )
    parser.add_argument("--only", type=lambda text: text.split(","), help="only these contenders, by name")
    parser.add_argument("--set", type=setting, action="append", default=[], help="a setting of our planes, NAME=VALUE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    points = (*CORE, *MORE) if options.full else CORE
    if options.points is not None:
        unknown = set(options.points) - {point.name for point in points}
        if unknown:
            parser.error(
                f"--points: {', '.join(sorted(unknown))} unknown; known are {', '.join(p.name for p in points)}"
            )
        needed = {MAIN, ONE_BLOCK, SMALL, *options.points}
        points = tuple(point for point in points if point.name in needed)
    if options.device == "cpu":
        points = small(points)
    contenders = chosen(options.only, options.device)
    run = Run(contenders, points, options)
    try:
        run.open()
        run.verify()
        run.measure_planes()
        run.measure(STARTED + options.budget)
    finally:
        run.close()
    rows = run.rows()
    result = {
        "ratios": summarise(rows),
        "figures": run.figures,
        "rounds": run.rounds,
        "device": options.device,
        "failures": [{"contender": name, "at": at, "error": error} for (name, at), error in run.errors.items()],
        "ucx_transports": run.transports(),
        "versions": report.versions(),
        "rows": rows,
    }
    names = [contender.name for contender in contenders]
    gpu_tables.show(result, names)
    report.write(options.json, result)
    if options.plot is not None:
        gpu_tables.plot(result, names, options.plot)


if __name__ == "__main__":
    main()
