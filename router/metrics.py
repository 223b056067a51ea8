"""What a router counts, and what decode engines say of their prompts, as Prometheus series and for the status page."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvferry.router.engines import EnginePool, Role

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds in seconds."""
RECENT_SECONDS, RECENT_REQUESTS = 60.0, 4096  # What latencies of the status page are of

HANDED_OVER_SERIES: tuple[tuple[str, Any, str, str], ...] = (
    ("prompts", CounterMetricFamily, "Prompts with parameters of a P, by what D did", "decode result"),
    ("prompts_not_loaded", CounterMetricFamily, "Those not loaded, by D's reason", "decode reason"),
    ("prompt_tokens", CounterMetricFamily, "Prompt tokens of D, loaded or computed", "decode source"),
    ("pair_loaded", CounterMetricFamily, "Prompts that D loaded from P", "prefill decode"),
    ("prefix_sources", CounterMetricFamily, "Requests that named a source of a prefix to an engine", "reader source"),
    ("engine_degraded", GaugeMetricFamily, "1: none of the last prompts was handed over", "role url"),
)
"""Name, type, meaning, and labels."""


class Metrics:
    """Counts of one router. ``in_flight``: requests of clients. ``decode_legs``: requests by how D was asked, "serial",
    "at_once", "left_to_d" where D prefills by choice, or "decode_only". ``failed_legs``: by the engine's role.
    ``waiting``: requests without a byte of an answer, and since when by ``clock``; the oldest first."""

    def __init__(self, engines: EnginePool, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines, self._clock = engines, clock
        self.waiting: dict[object, float] = {}
        self.in_flight = 0
        self.requests: Counter[int] = Counter()
        self.decode_legs: Counter[str] = Counter()
        self.failed_legs: Counter[str] = Counter()
        self.affinities: Counter[str] = Counter()
        self._registry = registry = CollectorRegistry()
        name, how = "kvferry_router_", dict[str, Any](buckets=BUCKETS, registry=registry)
        self.first_byte = Histogram(name + "first_byte_seconds", "Seconds to the first byte of an answer", **how)
        self.whole = Histogram(name + "request_seconds", "Seconds to the end of an answer", **how)
        registry.register(self)
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=RECENT_REQUESTS)

    def answered(self, status: int, now: float, first_byte: float | None, whole: float) -> None:
        """A request is over. ``first_byte``, ``whole``: seconds from its arrival; None: nothing was sent."""
        self.requests[status] += 1
        if first_byte is not None and status == 200:
            self.first_byte.observe(first_byte)
            self.whole.observe(whole)
            self._recent.append((now, first_byte, whole))

    def affinity(self, known: str | None, taken: str) -> None:
        """The P that has a prompt's prefix, if one is known, and the P that takes the prompt."""
        self.affinities["none" if known is None else "followed" if known == taken else "given_up"] += 1

    def oldest_waiting(self, now: float) -> float:
        """For how many seconds the oldest request waits for the first byte of its answer."""
        return round(now - next(iter(self.waiting.values()), now), 1)

    def status(self, now: float) -> dict[str, Any]:
        """For the status page. Latencies in seconds, of the last minute."""
        recent = [times for times in self._recent if now - times[0] <= RECENT_SECONDS]
        return {
            "in_flight": self.in_flight,
            "oldest_waiting_seconds": self.oldest_waiting(now),
            "requests": {str(status): count for status, count in self.requests.items()},
            "decode_legs": dict(self.decode_legs),
            "failed_legs": dict(self.failed_legs),
            "prefix_affinity": dict(self.affinities),
            "first_byte_seconds": _quantiles([first for _, first, _ in recent]),
            "request_seconds": _quantiles([whole for _, _, whole in recent]),
            "engines": [
                {
                    "url": engine.url, "role": engine.role, "state": engine.state, "requests": engine.requests,
                    "load": round(engine.load, 1), "passed_over": engine.passed_over_until > now,
                    "handed_over": engine.handed_over.status(of_d=engine.role is Role.DECODE),
                }
                for engine in self._engines
            ],
            "pairs": [{"prefill": p, "decode": d, "loaded": loaded} for p, d, loaded in self._pairs()],
            "prefix_sources": [
                {"reader": engine.url, "source": source, "requests": requests}
                for engine in self._engines for source, requests in engine.read_from.items()
            ],
        }  # fmt: skip

    def _pairs(self) -> Iterator[tuple[str, str, int | None]]:
        for engine in self._engines.of(Role.DECODE):
            for url, loaded in engine.handed_over.loaded_by_pair().items():
                yield url, engine.url, loaded

    def text(self) -> bytes:
        """The page of ``/metrics``."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        def counter(name: str, text: str, label: str, values: Iterable[tuple[Any, int]]) -> Any:
            family = CounterMetricFamily(f"kvferry_router_{name}", text, labels=[label])
            for value, count in sorted(values):
                family.add_metric([str(value)], count)
            return family

        yield counter("requests", "Answered requests by status", "status", self.requests.items())
        yield counter("decode_legs", "Requests by how D was asked", "how", self.decode_legs.items())
        yield counter("failed_legs", "Legs that failed, by the engine's role", "role", self.failed_legs.items())
        yield counter("prefix_affinity", "Choices of a P by prefix", "result", self.affinities.items())
        yield GaugeMetricFamily("kvferry_router_in_flight", "Requests of clients in flight", self.in_flight)
        name, text = "kvferry_router_oldest_waiting_seconds", "Age of the oldest request without a byte of an answer"
        yield GaugeMetricFamily(name, text, self.oldest_waiting(self._clock()))
        told = {"up": "1: takes requests", "requests": "in flight", "load": "P: prompt tokens; D: requests"}
        for name, text in told.items():
            family = GaugeMetricFamily(f"kvferry_router_engine_{name}", text, labels=["role", "url"])
            for engine in self._engines:
                value = engine.state == "up" if name == "up" else getattr(engine, name)
                family.add_metric([engine.role.value, engine.url], value)
            yield family
        yield from self._collect_handed_over()

    def _collect_handed_over(self) -> Iterator[Any]:
        """What D engines say, of the time since this router's first look at them, and who reads from whom."""
        series: dict[str, Any] = {
            name: make(f"kvferry_router_{name}", text, labels=labels.split())
            for name, make, text, labels in HANDED_OVER_SERIES
        }
        for engine in self._engines:
            of = engine.handed_over
            series["engine_degraded"].add_metric([engine.role.value, engine.url], bool(of.degraded))
            for name, counts in (
                ("prompts", of.prompts), ("prompts_not_loaded", of.reasons), ("prompt_tokens", of.tokens),
            ):  # fmt: skip
                for label, count in counts.items():
                    series[name].add_metric([engine.url, label], count)
            for source, count in engine.read_from.items():
                series["prefix_sources"].add_metric([engine.url, source], count)
        for prefill, decode, loaded in self._pairs():
            if loaded is not None:
                series["pair_loaded"].add_metric([prefill, decode], loaded)
        yield from series.values()


def _quantiles(values: list[float]) -> dict[str, float | None]:
    """The middle, and the value that a twentieth exceeds; None: there are no values."""
    values.sort()
    return {f"p{share}": values[len(values) * share // 100] if values else None for share in (50, 95)}
