"""What reading a prefix from another engine costs, beside computing it and beside the engine's own prefix cache.

    python benchmarks/engines/prefix_reads.py [--json FILE] [--tokens 1024 8192] [--samples 12] [--budget 380]
    python benchmarks/engines/prefix_reads.py --device cpu [--json FILE]
    python benchmarks/engines/prefix_reads.py --device cpu --small                    # for CI: no figure holds

Two GPUs of one host, one engine on each, both ``kv_both`` with ``prefix_reads``, plane ``cuda_ipc``: the form of
Llama-8B with made-up weights, CUDA graphs, asynchronous scheduling. On the CPU: a tiny model.

Turns by length: a random prefix of so many tokens, and behind it other new tokens each time. The source computes the
first such turn. The reader is asked for a second one and names the source, then for a third one, whose prefix it has by
then. All three times to first token are taken in the engine's process, from the request's arrival in its queue to the
end of the step that made its token (``busy_probe.py``); HTTP is in none of them. Once all engines are idle; once the
source, which has computed the prefixes before, decodes ``--sequences`` sequences. Gaps are those between their tokens,
within one period after a read has arrived, and before all reads (``quiet``).

An agent's replay: a conversation grows by 632 tokens a turn in the median. Either its turns alternate between both
engines, or the source is P and the reader is D, which decodes all answers. Each once with the engine of the last answer
named as a source, and once without. P's computed tokens are those that vLLM counts as such.

A read of which not all came is ``missed``: it is counted, and its time is in no figure.

Rounds go over all lengths; with less ``--budget`` there are fewer rounds, not fewer lengths.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

from benchmarks.engines.busy_figures import most, percentile
from benchmarks.engines.engine_pair import CPU, LLAMA_8B, OURS, Setup, graph_sizes
from benchmarks.engines.prefix_pair import ALTERNATE, P_AND_D, WAYS, PrefixPair, Replay, Sample, Turn
from benchmarks.harness import pages, report
from tests.support.engines import ServerGroup, python_path
from tests.support.server import EngineError, metric_sum
from tests.support.tiny_model import build_model

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is measured where nothing else is asked for. ``chunk``: of ``--max-num-batched-tokens``."""

    setup: Setup
    tokens: tuple[int, ...]
    sequences: int
    samples: int
    pairs: int
    period: float
    settle: float
    kv_gib: int
    longest: int
    chunk: int
    replay: Replay
    kv_config: dict[str, Any]
    scheduler: str


PLANS = {
    "cuda": Plan(
        Setup(replace(LLAMA_8B, max_tokens=36864), block=16, gpus=((0,), (1,))),
        tokens=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768), sequences=32, samples=12, pairs=3, period=0.1,
        settle=0.02, kv_gib=40, longest=36864, chunk=8192, replay=Replay(2, 8192, 8), kv_config={"plane": "cuda_ipc"},
        scheduler="ProbedAsyncScheduler",
    ),
    "cpu": Plan(
        CPU, tokens=(256, 512, 1024, 2048), sequences=4, samples=4, pairs=2, period=0.5, settle=0.3, kv_gib=1,
        longest=8192, chunk=8192, replay=Replay(1, 1024, 5, answer=64), kv_config={"prefix_wait_seconds": 10.0},
        scheduler="ProbedScheduler",
    ),
}  # fmt: skip
SMALL = {"tokens": [96, 192], "sequences": 2, "samples": 1, "replay": Replay(1, 96, 3, growth=128, answer=64)}


def start(group: ServerGroup, args: argparse.Namespace, plan: Plan) -> PrefixPair:
    setup = plan.setup
    model = build_model(args.folder / "model", setup.spec, weights=False)
    on = [(gpu,) for gpu in args.gpus] if setup.gpus[0] else setup.gpus
    engines, notes = [], []
    for name, gpus in zip(("source", "reader"), on, strict=True):
        path = group.logs / f"{name}-notes.jsonl"
        path.write_text("")
        environment = {"PYTHONPATH": python_path(), "KVFERRY_BUSY_NOTES": str(path)}
        if not gpus:
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(args.kv_gib)
        arguments = ["--load-format", "dummy", "--disable-uvicorn-access-log"]
        arguments += ["--max-num-seqs", str(args.sequences + 8), "--max-num-batched-tokens", str(plan.chunk)]
        arguments += ["--scheduler-cls", f"benchmarks.engines.busy_probe.{plan.scheduler}"]
        engines.append(
            group.engine(
                name, model, connector=OURS, extra={"prefix_reads": True} | plan.kv_config | args.kv_config,
                dtype=setup.spec.dtype, block_size=setup.block, max_model_len=plan.longest, gpus=gpus,
                kv_cache_bytes=args.kv_gib << 30, kv_bytes=False, arguments=arguments, environment=environment,
                graph_sizes=sorted({*graph_sizes([args.sequences]), setup.block}),
            )
        )  # fmt: skip
        notes.append(path)
    return PrefixPair(
        engines[0], engines[1], (notes[0], notes[1]), random.Random(args.seed), setup.spec.vocabulary, plan.longest,
        setup.block, plan.chunk, plan.settle,
    )  # fmt: skip


def measure(args: argparse.Namespace, plan: Plan) -> Row:
    began = time.monotonic()
    with ServerGroup(args.folder / "logs") as group:
        pair = start(group, args, plan)
        group.wait_ready(args.start_seconds)
        pair.introduce()
        pair.idle(args.tokens, 1, keep=False)  # the first one of a length pays for more than the later ones
        pair.idle(args.tokens[:1], 2, keep=False)
        print(f"{time.monotonic() - began:.0f} s: measuring", flush=True)
        rounds = -(-args.samples // plan.pairs)
        for number in range(1, rounds + 1):
            round_began = time.monotonic()
            count = min(plan.pairs, args.samples)
            pair.idle(args.tokens, count)
            if args.sequences:
                pair.busy(args.tokens, count, args.sequences, args.period)
            now = time.monotonic()
            print(f"{now - began:.0f} s: round {number} of {rounds} took {now - round_began:.0f} s", flush=True)
            report.save(args.json, result_of(pair, args))  # what follows may not end
            if number == 1:
                for form, named in product((ALTERNATE, P_AND_D), (True, False)):
                    pair.replay(form, named, args.replay)
                print(f"{time.monotonic() - began:.0f} s: conversations replayed", flush=True)
            if number < rounds and time.monotonic() - began + now - round_began > args.budget:
                print(f"fewer rounds: the budget is {args.budget:.0f} s")
                break
        return result_of(pair, args)


def result_of(pair: PrefixPair, args: argparse.Namespace) -> Row:
    rows = [row_of(pair, *cell) for cell in dict.fromkeys((sample.sequences, sample.tokens) for sample in pair.samples)]
    replays = [replay_row(pair.turns, *one) for one in dict.fromkeys((turn.form, turn.named) for turn in pair.turns)]
    ends = {engine.name: ends_of(engine.metrics()) for engine in pair.engines}
    return {
        "device": args.device, "policy": "recompute", "kv_config": PLANS[args.device].kv_config | args.kv_config,
        "period_s": args.period, "new_tokens": pair.new, "figures": figures_of(rows, replays), "rows": rows,
        "replays": replays, "ways": pair.ways, "prefix_reads": ends, "measured_again": pair.repeated,
    }  # fmt: skip


def ends_of(samples: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> dict[str, float]:
    """What KVFerry counted of prefixes on one engine."""
    name = "vllm:kvferry_prefix_reads_total"
    labels = [dict(have) for (sample, have), value in samples.items() if sample == name and value]
    return {
        f"{of['result']} {of['reason']}".rstrip(): metric_sum(samples, name, result=of["result"], reason=of["reason"])
        or 0
        for of in labels
    }


def row_of(pair: PrefixPair, sequences: int, tokens: int) -> Row:
    """Medians and 99th percentiles of one length."""
    samples = [sample for sample in pair.samples if (sample.sequences, sample.tokens) == (sequences, tokens)]
    row: Row = {"sequences": sequences, "tokens": tokens, "samples": len(samples)}
    for way in WAYS:
        times = times_of(samples, way)
        row[f"{way}_ms"] = round(statistics.median(times), 3) if times else None
        row[f"{way}_p99_ms"] = percentile(times, 99)
        row[f"all_{way}_ms"] = [round(time, 2) for time in times]
    both = [sample.ttft["read"] - sample.ttft["own"] for sample in samples if "read" in sample.ttft]
    row["over_own_ms"] = round(statistics.median(both), 3) if both else None
    row["missed"] = len(samples) - len(both)
    gaps = [gap for sample in samples for gap in sample.gaps]
    quiet = pair.quiet.get(sequences, []) if sequences else []
    for name, values in (("gap", gaps), ("quiet", quiet)):
        row |= {f"{name}_p{percent}_ms": percentile(values, percent) for percent in (50, 99)}
        row[f"{name}_max_ms"] = most(values)
    return row | {"gaps": len(gaps), "quiet_gaps": len(quiet)}


def times_of(samples: list[Sample], way: str) -> list[float]:
    return [sample.ttft[way] for sample in samples if way in sample.ttft]


def replay_row(turns: list[Turn], form: str, named: bool) -> Row:
    found = [turn for turn in turns if (turn.form, turn.named) == (form, named)]
    return {
        "form": form, "named": named, "turns": len(found),
        "prompt": statistics.median(turn.prompt for turn in found),
        "new": statistics.median(turn.new for turn in found),
        "computed": statistics.median(turn.computed for turn in found),
        "most_over_new": max(turn.computed - turn.new for turn in found),
        "ttft_ms": round(statistics.median(turn.ttft for turn in found), 2),
        "each": [[turn.prompt, turn.new, turn.computed, round(turn.ttft, 2)] for turn in found],
    }  # fmt: skip


def figures_of(rows: list[Row], replays: list[Row]) -> dict[str, float]:
    """``crossover_tokens``: from this length on a read takes less than computing, in the median of idle engines."""
    figures: dict[str, float] = {}
    idle = sorted((row for row in rows if not row["sequences"]), key=lambda row: -row["tokens"])
    for row in idle:
        if row["read_ms"] is None or row["read_ms"] >= row["computed_ms"]:
            break
        figures["crossover_tokens"] = row["tokens"]
    for row in rows:
        if row["over_own_ms"] is not None:
            figures[f"{'busy' if row['sequences'] else 'idle'}_over_own_ms_{row['tokens']}"] = row["over_own_ms"]
        if row["gap_p99_ms"] and row["quiet_p99_ms"]:
            figures[f"gap_p99_of_quiet_{row['tokens']}"] = round(row["gap_p99_ms"] / row["quiet_p99_ms"], 3)
    for row in replays:
        if row["named"]:
            figures[f"most_over_new, {row['form']}"] = row["most_over_new"]
    return figures


def show(result: Row) -> None:
    print(pages.table(result["rows"], pages.PREFIX_TURNS))
    print(pages.table(result["replays"], pages.PREFIX_REPLAYS))
    for name in ("figures", "ways", "prefix_reads"):
        print(name, json.dumps(result[name]))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=tuple(PLANS), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", help="of prefixes; multiples of the block")
    parser.add_argument("--sequences", type=int, help="that the source decodes; 0: it is idle only")
    parser.add_argument("--samples", type=int, help="prefixes of each length")
    parser.add_argument("--budget", type=float, default=380, help="seconds, with the start of the engines")
    parser.add_argument("--period", type=float, help="seconds from one request to the next, beside sequences")
    parser.add_argument("--kv-config", type=json.loads, default={}, help="kv_connector_extra_config, JSON")
    parser.add_argument("--gpus", type=int, nargs=2, default=(0, 1), metavar=("SOURCE", "READER"))
    parser.add_argument("--kv-gib", type=int, help="KV cache of each engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--small", action="store_true", help="few short prefixes")
    parser.add_argument("--start-seconds", type=float, default=400, help="after which engines must be up")
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench" / "prefix_reads", help="for model and logs")
    return parser


def main() -> int:
    parser = arguments()
    args = parser.parse_args()
    plan = PLANS[args.device]
    for name in ("tokens", "sequences", "samples", "period", "kv_gib", "replay"):
        given = getattr(args, name, None)
        other = SMALL.get(name, getattr(plan, name)) if args.small else getattr(plan, name)
        setattr(args, name, other if given is None else given)
    args.tokens = list(args.tokens)
    wrong = [tokens for tokens in args.tokens if tokens <= 0 or tokens % plan.setup.block]
    if wrong or max(args.tokens) + plan.setup.block >= plan.longest:
        parser.error(f"--tokens: {args.tokens}, expected multiples of {plan.setup.block} below {plan.longest}")
    try:
        result = measure(args, plan)
    except EngineError as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    show(result)
    report.write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
