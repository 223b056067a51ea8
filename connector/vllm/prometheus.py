"""``metrics`` in vLLM's own terms: its log line "KV Transfer metrics", and Prometheus series ``vllm:kvferry_*``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from kvferry.connector.protocol import metrics
from kvferry.connector.protocol.metrics import Figures, HandoverStats, Samples
from kvferry.connector.vllm.compat import KVConnectorPromMetrics, KVConnectorStats

TIME_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds."""
BYTES_BUCKETS = tuple(float(1 << shift) for shift in range(16, 38, 2))
"""64 KiB to 64 GiB."""


@dataclass
class KVFerryStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Figures of one worker, or of several added up. ``data`` is :class:`~kvferry.connector.protocol.metrics.Figures`.

    The dictionary given is copied: vLLM hands the same one to every logger, and adds to its first.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = cast(Figures, {**metrics.no_figures(), **self.data})
        self.data = cast(dict[str, Any], metrics.add(metrics.no_figures(), given))

    @classmethod
    def drain(cls, stats: HandoverStats) -> KVFerryStats | None:
        """All that ``stats`` has counted since the last call; None where nothing happened."""
        figures = stats.take()
        return None if figures is None else cls(data=cast(dict[str, Any], figures))

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


class KVFerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The Prometheus series of one API server. Every series has vLLM's own labels, and the one named here.

    - ``vllm:kvferry_handover_time_seconds`` histogram, ``plane``: D's request to the completed report
    - ``vllm:kvferry_bytes_transferred`` histogram, ``plane``: per hand-over and D rank
    - ``vllm:kvferry_tokens`` counter, ``plane``: tokens loaded
    - ``vllm:kvferry_num_failed_handovers`` counter, ``reason``
    - ``vllm:kvferry_num_retries`` counter, ``reason``: attempts that failed and were followed by another
    - ``vllm:kvferry_num_plane_changes`` counter, ``plane``: the plane that broke
    - ``vllm:kvferry_num_expired_leases`` counter, ``reason``: "expired", or "cap"
    - ``vllm:kvferry_num_released_leases`` counter
    - ``vllm:kvferry_bytes_sent`` counter, ``when``: P sent them while it "computes" the prompt, or when it is "leased"
    - ``vllm:kvferry_num_dropped_messages`` counter, ``reason``
    - ``vllm:kvferry_num_streamed_handovers`` counter: of prompts that P still computed when D took blocks for them
    - ``vllm:kvferry_streamed_block_seconds`` counter: for how long D held these blocks until the load ended, added up
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children: dict[tuple[str, int, str | None], Any] = {}
        self._time = self._make(
            self._histogram_cls,
            "handover_time_seconds",
            "Time of a hand-over on D, from the request to the report.",
            "plane",
            buckets=TIME_BUCKETS,
        )
        self._bytes = self._make(
            self._histogram_cls, "bytes_transferred", "Bytes of a hand-over on D.", "plane", buckets=BYTES_BUCKETS
        )
        counter = self._counter_cls
        self._tokens = self._make(counter, "tokens", "Tokens whose KV cache D loaded from P.", "plane")
        self._failed = self._make(counter, "num_failed_handovers", "Hand-overs that failed on D.", "reason")
        self._retried = self._make(counter, "num_retries", "Attempts that another attempt followed on D.", "reason")
        self._changed = self._make(
            counter, "num_plane_changes", "Links of D that took another data plane because one broke.", "plane"
        )
        self._expired = self._make(counter, "num_expired_leases", "Leases that P ended by itself.", "reason")
        self._released = self._make(counter, "num_released_leases", "Leases that D released.", None)
        self._sent = self._make(counter, "bytes_sent", "Bytes that P sent while it computed, or after.", "when")
        self._dropped = self._make(
            counter, "num_dropped_messages", "Control messages and connections that were not served.", "reason"
        )
        self._streamed = self._make(
            counter, "num_streamed_handovers", "Hand-overs on D of prompts that P still computed.", None
        )
        self._block_seconds = self._make(
            counter, "streamed_block_seconds", "Seconds for which blocks of these hand-overs were held, added up.", None
        )
        for engine in per_engine_labelvalues:  # a rate needs the zero before the first event
            for kind in metrics.FAILURE_KINDS:
                self._child(self._failed, engine, kind)
                self._child(self._retried, engine, kind)
            for end in metrics.LEASE_ENDS[1:]:
                self._child(self._expired, engine, end)
            for when in metrics.SENT_WHEN:
                self._child(self._sent, engine, when)
            for unlabelled in (self._released, self._streamed, self._block_seconds):
                self._child(unlabelled, engine, None)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        figures = cast(Figures, {**metrics.no_figures(), **transfer_stats_data})
        for plane, samples in figures["finished"].items():
            self._observe(plane, samples, engine_idx)
        for reason, count in figures["failed"].items():
            self._child(self._failed, engine_idx, reason).inc(count)
        for reason, count in figures["retried"].items():
            self._child(self._retried, engine_idx, reason).inc(count)
        for plane, count in figures["planes_changed"].items():
            self._child(self._changed, engine_idx, plane).inc(count)
        for end, count in figures["leases"].items():
            if end == "released":
                self._child(self._released, engine_idx, None).inc(count)
            else:
                self._child(self._expired, engine_idx, end).inc(count)
        for when, count in figures["sent"].items():
            self._child(self._sent, engine_idx, when).inc(count)
        for reason, count in figures["dropped"].items():
            self._child(self._dropped, engine_idx, reason).inc(count)
        if figures["streamed"]:
            self._child(self._streamed, engine_idx, None).inc(figures["streamed"].get("loads", 0))
            self._child(self._block_seconds, engine_idx, None).inc(figures["streamed"].get("block_ms", 0) / 1e3)

    def _observe(self, plane: str, samples: Samples, engine: int) -> None:
        time, nbytes = self._child(self._time, engine, plane), self._child(self._bytes, engine, plane)
        for microseconds in samples["microseconds"]:
            time.observe(microseconds / 1e6)
        for size in samples["nbytes"]:
            nbytes.observe(size)
        count, all_microseconds, all_bytes, all_tokens = samples["rest"]
        for _ in range(count):  # known by their sums only: right in count and sum, and at their mean in the buckets
            time.observe(all_microseconds / count / 1e6)
            nbytes.observe(all_bytes / count)
        self._child(self._tokens, engine, plane).inc(all_tokens + sum(samples["tokens"]))

    def _make(self, kind: Any, name: str, text: str, label: str | None, **options: Any) -> tuple[str, Any]:
        labels = [*self._labelnames, *([label] if label else [])]
        return name, kind(name=f"vllm:kvferry_{name}", documentation=text, labelnames=labels, **options)

    def _child(self, metric: tuple[str, Any], engine: int, value: str | None) -> Any:
        name, parent = metric
        key = (name, engine, value)
        child = self._children.get(key)
        if child is None:
            values = [*self.per_engine_labelvalues[engine], *([] if value is None else [value])]
            child = self._children[key] = parent.labels(*values)
        return child
