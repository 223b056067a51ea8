"""A pair of engines behind routers that ask them in different ways, and one request; and what is made of its times: for
``streaming.py``."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from benchmarks.engines.shaped_link import LinkBytes
from kvferry.router.engines import identity_of
from kvferry.router.request_bodies import PREFILL_TAG
from tests.support.engines import ServerGroup
from tests.support.pd_client import events
from tests.support.server import EngineError, Server
from tests.support.tiny_model import ModelSpec

OURS_NAME, PULL_NAME, PUSH_NAME = "KVFerry", "NIXL, pull", "NIXL, push"
ALONE, SERIAL, AT_ONCE = "P alone", "serial", "at once"
WAYS = {ALONE: None, SERIAL: ("--serial",), AT_ONCE: ()}
"""The arguments of the router; None: the client asks P, which decodes. At once, the KV leaves while P computes."""
ANSWER_TOKENS = 6
SETTLE_SECONDS = 0.3
"""After an answer, before the next one: what engines do when a request has ended."""

Curve = list[tuple[float, int]]
"""(time, bytes until then)."""


@dataclass
class Sample:
    """Of one request, in seconds from its sending.

    ``arrived``: when each token came to the client. ``steps``: those of P for the prompt, as ``step_probe`` notes them.
    ``curve``: what had reached D, by the link's counter where there is one, else in its pages.
    """

    way: str
    arrived: list[float]
    steps: list[dict[str, Any]]
    curve: Curve

    @property
    def prefill_end(self) -> float:
        return float(self.steps[-1]["end"])

    @property
    def prefill(self) -> float:
        return self.prefill_end - float(self.steps[0]["begin"])

    @property
    def core(self) -> float:
        """Seconds of P's engine thread on a core in these steps."""
        return float(sum(step["core"] for step in self.steps))

    @property
    def before_end(self) -> float:
        """The share of the bytes that had reached D when P's last step of the prompt ended."""
        if not self.curve or not self.curve[-1][1]:
            return 0.0
        return max((count for at, count in self.curve if at <= self.prefill_end), default=0) / self.curve[-1][1]

    @property
    def moving(self) -> float:
        """For how long the bytes came, the first and the last 0.5 % not counted."""
        if not self.curve or not self.curve[-1][1]:
            return 0.0
        total = self.curve[-1][1]
        return reached(self.curve, 0.995 * total) - reached(self.curve, 0.005 * total)


def reached(curve: Curve, count: float) -> float:
    """When so many bytes had come."""
    return next(at for at, so_far in curve if so_far >= count)


@dataclass
class Engines:
    """A pair, with a URL for each way that it offers. ``link``: notes bytes between the two, where this can be."""

    name: str
    prefill: Server
    decode: Server
    link: Callable[[], AbstractContextManager[LinkBytes | None]] = nullcontext
    urls: dict[str, str] = field(default_factory=dict)


def stream(url: str, prompt: list[int]) -> list[float]:
    """When each token came, of which a chunk may hold several: time.monotonic. Raises EngineError."""
    body = {"model": "model", "prompt": prompt, "temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    arrived: list[float] = []
    for event in events(url, body):
        arrived += [time.monotonic()] * (event["usage"]["completion_tokens"] - len(arrived))
    if len(arrived) != ANSWER_TOKENS:
        raise EngineError(f"{url}: {len(arrived)} of {ANSWER_TOKENS} tokens came")
    return arrived


def measure(engines: Engines, way: str, prompt: list[int]) -> Sample:
    """One request. Raises EngineError."""
    for engine in (engines.prefill, engines.decode):
        engine.rpc("probe_take")
    with engines.link() as link:
        began = time.monotonic()
        arrived = stream(engines.urls[way], prompt)
    (of_p,), (of_d,) = engines.prefill.rpc("probe_take"), engines.decode.rpc("probe_take")
    computed, of_prompt = 0, []
    for step in of_p["steps"]:  # P may decode after that
        if computed < len(prompt):
            of_prompt.append(step)
        computed += step["tokens"]
    if computed < len(prompt):
        raise EngineError(f"P computed {computed} of {len(prompt)} tokens")
    if link is None:
        curve = list(zip((at for at, _ in of_d["moves"]), accumulate(count for _, count in of_d["moves"]), strict=True))
    else:
        curve = link.curve
    for step in of_prompt:
        step.update(begin=step["begin"] - began, end=step["end"] - began)
    return Sample(way, [at - began for at in arrived], of_prompt, [(at - began, count) for at, count in curve])


def open_ways(group: ServerGroup, engines: Engines, host: str = "127.0.0.1") -> None:
    """A router for each way that the engines, which are up, offer; and have them note their steps."""
    for engine in (engines.prefill, engines.decode):
        engine.rpc("probe_watch")
    at_once = offers_at_once(engines.prefill)
    if not at_once:
        print(f"{engines.name}: both legs at once are left out: P does not answer transfer_mode push", flush=True)
    for way, options in WAYS.items():
        if options is None:
            engines.urls[way] = engines.prefill.url
        elif at_once or way == SERIAL:
            name = f"router-{way.replace(' ', '-')}"
            router = group.router(engines.prefill, engines.decode, host=host, arguments=options, name=name)
            engines.urls[way] = router.url


def offers_at_once(prefill: Server) -> bool:
    """Whether P's answer lets a router ask D at once. Its lease of 64 tokens ends by time."""
    body = {"model": "model", "prompt": list(range(2, 66)), "max_tokens": 1, "kv_transfer_params": PREFILL_TAG}
    return identity_of(prefill.post("/v1/completions", body).get("kv_transfer_params")) is not None


def turns(
    engines: Engines, tokens: int, rng: random.Random, *, least: int, most: int, seconds: float, warm_ups: int
) -> list[dict[str, Sample]]:
    """Samples by way, of each turn, in which all ways have a prompt of their own. So a drift of the machine falls on
    all, and figures of one turn can be compared. ``least`` turns at least, then until ``seconds`` have passed, at most
    ``most``; before them ``warm_ups`` that do not count."""
    found: list[dict[str, Sample]] = []
    until = time.monotonic() + seconds
    for number in range(-warm_ups, most):
        if number >= least and time.monotonic() > until:
            break
        ways = list(engines.urls)
        turn: dict[str, Sample] = {}
        for way in ways if number % 2 else reversed(ways):
            prompt = [rng.randrange(2, ModelSpec.vocabulary) for _ in range(tokens)]
            turn[way] = measure(engines, way, prompt)
            time.sleep(SETTLE_SECONDS)
        if number >= 0:
            found.append({way: turn[way] for way in ways})
    return found


@contextmanager
def spare_core() -> Iterator[int | None]:
    """Keep the last core for the thread that stands for P's device, if there are two: this process, and what it starts,
    has the others. No thread has a real-time priority: one that spins would hold its core for ever."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[: max(1, len(cores) - 1)])
    try:
        yield cores[-1] if len(cores) > 1 else None
    finally:
        os.sched_setaffinity(0, cores)


# --- rows ------------------------------------------------------------------------------------------------------------

Turns = Sequence[dict[str, Sample]]
Row = dict[str, Any]


def ms(values: Sequence[float], digits: int = 1) -> float:
    return round(statistics.median(values) * 1e3, digits)


def rows_of(turns: Turns, **cell: Any) -> list[Row]:
    """A row for each way: medians. What is compared with another way is compared in each turn, then the median is
    taken of the differences or ratios."""
    return [row(way, turns) | cell for way in turns[0]]


def row(way: str, turns: Turns) -> Row:
    samples = [turn[way] for turn in turns]
    alone = [turn[ALONE] for turn in turns]
    pairs = list(zip(samples, alone, strict=True))

    def slower(seconds: Callable[[Sample], float]) -> float:
        return round(100 * (statistics.median(seconds(ours) / seconds(theirs) for ours, theirs in pairs) - 1), 1)

    first = [sample.arrived[0] for sample in samples]
    return {
        "way": way, "samples": len(samples), "first_ms": ms(first),
        "second_ms": ms([sample.arrived[1] for sample in samples]),
        "last_ms": ms([sample.arrived[-1] for sample in samples]),
        "prefill_ms": ms([sample.prefill for sample in samples]),
        "prefill_slower_percent": slower(lambda sample: sample.prefill),
        "core_slower_percent": slower(lambda sample: sample.core),
        "mib": round(statistics.median(sample.curve[-1][1] if sample.curve else 0 for sample in samples) / 2**20, 1),
        "before_end": round(statistics.median(sample.before_end for sample in samples), 3),
        "moving_ms": ms([sample.moving for sample in samples]),
        "each_first_ms": [round(value * 1e3, 1) for value in first],
    }  # fmt: skip


def curves_of(turns: Turns, **cell: Any) -> list[Row]:
    """For each way over which KV came: the bytes at D in time, of the turn whose first token is the median, [ms, MiB]
    from its sending, of at most some fifty points."""
    found: list[Row] = []
    for way in turns[0]:
        sample = sorted((turn[way] for turn in turns), key=lambda sample: sample.arrived[0])[len(turns) // 2]
        if way == ALONE or not sample.curve or sample.curve[-1][1] < 2**20:
            continue
        points = [[round(at * 1e3, 1), round(count / 2**20, 1)] for at, count in sample.curve]
        points = points[: -1 : 1 + len(points) // 50] + points[-1:]
        found.append({"way": way, "prefill_end_ms": round(sample.prefill_end * 1e3, 1), "points": points} | cell)
    return found
