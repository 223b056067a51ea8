"""Where a prompt is prefilled: on P always, on D always, or as ``kvferry router`` decides.

    python benchmarks/router/where_to_prefill.py --json FILE                  # on two GPUs, 10 minutes
    python benchmarks/router/where_to_prefill.py --device cpu --json FILE     # on the CPU, an hour

Conversations are requests of a part of Mooncake's conversation trace (https://github.com/kvcache-ai/Mooncake,
FAST25-release/traces/conversation_trace.jsonl, Apache-2.0), whose times are stretched to a rate; they are whole
multiples of 3 s there, and spread evenly within these here. Turns are random: 60 to 300 tokens, and 20 to 200 of the
answer.

One P, one D, a router before them for each policy; and beside the three policies two engines without a connector on the
same GPUs, which each prefill and decode half of the conversations: aggregated. They take turns, and the others idle
meanwhile. Lengths of conversations are divided by ``shrink``. Before each turn the prefix caches are emptied; first
requests, by which engines meet and the router learns, do not count. The client takes the time of each chunk of the
stream; ``gap_p99_ms`` is that of the mean gaps of answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typing"))

import httpx

from benchmarks.engines.engine_pair import CPU, GPU, LLAMA_8B, OURS, Setup, servers, start
from benchmarks.harness import report
from benchmarks.router.loads import BLOCK_TOKENS, LOADS, TracedRequest
from tests.support.engines import ServerGroup, free_port, python_path
from tests.support.server import metric_sum
from tests.support.tiny_model import build_model

POLICIES = ("always", "never", "decide")
START_SECONDS = 400
LEARNING = 16
"""Requests of each load, of which the times do not count."""
Times = tuple[float, float, int]
"""Seconds to the first chunk, and from it to the last one, and the chunks after the first."""


def prompts(trace: Sequence[TracedRequest], shrink: int, vocabulary: int, salt: int) -> list[list[int]]:
    """Token ids: of equal blocks the same."""
    found = []
    for request in trace:
        tokens: list[int] = []
        for block in request.hash_ids:
            rng = random.Random(f"{salt} {block}")
            tokens += [rng.randrange(2, vocabulary) for _ in range(BLOCK_TOKENS // shrink)]
        found.append(tokens[: max(16, request.input_length // shrink)])
    return found


async def ask(client: Any, url: str, prompt: list[int], answer: int) -> Times:
    body = {
        "model": "model", "prompt": prompt, "max_tokens": answer, "stream": True, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    began, first, last, chunks = time.monotonic(), 0.0, 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if '"error"' in line:
                    raise RuntimeError(line)
                last, chunks = time.monotonic(), chunks + 1
                first = first or last
    return first - began, last - first, chunks - 1


async def replay(urls: list[str], trace: Sequence[TracedRequest], words: list[list[int]]) -> list[Times]:
    async with httpx.AsyncClient(timeout=600, trust_env=False, limits=httpx.Limits(max_connections=None)) as client:
        begin = time.monotonic() - trace[0].timestamp / 1e3

        async def one(url: str, request: TracedRequest, prompt: list[int]) -> Times:
            await asyncio.sleep(max(0.0, begin + request.timestamp / 1e3 - time.monotonic()))
            return await ask(client, url, prompt, request.output_length)

        return await asyncio.gather(*map(one, urls, trace, words))


def of_real(times: list[Times]) -> dict[str, float]:
    gaps = sorted(took / chunks for _, took, chunks in times if chunks)
    tokens = sum(chunks for _, _, chunks in times)
    return {
        "ttft_ms": round(mean(first for first, _, _ in times) * 1e3, 2),
        "gap_ms": round(sum(took for _, took, _ in times) / max(1, tokens) * 1e3, 3),
        "gap_p99_ms": round(gaps[int(0.99 * len(gaps))] * 1e3, 2),
    }


PLACES: dict[str, dict[str, Any]] = {
    "cpu": {
        "setup": CPU, "gpus": ((), ()), "kv_gib": 1, "shrink": 32, "longest": 8192, "batched": 2048,
        "loads": (("conversations", 0.3), ("conversations", 0.9), ("short turns", 0.5), ("short turns", 2.0)),
        "seconds": 90.0, "rounds": 2,
    },
    "cuda": {
        "setup": Setup(LLAMA_8B, GPU.block), "gpus": ((0,), (1,)), "kv_gib": 14, "shrink": 4, "longest": 32768,
        "batched": 8192,
        "loads": (("conversations", 2.0), ("conversations", 8.0), ("short turns", 5.0), ("short turns", 40.0)),
        "seconds": 12.0, "rounds": 1,
    },
}  # fmt: skip
"""``shrink``: what lengths are divided by. ``batched``: the most tokens of a step. ``loads``: each with its requests
per second, for ``seconds``."""


class Replays:
    """Two engines with KVFerry, two without a connector on the same GPUs or cores, and the routers."""

    def __init__(self, group: ServerGroup, place: argparse.Namespace) -> None:
        self._place = place
        model = build_model(place.folder / "model", place.setup.spec, weights=False)
        self._engines = [
            start(
                group, f"{name}-{number}", model, place.setup, gpus=gpus, kv_gib=place.kv_gib, sequences=248,
                probed=False, connector=connector, max_model_len=place.longest,
                arguments=["--max-num-batched-tokens", str(place.batched)],
                graph_sizes=(1, 2, 4, 8, 16, 32, 64, 128),
            ).server
            for name, connector in (("kvferry", OURS), ("alone", None))
            for number, gpus in enumerate(place.gpus)
        ]  # fmt: skip
        group.wait_ready(START_SECONDS)
        p, d, *alone = self._engines
        options = {"always": ["--prefill", p.url, "--always"], "never": [], "decide": ["--prefill", p.url, "--choose"]}
        self._routers = {}
        for policy, more in options.items():
            command = [sys.executable, "-m", "kvferry.cli.main", "router", "--decode", d.url, *more]
            command += ["--port", str(port := free_port())]
            environment = {"PYTHONPATH": python_path()}
            self._routers[policy] = group.spawn(policy, command, host="127.0.0.1", port=port, environment=environment)
        group.wait_ready(servers=list(self._routers.values()))
        self._urls = {policy: [router.url] for policy, router in self._routers.items()}
        self._urls["aggregated"] = [engine.url for engine in alone]

    def turn(self, policy: str, load: str, rate: float, count: int, salt: int) -> list[Times]:
        """One load with empty prefix caches. Conversations stay on one of two aggregated engines."""
        for engine in self._engines:
            engine.post("/reset_prefix_cache")
        place, urls = self._place, self._urls[policy]
        shrink = place.shrink if load == "conversations" else 1
        trace = LOADS[load](rate, count, shrink)
        begins = [request.hash_ids[min(1, len(request.hash_ids) - 1)] for request in trace]
        words = [prompt[: place.longest - 512] for prompt in prompts(trace, shrink, place.setup.spec.vocabulary, salt)]
        return asyncio.run(replay([urls[begin % len(urls)] for begin in begins], trace, words))

    def left_to_d(self) -> float:
        metrics = self._routers["decide"].metrics()
        return metric_sum(metrics, "kvferry_router_decode_legs_total", how="left_to_d") or 0.0


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    report.fill_in(args, PLACES[args.device])
    everybody = (*POLICIES, "aggregated")
    with servers(args) as group:
        replays = Replays(group, args)
        for policy, (load, rate) in product(everybody, args.loads):
            replays.turn(policy, load, rate, LEARNING, -1)
        for number, (load, rate) in enumerate(args.loads):
            times: dict[str, list[Times]] = {policy: [] for policy in everybody}
            before = replays.left_to_d()
            for turn in range(args.rounds):
                for policy in everybody if turn % 2 == 0 else reversed(everybody):
                    salt = 100 * number + 10 * turn + everybody.index(policy)
                    times[policy] += replays.turn(policy, load, rate, int(rate * args.seconds), salt)
                    print(f"{load}, {rate:g}/s, {policy}: {of_real(times[policy])}", flush=True)
            found = {policy: of_real(times[policy]) for policy in everybody}
            left = (replays.left_to_d() - before) / len(times["decide"])
            for policy, share in zip(everybody, (0.0, 1.0, left, 1.0), strict=True):
                found[policy]["left_to_d"] = round(share, 3)
            yield {"load": load, "requests_per_second": rate, "policies": found}


def to_better(row: dict[str, Any]) -> float:
    """The time to the first token as the router decides, over the better one of always and never."""
    always, never, decide = (row["policies"][policy]["ttft_ms"] for policy in POLICIES)
    return round(decide / min(always, never), 3)


def main() -> None:
    parser = report.options(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--folder", type=Path, default=report.ROOT / ".bench" / "where", help="for model and logs")
    args = parser.parse_args()
    done: list[dict[str, Any]] = []
    for row in measure(args):
        done.append(row)
        row["ttft_to_better"] = to_better(row)
        report.line({name: row[name] for name in row if name != "policies"})
    report.write(args.json, {"device": args.device, "rows": done})


if __name__ == "__main__":
    main()
