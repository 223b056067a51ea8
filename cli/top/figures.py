"""What ``kvferry top`` shows of one engine: the samples of its page of metrics, its figures at one time, and what
changed between two times. Pure.

A page may have several engines (data parallelism); their figures are added. Counters that became smaller belong to an
engine that was started anew: what it has counted since then is the change.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from kvferry.transport.errors import ProtocolError

PREFIX, ROUTER = "vllm:kvferry_", "kvferry_router_"
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?")
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: the name of its series, its labels, and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """The samples of a page in Prometheus' text format:
    https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format. Raises ProtocolError: a line is
    neither a comment nor a sample; one line."""
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line)
        try:
            if match is None:
                raise ValueError
            yield Sample(match[1], _labels(match[2] or ""), float(match[3]))
        except ValueError:
            raise ProtocolError(f"line {number} is no sample of Prometheus: {line[:80]!r}") from None


def _labels(text: str) -> dict[str, str]:
    found, position = {}, 0
    while position < len(text.rstrip()):
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError
        found[match[1]] = _ESCAPED.sub(lambda escaped: "\n" if escaped[1] == "n" else escaped[1], match[2])
        position = match.end()
    return found


@dataclass
class Histogram:
    """A cumulative histogram: by upper bound, how many observations were at most as large."""

    buckets: Counter[float] = field(default_factory=Counter)
    count: float = 0.0

    def since(self, before: Histogram) -> Histogram:
        """The observations after ``before``."""
        if self.count < before.count:
            return self
        buckets = Counter({bound: count - before.buckets[bound] for bound, count in self.buckets.items()})
        return Histogram(buckets, self.count - before.count)

    def quantile(self, part: float) -> float | None:
        """The value below which ``part`` of the observations are, linear inside a bucket, as Prometheus'
        ``histogram_quantile`` computes it; ``None`` without observations. In the last bucket it is the bucket's lower
        bound."""
        if self.count <= 0:
            return None
        wanted, lower, below = part * self.count, 0.0, 0.0
        for bound in sorted(self.buckets):
            reached = self.buckets[bound]
            if reached >= wanted:
                if math.isinf(bound):
                    return lower
                inside = reached - below
                return lower + (bound - lower) * ((wanted - below) / inside if inside else 1.0)
            lower, below = bound, reached
        return lower


NOT_LOADED = ("local", "failed")
_SERIES = {
    "vllm:num_requests_running": ("requests", "running", ""), "vllm:num_requests_waiting": ("requests", "waiting", ""),
    "bytes_transferred_sum": ("nbytes", "", "plane"), "num_failed_handovers_total": ("failed", "", "reason"),
    "num_retries_total": ("retried", "", "reason"), "num_released_leases_total": ("leases", "released", ""),
    "num_expired_leases_total": ("leases", "expired", ""), "prompts_total": ("prompts", "", "result"),
    "vllm:prompt_tokens_by_source_total": ("tokens", "", "source"), "prefix_reads_total": ("prefixes", "", "result"),
    "prefix_tokens_read_total": ("prefixes", "tokens", ""),
}  # fmt: skip
"""Series that are added up: the counter, and the key in it or the label that has the key."""


@dataclass
class EngineFigures:
    """The figures of one page. Dictionaries are by plane or by reason."""

    models: set[str] = field(default_factory=set)
    kvferry: bool = False
    """The page has a series of KVFerry: the engine was started with its connector."""
    kv_cache_usage: float | None = None
    """The share of the KV blocks that requests and leases hold, 0 to 1; ``None`` where the page does not have it."""
    seconds: dict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    requests: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    leases: Counter[str] = field(default_factory=Counter)
    prompts: Counter[str] = field(default_factory=Counter)
    """By what D did: those that came with parameters of a P are ``loaded``, ``local`` or ``failed``."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why D did not load a prompt."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens by source, as vLLM counts them."""
    prefixes: Counter[str] = field(default_factory=Counter)
    """Requests that named sources of a prefix, by what the engine did, and the ``tokens`` that it read."""
    router: bool = False
    """The page is a router's."""
    sources: Counter[tuple[str, str]] = field(default_factory=Counter)
    """What a router counts: requests by the engine that reads and its source of a prefix."""

    @classmethod
    def of(cls, page: Iterable[Sample]) -> EngineFigures:
        """The figures of a page; series of others are left out."""
        figures = cls()
        for sample in page:
            name, labels, value = sample.name.removeprefix(PREFIX), sample.labels, sample.value
            figures.kvferry |= name != sample.name
            figures.router |= name.startswith(ROUTER)
            if name in _SERIES:
                table, key, label = _SERIES[name]
                counts: Counter[str] = getattr(figures, table)
                counts[labels.get(label, "") if label else key] += int(value)
            match name:
                case "prompts_total" if labels.get("result") in NOT_LOADED:
                    figures.reasons[labels.get("reason", "")] += int(value)
                case "kvferry_router_prefix_sources_total":
                    figures.sources[labels.get("reader", ""), labels.get("source", "")] += int(value)
                case "vllm:num_requests_running":
                    figures.models.add(labels.get("model_name", ""))
                case "vllm:num_requests_waiting_by_reason" if labels.get("reason") == "deferred":
                    figures.requests["deferred"] += int(value)
                case "vllm:kv_cache_usage_perc":
                    figures.kv_cache_usage = max(figures.kv_cache_usage or 0.0, value)
                case "handover_time_seconds_bucket":
                    figures.seconds[labels.get("plane", "")].buckets[float(labels.get("le", "inf"))] += int(value)
                case "handover_time_seconds_count":
                    figures.seconds[labels.get("plane", "")].count += value
        return figures


class PlaneRates(msgspec.Struct, frozen=True):
    """Hand-overs over one plane: rates between two polls; quantiles in milliseconds, ``None`` without hand-overs."""

    plane: str
    handovers_per_second: float
    bytes_per_second: float
    p50_ms: float | None
    p95_ms: float | None


class EngineRow(msgspec.Struct, frozen=True):
    """One engine in the table. ``down``: why there are no figures; empty where there are. ``deferred``: waiting
    requests whose KV cache is being loaded, or that wait for another resource. ``kvferry``: it runs with KVFerry's
    connector. ``failed``, ``retried`` and
    ``not_loaded``, by reason, ``handovers`` (of each rank), ``prompts``, by what D did, ``tokens``, of prompts by
    source, ``prefixes``, as ``EngineFigures`` has them, and leases count from the start of the engine. A ``router`` has
    only ``sources``: by the URL of an engine, how many requests named another one to it as a source of a prefix."""

    engine: str
    down: str = ""
    kvferry: bool = False
    model: str = ""
    running: int = 0
    waiting: int = 0
    deferred: int = 0
    planes: tuple[PlaneRates, ...] = ()
    failed: dict[str, int] = {}
    retried: dict[str, int] = {}
    handovers: int = 0
    prompts: dict[str, int] = {}
    not_loaded: dict[str, int] = {}
    tokens: dict[str, int] = {}
    leases_released: int = 0
    leases_expired: int = 0
    leases_released_per_second: float = 0.0
    prefixes: dict[str, int] = {}
    router: bool = False
    sources: dict[str, dict[str, int]] = {}


def row(engine: str, first: EngineFigures, before: EngineFigures, now: EngineFigures, seconds: float) -> EngineRow:
    """The row of an engine. ``first``: figures at the begin of the time of which the quantiles are taken. ``before``:
    figures of the last poll, ``seconds``, which are over 0, before ``now``."""
    planes = []
    for plane, histogram in sorted(now.seconds.items()):
        count = histogram.since(before.seconds.get(plane, Histogram())).count
        window = histogram.since(first.seconds.get(plane, Histogram()))
        p50, p95 = (None if (part := window.quantile(share)) is None else part * 1e3 for share in (0.5, 0.95))
        rate = _growth(now.nbytes[plane], before.nbytes[plane]) / seconds
        planes.append(PlaneRates(plane, count / seconds, rate, p50, p95))
    released = now.leases["released"]
    return EngineRow(
        engine=engine, kvferry=now.kvferry, model=", ".join(sorted(now.models)), running=now.requests["running"],
        waiting=now.requests["waiting"], deferred=now.requests["deferred"], planes=tuple(planes),
        failed=_not_zero(now.failed), retried=_not_zero(now.retried), not_loaded=_not_zero(now.reasons),
        handovers=int(sum(histogram.count for histogram in now.seconds.values())),
        prompts=_not_zero(now.prompts), tokens=_not_zero(now.tokens), prefixes=_not_zero(now.prefixes),
        leases_released=released, leases_expired=now.leases["expired"],
        leases_released_per_second=_growth(released, before.leases["released"]) / seconds,
    )  # fmt: skip


def router_row(name: str, now: EngineFigures) -> EngineRow:
    """The row of a router."""
    sources: dict[str, dict[str, int]] = {}
    for (reader, source), requests in sorted(now.sources.items()):
        sources.setdefault(reader, {})[source] = requests
    return EngineRow(name, router=True, sources=sources)


def _growth(now: float, before: float) -> float:
    return now if now < before else now - before


def _not_zero(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items()) if count}
