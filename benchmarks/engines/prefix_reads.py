"""What reading a prefix from another engine costs, beside computing it and beside the engine's own prefix cache.

    python benchmarks/engines/prefix_reads.py [--json FILE] [--tokens 1024 8192] [--samples 12] [--budget 380]
    python benchmarks/engines/prefix_reads.py --device cpu [--json FILE]
    python benchmarks/engines/prefix_reads.py --device cpu --small                    # for CI: no figure holds

Two GPUs of one host, one engine on each, both ``kv_both`` with ``prefix_reads``, plane ``cuda_ipc``: the form of
Llama-8B with made-up weights, CUDA graphs, asynchronous scheduling. On the CPU: a tiny model.

Turns by length: a random prefix of so many tokens, and behind it other new tokens each time. The source computes the
first such turn. The reader is asked for a second one and names the source, then for a third one, whose prefix it has by
then. The times to first token are those of ``busy_probe.py``. Once all engines are idle; once the source, which has
computed the prefixes before, decodes ``--sequences`` sequences. Gaps are those between their tokens, within one period
after a read has arrived, and before all reads (``quiet``).

Conversations: those of an agent, and some of Mooncake's trace (``benchmarks/router/loads.py``). Either the turns
alternate between both engines, or the source is P and the reader is D, which decodes all answers. Each once with the
engine of the last answer named as a source, and once without.

A read of which not all came is ``missed``: it is counted, and its time is in no figure.
With less ``--budget`` there are fewer rounds over all lengths.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.engines.engine_pair import CPU, LLAMA_8B, OURS, Setup, Words, gpus_of, graph_sizes, servers, start
from benchmarks.engines.prefix_pair import ALTERNATE, P_AND_D, WAYS, PrefixPair, Turn
from benchmarks.harness import pages, report
from benchmarks.router.loads import TURNS, agent_turns
from tests.support.engines import ServerGroup
from tests.support.tiny_model import build_model

Row = dict[str, Any]
PLANS: dict[str, Row] = {
    "cuda": {
        "setup": Setup(replace(LLAMA_8B, max_tokens=36864), block=16),
        "tokens": [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768], "sequences": 32, "samples": 12, "pairs": 3,
        "period": 0.1, "settle": 0.02, "kv_gib": 40, "longest": 36864, "agents": 2, "agent": (8192, 8), "traced": 4,
    },
    "cpu": {
        "setup": CPU, "tokens": [256, 512, 1024, 2048], "sequences": 4, "samples": 4, "pairs": 2, "period": 0.5,
        "settle": 0.3, "kv_gib": 1, "longest": 8192, "agents": 1, "agent": (1024, 5, 632, 64),
        "traced": 1,
    },
}  # fmt: skip
"""What is measured where nothing else is asked for."""
SMALL = {"tokens": [96, 192], "sequences": 2, "samples": 1, "agent": (96, 3, 128, 64), "traced": 0}
KV_CONFIG = {"cuda": {"plane": "cuda_ipc"}, "cpu": {"prefix_wait_seconds": 10.0}}
CHUNK = 8192
"""Of ``--max-num-batched-tokens``."""


def start_pair(group: ServerGroup, args: Namespace) -> PrefixPair:
    setup = args.setup
    model = build_model(args.folder / "model", setup.spec, weights=False)
    source, reader = (
        start(
            group, name, model, setup, gpus=gpus, kv_gib=args.kv_gib, sequences=args.sequences, connector=OURS,
            extra={"prefix_reads": True} | args.kv_config, max_model_len=args.longest,
            arguments=["--max-num-batched-tokens", str(CHUNK)],
            graph_sizes=sorted({*graph_sizes([args.sequences]), setup.block}),
        )
        for name, gpus in zip(("source", "reader"), gpus_of(args), strict=True)
    )  # fmt: skip
    words = Words(args.seed, setup.spec.vocabulary)
    return PrefixPair(source, reader, words, args.longest, setup.block, CHUNK, args.settle)


def measure(args: Namespace) -> Row:
    began = time.monotonic()
    with servers(args) as group:
        pair = start_pair(group, args)
        group.wait_ready(args.start_seconds)
        pair.introduce()
        pair.idle(args.tokens, 1, keep=False)  # the first one of a length pays for more than the later ones
        pair.idle(args.tokens[:1], 2, keep=False)
        agents = [agent_turns(pair.words.rng, *args.agent) for _ in range(args.agents)]
        fit = [turns for turns in json.loads(TURNS.read_text()) if sum(turns[-1]) < args.longest]
        loads = {"an agent's": agents, "Mooncake's": fit[: args.traced]}
        for load, form, named in product(loads, (ALTERNATE, P_AND_D), (True, False)):
            pair.replay(form, named, load, loads[load])
        print(f"{time.monotonic() - began:.0f} s: conversations replayed", flush=True)
        for _ in report.rounds(-(-args.samples // args.pairs), began, args.budget):
            count = min(args.pairs, args.samples)
            pair.idle(args.tokens, count)
            if args.sequences:
                pair.busy(args.tokens, count, args.sequences, args.period)
            report.save(args.json, result_of(pair, args))  # what follows may not end
        return result_of(pair, args)


def result_of(pair: PrefixPair, args: Namespace) -> Row:
    rows = [row_of(pair, *cell) for cell in dict.fromkeys((sample.sequences, sample.tokens) for sample in pair.samples)]
    replays = [replay_row(pair.turns, *one) for one in dict.fromkeys(map(replay_of, pair.turns))]
    return {
        "device": args.device, "policy": "recompute", "kv_config": args.kv_config,
        "period_s": args.period, "new_tokens": pair.new, "figures": figures_of(rows), "rows": rows,
        "replays": replays, "measured_again": pair.repeated,
    }  # fmt: skip


def row_of(pair: PrefixPair, sequences: int, tokens: int) -> Row:
    """Medians and 99th percentiles of one length."""
    samples = [sample for sample in pair.samples if (sample.sequences, sample.tokens) == (sequences, tokens)]
    row: Row = {"sequences": sequences, "tokens": tokens, "samples": len(samples)}
    for way in WAYS:
        times = [sample.ttft[way] for sample in samples if way in sample.ttft]
        row |= {f"{way}_ms": report.percentile(times, 50), f"{way}_p99_ms": report.percentile(times, 99)}
        row[f"all_{way}_ms"] = [round(time, 2) for time in times]
    both = [sample.ttft["read"] - sample.ttft["own"] for sample in samples if "read" in sample.ttft]
    gaps, quiet = [gap for sample in samples for gap in sample.gaps], pair.quiet.get(sequences, [])
    row |= {"over_own_ms": report.percentile(both, 50), "missed": len(samples) - len(both)}
    row |= report.spread("gap", gaps) | report.spread("quiet", quiet)
    return row | {"gaps": len(gaps), "quiet_gaps": len(quiet)}


def replay_of(turn: Turn) -> tuple[str, str, bool]:
    return turn.load, turn.form, turn.named


def replay_row(turns: list[Turn], load: str, form: str, named: bool) -> Row:
    found = [turn for turn in turns if replay_of(turn) == (load, form, named)]
    return {
        "load": load, "form": form, "named": named, "turns": len(found),
        "prompt": statistics.median(turn.prompt for turn in found),
        "new": statistics.median(turn.new for turn in found),
        "computed": statistics.median(turn.computed for turn in found),
        "most_over_new": max(turn.computed - turn.new for turn in found),
        "ttft_ms": round(statistics.median(turn.ttft for turn in found), 2),
    }  # fmt: skip


def figures_of(rows: list[Row]) -> dict[str, float]:
    """``crossover_tokens``: from this length on a read takes less than computing, in the median of idle engines."""
    figures: dict[str, float] = {}
    idle = sorted((row for row in rows if not row["sequences"]), key=lambda row: -row["tokens"])
    for row in idle:
        if row["read_ms"] is None or row["read_ms"] >= row["computed_ms"]:
            break
        figures["crossover_tokens"] = row["tokens"]
    return figures


def show(result: Row) -> None:
    print(pages.table(result["rows"], pages.OF["prefix-reads"].columns))
    print(pages.table(result["replays"], pages.OF["prefix-replays"].columns))
    print(json.dumps(result["figures"]))


def arguments() -> ArgumentParser:
    parser = report.engine_options(__doc__, "prefix_reads")
    parser.add_argument("--tokens", type=int, nargs="+", help="of prefixes; multiples of the block")
    parser.add_argument("--sequences", type=int, help="that the source decodes; 0: it is idle only")
    parser.add_argument("--samples", type=int, help="prefixes of each length")
    parser.add_argument("--budget", type=float, default=380, help="seconds, with the start of the engines")
    parser.add_argument("--period", type=float, help="seconds from one request to the next, beside sequences")
    parser.add_argument("--kv-config", type=json.loads, default={}, help="kv_connector_extra_config, JSON")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="few short prefixes")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    report.fill_in(args, PLANS[args.device] | (SMALL if args.small else {}))
    args.kv_config = KV_CONFIG[args.device] | args.kv_config
    block = args.setup.block
    wrong = [tokens for tokens in args.tokens if tokens <= 0 or tokens % block]
    if wrong or max(args.tokens) + block >= args.longest:
        parser.error(f"--tokens: {args.tokens}, expected multiples of {block} below {args.longest}")
    return report.finish(args.json, lambda: measure(args), show)


if __name__ == "__main__":
    sys.exit(main())
