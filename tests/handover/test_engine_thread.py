"""What the engine's thread waits for, and for how long."""

from __future__ import annotations

import secrets
import threading
import time

import pytest

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.report import FinishedLoad
from kvferry.connector.engine import worker
from kvferry.connector.step_loads.step_outcome import LOOK_SECONDS
from kvferry.connector.wire.step_plan import LeaseGrant, Load, PeerEngine, StepPlan, pack_ids
from kvferry.connector.wire.transfer_estimate import UNKNOWN, TransferEstimate
from tests.handover.gates import PATIENT
from tests.handover.opening import OURS, THEIRS, TOKENS, another_works
from tests.handover.rank_group import RankGroup
from tests.support.inside import leases_of, thread_of
from tests.support.ranks import Rank, grant, load_plan, peer, standing, wait


@pytest.fixture
def pair(group: RankGroup) -> tuple[Rank, Rank]:
    p, d = group.rank(), group.rank(engine_id="engine-d")
    p.fill(THEIRS, TOKENS)
    return p, d


def idle(plan: StepPlan) -> StepPlan:
    return StepPlan(plan.consumer, plan.leases, plan.keeps, plan.loads, plan.cancels, plan.releases, idle=True)


def test_a_step_that_computes_nothing_waits_for_a_load(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    another_works(p, d)
    monkeypatch.setattr(worker, "IDLE_WAIT_SECONDS", 60.0)
    token = grant([p], "req-p", THEIRS, TOKENS)
    begun = time.monotonic()
    d.worker.post(idle(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS)))
    assert d.worker.take_results().received == {"req-d"}, "one call is enough"
    assert time.monotonic() - begun < 30, "and it returns when the load has ended"
    begun = time.monotonic()
    d.worker.post(StepPlan(idle=True))
    assert not d.worker.take_results().received
    assert time.monotonic() - begun < 30, "with nothing under way it does not wait"


def test_what_was_collected_before_is_told_at_once(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that ended between a step's results and its paces is not waited for."""
    p, d = pair
    another_works(p, d)
    monkeypatch.setattr(worker, "IDLE_WAIT_SECONDS", 60.0)
    token = grant([p], "req-p", THEIRS, TOKENS)
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: bool(thread_of(d) and thread_of(d).results.loads))
    assert d.worker.take_estimates().keys() == {("engine-p", 0)}
    begun = time.monotonic()
    d.worker.post(StepPlan(idle=True))
    assert d.worker.take_results().received == {"req-d"}
    assert time.monotonic() - begun < 30


def test_a_step_that_waits_for_its_load_sleeps(pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside a lease that was freed, which the engine takes only after its step."""
    p, d = pair
    another_works(p, d)
    transfer_thread = thread_of(d)
    assert transfer_thread is not None
    monkeypatch.setattr(d.worker.step_hold, "patience", 60.0)
    transfer_thread.results.leases.append("a lease of ours")
    token = secrets.token_bytes(16)
    lease = StepPlan(leases=(LeaseGrant("req-p", token, TOKENS, (pack_ids(THEIRS),)),))
    threading.Timer(0.5, lambda: p.worker.post(lease)).start()
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS, now=True))
    waits: list[float] = []
    outcome = d.worker.step_hold.outcome
    assert outcome is not None
    real = outcome.wait_begun
    monkeypatch.setattr(outcome, "wait_begun", lambda seconds: (waits.append(seconds), real(seconds))[1])
    begun = time.monotonic()
    d.worker.begin_step()
    assert 1 < len(waits) < 10 + 2 * (time.monotonic() - begun) / LOOK_SECONDS
    assert standing(d) == {"req-d"}
    assert not d.worker.take_results().received, "the engine knows"


def test_the_wait_is_short(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = group.rank(settings=Settings(**PATIENT)), group.rank(settings=Settings(**PATIENT), engine_id="engine-d")
    d.worker.post(idle(load_plan("req-d", bytes(16), peer([p]), OURS, 0, TOKENS)))
    transfer_thread = thread_of(d)
    assert transfer_thread is not None
    waits: list[float] = []
    real = transfer_thread.results.wait
    monkeypatch.setattr(transfer_thread.results, "wait", lambda seconds: (waits.append(seconds), real(seconds))[1])
    for _ in range(20):
        assert not d.worker.take_results().received, "the load itself takes until P gives the ask up"
    assert len(waits) == 20 and max(waits) < 0.025


def test_a_failure_is_told_of_an_engine_though_another_load_of_the_same_step_was_fast(pair: tuple[Rank, Rank]) -> None:
    d = pair[1]
    transfer_thread = thread_of(d)
    assert transfer_thread is not None
    load = Load("req", b"t" * 16, PeerEngine("engine-p", 1, 1, 30.0, ()), (), ())
    for estimate in (UNKNOWN, TransferEstimate(0.001, 100)):
        transfer_thread.results.loads.append(FinishedLoad(load, estimate is not UNKNOWN, estimate))
    assert d.worker.take_estimates() == {("engine-p", 0): UNKNOWN}
    transfer_thread.results.loads.append(FinishedLoad(load, True, TransferEstimate(0.001, 100)))
    assert d.worker.take_estimates() == {("engine-p", 0): TransferEstimate(0.001, 100)}


class Event:
    """A point in the order of a device's work."""

    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


def test_a_lease_waits_for_no_step_after_the_one_that_computed_it(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a step in flight between them. And where nothing waits for a step, no event is recorded."""
    p, d = pair
    events: list[Event] = []

    def record() -> Event:
        events.append(Event())
        return events[-1]

    assert p.worker.rank_context is not None
    monkeypatch.setattr(p.worker.rank_context.caches.copies, "record_event", record)
    for step in (1, 2):
        p.worker.post(StepPlan(step=step))
    assert not events
    p.worker.post(StepPlan(step=3, after_prefill=True))
    token = secrets.token_bytes(16)
    lease = LeaseGrant("req-p", token, TOKENS, (pack_ids(THEIRS),), step=2)
    p.worker.post(StepPlan(leases=(lease,), step=4))
    assert len(events) == 2
    assert not wait(lambda: bool(leases_of(p)), [p], 0.1), "step 2 has not ended"
    events[0].reached = True
    assert wait(lambda: bool(leases_of(p)), [p]), "step 3 need not end"
    d.worker.post(load_plan("req-d", token, peer([p]), OURS, 0, TOKENS))
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d]) and not d.failed


def test_a_lease_that_nothing_announced_waits_for_all_that_was_launched(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, _ = pair
    event = Event()
    assert p.worker.rank_context is not None
    monkeypatch.setattr(p.worker.rank_context.caches.copies, "record_event", lambda: event)
    lease = LeaseGrant("req-p", secrets.token_bytes(16), TOKENS, (pack_ids(THEIRS),), step=2)
    p.worker.post(StepPlan(leases=(lease,), step=4))
    assert not wait(lambda: bool(leases_of(p)), [p], 0.1)
    event.reached = True
    assert wait(lambda: bool(leases_of(p)), [p])
