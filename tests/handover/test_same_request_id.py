"""A load under a request id whose earlier load was cancelled and still drains: each has its own end and lease."""

from __future__ import annotations

import secrets

import pytest

from kvferry.connector.engine.params import RemotePrompt, prompt_digest, to_transfer_params
from kvferry.connector.engine.scheduler import SchedulerHalf
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.wire.step_plan import StepPlan
from tests.handover.scenario import OTHERS, PATIENT, THEIRS, TOKENS, RankGroup, begin, breaks, has_all, lease_plan
from tests.handover.slow_copies import SlowCopies, install
from tests.support.ranks import Rank, grant, load_plan, peer, wait
from tests.support.timed import Timed

Pair = tuple[Rank, Rank, SlowCopies]


@pytest.fixture
def pair(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """P with a prompt, D, and D's copies; a copy of the first load is under way."""
    copies = install(monkeypatch)
    p, d = group.pair(plane="shm", **PATIENT)
    copies[1].gate.clear()
    begin(p, d)
    assert wait(lambda: copies[1].running > 0, [p, d])
    return p, d, copies[1]


def load_again(p: Rank, d: Rank, *, one_plan: bool) -> StepPlan:
    """Cancel the first load and post the second one. Its lease, which P does not have yet."""
    token, cancels = secrets.token_bytes(16), ("req-d",)
    plan = load_plan("req-d", token, peer([p]), OTHERS, 0, TOKENS)
    if not one_plan:
        d.worker.post(StepPlan(plan.decode_engine, cancels=cancels))
    d.worker.post(StepPlan(plan.decode_engine, keeps=plan.keeps, loads=plan.loads, cancels=cancels if one_plan else ()))
    return lease_plan(token, "again")


@pytest.mark.parametrize("one_plan", [False, True])
def test_the_end_of_the_first_is_not_that_of_the_second(pair: Pair, one_plan: bool) -> None:
    p, d, copies = pair
    loads = d.consumer.loads.running
    first = next(iter(loads)).load
    lease = load_again(p, d, one_plan=one_plan)
    assert wait(lambda: len(loads) == 2, [p, d])
    copies.gate.set()
    assert wait(lambda: p.sent == {"req-p"}, [p, d]), "the first has ended, and released its lease"
    assert [each.load is first for each in loads] == [False]
    assert not wait(lambda: bool(d.received), [p, d], 0.2), "the second has not ended"
    p.worker.post(lease)
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p", "again-p"}, [p, d])
    assert not d.failed and has_all(d, OTHERS)
    assert wait(lambda: not d.consumer.renewals.kept, [p, d])


def test_the_second_fails_by_itself_where_it_cannot_start(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d, copies = pair
    monkeypatch.setattr(d.consumer.links, "source_addresses", breaks)
    lease = load_again(p, d, one_plan=False)
    assert wait(lambda: d.received == d.failed == {"req-d"}, [p, d]), "its report does not wait for the first"
    assert copies.running and len(d.consumer.loads.running) == 1
    p.worker.post(lease)
    assert wait(lambda: p.sent == {"again-p"}, [p, d])
    copies.gate.set()
    assert wait(lambda: p.sent == {"req-p", "again-p"}, [p, d])
    assert d.failed == {"req-d"}


def test_the_release_of_the_first_is_not_that_of_the_second(group: RankGroup) -> None:
    """In one step: the first request is dropped before it is scheduled, and another one comes under its id."""
    p, d = group.pair(**PATIENT)
    tokens = [grant([p], name, THEIRS, TOKENS) for name in ("first-p", "second-p")]
    ids = list(range(TOKENS))
    prompts = [RemotePrompt(token, TOKENS, prompt_digest(ids), peer([p])) for token in tokens]
    first, second = (RequestView("req-d", to_transfer_params(prompt), ids, TOKENS, 0) for prompt in prompts)
    table = BlockTable("full", d.block_size)
    engine = SchedulerHalf(Timed(**PATIENT), "d", [table], tp_size=1, pp_size=1, produces=False, consumes=True)
    engine.on_new_request(first)
    d.worker.post(engine.take_plan())
    keeper = d.consumer.renewals
    assert wait(lambda: bool(keeper.kept), [p, d])
    engine.request_finished(first, ((),), completed=False)
    engine.on_new_request(second)
    d.worker.post(engine.take_plan())
    assert wait(lambda: p.sent == {"first-p"}, [p, d]), "the second still needs its lease"
    engine.request_finished(second, ((),), completed=False)
    d.worker.post(engine.take_plan())
    assert wait(lambda: p.sent == {"first-p", "second-p"} and not keeper.kept, [p, d])
