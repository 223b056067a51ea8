"""What a hand-over costs on a decoder that is busy, and what it costs those that it decodes for.

    python benchmarks/engines/busy.py [--json FILE] [--only kvferry] [--sequences 32] [--tokens 2001 8001]
    python benchmarks/engines/busy.py --device cpu --json FILE         # KVFerry alone, a tiny model, to try it out

Two GPUs of one host, two engines per connector, P on the first GPU and D on the second (``--gpus 0 0``: both on one),
with a Llama of 128 KiB of KV per token whose weights are made up: CUDA graphs, asynchronous scheduling, policy
``recompute``. The connectors take turns, A B B A, while the other one's engines are idle.

A turn: D starts to decode ``--sequences`` sequences, which end when the turn does. It decodes for a while without
anything beside it: the quiet gaps. Then requests come at a fixed rate: a hand-over, the same prompt again, which D has
in its prefix cache by then, the next hand-over, and so on. Both compute one token. Each row has the medians of both
times to first token, and of what the hand-over took beyond the local hit behind it. P finds its prompts in its own
prefix cache and has answered before D is asked; of a length that would fill this, it holds fewer, and a turn has fewer
samples.

All times are taken in D's engine process, see ``busy_probe.py``; HTTP is in none of them. The gaps of the others are
those within one period after a hand-over (``gap``), after a local hit (``local_gap``), and before all of them
(``quiet``), of equally many seconds.

``fresh``: D's free blocks are in the order of memory when a turn begins. ``scattered``: they are shuffled, so that
hardly two blocks of a table lie side by side. D's prefix cache is empty in both, so no block is evicted.

Every hand-over is checked: its tokens came from P, and D computed one. One per connector and order is compared byte for
byte. A turn is measured again, at most four times, if the sequences did not decode all the while, or if a hand-over
failed in it; the reasons are under ``measured_again`` of the result.

With less ``--budget`` there are fewer rounds over all cells. Without ``--kv-gib`` the engines share their GPU's memory.
What could not be measured, a connector or a cell, is under ``left_out`` of the result, with the reason.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.engines import busy_turns
from benchmarks.engines.busy_turns import BusyPair, Cell
from benchmarks.engines.engine_pair import (
    CPU,
    GPU,
    OURS,
    THEIRS,
    Words,
    gpus_of,
    graph_sizes,
    servers,
    start,
)
from benchmarks.harness import report
from tests.support.engines import ServerGroup
from tests.support.server import EngineError
from tests.support.tiny_model import build_model

CONNECTORS = {"kvferry": OURS, "nixl": THEIRS}
ORDERS = ("fresh", "scattered")
PLANS: dict[str, dict[str, Any]] = {
    "cuda": {
        "setup": GPU, "only": ("kvferry", "nixl"), "sequences": (32, 0, 8, 128),
        "tokens": (2001, 8001, 32001, 128001), "samples": 20, "pairs": 4, "period": 0.1,
    },
    "cpu": {
        "setup": CPU, "only": ("kvferry",), "sequences": (4, 0), "tokens": (97, 385), "samples": 4, "pairs": 2,
        "period": 0.25, "kv_gib": 1,
    },
}  # fmt: skip
"""What is measured where nothing else is asked for. ``pairs``: hand-overs of each length in a turn, at most."""
LONGEST = 8192
"""Tokens of a background sequence at least. It should last longer than a turn, also where the host stands still."""
STEP = 32768
"""Tokens that an engine computes in one step at most: with more, it would need more memory beside its KV."""
BESIDE_KV_GIB = 7
"""Of an engine on a GPU: weights, activations of ``STEP`` tokens, CUDA graphs, staging memory."""


def longest_of(args: Namespace) -> int:
    """Tokens of a sequence."""
    return max(LONGEST, -(-(max(args.tokens) + 256) // 256) * 256)


def kv_gib_of(args: Namespace) -> int:
    """GiB of KV for each engine: an equal share of what its GPU has beside ``BESIDE_KV_GIB`` for each. Raises
    EngineError where the longest prompt does not fit."""
    import torch

    engines = len(args.only) * (2 if len(set(args.gpus)) == 1 else 1)
    memory = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in args.gpus)
    found = int(memory / engines / 2**30 - BESIDE_KV_GIB)
    needed = -(-longest_of(args) * args.setup.spec.kv_bytes_per_token // 2**30)
    if found < needed:
        raise EngineError(f"{max(args.tokens)} tokens need {needed} GiB of KV, each of {engines} engines has {found}")
    return found


def prompts_of(args: Namespace) -> dict[int, int]:
    """How many prompts of each length P holds, one at least: each length may take an equal share of P's KV, of which
    a tenth is left."""
    share = 0.9 * (args.kv_gib << 30) / args.setup.spec.kv_bytes_per_token / len(args.tokens)
    return {tokens: max(1, min(args.pairs, int(share // tokens))) for tokens in args.tokens}


def start_pair(group: ServerGroup, connector: str, model: Path, args: Namespace) -> BusyPair:
    longest, sizes = longest_of(args), {"prefill": (1, 2)}
    prefill, decode = (
        start(
            group, f"{connector}-{role}", model, args.setup, gpus=gpus, kv_gib=args.kv_gib,
            sequences=max(args.sequences), probed=role == "decode", connector=connector, max_model_len=longest,
            extra=args.setup.nixl if connector == THEIRS else args.kv_config, policy=args.policy,
            arguments=["--worker-extension-cls", "benchmarks.engines.busy_probe.CopyProbe",
                       "--max-num-batched-tokens", str(min(longest, STEP)),
                       *(["-cc.cudagraph_mode=" + args.cudagraph_mode] if args.cudagraph_mode else [])],
            graph_sizes=sizes.get(role, graph_sizes(args.sequences)),
        )
        for role, gpus in zip(("prefill", "decode"), gpus_of(args), strict=True)
    )  # fmt: skip
    words = Words(connector, args.setup.spec.vocabulary)
    return BusyPair(connector, prefill.server, decode, words, longest, args.period)


def measure(args: Namespace) -> dict[str, Any]:
    began = time.monotonic()
    if args.kv_gib is None:
        args.kv_gib = kv_gib_of(args)
    spec = args.setup.spec
    model = build_model(
        args.folder / "model", replace(spec, max_tokens=max(spec.max_tokens, longest_of(args))), weights=False
    )
    cells = [Cell(*cell) for cell in product(args.orders, args.sequences)]
    left_out: dict[str, str] = {}
    with servers(args) as group:
        pairs = [start_pair(group, CONNECTORS[name], model, args) for name in args.only]
        for pair in pairs:
            with named(left_out, pair.connector):
                group.wait_ready(args.start_seconds, pair.engines)
        for pair in pairs:
            if pair.connector not in left_out:
                with named(left_out, pair.connector):
                    warm_up(pair, args)
        if OURS in left_out:
            raise EngineError(left_out[OURS])
        pairs = [pair for pair in pairs if pair.connector not in left_out]
        for cell, pair in product({cell.sequences: cell for cell in cells}.values(), pairs):
            with named(left_out, f"{pair.connector}, {cell}"):
                pair.turn(cell, 1, keep=False)  # D pays once for what it pays once for
        print(f"{time.monotonic() - began:.0f} s: measuring", flush=True)
        for number in report.rounds(-(-args.samples // args.pairs), began, args.budget):
            for cell in cells:
                for pair in pairs if number % 2 else reversed(pairs):
                    if (name := f"{pair.connector}, {cell}") not in left_out:
                        with named(left_out, name):
                            pair.turn(cell, args.pairs)
            result = result_of(pairs, args, number) | {"left_out": left_out}
            report.save(args.json, result)  # what follows may not end
        for pair in pairs:
            pair.check_failed()
    if not result["rows"]:
        raise EngineError(f"nothing could be measured: {left_out}")
    return result


@contextmanager
def named(left_out: dict[str, str], name: str) -> Iterator[None]:
    """What cannot be measured is named, with the reason."""
    try:
        yield
    except EngineError as error:
        left_out[name] = str(error).splitlines()[0]
        print(f"left out: {name}: {error}", flush=True)


def warm_up(pair: BusyPair, args: Namespace) -> None:
    """Have P compute the prompts, and compare a hand-over's bytes."""
    pair.decode.server.rpc("busy_watch")
    pair.prefill_all(prompts_of(args))
    pair.connect()
    for order in args.orders:
        pair.collect(order)
        pair.look(order, sorted(args.tokens)[len(args.tokens) // 2 - 1])
        print(f"{order}, {pair.connector}: bytes equal; {pair.in_sequence[order]:.1%} of D's blocks in sequence")


def result_of(pairs: list[BusyPair], args: Namespace, rounds: int) -> dict[str, Any]:
    return {
        "rows": [row for pair in pairs for row in busy_turns.rows_of(pair)],
        "device": args.device, "kv_gib": args.kv_gib, "gpus_of_p_and_d": list(args.gpus),
        "policy": args.policy, "kv_config": args.kv_config, "rounds": rounds,
        "measured_again": [why for pair in pairs for why in pair.repeated],
        "period_s": args.period, "cuda_graphs": args.device == "cuda", "cudagraph_mode": args.cudagraph_mode,
    }  # fmt: skip


def arguments() -> ArgumentParser:
    parser = report.engine_options(__doc__, "busy")
    parser.add_argument("--only", choices=tuple(CONNECTORS), nargs="+", help="connectors")
    parser.add_argument("--sequences", "--seqs", type=int, nargs="+", help="that D decodes; the first comes first")
    parser.add_argument("--tokens", type=int, nargs="+", help="of prompts; a multiple of the block, plus 1")
    parser.add_argument("--orders", choices=ORDERS, nargs="+", default=ORDERS, help="of D's free blocks")
    parser.add_argument("--cudagraph-mode", help="of vLLM: NONE, PIECEWISE, ...; where unset as vLLM chooses")
    parser.add_argument("--samples", type=int, help="hand-overs for each cell")
    parser.add_argument("--budget", type=float, default=500, help="seconds, with the start of the engines")
    parser.add_argument("--period", type=float, help="seconds from one request to the next")
    parser.add_argument("--policy", choices=("fail", "recompute"), default="recompute", help="kv_load_failure_policy")
    parser.add_argument("--kv-config", type=json.loads, default={}, help="kv_connector_extra_config of KVFerry, JSON")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    report.fill_in(args, PLANS[args.device])
    for tokens in args.tokens:
        if tokens % args.setup.block != 1:
            parser.error(f"--tokens: {tokens} is not a multiple of {args.setup.block} plus one")
    return report.finish(args.json, lambda: measure(args), busy_turns.show)


if __name__ == "__main__":
    sys.exit(main())
