"""Time to first token between two vLLM engines on two GPUs, with KVFerryConnector and with vLLM's own NixlConnector.

    python benchmarks/gpu_e2e.py [--json FILE] [--plot FILE.png] [--plane cuda_ipc] [--seconds 40]

Two GPUs of one host, four engines: P of either connector on GPU 0, D of either on GPU 1, each of which sees its own GPU
only. From a checkout without an installation, ``.typing`` stands for it:

    export PYTHONPATH=$SITE:$PWD/.typing        # $SITE: where vLLM, UCXX and NIXL are, if not installed
    python benchmarks/gpu_e2e.py --json .bench/gpu_e2e.json --plot .bench/gpu_e2e.png
    python benchmarks/gpu_e2e.py --cpu --lengths 97 385 --no-load        # the same on the CPU, to try it out
    python benchmarks/gpu_e2e.py --again RESULT.json --json FILE         # compare the samples of a result again

Engines run as users run them: with CUDA graphs, for few batch sizes so that they start quickly, and with the policy
``recompute``, under which a prompt whose load fails is computed by D. ``--policy fail`` is vLLM's default; then the
request fails.

The model is a Llama of 128 KiB of KV per token, narrow beside that, with made-up weights. D's time to the first token
is taken of a prompt that P holds, and of the same prompt out of D's own prefix cache, after a pause as long as P's
prefill. Both compute one token (lengths are a multiple of the block plus one). ``comparison.py`` has the rule by which
the connectors are compared. P has answered before the clock starts; how long it took is in ``total``, the time to the
first token as a client of the pair sees it.

Every prompt is new. ``fresh``: the engines take blocks that were never used, in the order of memory. ``scattered``:
after traffic of many short prompts that decoded side by side; how many blocks of a table lie right behind the one
before is printed, and one hand-over per state is compared byte for byte. ``emptied``: as scattered, but vLLM was told
to forget what the blocks hold; else it evicts each one that D is given, which is in D's time to the first token and not
in that of the local hit.

Every hand-over is checked against vLLM's counter of tokens loaded from outside: a prompt that D computed ends the run
as an error. Rounds alternate, A B B A, between the connectors; there are at least ``--rounds``, and as many more as
``--seconds`` per state and the unused blocks allow.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

import report
from comparison import OURS, THEIRS, comparison, difference_text, load_result, of_medians
from engine_pair import Pair, once, sources
from gpu_tables import verdict

from tests.support.engines import ServerGroup
from tests.support.fragment import block_count, empty_cache, scatter
from tests.support.server import EngineError
from tests.support.tiny_model import ModelSpec, build_model

STATES = ("fresh", "scattered", "emptied")
LANE = re.compile(r"\b(?:cuda_ipc|cuda_copy|cma|sysv|posix|tcp|rc_mlx5|rc_verbs)/\w+")
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Setup:
    """Where engines run and what suits them there; ``gpus`` are those of P and of D."""

    spec: ModelSpec
    block: int
    gpus: tuple[tuple[int, ...], tuple[int, ...]]
    lengths: tuple[int, ...]
    beside: int
    nixl: dict[str, Any] = field(default_factory=dict)


GPU = Setup(
    ModelSpec(
        layers=32, hidden=1024, heads=32, kv_heads=8, head_dim=128, intermediate=2816, max_tokens=16384,
        dtype="bfloat16",
    ),
    block=16, gpus=((0,), (1,)), lengths=(513, 2001, 8001), beside=512,
)  # fmt: skip
CPU = Setup(
    ModelSpec(layers=4, dtype="bfloat16"), block=32, gpus=((), ()), lengths=(97, 385, 1537), beside=16,
    nixl={"num_threads": 1},
)  # fmt: skip


def start(group: ServerGroup, connector: str, model: Path, setup: Setup, args: argparse.Namespace) -> Pair:
    extra = setup.nixl if connector == THEIRS else {"plane": args.plane}
    longest = max(512, max(args.lengths) + 64)
    prefill, decode = (
        group.engine(
            f"{connector}-{role}", model, connector=connector, extra=extra, dtype=setup.spec.dtype,
            block_size=setup.block, max_model_len=longest, gpus=gpus, kv_cache_bytes=args.kv_gib << 30,
            policy=args.policy,
            arguments=["--load-format", "dummy", "--max-num-seqs", str(setup.beside), "--disable-uvicorn-access-log"],
            environment={"UCX_PROTO_INFO": "y", **({} if gpus else {"VLLM_CPU_KVCACHE_SPACE": str(args.kv_gib)})},
        )
        for role, gpus in zip(("prefill", "decode"), setup.gpus, strict=True)
    )  # fmt: skip
    return Pair(connector, prefill, decode, setup.block, random.Random(connector), setup.spec.vocabulary)


def alternate(pairs: Sequence[Pair], state: str, args: argparse.Namespace, blocks: int) -> int:
    """The rounds of one state; the number of them. ``blocks``: how many are unused, when that matters."""
    began, number = time.monotonic(), 0
    needed = args.repeats * sum(-(-tokens // pairs[0].block) + 1 for tokens in args.lengths)
    if args.rounds * needed > blocks:
        raise EngineError(f"{args.rounds} rounds take {args.rounds * needed} unused blocks of {blocks}: raise --kv-gib")
    while number < args.rounds or ((number + 1) * needed <= blocks and time.monotonic() - began < args.seconds):
        for tokens in args.lengths:
            for _ in range(args.repeats):
                for pair in pairs if number % 2 == 0 else reversed(pairs):
                    pair.measure(state, tokens)
        number += 1
    return number


def row_of(pair: Pair, state: str, tokens: int, spec: ModelSpec) -> dict[str, Any]:
    samples = pair.samples[state, tokens]

    def p50(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    def p99(values: list[float]) -> float:
        return round(statistics.quantiles(values, n=100, method="inclusive")[98], 3)

    loaded, local = [s.loaded for s in samples], [s.local for s in samples]
    total = [s.prefill + s.loaded for s in samples]
    return {
        "state": state, "tokens": tokens, "connector": pair.connector, "samples": len(samples),
        "mib": round(tokens * spec.kv_bytes_per_token / 2**20, 1),
        "ttft_ms": p50(loaded), "ttft_p99_ms": p99(loaded), "local_ttft_ms": p50(local),
        "total_ttft_ms": p50(total), "total_ttft_p99_ms": p99(total),
        "all_ttft_ms": [round(value, 2) for value in loaded], "all_local_ttft_ms": [round(value, 2) for value in local],
    }  # fmt: skip


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows and comparisons, and the ratio of each state at the longest prompt. Results from before ``all_ttft_ms`` was
    kept have no intervals."""
    found = {(row["state"], row["tokens"], row["connector"]): row for row in rows if row["state"] in STATES}
    comparisons, ratios = [], {}
    for state, tokens in dict.fromkeys((state, tokens) for state, tokens, _ in found):
        pair = [found[state, tokens, connector] for connector in (OURS, THEIRS)]
        if all("all_ttft_ms" in row for row in pair):
            one = comparison(*(row["all_ttft_ms"] for row in pair), *(row["all_local_ttft_ms"] for row in pair))
        else:
            one = of_medians(*(row["ttft_ms"] for row in pair), *(row["local_ttft_ms"] for row in pair))
        comparisons.append({"state": state, "tokens": tokens} | one)
        ratios[f"ttft_vs_nixl_{state}"] = one["ratio"]  # the last is of the longest prompt
    return {"ratios": ratios, "comparisons": comparisons, "rows": rows}


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{key}_{row['connector']}_{row['state']}_{row['tokens']}": row[key]
        for row in rows
        for key in ("ttft_ms", "ttft_p99_ms", "local_ttft_ms")
        if row["state"] in STATES
    }


def again(path: Path) -> dict[str, Any]:
    """A result whose samples are compared anew, with the versions that it was measured with."""
    before = load_result(path)
    return before | compared(before["rows"]) | {"figures": before["figures"] | figures_of(before["rows"])}


def loaded_runs(
    group: ServerGroup, pairs: Sequence[Pair], model: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """`vllm bench serve` through a router, twice per connector, on the block tables that are scattered by then."""
    from serve_load import Load, bench_serve

    load = Load(tokens=min(2000, max(args.lengths)), output=32, requests=args.load_requests, beside=8)
    routers = {pair.connector: group.router(*pair.engines) for pair in pairs}
    rows = []
    for number, pair in enumerate([*pairs, *reversed(pairs)]):
        before = sources(pair.decode)
        served = bench_serve(routers[pair.connector].url, model, load, 1 + number, group.logs / "bench_serve.log")
        grown = sources(pair.decode) - before
        if grown["local_compute"] > 0.1 * grown.total():
            raise EngineError(f"{pair.decode.name} computed prompts under load: {grown}")
        figures = {name: round(value, 2) for name, value in asdict(served).items()}
        rows.append({"state": "load", "connector": pair.connector, **asdict(load), **figures})
        print(f"under load, {pair.connector}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
    return rows


def show(result: dict[str, Any]) -> None:
    rows = [row for row in result["rows"] if row["state"] in STATES]
    heads = ("D's TTFT ms", "p99", "local hit ms", "P and D ms", "p99")
    names = ("ttft_ms", "ttft_p99_ms", "local_ttft_ms", "total_ttft_ms", "total_ttft_p99_ms")
    print(f"\n{'state':10}{'tokens':>7}{'MiB':>7}  {'connector':18}" + "".join(f"{head:>13}" for head in heads))
    for row in rows:
        figures = "".join(f"{row[name]:13.2f}" for name in names)
        print(f"{row['state']:10}{row['tokens']:7}{row['mib']:7.0f}  {row['connector']:18}{figures}")
    for found in result["comparisons"]:
        where = f"{found['state']}, {found['tokens']} tokens"
        print(f"D's TTFT, KVFerry - NIXL, {where}: {difference_text(found, 2)} ms")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """D's time to the first token over the prompt length, beside that of local hits."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for axis, name, title in zip(
        axes, ("ttft_ms", "local_ttft_ms"), ("D's time to first token", "of a local prefix hit"), strict=True
    ):
        for connector, colour in ((OURS, "tab:blue"), (THEIRS, "tab:orange")):
            for state, dashes in zip(STATES, ("-", "--", ":"), strict=True):
                points = [row for row in rows if (row["connector"], row["state"]) == (connector, state)]
                x, y = [row["tokens"] for row in points], [row[name] for row in points]
                axis.plot(x, y, dashes, marker="o", color=colour, label=f"{connector}, {state} blocks")
        axis.set(xscale="log", yscale="log", xlabel="prompt tokens (128 KiB each)", ylabel="ms, median", title=title)
        lengths = sorted({row["tokens"] for row in rows if row["state"] in STATES})
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def measure(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    began = time.monotonic()
    model = build_model(args.folder / "model", setup.spec, weights=False)
    with ServerGroup(args.folder / "logs") as group:
        pairs = [start(group, connector, model, setup, args) for connector in (OURS, THEIRS)]
        if not args.no_load:
            with suppress(ImportError):  # said later
                import serve_load  # noqa: F401  # imports vLLM, while the engines do
        group.wait_ready(args.start_seconds)
        for pair in pairs:
            pair.warm(args.lengths)
            # Either side loads from one that is new to it.
            ways = (pair.engines, pair.engines[::-1])
            pair.first = [once(p, d, pair.prompt(max(args.lengths))) for p, d in ways]
            for tokens in args.lengths:
                once(*pair.engines, pair.prompt(tokens))
        rounds = {}
        for state in STATES:
            unused = min(block_count(engine) for pair in pairs for engine in pair.engines) - 64
            if state == "scattered":
                with ThreadPoolExecutor(4) as pool:
                    active_loads = [
                        pool.submit(scatter, engine, setup.block, setup.beside, setup.spec.vocabulary)
                        for pair in pairs
                        for engine in pair.engines
                    ]
                    [job.result() for job in active_loads]
            if state == "emptied":
                try:
                    for engine in (engine for pair in pairs for engine in pair.engines):
                        empty_cache(engine)
                except EngineError as error:
                    print(f"not measured on {state} caches: {error}", flush=True)
                    continue
            before = max(pair.taken for pair in pairs)
            for pair in pairs:
                pair.look(state, sorted(args.lengths)[len(args.lengths) // 2])
                said = ", ".join(f"{share:.1%}" for share in pair.in_sequence[state])
                print(f"{state}, {pair.connector}: bytes equal; blocks in sequence on P, D: {said}", flush=True)
            print(f"{time.monotonic() - began:.0f} s: measuring on {state} block tables", flush=True)
            taken = max(pair.taken for pair in pairs)
            limit = {"fresh": unused - taken, "emptied": unused - (taken - before)}.get(state, sys.maxsize)
            rounds[state] = alternate(pairs, state, args, limit)
        for pair in pairs:
            pair.check_failed()
        result = result_of(pairs, rounds, setup, args.policy)
        save(args, result)  # the load takes as long again, and may not end
        try:
            result["rows"] += [] if args.no_load else loaded_runs(group, pairs, model, args)
        except EngineError:
            raise
        except (Exception, SystemExit) as error:  # what vLLM's tool says of itself or of its options: the rest stands
            print(f"`vllm bench serve` did not run: {error!r}; {group.logs}/bench_serve.log")
        for pair in pairs:
            pair.check_failed()
        return result


def save(args: argparse.Namespace, result: dict[str, Any]) -> None:
    report.write(args.json, result if args.cpu else result | {"gpus": gpu_names()})
    if args.plot:
        plot([row for row in result["rows"] if row["state"] in STATES], args.plot)


def result_of(pairs: Sequence[Pair], rounds: dict[str, int], setup: Setup, policy: str) -> dict[str, Any]:
    """Ratios, figures, rows, and what KVFerry and UCX moved data over."""
    lengths = sorted({tokens for _, tokens in pairs[0].samples})
    rows = [row_of(pair, state, n, setup.spec) for state in rounds for n in lengths for pair in pairs]
    result = compared(rows)
    ratios = result["ratios"]
    figures: dict[str, Any] = {f"rounds_{state}": count for state, count in rounds.items()} | figures_of(rows)
    for pair in pairs:
        figures[f"first_ttft_ms_{pair.connector}"] = round(max(s.loaded for s in pair.first), 2)
        figures |= {f"blocks_in_sequence_{s}_{pair.connector}": share for s, share in pair.in_sequence.items()}
    show(result)
    for pair in pairs:
        both = " and ".join(f"{sample.loaded:.1f}" for sample in pair.first)
        print(
            f"TTFT of the first from a new peer, {lengths[-1]} tokens, {pair.connector}: {both} ms (either direction)"
        )
    said = pairs[0].said()
    planes = Counter(re.findall(r"hand-over of \S+ done: .* over (\S+) from", said))
    for line in sorted(set(re.findall(r"kvferry: (data plane to .*)", said))):
        print(line)
    lanes = {pair.connector: sorted(set(LANE.findall(pair.said()))) for pair in pairs}
    print(f"hand-overs of KVFerry by plane: {dict(planes)}; lanes that UCX names: {lanes}")
    for state, count in rounds.items():
        name = f"ttft_vs_nixl_{state}"
        where = f"{lengths[-1]} tokens, medians of {count} rounds"
        print(f"{name} {ratios[name]}  ({where})  {verdict(name, ratios[name])}")
    how = {"policy": policy, "cuda_graphs": bool(setup.gpus[1]), "planes": dict(planes), "ucx_lanes": lanes}
    return result | {"figures": figures} | how


def gpu_names() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", type=Path, metavar="RESULT", help="measure nothing: compare its samples anew")
    parser.add_argument("--plot", type=Path, help="a PNG; needs matplotlib")
    parser.add_argument("--plane", default="auto", help="KVFerry's data plane")
    parser.add_argument("--policy", choices=("fail", "recompute"), default="recompute", help="kv_load_failure_policy")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS", help="a multiple of the block, plus 1")
    parser.add_argument("--rounds", type=int, default=5, help="per state, at least")
    parser.add_argument("--repeats", type=int, default=2, help="per prompt length, connector and round")
    parser.add_argument("--seconds", type=float, default=40, help="per state: more rounds until then")
    parser.add_argument("--kv-gib", type=int, help="KV cache of each engine, 24 on a GPU")
    parser.add_argument("--no-load", action="store_true", help="without `vllm bench serve`")
    parser.add_argument("--load-requests", type=int, default=48)
    parser.add_argument("--start-seconds", type=float, default=400, help="after which engines must be up")
    parser.add_argument("--cpu", action="store_true", help="a small model on the CPU")
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench" / "gpu_e2e", help="for model and logs")
    args = parser.parse_args()
    if args.again:
        result = again(args.again)
        show(result)
        report.save(args.json, result)
        if args.plot:
            plot([row for row in result["rows"] if row["state"] in STATES], args.plot)
        return 0
    setup = CPU if args.cpu else GPU
    args.lengths = args.lengths or list(setup.lengths)
    args.kv_gib = args.kv_gib or (1 if args.cpu else 24)
    for tokens in args.lengths:
        if tokens % setup.block != 1:
            parser.error(f"--lengths: {tokens} is not a multiple of {setup.block} plus one, see the description")
    if args.rounds * args.repeats < 2:
        parser.error(f"--rounds: {args.rounds} times {args.repeats} gives no p99, expected 2 or more")
    began = time.monotonic()
    try:
        result = measure(args, setup)
    except EngineError as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - began:.0f} s in all")
    save(args, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
