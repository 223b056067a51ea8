"""What a router counts, as Prometheus series and for the status page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from kvferry.router.engines import EnginePool
from kvferry.router.http_client import RequestProgress

PREFIX = "kvferry_router_"
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds in seconds."""
OF_ENGINES: tuple[tuple[str, Any, str, str], ...] = (
    ("engine_up", GaugeMetricFamily, "1: takes requests", "role url"),
    ("engine_requests", GaugeMetricFamily, "Requests in flight", "role url"),
    ("engine_load", GaugeMetricFamily, "Of P: prompt tokens to compute; of D: requests", "role url"),
    ("engine_degraded", GaugeMetricFamily, "1: none of the last prompts was handed over", "role url"),
)
"""Name, type, meaning, and labels."""


class Metrics:
    """Counts of one router."""

    def __init__(
        self, engines: EnginePool, clock: Callable[[], float] = time.monotonic, legs: Iterable[RequestProgress] = ()
    ) -> None:
        self._engines, self._clock, self._legs = engines, clock, legs
        self.in_flight = 0  # Requests of clients
        self.registry = CollectorRegistry()

        def series(make: Any, name: str, meaning: str, *labels: str, **how: Any) -> Any:
            return make(PREFIX + name, meaning, labels, registry=self.registry, **how)

        self.requests = series(Counter, "requests", "Answered requests by status", "status")
        self.decode_legs = series(Counter, "decode_legs", "Requests by how D was asked", "how")
        self.failed_legs = series(Counter, "failed_legs", "Legs that failed, by the engine's role", "role")
        seconds = "Seconds to the first byte of an answer", "Seconds to the end of an answer"
        self._first_byte = series(Histogram, "first_byte_seconds", seconds[0], buckets=BUCKETS)
        self._whole = series(Histogram, "request_seconds", seconds[1], buckets=BUCKETS)
        series(Gauge, "in_flight", "Requests of clients in flight").set_function(lambda: self.in_flight)
        oldest = series(Gauge, "oldest_waiting_seconds", "Of the oldest leg without a byte of its answer")
        oldest.set_function(self.oldest_waiting)
        self.registry.register(self)

    def answered(self, status: int, first_byte: float | None, whole: float) -> None:
        """A request is over. ``first_byte``, ``whole``: seconds from its arrival; None: nothing was sent."""
        self.requests.labels(status).inc()
        if first_byte is not None and status == 200:
            self._first_byte.observe(first_byte)
            self._whole.observe(whole)

    def oldest_waiting(self) -> float:
        now = self._clock()
        return round(max((now - leg.at for leg in self._legs if not (leg.answered or leg.held)), default=0.0), 1)

    def status(self) -> dict[str, Any]:
        """For the status page."""
        now = self._clock()
        return {
            "in_flight": self.in_flight,
            "oldest_waiting_seconds": self.oldest_waiting(),
            "engines": [
                {
                    "url": engine.url, "role": engine.role, "state": engine.state, "requests": engine.requests,
                    "load": round(engine.load, 1), "passed_over": engine.passed_over_until > now,
                    "handed_over": engine.handed_over.status(),
                }
                for engine in self._engines
            ],
        }  # fmt: skip

    def text(self) -> bytes:
        """The page of ``/metrics``."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Any]:
        found = {name: make(PREFIX + name, text, labels=of.split()) for name, make, text, of in OF_ENGINES}
        for engine in self._engines:
            role = engine.role.value
            gauges = {"up": engine.state == "up", "requests": engine.requests, "load": engine.load}
            for name, value in (gauges | {"degraded": bool(engine.handed_over.degraded)}).items():
                found[f"engine_{name}"].add_metric([role, engine.url], value)
        yield from found.values()
