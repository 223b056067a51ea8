"""Hand-over time between two vLLM engines, with KVFerryConnector and with vLLM's own NixlConnector, in one run.

    python benchmarks/e2e_vs_nixl.py [--json FILE] [--rounds 2] [--repeats 5] [--lengths 257 ...]

How it is measured: D's time to the first token of a prompt that P holds and D does not, less the same D's time to the
first token of the same prompt when all of it is in D's own prefix cache. Both compute one token (lengths are a multiple
of the block plus one), both go the same way through HTTP, tokenizer and scheduler; what is left is the hand-over. P's
own prefill is in neither: P answers from its prefix cache before the clock starts. Every hand-over is checked against
vLLM's counter of tokens loaded from outside.

The two connectors do not run at the same time: NIXL's workers spin on a core each. Pairs of engines are started in the
order A B B A, so that a drift of the machine falls on both; figures are medians over rounds and repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples" / "lib"))

from engines import EngineError, Fleet, Server, metric_sum
from model import ModelSpec, build_model, prompt_of
from pd_client import stream
from pd_router import PREFILL_TAG

OURS, THEIRS = "KVFerryConnector", "NixlConnector"
LENGTHS = (257, 513, 1025, 2049, 4001)
BLOCK = 32
LONG = 1000
"""Prompts of at least so many tokens count for the ratio."""


@dataclass
class Samples:
    """Milliseconds of one shape, connector and length."""

    loaded: list[float] = field(default_factory=list)
    local: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)

    @property
    def handover(self) -> float:
        return statistics.median(a - b for a, b in zip(self.loaded, self.local, strict=True))


def reset(engine: Server) -> None:
    """Empty the prefix cache; it refuses while blocks are still held."""
    deadline = time.monotonic() + 60
    while not engine.post("/reset_prefix_cache")["success"]:
        if time.monotonic() > deadline:
            raise EngineError(f"{engine.name}: blocks are still held 60 s after the last request")
        time.sleep(0.05)


def loaded_tokens(engine: Server) -> float:
    return metric_sum(engine.metrics(), "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") or 0


def one(prefill: Server, decode: Server, prompt: str, tokens: int) -> tuple[float, float]:
    """Milliseconds to D's first token: loaded from P, and from its own prefix cache."""
    body = {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 1}
    reset(decode)
    params = prefill.post("/v1/completions", body | {"kv_transfer_params": PREFILL_TAG}, timeout=300)
    before = loaded_tokens(decode)
    loaded = stream(decode.url, body | {"kv_transfer_params": params["kv_transfer_params"]})
    if loaded_tokens(decode) - before < tokens - 1:
        raise EngineError(f"only {loaded_tokens(decode) - before:.0f} of {tokens} tokens were handed over")
    local = stream(decode.url, body)
    if loaded_tokens(decode) - before > tokens:
        raise EngineError("the request that should find its prompt in D's own cache loaded it again")
    return loaded.ttft * 1e3, local.ttft * 1e3


def pair(
    connector: str, spec: ModelSpec, model: Path, args: argparse.Namespace, into: dict[tuple[str, int], Samples]
) -> None:
    """Start two engines with this connector, measure all lengths, add to ``into``."""
    with Fleet(args.folder / "logs") as fleet:
        start = dict(connector=connector, dtype=spec.dtype, block_size=BLOCK, max_model_len=5120, kv_bytes=False)
        start["environment"] = {"VLLM_CPU_KVCACHE_SPACE": "2"}
        names = [f"{connector}-{spec.layers}-{role}" for role in ("prefill", "decode")]
        prefill, decode = (fleet.engine(name, model, **start) for name in names)
        fleet.wait_ready(400)
        handshake = one(prefill, decode, prompt_of(model, BLOCK + 1, 1), BLOCK + 1)
        into.setdefault((connector, 0), Samples()).first.append(handshake[0] - handshake[1])
        for tokens in args.lengths:
            samples = into.setdefault((connector, tokens), Samples())
            prompt = prompt_of(model, tokens, tokens)
            one(prefill, decode, prompt, tokens)  # P computes the prompt; staging and scratch are touched once
            for _ in range(args.repeats):
                loaded, local = one(prefill, decode, prompt, tokens)
                samples.loaded.append(loaded)
                samples.local.append(local)
            print(f"  {connector:17} {spec.layers:2} layers {tokens:5} tokens {samples.handover:9.1f} ms", flush=True)


def shape(layers: int, args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float], dict[str, float]]:
    """Rows, ratios and figures of one model shape."""
    spec = ModelSpec(layers=layers, dtype="bfloat16")
    model = build_model(args.folder / f"model-{layers}", spec)
    found: dict[tuple[str, int], Samples] = {}
    for turn in range(args.rounds):
        for connector in (OURS, THEIRS) if turn % 2 == 0 else (THEIRS, OURS):
            pair(connector, spec, model, args, found)
    suffix = "" if layers == 32 else f"_{layers}_layers"
    rows, ratios = [], {}
    for tokens in args.lengths:
        ours, theirs = found[OURS, tokens], found[THEIRS, tokens]
        for connector, samples in ((OURS, ours), (THEIRS, theirs)):
            rows.append(
                {
                    "layers": layers,
                    "tokens": tokens,
                    "connector": connector,
                    "mib": round(tokens * spec.kv_bytes_per_token / 2**20, 2),
                    "handover_ms": round(samples.handover, 2),
                    "loaded_ms": [round(value, 2) for value in samples.loaded],
                    "local_ms": [round(value, 2) for value in samples.local],
                }
            )
        ratios[tokens] = ours.handover / theirs.handover
        print(f"{layers:2} layers {tokens:5} tokens  ours {ours.handover:9.1f} ms  ", end="")
        print(f"NIXL {theirs.handover:9.1f} ms  ratio {ratios[tokens]:.2f}", flush=True)
    figures = {f"handover_ms_{OURS}_{n}{suffix}": found[OURS, n].handover for n in args.lengths}
    figures |= {f"handover_ms_{THEIRS}_{n}{suffix}": found[THEIRS, n].handover for n in args.lengths}
    for connector in (OURS, THEIRS):
        figures[f"first_handover_ms_{connector}{suffix}"] = statistics.median(found[connector, 0].first)
    long = [ratio for tokens, ratio in ratios.items() if tokens >= LONG] or list(ratios.values())
    named = {f"handover_vs_nixl{suffix}": statistics.median(long)}
    return rows, named, {name: round(value, 2) for name, value in figures.items()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cores": str(os.cpu_count()), "machine": platform.machine()}
    for name in ("kvferry", "vllm-cpu", "vllm", "torch", "ucxx-cu13", "nixl-cu13"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=2, help="how often each pair of engines is started")
    parser.add_argument("--repeats", type=int, default=5, help="per prompt length and round")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="TOKENS")
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 4])
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent.parent / ".bench" / "e2e")
    args = parser.parse_args()
    for tokens in args.lengths:
        if tokens % BLOCK != 1:
            parser.error(f"--lengths: {tokens} is not a multiple of {BLOCK} plus one, see the description")
    report: dict[str, Any] = {"ratios": {}, "figures": {}, "rows": [], "versions": versions()}
    try:
        for layers in args.layers:
            rows, ratios, figures = shape(layers, args)
            report["rows"] += rows
            report["ratios"] |= {name: round(value, 3) for name, value in ratios.items()}
            report["figures"] |= figures
    except EngineError as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    for name, value in report["ratios"].items():
        print(f"{name} {value}  (median over prompts of {LONG} tokens and more; under 1 is ours faster)")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
