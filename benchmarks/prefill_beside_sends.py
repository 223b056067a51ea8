"""How much P's transfer thread slows P's engine thread while a prompt leaves as it is computed. No engine, no GPU.

    python benchmarks/prefill_beside_sends.py [--plane tcp] [--pairs 15] [--json FILE] [--profile]

P's engine thread is that of this process. It computes a prompt in steps of ``--chunk`` tokens as vLLM does on the CPU:
for each layer one long torch operation, which holds no interpreter, and short ones between calls of Python. D is
another process, which reads the prompt meanwhile. P's engine thread has a core of its own, all else shares the others.

Each pair has a prompt that is computed without KVFerry and one that leaves, in turns. Columns, medians over the pairs:
the ratio of both times, by the clock and by the time of the engine's thread on its core; of P's transfer thread its
time on a core and its turns, for one prompt; the share of the bytes that had left when the last step ended.
``--profile`` prints where the transfer thread's time goes, and the other figures then say nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

import report
import tables
import torch

from kvferry.connector.config import Settings
from kvferry.connector.engine.transfer_thread import TransferThread
from kvferry.connector.prefill_side import send
from tests.handover.prefilling import PrefillingEngine
from tests.support.rank_process import RemoteRank
from tests.support.ranks import Rank, peer, wait

HEADS, CONTENT, BLOCK_SIZE = 8, 256, 128
"""8 KiB for each token and layer, as of the model of ``streaming.py``."""
SHORT_OPERATIONS = 12
PATIENCE = {"lease_seconds": 300.0, "transfer_timeout_seconds": 300.0, "handover_timeout_seconds": 300.0}


class Turns:
    """What the transfer threads of this process did."""

    def __init__(self, profiles: bool) -> None:
        self.turns = self.sent = 0
        self.profile = cProfile.Profile() if profiles else None
        turns = self
        turn, count, run = TransferThread.turn, send.OutgoingRead.count, TransferThread._run

        def counted_turn(self: TransferThread, now: float) -> bool:
            turns.turns += 1
            return turn(self, now)

        def counted_bytes(self: send.OutgoingRead, nbytes: int) -> None:
            turns.sent += nbytes
            count(self, nbytes)

        def profiled_run(self: TransferThread) -> None:
            assert turns.profile is not None
            turns.profile.runcall(run, self)

        TransferThread.turn = counted_turn  # type: ignore[method-assign]
        send.OutgoingRead.count = counted_bytes  # type: ignore[method-assign]
        if profiles:
            TransferThread._run = profiled_run  # type: ignore[method-assign]


class Forward:
    """The steps of one prompt. ``--layer-ms`` is about the time of a layer for a whole chunk."""

    def __init__(self, rank: Rank, args: argparse.Namespace) -> None:
        self.rank, self.chunk, self.tokens = rank, args.chunk, args.tokens
        self._small = torch.rand(64, 64)
        self._large = torch.rand(512, 512)
        began, count = time.perf_counter(), 0
        while time.perf_counter() < began + 0.5:
            torch.mm(self._large, self._large)
            count += 1
        self._products = max(1, round(args.layer_ms * 1e-3 * count / (time.perf_counter() - began)))
        self._stack = torch.rand(self._products, 512, 512)
        self._out = torch.empty_like(self._stack)

    def run(self, engine: PrefillingEngine | None) -> tuple[float, float]:
        """Compute a prompt. Returns its seconds by the clock, and on the core."""
        prefills = self.rank.worker.prefills
        assert prefills is not None
        began, core = time.perf_counter(), time.thread_time()
        for start in range(0, self.tokens, self.chunk):
            if engine is not None:
                engine.plan(start, min(start + self.chunk, self.tokens))
            for name in self.rank.layers:
                for _ in range(SHORT_OPERATIONS):
                    torch.mm(self._small, self._small)
                    sum(range(200))
                if engine is not None:
                    prefills.layer_begins()
                torch.bmm(self._stack, self._stack, out=self._out)
                if engine is not None:
                    prefills.layer_computed(name)
            if engine is not None:
                engine.end()
        return time.perf_counter() - began, time.thread_time() - core


def own_core(cores: list[int]) -> str:
    """This thread gets the last core, all other threads of this process the others. Returns what was done."""
    if len(cores) < 2:
        return "one core for all"
    me = threading.get_native_id()
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores[-1:] if int(task.name) == me else cores[:-1])
    return f"the engine's thread has a core of its own, all else shares {len(cores) - 1}"


def core_clock(rank: Rank) -> Callable[[], float]:
    """The seconds that the rank's transfer thread has run."""
    thread = rank.worker._transfer_thread
    assert thread is not None and thread._thread.ident is not None
    clock = time.pthread_getcpuclockid(thread._thread.ident)
    return lambda: time.clock_gettime(clock)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    turns = Turns(args.profile)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:-1] or cores)  # which D, and the threads of this process, take over
    blocks = 2 * -(-args.tokens // BLOCK_SIZE)
    form = {"layers": args.layers, "total_heads": HEADS, "content": CONTENT, "block_size": BLOCK_SIZE, "blocks": blocks}
    settings = {"plane": args.plane} | PATIENCE
    d = RemoteRank(engine_id="engine-d", settings=settings, **form)
    p = Rank(engine_id="engine-p", settings=Settings(**settings), **form)
    ids = list(range(0, blocks, 2))
    pairs: list[dict[str, float]] = []
    try:
        where, forward, transfer_core = own_core(cores), Forward(p, args), core_clock(p)
        for number in range(-2, args.pairs):
            times: dict[str, tuple[float, float]] = {}
            figures: dict[str, float] = {}
            for kind in ("alone", "leaves") if number % 2 else ("leaves", "alone"):
                if kind == "alone":
                    times[kind] = forward.run(None)
                    continue
                engine = PrefillingEngine([p], ids, args.tokens, f"p{number}")
                engine.begin(step_tokens=args.chunk)
                d.load(f"d{number}", engine.token, peer([p]), ids, args.tokens, step=args.chunk)
                before = turns.turns, turns.sent, transfer_core()
                times[kind] = forward.run(engine)
                left = turns.sent - before[1]
                engine.grant()
                if not wait(lambda: f"p{number}" in p.sent, [p]) or not d.received()[f"d{number}"]:  # noqa: B023
                    raise SystemExit(f"prompt {number} was not handed over")
                total = turns.sent - before[1]
                figures = {
                    "turns": turns.turns - before[0],
                    "transfer_ms": 1e3 * (transfer_core() - before[2]),
                    "before_end": left / total,
                    "mib": total / 2**20,
                }
            if number >= 0:
                clock, core = (times["leaves"][n] / times["alone"][n] for n in (0, 1))
                pairs.append(figures | {"clock": clock, "core": core, "alone_ms": 1e3 * times["alone"][0]})
    finally:
        p.close()
        d.close()
    if turns.profile is not None:
        pstats.Stats(turns.profile).sort_stats("tottime").print_stats(45)
    middle = {name: statistics.median(pair[name] for pair in pairs) for name in pairs[0]}
    return {
        "plane": args.plane,
        "tokens": args.tokens,
        "cores": where,
        "pairs": len(pairs),
        "alone_ms": round(middle["alone_ms"]),
        "slower_percent": round(100 * (middle["clock"] - 1), 2),
        "core_slower_percent": round(100 * (middle["core"] - 1), 2),
        "transfer_ms": round(middle["transfer_ms"], 1),
        "turns": round(middle["turns"]),
        "mib": round(middle["mib"], 1),
        "before_end": round(middle["before_end"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plane", default="tcp", help="one over which P sends")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--layer-ms", type=float, default=22.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args)
    print(tables.table(list(result), [[str(value) for value in result.values()]]))
    report.write(args.json, {"figures": result})


if __name__ == "__main__":
    main()
