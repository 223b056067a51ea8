"""The figures through vLLM's own loggers and a real Prometheus registry."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, get_args

import pytest

pytest.importorskip("vllm")
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from kvferry.connector.vllm.prometheus import KVFerryPromMetrics, KVFerryStats
from kvferry.connector.wire import metrics
from kvferry.connector.wire.metrics import MAX_PEERS, HandoverStats, Total, rank_stats
from kvferry.connector.wire.series import PREFIX, SERIES, STAGES

pytestmark = pytest.mark.vllm
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
    stats.total("stale_reads", 2)
    stats.total("step_wait_us", 1500)
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


def test_every_series_of_the_list_is_exported(registry, series):
    page = generate_latest(registry).decode()
    assert {
        f"# TYPE {PREFIX}{each.name}{'_total' if each.kind == 'counter' else ''} {each.kind}" for each in SERIES
    } <= {*page.splitlines()}
    stats = busy()
    stats.levels |= dict.fromkeys(("leases", "lease_blocks", "sending", *STAGES), 3)
    stats.failed("plane", "peer")
    stats.prefix("lent", "read")
    for total in get_args(Total):
        stats.total(total, 10**6)
    series.observe(drain(stats).data)
    observed = {sample.name for metric in registry.collect() for sample in metric.samples if sample.value}
    suffix = {"counter": "_total", "histogram": "_count", "gauge": ""}
    names = {PREFIX + each.name + suffix[each.kind] for each in SERIES}
    assert names - observed == {f"{PREFIX}{name}_total" for name in ("num_retries", "num_plane_changes", "bytes_sent")}


@pytest.mark.parametrize("on", [False, True])
def test_a_page_has_no_times_of_creation_and_no_series_of_a_feature_that_is_off(registry, on):
    config = dataclasses.replace(CONFIG, kv_connector_extra_config={"prefix_reads": on})
    exported = made(registry, config, {0: ["m", "0"]})
    exported.observe(fresh().data)
    lines = [line for line in generate_latest(registry).decode().splitlines() if line.startswith(PREFIX)]
    assert "_created" not in " ".join(lines)
    assert {line.split("{")[0].removeprefix(PREFIX) for line in lines if "prefix" in line} == (
        {f"prefix_{name}_total" for name in ("reads", "tokens_read", "tokens_wasted", "wait_seconds")} if on else set()
    )
    stats = HandoverStats()
    stats.prefix("lent", "read")
    exported.observe(drain(stats).data)
    assert value(registry, "prefix_reads_total", result="lent", reason="read") == 1, "whatever the setting is"


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


def test_stats_copy_what_they_are_given_and_add_up():
    payload, total = fresh(), KVFerryStats()
    before = repr(payload.data)
    KVFerryStats(data=payload.data).aggregate(payload).reset()
    assert repr(payload.data) == before and total.is_empty()
    total = total.aggregate(payload).aggregate(fresh())
    assert total.reduce()["Num hand-overs"] == 4 and not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert KVFerryStats(data={"failed": {"other": 1}}).reduce()["Num failed hand-overs"] == 1


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


def test_through_vllms_prometheus_logger():
    prometheus = KVConnectorProm(SimpleNamespace(kv_transfer_config=CONFIG), LABELS, ENGINES)
    prometheus.observe(fresh().to_dict(), 1)
    text = generate_latest(REGISTRY).decode()
    assert 'vllm:kvferry_bytes_transferred_sum{engine="1",model_name="m",plane="shm"} 1.048576e+06' in text
    assert 'vllm:kvferry_num_dropped_messages_total{engine="1",model_name="m",reason="malformed"} 3.0' in text
