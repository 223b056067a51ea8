"""``metrics`` in vLLM's own terms: its log line "KV Transfer metrics", and Prometheus series ``vllm:kvferry_*``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.connector.wire import metrics
from kvferry.connector.wire.metrics import MAX_PEERS, OTHER, PEER_RESULTS, Figures, Samples, Total
from kvferry.connector.wire.series import PREFIX, SERIES, STAGES


@dataclass
class KVFerryStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Figures of one worker, or of several added up. ``data`` is :class:`~kvferry.connector.wire.metrics.Figures`.

    The dictionary given is copied: vLLM hands the same one to every logger, and adds to its first.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = cast(Figures, {**metrics.no_figures(), **self.data})
        self.data = cast(dict[str, Any], metrics.add(metrics.no_figures(), given))

    def reset(self) -> None:
        self.data = cast(dict[str, Any], metrics.no_figures())

    def aggregate(self, other: KVConnectorStats) -> KVFerryStats:
        metrics.add(self._figures, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return metrics.reduce(self._figures)

    def is_empty(self) -> bool:
        return metrics.is_empty(self._figures)

    @property
    def _figures(self) -> Figures:
        return cast(Figures, self.data)


_COUNTS = {
    "failed": "num_failed_handovers",
    "retried": "num_retries",
    "planes_changed": "num_plane_changes",
    "sent": "bytes_sent",
    "dropped": "num_dropped_messages",
}
"""By the figures' counts, the series that has them by label."""
_TOTALS: dict[Total, tuple[str, float]] = {
    "stale_reads": ("num_stale_reads", 1),
    "step_wait_us": ("step_wait_seconds", 1e6),
    "thread_delay_us": ("thread_delay_seconds", 1e6),
    "lease_block_ms": ("lease_block_seconds", 1e3),
    "missing_hooks": ("num_missing_hooks", 1),
    "prefix_read": ("prefix_tokens_read", 1),
    "prefix_wasted": ("prefix_tokens_wasted", 1),
    "prefix_wait_us": ("prefix_wait_seconds", 1e6),
}
"""By count, its series, and how many of the count make one there."""
_LEVELS = {"leases": ("leases",), "lease_blocks": ("lease_blocks",), "sending": ("reads_sending",)} | {
    stage: ("requests", stage) for stage in STAGES
}
"""By level, its gauge, with the value of its label."""


def _without_created(kind: Any) -> Any:
    """A type of metric without series of the times at which its series were made, which are as many again. Ray's types
    have none, nor has a page of several processes."""

    class Metric(kind):  # type: ignore[misc]
        def collect(self) -> Iterator[Any]:
            for family in super().collect():
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family

    return Metric


class KVFerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The Prometheus series of one API server, as ``series`` lists them. Every series has vLLM's own labels, too.

    Of several API servers each counts the steps that it is told of; a gauge has the value that was set last.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children: dict[tuple[str, int, tuple[str, ...]], Any] = {}
        self._peers: dict[int, set[str]] = {}
        kinds = {"counter": self._counter_cls, "gauge": self._gauge_cls, "histogram": self._histogram_cls}
        makers = {name: _without_created(kind) for name, kind in kinds.items()}
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._metrics: dict[str, Any] = {}
        for series in SERIES:
            options: dict[str, Any] = {"buckets": series.buckets} if series.kind == "histogram" else {}
            if series.kind == "gauge":
                options["multiprocess_mode"] = "mostrecent"
            self._metrics[series.name] = makers[series.kind](
                name=PREFIX + series.name,
                documentation=series.meaning.replace("`", ""),
                labelnames=[*labelnames, *series.labels],
                **options,
            )
            for engine in per_engine_labelvalues if not series.setting or extra.get(series.setting) else ():
                for values in series.first if series.labels else ((),):
                    self._child(series.name, engine, *values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        figures, child = cast(Figures, {**metrics.no_figures(), **transfer_stats_data}), self._child
        for plane, samples in figures["finished"].items():
            self._observe(plane, samples, engine_idx)
        for kind, name in _COUNTS.items():
            for label, count in figures[kind].items():  # type: ignore[literal-required]
                child(name, engine_idx, label).inc(count)
        for counts, name in ((figures["prompts"], "prompts"), (figures["prefixes"], "prefix_reads")):
            for end, count in counts.items():
                result, _, reason = end.partition(" ")
                child(name, engine_idx, result, reason).inc(count)
        for end, count in figures["leases"].items():
            if end == "released":
                child("num_released_leases", engine_idx).inc(count)
            else:
                child("num_expired_leases", engine_idx, end).inc(count)
        if figures["streamed"]:
            child("num_streamed_handovers", engine_idx).inc(figures["streamed"].get("loads", 0))
            child("streamed_block_seconds", engine_idx).inc(figures["streamed"].get("block_ms", 0) / 1e3)
        for total, (name, unit) in _TOTALS.items():
            if count := figures["totals"].get(total, 0):
                child(name, engine_idx).inc(count / unit)
        for peer, counts in figures["peers"].items():
            self._count_peer(peer, counts, engine_idx)
        for level, value in metrics.levels(figures).items():
            if level in _LEVELS:
                name, *values = _LEVELS[level]
                child(name, engine_idx, *values).set(value)

    def _observe(self, plane: str, samples: Samples, engine: int) -> None:
        time = self._child("handover_time_seconds", engine, plane)
        nbytes = self._child("bytes_transferred", engine, plane)
        for microseconds in samples["microseconds"]:
            time.observe(microseconds / 1e6)
        for size in samples["nbytes"]:
            nbytes.observe(size)
        count, all_microseconds, all_bytes, all_tokens = samples["rest"]
        for _ in range(count):  # known by their sums only: right in count and sum, and at their mean in the buckets
            time.observe(all_microseconds / count / 1e6)
            nbytes.observe(all_bytes / count)
        self._child("tokens", engine, plane).inc(all_tokens + sum(samples["tokens"]))

    def _count_peer(self, peer: str, counts: dict[str, int], engine: int) -> None:
        names = self._peers.setdefault(engine, set())  # each rank may name others
        if peer not in names and len(names) >= MAX_PEERS:
            peer = OTHER
        if peer != OTHER:
            names.add(peer)
        for result in PEER_RESULTS:
            self._child("peer_handovers", engine, peer, result).inc(counts.get(result, 0))
        self._child("peer_bytes", engine, peer).inc(counts.get("bytes", 0))
        self._child("peer_seconds", engine, peer).inc(counts.get("microseconds", 0) / 1e6)

    def _child(self, name: str, engine: int, *values: str) -> Any:
        key = (name, engine, values)
        child = self._children.get(key)
        if child is None:
            labels = [*self.per_engine_labelvalues[engine], *values]
            child = self._children[key] = self._metrics[name].labels(*labels)
        return child
