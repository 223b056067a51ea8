"""Loads inside the step that computes with them: when, that no step computes with what is not there, and the end of
those that fail. Under ``fail`` every user of their blocks ends with an error, under ``recompute`` every token is a
plain engine's; either way the prefix cache has nothing of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.connector.config import Settings
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.prefill_side.prompts import Prompt
from kvferry.connector.scheduler import step_load_rule
from kvferry.connector.scheduler.scheduler import SchedulerHalf
from kvferry.connector.scheduler.steps_in_flight import StepsInFlight
from kvferry.connector.step_loads.step_loads import StepOutcome
from kvferry.connector.vllm import step_load_recovery
from kvferry.connector.vllm.step_load_recovery import filled_blocks
from kvferry.connector.wire.params import RemotePrompt, prompt_digest, to_transfer_params
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress, StepPlan
from kvferry.connector.wire.transfer_estimate import TransferEstimate, TransferEstimates
from kvferry.transport import grant_board
from kvferry.transport.grant_board import PostedGrant
from tests.handover.slow_copies import install
from tests.support.cases import each_once
from tests.support.inside import consumer_of, leases_of, recovery_of, scheduler_half, steps_of, worker_half
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import (
    KVFERRY,
    RUNNERS,
    Engine,
    EngineGroup,
    Lines,
    Pair,
    eventually,
    hand_over,
    loaded,
    run,
    settle,
)

pytestmark = pytest.mark.vllm
IN_STEP = {"plane": "cma", "step_hold_seconds": 1.0}
AGES = 600.0
"""Seconds; what that setting, the longest there is, becomes here: on a host that stands still nothing is fast."""
AHEAD = pytest.mark.parametrize("ahead", [0, 1])
POLICIES = pytest.mark.parametrize("policy", ["fail", "recompute"])
IDS = prompt(300, 9)


def pair_of(group: EngineGroup, extra: dict[str, Any] | None = None, **kwargs: Any) -> Pair:
    pair = group.pair(**({"policy": "fail", "num_blocks": 61} | kwargs), extra=IN_STEP | (extra or {}))
    for engine in pair:
        half = scheduler_half(engine)
        if half.step_load_rule.hold_seconds == IN_STEP["step_hold_seconds"]:
            half.step_load_rule.hold_seconds = AGES
    return pair


def add(p: Engine, d: Engine, ids: list[int], **kwargs: Any) -> str:
    """A request of D whose prompt P holds, with a lease that is granted."""
    known = set(p.answers)
    params = p.prefill(ids)
    (request_id,) = p.answers.keys() - known
    run([p], lambda: request_id in p.leases)

    def held(rank: int) -> bool:
        leases = list(leases_of(p.threads[rank]).values())
        return any(lease.request_id == request_id for lease in leases)

    eventually(lambda: all(held(rank) for rank in range(p.tp)))
    return d.add(ids, params, **kwargs)


def inside(d: Engine, request_id: str, theirs: int | None = None) -> None:
    """The request ends, loaded inside the step that computes with it."""
    loaded(None, d, request_id, theirs)
    assert d.step_loads[request_id] == 1 and not d.loads[request_id]


def beside(d: Engine, request_id: str) -> None:
    d.finish(request_id)
    assert d.loads[request_id] == 1 and not d.step_loads[request_id]


def meet(p: Engine, d: Engine) -> None:
    """The first hand-over, by which D learns how long one takes: of what is not known nothing is expected."""
    beside(d, add(p, d, prompt(60, 1)))
    settle(p, d)


def met(group: EngineGroup, extra: dict[str, Any] | None = None, **kwargs: Any) -> Pair:
    p, d = pair_of(group, extra, **kwargs)
    meet(p, d)
    return p, d


# --- when ---------------------------------------------------------------------------------------------------------


@AHEAD
def test_the_second_one_is_computed_with_at_once(group: EngineGroup, runner: str, ahead: int) -> None:
    p, d = met(group, runner=runner, ahead=ahead)
    for number, tokens in enumerate((2, BLOCK, BLOCK + 1, 250, 400)):
        request_id = add(p, d, prompt(tokens, 10 + number), max_tokens=20)
        d.step()
        assert d.computed[request_id] == 1, "the first step computes, and nothing but the last prompt token"
        inside(d, request_id)
        assert d.origins[request_id].ours == 0 and d.answers[request_id].external == tokens - 1
        settle(p, d)
    assert not d.failed and len(d.workers[0].received) == 1


def test_a_load_is_counted_with_its_tokens(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle D takes no step after its last request: what was counted later would wait for the next request."""
    p, d = met(group)
    d.stats.clear()
    with monkeypatch.context() as held:
        held.setattr(consumer_of(d), "tick", lambda now: None)  # what is left for the next tick
        inside(d, add(p, d, prompt(60, 2)))
        assert [len(samples["tokens"]) for stats in d.stats for samples in stats.data["finished"].values()] == [1]
    settle(p, d)


def test_beside_a_prefix_hit(group: EngineGroup) -> None:
    p, d = met(group)
    ids, hit = prompt(100), 3 * BLOCK
    d.finish(d.add(ids[:50]))
    request_id = add(p, d, ids)
    inside(d, request_id, 99 - hit)
    assert d.origins[request_id].ours == hit
    settle(p, d)
    again = d.add(ids)
    d.finish(again)
    assert d.computed[again] == 100 - 6 * BLOCK, "what was loaded is found in the prefix cache"


AWAY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "switched off": ({"step_hold_seconds": 0.0}, {}),
    "expected to take longer": ({"step_hold_seconds": 1e-6}, {}),
    "P has a part in it": ({"plane": "shm"}, {}),
    "below MultiConnector": ({}, {}),  # its policy counts, and a child sees its own alone
}


@pytest.mark.parametrize("why", AWAY)
def test_beside_the_steps_where(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(step_load_rule, "ALONE_SECONDS", 0.0)
    extra, kwargs = AWAY[why]
    if "Multi" in why:
        child = KVFERRY | {"kv_load_failure_policy": "fail", "kv_connector_extra_config": IN_STEP}
        p, d = (group.multi(number, child) for number in range(2))
    else:
        p, d = pair_of(group, extra, **kwargs)
    for number in range(2):
        assert d.loads[hand_over(p, d, prompt(100, number))] == 1
        settle(p, d)
    assert not d.step_loads


@pytest.mark.parametrize(("kind", "now"), [("full", True), ("state", False)])
def test_not_into_a_state(kind: Any, now: bool) -> None:
    """vLLM copies it to where the step works on it before the connector hears of the step."""
    ids, ranks = list(range(65)), (RankAddress(0, 0, "10.0.0.1", 1234, bytes(16)),)
    remote = RemotePrompt(b"t" * 16, 64, prompt_digest(ids[:64], ()), PeerEngine("p", 1, 1, 30.0, ranks))
    half = SchedulerHalf(
        Settings(), "d", [BlockTable(kind, 16)], tp_size=1, pp_size=1, produces=True, consumes=True,
        step_loads=True, steps=StepsInFlight(),
    )  # fmt: skip
    half.loads_finished((), {}, {("p", 0): TransferEstimate(0.001, 1000)})
    view = RequestView("r", to_transfer_params(remote), ids, 65, 0)
    assert half.num_new_matched_tokens(view, 0) == (64, not now)


def test_others_are_held_up_no_longer_than_the_setting_says(group: EngineGroup) -> None:
    p, d = met(group)
    half = scheduler_half(d)
    half.step_load_rule.hold_seconds = 1e-9
    running = d.add(prompt(50, 3), max_tokens=30)
    d.step()
    beside(d, add(p, d, prompt(200, 4)))
    d.finish(running)
    half.step_load_rule.hold_seconds = AGES
    inside(d, add(p, d, prompt(200, 5)))
    settle(p, d)


def test_d_does_not_wait_for_p_s_next_step(group: EngineGroup) -> None:
    p, d = met(group)
    ids = prompt(200, 4)
    inside(d, d.add(ids, p.prefill(ids)))
    assert p.leases.total() == 1, "P has not stepped, and granted that of meet only"
    inside(d, add(p, d, prompt(100, 5)))
    settle(p, d)


def test_p_is_late_to_grant(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next step comes late; that costs time, not the request."""
    p, d = met(group)
    monkeypatch.setattr(Prompt, "whole", False)  # else D need not wait for the lease
    monkeypatch.setattr(grant_board, "SLOT_BYTES", 64)
    ids = prompt(200, 4)
    request_id = d.add(ids, p.prefill(ids))
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
    inside(d, request_id)
    assert len(in_vain) >= 3
    beside(d, add(p, d, prompt(100, 5)))  # P had a part in the last one
    settle(p, d)


@each_once("runner policy error", (*RUNNERS, *RUNNERS), ("fail", "recompute"), ("", "CUDA error: out of order"))
def test_the_forward_is_launched_before_its_load_has_ended(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, policy: str, error: str
) -> None:
    """As on GPUs, where a device waits for the copies: their end is known after the forward, and told with its step.
    A step ahead, the engine's thread waits for nothing until the step's tokens are there."""
    copies = install(monkeypatch)
    monkeypatch.setattr(TransferEstimates, "seconds", lambda *_: 0.0)
    p, d = pair_of(group, {"plane": "shm"}, policy=policy, runner=runner, ahead=int(policy == "recompute"))
    slow = copies[1]
    decoding = d.add(prompt(50, 3), max_tokens=20)
    d.step()
    request_id = add(p, d, IDS, max_tokens=5)
    slow.gate.clear()
    slow.error = error
    launched: list[int] = []

    def device() -> None:
        if d.step_loads[request_id] and not launched:
            launched.append(slow.running)
            slow.gate.set()
            assert all(event.wait(60) for event in slow.held)

    d.device = device
    if error:
        falls(d, request_id, policy)
    else:
        inside(d, request_id)
    d.finish(decoding)
    assert launched[0] > 0
    settle(p, d)


# --- loads that fail ----------------------------------------------------------------------------------------------


FAILURES = ("revoked", "not copied", "late", "gone", "over")


class Failing:
    """Until ``end``, D's reads fail as ``how`` says."""

    def __init__(self, d: Engine, how: str = "revoked", rank: int = 0) -> None:
        self._patch = pytest.MonkeyPatch()
        consumer = consumer_of(d.threads[rank])
        match how:
            case "revoked":  # P has taken the grant back, or used the pages again, by the time the copy has ended

                def is_current(note: PostedGrant) -> bool:
                    for active in consumer.loads.running:  # another prompt's bytes, before anybody reads them
                        ids = torch.tensor(list(filled_blocks(active.load, scheduler_half(d).tables)), dtype=torch.long)
                        for cache in d.workers[rank].caches.values():
                            cache[ids] = -1.0
                    return False

                self._patch.setattr(PostedGrant, "is_current", property(is_current))
            case "not copied":

                def broken(*_: Any) -> Any:
                    raise RuntimeError("planted")

                self._patch.setattr(consumer.reads, "begin_pull", broken)
            case "late":  # the transfer thread comes to a load only after the engine has given it up
                self._patch.setattr(worker_half(d.workers[rank]).step_hold, "patience", 0.0)
                load, cancel = consumer.loads.begin, consumer.loads.cancel
                parked: list[Callable[[], None]] = []

                def give_up(request_id: str, now: float) -> bool:
                    while parked:
                        parked.pop()()
                    return bool(cancel(request_id, now))

                self._patch.setattr(consumer.loads, "begin", lambda *a, **k: parked.append(lambda: load(*a, **k)))
                self._patch.setattr(consumer.loads, "cancel", give_up)

    def end(self) -> None:
        self._patch.undo()


def falls(d: Engine, request_id: str, policy: str) -> None:
    """The request whose load has failed inside its step ends as the policy says, and no block of then is found."""
    answer = d.finish(request_id)
    assert d.step_loads[request_id] == 1 and not d.loads[request_id]
    if policy == "fail":
        assert answer.finish == "error" and not answer.tokens, "no token of a forward over what is not there"
    else:
        assert answer.finish == "length" and d.computed[request_id] >= len(answer.prompt)
    run([d], lambda: len(d.scheduler.requests) <= 1)  # another may decode
    again = d.add(answer.prompt)
    assert d.finish(again).finish == "length"
    found = len(answer.prompt) - d.computed[again]
    assert found == (0 if policy == "fail" else (len(answer.prompt) - 1) // BLOCK * BLOCK)


@each_once("how policy runner ahead", FAILURES * 2, ("recompute", "recompute", "fail"), RUNNERS, (0, 1))
def test_alone(group: EngineGroup, runner: str, ahead: int, policy: str, how: str, lines: Lines) -> None:
    """``gone``: P has ended; ``over``: P's lease has."""
    p, d = met(group, {"lease_seconds": 5.0}, runner=runner, ahead=ahead, policy=policy)
    request_id = add(p, d, IDS, max_tokens=9)
    failing = Failing(d, how)
    if how == "gone":
        p.close()
    elif how == "over":
        p.let_time_pass(6.0)
        run([p], lambda: p.idle)
    answer = d.finish(request_id)
    failing.end()
    falls(d, request_id, policy)
    assert len(lines("failed inside its step", request_id)) == 1
    assert len(lines("hand-over of", request_id, "failed", "not loaded")) == 1
    if how == "over":
        beside(d, add(p, d, prompt(200, 11)))  # after a failure nothing is expected
    settle(*((d,) if how == "gone" else (p, d)))
    assert answer.prompt == IDS


@AHEAD
@POLICIES
def test_on_one_rank_of_two(group: EngineGroup, ahead: int, policy: str) -> None:
    p, d = met(group, tp=2, ahead=ahead, policy=policy)
    request_id = add(p, d, IDS, max_tokens=9)
    failing = Failing(d, "not copied", rank=1)
    d.finish(request_id)
    failing.end()
    falls(d, request_id, policy)
    settle(p, d)


def test_the_transfer_thread_has_ended(group: EngineGroup) -> None:
    p, d = met(group, policy="recompute")
    request_id = add(p, d, prompt(100, 2), max_tokens=9)
    d.thread.close()
    assert d.finish(request_id).finish == "length"


@each_once("runner drafts ahead", (*RUNNERS, *RUNNERS), (0, 3), (1, 0))
def test_a_failed_one_beside_others(group: EngineGroup, runner: str, ahead: int, drafts: int) -> None:
    """With one that decodes, one whose load stands, and one that is prefilled in pieces."""
    p, d = met(group, runner=runner, ahead=ahead, drafts=drafts, max_batched=128, policy="recompute", num_blocks=161)
    decoding = d.add(prompt(50, 3), max_tokens=40)
    for _ in range(3):
        d.step()
    pieces = d.add(prompt(300, 4), max_tokens=5)
    lost = add(p, d, prompt(200, 9), max_tokens=9)
    failing = Failing(d)
    while not d.step_loads[lost] or d.computed[lost] < 200:
        d.step()
    failing.end()
    good = add(p, d, prompt(200, 10), max_tokens=9)
    d.finish(lost, good, decoding, pieces)
    assert {d.answers[name].finish for name in (lost, good, decoding, pieces)} == {"length"}
    settle(p, d)


# --- others on its blocks -----------------------------------------------------------------------------------------


@dataclass
class Shared:
    """A request whose load fails, and another one whose prompt begins with its prompt. The first is scheduled, unless
    both come in one step. Its output has not been seen."""

    p: Engine
    d: Engine
    policy: str
    request_id: str
    ids: list[int]
    other: str
    longer: list[int]
    failing: Failing

    def after(self, leave: Callable[[Any], object]) -> None:
        """Three steps, with what happens before the output of the load's step is looked at."""
        d = self.d
        d.before_update = lambda step: leave(step) if self.request_id in step.num_scheduled_tokens else None
        for _ in range(3):
            d.step()
        d.before_update = None
        self.failing.end()

    def end_well(self, *names: str) -> None:
        """These requests end as the policy says, and no block of both prompts is found but those computed anew."""
        for name in names:
            answer = self.d.finish(name)
            assert answer.finish == ("error" if self.policy == "fail" else "length")
            assert answer.finish == "length" or not answer.tokens
        settle(self.p, self.d)
        for known in (self.ids, self.longer, [*self.longer, 5], self.ids):
            self.d.finish(self.d.add(known, max_tokens=3))
        settle(self.p, self.d)


def shared_prefix(group: EngineGroup, policy: str = "recompute", *, same_step: bool = False, **kwargs: Any) -> Shared:
    options: dict[str, Any] = {"policy": policy, "num_blocks": 161, "ahead": 1}
    p, d = met(group, **options | kwargs)
    ids = prompt(160, 9)
    longer = [*ids, *prompt(200, 77)]
    request_id = add(p, d, ids, max_tokens=9)
    failing = Failing(d)
    if not same_step:
        d.step()
    return Shared(p, d, policy, request_id, ids, d.add(longer, max_tokens=9), longer, failing)


@pytest.mark.parametrize(
    ("policy", "same_step", "drafts"), [("fail", True, 0), ("recompute", False, 0), ("fail", False, 3)]
)
def test_another_one_found_its_blocks(
    group: EngineGroup, runner: str, policy: str, same_step: bool, drafts: int
) -> None:
    """Nothing of either is left in the prefix cache from before."""
    both = shared_prefix(group, policy, same_step=same_step, runner=runner, drafts=drafts)
    both.d.step()
    assert 0 < both.d.computed[both.other] < len(both.longer), "it found them"
    both.after(lambda step: None)
    both.end_well(both.request_id, both.other)


def waits_on_a_failed_prefix(p: Engine, d: Engine) -> tuple[str, str, list[int]]:
    """A load fails inside its step; beside the steps another request loads what follows its tokens. Returns both, and
    the prompt of the second, once they have ended."""
    ids = prompt(160, 9)
    longer = [*ids, *prompt(90, 77)]
    request_id = add(p, d, ids, max_tokens=9)
    failing = Failing(d)
    d.step()
    failing.end()
    scheduler_half(d).step_load_rule.hold_seconds = 0.0
    other = add(p, d, longer, max_tokens=9)
    d.step()
    assert d.loads[other] == 1
    d.finish(request_id, other)
    return request_id, other, longer


def test_one_that_waits_for_its_own_load_found_its_blocks(group: EngineGroup) -> None:
    """Its prefix is another's that failed; what P sends for the rest does not save it."""
    p, d = met(group, policy="recompute", num_blocks=161, ahead=1)
    _, _, longer = waits_on_a_failed_prefix(p, d)
    settle(p, d)
    d.finish(d.add(longer, max_tokens=3))
    settle(p, d)


@pytest.mark.parametrize(("policy", "who"), [("fail", "it"), ("recompute", "other"), ("fail", "both")])
def test_clients_have_left_meanwhile(group: EngineGroup, runner: str, policy: str, who: str) -> None:
    """vLLM takes an abort between the step and its output; it then finds nobody on the blocks that were not filled."""
    both = shared_prefix(group, policy, runner=runner)
    leaving = {"it": [both.request_id], "other": [both.other]}.get(who, [both.request_id, both.other])
    both.after(lambda step: [both.d.abort(name) for name in leaving if both.d.status(name) is not None])
    both.end_well(*({both.request_id, both.other} - set(leaving)))


@pytest.mark.parametrize("what", ["resumed", "in pieces"])
def test_what_was_made_of_it_before_all_have_left(group: EngineGroup, runner: str, what: str) -> None:
    """Blocks that steps in flight were scheduled with later hold what was computed from the ones that were not filled,
    and would be found again once those before them are right."""
    both = shared_prefix(group, same_step=what == "in pieces", runner=runner, max_batched=96)
    d = both.d
    if what == "resumed":
        d.abort(both.other)
        d.preempt(both.request_id)
    else:
        d.step()
    both.failing.end()

    def leave(step: Any) -> None:
        assert what == "resumed" or d.computed[both.other] > 96
        for name in (both.request_id, both.other):
            if d.status(name) is not None:
                d.abort(name)

    both.after(leave)
    both.end_well()


@pytest.mark.parametrize(("drafts", "resumed"), [(0, False), (3, False), (0, True)])
def test_preempted_meanwhile(group: EngineGroup, runner: str, drafts: int, resumed: bool) -> None:
    """By the scheduler, for want of blocks, before it knows: its output in flight is not delivered either."""
    both = shared_prefix(group, runner=runner, drafts=drafts)
    d = both.d
    d.abort(both.other)

    def preempt(step: Any) -> None:
        d.before_update = None
        d.preempt(both.request_id)

    if resumed:
        preempt(None)
        d.step()
        both.failing.end()
    else:
        both.after(preempt)
    both.end_well(both.request_id)


# --- outputs ------------------------------------------------------------------------------------------------------


def test_nothing_of_a_stale_output_is_left() -> None:
    """Tokens, an embedding, the prompt's log probabilities."""
    result = SimpleNamespace(
        req_id_to_index={"a": 0, "b": 1}, sampled_token_ids=[[5], [6]], pooler_output=[1.0, 2.0],
        prompt_logprobs_dict={"a": "x", "b": "y"},
    )  # fmt: skip
    step_load_recovery.drop_output(result, "b")
    step_load_recovery.drop_output(result, "not in it")
    assert (result.sampled_token_ids, result.pooler_output) == ([[5], []], [1.0, None])
    assert result.prompt_logprobs_dict == {"a": "x"}


def test_a_step_whose_output_does_not_come_has_loaded_nothing(group: EngineGroup) -> None:
    p, d = met(group, policy="recompute", ahead=1)
    request_id = add(p, d, prompt(100, 9), max_tokens=5)
    d.step()
    recovery = recovery_of(d)
    assert recovery.take(object()) is None and len(recovery.steps) == 1, "an output of no step changes nothing"
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=())
    later = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)
    recovery.scheduled(later, StepPlan())
    count = steps_of(d).count
    step = recovery.take(later)
    assert steps_of(d).count == count - 1
    assert [suspect.load.request_id for suspect in step.suspects] == [request_id] and not recovery.steps
