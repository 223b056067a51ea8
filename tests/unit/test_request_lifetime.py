"""A request that may load KV is offered until it is decided, and its load ends once, by what all its ranks report."""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.connector.config import Settings
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.scheduler.load_planner import MAX_PATIENCE
from kvferry.connector.scheduler.scheduler import SchedulerHalf
from kvferry.connector.wire.params import RemotePrompt, prompt_digest, to_transfer_params
from kvferry.connector.wire.step_plan import LoadEnd, LookupResult, PeerEngine, RankAddress, StepPlan, StepResults
from kvferry.connector.worker.aggregator import ConnectorOutput, KVOutputAggregator

P = PeerEngine("p", 1, 1, 30.0, (RankAddress(0, 0, "10.0.0.1", 1234, bytes(16)),))
IDS = list(range(65))
PROMPT = RemotePrompt(b"t" * 16, 65, prompt_digest(IDS, ()), P)
GOOD = to_transfer_params(PROMPT)
OTHER = to_transfer_params(RemotePrompt(b"t" * 16, 65, "another", P))
BLOCKS = [[1, 2, 3, 4, 5]]


def half(settings: Settings | None = None, **more: Any) -> SchedulerHalf:
    tables = [BlockTable("full", 16)]
    roles: dict[str, Any] = {"produces": True, "consumes": True}
    return SchedulerHalf(settings or Settings(), "d", tables, tp_size=1, pp_size=1, **(roles | more))


def view(params: object, request_id: str = "r") -> RequestView:
    return RequestView(request_id, params, IDS, 65, 0)  # type: ignore[arg-type]


def allocated(request: RequestView, tokens: int, **more: Any) -> SchedulerHalf:
    """After the engine has decided to load so many tokens of a request."""
    scheduler = half(**more)
    scheduler.num_new_matched_tokens(request, 16)
    scheduler.after_alloc(request, BLOCKS, tokens)
    return scheduler


def test_a_load_that_failed_on_one_rank_is_counted_so() -> None:
    scheduler = allocated(view(GOOD), 49)
    scheduler.loads_finished((), {"r": LoadEnd("timeout")})
    scheduler.loads_finished(["r"], {"r": LoadEnd(milliseconds=5.0)})
    figures = scheduler.take_stats()
    assert figures is not None and figures["counts"]["prompts"] == {"failed timeout": 1}


def test_a_lease_names_the_last_step_that_computed_its_request() -> None:
    scheduler = half()
    scheduler.set_ranks(P.ranks)
    done = RequestView("r", {"do_remote_decode": True}, IDS, 65, 65)
    scheduler.on_new_request(done)
    plans = [scheduler.take_plan(computed=computed) for computed in (["r"], ["r", "x"], ["x"], [])]
    assert [plan.after_prefill for plan in plans[1:]] == [True, True, False]
    held, params = scheduler.request_finished(done, BLOCKS, completed=True)
    (lease,) = scheduler.take_plan().leases
    assert held and params is not None and (lease.request_id, lease.step) == ("r", 2)
    scheduler.request_finished(done, BLOCKS, completed=True)  # a request that was never mentioned
    assert scheduler.take_plan().leases[0].step == 5


@pytest.mark.parametrize("end", ["loaded", "nothing"])
def test_all_leases_of_a_request_are_kept_and_loaded_under_or_released(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = RemotePrompt(b"u" * 16, 65, PROMPT.digest, P)
    bad = to_transfer_params(RemotePrompt(b"v" * 16, 65, "another", P))
    params = {**GOOD, "alternatives": [to_transfer_params(second), bad]}
    plan = allocated(view(params), 0 if end == "nothing" else 49).take_plan()
    tokens = [b"t" * 16, b"u" * 16]
    assert [keep.token for keep in plan.keeps] == tokens
    assert (
        "has one prefill engine less to load from: alternatives[1]: its prompt's digest is not that of" in caplog.text
    )
    if end == "loaded":
        (load,) = plan.loads
        assert [load.token, *(lease.token for lease in load.alternatives)] == tokens and not plan.releases
    else:
        assert not plan.loads and [release.token for release in plan.releases] == tokens


NAMED = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 5600, "transfer_id": "tx"}
TIMEOUT = 100.0
NEVER = MAX_PATIENCE * TIMEOUT


@pytest.mark.parametrize(("known", "end", "said"), [
    ((), TIMEOUT, "has told nothing of 'tx' in 100 s; does the router send both legs"),
    ((60.0,), 60.0 + TIMEOUT, "has told nothing of 'tx' in 100 s; it had the prompt: has its engine stopped?"),
    (range(50, int(NEVER), 50), NEVER, f"has had 'tx' for {NEVER:g} s, and has not computed it"),
], ids=["P never gets it", "P says that it has it, and dies", "P says so again and again"])  # fmt: skip
def test_how_long_a_request_waits_for_a_prompt_that_p_will_hold(
    known: Sequence[float], end: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The time in P's queue does not count, up to a bound. ``known``: when P says that its engine has the prompt."""
    now, request = [0.0], view(NAMED)
    scheduler = half(Settings(handover_timeout_seconds=TIMEOUT), clock=lambda: now[0])
    scheduler.on_new_request(request)
    for at in (0.0, *known, end - 1):
        now[0] = at
        if at in known:
            scheduler.lookups_answered({"r": LookupResult(known=True)})
        assert scheduler.num_new_matched_tokens(request, 0) == (None, False)
    now[0] = end
    assert scheduler.num_new_matched_tokens(request, 0) == (0, False) and said in caplog.text


LEGS = {"told": GOOD, "asked": NAMED, "another": OTHER, "local": None}
ANSWERS = {
    "known": LookupResult(known=True), "answer": LookupResult(msgspec.msgpack.encode(GOOD)),
    "error": LookupResult(error="planted"),
}  # fmt: skip
any_event = st.sampled_from(["ask", "alloc", "decline", "report", "reset", "answer", "known", "error", "step"])


@example("told", ["ask", "alloc", "reset", "reset"])
@given(st.sampled_from(list(LEGS)), st.lists(any_event, max_size=30))
def test_a_kept_lease_is_loaded_under_or_released_and_nothing_is_offered_twice(leg: str, script: list[str]) -> None:
    """Whatever happens in whatever order: and a question to P is answered or left, a load cancelled once at most."""
    scheduler, request, plans = half(), view(LEGS[leg]), list[StepPlan]()
    scheduler.take_stats()  # of an engine that was idle before
    scheduler.on_new_request(request)
    offered = decided = asks = False
    for event in script:
        if event == "ask":
            count, beside = scheduler.num_new_matched_tokens(request, 16)
            asks = count is None
            assert not (count and decided), "offered again"
            offered = bool(count and beside)
        elif event in ("alloc", "decline") and offered:
            scheduler.after_alloc(request, BLOCKS, 49 if event == "alloc" else 0)
            decided = True
        elif event == "report":
            scheduler.loads_finished(["r"], {"r": LoadEnd()})
        elif event == "reset":
            scheduler.reset_caches()
        elif event in ANSWERS:
            scheduler.lookups_answered({"r": ANSWERS[event]})
        elif event == "step":
            plans.append(scheduler.take_plan())
    assert not (asks and leg != "asked")
    scheduler.request_finished(request, BLOCKS, completed=False)
    plans.append(scheduler.take_plan())
    kept, loaded, released = (
        sum(len(getattr(plan, part)) for plan in plans) for part in ("keeps", "loads", "releases")
    )
    cancelled = sum(len(plan.cancels) for plan in plans)
    assert kept == loaded + released <= 1 and kept <= (leg in ("told", "asked"))
    assert cancelled <= loaded
    questions = [question for plan in plans for question in plan.lookups]
    left = sum(len(plan.left) for plan in plans) + sum(question.ended is not None for question in questions)
    assert len(questions) == (leg == "asked") and kept + left >= len(questions) and left <= len(questions)
    scheduler.loads_finished(["r"], {"r": LoadEnd()})  # of a load that the end of its request has cancelled
    figures = scheduler.take_stats()
    assert figures is not None and sum(figures["counts"]["prompts"].values()) == 1, "it is counted once"


def counted(scheduler: SchedulerHalf) -> dict[str, int]:
    figures = scheduler.take_stats()
    return {} if figures is None else figures["counts"]["prompts"]


@pytest.mark.parametrize(
    ("alone", "local", "whole", "reason"),
    [(True, 16, False, "cached"), (False, 16, False, "other_connector"), (False, 64, False, "cached"),
     (True, 16, True, "whole_prompt")],
)  # fmt: skip
def test_why_the_engine_loads_nothing_of_what_it_was_offered(alone: bool, local: int, whole: bool, reason: str) -> None:
    """``alone``: no other connector loads tokens, so the engine has found the rest in its own cache meanwhile."""
    scheduler, request = half(streams=lambda: alone), replace(view(GOOD), whole_prompt=whole)
    scheduler.num_new_matched_tokens(request, local)
    scheduler.after_alloc(request, BLOCKS, 0)
    assert counted(scheduler) == {f"local {reason}": 1}


@pytest.mark.parametrize(
    ("known", "rejected", "reason"), [(False, False, "no_answer"), (True, False, "ended"), (False, True, "ended")]
)
def test_a_client_that_gives_up_while_p_says_nothing_is_no_client_that_left(
    known: bool, rejected: bool, reason: str
) -> None:
    scheduler, request = half(), replace(view(NAMED), rejected=rejected)
    scheduler.on_new_request(request)
    if known:
        scheduler.lookups_answered({"r": LookupResult(known=True)})
    scheduler.request_finished(request, BLOCKS, completed=False)
    assert counted(scheduler) == {f"local {reason}": 1}


@pytest.mark.parametrize(
    ("params", "tokens", "count"),
    [(GOOD | {"do_remote_decode": True}, 49, "loaded"), ({"do_remote_decode": True}, 0, "local wrong_role")],
)
def test_a_prompt_that_is_loaded_is_not_counted_for_its_other_role(
    params: dict[str, Any], tokens: int, count: str
) -> None:
    scheduler, request = half(produces=False), view(params)
    assert scheduler.num_new_matched_tokens(request, 16) == (tokens, bool(tokens))
    scheduler.after_alloc(request, BLOCKS, tokens)
    scheduler.loads_finished(["r"], {"r": LoadEnd()})
    assert counted(scheduler) == {count: 1}


def test_a_load_that_a_reset_cancels_has_failed() -> None:
    scheduler = allocated(view(GOOD), 49)
    assert not scheduler.reset_caches()
    scheduler.loads_finished(["r"], {"r": LoadEnd("cancelled")})
    assert counted(scheduler) == {"failed cancelled": 1}
    scheduler.on_new_request(view(GOOD, "offered"))
    assert scheduler.reset_caches() and counted(scheduler) == {"local reset": 1}


@dataclass
class Output:
    """An engine's output that declares no report type."""

    kv_connector_output: Any = None


@dataclass
class EnginesReport(ConnectorOutput):
    """An engine's own type."""


NO_OUTPUT = object()


def step(aggregator: KVOutputAggregator, *reports: Any) -> Any:
    """The report of one step of all workers; ``NO_OUTPUT``: of one that has none."""
    outputs = [None if report is NO_OUTPUT else Output(report) for report in reports]
    result = aggregator.aggregate(outputs)
    assert result is outputs[0]
    return None if result is None else result.kv_connector_output


def loaded(*requests: str, failed: tuple[str, ...] = ()) -> StepResults:
    return StepResults(received=set(requests), failed=set(failed))


def test_a_load_has_ended_as_on_the_worker_where_it_failed_or_took_longest() -> None:
    well, slow, failed = LoadEnd(milliseconds=1), LoadEnd(milliseconds=9), LoadEnd("timeout")
    first, second = StepResults(received={"a", "b"}, ends={"a": well, "b": failed}), loaded("a", "b")
    second.ends = {"a": slow, "b": well}
    for results in ((first, second), (second, first)):
        ends = step(KVOutputAggregator(2), *results).load_ends
        assert ends == {"a": LoadEnd(milliseconds=9, ranks=2), "b": LoadEnd("timeout", ranks=2)}


def test_the_type_of_a_report() -> None:
    """That of the workers, else the one that the output declares, else ours."""

    @dataclass
    class Declares:
        kv_connector_output: EnginesReport | None = None

    Declares.__annotations__["kv_connector_output"] = EnginesReport | None
    aggregator = KVOutputAggregator(2)
    report = EnginesReport(finished_sending={"a"})
    assert step(aggregator, report, report) == EnginesReport(finished_sending={"a"}, expected_finished_count=2)
    assert type(step(aggregator, None, None)) is EnginesReport, "also where no worker has sent one since"
    declares: Any = KVOutputAggregator(1).aggregate([Declares()])
    assert type(declares.kv_connector_output) is EnginesReport
    plain: Any = KVOutputAggregator(2).aggregate([SimpleNamespace(kv_connector_output=None) for _ in range(2)])
    assert plain.kv_connector_output == ConnectorOutput(expected_finished_count=2)


def test_stats_of_two_types_do_not_end_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    class Numbers(list[int]):
        def aggregate(self, other: list[int]) -> Numbers:
            return Numbers([*self, *other])

    reports = [ConnectorOutput(kv_connector_stats=stats) for stats in (Numbers([1]), {"x": 1}, Numbers([2]))]
    assert step(KVOutputAggregator(3), *reports).kv_connector_stats == [1, 2]
    assert "dropped dict of one worker, others sent Numbers" in caplog.text


def test_one_rank_is_late_one_fails_and_one_repeats_itself(caplog: pytest.LogCaptureFixture) -> None:
    aggregator, ok, bad = KVOutputAggregator(3), loaded("r"), StepResults({"s"}, {"r"}, {"r"})
    assert aggregator.pending() == {}
    with caplog.at_level(logging.WARNING, "vllm.kvferry"):
        assert step(aggregator, ok, None, bad).is_empty()
        assert aggregator.pending() == {"r": (0, 2), "s": (2,)}
        assert step(aggregator, ok, StepResults(sent={"s"}), None).is_empty()
    assert "worker 0 reported request r twice" in caplog.text
    assert aggregator.pending() == {"r": (0, 2), "s": (2, 1)}
    last = step(aggregator, StepResults(sent={"s"}), ok, None)
    assert last.finished_recving == last.failed_recving == {"r"} and last.finished_sending == {"s"}
    assert aggregator.pending() == {}
    again = step(aggregator, ok, ok, ok)
    assert again.finished_recving == {"r"} and not again.failed_recving


def test_reports_of_a_step_that_failed_count_in_the_next_one() -> None:
    """Whose they are is not known: two workers' reports of one request are two. Cache events are dropped."""
    aggregator = KVOutputAggregator(3)
    events = ConnectorOutput({"a"}, kv_cache_events=["stored"])
    aggregator.ft_defer_kv_connector_outputs([StepResults({"a"}, {"b"}, {"b"}), None, events])
    assert aggregator.pending() == {}, "they are merged with the next step's"
    report = step(aggregator, loaded("b"), StepResults({"a"}, {"b"}), None)
    assert report.finished_sending == {"a"} and report.finished_recving == {"b"} == report.failed_recving
    assert report.kv_cache_events is None
    assert not step(aggregator, None, None, None).finished_sending, "once"


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
            self.open.append((("sending", "recving")[self.born % 2], f"r{self.born // 2}", workers))  # an id of both
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
@pytest.mark.parametrize("seed", range(15))
def test_same_results_as_vllms_own(seed: int) -> None:
    types = vllm_types()
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
        said += not result.kv_connector_output.is_empty()
    assert said > 50
