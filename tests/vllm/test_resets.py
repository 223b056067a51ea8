"""Resets of an engine's caches, as around an update of its weights, and what an engine reports of leases and blocks."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from kvferry.connector.scheduler import lease_planner
from kvferry.connector.scheduler.load_planner import RequestPhase
from kvferry.connector.wire import metrics
from tests.support.inside import leases_of, scheduler_half
from tests.vllm.labelled import BLOCK, prompt
from tests.vllm.stepped import Engine, EngineGroup, Lines, Pair, eventually, loaded, run, settle
from tests.vllm.test_rendezvous import IDS, STEP, begin

pytestmark = pytest.mark.vllm
AHEAD = pytest.mark.parametrize("ahead", [0, 1], ids=["in-step", "a-step-ahead"])


def reset(engine: Engine, *, running: bool = False) -> bool:
    return bool(engine.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=True))


def update_weights(p: Engine) -> None:
    p.origin = 1


def nothing_old(d: Engine, request_id: str, p: Engine | None = None) -> None:
    """D has computed with no KV of P's old weights."""
    assert loaded(p, d, request_id, 0).finish == "length"


def leased(p: Engine, ids: list[int]) -> object:
    params = p.prefill(ids)
    run([p], lambda: bool(leases_of(p)))
    return params


@AHEAD
@pytest.mark.parametrize("plane", ["cma", "tcp"])
def test_a_reset_ends_leases(group: EngineGroup, lines: Lines, plane: str, ahead: int) -> None:
    p, d = group.pair(extra={"plane": plane}, ahead=ahead)
    params = leased(p, IDS)
    assert not reset(p), "the engine's blocks are held, and it must be asked again"
    run([p], lambda: p.idle)
    assert reset(p)
    eventually(lambda: lines("caches were reset"))  # the line follows the end
    update_weights(p)
    nothing_old(d, d.add(IDS, params, max_tokens=8))
    settle(p, d)


@AHEAD
def test_a_lease_that_p_s_workers_do_not_know_yet(group: EngineGroup, ahead: int) -> None:
    """It is in no plan before the one that ends it."""
    p, d = group.pair(extra={"plane": "tcp"}, ahead=ahead)
    params = p.prefill(IDS)
    assert not p.leases and not reset(p)
    p.step()
    nothing_old(d, d.add(IDS, params, max_tokens=8))
    settle(p, d)


def producer_and_d(group: EngineGroup, plane: str, ahead: int) -> tuple[Engine, Engine]:
    """Of a ``kv_both`` engine with a step in flight vLLM holds the blocks back, and refuses to reset its cache."""
    more: dict[str, Any] = {"extra": {"plane": plane}, "max_batched": STEP, "ahead": ahead}
    return group.engine(0, role="kv_producer", **more), group.engine(1, **more)


@AHEAD
@pytest.mark.parametrize("plane", ["tcp", "shm"])
def test_a_prompt_that_p_computes_anew(group: EngineGroup, lines: Lines, plane: str, ahead: int) -> None:
    """D has been refused the one that it was told of, and asks no more: a lease would stay until it ends by time."""
    p, d = producer_and_d(group, plane, ahead)
    leg, request_id = begin(p, d)
    assert reset(p, running=True)
    update_weights(p)
    assert p.finish(leg, beside=[d]).params is None and lines(leg, "caches were reset while it computed the prompt")
    nothing_old(d, request_id)
    settle(p, d)


@AHEAD
def test_a_d_that_waits_for_the_prompt_computes_it(group: EngineGroup, ahead: int) -> None:
    p, d = producer_and_d(group, "cma", ahead)
    _, request_id = begin(p, d, reads_early=False)
    assert reset(p, running=True)
    update_weights(p)
    nothing_old(d, request_id, p)
    assert not d.all_loads
    settle(p, d)


def test_a_prompt_that_p_goes_on_with_is_not_handed_over(group: EngineGroup, lines: Lines) -> None:
    """Without ``reset_running_requests`` the engine keeps the first tokens."""
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP)
    leg, request_id = begin(p, d)
    assert not reset(p)
    update_weights(p)
    assert p.finish(leg).params is None and lines(leg, "caches were reset while it computed the prompt")
    nothing_old(d, request_id)
    settle(p, d)


def test_a_reset_reaches_the_workers_of_an_engine_that_is_paused(group: EngineGroup) -> None:
    p, d = group.pair(extra={"plane": "tcp"}, max_batched=STEP)
    _, request_id = begin(p, d)
    p.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not p.scheduler.has_requests() and reset(p, running=True)
    while p.scheduler.has_requests():  # what EngineCore asks before each step
        p.step()
    nothing_old(d, request_id)


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_a_pause_waits_for_no_lease(group: EngineGroup, monkeypatch: pytest.MonkeyPatch, state: PauseState) -> None:
    """vLLM ends a pause, and resets caches in it, when the engine has no request."""
    p, d = group.pair(extra={"plane": "cma"})
    params = leased(p, IDS)
    p.scheduler.set_pause_state(state)
    monkeypatch.setattr(lease_planner, "PAUSE_SECONDS", 600.0)
    for _ in range(5):
        p.step()
    assert p.scheduler.has_requests() and not p.workers[0].sent, "a D may be about to load"
    monkeypatch.setattr(lease_planner, "PAUSE_SECONDS", 0.0)
    run([p], lambda: not p.scheduler.has_requests())
    assert reset(p, running=True)
    p.scheduler.set_pause_state(PauseState.UNPAUSED)
    nothing_old(d, d.add(IDS, params, max_tokens=8))
    assert leased(p, prompt(40)), "leases are given again"


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("plane", ["cma", "tcp"])
def test_a_reset_of_d_ends_its_loads(group: EngineGroup, plane: str, *, told: bool) -> None:
    """Also one of which the engine has the report in hand: it would put the blocks into its prefix cache."""
    p, d = group.pair(extra={"plane": plane})
    request_id = d.add(IDS, leased(p, IDS), max_tokens=8)
    answers: list[bool] = []

    def between(step: object) -> None:
        if d.phase(request_id) is RequestPhase.LOADING and not answers and (not told or d.workers[0].received):
            answers.append(reset(d))

    d.before_update = between
    nothing_old(d, request_id, p)
    assert answers == [False] and d.computed[request_id] >= len(IDS)
    settle(p, d)


def test_a_reset_of_d_gives_up_what_it_was_offered(group: EngineGroup) -> None:
    p, d = group.pair(extra={"plane": "cma"})
    request_id = d.add(IDS, leased(p, IDS), max_tokens=8)
    assert d.phase(request_id) is RequestPhase.OFFERED and reset(d)
    nothing_old(d, request_id)
    assert not d.all_loads
    settle(p, d)


def test_a_reset_of_d_gives_up_what_it_awaits(group: EngineGroup) -> None:
    """P's answer comes after the reset, and is of the old weights."""
    p, d = group.pair(extra={"plane": "cma"}, max_batched=STEP)
    _, request_id = begin(p, d, reads_early=False)
    assert d.phase(request_id) is RequestPhase.AWAITED and reset(d)
    nothing_old(d, request_id, p)
    assert not d.all_loads
    settle(p, d)


def test_without_anything_to_end_a_reset_asks_for_no_step(group: EngineGroup) -> None:
    p, _ = group.pair()
    assert reset(p, running=True) and not p.scheduler.has_requests()


def watch(engine: Engine) -> list[dict[str, int]]:
    """The levels that the engine reports, one dictionary for each step with a report."""
    seen: list[dict[str, int]] = []
    real = engine.scheduler.update_from_output

    def update(*arguments: Any) -> Any:
        outputs = real(*arguments)
        for each in outputs.values():
            figures = each.scheduler_stats and each.scheduler_stats.kv_connector_stats
            if figures and figures["levels"]:
                seen.append(metrics.levels(figures))
        return outputs

    engine.scheduler.update_from_output = update
    return seen


def watch_loads(engine: Engine) -> list[int]:
    """The level ``loading`` after each step was scheduled. A load may end before the engine reports its levels."""
    seen: list[int] = []
    real, half = engine.scheduler.schedule, scheduler_half(engine.scheduler)

    def schedule(*arguments: Any) -> Any:
        plan = real(*arguments)
        seen.append(half.stats.levels["loading"])
        return plan

    engine.scheduler.schedule = schedule
    return seen


def test_levels_follow_leases_and_loads_and_end_with_zeros(pair: Pair) -> None:
    p, d = pair
    of_p, of_d, loading = watch(p), watch(d), watch_loads(d)
    tokens = 3 * BLOCK + 1
    params = p.prefill(prompt(tokens))
    assert of_p[-1]["leases"] == 1 and of_p[-1]["lease_blocks"] == 4, "reported in the step that ends the request"
    d.finish(d.add(prompt(tokens), params), beside=[p])
    settle(p, d)
    assert max(loading) == 1
    assert not any(of_p[-1].values()) and not (of_d and any(of_d[-1].values()))
    reports = len(of_p), len(of_d)
    for engine in (p, d):
        engine.finish(engine.add(prompt(20, 3)))
    assert (len(of_p), len(of_d)) == reports, "zeros are reported once"
