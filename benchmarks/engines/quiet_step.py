"""What a connector costs an engine that hands nothing over: the gaps between tokens, and requests that hit its cache.

    python benchmarks/engines/quiet_step.py [--json FILE] [--models narrow 8b] [--sequences 1 32 128] [--rounds 6]
    python benchmarks/engines/quiet_step.py --device cpu --contenders none kvferry --json FILE

One engine for each contender and model, as users run them: CUDA graphs, asynchronous scheduling, ``recompute``. The
engines of one model share a GPU. Only one of them has work at a time; they take turns, forwards and backwards (A B C,
C B A), so that what changes with time changes for all. Nothing is handed over in any of them.

Contenders: ``none`` has no connector. ``empty`` has one that does nothing (``empty_connector.py``): what vLLM itself
does where there is any. ``kvferry``, ``nixl``. ``NAME#2`` is another engine of NAME: the difference between two starts
of the same thing.

A turn: the engine decodes so many sequences for ``--seconds``: the gaps between the tokens of a sequence. Then, beside
them, come requests of ``--tokens`` tokens that the engine has in its prefix cache, one at a time: the time to first
token. With 0 sequences there are only these requests, on an idle engine. All times are taken in the engine's process
by ``busy_probe.py``, from a request's arrival in the engine's queue to the end of the step that made its token.

Models: ``narrow``, a Llama of 128 KiB of KV per token whose step is host-bound; ``8b``, with the shape of Llama-3.1-8B,
whose step is GPU-bound. Weights are made up.

Each figure of a contender is compared with ``none`` within the same round; the result has the median over the rounds
of the differences, with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import torch

from benchmarks.engines.busy_turns import BACKGROUND_TOKENS, Background, Steps, collect_notes, gaps_between
from benchmarks.engines.engine_pair import CPU, GPU, LLAMA_8B, body, graph_sizes
from benchmarks.harness import report
from tests.support.engines import ServerGroup, python_path
from tests.support.server import EngineError, Server
from tests.support.tiny_model import build_model

ROOT = Path(__file__).resolve().parents[2]
CONNECTORS = {"none": None, "empty": "EmptyConnector", "kvferry": "KVFerryConnector", "nixl": "NixlConnector"}
EMPTY = "benchmarks.engines.empty_connector"
LONGEST = 32768
MODELS = {"narrow": GPU.spec, "8b": replace(LLAMA_8B, vocabulary=128256), "tiny": CPU.spec}
WARM_SECONDS = 1.0
"""Of each batch size before anything is measured."""


@dataclass
class Engine:
    """One engine, and what was measured on it."""

    server: Server
    notes: Path
    longest: int
    rng: random.Random
    vocabulary: int
    read: int = 0
    asked: int = 0
    prompts: dict[int, list[int]] = field(default_factory=dict)
    most_computed: int = 1  # tokens of a prompt that are not in the prefix cache

    def words(self, tokens: int) -> list[int]:
        return [self.rng.randrange(2, self.vocabulary) for _ in range(tokens)]

    def _collect(self) -> tuple[dict[str, Any], Steps]:
        marks, steps, self.read = collect_notes(self.server, self.notes, self.read, "fresh")
        return marks, steps

    def ask(self, tokens: int) -> str:
        """One token of the prompt of this length; the name of the request."""
        self.asked += 1
        name = f"fg-{self.asked}"
        prompt = self.prompts.setdefault(tokens, self.words(tokens))
        self.server.post("/v1/completions", body(prompt), headers={"X-Request-Id": name})
        return name

    def turn(self, sequences: int, args: argparse.Namespace) -> dict[str, list[float]]:
        """Milliseconds: ``gap`` between tokens without anything beside, and by ``hit_TOKENS`` times to first token.

        Raises:
            EngineError: a request was computed that should have been found, or the sequences did not all decode.
        """
        background = Background(self.server, [self.words(BACKGROUND_TOKENS) for _ in range(sequences)], self.longest)
        begin = end = time.monotonic()
        names: dict[int, list[str]] = {}
        self._collect()
        try:
            if sequences:
                background.start()
                begin = time.monotonic()
                time.sleep(args.seconds)
                end = time.monotonic()
            if sequences in args.hits_beside:
                for tokens in args.tokens:
                    self.ask(tokens)  # computes it
                    names[tokens] = []
                    for _ in range(args.hits):
                        time.sleep(args.pause)
                        names[tokens].append(self.ask(tokens))
        finally:
            background.stop()
        marks, steps = self._collect()
        found = {"gap": gaps_between(steps, begin, end)} if sequences else {}
        if sequences and any(count != sequences for at, count in steps if begin <= at <= end):
            raise EngineError(f"{self.server.name}: not all of {sequences} sequences decoded all the while")
        for tokens, asked in names.items():
            hits = [marks[name] for name in asked]
            if any(hit.get("computed", tokens) > self.most_computed for hit in hits):
                raise EngineError(
                    f"{self.server.name}: a prompt of {tokens} tokens was to be found in the prefix cache"
                )
            found[f"hit_{tokens}"] = [(hit["token"] - hit["arrived"]) * 1e3 for hit in hits]
        return found


def start(group: ServerGroup, model: str, name: str, folder: Path, gpu: int | None, args: argparse.Namespace) -> Engine:
    spec, setup, most = MODELS[model], CPU if gpu is None else GPU, max(args.sequences)
    connector, longest = CONNECTORS[name.partition("#")[0]], min(MODELS[model].max_tokens, args.longest)
    notes = group.logs / f"{model}-{name.replace('#', '-')}-notes.jsonl"
    notes.write_text("")
    scheduler = "ProbedScheduler" if gpu is None else "ProbedAsyncScheduler"
    arguments = [
        "--load-format", "dummy", "--disable-uvicorn-access-log", "--max-num-seqs", str(most + 8),
        "--scheduler-cls", f"benchmarks.engines.busy_probe.{scheduler}",
        "--worker-extension-cls", "benchmarks.engines.busy_probe.CopyProbe",
    ]  # fmt: skip
    if connector == "EmptyConnector":
        arguments += ["--kv-transfer-config", json.dumps(
            {"kv_connector": connector, "kv_connector_module_path": EMPTY, "kv_role": "kv_both"}
        )]  # fmt: skip
    environment = {"PYTHONPATH": python_path(), "KVFERRY_BUSY_NOTES": str(notes)}
    if gpu is None:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(args.kv_gib)
    server = group.engine(
        f"{model}-{name.replace('#', '-')}", folder, connector=None if connector == "EmptyConnector" else connector,
        extra=setup.nixl if connector == "NixlConnector" else None, dtype=spec.dtype, block_size=setup.block,
        max_model_len=longest,
        gpus=() if gpu is None else (gpu,), kv_cache_bytes=args.kv_gib << 30, kv_bytes=False, arguments=arguments,
        environment=environment, graph_sizes=graph_sizes(args.sequences),
    )  # fmt: skip
    return Engine(server, notes, longest, random.Random(model), spec.vocabulary, most_computed=setup.block)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    samples: dict[tuple[str, int, str, str], list[list[float]]] = {}  # model, sequences, contender, figure: by round
    with ServerGroup(args.folder / "logs") as group:
        engines: dict[str, dict[str, Engine]] = {}
        for place, model in enumerate(args.models):
            folder = build_model(args.folder / model, MODELS[model], weights=False)
            gpu = args.gpus[place % len(args.gpus)] if args.device == "cuda" else None
            engines[model] = {name: start(group, model, name, folder, gpu, args) for name in args.contenders}
        group.wait_ready(args.start_seconds)
        warm = argparse.Namespace(**vars(args) | {"seconds": WARM_SECONDS, "hits": 2})
        for engine in (engine for each in engines.values() for engine in each.values()):
            for sequences in args.sequences:
                engine.turn(sequences, warm)
        print(f"{time.monotonic() - began:.0f} s: measuring", flush=True)
        for number in range(args.rounds):
            round_began = time.monotonic()
            for model in args.models:
                for sequences in args.sequences:
                    for name, engine in list(engines[model].items())[:: -1 if number % 2 else 1]:
                        for figure, values in engine.turn(sequences, args).items():
                            samples.setdefault((model, sequences, name, figure), []).append(values)
            now = time.monotonic()
            print(f"{now - began:.0f} s: round {number + 1} took {now - round_began:.0f} s", flush=True)
            report.save(args.json, result_of(samples, args))
            if 2 * now - began - round_began > args.budget:
                break
    return result_of(samples, args)


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def result_of(samples: dict[tuple[str, int, str, str], list[list[float]]], args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for (model, sequences, name, figure), rounds in samples.items():
        base = samples.get((model, sequences, args.contenders[0], figure), [])
        row: dict[str, Any] = {
            "model": model, "sequences": sequences, "contender": name, "figure": figure, "rounds": len(rounds),
            "samples": sum(map(len, rounds)),
        }  # fmt: skip
        for key, of in (("p50", statistics.median), ("p99", p99)):
            row[f"{key}_ms"] = round(of([value for values in rounds for value in values]), 4)
            differences = [of(ours) - of(theirs) for ours, theirs in zip(rounds, base, strict=False)]
            low, middle, high = quartiles(differences)
            row |= {f"{key}_over_ms": middle, f"{key}_over_p25_ms": low, f"{key}_over_p75_ms": high}
        rows.append(row)
    how = {
        "device": args.device,
        "seconds": args.seconds,
        "hits": args.hits,
        "base": args.contenders[0],
        "policy": "recompute",
    }
    return {"ratios": {}, "figures": {}, "rows": rows, **how}


def quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [round(value, 4) for value in values * 3]
    return [round(value, 4) for value in statistics.quantiles(values, n=4, method="inclusive")]


def show(result: dict[str, Any]) -> None:
    print(f"{'model':8}{'seqs':>5} {'figure':12}{'contender':16}{'p50 ms':>9}{'over':>9}{'p99 ms':>9}{'over':>9}")
    for row in sorted(result["rows"], key=lambda row: (row["model"], row["sequences"], row["figure"])):
        print(
            f"{row['model']:8}{row['sequences']:5} {row['figure']:12}{row['contender']:16}{row['p50_ms']:9.3f}"
            f"{row['p50_over_ms']:+9.3f}{row['p99_ms']:9.3f}{row['p99_over_ms']:+9.3f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS))
    parser.add_argument("--contenders", nargs="+", help="the first is what the others are compared with")
    parser.add_argument("--sequences", type=int, nargs="+", help="that decode")
    parser.add_argument("--tokens", type=int, nargs="+", help="of the requests that hit the prefix cache")
    parser.add_argument("--hits", type=int, default=8, help="of each length in a turn")
    parser.add_argument(
        "--hits-beside", type=int, nargs="+", default=[0, 32], help="with so many sequences there are hits"
    )
    parser.add_argument("--pause", type=float, default=0.03, help="seconds before each hit")
    parser.add_argument("--seconds", type=float, default=1.5, help="of quiet decoding in a turn")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--budget", type=float, default=500, help="seconds, with the start of the engines")
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        default=list(range(min(2, torch.cuda.device_count()))),
        help="the models are spread over these",
    )
    parser.add_argument("--kv-gib", type=int)
    parser.add_argument("--longest", type=int, default=LONGEST + 256, help="tokens of a sequence")
    parser.add_argument("--start-seconds", type=float, default=400)
    parser.add_argument("--folder", type=Path, default=ROOT / ".bench" / "quiet_step")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.models = args.models or (["narrow", "8b"] if on_gpu else ["tiny"])
    args.contenders = args.contenders or (["none", "none#2", "kvferry", "nixl"] if on_gpu else ["none", "kvferry"])
    args.sequences = args.sequences if args.sequences is not None else ([0, 1, 32, 128] if on_gpu else [0, 1, 4])
    args.tokens = args.tokens or ([2001, 8001, 32001] if on_gpu else [97, 385])
    args.kv_gib = args.kv_gib or (10 if on_gpu else 1)
    for given in args.contenders:
        if given.partition("#")[0] not in CONNECTORS:
            known = ", ".join(CONNECTORS)
            parser.error(f"--contenders: {given!r} is none of {known}, nor one with #NUMBER behind it")
    try:
        result = measure(args)
    except EngineError as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    show(result)
    report.write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
