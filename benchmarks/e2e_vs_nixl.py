"""Time to first token between two vLLM engines, with KVFerryConnector and with vLLM's own NixlConnector, in one run.

    python benchmarks/e2e_vs_nixl.py [--json FILE] [--rounds 2] [--repeats 8] [--lengths 257 ...] [--layers 32 4]
    python benchmarks/e2e_vs_nixl.py --again RESULT.json --json FILE           # compare the samples of a result again

How it is measured: D's time to the first token of a prompt that P holds and D does not, and the time that D takes for
the same prompt when all of it is in its own prefix cache. Both compute one token (lengths are a multiple of the block
plus one) and go the same way through HTTP, tokenizer and scheduler. P's own prefill is in neither: P answers from its
prefix cache before the clock starts. Every hand-over is checked against vLLM's counter of tokens loaded from outside;
one that failed is counted, and made again.

``comparison.py`` has the rule by which the connectors are compared.

The two connectors do not run at the same time: NIXL's threads spin on a core each, and an engine that is stopped
meanwhile loses its peer. NIXL gets one progress thread instead of vLLM's four: with four, engines that have two cores
between them mostly do not finish a handshake. Pairs of engines are started in the order A B B A, so that a drift of the
machine falls on both. Figures are medians over rounds and repeats.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".typing"))

import report
from comparison import OURS, THEIRS, comparison, difference_text, load_result

from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.engines import ServerGroup
from tests.support.fragment import empty_cache
from tests.support.pd_client import stream
from tests.support.server import EngineError, Server, metric_sum
from tests.support.tiny_model import ModelSpec, build_model, prompt_of

LENGTHS = (257, 513, 1025, 2049, 4001)
BLOCK = 32
LONG = 1000
"""Prompts of at least so many tokens count for the ratio."""
TRIES = 5
WARM_UPS = 2
"""Per length: P computes the prompt; staging, scratch and registrations are touched."""


class NotHandedOver(Exception):
    """D computed the prompt by itself, though P held it."""


@dataclass
class Samples:
    """Milliseconds to D's first token with one connector, by prompt length: loaded from P, and from D's own prefix
    cache. ``first``: of the first hand-overs, with the handshake. ``failed``: hand-overs that were not."""

    loaded: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    local: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    first: list[float] = field(default_factory=list)
    failed: int = 0

    def measured(self, prefill: Server, decode: Server, prompt: str, tokens: int) -> tuple[float, float]:
        """``once`` as often as it takes, failures counted."""
        for _ in range(TRIES):
            try:
                return once(prefill, decode, prompt, tokens)
            except NotHandedOver as error:
                self.failed += 1
                print(f"  {decode.name}: {error}", flush=True)
        raise EngineError(f"{decode.name}: {TRIES} hand-overs one after the other failed\n{decode.log_tail()}")


def loaded_tokens(engine: Server) -> float:
    return metric_sum(engine.metrics(), "vllm:prompt_tokens_by_source_total", source="external_kv_transfer") or 0


def once(prefill: Server, decode: Server, prompt: str, tokens: int) -> tuple[float, float]:
    """Milliseconds to D's first token: loaded from P, and from its own prefix cache."""
    body = {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 1}
    empty_cache(decode)
    params = prefill.post("/v1/completions", body | {"kv_transfer_params": PREFILL_TAG}, timeout=300)
    before = loaded_tokens(decode)
    loaded = stream(decode.url, body | {"kv_transfer_params": params["kv_transfer_params"]})
    if loaded_tokens(decode) - before < tokens - 1:
        raise NotHandedOver(f"only {loaded_tokens(decode) - before:.0f} of {tokens} tokens were handed over")
    local = stream(decode.url, body)
    if loaded_tokens(decode) - before > tokens:
        raise EngineError("the request that should find its prompt in D's own cache loaded it again")
    return loaded.ttft * 1e3, local.ttft * 1e3


def measure(connector: str, spec: ModelSpec, model: Path, args: argparse.Namespace, into: Samples) -> None:
    """Start two engines with this connector, measure all lengths, add to ``into``."""
    with ServerGroup(args.folder / "logs") as group:
        start: dict[str, Any] = {
            "connector": connector, "dtype": spec.dtype, "block_size": BLOCK, "max_model_len": 5120, "kv_bytes": False,
            "environment": {"VLLM_CPU_KVCACHE_SPACE": "2"},
        }  # fmt: skip
        if connector == THEIRS:
            start["extra"] = {"num_threads": args.nixl_threads}
        names = [f"{connector}-{spec.layers}-{role}" for role in ("prefill", "decode")]
        prefill, decode = (group.engine(name, model, **start) for name in names)
        group.wait_ready(400)
        handshake = into.measured(prefill, decode, prompt_of(model, BLOCK + 1, 1), BLOCK + 1)
        into.first.append(handshake[0])
        for tokens in args.lengths:
            prompt = prompt_of(model, tokens, tokens)
            for turn in range(-WARM_UPS, args.repeats):
                loaded, local = into.measured(prefill, decode, prompt, tokens)
                if turn >= 0:
                    into.loaded[tokens].append(loaded)
                    into.local[tokens].append(local)


def rows_of(spec: ModelSpec, found: dict[str, Samples]) -> list[dict[str, Any]]:
    """What was measured: one row per length and connector."""
    return [
        {
            "layers": spec.layers,
            "tokens": tokens,
            "connector": connector,
            "mib": round(tokens * spec.kv_bytes_per_token / 2**20, 2),
            "loaded_ms": [round(value, 1) for value in samples.loaded[tokens]],
            "local_ms": [round(value, 1) for value in samples.local[tokens]],
        }
        for tokens in found[OURS].loaded
        for connector, samples in found.items()
    ]


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows with medians and quartiles; comparisons, ratios and figures."""
    measured = {(row["layers"], row["tokens"], row["connector"]): row for row in rows}
    comparisons, figures = [], {}
    for layers, tokens in dict.fromkeys((layers, tokens) for layers, tokens, _ in measured):
        pair = [measured[layers, tokens, connector] for connector in (OURS, THEIRS)]
        found = comparison(*(row["loaded_ms"] for row in pair), *(row["local_ms"] for row in pair))
        comparisons.append({"layers": layers, "tokens": tokens} | found)
        for row in pair:
            low, middle, high = statistics.quantiles(row["loaded_ms"], n=4, method="inclusive")
            times = {
                "ttft_ms": middle,
                "low_ms": low,
                "high_ms": high,
                "local_ttft_ms": statistics.median(row["local_ms"]),
            }
            row |= {name: round(value, 2) for name, value in times.items()}
            figures[f"ttft_ms_{row['connector']}_{tokens}{suffix(layers)}"] = row["ttft_ms"]
    ratios = {}
    for layers in dict.fromkeys(found["layers"] for found in comparisons):
        of_layers = [found for found in comparisons if found["layers"] == layers]
        chosen = [found["ratio"] for found in of_layers if found["tokens"] >= LONG] or [f["ratio"] for f in of_layers]
        ratios[f"ttft_vs_nixl{suffix(layers)}"] = round(statistics.median(chosen), 3)
    return {"ratios": ratios, "figures": figures, "comparisons": comparisons, "rows": rows}


def suffix(layers: int) -> str:
    return "" if layers == 32 else f"_{layers}_layers"


def show(result: dict[str, Any]) -> None:
    """TTFT of both, their difference with its interval, local hits."""
    heads = ("layers", "tokens", "TTFT ours", "TTFT NIXL", "local hit ours", "NIXL", "ratio")
    print("\n" + "".join(f"{head:>15}" for head in heads) + "  ms; difference of TTFT (95 %)")
    for found in result["comparisons"]:
        times = [*found["ttft_ms"].values(), *found["local_ttft_ms"].values()]
        cells = [f"{found['layers']}", f"{found['tokens']}", *(f"{time:.1f}" for time in times)]
        cells.append(f"{found['ratio']:.2f}")
        print("".join(f"{cell:>15}" for cell in cells) + f"  {difference_text(found)}")
    for name, value in result["ratios"].items():
        print(f"{name} {value}  (median over prompts of {LONG} tokens and more; under 1 is ours faster)")


def shape(layers: int, args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows of one model shape, and the times of the first hand-overs."""
    spec = ModelSpec(layers=layers, dtype="bfloat16")
    model = build_model(args.folder / f"model-{layers}", spec)
    found = {OURS: Samples(), THEIRS: Samples()}
    for turn in range(args.rounds):
        for connector in (OURS, THEIRS) if turn % 2 == 0 else (THEIRS, OURS):
            measure(connector, spec, model, args, found[connector])
    first = {
        f"first_ttft_ms_{name}{suffix(layers)}": round(statistics.median(samples.first), 2)
        for name, samples in found.items()
    }
    return rows_of(spec, found), first


def again(path: Path) -> dict[str, Any]:
    """A result whose samples are compared anew, with the versions that it was measured with."""
    before = load_result(path)
    result = compared(before["rows"])
    first = {name: value for name, value in before["figures"].items() if name.startswith("first_")}
    return before | result | {"figures": result["figures"] | first}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", type=Path, metavar="RESULT", help="measure nothing: compare its samples anew")
    parser.add_argument("--rounds", type=int, default=2, help="how often each pair of engines is started")
    parser.add_argument("--repeats", type=int, default=8, help="per prompt length and round")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), metavar="TOKENS")
    parser.add_argument("--layers", type=int, nargs="+", default=[32, 4])
    parser.add_argument("--nixl-threads", type=int, default=1, help="NIXL's progress threads; vLLM's default is 4")
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent.parent / ".bench" / "e2e")
    args = parser.parse_args()
    for tokens in args.lengths:
        if tokens % BLOCK != 1:
            parser.error(f"--lengths: {tokens} is not a multiple of {BLOCK} plus one, see the description")
    if args.rounds * args.repeats < 2:
        parser.error(f"--repeats: {args.repeats} gives no quartiles, expected 2 or more")
    if args.again:
        result = again(args.again)
        show(result)
        report.save(args.json, result)
        return 0
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    try:
        for layers in args.layers:
            measured, firsts = shape(layers, args)
            rows += measured
            first |= firsts
            show(compared(measured))
    except EngineError as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1
    result = compared(rows)
    result["figures"] |= first
    show(result)
    report.write(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
