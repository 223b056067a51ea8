"""Loads inside the step that computes with them: when, that no step computes with what is not there, and the end of
those that fail."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvferry.connector.config import Settings
from kvferry.connector.engine.params import RemotePrompt, prompt_digest, to_transfer_params
from kvferry.connector.engine.scheduler import SchedulerHalf
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.prefill_side.lease import Lease
from kvferry.connector.step_loads import step_load_rule
from kvferry.connector.step_loads.step_outcome import StepOutcome
from kvferry.connector.step_loads.steps_in_flight import StepsInFlight
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress, UnneededLease
from kvferry.connector.wire.transfer_estimate import TransferEstimate, TransferEstimates
from kvferry.transport import grant_board
from tests.handover.slow_copies import install
from tests.support.inside import consumer_of, leases_of, scheduler_half, worker_half
from tests.vllm.engine_group import EngineGroup, Lines
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.paused_transfer import PausedTransfer
from tests.vllm.stepped import Engine, eventually, prefill, run, settle, transfer_thread_of
from tests.vllm.stepped_model import next_token
from tests.vllm.stepped_rank import RUNNERS

pytestmark = pytest.mark.vllm
IN_STEP = {"plane": "cma", "step_hold_seconds": 1.0}
AGES = 600.0
"""Seconds; what that setting, the longest there is, becomes here: on a host that stands still nothing is fast."""


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "v026":
        monkeypatch.setattr("kvferry.connector.vllm.compat.HAS_TRANSFER_RESULTS", False)
    return str(request.param)


def continued(ids: list[int], count: int) -> list[int]:
    """What the model says after a prompt."""
    known = [*ids]
    for _ in range(count):
        known.append(next_token(known))
    return known[len(ids) :]


def pair_of(group: EngineGroup, extra: dict[str, Any] | None = None, **kwargs: Any) -> tuple[Engine, Engine]:
    pair = group.pair(**({"policy": "fail", "num_blocks": 61} | kwargs), extra=IN_STEP | (extra or {}))
    for engine in pair:
        half = scheduler_half(engine)
        if half.step_load_rule.hold_seconds == IN_STEP["step_hold_seconds"]:
            half.step_load_rule.hold_seconds = AGES
    return pair


def add(p: Engine, d: Engine, ids: list[int], **kwargs: Any) -> str:
    """A request of D whose prompt P holds, with a lease that is granted."""
    known = set(p.answers)
    params = prefill(p, ids)
    (request_id,) = p.answers.keys() - known
    run([p], lambda: request_id in p.leases)

    def held(rank: int) -> bool:
        leases = list(leases_of(transfer_thread_of(p, rank)).values())
        return any(lease.grant.request_id == request_id for lease in leases)

    eventually(lambda: all(held(rank) for rank in range(p.tp)))
    return d.add(ids, params, **kwargs)


def to_the_end(d: Engine, request_id: str) -> str | None:
    run([d], lambda: d.answers[request_id].finish is not None)
    return d.answers[request_id].finish


def meet(p: Engine, d: Engine) -> None:
    """The first hand-over, by which D learns how long one takes."""
    request_id = add(p, d, prompt(60, 1))
    to_the_end(d, request_id)
    assert d.loads[request_id] == 1 and not d.step_loads, "of what is not known nothing is expected"
    settle(p, d)


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_second_one_is_computed_with_at_once(group: EngineGroup, runner: str, ahead: int) -> None:
    p, d = pair_of(group, runner=runner, ahead=ahead)
    meet(p, d)
    for number, tokens in enumerate((2, BLOCK, BLOCK + 1, 250, 400)):
        request_id = add(p, d, prompt(tokens, 10 + number), max_tokens=20)
        d.step()
        assert d.computed[request_id] == 1, "the first step computes, and nothing but the last prompt token"
        assert to_the_end(d, request_id) == "length"
        assert (d.origins[request_id].ours, d.origins[request_id].theirs) == (0, tokens - 1)
        assert d.answers[request_id].external == tokens - 1
        assert len(d.answers[request_id].tokens) == 20
        assert d.step_loads[request_id] == 1 and not d.loads[request_id]
        settle(p, d)
    assert not d.workers[0].failed and len(d.workers[0].received) == 1


def test_a_load_is_counted_with_its_tokens(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle D takes no step after its last request: what was counted later would wait for the next request."""
    p, d = pair_of(group)
    meet(p, d)
    d.stats.clear()
    with monkeypatch.context() as held:
        held.setattr(consumer_of(transfer_thread_of(d)), "tick", lambda now: None)  # what is left for the next tick
        request_id = add(p, d, prompt(60, 2))
        to_the_end(d, request_id)
        assert d.step_loads[request_id] == 1
        assert [len(samples["tokens"]) for stats in d.stats for samples in stats.data["finished"].values()] == [1]
    settle(p, d)


def test_beside_a_prefix_hit(group: EngineGroup) -> None:
    p, d = pair_of(group)
    meet(p, d)
    ids = prompt(100)
    to_the_end(d, d.add(ids[:50]))
    request_id = add(p, d, ids)
    to_the_end(d, request_id)
    hit = 3 * BLOCK
    assert (d.origins[request_id].ours, d.origins[request_id].theirs) == (hit, 99 - hit)
    assert d.step_loads[request_id] == 1
    settle(p, d)
    again = d.add(ids)
    to_the_end(d, again)
    assert d.computed[again] == 100 - 6 * BLOCK, "what was loaded is found in the prefix cache"


def test_by_every_rank(group: EngineGroup) -> None:
    p, d = pair_of(group, tp=2)
    meet(p, d)
    request_id = add(p, d, prompt(300))
    assert to_the_end(d, request_id) == "length"
    assert d.step_loads[request_id] == 1 and d.origins[request_id].theirs == 299
    settle(p, d)


AWAY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "switched off": ({"step_hold_seconds": 0.0}, {}),
    "expected to take longer": ({"step_hold_seconds": 1e-6}, {}),
    "P has a part in it": ({"plane": "shm"}, {}),
    "two block tables": ({}, {"window": 64}),
}


@pytest.mark.parametrize("why", AWAY)
def test_beside_the_steps_where(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(step_load_rule, "ALONE_SECONDS", 0.0)
    extra, kwargs = AWAY[why]
    p, d = pair_of(group, extra, **kwargs)
    for number in range(2):
        request_id = add(p, d, prompt(100, number))
        run([p, d], lambda name=request_id: d.answers[name].finish is not None)
        assert d.loads[request_id] == 1
        settle(p, d)
    assert not d.step_loads


def test_below_multi_connector(group: EngineGroup) -> None:
    """Its policy counts, and a child sees its own alone."""
    child = {"kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.connector.vllm.adapter",
             "kv_role": "kv_both", "kv_load_failure_policy": "fail", "kv_connector_extra_config": IN_STEP}  # fmt: skip
    extra = {"connectors": [child]}
    p = group.engine(0, connector="MultiConnector", module=None, extra=extra)
    d = group.engine(1, connector="MultiConnector", module=None, extra=extra)
    for number in range(2):
        request_id = d.add(prompt(100, number), prefill(p, prompt(100, number)))
        run([p, d], lambda name=request_id: d.answers[name].finish is not None)
        assert d.loads[request_id] == 1
        settle(p, d)
    assert not d.step_loads


def test_beside_one_that_is_scheduled_in_the_same_step(group: EngineGroup) -> None:
    p, d = pair_of(group)
    meet(p, d)
    request_id = add(p, d, prompt(200, 4), priority=1)
    local = d.add(prompt(50, 3), max_tokens=3)
    d.step()
    assert d.step_loads[request_id] == 1 and d.computed[local] == 50
    to_the_end(d, request_id)
    to_the_end(d, local)
    settle(p, d)


def test_not_into_a_state() -> None:
    """vLLM copies it to where the step works on it before the connector hears of the step."""
    kinds: list[tuple[Any, bool]] = [("full", True), ("state", False)]
    for kind, now in kinds:
        half = SchedulerHalf(
            Settings(), "d", [BlockTable(kind, 16)], tp_size=1, pp_size=1, produces=True, consumes=True,
            step_loads=True, steps=StepsInFlight(),
        )  # fmt: skip
        half.loads_finished((), {("p", 0): TransferEstimate(0.001, 1000)})
        ids, ranks = list(range(65)), (RankAddress(0, 0, "10.0.0.1", 1234, bytes(16)),)
        remote_prompt = RemotePrompt(b"t" * 16, 64, prompt_digest(ids[:64], ()), PeerEngine("p", 1, 1, 30.0, ranks))
        view = RequestView("r", to_transfer_params(remote_prompt), ids, 65, 0)
        assert half.num_new_matched_tokens(view, 0) == (64, not now)


def test_a_prompt_that_d_computes_whole_is_not_loaded() -> None:
    """For the log probabilities of its tokens. vLLM 0.26 asks for it all the same."""
    tables = [BlockTable("full", 16)]
    half = SchedulerHalf(Settings(), "d", tables, tp_size=1, pp_size=1, produces=False, consumes=True)
    ids, ranks = list(range(65)), (RankAddress(0, 0, "10.0.0.1", 1234, bytes(16)),)
    remote_prompt = RemotePrompt(b"t" * 16, 64, prompt_digest(ids[:64], ()), PeerEngine("p", 1, 1, 30.0, ranks))
    view = RequestView("r", to_transfer_params(remote_prompt), ids, 65, 0, whole_prompt=True)
    assert half.num_new_matched_tokens(view, 0) == (0, False)
    half.after_alloc(view, ((),), 0)
    assert half.take_plan().releases == (UnneededLease("r", remote_prompt.token),)


def test_beside_others_that_compute(group: EngineGroup, runner: str) -> None:
    """Each request of a step is computed with what its load brought, several at once."""
    p, d = pair_of(group, runner=runner, ahead=1, num_blocks=121)
    meet(p, d)
    running = d.add(prompt(50, 3), max_tokens=30)
    d.step()
    one, two = (add(p, d, prompt(200, seed), max_tokens=9) for seed in (5, 6))
    to_the_end(d, one)
    to_the_end(d, two)
    assert d.step_loads[one] == d.step_loads[two] == 1 and not d.loads[one] + d.loads[two]
    to_the_end(d, running)
    assert d.answers[running].tokens == continued(prompt(50, 3), 30)
    settle(p, d)


def test_others_are_held_up_no_longer_than_the_setting_says(group: EngineGroup) -> None:
    p, d = pair_of(group)
    meet(p, d)
    half = scheduler_half(d)
    half.step_load_rule.hold_seconds = 1e-9
    running = d.add(prompt(50, 3), max_tokens=30)
    d.step()
    request_id = add(p, d, prompt(200, 4))
    to_the_end(d, request_id)
    assert d.loads[request_id] == 1 and not d.step_loads, "it would hold up the other"
    to_the_end(d, running)
    half.step_load_rule.hold_seconds = AGES
    request_id = add(p, d, prompt(200, 5))
    to_the_end(d, request_id)
    assert d.step_loads[request_id] == 1
    settle(p, d)


def test_what_was_learnt_long_ago_counts_no_more(group: EngineGroup) -> None:
    p, d = pair_of(group)
    meet(p, d)
    scheduler_half(d).clock = lambda: time.monotonic() + 61
    request_id = add(p, d, prompt(200, 4))
    to_the_end(d, request_id)
    assert d.loads[request_id] == 1
    settle(p, d)


def orphan(p: Engine, d: Engine) -> tuple[list[int], str]:
    """A prompt, and D's request of it that would be loaded inside its step, but for P, which is gone."""
    meet(p, d)
    ids = prompt(300, 9)
    request_id = add(p, d, ids, max_tokens=9)
    p.close()
    return ids, request_id


def fails(d: Engine, request_id: str, ids: list[int]) -> None:
    """It ends with an error, and nobody computes with what did not come."""
    assert to_the_end(d, request_id) == "error"
    assert d.step_loads[request_id] == 1
    assert not d.answers[request_id].tokens, "no token of a forward over what is not there"
    settle(d)
    again = d.add(ids)
    assert to_the_end(d, again) == "length"
    assert d.computed[again] == len(ids), "no block of it is found in the prefix cache"
    settle(d)


@pytest.mark.parametrize("ahead", [0, 1])
def test_p_is_gone(group: EngineGroup, lines: Lines, runner: str, ahead: int) -> None:
    p, d = pair_of(group, runner=runner, ahead=ahead)
    ids, request_id = orphan(p, d)
    fails(d, request_id, ids)
    assert len(lines("hand-over of", request_id, "failed")) == 1


def test_another_one_that_found_its_blocks_ends_with_it(group: EngineGroup) -> None:
    """It was scheduled before the scheduler heard of the failure, and computed with the same blocks."""
    p, d = pair_of(group, ahead=1)
    ids, request_id = orphan(p, d)
    d.step()
    other = d.add([*ids, 7], max_tokens=9)
    d.step()
    assert 0 < d.computed[other] < len(ids), "it found them"
    fails(d, request_id, ids)
    assert d.answers[other].finish == "error" and not d.answers[other].tokens


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_client_has_left_meanwhile(group: EngineGroup, runner: str, ahead: int) -> None:
    """vLLM takes an abort between the step and its output; it then finds nobody on the blocks that were not filled."""
    p, d = pair_of(group, runner=runner, ahead=ahead)
    ids, request_id = orphan(p, d)
    d.before_update = lambda step: d.abort(request_id)
    for _ in range(3):
        d.step()
    d.before_update = None
    assert not d.answers[request_id].tokens and d.step_loads[request_id] == 1
    settle(d)
    again = d.add(ids)
    assert to_the_end(d, again) == "length"
    assert d.computed[again] == len(ids), "nothing of it is found in the prefix cache"


def test_all_clients_have_left_meanwhile(group: EngineGroup) -> None:
    """Also that of a request which had found the blocks: what it computed from them must not be found either."""
    p, d = pair_of(group, ahead=1)
    meet(p, d)
    ids = prompt(160, 9)
    longer = [*ids, *prompt(40, 77)]
    request_id = add(p, d, ids, max_tokens=9)
    p.close()
    d.step()
    other = d.add(longer, max_tokens=9)

    def leave(step: Any) -> None:
        if request_id in step.num_scheduled_tokens:
            d.abort(request_id)
            d.abort(other)

    d.before_update = leave
    for _ in range(3):
        d.step()
    d.before_update = None
    to_the_end(d, d.add(ids))
    again = d.add(longer)
    to_the_end(d, again)
    assert d.computed[again] == len(longer) - len(ids), "only what was computed from right blocks is found"


def test_d_does_not_wait_for_p_s_next_step(group: EngineGroup) -> None:
    p, d = pair_of(group)
    meet(p, d)
    ids = prompt(200, 4)
    request_id = d.add(ids, prefill(p, ids))
    assert to_the_end(d, request_id) == "length"
    assert d.step_loads[request_id] == 1 and p.leases.total() == 1, "P has not stepped, and granted that of meet only"
    after = add(p, d, prompt(100, 5))
    to_the_end(d, after)
    assert d.step_loads[after] == 1
    settle(p, d)


def test_p_is_late_to_grant(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next step comes late; that costs time, not the request."""
    p, d = pair_of(group)
    meet(p, d)
    monkeypatch.setattr(Lease, "whole", False)  # else D need not wait for the lease
    monkeypatch.setattr(grant_board, "SLOT_BYTES", 64)
    ids = prompt(200, 4)
    request_id = d.add(ids, prefill(p, ids))
    in_vain: list[StepOutcome] = []
    wait_begun = StepOutcome.wait_begun

    def wait(outcome: StepOutcome, seconds: float) -> bool:
        if wait_begun(outcome, seconds):
            return True
        in_vain.append(outcome)
        if len(in_vain) == 3:  # by D's own thread: vLLM's forward context is one for all threads
            for _ in range(3):
                p.step()
        return False

    monkeypatch.setattr(StepOutcome, "wait_begun", wait)
    assert to_the_end(d, request_id) == "length"
    assert len(in_vain) >= 3
    assert d.step_loads[request_id] == 1
    after = add(p, d, prompt(100, 5))
    to_the_end(d, after)
    assert d.loads[after] == 1, "P had a part in the last one"
    settle(p, d)


def test_the_lease_is_over(group: EngineGroup, lines: Lines) -> None:
    p, d = pair_of(group, {"lease_seconds": 0.5})
    meet(p, d)
    ids = prompt(300, 9)
    params = prefill(p, ids)
    run([p], lambda: p.idle)  # D has not heard of it
    fails(d, d.add(ids, params), ids)
    after = add(p, d, prompt(200, 11))
    to_the_end(d, after)
    assert d.loads[after] == 1, "after a failure nothing is expected"
    settle(p, d)


@pytest.mark.parametrize("ahead", [0, 1])
def test_on_one_rank_of_two(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    p, d = pair_of(group, tp=2, ahead=ahead)
    meet(p, d)
    ids = prompt(300, 9)
    request_id = add(p, d, ids)
    transfer_thread = transfer_thread_of(d, 1)

    def broken(*_: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(consumer_of(transfer_thread).reads, "begin_pull", broken)
    assert to_the_end(d, request_id) == "error"
    monkeypatch.undo()
    settle(p, d)
    again = d.add(ids)
    to_the_end(d, again)
    assert d.computed[again] == len(ids)


def test_one_that_does_not_end_is_given_up(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    p, d = pair_of(group)
    meet(p, d)
    ids = prompt(400, 9)
    monkeypatch.setattr(worker_half(d.workers[0]).step_hold, "patience", 0.5)
    paused = PausedTransfer(p, reader=d, chunks=1)
    request_id = add(p, d, ids)
    fails(d, request_id, ids)
    paused.open()
    settle(p, d)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("error", ["", "CUDA error: out of order"])
def test_the_forward_is_launched_before_its_load_has_ended(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, ahead: int, error: str
) -> None:
    """As on GPUs, where a device waits for the copies: their end is known after the forward, and told with its step."""
    copies = install(monkeypatch)
    monkeypatch.setattr(TransferEstimates, "seconds", lambda *_: 0.0)
    p, d = pair_of(group, {"plane": "shm"}, runner=runner, ahead=ahead)
    slow, ids = copies[1], prompt(300, 9)
    request_id = add(p, d, ids)
    slow.gate.clear()
    slow.error = error
    launched: list[Any] = []

    def device() -> None:
        if not launched:
            launched.append(slow.running)
            slow.gate.set()
            assert slow.held[0].wait(60)

    d.device = device
    if error:
        fails(d, request_id, ids)
    else:
        assert to_the_end(d, request_id) == "length"
        assert (d.origins[request_id].ours, d.origins[request_id].theirs) == (0, 299)
    assert launched[0] > 0 and d.step_loads[request_id] == 1
    settle(p, d)
