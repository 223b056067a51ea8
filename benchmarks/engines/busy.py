"""What a hand-over costs on a decoder that is busy, and what it costs those that it decodes for.

    python benchmarks/engines/busy.py [--json FILE] [--only kvferry] [--sequences 32] [--tokens 2001 8001]
    python benchmarks/engines/busy.py --device cpu --json FILE         # KVFerry alone, a tiny model, to try it out

Two GPUs of one host, two engines per connector, P on the first GPU and D on the second (``--gpus 0 0``: both on one),
with a Llama of 128 KiB of KV per token whose weights are made up: CUDA graphs, asynchronous scheduling, policy
``recompute``. The connectors take turns, A B B A, while the other one's engines are idle.

A turn: D starts to decode ``--sequences`` sequences, which end when the turn does. It decodes for a while without
anything beside it: the quiet gaps. Then requests come at a fixed rate: a hand-over, the same prompt again, which D has
in its prefix cache by then, the next hand-over, and so on. Both compute one token. Each row has the medians of both
times to first token. The connectors are compared by the first; the second, the local hit, is never subtracted. P finds
its prompts in its own prefix cache and has answered before D is asked.

All times are taken in D's engine process, from the request's arrival in the engine's queue to the end of the step that
made its token, see ``busy_probe.py``; HTTP is in none of them. The gaps of the others are the times between their
tokens within one period after a hand-over (``gap``), after a local hit (``local_gap``), and before all of them
(``quiet``), of equally many seconds.

``fresh``: D's free blocks are in the order of memory when a turn begins. ``scattered``: they are shuffled, so that
hardly two blocks of a table lie side by side. D's prefix cache is empty in both, so no block is evicted.

Every hand-over is checked: its tokens came from P, and D computed one. One per connector and order is compared byte for
byte. A turn is measured again, at most four times, if the sequences did not decode all the while, or if a hand-over
failed in it; the reasons are printed, and are under ``measured_again`` of the result.

Rounds go over all cells; with less ``--budget`` there are fewer rounds, not fewer cells. After each round the file of
``--json`` is written. The defaults suit GPUs of 140 GiB; with 80 GiB give ``--kv-gib 30`` and fewer ``--tokens``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.engines import busy_figures
from benchmarks.engines.busy_turns import BusyPair, Cell, Pace
from benchmarks.engines.engine_pair import CPU, GPU, OURS, THEIRS, Setup, graph_sizes
from benchmarks.harness import report
from tests.support.engines import ServerGroup, python_path
from tests.support.server import EngineError
from tests.support.tiny_model import build_model

ROOT = Path(__file__).resolve().parents[2]
CONNECTORS = {"kvferry": OURS, "nixl": THEIRS}
ORDERS = ("fresh", "scattered")


@dataclass(frozen=True)
class Plan:
    """What is measured where nothing else is asked for."""

    setup: Setup
    connectors: tuple[str, ...]
    sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    samples: int
    pairs: int
    period: float
    kv_gib: int
    scheduler: str


PLANS = {
    "cuda": Plan(
        GPU, ("kvferry", "nixl"), sequences=(32, 0, 128),
        tokens=(513, 2001, 8001, 32001), samples=20, pairs=4, period=0.1, kv_gib=56, scheduler="ProbedAsyncScheduler",
    ),
    "cpu": Plan(
        CPU, ("kvferry",), sequences=(4, 0), tokens=(97, 385), samples=4, pairs=2, period=0.25, kv_gib=1,
        scheduler="ProbedScheduler",
    ),
}  # fmt: skip
LONGEST = 8192
"""Tokens of a background sequence at least. It should last longer than a turn, also where the host stands still."""


def start(group: ServerGroup, connector: str, model: Path, plan: Plan, args: argparse.Namespace) -> BusyPair:
    setup, longest = plan.setup, max(LONGEST, -(-(max(args.tokens) + 256) // 256) * 256)
    extra = setup.nixl if connector == THEIRS else args.kv_config
    most = max(args.sequences)
    notes = group.logs / f"{connector}-notes.jsonl"
    notes.write_text("")
    engines = []
    on = [(gpu,) for gpu in args.gpus] if setup.gpus[0] else setup.gpus
    for role, gpus in zip(("prefill", "decode"), on, strict=True):
        arguments = ["--load-format", "dummy", "--disable-uvicorn-access-log", "--max-num-seqs", str(most + 8)]
        arguments += ["--worker-extension-cls", "benchmarks.engines.busy_probe.CopyProbe"]
        environment = {"PYTHONPATH": python_path()}
        if role == "decode":
            arguments += ["--scheduler-cls", f"benchmarks.engines.busy_probe.{plan.scheduler}"]
            environment["KVFERRY_BUSY_NOTES"] = str(notes)
        if not gpus:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(args.kv_gib)
        engines.append(
            group.engine(
                f"{connector}-{role}", model, connector=connector, extra=extra, dtype=setup.spec.dtype,
                block_size=setup.block, max_model_len=longest, gpus=gpus, kv_cache_bytes=args.kv_gib << 30,
                policy=args.policy, kv_bytes=False, arguments=arguments, environment=environment,
                graph_sizes=graph_sizes(args.sequences) if role == "decode" else (1, 2),
            )
        )  # fmt: skip
    rng = random.Random(connector)
    prefill, decode = engines
    return BusyPair(connector, prefill, decode, rng, setup.spec.vocabulary, notes, longest=longest)


def measure(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    began = time.monotonic()
    model = build_model(args.folder / "model", plan.setup.spec, weights=False)
    cells = [Cell(order, sequences) for order, sequences in product(args.orders, args.sequences)]
    with ServerGroup(args.folder / "logs") as group:
        pairs = [start(group, CONNECTORS[name], model, plan, args) for name in args.only]
        group.wait_ready(args.start_seconds)
        for pair in pairs:
            warm_up(pair, cells, args, plan)
        print(f"{time.monotonic() - began:.0f} s: measuring", flush=True)
        rounds = measure_rounds(pairs, cells, args, plan, began)
        result = result_of(pairs, args, rounds)
        for pair in pairs:
            pair.check_failed()
    return result


def measure_rounds(pairs: list[BusyPair], cells: list[Cell], args: argparse.Namespace, plan: Plan, began: float) -> int:
    """Measure all cells again and again, until there are enough samples or no time for more; the number of rounds."""
    pace = Pace(plan.pairs, args.period)
    rounds: int = -(-args.samples // plan.pairs)
    for number in range(1, rounds + 1):
        round_began = time.monotonic()
        for cell in cells:
            for pair in pairs if number % 2 else reversed(pairs):
                pair.turn(cell, pace)
        now = time.monotonic()
        print(f"{now - began:.0f} s: round {number} of {rounds} took {now - round_began:.0f} s", flush=True)
        if args.json:  # what follows may not end
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(result_of(pairs, args, number)))
        if number < rounds and 2 * now - began - round_began > args.budget:
            print(f"{number * plan.pairs} of {args.samples} samples for each cell: the budget is {args.budget:.0f} s")
            return number
    return rounds


def warm_up(pair: BusyPair, cells: list[Cell], args: argparse.Namespace, plan: Plan) -> None:
    """Have P compute the prompts, compare a hand-over's bytes, and let D pay once for what it pays once for."""
    pair.decode.rpc("busy_watch")
    pair.prefill_all(args.tokens, plan.pairs)
    pair.connect(Pace(1, args.period))
    for order in args.orders:
        pair.collect(order)
        pair.look(order, sorted(args.tokens)[len(args.tokens) // 2 - 1])
        said = ", ".join(f"{share:.1%}" for share in pair.in_sequence[order])
        print(f"{order}, {pair.connector}: bytes equal; blocks in sequence on P, D: {said}", flush=True)
    for cell in dict.fromkeys(Cell(cells[0].order, cell.sequences) for cell in cells):
        pair.turn(cell, Pace(1, args.period), keep=False)


def result_of(pairs: list[BusyPair], args: argparse.Namespace, rounds: int) -> dict[str, Any]:
    for pair in pairs:
        pair.add_logged()
    rows = [row for pair in pairs for row in busy_figures.rows_of(pair)]
    how = {
        "device": args.device,
        "gpus_of_p_and_d": list(args.gpus),
        "policy": args.policy,
        "kv_config": args.kv_config,
        "rounds": rounds,
        "measured_again": [why for pair in pairs for why in pair.repeated],
    }
    return busy_figures.result_of(rows) | how | {"period_s": args.period, "cuda_graphs": args.device == "cuda"}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=tuple(PLANS), default="cuda")
    parser.add_argument("--only", choices=tuple(CONNECTORS), nargs="+", help="connectors")
    parser.add_argument("--sequences", "--seqs", type=int, nargs="+", help="that D decodes; the first comes first")
    parser.add_argument("--tokens", type=int, nargs="+", help="of prompts; a multiple of the block, plus 1")
    parser.add_argument("--orders", choices=ORDERS, nargs="+", help="of D's free blocks")
    parser.add_argument("--samples", type=int, help="hand-overs for each cell")
    parser.add_argument("--budget", type=float, default=500, help="seconds, with the start of the engines")
    parser.add_argument("--period", type=float, help="seconds from one request to the next")
    parser.add_argument("--policy", choices=("fail", "recompute"), default="recompute", help="kv_load_failure_policy")
    parser.add_argument("--kv-config", type=json.loads, default={}, help="kv_connector_extra_config of KVFerry, JSON")
    parser.add_argument("--gpus", type=int, nargs=2, default=(0, 1), metavar=("P", "D"), help="0 0: both on one GPU")
    parser.add_argument("--kv-gib", type=int, help="KV cache of each engine")
    parser.add_argument("--start-seconds", type=float, default=400, help="after which engines must be up")
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench" / "busy", help="for model and logs")
    return parser


def fill_in(args: argparse.Namespace, plan: Plan) -> None:
    """What was not asked for is the plan's."""
    args.only = args.only or list(plan.connectors)
    args.sequences = args.sequences or list(plan.sequences)
    args.tokens = args.tokens or list(plan.tokens)
    args.orders = args.orders or list(ORDERS)
    args.samples = args.samples or plan.samples
    args.period = args.period or plan.period
    args.kv_gib = args.kv_gib or plan.kv_gib


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    began = time.monotonic()
    plan = PLANS[args.device]
    fill_in(args, plan)
    for tokens in args.tokens:
        if tokens % plan.setup.block != 1:
            parser.error(f"--tokens: {tokens} is not a multiple of {plan.setup.block} plus one")
    try:
        result = measure(args, plan)
    except EngineError as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    busy_figures.show(result)
    print(f"{time.monotonic() - began:.0f} s in all")
    report.write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
