"""A hand-over takes few Python calls, and its trace has one span a side."""

from __future__ import annotations

import secrets
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from types import CodeType, FrameType
from typing import Any

import pytest
from msgspec.structs import replace

from kvferry.connector.wire.step_plan import StepPlan
from kvferry.connector.worker import loop
from kvferry.transport.planes.cma import CmaChannel
from tests.handover.retries import Trickle, cut, in_the_middle, pair
from tests.handover.scenario import OURS, THEIRS, TOKENS, RankGroup, breaks, ended, forget, lease_plan
from tests.support.inside import ident_of, leases_of, sleeps
from tests.support.ranks import Rank, grant, let_time_pass, load_plan, peer, wait
from tests.support.spans import PARENT_ID, SAMPLED, TRACE_ID, Spans

PACKAGES = tuple(loop.__file__.removesuffix("connector/worker/loop.py") + name
                 for name in ("connector/", "transport/", "kernels/"))  # fmt: skip
MAX_CALLS = 400
"""Calls of functions of this project, in the transfer threads of P and D and in the engines' calls. They are 394 on
Python 3.11. Without a reason in the same change this bound does not grow."""
MAX_CALLS_TO_BEGIN = 130
"""Those of D from ``WorkerHalf.post`` to the begin of the copy, which are 127 on Python 3.11: two of them shorten the
switch interval, which is not short between hand-overs."""
HAND_OVERS = 12


class Calls:
    """The code that this project has called while ``counting``, in order, of all threads that started meanwhile."""

    def __init__(self) -> None:
        self.counting = False
        self.found: list[tuple[int, CodeType]] = []

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if self.counting and event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            self.found.append((threading.get_ident(), frame.f_code))

    @contextmanager
    def of_engine(self) -> Iterator[None]:
        """Count the calls of this thread."""
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)


def asleep(*ranks: Rank) -> bool:
    """Whether the transfer threads wait for events, and have handled all of them."""
    return all(map(sleeps, ranks))


def test_a_hand_over_takes_few_python_calls(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without looks at deadlines, whose number depends on the time that a hand-over takes."""
    monkeypatch.setattr(loop, "TICK_SECONDS", 600.0)
    monkeypatch.setattr(loop, "BUSY_SECONDS", 600.0)
    calls = Calls()
    threading.setprofile(calls.profile)
    try:
        p, d = group.pair(plane="cma")
    finally:
        threading.setprofile(None)
    threads_of_d = threading.get_ident(), ident_of(d)
    totals, begins = [], []
    for number in range(HAND_OVERS + 2):  # the first ones make the handshake
        calls.found, calls.counting = [], True
        name, blocks = f"r{number}", [number % 32]
        with calls.of_engine():
            token = grant([p], name, blocks, 1)
        assert wait(lambda: asleep(p))
        posted = len(calls.found)
        with calls.of_engine():
            d.worker.post(load_plan(name, token, peer([p]), blocks, 0, 1))
        assert wait(lambda: bool(p.thread.results.leases)) and wait(lambda: asleep(p, d))
        with calls.of_engine():
            d.poll()
            p.poll()
        calls.counting = False
        assert name in d.received and name in p.sent and not d.failed
        if number >= 2:
            begin = [code for _, code in calls.found].index(CmaChannel.read.__code__, posted)
            begins.append(sum(thread in threads_of_d for thread, _ in calls.found[posted:begin]))
            totals.append(len(calls.found))
    most = Counter(code.co_qualname for _, code in calls.found).most_common(25)
    assert median(totals) <= MAX_CALLS, f"{totals} calls for a hand-over; of the last one: {most}"
    assert median(begins) <= MAX_CALLS_TO_BEGIN, f"{begins} calls from the post of a load to the begin of its copy"


pytest.importorskip("opentelemetry.sdk.trace")
Traced = tuple[Rank, Rank, Spans, Spans]


@pytest.fixture
def traced(group: RankGroup) -> Traced:
    p, d = pair(group, ("tcp", "shm"))
    return p, d, trace(p), trace(d)


def trace(rank: Rank) -> Spans:
    spans = Spans()
    rank.context.tracer = spans.tracer
    return spans


def begin(p: Rank, d: Rank, traceparent: str = SAMPLED, *, now: bool = False) -> None:
    token = secrets.token_bytes(16)
    p.worker.post(lease_plan(token, traceparent=traceparent))
    plan = load_plan("req-d", token, peer([p]), OURS, 0, TOKENS, now=now)
    d.worker.post(replace(plan, loads=(replace(plan.loads[0], traceparent=traceparent),)))


def only(spans: Spans, name: str) -> Any:
    """The one span of this name. It follows the report to the engine."""
    assert wait(lambda: bool(spans.named(name)))
    (span,) = spans.named(name)
    return span


def test_both_sides_of_a_hand_over_join_the_trace_of_the_request(traced: Traced) -> None:
    p, d, of_p, of_d = traced
    begin(p, d)
    assert ended(p, d)
    handover, lease = only(of_d, "kvferry.handover"), only(of_p, "kvferry.lease")
    for span in (handover, lease):
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    nbytes = d.read(OURS, TOKENS).numel() * 4
    assert dict(handover.attributes) == {
        "kvferry.request_id": "req-d", "kvferry.tokens": TOKENS, "kvferry.inside_step": False, "kvferry.attempts": 1,
        "kvferry.peer": "engine-p", "kvferry.plane": "tcp", "kvferry.bytes": nbytes,
    }  # fmt: skip
    assert handover.status.is_unset and handover.start_time < handover.end_time
    assert lease.attributes == {
        "kvferry.request_id": "req-p", "kvferry.tokens": TOKENS, "kvferry.blocks": len(THEIRS),
        "kvferry.end": "released",
    }  # fmt: skip
    assert lease.status.is_unset and lease.start_time < handover.end_time <= lease.end_time


def test_all_attempts_are_one_span(traced: Traced) -> None:
    p, d, _, of_d = traced
    trickle = Trickle(p, 3)
    begin(p, d)
    assert wait(lambda: in_the_middle(d), [p, d])
    cut(d)
    trickle.turns = float("inf")
    assert ended(p, d)
    handover = only(of_d, "kvferry.handover")
    assert handover.attributes["kvferry.attempts"] == 2 and handover.attributes["kvferry.plane"] == "shm"
    assert handover.status.is_unset, "the hand-over did not fail"


def test_a_failure_and_an_expiry_say_why(group: RankGroup) -> None:
    p, d = pair(group, ("tcp",), lease_seconds=30.0)
    of_p, of_d = trace(p), trace(d)
    Trickle(p, 0)
    begin(p, d)
    assert wait(lambda: bool(d.consumer.loads.running) and bool(leases_of(p)), [p, d])
    d.worker.post(StepPlan(cancels=("req-d",)))
    assert not ended(p, d)
    assert "cancelled" in only(of_d, "kvferry.handover").status.description
    p.worker.post(lease_plan(b"t" * 16, "then", traceparent=SAMPLED))
    assert wait(lambda: bool(leases_of(p)), [p])
    let_time_pass(p, 31.0)
    assert wait(lambda: "then-p" in p.sent, [p]) and wait(lambda: len(of_p.named("kvferry.lease")) == 2)
    assert "expired" in of_p.named("kvferry.lease")[1].status.description


def test_without_a_traceparent_there_are_no_spans(traced: Traced) -> None:
    p, d, of_p, of_d = traced
    for traceparent in ("", SAMPLED):
        begin(p, d, traceparent)
        assert ended(p, d)
        forget(p, d)
    assert only(of_p, "kvferry.lease") and only(of_d, "kvferry.handover")


def test_an_error_of_a_span_harms_no_hand_over(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d, _, of_d = traced
    monkeypatch.setattr(of_d.tracer, "record", breaks)
    begin(p, d)
    assert ended(p, d)
