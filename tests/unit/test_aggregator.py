"""The aggregator alone, on types of its own and of 0.26's shape, and beside vLLM's own on vLLM's outputs."""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connector.engine.aggregator import ConnectorOutput, KVOutputAggregator
from kvferry.connector.wire.step_plan import StepResults


@dataclass
class Output:
    """An engine's output that declares no report type."""

    kv_connector_output: Any = None
    rank: int = 0


@dataclass
class OlderReport:
    """As vLLM 0.26's: no ``failed_recving``."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    invalid_block_ids: set[int] = field(default_factory=set)
    expected_finished_count: int = 0


def outputs(*reports: Any) -> list[Output | None]:
    return [None if report is None else Output(report, rank) for rank, report in enumerate(reports)]


def recving(*requests: str, failed: tuple[str, ...] = ()) -> ConnectorOutput:
    return ConnectorOutput(finished_recving=set(requests), failed_recving=set(failed))


def finished(aggregator: KVOutputAggregator, *reports: Any) -> set[str] | None:
    result = aggregator.aggregate(outputs(*reports))
    assert result is not None
    return result.kv_connector_output.finished_recving


def test_finished_only_when_every_worker_reported() -> None:
    aggregator = KVOutputAggregator(2)
    assert finished(aggregator, recving("a"), recving("b")) is None
    assert finished(aggregator, recving("b"), recving()) == {"b"}
    assert finished(aggregator, recving("c"), recving("a", "c")) == {"a", "c"}
    assert finished(aggregator, recving("a"), recving("a")) == {"a"}  # a new life of the same id


def test_sending_and_receiving_are_counted_apart() -> None:
    aggregator = KVOutputAggregator(2)
    report = aggregator.aggregate(outputs(ConnectorOutput(finished_sending={"a"}), recving("a")))
    assert report is not None and report.kv_connector_output.is_empty()


def test_the_output_asked_for_comes_back_itself() -> None:
    workers = outputs(ConnectorOutput(invalid_block_ids={1}), ConnectorOutput(invalid_block_ids={2}))
    result = KVOutputAggregator(2).aggregate(workers, output_rank=1)
    assert result is not None and result is workers[1] and result.kv_connector_output.invalid_block_ids == {1, 2}


def test_one_failed_worker_fails_the_request_once_all_reported() -> None:
    aggregator = KVOutputAggregator(2)
    first = aggregator.aggregate(outputs(recving("a", failed=("a",)), recving()))
    assert first is not None and first.kv_connector_output.failed_recving == set()
    then = aggregator.aggregate(outputs(recving(), recving("a")))
    assert then is not None and then.kv_connector_output.failed_recving == {"a"}
    again = aggregator.aggregate(outputs(recving("a"), recving("a")))
    assert again is not None and again.kv_connector_output.failed_recving == set()


def test_a_worker_that_repeats_itself_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    aggregator = KVOutputAggregator(2)
    with caplog.at_level(logging.WARNING, "vllm.kvferry"):
        assert finished(aggregator, recving("a"), recving()) is None
        assert finished(aggregator, recving("a"), recving()) is None
    assert "worker 0 reported request a twice" in caplog.text
    assert finished(aggregator, recving(), recving("a")) == {"a"}


def test_a_worker_without_an_output_takes_nothing_from_the_others() -> None:
    aggregator = KVOutputAggregator(3)
    assert finished(aggregator, recving("a"), None, recving("a")) is None
    assert finished(aggregator, recving(), recving("a"), None) == {"a"}


def test_reports_beside_a_missing_output_wait_for_the_next_step() -> None:
    aggregator = KVOutputAggregator(2)
    assert aggregator.aggregate(outputs(None, recving("a", failed=("a",)))) is None
    assert aggregator.aggregate(outputs(None, None)) is None
    result = aggregator.aggregate(outputs(recving("a"), None))
    assert result is not None
    assert result.kv_connector_output.finished_recving == result.kv_connector_output.failed_recving == {"a"}


def test_workers_may_change_how_many_reports_a_new_request_needs() -> None:
    aggregator = KVOutputAggregator(2)
    assert finished(aggregator, recving("old"), recving()) is None
    one = ConnectorOutput(finished_recving={"new"}, expected_finished_count=1)
    result = aggregator.aggregate(outputs(one, recving()))
    assert result is not None and result.kv_connector_output.finished_recving == {"new"}
    assert result.kv_connector_output.expected_finished_count == 1
    assert finished(aggregator, recving(), recving("old")) == {"old"}


@pytest.mark.parametrize(("count", "expected"), [(None, 4), (0, 4), (1, 1), (3, 3)])
def test_a_connector_may_say_how_many_report(count: int | None, expected: int) -> None:
    connector = SimpleNamespace(get_finished_count=lambda: count)
    aggregator = KVOutputAggregator.from_connector(connector, 4)
    for rank in range(4):
        reports = [recving("a") if rank == other else recving() for other in range(4)]
        if rank + 1 <= expected:
            assert finished(aggregator, *reports) == ({"a"} if rank + 1 == expected else None)


def test_the_report_is_of_the_workers_type() -> None:
    aggregator = KVOutputAggregator(2)
    result = aggregator.aggregate(outputs(OlderReport(finished_sending={"a"}), OlderReport(finished_sending={"a"})))
    assert result is not None and result.kv_connector_output == OlderReport(
        finished_sending={"a"}, expected_finished_count=2
    )
    assert type(aggregator.aggregate(outputs(None, None))) is type(None)
    later = aggregator.aggregate([Output(), Output()])
    assert later is not None and type(later.kv_connector_output) is OlderReport


def test_without_any_type_the_report_is_ours() -> None:
    plain = [SimpleNamespace(kv_connector_output=None) for _ in range(2)]
    result = KVOutputAggregator(2).aggregate(plain)
    assert result is plain[0] and result.kv_connector_output == ConnectorOutput(expected_finished_count=2)


def test_the_type_may_be_declared_by_the_output() -> None:
    @dataclass
    class Declares:
        kv_connector_output: OlderReport | None = None

    Declares.__annotations__["kv_connector_output"] = OlderReport | None
    result = KVOutputAggregator(1).aggregate([Declares()])
    assert result is not None and type(result.kv_connector_output) is OlderReport


def test_stats_of_two_types_do_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    class Numbers(list[int]):
        def aggregate(self, other: list[int]) -> Numbers:
            return Numbers([*self, *other])

    reports = [ConnectorOutput(kv_connector_stats=stats) for stats in (Numbers([1]), {"x": 1}, Numbers([2]))]
    result = KVOutputAggregator(3).aggregate(outputs(*reports))
    assert result is not None and result.kv_connector_output.kv_connector_stats == [1, 2]
    assert "dropped dict of one worker, others sent Numbers" in caplog.text


# On the worker halves' own results


def merged(aggregator: KVOutputAggregator, *results: StepResults | None) -> ConnectorOutput:
    report = aggregator.aggregate([Output(each, rank) for rank, each in enumerate(results)])
    assert report is not None and isinstance(report.kv_connector_output, ConnectorOutput)
    return report.kv_connector_output


def test_the_worker_halves_results_are_taken_as_they_are() -> None:
    aggregator = KVOutputAggregator(2)
    first = merged(aggregator, StepResults(sent={"a"}, received={"b"}), StepResults(sent={"a"}))
    assert first == ConnectorOutput(finished_sending={"a"}, expected_finished_count=2)
    assert merged(aggregator, StepResults(), None).is_empty()
    assert merged(aggregator, None, StepResults(received={"b"})).finished_recving == {"b"}


def test_one_rank_is_late_one_fails_and_one_repeats_itself(caplog: pytest.LogCaptureFixture) -> None:
    aggregator, ok, bad = KVOutputAggregator(3), StepResults(received={"r"}), StepResults({"s"}, {"r"}, {"r"})
    assert aggregator.pending() == {}
    with caplog.at_level(logging.WARNING, "vllm.kvferry"):
        assert merged(aggregator, ok, StepResults(), bad).is_empty()
        assert aggregator.pending() == {"r": (0, 2), "s": (2,)}
        assert merged(aggregator, ok, StepResults(sent={"s"}), StepResults()).is_empty()
    assert "worker 0 reported request r twice" in caplog.text
    assert aggregator.pending() == {"r": (0, 2), "s": (2, 1)}
    last = merged(aggregator, StepResults(sent={"s"}), ok, StepResults())
    assert last.finished_recving == last.failed_recving == {"r"} and last.finished_sending == {"s"}
    assert aggregator.pending() == {}
    again = merged(aggregator, ok, ok, ok)
    assert again.finished_recving == {"r"} and not again.failed_recving


@pytest.mark.parametrize("seed", range(20))
def test_every_request_is_reported_once_whatever_the_order(seed: int) -> None:
    """Against a table of all reports: random ranks, steps without an output, failures, ranks that repeat themselves."""
    rng, world = random.Random(seed), random.Random(seed).randint(1, 4)
    aggregator = KVOutputAggregator(world)
    due = [(f"r{n}", rank, rng.random() < 0.2) for n in range(30) for rank in range(world)]
    rng.shuffle(due)
    seen: dict[str, set[int]] = {}
    failed = {request for request, _, fails in due if fails}
    finished: set[str] = set()
    while due or finished != seen.keys():
        results = [StepResults() for _ in range(world)]
        for request, rank, fails in [due.pop() for _ in range(min(len(due), rng.randint(0, 5)))]:
            results[rank].received.add(request)
            results[rank].failed |= {request} if fails else set()
            seen.setdefault(request, set()).add(rank)
        open_now = sorted(request for request, ranks in seen.items() if 0 < len(ranks) < world)
        for request in open_now[:1]:
            results[min(seen[request])].received.add(request)
        output = aggregator.aggregate([Output(each) for each in results])
        assert output is not None
        done = output.kv_connector_output.finished_recving or set()
        assert not done & finished and all(len(seen[request]) == world for request in done)
        assert output.kv_connector_output.failed_recving == done & failed
        finished |= done
        assert set(aggregator.pending()) == seen.keys() - finished
    assert len(finished) == 30


def merge(aggregator: KVOutputAggregator, reports: list[StepResults]) -> ConnectorOutput:
    result = aggregator.aggregate(outputs(*reports))
    assert result is not None
    report: ConnectorOutput = result.kv_connector_output
    return report


def test_reports_of_a_step_that_failed_count_in_the_next_one() -> None:
    """Whose they are is not known: two workers' reports of one request are two."""
    aggregator = KVOutputAggregator(3)
    failed = [StepResults(sent={"a"}, received={"b"}, failed={"b"}), None, StepResults(sent={"a"})]
    aggregator.ft_defer_kv_connector_outputs(failed)
    assert aggregator.pending() == {}, "they are merged with the next step's"
    report = merge(aggregator, [StepResults(received={"b"}), StepResults(sent={"a"}, received={"b"}), StepResults()])
    assert report.finished_sending == {"a"} and report.finished_recving == {"b"} == report.failed_recving
    assert not merge(aggregator, [StepResults()] * 3).finished_sending, "once"


def test_cache_events_of_a_step_that_failed_are_dropped() -> None:
    aggregator = KVOutputAggregator(1)
    aggregator.ft_defer_kv_connector_outputs([ConnectorOutput({"a"}, kv_cache_events=["stored"])])
    report = merge(aggregator, [StepResults()])
    assert report.finished_sending == {"a"} and report.kv_cache_events is None


# Beside vLLM's own


def vllm_types() -> SimpleNamespace:
    kv_events: Any = pytest.importorskip("vllm.distributed.kv_events")
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator as Theirs
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    @dataclass
    class Stats(KVConnectorStats):
        def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
            for name, values in other.data.items():
                self.data[name] = [*self.data.get(name, []), *values]
            return self

        def is_empty(self) -> bool:
            return not self.data

    @dataclass
    class Meta(KVConnectorWorkerMetadata):
        seen: tuple[int, ...]

        def aggregate(self, other: Meta) -> Meta:
            return Meta(self.seen + other.seen)

    @dataclass
    class Events(kv_events.KVConnectorKVEvents):
        events: list[str]
        workers: int = 1

        def add_events(self, events: list[str]) -> None:
            self.events = self.events + events

        def aggregate(self) -> Events:
            return self

        def increment_workers(self, count: int = 1) -> None:
            self.workers += count

        def get_all_events(self) -> list[str]:
            return self.events

        def get_number_of_workers(self) -> int:
            return self.workers

        def clear_events(self) -> None:
            self.events = []

    return SimpleNamespace(
        Theirs=Theirs, Report=KVConnectorOutput, Output=ModelRunnerOutput, Stats=Stats, Meta=Meta, Events=Events
    )


class Traffic:
    """Random steps: every request is reported once by each of ``expected`` workers, in any order and at any time."""

    def __init__(self, types: SimpleNamespace, seed: int) -> None:
        self.types, self.random = types, random.Random(seed)
        self.world = self.random.randint(1, 5)
        self.expected = self.random.choice([self.world, self.world, self.random.randint(1, self.world)])
        self.open: list[tuple[str, str, list[int]]] = []
        self.born = 0

    def step(self) -> list[Any]:
        rng, types = self.random, self.types
        for _ in range(rng.choice([0, 0, 1, 3])):
            self.born += 1
            workers = rng.sample(range(self.world), self.expected)
            self.open.append((rng.choice(["sending", "recving"]), f"r{self.born}", workers))
        reports = [self._report(rank) for rank in range(self.world)]
        for kind, request, workers in self.open:
            for rank in [rank for rank in workers if rng.random() < 0.3]:
                workers.remove(rank)
                report = reports[rank] = reports[rank] or types.Report()
                name = f"finished_{kind}"
                setattr(report, name, (getattr(report, name) or set()) | {request})
                if kind == "recving" and rng.random() < 0.2:
                    report.failed_recving.add(request)
        self.open = [entry for entry in self.open if entry[2]]
        return [
            types.Output(req_ids=[f"{rank}"], req_id_to_index={f"{rank}": 0}, kv_connector_output=report)
            for rank, report in enumerate(reports)
        ]

    def _report(self, rank: int) -> Any:
        rng, types = self.random, self.types
        if rng.random() < 0.3:
            return None
        report = types.Report()
        if rng.random() < 0.3:
            report.invalid_block_ids = {rng.randint(0, 99) for _ in range(rng.randint(0, 3))}
        if rng.random() < 0.4:
            report.kv_connector_stats = types.Stats(data={rng.choice("ab"): [rng.randint(0, 9)]})
        if rng.random() < 0.4:
            report.kv_connector_worker_meta = types.Meta((rank,))
        if rng.random() < 0.4:
            report.kv_cache_events = types.Events([f"{rank}-{rng.randint(0, 9)}"])
        if rng.random() < 0.02:
            report.expected_finished_count = self.expected = rng.randint(1, self.world)
        return report


@pytest.mark.vllm
@pytest.mark.parametrize("seed", range(40))
def test_same_results_as_vllms_own(seed: int) -> None:
    types = vllm_types()
    if not hasattr(types.Report(), "failed_recving"):
        pytest.skip("this vLLM's reports do not tell which loads failed")
    traffic = Traffic(types, seed)
    connector = SimpleNamespace(get_finished_count=lambda: traffic.expected)
    ours = KVOutputAggregator.from_connector(connector, traffic.world)
    theirs = types.Theirs.from_connector(connector, traffic.world)
    said, defers = 0, hasattr(theirs, "ft_defer_kv_connector_outputs")  # 0.33
    for _ in range(150):
        step = traffic.step()
        rank = traffic.random.randrange(traffic.world)
        if traffic.random.random() < 0.05:
            step = [None] * traffic.world
        elif defers and traffic.random.random() < 0.1:  # a worker failed: its step has no output
            ours.ft_defer_kv_connector_outputs([copy.deepcopy(output.kv_connector_output) for output in step])
            theirs.ft_defer_kv_connector_outputs([copy.deepcopy(output.kv_connector_output) for output in step])
            continue
        mine, own = copy.deepcopy(step), copy.deepcopy(step)
        result, expected = ours.aggregate(mine, rank), theirs.aggregate(own, output_rank=rank)
        if expected is None:
            assert result is None
            continue
        assert result is mine[rank] and result is not None
        assert type(result.kv_connector_output) is types.Report
        assert dataclasses.asdict(result.kv_connector_output) == dataclasses.asdict(expected.kv_connector_output)
        assert result.kv_connector_output == expected.kv_connector_output
        said += not result.kv_connector_output.is_empty()
    assert said > 50


@pytest.mark.vllm
def test_vllms_type_is_found_before_any_worker_used_it() -> None:
    types = vllm_types()
    result = KVOutputAggregator(2).aggregate([types.Output(req_ids=[], req_id_to_index={}) for _ in range(2)])
    assert result is not None and result.kv_connector_output == types.Report(expected_finished_count=2)
