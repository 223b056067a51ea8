"""The data planes on host memory beside NIXL, raw UCXX, a raw socket and memcpy: GB/s of payload, medians of one run.

    python benchmarks/host_planes.py [--mib 64] [--rounds 7] [--json FILE] [--sweep-shm] [--compare-nixl]

Real scattered KV blocks of 4 to 64 KiB: packed on P, unpacked on D, each side one thread and one process. NIXL reads
the same blocks (DRAM, READ, prepared lists; the preparation is not timed); D polls, without a progress thread beside
the poll loop, which is the better form (``--compare-nixl`` measures both in turn). "host" leaves both libraries their
choice of transport, "tcp" sets UCX_TLS=tcp for both. In every round each contender moves every block size once, in
turn, so that a noisy neighbour meets all of them; NIXL's progress threads are stopped while others are at work. Time is
taken on D, from the request to the last byte in its place.

The staged ceiling is what copy, bulk transfer and copy would reach without overlap of the copies with the transfer,
one copy counted: 1 / (1 / raw UCXX bulk + 1 / memcpy).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import empty_handover
import report
from tables import NIXL, NIXL_PLANE, NIXL_RAW, NIXL_THREAD

from kvferry.transport.channels import CPU
from kvferry.transport.registry import preferred_planes

HERE = Path(__file__).resolve().parent
PLANES = tuple(name for name in preferred_planes(CPU) if name != "nixl")
SAME_HOST = ("cma", "shm", "tcp", "ucx", "zmq", "nixl")
TCP = ("tcp", "ucx", "zmq", NIXL_PLANE, NIXL, *NIXL_RAW, "ucxx raw", "raw socket")
BULK = ("ucxx raw", "raw socket", "memcpy", *NIXL_RAW)


class Process:
    """One end of a contender."""

    def __init__(self, kind: str, role: str, config: dict[str, Any], environ: dict[str, str]) -> None:
        self.name = f"{kind} {role}"
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "host_processes.py"), kind, role, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "UCX_WARN_UNUSED_ENV_VARS": "n"} | environ,
        )

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, **command: Any) -> Any:
        self.tell(**command)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Pair:
    """A contender: two processes that are joined."""

    def __init__(self, kind: str, link: str, config: dict[str, Any], stack: ExitStack) -> None:
        self.kind, self.link = kind, link
        environ = {"UCX_TLS": "tcp"} if link == "tcp" else {}
        self.source = Process(kind, "source", config, environ)
        self.target = Process(kind, "target", config, environ)
        stack.callback(self.source.close)
        stack.callback(self.target.close)
        blob = self.source.ask(do="exchange", blob=None)
        while blob is not None:
            blob = self.target.ask(do="exchange", blob=blob)
            if blob is not None:
                blob = self.source.ask(do="exchange", blob=blob)
        self.move(config["kib"][0])

    def _signal(self, number: signal.Signals) -> None:
        if self.kind not in (NIXL, NIXL_THREAD, *NIXL_RAW):  # the others sleep by themselves
            return
        for end in (self.source, self.target):
            end.process.send_signal(number)

    def move(self, kib: int) -> float:
        """Seconds of one transfer."""
        self._signal(signal.SIGCONT)
        self.target.tell(do="move", kib=kib)
        self.source.tell(do="move", kib=kib)
        seconds: float = self.target.answer()
        self.source.tell(do="nothing")  # wakes a source that serves until it is told
        self.source.answer()
        self.source.answer()
        self._signal(signal.SIGSTOP)
        return seconds

    def check(self, kib: int) -> None:
        """The blocks on D are the blocks on P."""
        if self.kind in BULK:
            return
        self._signal(signal.SIGCONT)
        if self.source.ask(do="digest", kib=kib) != self.target.ask(do="digest", kib=kib):
            raise SystemExit(f"{self.kind} over {self.link}: blocks of {kib} KiB differ")
        self._signal(signal.SIGSTOP)


def measure(pairs: list[Pair], sizes: list[int], rounds: int) -> dict[tuple[str, str, int], list[float]]:
    """Seconds per (link, kind, KiB), ``rounds`` of each after one to warm up; bulk ones have KiB 0."""
    seconds: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for round in range(rounds + 1):
        print(f"round {round} of {rounds}", file=sys.stderr, flush=True)
        for pair in pairs:
            for kib in [0] if pair.kind in BULK else sizes:
                took = pair.move(kib)
                if round == 0:
                    pair.check(kib)
                else:
                    seconds[pair.link, pair.kind, kib].append(took)
    return seconds


def summarise(rates: dict[tuple[str, str, int], float], sizes: list[int]) -> dict[str, float]:
    """The ratios that the project holds itself to."""

    def rate(link: str, kind: str, kib: int = 0) -> float:
        return rates[link, kind, kib]

    # Each plane at the block size where the copies cost least, as the ceilings know no blocks.
    best = max(sizes)
    ceiling = 1 / (1 / rate("tcp", "ucxx raw") + 1 / rate("host", "memcpy"))
    ratios = {
        "ucx_vs_staged_ceiling": rate("tcp", "ucx", best) / ceiling,
        "zmq_tcp_vs_raw_socket": rate("tcp", "zmq", best) / rate("tcp", "raw socket"),
    }
    for kind, operation in NIXL_RAW.items():
        ratios[f"nixl_plane_vs_raw_{operation}"] = rate("tcp", NIXL_PLANE, best) / rate("tcp", kind)
    for kib in (8, 32):
        if kib in sizes:
            ratios[f"tcp_vs_nixl_{kib}k"] = rate("tcp", "tcp", kib) / rate("tcp", "nixl", kib)
            ratios[f"ucx_tcp_vs_nixl_{kib}k"] = rate("tcp", "ucx", kib) / rate("tcp", "nixl", kib)
            ratios[f"nixl_plane_vs_nixl_{kib}k"] = rate("tcp", NIXL_PLANE, kib) / rate("tcp", NIXL, kib)
            ratios[f"cma_vs_nixl_{kib}k"] = rate("host", "cma", kib) / rate("host", "nixl", kib)
            ratios[f"shm_vs_nixl_{kib}k"] = rate("host", "shm", kib) / rate("host", "nixl", kib)
    return ratios


def fastest(rates: dict[tuple[str, str, int], float], sizes: list[int]) -> dict[str, str]:
    """Per link, the plane with the highest rate over all block sizes."""
    return {
        link: max(kinds, key=lambda kind: statistics.geometric_mean(rates[link, kind, kib] for kib in sizes))
        for link, kinds in (("host", PLANES), ("tcp", ("tcp", "ucx", "zmq")))
    }


def run(config: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One run; what ``--json`` writes."""
    sizes = config["kib"]
    with ExitStack() as stack:
        pairs = [Pair(kind, "host", config, stack) for kind in (*SAME_HOST, "memcpy")]
        pairs += [Pair(kind, "tcp", config, stack) for kind in TCP]
        seconds = measure(pairs, sizes, rounds)
    nbytes = config["mib"] << 20
    rates = {key: nbytes / statistics.median(times) / 1e9 for key, times in seconds.items()}
    rows = [
        {"link": link, "kind": kind, "block_kib": kib, "gb_per_s": rate, "seconds": seconds[link, kind, kib]}
        for (link, kind, kib), rate in rates.items()
    ]
    names = fastest(rates, sizes)
    figures = {f"{link}_{kind}_gb_per_s".replace(" ", "_"): rates[link, kind, 0] for link, kind, k in rates if k == 0}
    figures["empty_handover_ms_p50"] = empty_handover.measure(PLANES[0], 300)["ms_p50"]
    return {
        "ratios": summarise(rates, sizes),
        "figures": figures,
        "fastest": names,
        "nixl_progress_thread_on_d": False,
        "rows": rows,
    }


def show(result: dict[str, Any], sizes: list[int]) -> None:
    cells: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in result["rows"]:
        cells[row["link"], row["kind"]][row["block_kib"]] = row["gb_per_s"]
    print(f"{'GB/s, scattered blocks of':28}" + "".join(f"{kib:>7} KiB" for kib in sizes) + "       bulk")
    for (link, kind), by_size in cells.items():
        values = "".join(f"{by_size[kib]:11.2f}" if kib in by_size else " " * 11 for kib in [*sizes, 0])
        print(f"{link + ': ' + kind:28}{values}")
    for name, value in result["ratios"].items():
        print(f"{name:28}{value:11.2f}")
    for name in ("empty_handover_ms_p50",):
        print(f"{name:28}{result['figures'][name]:11.2f}")
    for link, name in result["fastest"].items():
        print(f"{'fastest plane, ' + link:28}{name:>11}")


def sweep_shm(config: dict[str, Any], rounds: int) -> None:
    """GB/s of the shm plane by slot size."""
    with ExitStack() as stack:
        slots = [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20]
        pairs = {slot: Pair("shm", "host", config | {"slot_bytes": slot}, stack) for slot in slots}
        times: dict[tuple[int, int], list[float]] = defaultdict(list)
        for _ in range(rounds):
            for slot, pair in pairs.items():
                for kib in config["kib"]:
                    times[slot, kib].append(pair.move(kib))
    for slot in slots:
        rates = [(config["mib"] << 20) / statistics.median(times[slot, kib]) / 1e9 for kib in config["kib"]]
        print(f"{slot >> 10:6} KiB slots" + "".join(f"{rate:9.2f}" for rate in rates))


def compare_nixl(config: dict[str, Any], rounds: int) -> dict[str, Any]:
    """NIXL with and without a progress thread on D, in turn: GB/s of all rounds."""
    with ExitStack() as stack:
        pairs = [Pair(kind, link, config, stack) for link in ("host", "tcp") for kind in (NIXL, NIXL_THREAD)]
        seconds = measure(pairs, config["kib"], rounds)
    rows = []
    for (link, kind, kib), times in seconds.items():
        rates = [(config["mib"] << 20) / time / 1e9 for time in times]
        rows.append({"link": link, "kind": kind, "block_kib": kib, "gb_per_s": round(statistics.median(rates), 3)})
        rows[-1]["all_gb_per_s"] = [round(rate, 3) for rate in rates]
        print(f"{link:6}{kind:28}{kib:4} KiB{statistics.median(rates):8.2f} GB/s, {min(rates):.2f} to {max(rates):.2f}")
    return {"ratios": {}, "figures": {}, "rows": rows, "rounds": rounds}


def compare_nixl_plane(config: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The plane ``nixl``, NIXL's own descriptors, and NIXL's operations on whole slots, in turn over the same lanes."""
    with ExitStack() as stack:
        pairs = [Pair(kind, "tcp", config, stack) for kind in (NIXL_PLANE, NIXL, NIXL_THREAD, *NIXL_RAW, "tcp", "ucx")]
        seconds = measure(pairs, config["kib"], rounds)
    rows = [
        {
            "kind": kind,
            "block_kib": kib,
            "gb_per_s": (config["mib"] << 20) / statistics.median(times) / 1e9,
            "seconds": times,
        }
        for (_, kind, kib), times in seconds.items()
    ]
    for row in rows:
        print(f"{row['kind']:20}{row['block_kib'] or 'bulk':>6}{row['gb_per_s']:8.2f} GB/s")
    return {"rows": rows, "rounds": rounds, "mib": config["mib"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="MiB that one transfer moves")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="block sizes")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--slot-mib", type=float, default=4, help="slot size asked for; a plane may take less")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep-shm", action="store_true", help="only the shm plane, by slot size")
    parser.add_argument(
        "--compare-nixl", action="store_true", help="only NIXL, with a progress thread on D and without"
    )
    parser.add_argument("--nixl-plane", action="store_true", help="only the plane nixl and NIXL itself, over TCP")
    options = parser.parse_args()
    config = {
        "mib": options.mib,
        "kib": options.kib,
        "layers": options.layers,
        "slot_bytes": int(options.slot_mib * (1 << 20)),
        "staging_bytes": 256 << 20,
    }
    if options.sweep_shm:
        sweep_shm(config, options.rounds)
        return
    if options.nixl_plane:
        report.write(options.json, compare_nixl_plane(config, options.rounds))
        return
    if options.compare_nixl:
        report.write(options.json, compare_nixl(config, options.rounds))
        return
    result = run(config, options.rounds)
    show(result, options.kib)
    report.write(options.json, result)


if __name__ == "__main__":
    main()
