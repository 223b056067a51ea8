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
token, as ``busy_probe.py`` takes it. With 0 sequences there are only these requests, on an idle engine.

Models: ``narrow``, a Llama of 128 KiB of KV per token whose step is host-bound; ``8b``, with the shape of Llama-3.1-8B,
whose step is GPU-bound. Weights are made up.

"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import numpy as np
import torch

from benchmarks.engines.engine_pair import (
    CPU,
    GPU,
    LLAMA_8B,
    OURS,
    THEIRS,
    Background,
    ProbedEngine,
    Setup,
    Words,
    body,
    gaps_between,
    graph_sizes,
    servers,
    start,
)
from benchmarks.harness import report
from tests.support.engines import ServerGroup
from tests.support.server import EngineError
from tests.support.tiny_model import build_model

CONNECTORS = {"none": None, "empty": None, "kvferry": OURS, "nixl": THEIRS}
EMPTY = {
    "kv_connector": "EmptyConnector", "kv_connector_module_path": "benchmarks.engines.empty_connector",
    "kv_role": "kv_both",
}  # fmt: skip
SETUPS = {"narrow": GPU, "8b": Setup(replace(LLAMA_8B, vocabulary=128256), GPU.block), "tiny": CPU}
"""By model."""
WARM_SECONDS = 1.0
"""Of each batch size before anything is measured."""
PLANS: dict[str, dict[str, Any]] = {
    "cuda": {
        "models": ["narrow", "8b"], "contenders": ["none", "none#2", "kvferry", "nixl"],
        "sequences": [0, 1, 32, 128], "tokens": [2001, 8001, 32001], "kv_gib": 10,
    },
    "cpu": {
        "models": ["tiny"], "contenders": ["none", "kvferry"], "sequences": [0, 1, 4], "tokens": [97, 385], "kv_gib": 1,
    },
}  # fmt: skip


@dataclass
class Engine:
    """One engine. ``longest``: tokens of a sequence. ``block``: a hit leaves less than one block to compute."""

    probed: ProbedEngine
    longest: int
    words: Words
    block: int
    prompts: dict[int, list[int]] = field(default_factory=dict)

    def ask(self, tokens: int) -> str:
        """One token of the prompt of this length; the name of the request."""
        return self.probed.ask(body(self.prompts.setdefault(tokens, self.words(tokens))))[0]

    def turn(self, sequences: int, args: Namespace) -> dict[str, list[float]]:
        """Milliseconds: ``gap`` between tokens without anything beside, and by ``hit_TOKENS`` times to first token.

        Raises:
            EngineError: a request was computed that should have been found, or the sequences did not all decode.
        """
        names: dict[int, list[str]] = {}
        self.probed.collect()
        with Background(self.probed.server, self.words, sequences, self.longest) as background:
            begin, end = background.quiet(args.seconds)
            for tokens in args.tokens if sequences in args.hits_beside else ():
                self.ask(tokens)  # computes it
                names[tokens] = []
                for _ in range(args.hits):
                    time.sleep(args.pause)
                    names[tokens].append(self.ask(tokens))
        marks, steps = self.probed.collect()
        found = {"gap": gaps_between(steps, begin, end)} if sequences else {}
        if sequences and any(count != sequences for at, count in steps if begin <= at <= end):
            raise EngineError(f"{self.probed.server.name}: not all of {sequences} sequences decoded all the while")
        for tokens, asked in names.items():
            hits = [marks[name] for name in asked]
            if any(hit.get("computed", tokens) > self.block for hit in hits):
                raise EngineError(f"{self.probed.server.name}: a prompt of {tokens} tokens was not in the prefix cache")
            found[f"hit_{tokens}"] = [(hit["token"] - hit["arrived"]) * 1e3 for hit in hits]
        return found


def start_engine(group: ServerGroup, model: str, name: str, gpus: tuple[int, ...], args: Namespace) -> Engine:
    setup, of = SETUPS[model], name.partition("#")[0]
    longest = min(setup.spec.max_tokens, args.longest)
    probed = start(
        group, f"{model}-{name.replace('#', '-')}", build_model(args.folder / model, setup.spec, weights=False), setup,
        gpus=gpus, kv_gib=args.kv_gib, sequences=max(args.sequences), connector=CONNECTORS[of],
        extra=setup.nixl if of == "nixl" else None, max_model_len=longest, graph_sizes=graph_sizes(args.sequences),
        arguments=["--kv-transfer-config", json.dumps(EMPTY)] if of == "empty" else (),
    )  # fmt: skip
    return Engine(probed, longest, Words(model, setup.spec.vocabulary), setup.block)


def measure(args: Namespace) -> dict[str, Any]:
    began = time.monotonic()
    samples: dict[tuple[str, int, str, str], list[list[float]]] = {}  # model, sequences, contender, figure: by round
    with servers(args) as group:
        engines: dict[str, dict[str, Engine]] = {}
        for place, model in enumerate(args.models):
            gpus = (args.gpus[place % len(args.gpus)],) if args.device == "cuda" else ()
            engines[model] = {name: start_engine(group, model, name, gpus, args) for name in args.contenders}
        group.wait_ready(args.start_seconds)
        warm = Namespace(**vars(args) | {"seconds": WARM_SECONDS, "hits": 2})
        for engine in (engine for each in engines.values() for engine in each.values()):
            for sequences in args.sequences:
                engine.turn(sequences, warm)
        print(f"{time.monotonic() - began:.0f} s: measuring", flush=True)
        for number in report.rounds(args.rounds, began, args.budget):
            for model in args.models:
                for sequences in args.sequences:
                    for name, engine in list(engines[model].items())[:: 1 if number % 2 else -1]:
                        for figure, values in engine.turn(sequences, args).items():
                            samples.setdefault((model, sequences, name, figure), []).append(values)
            report.save(args.json, result_of(samples, args))
    return result_of(samples, args)


def result_of(samples: dict[tuple[str, int, str, str], list[list[float]]], args: Namespace) -> dict[str, Any]:
    rows = []
    for (model, sequences, name, figure), rounds in samples.items():
        row: dict[str, Any] = {"model": model, "sequences": sequences, "contender": name, "figure": figure}
        row |= {"rounds": len(rounds), "samples": sum(map(len, rounds))}
        for key, percent in (("p50", 50), ("p99", 99)):
            row[f"{key}_ms"] = report.percentile(np.concatenate(rounds), percent)
        rows.append(row)
    return {
        "rows": rows, "device": args.device, "seconds": args.seconds, "hits": args.hits,
        "policy": "recompute",
    }  # fmt: skip


def show(result: dict[str, Any]) -> None:
    for row in sorted(result["rows"], key=lambda row: (row["model"], row["sequences"], row["figure"])):
        report.line(row)


def main() -> int:
    parser = report.engine_options(__doc__, "quiet_step", gpus="+")
    parser.add_argument("--models", nargs="+", choices=tuple(SETUPS), help="are spread over the GPUs")
    parser.add_argument("--contenders", nargs="+", help="see above")
    parser.add_argument("--sequences", type=int, nargs="+", help="that decode")
    parser.add_argument("--tokens", type=int, nargs="+", help="of the requests that hit the prefix cache")
    parser.add_argument("--hits", type=int, default=8, help="of each length in a turn")
    parser.add_argument("--hits-beside", type=int, nargs="+", default=[0, 32], help="so many sequences")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds before each hit")
    parser.add_argument("--seconds", type=float, default=1.5, help="of quiet decoding in a turn")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--budget", type=float, default=500, help="seconds, with the start of the engines")
    parser.set_defaults(gpus=range(min(2, torch.cuda.device_count())))
    parser.add_argument("--longest", type=int, default=33024, help="tokens of a sequence")
    args = parser.parse_args()
    report.fill_in(args, PLANS[args.device])
    for given in args.contenders:
        if given.partition("#")[0] not in CONNECTORS:
            known = ", ".join(CONNECTORS)
            parser.error(f"--contenders: {given!r} is none of {known}, nor one with #NUMBER behind it")
    return report.finish(args.json, lambda: measure(args), show)


if __name__ == "__main__":
    sys.exit(main())
