"""Loads inside the step of models with several block tables, windows and local chunks, and the end of those
that fail: as ``test_step_loads.py``, which has one table of all tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.inside import scheduler_half
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import KVFERRY, Engine, EngineGroup, Lines, settle
from tests.vllm.test_step_loads import (
    AHEAD,
    POLICIES,
    Failing,
    add,
    falls,
    met,
    shared_prefix,
)

pytestmark = pytest.mark.vllm
WINDOW = 64
FORMS = {
    "two of all tokens": ("full", "full"),
    "and a window": ("full", "window"),
    "and local chunks": ("full", "chunk"),
    "a window alone": ("window",),
}
FORM = pytest.mark.parametrize("form", FORMS)


def options(form: str, **more: Any) -> dict[str, Any]:
    return {"groups": FORMS[form], "window": WINDOW, "num_blocks": 400, "runner": "v2 eager"} | more


def inside(d: Engine, request_id: str) -> None:
    d.finish(request_id)
    assert d.step_loads[request_id] == 1 and not d.loads[request_id]
    assert d.answers[request_id].external == len(d.answers[request_id].prompt) - 1


@FORM
@AHEAD
def test_the_first_step_computes_with_the_load(group: EngineGroup, form: str, ahead: int) -> None:
    p, d = met(group, **options(form, ahead=ahead))
    for number, tokens in enumerate((2, WINDOW, WINDOW + BLOCK, WINDOW + BLOCK + 1, 300)):
        request_id = add(p, d, prompt(tokens, 10 + number), max_tokens=40)
        d.step()
        assert d.computed[request_id] == 1
        inside(d, request_id)
        settle(p, d)
    assert not d.failed


@FORM
@POLICIES
@pytest.mark.parametrize("how", ["revoked", "not copied", "late"])
def test_alone(group: EngineGroup, form: str, policy: str, how: str, lines: Lines) -> None:
    """Another one decodes, and has freed blocks outside its window: these are nobody's."""
    p, d = met(group, **options(form, ahead=1, policy=policy))
    decoding = d.add(prompt(200, 3), max_tokens=60)
    for _ in range(3):
        d.step()
    request_id = add(p, d, prompt(300, 9), max_tokens=9)
    failing = Failing(d, how)
    d.finish(request_id)
    assert d.scheduler.requests[decoding].num_preemptions == 0
    failing.end()
    falls(d, request_id, policy)
    assert len(lines("failed inside its step", request_id)) == 1
    assert d.finish(decoding).finish == "length"
    settle(p, d)


@FORM
@POLICIES
@pytest.mark.parametrize("same_step", [True, False])
def test_another_one_found_its_blocks(group: EngineGroup, form: str, policy: str, same_step: bool) -> None:
    both = shared_prefix(group, same_step=same_step, **options(form, policy=policy))
    both.d.step()
    assert 0 < both.d.computed[both.other] < len(both.longer), "it found them"
    both.after(lambda step: None)
    both.end_well(both.request_id, both.other)


@FORM
@POLICIES
@pytest.mark.parametrize("who", ["it", "both"])
def test_clients_have_left_meanwhile(group: EngineGroup, form: str, policy: str, who: str) -> None:
    both = shared_prefix(group, **options(form, policy=policy))
    leaving = {"it": [both.request_id], "both": [both.request_id, both.other]}[who]
    both.after(lambda step: [both.d.abort(name) for name in leaving if both.d.status(name) is not None])
    both.end_well(*({both.request_id, both.other} - set(leaving)))


@FORM
def test_preempted_meanwhile(group: EngineGroup, form: str) -> None:
    both = shared_prefix(group, **options(form))
    d = both.d
    d.abort(both.other)

    def preempt(step: Any) -> None:
        d.before_update = None
        d.preempt(both.request_id)

    both.after(preempt)
    both.end_well(both.request_id)


@FORM
@POLICIES
def test_a_third_one_found_what_the_second_has_made_of_it(group: EngineGroup, form: str, policy: str) -> None:
    """Of a window the third has none of the blocks that were to be filled."""
    both = shared_prefix(group, **options(form, policy=policy, ahead=2, max_batched=512))
    d = both.d
    d.step()
    longest = [*both.longer, *prompt(60, 78)]
    third = d.add(longest, max_tokens=9)
    d.step()
    assert 0 < d.computed[third] < len(both.ids), "it found them"
    both.after(lambda step: None)
    both.end_well(both.request_id, both.other, third)
    d.finish(d.add(longest, max_tokens=3))
    settle(both.p, d)


@FORM
@POLICIES
def test_one_that_waits_for_its_own_load_found_its_blocks(group: EngineGroup, form: str, policy: str) -> None:
    p, d = met(group, **options(form, policy=policy, ahead=1))
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
    on_it = form != "a window alone"  # else it needs none of these blocks
    assert d.answers[request_id].finish == ("error" if policy == "fail" else "length")
    assert d.answers[other].finish == ("error" if policy == "fail" and on_it else "length")
    settle(p, d)
    d.finish(d.add(longer, max_tokens=3))
    settle(p, d)


@POLICIES
def test_one_that_has_run_for_long_on_the_same_tokens_goes_on(group: EngineGroup, policy: str) -> None:
    """It has no block of their window any more, so the load fills all of it; and the other one finds the old blocks of
    all tokens, beside the window of the load that fails."""
    p, d = met(group, **options("and a window", policy=policy, ahead=1))
    ids = prompt(160, 9)
    old = d.add([*ids, *prompt(20, 5)], max_tokens=150)
    d.step()
    request, (_, window) = d.scheduler.requests[old], d.block_tables(old)
    while d.computed[old] < 2 * len(ids):
        d.step()
    d.scheduler.kv_cache_manager.evict_blocks(set(window))
    scheduler_half(d).step_load_rule.hold_seconds = 60.0
    request_id = add(p, d, ids, max_tokens=9)
    failing = Failing(d)
    d.step()
    other = d.add([*ids, *prompt(70, 8)], max_tokens=9)
    d.step()
    assert d.loads[request_id] == 0 and d.step_loads[request_id] == 1
    assert 0 < d.computed[other] < len(ids) + 70, "it found them"
    failing.end()
    d.finish(request_id, other)
    end = "error" if policy == "fail" else "length"
    assert (d.answers[request_id].finish, d.answers[other].finish) == (end, end)
    d.finish(old)
    assert (d.answers[old].finish, request.num_preemptions) == ("length", 0)
    settle(p, d)


# --- which rule -----------------------------------------------------------------------------------------------------


def test_the_log_says_once_which_rule_sends_loads_beside_the_steps(group: EngineGroup, lines: Lines) -> None:
    group.multi(0, KVFERRY)
    assert len(lines("all loads go beside the steps", "below MultiConnector a store may keep")) == 1
    group.engine(1, groups=("full", "window"), window=WINDOW, num_blocks=90)
    assert len(lines("all loads go beside the steps")) == 1
