"""Figures of hand-overs: none lost nor doubled, in bounded memory, in a Prometheus registry; spans of traces."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import functools
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from kvferry.connector.vllm.prometheus import KVFerryPromMetrics, KVFerryStats
from kvferry.connector.wire import metrics
from kvferry.connector.wire.metrics import FAILURE_KINDS, MAX_PEERS, Figures, HandoverStats, rank_stats
from kvferry.connector.wire.series import PREFIX, SERIES, STAGES
from kvferry.connector.wire.transfer_estimate import FRESH_SECONDS, UNKNOWN, TransferEstimate, TransferEstimates
from kvferry.transport import tracing
from kvferry.transport.errors import ConfigError
from kvferry.transport.tracing import open_tracer, sampled_traceparent
from tests.support.spans import PARENT_ID, SAMPLED, TRACE_ID, Spans, receiver
from tests.support.turns import LineCount

counts = st.integers(1, 1 << 40)
CALLS: dict[str, Callable[..., None]] = {
    "finished": lambda stats, plane, us, nbytes, tokens: stats.finished(
        nbytes=nbytes, milliseconds=us / 1e3, plane=plane, tokens=tokens
    ),
    "failed": HandoverStats.failed,
    "leases": HandoverStats.lease_ended,
    "dropped": HandoverStats.dropped,
    "streamed": lambda stats, blocks: stats.streamed(blocks=blocks, milliseconds=2.0),
}
events = st.one_of(
    st.tuples(st.just("finished"), st.sampled_from(["ucx", "shm", "zmq"]), counts, counts, counts),
    st.tuples(st.just("failed"), st.sampled_from(FAILURE_KINDS)),
    st.tuples(st.just("leases"), st.sampled_from(metrics.LEASE_ENDS)),
    st.tuples(st.just("dropped"), st.sampled_from(["malformed", "key"])),
    st.tuples(st.just("streamed"), counts),
)


def figures(history: list[tuple]) -> Figures:
    stats = HandoverStats()
    for kind, *what in history:
        CALLS[kind](stats, *what)
    return stats.take() or metrics.no_figures()


def added(*parts: Figures) -> Figures:
    total = metrics.no_figures()
    for part in parts:
        before = copy.deepcopy(part)
        metrics.add(total, part)
        assert part == before
    return total


def totals(data: Figures) -> dict:
    planes = {plane: metrics.totals_of(samples) for plane, samples in data["finished"].items()}
    return {"planes": planes, **data["counts"]}


@given(st.lists(events, max_size=12), st.lists(events, max_size=12), st.lists(events, max_size=12), st.integers(1, 4))
@settings(deadline=None)
def test_adding_is_associative_and_loses_nothing(first, second, third, kept):
    whole = metrics.MAX_SAMPLES
    try:
        metrics.MAX_SAMPLES = kept  # so small that the bound is met
        a, b, c = figures(first), figures(second), figures(third)
        left, right = added(added(a, b), c), added(a, added(b, c))
        assert left == right == json.loads(json.dumps(left))
        assert all(len(samples["nbytes"]) <= kept for samples in left["finished"].values())
        metrics.MAX_SAMPLES = whole
        assert totals(left) == totals(figures(first + second + third))
    finally:
        metrics.MAX_SAMPLES = whole


def test_take_gives_everything_once():
    stats = HandoverStats()
    assert stats.take() is None
    stats.failed("cancelled")
    taken = stats.take()
    assert taken is not None and taken["counts"] == {"num_failed_handovers": {"cancelled": 1}}
    assert stats.take() is None
    stats.failed("cancelled")
    assert taken["counts"]["num_failed_handovers"] == {"cancelled": 1}, "what was taken is no longer written to"


def test_counting_beside_taking_loses_nothing():
    stats, rounds = HandoverStats(), 3000
    taken: list[Figures] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def count() -> None:
        for number in range(rounds):
            stats.finished(nbytes=number, milliseconds=1.5, plane="shm", tokens=1)
            stats.dropped("malformed")

    threads = [threading.Thread(target=count) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        alive = True
        while alive:
            alive = any(thread.is_alive() for thread in threads)  # before the take: the last one comes after all counts
            taken += filter(None, [stats.take()])
            time.sleep(0.001)
    finally:
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    total = totals(added(*taken))
    sum_of_bytes = 2 * sum(range(rounds))
    assert total["planes"] == {"shm": (2 * rounds, 2 * rounds * 1500, sum_of_bytes, 2 * rounds)}
    assert total["num_dropped_messages"] == {"malformed": 2 * rounds}


def test_memory_is_bounded_when_nobody_collects():
    stats, count = HandoverStats(), metrics.MAX_SAMPLES + 100
    for number in range(count):
        stats.finished(nbytes=number, milliseconds=1, plane="ucx", tokens=2)
        stats.dropped(f"reason {number}")
    data = stats.take()
    assert data is not None
    assert len(data["finished"]["ucx"]["nbytes"]) == metrics.MAX_SAMPLES
    dropped = data["counts"]["num_dropped_messages"]
    assert len(dropped) <= metrics.MAX_REASONS + 1
    assert metrics.totals_of(data["finished"]["ucx"])[0] == sum(dropped.values()) == count


def test_counts_that_only_grow_are_taken_once():
    stats = HandoverStats()
    stats.dropped_so_far("listener", {"frames": 2})
    stats.dropped_so_far("listener", {"frames": 3, "key": 1})
    stats.dropped_so_far("other", {"frames": 1})
    data = stats.take()
    assert data is not None and data["counts"] == {"num_dropped_messages": {"frames": 4, "key": 1}}
    stats.dropped_so_far("listener", {"frames": 3, "key": 1})
    assert stats.take() is None


def test_the_log_line():
    stats = HandoverStats()
    for milliseconds in (1, 2, 3, 4):
        stats.finished(nbytes=10 << 20, milliseconds=milliseconds, plane="shm", tokens=100)
    stats.finished(nbytes=0, milliseconds=10, plane="ucx", tokens=50)
    stats.failed("timeout")
    stats.lease_ended("released")
    stats.lease_ended("cap")
    stats.dropped("malformed", 7)
    stats.retried("timeout")
    stats.retried("peer_lost")
    stats.count("num_plane_changes", "tcp")
    data = stats.take()
    assert data is not None
    assert metrics.reduce(data) == {
        "Num hand-overs": 5,
        "Avg hand-over time (ms)": 4.0,
        "P90 hand-over time (ms)": 7.6,
        "Avg MB per hand-over": 8.0,
        "Throughput (MB/s)": 2000.0,
        "Avg tokens per hand-over": 90.0,
        "Num failed hand-overs": 1,
        "Failed (timeout)": 1,
        "Num retries": 2,
        "Num plane changes": 1,
        "Num leases released": 1,
        "Num leases expired": 1,
        "Num dropped messages": 7,
    }


def test_the_log_line_of_an_engine_that_hands_nothing_over_is_short():
    stats = HandoverStats()
    stats.prompt("plain", "no_params")
    data = stats.take()
    assert data is not None and metrics.reduce(data) == {"Prompts plain: no_params": 1}
    stats.prompt("plain", "no_params")
    stats.prompt("local", "key")
    data = stats.take()
    assert data is not None
    line = metrics.reduce(data)
    assert line["Prompts plain: no_params"] == line["Prompts local: key"] == 1 and line["Num failed hand-overs"] == 0


def test_counting_is_cheap():
    stats, costs = HandoverStats(), []
    for _ in range(1000):
        with LineCount() as lines:
            stats.finished(nbytes=1, milliseconds=1, plane="shm", tokens=1)
        costs.append(lines.count)
    assert max(costs) < 60, "also where many are counted already"


pytest.importorskip("vllm")
LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
CONFIG = KVTransferConfig(
    kv_connector="KVFerryConnector", kv_role="kv_both", kv_connector_module_path="kvferry.connector.vllm.adapter"
)


def busy() -> HandoverStats:
    stats = HandoverStats()
    stats.finished(nbytes=1 << 20, milliseconds=4, plane="shm", tokens=128)
    stats.finished(nbytes=3 << 20, milliseconds=6, plane="ucx", tokens=256)
    stats.failed("timeout")
    stats.lease_ended("released")
    stats.lease_ended("expired")
    stats.dropped("malformed", 3)
    stats.streamed(blocks=10, milliseconds=1500.0)
    stats.prompt("loaded")
    stats.prompt("failed", "key")
    stats.count("num_stale_reads", by=2)
    stats.count("step_wait_seconds", by=1500)
    return stats


def drain(stats: HandoverStats) -> Any:
    figures = stats.take()
    return None if figures is None else KVFerryStats(data={**figures})


def fresh() -> Any:
    return drain(busy())


@pytest.fixture
def registry():
    """One of its own; vLLM's classes take the metric types as arguments."""
    return CollectorRegistry()


def made(registry, config=CONFIG, engines=ENGINES):
    types = {
        kind: type(kind.__name__, (kind,), {"__init__": functools.partialmethod(kind.__init__, registry=registry)})
        for kind in (Gauge, Counter, Histogram)
    }
    return KVFerryPromMetrics(SimpleNamespace(kv_transfer_config=config), types, LABELS, engines)


@pytest.fixture
def series(registry):
    return made(registry)


def value(registry, name, engine="0", **labels):
    return registry.get_sample_value(f"vllm:kvferry_{name}", {"model_name": "m", "engine": engine, **labels})


@pytest.mark.vllm
def test_prometheus_series(registry, series):
    series.observe(fresh().to_dict(), 0)
    assert value(registry, "handover_time_seconds_count", plane="shm") == 1
    assert value(registry, "handover_time_seconds_sum", plane="ucx") == pytest.approx(0.006)
    assert value(registry, "num_failed_handovers_total", reason="timeout") == 1
    assert value(registry, "prompts_total", result="loaded", reason="") == 1
    assert value(registry, "prompts_total", result="failed", reason="key") == 1
    assert value(registry, "prompts_total", result="local", reason="cached") == 0
    assert value(registry, "num_expired_leases_total", reason="expired") == 1
    assert value(registry, "num_expired_leases_total", reason="cap") == 0
    assert value(registry, "streamed_block_seconds_total") == 15.0
    assert value(registry, "streamed_block_seconds_total", engine="1") == 0
    assert value(registry, "num_stale_reads_total") == 2
    assert value(registry, "step_wait_seconds_total") == 0.0015


def test_what_is_counted_anywhere_is_on_the_list():
    """The front end, which is another process, knows no other."""
    sources = [path.read_text() for path in Path(metrics.__file__).parents[1].rglob("*.py")]
    counted = {name for source in sources for name in re.findall(r"\.count\(\s*\"(\w+)\"", source)}
    assert len(counted) > 12 and counted <= {each.name for each in SERIES if each.kind == "counter"}, counted


@pytest.mark.vllm
def test_every_series_of_the_list_is_exported(registry, series):
    page = generate_latest(registry).decode()
    assert {
        f"# TYPE {PREFIX}{each.name}{'_total' if each.kind == 'counter' else ''} {each.kind}" for each in SERIES
    } <= {*page.splitlines()}
    stats = busy()
    stats.levels |= dict.fromkeys(("leases", "lease_blocks", "sending", *STAGES), 3)
    stats.failed("plane", "peer")
    stats.prefix("lent", "read")
    for each in SERIES:
        if each.kind == "counter" and not each.labels and each.name != "num_released_leases":
            stats.count(each.name)
    series.observe(drain(stats).data)
    observed = {sample.name for metric in registry.collect() for sample in metric.samples if sample.value}
    suffix = {"counter": "_total", "histogram": "_count", "gauge": ""}
    names = {PREFIX + each.name + suffix[each.kind] for each in SERIES}
    assert names - observed == {f"{PREFIX}{name}_total" for name in ("num_retries", "num_plane_changes", "bytes_sent")}


@pytest.mark.vllm
@pytest.mark.parametrize("on", [False, True])
def test_a_page_has_no_series_of_a_feature_that_is_off(registry, on):
    config = dataclasses.replace(CONFIG, kv_connector_extra_config={"prefix_reads": on})
    exported = made(registry, config, {0: ["m", "0"]})
    exported.observe(fresh().data)
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith(PREFIX)]
    assert {line.split("{")[0].removeprefix(PREFIX) for line in lines if "prefix" in line and "_total" in line} == (
        {f"prefix_{name}_total" for name in ("reads", "tokens_read", "tokens_wasted", "wait_seconds")} if on else set()
    )
    stats = HandoverStats()
    stats.prefix("lent", "read")
    exported.observe(drain(stats).data)
    assert value(registry, "prefix_reads_total", result="lent", reason="read") == 1, "whatever the setting is"


@pytest.mark.vllm
def test_levels_of_ranks_add_up_and_a_later_report_replaces_an_earlier_one(registry, series):
    ranks = [rank_stats("tp0"), rank_stats("tp1")]
    scheduler = HandoverStats("scheduler", {"leases": 2, "loading": 1})

    def step():
        total = KVFerryStats()
        for stats in (*ranks, scheduler):
            if (report := drain(stats)) is not None:
                total = total.aggregate(report)
        series.observe(total.data)
        return total

    ranks[0].levels["sending"], ranks[1].levels["sending"] = 1, 2
    step()
    assert value(registry, "reads_sending") == 3
    assert value(registry, "leases") == 2 and value(registry, "requests", stage="loading") == 1
    ranks[0].levels["sending"], ranks[1].levels["sending"], scheduler.levels["leases"] = 0, 1, 0
    later = step()
    assert value(registry, "reads_sending") == 1 and value(registry, "leases") == 0
    ranks[1].levels["sending"] = scheduler.levels["loading"] = 0
    step()
    assert value(registry, "reads_sending") == 0 and value(registry, "requests", stage="loading") == 0
    assert step().is_empty(), "zeros are reported once"
    assert "Reads sent now=1" in str([f"{k}={v}" for k, v in later.reduce().items()])


@pytest.mark.vllm
def test_peers_have_names_from_their_first_hand_over_on_up_to_a_bound(registry, series):
    stats = HandoverStats()
    stats.failed("timeout", "stranger")
    for number in range(MAX_PEERS + 2):
        stats.finished(nbytes=100, milliseconds=2, plane="shm", tokens=1, peer=f"p{number}")
    stats.failed("timeout", "p0")
    stats.retried("plane", "p0")
    stats.failed("internal")
    series.observe(drain(stats).data)
    other = HandoverStats()  # another rank, with other names
    other.finished(nbytes=100, milliseconds=2, plane="shm", tokens=1, peer="elsewhere")
    series.observe(drain(other).data)
    assert value(registry, "peer_handovers_total", peer="p0", result="done") == 1
    assert value(registry, "peer_handovers_total", peer="p0", result="failed") == 1
    assert value(registry, "peer_handovers_total", peer="p0", result="retried") == 1
    assert value(registry, "peer_bytes_total", peer="p0") == 100
    assert value(registry, "peer_seconds_total", peer="p0") == 0.002
    assert value(registry, "peer_handovers_total", peer="other", result="done") == 3
    assert value(registry, "peer_handovers_total", peer="other", result="failed") == 1
    names = {
        sample.labels["peer"] for metric in registry.collect() for sample in metric.samples if "peer" in sample.labels
    }
    assert len(names) == MAX_PEERS + 1 and not names & {"stranger", "elsewhere"}


@pytest.mark.vllm
def test_hand_overs_beyond_the_bound_keep_count_and_sum(registry, series, monkeypatch):
    monkeypatch.setattr(metrics, "MAX_SAMPLES", 2)
    stats = HandoverStats()
    for milliseconds in (1, 2, 3, 5):
        stats.finished(nbytes=1000, milliseconds=milliseconds, plane="shm", tokens=1)
    series.observe(drain(stats).data)
    assert value(registry, "handover_time_seconds_count", plane="shm") == 4
    assert value(registry, "handover_time_seconds_sum", plane="shm") == pytest.approx(0.011)
    assert value(registry, "bytes_transferred_sum", plane="shm") == 4000
    assert value(registry, "tokens_total", plane="shm") == 4


@pytest.mark.vllm
def test_stats_copy_what_they_are_given_and_add_up():
    payload, total = fresh(), KVFerryStats()
    before = repr(payload.data)
    KVFerryStats(data=payload.data).aggregate(payload).reset()
    assert repr(payload.data) == before and total.is_empty()
    total = total.aggregate(payload).aggregate(fresh())
    assert total.reduce()["Num hand-overs"] == 4 and not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert KVFerryStats(data={"counts": {"num_failed_handovers": {"other": 1}}}).reduce()["Num failed hand-overs"] == 1


@pytest.mark.vllm
def test_through_vllms_log_line():
    logging = KVConnectorLogging(CONFIG)
    lines: list[str] = []
    for _ in range(3):
        logging.observe(fresh().to_dict())
    for _ in range(2):  # what was logged is not logged again
        logging.log(lambda form, *args: lines.append(form % args))
    (line,) = lines
    assert line.startswith("KV Transfer metrics: Num hand-overs=6, ")
    assert (
        "Failed (timeout)=3" in line
        and "Prompts failed: key=3, Prompts loaded=3" in line
        and "Num dropped messages=9" in line
    )


@pytest.mark.vllm
def test_through_vllms_prometheus_logger():
    prometheus = KVConnectorProm(SimpleNamespace(kv_transfer_config=CONFIG), LABELS, ENGINES)
    prometheus.observe(fresh().to_dict(), 1)
    text = generate_latest(REGISTRY).decode()
    assert 'vllm:kvferry_bytes_transferred_sum{engine="1",model_name="m",plane="shm"} 1.048576e+06' in text
    assert 'vllm:kvferry_num_dropped_messages_total{engine="1",model_name="m",reason="malformed"} 3.0' in text


P, LONG = ("P", 0), TransferEstimate(0.004, 8000)
SHORT = TransferEstimate(0.001, 10)


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        ([], {10: math.inf}),
        # It has a cost that does not depend on tokens.
        ([TransferEstimate(0.004, 1000)], {1000: 0.004, 10: 0.004, 5000: 0.02}),
        ([TransferEstimate(0.004, 1000), TransferEstimate(0.002, 1000)], {1000: 0.002}),
        # Most of what a short one took it would take for no token at all.
        ([SHORT], {8000: 0.8}),
        ([SHORT, LONG, SHORT], {8000: 0.004, 10: 0.001}),
        ([SHORT, LONG, TransferEstimate(0.003, 12)], {10: 0.003}),
        # What was hardly faster before is raised.
        ([TransferEstimate(0.012, 32000), TransferEstimate(0.049, 128000)], {32000: 0.01225, 128000: 0.049}),
        ([TransferEstimate(0.04, 128000), TransferEstimate(0.044, 32000)], {32000: 0.044, 128000: 0.044}),
        # What was faster before is forgotten; after a failure nothing is expected.
        ([LONG, TransferEstimate(0.1, 1000)], {1000: 0.1, 8000: 0.8}),
        ([LONG, UNKNOWN], {8000: math.inf}),
        ([LONG, UNKNOWN, TransferEstimate(0.004, 1000)], {1000: 0.004}),
    ],
)
def test_the_last_hand_overs_count(observed: list[TransferEstimate], expected: dict[int, float]) -> None:
    estimates = TransferEstimates(1)
    for now, estimate in enumerate(observed):
        estimates.observe({P: estimate}, float(now))
    assert {tokens: estimates.seconds("P", tokens, 3.0) for tokens in expected} == pytest.approx(expected)
    assert math.isinf(estimates.seconds("Q", 10, 3.0))


def test_the_slowest_rank_counts_and_all_must_have_observed() -> None:
    estimates = TransferEstimates(2)
    estimates.observe({P: TransferEstimate(0.004, 1000)}, 0.0)
    assert math.isinf(estimates.seconds("P", 1000, 0.0))
    estimates.observe({("P", 1): TransferEstimate(0.009, 1000)}, 0.0)
    assert estimates.seconds("P", 1000, 0.0) == 0.009
    estimates.observe({("P", 1): UNKNOWN}, 0.0)
    assert math.isinf(estimates.seconds("P", 1, 0.0))


def test_it_is_forgotten_in_time() -> None:
    estimates = TransferEstimates(1)
    estimates.observe({P: LONG}, 0.0)
    assert math.isfinite(estimates.seconds("P", 1, FRESH_SECONDS))
    assert math.isinf(estimates.seconds("P", 1, FRESH_SECONDS + 1))
    estimates.observe({("Q", 0): LONG}, FRESH_SECONDS + 1)
    assert set(estimates.observed) == {("Q", 0)}


pytest.importorskip("opentelemetry.sdk.trace")
HTTP = "http/protobuf"


@pytest.mark.parametrize("given", [SAMPLED, SAMPLED.replace("00-", "01-", 1) + "-later", SAMPLED[:-2] + "ff"])
def test_a_sampled_trace(given):
    assert sampled_traceparent({"traceparent": given, "tracestate": "x=y"}) == given


NOT_TRACED = [
    "", "x", SAMPLED[:-2] + "00", SAMPLED[:-2] + "02", SAMPLED.upper(), "ff" + SAMPLED[2:], SAMPLED[:-1], SAMPLED + "0",
    SAMPLED.replace(TRACE_ID, "0" * 32), SAMPLED.replace(PARENT_ID, "0" * 16), " " + SAMPLED,
]  # fmt: skip


@pytest.mark.parametrize("headers", [None, {}, {"tracestate": "x"}, *({"traceparent": text} for text in NOT_TRACED)])
def test_what_is_not_traced(headers):
    assert sampled_traceparent(headers) == ""


# --- where they go --------------------------------------------------------------------------------------------------
def test_spans_reach_a_receiver_and_the_last_ones_at_the_close(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", HTTP)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "prefill")
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 600.0)
    with receiver() as received:
        tracer = open_tracer(received.url, {"service.instance.id": "engine-p"})
        assert tracer is not None
        tracer.record(SAMPLED, "top", 10**18, 10**18 + 1, {"n": "1" * 300}, "")
        tracer.close()
        (span,) = received.spans()
    assert (span["service"], span["instance"], span["scope"]) == ("prefill", "engine-p", "kvferry")
    assert (span["trace"], span["parent"], span["attributes"]) == (TRACE_ID, PARENT_ID, {"n": "1" * 256})


def test_without_an_endpoint_nothing_is_imported(monkeypatch):
    def refuse(name, *rest, **options):
        assert not name.startswith("opentelemetry"), name
        return real(name, *rest, **options)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert open_tracer(None) is None and open_tracer("") is None


def test_a_close_does_not_wait_for_a_receiver_that_hangs(monkeypatch):
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.01)
    tracer, go = Spans().tracer, threading.Event()
    monkeypatch.setattr(tracer.provider, "shutdown", go.wait)
    tracer.close()
    assert not go.is_set()
    go.set()


def test_mistakes_of_a_user(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier/pigeon")
    with pytest.raises(ConfigError, match="is 'carrier/pigeon', expected grpc or http/protobuf"):
        open_tracer("http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", HTTP)

    def refuse(name, *rest, **options):
        if name.startswith("opentelemetry.sdk"):
            raise ImportError("planted")
        return real(name, *rest, **options)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'kvferry\[otel\]'"):
        open_tracer("http://127.0.0.1:4317")
