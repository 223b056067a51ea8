"""Prefill and decode engines of one connector, and how long a hand-over between them takes: for gpu_e2e.py."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.fragment import in_sequence
from tests.support.kv_bytes import compare
from tests.support.pd_client import METRICS, stream
from tests.support.server import PATIENCE_SECONDS, EngineError, Server, metric_sum


@dataclass(frozen=True)
class Sample:
    """Milliseconds of one prompt: P's answer, D's first token with the hand-over, D's out of its own prefix cache."""

    prefill: float
    loaded: float
    local: float


@dataclass
class Pair:
    """The engines of one connector, and what was measured on them by (state, prompt length).

    ``in_sequence``: by state, the share of blocks in sequence in P's and in D's table of one prompt. ``taken``: how
    many blocks all prompts so far took on either engine.
    """

    connector: str
    prefill: Server
    decode: Server
    block: int
    rng: random.Random
    vocabulary: int
    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=lambda: defaultdict(list))
    first: list[Sample] = field(default_factory=list)
    in_sequence: dict[str, tuple[float, float]] = field(default_factory=dict)
    taken: int = 0

    @property
    def engines(self) -> tuple[Server, Server]:
        return self.prefill, self.decode

    def prompt(self, tokens: int) -> list[int]:
        self.taken += -(-tokens // self.block) + 1  # blocks, on each engine; the last is taken anew for the local hit
        return [self.rng.randrange(2, self.vocabulary) for _ in range(tokens)]

    def warm(self, lengths: Sequence[int]) -> None:
        """What engines pay once per prompt length, without a hand-over: computed, and found in the prefix cache."""
        for tokens in lengths:
            request = body(self.prompt(tokens))
            for engine in self.engines * 2:
                stream(engine.url, request)

    def measure(self, state: str, tokens: int) -> None:
        self.samples[state, tokens].append(once(self.prefill, self.decode, self.prompt(tokens)))

    def look(self, state: str, tokens: int) -> None:
        """Hand one prompt over, compare all its bytes, and see how both block tables lie."""
        for engine in self.engines:
            engine.rpc("kv_watch")
        request = body(self.prompt(tokens))
        stream(self.decode.url, request | {"kv_transfer_params": prefill_leg(self.prefill, request)})
        of_p, of_d = (engine.rpc("kv_records")[0] for engine in self.engines)
        for engine in self.engines:
            engine.rpc("kv_unwatch")
        differ = compare(of_d, of_p)
        if differ is not None:
            raise EngineError(f"{self.connector}, {state}: {differ}")
        self.in_sequence[state] = (in_sequence(of_p[-1]["blocks"][0]), in_sequence(of_d[-1]["blocks"][0]))

    def check_failed(self) -> None:
        """No hand-over of the whole run may have failed."""
        for engine in self.engines:
            failed = metric_sum(engine.metrics(), METRICS[self.connector].failed)
            if failed:
                raise EngineError(f"{engine.name}: {failed:.0f} failed hand-overs counted")

    def said(self) -> str:
        return "".join(engine.log.read_text(errors="replace") for engine in self.engines)


def body(prompt: list[int]) -> dict[str, Any]:
    """One token, whose id is not asked for: an answer would repeat those of the prompt."""
    return {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": 1, "return_token_ids": False}


def prefill_leg(prefill: Server, request: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = prefill.post("/v1/completions", request | {"kv_transfer_params": PREFILL_TAG})[
        "kv_transfer_params"
    ]
    return params


def sources(engine: Server) -> Counter[str]:
    """Prompt tokens since the start, by where their KV came from."""
    found: Counter[str] = Counter()
    for (name, labels), value in engine.metrics().items():
        if name == "vllm:prompt_tokens_by_source_total":
            found[dict(labels)["source"]] += int(value)
    return found


def once(prefill: Server, decode: Server, prompt: list[int]) -> Sample:
    """One hand-over, and the same prompt on D again.

    Raises:
        EngineError: D computed more than the last token of either.
    """
    request, before = body(prompt), sources(decode)
    began = time.perf_counter()
    params = prefill_leg(prefill, request)
    prefilled = time.perf_counter() - began
    loaded = stream(decode.url, request | {"kv_transfer_params": params})
    time.sleep(prefilled)  # D's processes have slept as long as before the hand-over, and wake as late
    local = stream(decode.url, request)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (grown := sources(decode) - before).total() < 2 * len(prompt) and time.monotonic() < deadline:
        time.sleep(0.02)
    wanted = len(prompt) - 1
    if grown["external_kv_transfer"] < wanted or grown["local_cache_hit"] < wanted:
        raise EngineError(f"{decode.name}: a prompt of {len(prompt)} tokens was to be loaded and found, but {grown}")
    return Sample(prefilled * 1e3, loaded.ttft * 1e3, local.ttft * 1e3)
