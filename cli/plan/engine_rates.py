"""How fast running vLLM engines are, from their pages of metrics: the tokens per second of a prefill, and a step's
seconds.

vLLM counts from the start of an engine. Of several engines the one is taken that has done most of the work: D computes
one token of each prompt that P hands over, and P makes no step for an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Literal, NamedTuple

import msgspec

from kvferry.cli.metrics_page import EngineDownError, Sample, fetch_samples, metrics_url
from kvferry.transport.errors import ConfigError

MIN_PROMPTS, MIN_PROMPT_TOKENS, MIN_STEPS = 10, 32, 100
"""Fewer prompts, prompts that are shorter in the mean, and fewer steps say nothing about an engine."""
PROMPTS, PREFILL_SECONDS = "vllm:request_prefill_time_seconds_count", "vllm:request_prefill_time_seconds_sum"
PROMPT_TOKENS = "vllm:request_prefill_kv_computed_tokens_sum"
STEPS, STEP_SECONDS = "vllm:inter_token_latency_seconds_count", "vllm:inter_token_latency_seconds_sum"
SERIES = (PROMPTS, PREFILL_SECONDS, PROMPT_TOKENS, STEPS, STEP_SECONDS)


class EngineRate(msgspec.Struct, frozen=True):
    """A figure of an engine, the mean of ``count`` prompts or steps."""

    engine: str
    what: Literal["prompt tokens per second", "seconds of a step"]
    value: float
    count: int


class EngineRates(NamedTuple):
    """``None``: no engine has done enough."""

    prefill: EngineRate | None
    step: EngineRate | None


def engine_rates(pages: Mapping[str, Iterable[Sample]]) -> EngineRates:
    """The rates of engines, from the samples of their pages. Where an engine computed several prompts at once, their
    times overlap, and it is faster than this. Raises ConfigError: a page is not that of a vLLM engine; names it."""
    prefill = step = None
    most_tokens = most_steps = 0.0
    for engine, page in pages.items():
        sums: dict[str, float] = defaultdict(float)
        for sample in page:
            if sample.name in SERIES and isfinite(sample.value):
                sums[sample.name] += sample.value
        if PROMPTS not in sums:
            raise ConfigError(f"--from {engine}: no vLLM server, or one with --disable-log-stats; name another one")
        prompts, seconds, tokens, steps, step_seconds = (sums[name] for name in SERIES)
        enough = prompts >= MIN_PROMPTS and tokens >= MIN_PROMPT_TOKENS * prompts
        if enough and seconds > 0 and tokens > most_tokens:
            most_tokens = tokens
            prefill = EngineRate(engine, "prompt tokens per second", tokens / seconds, int(prompts))
        if steps >= MIN_STEPS and step_seconds > 0 and steps > most_steps:
            most_steps = steps
            step = EngineRate(engine, "seconds of a step", step_seconds / steps, int(steps))
    return EngineRates(prefill, step)


def read_rates(engines: Sequence[str]) -> EngineRates:
    """The rates of running engines, by their URLs. Raises ConfigError, UsageError: an engine does not answer, or is
    none; names it."""
    pages = {}
    for engine in engines:
        try:
            pages[engine] = fetch_samples(metrics_url(engine))
        except EngineDownError as error:
            raise ConfigError(f"--from {engine}: {error}; name a running vLLM server") from None
    return engine_rates(pages)
