"""Loads that fail inside their step under ``recompute``: every token is a plain engine's, whoever used the blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.connector.vllm import compat, step_load_recovery
from kvferry.connector.vllm.step_load_recovery import filled_blocks
from kvferry.transport.grant_board import PostedGrant
from tests.support.inside import consumer_of, recovery_of, scheduler_half, worker_half
from tests.vllm.engine_group import EngineGroup, Lines
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import Engine, let_time_pass, run, settle, transfer_thread_of
from tests.vllm.stepped_rank import RUNNERS
from tests.vllm.test_step_loads import add, continued, meet, pair_of, to_the_end

pytestmark = pytest.mark.vllm


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "v026":
        monkeypatch.setattr(compat, "HAS_TRANSFER_RESULTS", False)
        monkeypatch.setattr(compat, "DROPS_STALE_OUTPUT", False)
    return str(request.param)


def pair(group: EngineGroup, **kwargs: Any) -> tuple[Engine, Engine]:
    p, d = pair_of(group, **{"policy": "recompute", "num_blocks": 161, "ahead": 1, **kwargs})
    meet(p, d)
    return p, d


class Failing:
    """Until ``end``, D's reads fail as ``how`` says."""

    def __init__(self, d: Engine, how: str, rank: int = 0) -> None:
        self._patch = pytest.MonkeyPatch()
        consumer = consumer_of(transfer_thread_of(d, rank))
        match how:
            case "revoked":  # P has taken the grant back, or used the pages again, by the time the copy has ended

                def is_current(note: PostedGrant) -> bool:
                    for active in consumer.loads.running:  # another prompt's bytes, before anybody reads them
                        ids = torch.tensor(list(filled_blocks(active.load, BLOCK)), dtype=torch.long)
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


HOW = ["revoked", "not copied", "late"]


def right(d: Engine, request_id: str, ids: list[int], count: int) -> None:
    assert to_the_end(d, request_id) == "length"
    assert d.answers[request_id].tokens == continued(ids, count)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ahead", [0, 1])
def test_alone(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, ahead: int, how: str, lines: Lines
) -> None:
    p, d = pair(group, runner=runner, ahead=ahead)
    ids = prompt(300, 9)
    request_id = add(p, d, ids, max_tokens=9)
    failing = Failing(d, how)
    right(d, request_id, ids, 9)
    failing.end()
    assert d.step_loads[request_id] == 1 and not d.loads[request_id]
    assert d.computed[request_id] >= len(ids), "it was computed from its first token"
    assert len(lines("failed inside its step", request_id)) == 1
    settle(p, d)
    again = d.add(ids)
    to_the_end(d, again)
    assert d.computed[again] < BLOCK + 1, "what was computed anew is found"


@pytest.mark.parametrize("ahead", [0, 1])
def test_p_is_gone(group: EngineGroup, runner: str, ahead: int) -> None:
    p, d = pair(group, runner=runner, ahead=ahead)
    ids = prompt(300, 9)
    request_id = add(p, d, ids, max_tokens=9)
    p.close()
    right(d, request_id, ids, 9)
    assert d.step_loads[request_id] == 1
    settle(d)


def test_the_lease_is_over(group: EngineGroup, runner: str) -> None:
    p, d = pair(group, runner=runner, extra={"lease_seconds": 5.0})
    ids = prompt(300, 9)
    request_id = add(p, d, ids, max_tokens=9)
    let_time_pass(p, 6.0)
    run([p], lambda: p.idle)
    right(d, request_id, ids, 9)
    assert d.step_loads[request_id] == 1
    settle(p, d)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("ahead", [0, 1])
def test_beside_others(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, ahead: int, drafts: int
) -> None:
    """With one that decodes, one whose load stands, and one that is prefilled in pieces."""
    p, d = pair(group, runner=runner, ahead=ahead, drafts=drafts, max_batched=128)
    decoding = d.add(prompt(50, 3), max_tokens=40)
    for _ in range(3):
        d.step()
    pieces = d.add(prompt(300, 4), max_tokens=5)
    lost = add(p, d, prompt(200, 9), max_tokens=9)
    failing = Failing(d, "revoked")
    while not d.step_loads[lost]:
        d.step()
    while d.computed[lost] < 200:
        d.step()
    failing.end()
    good = add(p, d, prompt(200, 10), max_tokens=9)
    right(d, lost, prompt(200, 9), 9)
    right(d, good, prompt(200, 10), 9)
    right(d, decoding, prompt(50, 3), 40)
    right(d, pieces, prompt(300, 4), 5)
    settle(p, d)


@dataclass
class Shared:
    """A request whose load fails, and another one whose prompt begins with its prompt. The first is scheduled, unless
    both come in one step. Its output has not been seen."""

    p: Engine
    d: Engine
    request_id: str
    ids: list[int]
    other: str
    longer: list[int]
    failing: Failing

    def nothing_is_left(self) -> None:
        """Of both prompts in the prefix cache, but what was computed anew."""
        for known in (self.ids, self.longer):
            right(self.d, self.d.add(known, max_tokens=3), known, 3)
        settle(self.p, self.d)


def shared_prefix(group: EngineGroup, *, same_step: bool = False, **kwargs: Any) -> Shared:
    p, d = pair(group, **kwargs)
    ids = prompt(160, 9)
    longer = [*ids, *prompt(40, 77)]
    request_id = add(p, d, ids, max_tokens=9)
    failing = Failing(d, "revoked")
    if not same_step:
        d.step()
    return Shared(p, d, request_id, ids, d.add(longer, max_tokens=9), longer, failing)


@pytest.mark.parametrize("same_step", [True, False])
@pytest.mark.parametrize("drafts", [0, 3])
def test_another_one_found_its_blocks(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, same_step: bool, drafts: int
) -> None:
    """Both are computed anew, and nothing of either is left in the prefix cache from before."""
    both = shared_prefix(group, same_step=same_step, runner=runner, drafts=drafts)
    d = both.d
    d.step()
    assert 0 < d.computed[both.other] < len(both.longer), "it found them"
    for _ in range(2):
        d.step()
    both.failing.end()
    right(d, both.request_id, both.ids, 9)
    right(d, both.other, both.longer, 9)
    settle(both.p, d)
    both.nothing_is_left()


def test_one_that_waits_for_its_own_load_found_its_blocks(group: EngineGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prefix is another's that failed; what P sends for the rest does not save it."""
    p, d = pair(group, num_blocks=161)
    ids = prompt(160, 9)
    longer = [*ids, *prompt(90, 77)]
    request_id = add(p, d, ids, max_tokens=9)
    failing = Failing(d, "revoked")
    d.step()
    failing.end()
    scheduler_half(d).step_load_rule.hold_seconds = 0.0
    other = add(p, d, longer, max_tokens=9)
    d.step()
    assert d.loads[other] == 1
    right(d, request_id, ids, 9)
    right(d, other, longer, 9)
    settle(p, d)
    right(d, d.add(longer, max_tokens=3), longer, 3)
    settle(p, d)


@pytest.mark.parametrize("who", ["it", "other", "both"])
def test_clients_have_left_meanwhile(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, who: str
) -> None:
    both = shared_prefix(group, runner=runner)
    d = both.d

    def leave(step: Any) -> None:
        if both.request_id in step.num_scheduled_tokens:
            for name, leaves in ((both.request_id, who != "other"), (both.other, who != "it")):
                if leaves:
                    d.abort(name)

    d.before_update = leave
    for _ in range(3):
        d.step()
    d.before_update = None
    both.failing.end()
    if who == "it":
        right(d, both.other, both.longer, 9)
    if who == "other":
        right(d, both.request_id, both.ids, 9)
    both.nothing_is_left()


@pytest.mark.parametrize("what", ["resumed", "in pieces"])
def test_what_was_made_of_it_before_all_have_left(group: EngineGroup, runner: str, what: str) -> None:
    """Blocks that steps in flight were scheduled with later hold what was computed from the ones that were not filled,
    and would be found again once those before them are right."""
    p, d = pair(group, runner=runner, max_batched=96)
    ids = prompt(160, 9)
    longer = [*ids, *prompt(200, 77)]
    request_id = add(p, d, ids, max_tokens=9)
    failing = Failing(d, "revoked")
    if what == "in pieces":
        other = d.add(longer, max_tokens=9)
    d.step()
    failing.end()
    if what == "resumed":
        d.preempt(request_id)

    def leave(step: Any) -> None:
        if request_id in step.num_scheduled_tokens:
            d.abort(request_id)
            if what == "in pieces":
                assert d.computed[other] > 96
                d.abort(other)

    d.before_update = leave
    d.step()
    d.step()
    d.before_update = None
    for known in (ids, longer, [*longer, 5], ids, [*ids, 7]):
        right(d, d.add(known, max_tokens=3), known, 3)
    settle(p, d)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
def test_preempted_meanwhile(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, drafts: int, resumed: bool
) -> None:
    """By the scheduler, for want of blocks, before it knows: its output in flight is not delivered either."""
    p, d = pair(group, runner=runner, drafts=drafts)
    ids = prompt(160, 9)
    request_id = add(p, d, ids, max_tokens=9)
    failing = Failing(d, "revoked")
    d.step()
    if resumed:
        d.preempt(request_id)
        d.step()
    else:
        d.before_update = lambda step: d.preempt(request_id) if request_id in step.num_scheduled_tokens else None
        d.step()
        d.before_update = None
    failing.end()
    right(d, request_id, ids, 9)
    settle(p, d)
    right(d, d.add(ids, max_tokens=3), ids, 3)
    settle(p, d)


@pytest.mark.parametrize("ahead", [0, 1])
def test_on_one_rank_of_two(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    p, d = pair(group, tp=2, ahead=ahead)
    ids = prompt(300, 9)
    request_id = add(p, d, ids, max_tokens=9)
    failing = Failing(d, "not copied", rank=1)
    right(d, request_id, ids, 9)
    failing.end()
    settle(p, d)


def test_the_transfer_thread_has_ended(group: EngineGroup) -> None:
    p, d = pair(group)
    ids = prompt(100, 2)
    request_id = add(p, d, ids, max_tokens=9)
    transfer_thread_of(d).close()
    right(d, request_id, ids, 9)


@pytest.mark.parametrize("error", ["", "CUDA error: out of order"])
def test_the_copies_go_on_while_the_next_step_is_scheduled(
    group: EngineGroup, monkeypatch: pytest.MonkeyPatch, runner: str, error: str
) -> None:
    """As on GPUs: the engine's thread launches the step, and waits for nothing until the step's tokens are there."""
    from kvferry.connector.wire.transfer_estimate import TransferEstimates
    from tests.handover.slow_copies import install

    copies = install(monkeypatch)
    monkeypatch.setattr(TransferEstimates, "seconds", lambda *_: 0.0)
    p, d = pair_of(group, {"plane": "shm"}, policy="recompute", runner=runner, ahead=1)
    slow, ids = copies[1], prompt(300, 9)
    decoding = d.add(prompt(50, 3), max_tokens=20)
    d.step()
    request_id = add(p, d, ids, max_tokens=5)
    slow.gate.clear()
    slow.error = error
    launched: list[int] = []

    def device() -> None:
        if d.step_loads[request_id] and not launched:
            launched.append(slow.running)
            slow.gate.set()
            assert slow.held[0].wait(60)

    d.device = device
    right(d, request_id, ids, 5)
    right(d, decoding, prompt(50, 3), 20)
    assert launched and launched[0] > 0
    settle(p, d)


def test_nothing_of_a_stale_output_is_left() -> None:
    """Tokens, an embedding, the prompt's log probabilities: vLLM 0.26 would deliver or assert."""
    result = SimpleNamespace(
        req_id_to_index={"a": 0, "b": 1}, sampled_token_ids=[[5], [6]], pooler_output=[1.0, 2.0],
        prompt_logprobs_dict={"a": "x", "b": "y"},
    )  # fmt: skip
    step_load_recovery.drop_output(result, "b")
    step_load_recovery.drop_output(result, "not in it")
    assert (result.sampled_token_ids, result.pooler_output) == ([[5], []], [1.0, None])
    assert result.prompt_logprobs_dict == {"a": "x"}


def test_a_step_whose_output_does_not_come_has_loaded_nothing(group: EngineGroup) -> None:
    p, d = pair(group)
    ids = prompt(100, 9)
    request_id = add(p, d, ids, max_tokens=5)
    d.step()
    recovery = recovery_of(d)
    assert recovery.take(object()) == (None, 0) and len(recovery.steps) == 1, "an output of no step changes nothing"
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=())
    later = SimpleNamespace(scheduled_new_reqs=[], scheduled_cached_reqs=cached)
    recovery.scheduled(later, [])
    step, lost = recovery.take(later)
    assert lost == 1
    assert [suspect.load.request_id for suspect in step.suspects] == [request_id] and not recovery.steps
