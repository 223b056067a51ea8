"""One report of an engine out of the reports of its workers, generic over the engine's own types.

Every worker (rank) returns an output with a ``kv_connector_output``: the worker half's ``StepResults`` as they are, or
a report of the engine's own type. A request counts as finished only when every worker has reported it; everything else
is merged. Nothing of an engine is imported: outputs are read by attribute, and the merged ``kv_connector_output`` is of
the type that the engine itself uses.
"""

from __future__ import annotations

import dataclasses
import logging
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Self

from kvferry.connector.wire.step_plan import LoadEnd, StepResults, of_both
from kvferry.transport.errors import ProtocolError
from kvferry.transport.limited_log import RateLimitedLog

_log = logging.getLogger("vllm.kvferry.aggregator")
_limited = RateLimitedLog(_log)


_Tally = dict[str, tuple[int, list[int]]]
"""Of each request that is not complete: how many reports it needs, and the workers that have reported it."""

UNKNOWN_WORKER = -1
"""The worker of a report from a step that failed. No such report counts as a repetition of another one."""


@dataclasses.dataclass
class ConnectorOutput:
    """The ``kv_connector_output`` of an engine that has no type of its own for it.

    ``finished_sending``, ``finished_recving``: the requests whose lease or load has ended on all workers, ``None``
    where there are none. ``failed_recving``: those of ``finished_recving`` that at least one worker did not load.
    ``load_ends``: of the loads that workers have reported in this step.
    ``expected_finished_count``: how many workers report each request; 0 where it stays. The other fields are those of
    other connectors: ``kv_connector_stats``, ``kv_cache_events``, ``kv_connector_worker_meta``, ``invalid_block_ids``.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    invalid_block_ids: set[int] = dataclasses.field(default_factory=set)
    failed_recving: set[str] = dataclasses.field(default_factory=set)
    load_ends: dict[str, LoadEnd] = dataclasses.field(default_factory=dict)
    expected_finished_count: int = 0

    def is_empty(self) -> bool:
        """Whether the report has nothing for the scheduler."""
        return not any(
            getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "expected_finished_count"
        )


class KVOutputAggregator:
    """Merges the workers' outputs of each step, and counts reports across steps.

    A worker may report a request some steps after the others, and a worker that repeats a report counts once. A load
    counts as failed where any worker reports it as failed.
    """

    def __init__(self, expected_finished_count: int):
        """``expected_finished_count``: how many workers report each request."""
        self._expected = expected_finished_count
        self._sending: _Tally = {}
        self._recving: _Tally = {}
        self._failed: set[str] = set()
        self._held: list[tuple[int, Any]] = []
        self._type: type[Any] | None = None

    @classmethod
    def from_connector(cls, connector: Any, world_size: int) -> Self:
        """An aggregator of as many reports as the connector's ``get_finished_count`` names; ``None``: one from every
        worker."""
        return cls(connector.get_finished_count() or world_size)

    def aggregate(self, outputs: Sequence[Any], output_rank: int = 0) -> Any:
        """The output of worker ``output_rank``, changed in place: the ``kv_connector_output`` of all workers is merged
        into it. ``None`` where that worker has no output; the reports of the others are then kept for the next step.

        ``outputs``: one per worker, always in the same order; ``None`` for a worker without an output in this step. Its
        ``kv_connector_output`` is ``StepResults``, or has vLLM's fields of ``ConnectorOutput``.
        """
        reports = [(worker, output.kv_connector_output) for worker, output in enumerate(outputs) if output is not None]
        reports = self._held + [(worker, _as_output(report)) for worker, report in reports if report is not None]
        output = outputs[output_rank]
        if output is None:
            self._held = reports
            return None
        self._held = []
        output.kv_connector_output = self._merge(reports, len(outputs), output)
        return output

    def ft_defer_kv_connector_outputs(self, kv_connector_outputs: Sequence[Any]) -> None:
        """Keep the reports of a step in which a worker failed for the next ``aggregate``: what has ended has ended.

        The cache events of these reports are dropped, as vLLM 0.33 does: without the events of the workers that failed
        they would speak for too few workers, and an event that is missing costs a cache hit only. The reports are of
        any workers, in any order; ``None`` for a worker without one.
        """
        for report in kv_connector_outputs:
            if report is not None:
                output = _as_output(report)
                output.kv_cache_events = None
                self._held.append((UNKNOWN_WORKER, output))

    def pending(self) -> dict[str, tuple[int, ...]]:
        """The requests that some workers have reported and others have not, each with the workers that have. For the
        message of an engine that gives up waiting. ``UNKNOWN_WORKER`` stands for a worker of a step that failed."""
        return {request: tuple(workers) for request, (_, workers) in (self._sending | self._recving).items()}

    def _merge(self, reports: Sequence[tuple[int, Any]], world_size: int, output: Any) -> Any:
        sent: set[str] = set()
        received: set[str] = set()
        invalid: set[int] = set()
        ends: dict[str, LoadEnd] = {}
        stats = events = meta = None
        for worker, report in reports:
            announced = report.expected_finished_count
            if announced > 0 and announced != self._expected:
                _log.debug("workers that report a request: %d, was %d", announced, self._expected)
                self._expected = announced
            sent |= _count(self._sending, worker, report.finished_sending, self._expected, world_size)
            received |= _count(self._recving, worker, report.finished_recving, self._expected, world_size)
            invalid |= report.invalid_block_ids
            self._failed |= report.failed_recving
            for request, end in getattr(report, "load_ends", {}).items():
                ends[request] = of_both(end, ends[request]) if request in ends else end
            stats = _merged(stats, report.kv_connector_stats)
            meta = _merged(meta, report.kv_connector_worker_meta, mixed=True)
            events = _merged(events, report.kv_cache_events)
        failed = self._failed & received
        self._failed -= failed
        values = {
            "finished_sending": sent or None,
            "finished_recving": received or None,
            "kv_connector_stats": stats or None,
            "kv_cache_events": events or None,
            "kv_connector_worker_meta": meta or None,
            "invalid_block_ids": invalid,
            "failed_recving": failed,
            "load_ends": ends,
            "expected_finished_count": self._expected,
        }
        if self._type is None:
            self._type = _report_type(reports, output)
        known = {field.name for field in dataclasses.fields(self._type)}
        return self._type(**{name: value for name, value in values.items() if name in known})


def _count(tally: _Tally, worker: int, requests: set[str] | None, expected: int, world_size: int) -> set[str]:
    """Count one worker's report, and return the requests that it completes.

    How many reports a request needs is fixed by its first one. A worker that repeats itself counts once, unless more
    reports are expected than there are workers.
    """
    done: set[str] = set()
    for request in requests or ():
        needed, workers = tally.setdefault(request, (expected, []))
        if worker in workers and worker != UNKNOWN_WORKER and needed <= world_size:
            _limited.warning("twice", "worker %d reported request %s twice", worker, request)
            continue
        workers.append(worker)
        if len(workers) == needed:
            done.add(request)
            del tally[request]
    return done


def _as_output(report: Any) -> Any:
    """A worker's report with the fields of ``ConnectorOutput``."""
    if not isinstance(report, StepResults):
        return report
    return ConnectorOutput(
        report.sent or None, report.received or None, failed_recving=report.failed, load_ends=report.ends
    )


def _merged(total: Any, new: Any, mixed: bool = False) -> Any:
    """Two containers of a connector merged into one. The first may be changed and returned. ``mixed``: the container
    itself can merge with a container of another type."""
    if total is None:
        return new
    if not new:
        return total
    if not mixed and not isinstance(total, type(new)):
        _limited.warning(
            "dropped", "dropped %s of one worker, others sent %s", type(new).__name__, type(total).__name__
        )
        return total
    if hasattr(total, "increment_workers"):  # events: a list to extend, and how many workers it speaks for
        total.add_events(new.get_all_events())
        total.increment_workers(1)
        return total
    return total.aggregate(new)


def _report_type(reports: Sequence[tuple[int, Any]], output: Any) -> type[Any]:
    """The engine's type for a report: the type that its workers send, else the type that the output declares, else
    ``ConnectorOutput``."""
    candidates: list[Any] = [type(report) for _, report in reports]
    try:
        declared = typing.get_type_hints(type(output)).get("kv_connector_output")
    except (NameError, TypeError):  # annotations that exist for type checkers only
        declared = None
    candidates += [declared, *typing.get_args(declared)]
    for candidate in candidates:
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return ConnectorOutput


BlockGroups = tuple[list[int], ...]


def yield_req_data(scheduler_output: Any) -> Iterator[tuple[str, BlockGroups | None, bool]]:
    """Every scheduled request: its id, block ids per KV cache group, and whether these are all the blocks that it has.

    New requests come first. Of a new request, and of a request that resumes after a preemption, the block ids are all
    its blocks. Of a request that runs on they are the blocks that this step added, or ``None``. This is the meaning of
    vLLM 0.33; before, the third value was false for new requests too.

    ``scheduler_output``: with ``scheduled_new_reqs`` (``req_id``, ``block_ids``) and ``scheduled_cached_reqs``
    (``req_ids``, ``new_block_ids``, ``resumed_req_ids``), as vLLM's. Raises ProtocolError: lists of the cached requests
    differ in length; before anything is yielded.
    """
    cached = scheduler_output.scheduled_cached_reqs
    if len(cached.req_ids) != len(cached.new_block_ids):
        raise ProtocolError(f"{len(cached.req_ids)} running requests with {len(cached.new_block_ids)} lists of blocks")
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id, request.block_ids, True
    for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        yield request_id, blocks, request_id in cached.resumed_req_ids
