"""What the engine's thread waits for, and for how long."""

from __future__ import annotations

import secrets
import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from kvferry.connector.step_loads.step_loads import LOOK_SECONDS, StepLoads
from kvferry.connector.wire.step_plan import LOST, Load, LoadEnd, PeerEngine, StepPlan
from kvferry.connector.wire.transfer_estimate import UNKNOWN, TransferEstimate
from kvferry.connector.worker import worker
from tests.handover.scenario import OURS, TOKENS, Pair, RankGroup, another_works, ended, lease_plan, leased, load_from
from tests.support.inside import leases_of
from tests.support.ranks import Rank, load_plan, peer, standing, wait


@pytest.fixture
def pair(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(worker, "IDLE_WAIT_SECONDS", 600.0)
    p, d = group.pair()
    another_works(p, d)
    return p, d


@pytest.mark.parametrize("collected", [False, True])
def test_a_step_that_computes_nothing_waits_for_a_load(p: Rank, d: Rank, collected: bool) -> None:
    """A load that ended between a step's results and its paces is not waited for."""
    plan = load_plan("req-d", leased(p), peer([p]), OURS, 0, TOKENS)
    d.worker.post(replace(plan, idle=not collected))
    if collected:
        assert wait(lambda: bool(d.thread.results.loads))
        d.worker.post(StepPlan(idle=True))
    begun = time.monotonic()
    assert d.worker.take_results().received == {"req-d"}, "one call is enough"
    assert d.worker.take_estimates().keys() == {("engine-p", 0)}
    d.worker.post(StepPlan(idle=True))
    assert not d.worker.take_results().received, "with nothing under way it does not wait"
    assert time.monotonic() - begun < 300


def test_a_step_that_waits_for_its_load_sleeps(p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside a lease that was freed, which the engine takes only after its step."""
    d.thread.results.leases.append("a lease of ours")
    token = secrets.token_bytes(16)
    load_from(p, d, token, now=True)
    waits: list[float] = []
    outcome = d.worker.step_hold.outcome
    assert outcome is not None
    real = outcome.wait_begun

    def counted(seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 3:
            p.worker.post(lease_plan(token))
        return real(seconds)

    monkeypatch.setattr(outcome, "wait_begun", counted)
    begun = time.monotonic()
    d.worker.begin_step()
    assert 1 < len(waits) < 10 + 2 * (time.monotonic() - begun) / LOOK_SECONDS
    assert standing(d) == {"req-d"}
    assert not d.worker.take_results().received, "the engine knows"


def test_a_failure_is_told_of_an_engine_though_another_load_of_the_same_step_was_fast(pair: Pair) -> None:
    d, quick = pair[1], TransferEstimate(0.001, 100)
    d.worker.take_results()
    d.worker.take_estimates()
    for estimates, expected in (((UNKNOWN, quick), UNKNOWN), ((quick,), quick)):
        for estimate in estimates:
            (load,) = StepLoads().post([Load("req", b"t" * 16, PeerEngine("engine-p", 1, 1, 30.0, ()), (), ())])
            d.thread.results.finished(load, LOST if estimate is UNKNOWN else LoadEnd(), estimate)
        d.worker.take_results()
        assert d.worker.take_estimates() == {("engine-p", 0): expected}


@pytest.mark.parametrize("announced", [True, False])
def test_a_lease_waits_for_no_step_after_the_one_that_computed_it(
    p: Rank, d: Rank, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    """With a step in flight between them. A lease that nothing announced waits for all that was launched. And where
    nothing waits for a step, no event is recorded."""
    events: list[SimpleNamespace] = []

    def record() -> SimpleNamespace:
        event = SimpleNamespace(reached=False)
        event.query = lambda: event.reached
        events.append(event)
        return event

    monkeypatch.setattr(p.context.caches.copies, "record_event", record)
    for step in (1, 2):
        p.worker.post(StepPlan(step=step))
    assert not events
    if announced:
        p.worker.post(StepPlan(step=3, after_prefill=True))
    token = secrets.token_bytes(16)
    p.worker.post(replace(lease_plan(token, step=2), step=4))
    assert len(events) == 1 + announced
    assert not wait(lambda: bool(leases_of(p)), [p], 0.1), "step 2 has not ended"
    events[0].reached = True
    assert wait(lambda: bool(leases_of(p)), [p]), "step 3 need not end"
    load_from(p, d, token)
    assert ended(p, d)
