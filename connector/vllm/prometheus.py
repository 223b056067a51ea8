"""``metrics`` in vLLM's own terms: its log line "KV Transfer metrics", and Prometheus series ``vllm:kvferry_*``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.connector.wire import metrics
from kvferry.connector.wire.metrics import MAX_PEERS, OTHER, PEER_RESULTS, Figures, Samples
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


_LABELS = {series.name: len(series.labels) for series in SERIES}
_LEVELS = {"leases": ("leases",), "lease_blocks": ("lease_blocks",), "sending": ("reads_sending",)} | {
    stage: ("requests", stage) for stage in STAGES
}
"""By level, its gauge, with the value of its label."""


def _values(labels: str, number: int) -> list[str]:
    """Of so many labels; the last of two may be empty."""
    values = labels.split(" ", number - 1) if number else []
    return values + [""] * (number - len(values))


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
        makers = {"counter": self._counter_cls, "gauge": self._gauge_cls, "histogram": self._histogram_cls}
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
        for name, counts in figures["counts"].items():
            unit = 1e6 if name.endswith("_seconds") else 1
            for labels, count in counts.items():
                child(name, engine_idx, *_values(labels, _LABELS[name])).inc(count / unit)
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
