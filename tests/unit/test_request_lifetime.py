"""A request that may load KV: offered until it is decided, then never again; its lease is loaded under or released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.connector.config import Settings
from kvferry.connector.engine.load_planner import MAX_PATIENCE
from kvferry.connector.engine.params import RemotePrompt, prompt_digest, to_transfer_params
from kvferry.connector.engine.scheduler import SchedulerHalf
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.wire.step_plan import LoadEnd, LookupResult, PeerEngine, RankAddress, StepPlan

P = PeerEngine("p", 1, 1, 30.0, (RankAddress(0, 0, "10.0.0.1", 1234, bytes(16)),))
IDS = list(range(65))
PROMPT = RemotePrompt(b"t" * 16, 65, prompt_digest(IDS, ()), P)
GOOD = to_transfer_params(PROMPT)
OTHER = to_transfer_params(RemotePrompt(b"t" * 16, 65, "another", P))
BLOCKS = [[1, 2, 3, 4, 5]]


def half(settings: Settings | None = None, **more: Any) -> SchedulerHalf:
    tables = [BlockTable("full", 16)]
    roles: dict[str, Any] = {"produces": True, "consumes": True}
    return SchedulerHalf(settings or Settings(), "d", tables, tp_size=1, pp_size=1, **(roles | more))


def view(params: object, request_id: str = "r") -> RequestView:
    return RequestView(request_id, params, IDS, 65, 0)  # type: ignore[arg-type]


def allocated(request: RequestView, tokens: int, **more: Any) -> SchedulerHalf:
    """After the engine has decided to load so many tokens of a request."""
    scheduler = half(**more)
    scheduler.num_new_matched_tokens(request, 16)
    scheduler.after_alloc(request, BLOCKS, tokens)
    return scheduler


def test_a_load_that_failed_on_one_rank_is_counted_so() -> None:
    scheduler = allocated(view(GOOD), 49)
    scheduler.loads_finished((), {"r": LoadEnd("timeout")})
    scheduler.loads_finished(["r"], {"r": LoadEnd(milliseconds=5.0)})
    figures = scheduler.take_stats()
    assert figures is not None and figures["prompts"] == {"failed timeout": 1}


def test_a_lease_names_the_last_step_that_computed_its_request() -> None:
    scheduler = half()
    scheduler.set_ranks(P.ranks)
    done = RequestView("r", {"do_remote_decode": True}, IDS, 65, 65)
    scheduler.on_new_request(done)
    plans = [scheduler.take_plan(computed=computed) for computed in (["r"], ["r", "x"], ["x"], [])]
    assert [plan.after_prefill for plan in plans[1:]] == [True, True, False]
    held, params = scheduler.request_finished(done, BLOCKS, completed=True)
    (lease,) = scheduler.take_plan().leases
    assert held and params is not None and (lease.request_id, lease.step) == ("r", 2)
    scheduler.request_finished(done, BLOCKS, completed=True)  # a request that was never mentioned
    assert scheduler.take_plan().leases[0].step == 5


@pytest.mark.parametrize("end", ["loaded", "nothing"])
def test_all_leases_of_a_request_are_kept_and_loaded_under_or_released(
    end: str, caplog: pytest.LogCaptureFixture
) -> None:
    second = RemotePrompt(b"u" * 16, 65, PROMPT.digest, P)
    bad = to_transfer_params(RemotePrompt(b"v" * 16, 65, "another", P))
    params = {**GOOD, "alternatives": [to_transfer_params(second), bad]}
    plan = allocated(view(params), 0 if end == "nothing" else 49).take_plan()
    tokens = [b"t" * 16, b"u" * 16]
    assert [keep.token for keep in plan.keeps] == tokens
    assert (
        "has one prefill engine less to load from: alternatives[1]: its prompt's digest is not that of" in caplog.text
    )
    if end == "loaded":
        (load,) = plan.loads
        assert [load.token, *(lease.token for lease in load.alternatives)] == tokens and not plan.releases
    else:
        assert not plan.loads and [release.token for release in plan.releases] == tokens


NAMED = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 5600, "transfer_id": "tx"}
TIMEOUT = 100.0
NEVER = MAX_PATIENCE * TIMEOUT


@pytest.mark.parametrize(("known", "end", "said"), [
    ((), TIMEOUT, "has told nothing of 'tx' in 100 s; does the router send both legs"),
    ((60.0,), 60.0 + TIMEOUT, "has told nothing of 'tx' in 100 s; it had the prompt: has its engine stopped?"),
    (range(50, int(NEVER), 50), NEVER, f"has had 'tx' for {NEVER:g} s, and has not computed it"),
], ids=["P never gets it", "P says that it has it, and dies", "P says so again and again"])  # fmt: skip
def test_how_long_a_request_waits_for_a_prompt_that_p_will_hold(
    known: Sequence[float], end: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The time in P's queue does not count, up to a bound. ``known``: when P says that its engine has the prompt."""
    now, request = [0.0], view(NAMED)
    scheduler = half(Settings(handover_timeout_seconds=TIMEOUT), clock=lambda: now[0])
    scheduler.on_new_request(request)
    for at in (0.0, *known, end - 1):
        now[0] = at
        if at in known:
            scheduler.lookups_answered({"r": LookupResult(known=True)})
        assert scheduler.num_new_matched_tokens(request, 0) == (None, False)
    now[0] = end
    assert scheduler.num_new_matched_tokens(request, 0) == (0, False) and said in caplog.text


LEGS = {"told": GOOD, "asked": NAMED, "another": OTHER, "local": None}
ANSWERS = {
    "known": LookupResult(known=True), "answer": LookupResult(msgspec.msgpack.encode(GOOD)),
    "error": LookupResult(error="planted"),
}  # fmt: skip
any_event = st.sampled_from(["ask", "alloc", "decline", "report", "reset", "answer", "known", "error", "step"])


@example("told", ["ask", "alloc", "reset", "reset"])
@given(st.sampled_from(list(LEGS)), st.lists(any_event, max_size=30))
def test_a_kept_lease_is_loaded_under_or_released_and_nothing_is_offered_twice(leg: str, script: list[str]) -> None:
    """Whatever happens in whatever order: and a question to P is answered or left, a load cancelled once at most."""
    scheduler, request, plans = half(), view(LEGS[leg]), list[StepPlan]()
    scheduler.take_stats()  # of an engine that was idle before
    scheduler.on_new_request(request)
    offered = decided = asks = False
    for event in script:
        if event == "ask":
            count, beside = scheduler.num_new_matched_tokens(request, 16)
            asks = count is None
            assert not (count and decided), "offered again"
            offered = bool(count and beside)
        elif event in ("alloc", "decline") and offered:
            scheduler.after_alloc(request, BLOCKS, 49 if event == "alloc" else 0)
            decided = True
        elif event == "report":
            scheduler.loads_finished(["r"], {"r": LoadEnd()})
        elif event == "reset":
            scheduler.reset_caches()
        elif event in ANSWERS:
            scheduler.lookups_answered({"r": ANSWERS[event]})
        elif event == "step":
            plans.append(scheduler.take_plan())
    assert not (asks and leg != "asked")
    scheduler.request_finished(request, BLOCKS, completed=False)
    plans.append(scheduler.take_plan())
    kept, loaded, released = (
        sum(len(getattr(plan, part)) for plan in plans) for part in ("keeps", "loads", "releases")
    )
    cancelled = sum(len(plan.cancels) for plan in plans)
    assert kept == loaded + released <= 1 and kept <= (leg in ("told", "asked"))
    assert cancelled <= loaded
    questions = [question for plan in plans for question in plan.lookups]
    left = sum(len(plan.left) for plan in plans) + sum(question.ended is not None for question in questions)
    assert len(questions) == (leg == "asked") and kept + left >= len(questions) and left <= len(questions)
    scheduler.loads_finished(["r"], {"r": LoadEnd()})  # of a load that the end of its request has cancelled
    figures = scheduler.take_stats()
    assert figures is not None and sum(figures["prompts"].values()) == 1, "what became of the prompt is counted once"


def counted(scheduler: SchedulerHalf) -> dict[str, int]:
    figures = scheduler.take_stats()
    return {} if figures is None else figures["prompts"]


@pytest.mark.parametrize(
    ("alone", "local", "whole", "reason"),
    [(True, 16, False, "cached"), (False, 16, False, "other_connector"), (False, 64, False, "cached"),
     (True, 16, True, "whole_prompt")],
)  # fmt: skip
def test_why_the_engine_loads_nothing_of_what_it_was_offered(alone: bool, local: int, whole: bool, reason: str) -> None:
    """``alone``: no other connector loads tokens, so the engine has found the rest in its own cache meanwhile."""
    scheduler, request = half(streams=lambda: alone), replace(view(GOOD), whole_prompt=whole)
    scheduler.num_new_matched_tokens(request, local)
    scheduler.after_alloc(request, BLOCKS, 0)
    assert counted(scheduler) == {f"local {reason}": 1}


@pytest.mark.parametrize(
    ("known", "rejected", "reason"), [(False, False, "no_answer"), (True, False, "ended"), (False, True, "ended")]
)
def test_a_client_that_gives_up_while_p_says_nothing_is_no_client_that_left(
    known: bool, rejected: bool, reason: str
) -> None:
    scheduler, request = half(), replace(view(NAMED), rejected=rejected)
    scheduler.on_new_request(request)
    if known:
        scheduler.lookups_answered({"r": LookupResult(known=True)})
    scheduler.request_finished(request, BLOCKS, completed=False)
    assert counted(scheduler) == {f"local {reason}": 1}


@pytest.mark.parametrize(
    ("params", "tokens", "count"),
    [(GOOD | {"do_remote_decode": True}, 49, "loaded"), ({"do_remote_decode": True}, 0, "local wrong_role")],
)
def test_a_prompt_that_is_loaded_is_not_counted_for_its_other_role(
    params: dict[str, Any], tokens: int, count: str
) -> None:
    scheduler, request = half(produces=False), view(params)
    assert scheduler.num_new_matched_tokens(request, 16) == (tokens, bool(tokens))
    scheduler.after_alloc(request, BLOCKS, tokens)
    scheduler.loads_finished(["r"], {"r": LoadEnd()})
    assert counted(scheduler) == {count: 1}


def test_a_load_that_a_reset_cancels_has_failed() -> None:
    scheduler = allocated(view(GOOD), 49)
    assert not scheduler.reset_caches()
    scheduler.loads_finished(["r"], {"r": LoadEnd("cancelled")})
    assert counted(scheduler) == {"failed cancelled": 1}
    scheduler.on_new_request(view(GOOD, "offered"))
    assert scheduler.reset_caches() and counted(scheduler) == {"local reset": 1}
