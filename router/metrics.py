"""What a router counts, as Prometheus series and for its status page."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvferry.router.engines import EnginePool

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds in seconds."""
RECENT_SECONDS, RECENT_REQUESTS = 60.0, 4096  # What latencies of the status page are of


class Metrics:
    """Counts of one router. ``in_flight``: requests of clients. ``handovers``: requests by how D was asked, "serial",
    "at_once" or "decode_only". ``failed_legs``: by the engine's role."""

    def __init__(self, engines: EnginePool) -> None:
        self._engines = engines
        self.in_flight = 0
        self.requests: Counter[int] = Counter()
        self.handovers: Counter[str] = Counter()
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

    def status(self, now: float) -> dict[str, Any]:
        """For the status page. Latencies in seconds, of the last minute."""
        recent = [times for times in self._recent if now - times[0] <= RECENT_SECONDS]
        return {
            "in_flight": self.in_flight,
            "requests": {str(status): count for status, count in self.requests.items()},
            "handovers": dict(self.handovers),
            "failed_legs": dict(self.failed_legs),
            "prefix_affinity": dict(self.affinities),
            "first_byte_seconds": _quantiles([first for _, first, _ in recent]),
            "request_seconds": _quantiles([whole for _, _, whole in recent]),
            "engines": [
                {
                    "url": engine.url, "role": engine.role, "state": engine.state, "requests": engine.requests,
                    "load": round(engine.load, 1), "passed_over": engine.passed_over_until > now,
                }
                for engine in self._engines
            ],
        }  # fmt: skip

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
        yield counter("handovers", "Requests by how D was asked", "how", self.handovers.items())
        yield counter("failed_legs", "Legs that failed, by the engine's role", "role", self.failed_legs.items())
        yield counter("prefix_affinity", "Choices of a P by prefix", "result", self.affinities.items())
        yield GaugeMetricFamily("kvferry_router_in_flight", "Requests of clients in flight", self.in_flight)
        told = {"up": "1: takes requests", "requests": "in flight", "load": "P: prompt tokens; D: requests"}
        for name, text in told.items():
            family = GaugeMetricFamily(f"kvferry_router_engine_{name}", text, labels=["role", "url"])
            for engine in self._engines:
                value = engine.state == "up" if name == "up" else getattr(engine, name)
                family.add_metric([engine.role.value, engine.url], value)
            yield family


def _quantiles(values: list[float]) -> dict[str, float | None]:
    """The middle, and the value that a twentieth exceeds; None: there are no values."""
    values.sort()
    return {f"p{share}": values[len(values) * share // 100] if values else None for share in (50, 95)}
