"""A request that may load KV: offered until it is decided, then never again; its lease is loaded under or released."""

from __future__ import annotations

import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.config import Settings
from kvferry.connector.engine import request_lifetime as r
from kvferry.connector.engine.scheduler import SchedulerHalf
from kvferry.connector.engine.transfer_params import RemotePrompt, prompt_digest, to_transfer_params
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.wire.step_plan import KeepLease, Load, PeerEngine, RankAddress, UnneededLease

PHASE = r.RequestPhase
P = PeerEngine("p", 1, 1, 30.0, (RankAddress(0, 0, "10.0.0.1", 1234, bytes(16)),))
KEEP = KeepLease("r", b"t" * 16, P, False)
LOAD = Load("r", b"t" * 16, P, (), ())
RELEASE = r.PlanRelease(KEEP.token)


def run(state: r.RequestState, *events: r.RequestEvent) -> tuple[r.RequestState, list[r.RequestEffect]]:
    effects: list[r.RequestEffect] = []
    for event in events:
        state, new = r.REQUEST.step(state, event, 1)
        effects += new
    return state, effects


OFFERED = (r.PromptOffered((KEEP,)),)
LOADING = (*OFFERED, r.EngineAnswered(3), r.BlocksAllocated(LOAD))


def test_the_good_way() -> None:
    state, effects = run(r.RequestState(), *LOADING)
    assert (state.phase, state.start, effects) == (PHASE.LOADING, 3, [r.PlanKeep(KEEP), r.PlanLoad(LOAD)])
    state, effects = run(state, r.LoadReported(), r.RequestEnded())
    assert (state.phase, effects) == (PHASE.ENDED, [])


def test_a_load_that_is_refused_while_it_runs_is_cancelled_and_reported() -> None:
    state, effects = run(run(r.RequestState(), *LOADING)[0], r.OfferRefused())
    assert (state.phase, effects) == (PHASE.LOADING, [r.PlanCancel()])
    assert run(state, r.LoadReported())[0].phase is PHASE.SETTLED


def test_a_load_inside_a_step_is_neither_reported_nor_cancelled() -> None:
    state, effects = run(r.RequestState(), *OFFERED, r.EngineAnswered(3, True), r.BlocksAllocated(LOAD))
    assert (state.phase, effects[1:]) == (PHASE.SETTLED, [r.PlanLoad(LOAD)])
    assert run(state, r.RequestEnded())[1] == []


def test_the_last_answer_counts() -> None:
    state, _ = run(r.RequestState(), *OFFERED, r.EngineAnswered(3, True), r.EngineAnswered(5), r.BlocksAllocated(LOAD))
    assert (state.phase, state.start) == (PHASE.LOADING, 5)


@pytest.mark.parametrize(
    ("event", "phase"),
    [
        (r.OfferRefused(), PHASE.LOCAL), (r.LoadDeclined(), PHASE.SETTLED), (r.LoadReported(), PHASE.SETTLED),
        (r.RequestEnded(), PHASE.ENDED),
    ],
)  # fmt: skip
def test_what_is_offered_and_not_loaded_is_released_once(event: r.RequestEvent, phase: r.RequestPhase) -> None:
    state, effects = run(r.RequestState(), *OFFERED, event)
    assert (state.phase, effects[1:]) == (phase, [RELEASE])
    assert run(state, r.LoadDeclined(), *LOADING, r.LoadReported(), r.RequestEnded())[1] == []


@pytest.mark.parametrize("event", [r.NothingOffered(), r.OfferRefused()])
def test_without_an_offer_nothing_is_planned(event: r.RequestEvent) -> None:
    state, effects = run(r.RequestState(), event, *LOADING, r.LoadReported())
    assert (state.phase, effects) == (PHASE.LOCAL, [])
    assert run(state, r.RequestEnded())[1] == []


def test_the_end_of_a_request_cancels_its_load() -> None:
    state, _ = run(r.RequestState(), *LOADING)
    assert run(state, r.RequestEnded(), r.RequestEnded(), r.LoadReported())[1] == [r.PlanCancel()]


any_event = st.one_of(
    *(st.just(kind()) for kind in (r.NothingOffered, r.OfferRefused, r.LoadDeclined, r.LoadReported, r.RequestEnded)),
    st.just(r.PromptOffered((KEEP,))),
    st.builds(r.EngineAnswered, st.integers(0, 9), st.booleans()),
    st.just(r.BlocksAllocated(LOAD)),
)


@given(st.lists(any_event, max_size=40))
def test_a_kept_lease_is_loaded_under_or_released_and_nothing_is_offered_twice(script: list[r.RequestEvent]) -> None:
    state, seen, was_offered = r.RequestState(), list[r.RequestEffect](), False
    for event in (*script, r.RequestEnded()):
        before = state.phase
        state, effects = r.REQUEST.step(state, event, 0)
        assert not (state.phase is PHASE.OFFERED and before is not PHASE.OFFERED and was_offered), "offered again"
        was_offered |= state.phase is PHASE.OFFERED
        assert r.PlanCancel() not in effects or r.PlanLoad(LOAD) in seen
        seen += effects
    assert state.phase is PHASE.ENDED
    kept, loaded = seen.count(r.PlanKeep(KEEP)), seen.count(r.PlanLoad(LOAD))
    assert kept == was_offered and loaded + seen.count(RELEASE) == kept
    assert seen.count(r.PlanCancel()) <= loaded


# --- the scheduler half -----------------------------------------------------------------------------------------

IDS = list(range(65))
PROMPT = RemotePrompt(b"t" * 16, 65, prompt_digest(IDS, ()), P)
GOOD = to_transfer_params(PROMPT)
OTHER = to_transfer_params(RemotePrompt(b"t" * 16, 65, "another", P))


def half() -> SchedulerHalf:
    tables = [BlockTable("full", 16)]
    return SchedulerHalf(Settings(), "d", tables, tp_size=1, pp_size=1, produces=True, consumes=True)


def view(params: object, request_id: str = "r") -> RequestView:
    return RequestView(request_id, params, IDS, 65, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", ["loaded", "nothing", "aborted"])
def test_once_decided_the_engine_gets_the_same_answer_ever_after(end: str) -> None:
    scheduler, request = half(), view(GOOD)
    assert scheduler.num_new_matched_tokens(request, 16) == (49, True)
    assert scheduler.num_new_matched_tokens(request, 0) == (65, True), "until vLLM has decided"
    scheduler.after_alloc(request, [[1, 2, 3, 4, 5]], 0 if end == "nothing" else 65)
    plan = scheduler.take_plan()
    assert [keep.request_id for keep in plan.keeps] == ["r"]
    assert ([load.tokens for load in plan.loads], plan.releases) == (
        ([], (UnneededLease("r", PROMPT.token),)) if end == "nothing" else ([((0, 65),)], ())
    )
    if end == "loaded":
        scheduler.loads_finished(["r"])
    for _ in range(2):
        assert scheduler.num_new_matched_tokens(request, 0) == (0, False)
        scheduler.after_alloc(request, [[1, 2, 3, 4, 5]], 65)
    scheduler.request_finished(request, [[1, 2, 3, 4, 5]], completed=False)
    plan = scheduler.take_plan()
    assert (plan.loads, plan.releases, plan.cancels) == ((), (), ("r",) if end == "aborted" else ())


def test_a_lease_of_another_prompt_is_left_alone_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = half()
    with caplog.at_level(logging.WARNING, "vllm.kvferry"):
        for _ in range(3):
            assert scheduler.num_new_matched_tokens(view(OTHER), 0) == (0, False)
    plan = scheduler.take_plan()
    assert (plan.keeps, plan.releases) == ((), ())
    (line,) = [record.getMessage() for record in caplog.records]
    assert "prefills locally: P prefilled another prompt" in line
    assert re.search(r"; the request: new, computed here \+\d\.\d{3} s \(OfferRefused\)", line)


def test_a_lease_names_the_last_step_that_computed_its_request() -> None:
    scheduler = half()
    scheduler.set_ranks(P.ranks)
    done = RequestView("r", {"do_remote_decode": True}, IDS, 65, 65)
    scheduler.on_new_request(done)
    plans = [scheduler.take_plan(computed=computed) for computed in (["r"], ["r", "x"], ["x"], [])]
    assert [plan.after_prefill for plan in plans[1:]] == [True, True, False]
    held, params = scheduler.request_finished(done, [[1, 2, 3, 4, 5]], completed=True)
    (lease,) = scheduler.take_plan().leases
    assert held and params is not None and (lease.request_id, lease.step) == ("r", 2)
    scheduler.request_finished(done, [[1, 2, 3, 4, 5]], completed=True)  # a request that was never mentioned
    assert scheduler.take_plan().leases[0].step == 5


@pytest.mark.parametrize("end", ["loaded", "nothing"])
def test_all_leases_of_a_request_are_kept_and_loaded_under_or_released(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = RemotePrompt(b"u" * 16, 65, PROMPT.prompt, P)
    bad = to_transfer_params(RemotePrompt(b"v" * 16, 65, "another", P))
    params = {**GOOD, "alternatives": [to_transfer_params(second), bad]}
    scheduler, request = half(), view(params)
    scheduler.num_new_matched_tokens(request, 16)
    scheduler.after_alloc(request, [[1, 2, 3, 4, 5]], 0 if end == "nothing" else 49)
    plan = scheduler.take_plan()
    tokens = [b"t" * 16, b"u" * 16]
    assert [keep.token for keep in plan.keeps] == tokens
    assert "has one P less to load from: alternatives[1]: its prompt is not that of the first P" in caplog.text
    if end == "loaded":
        (load,) = plan.loads
        assert [load.token, *(lease.token for lease in load.alternatives)] == tokens and not plan.releases
    else:
        assert not plan.loads and [release.token for release in plan.releases] == tokens
