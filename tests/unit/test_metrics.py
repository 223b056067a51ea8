"""Figures of hand-overs: what is counted is neither lost nor doubled, adding is associative, memory is bounded."""

from __future__ import annotations

import copy
import json
import sys
import threading
import time
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connector.wire import metrics
from kvferry.connector.wire.metrics import FAILURE_KINDS, Figures, HandoverStats
from tests.support.lines import LineCount

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
    return {"planes": planes, **{name: data[name] for name in ("failed", "leases", "dropped", "streamed")}}


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
    assert taken is not None and taken["failed"] == {"cancelled": 1}
    assert stats.take() is None
    stats.failed("cancelled")
    assert taken["failed"] == {"cancelled": 1}, "what was taken is no longer written to"


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
    assert total["dropped"] == {"malformed": 2 * rounds}


def test_memory_is_bounded_when_nobody_collects():
    stats, count = HandoverStats(), metrics.MAX_SAMPLES + 100
    for number in range(count):
        stats.finished(nbytes=number, milliseconds=1, plane="ucx", tokens=2)
        stats.dropped(f"reason {number}")
    data = stats.take()
    assert data is not None
    assert len(data["finished"]["ucx"]["nbytes"]) == metrics.MAX_SAMPLES
    assert len(data["dropped"]) <= metrics.MAX_REASONS + 1
    assert metrics.totals_of(data["finished"]["ucx"])[0] == sum(data["dropped"].values()) == count


def test_counts_that_only_grow_are_taken_once():
    stats = HandoverStats()
    stats.dropped_so_far("listener", {"frames": 2})
    stats.dropped_so_far("listener", {"frames": 3, "key": 1})
    stats.dropped_so_far("other", {"frames": 1})
    data = stats.take()
    assert data is not None and data["dropped"] == {"frames": 4, "key": 1}
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
    stats.plane_changed("tcp")
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
