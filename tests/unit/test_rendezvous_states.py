"""D's questions to P, and P's answers, as tables: every question is answered, left or repeated, and nothing grows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side.lookup import (
    LEFT_SECONDS,
    LOOKUP,
    RETRY_SECONDS,
    TICK,
    LookupEffect,
    LookupEvent,
    LookupEventKind,
    LookupPhase,
    LookupState,
)
from kvferry.connector.prefill_side import lookup
from kvferry.connector.prefill_side.lookup import NamedPrompts
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import Prefill, QueuedPrompt

PHASE, K, E = LookupPhase, LookupEventKind, LookupEffect
GRANTED = LookupEvent(K.RESOLVED, granted=True)
STREAMS = LookupEvent(K.RESOLVED, streams=True)
BEGUN = LookupEvent(K.RESOLVED)
NOT_YET, FINAL = LookupEvent(K.UNRESOLVED), LookupEvent(K.UNRESOLVED, "why", final=True)
KNOWN = LookupEvent(K.UNRESOLVED, known=True)
P_SENDS, D_READS = LookupEvent(K.PLANE_FOUND, p_sends=True), LookupEvent(K.PLANE_FOUND)
LEFT, TAKEN = LookupEvent(K.LEFT), LookupEvent(K.TAKEN)
FAILED, LOST = LookupEvent(K.FAILED, "p"), LookupEvent(K.LOST, "gone")


def after(*events: LookupEvent, state: LookupState | None = None, now: float = 0.0) -> tuple[LookupState, list[Any]]:
    state, effects = state or LookupState(), list[LookupEffect]()
    for event in events:
        state, new = LOOKUP.step(state, event, now)
        effects += new
    return state, effects


@pytest.mark.parametrize("way", [(), (BEGUN,)])
def test_an_open_question_is_repeated_after_a_pause(way: tuple[LookupEvent, ...]) -> None:
    """Also where the connection is lost once since P has last answered."""
    begun, _ = after(*way)
    for event in (NOT_YET, LOST):
        state, effects = after(event, state=begun, now=1.0)
        assert (state.phase, effects) == (begun.phase, [])
        assert after(TICK, state=state, now=1.0 + RETRY_SECONDS / 2)[1] == []
        state, effects = after(TICK, state=state, now=1.0 + RETRY_SECONDS)
        assert effects == [E.ASK] and after(TICK, state=state, now=100.0)[1] == [], "P holds the question"
    assert after(LOST, state=state)[1] == [E.REPORT_LOST]
    answered, _ = after(NOT_YET, state=state, now=2.0)
    assert after(LOST, state=answered, now=600.0)[1] == []


EVENTS: Any = st.sampled_from(
    [GRANTED, STREAMS, BEGUN, FAILED, FINAL, NOT_YET, KNOWN, P_SENDS, D_READS, TICK, LEFT, TAKEN, LOST]
)


@given(st.lists(EVENTS, max_size=12))
def test_its_end_is_reported_once_and_its_lease_taken_or_released(events: list[LookupEvent]) -> None:
    state, effects = after(*events)
    reports = effects.count(E.REPORT_FOUND) + effects.count(E.REPORT_LOST)
    left = LEFT in events
    assert reports <= 1 and effects.count(E.RELEASE) <= left
    assert reports >= (state.phase is PHASE.FOUND)
    assert (state.phase in (PHASE.FOUND, PHASE.LEFT, PHASE.ENDED)) >= left
    if state.phase is PHASE.ENDED and not left:
        assert reports == 1


def test_a_question_outlives_its_request_while_p_does_not_know_the_prompt() -> None:
    """P may have the prompt already: the lease must not stay until it ends by time."""
    left, effects = after(LEFT, now=1.0)
    assert (left.phase, effects) == (PHASE.LEFT, [])
    for answer in (STREAMS, BEGUN, GRANTED):
        assert after(answer, state=left) == (LookupState(PHASE.ENDED), [E.RELEASE])
    for end in (FAILED, FINAL):
        assert after(end, state=left) == (LookupState(PHASE.ENDED), [])
    again, _ = after(NOT_YET, state=left, now=2.0)
    assert after(TICK, state=again, now=2.0 + RETRY_SECONDS)[1] == [E.ASK]
    lost, _ = after(LOST, state=left, now=2.0)
    assert after(TICK, state=lost, now=2.0 + RETRY_SECONDS)[1] == [E.ASK], "over another connection"
    assert after(LOST, state=lost) == (LookupState(PHASE.ENDED), [])
    assert after(TICK, state=left, now=1.0 + LEFT_SECONDS)[1] == [E.LEAVE]
    assert after(TICK, state=again, now=1.0 + LEFT_SECONDS) == (LookupState(PHASE.ENDED), []), "no question is open"


# --- P ------------------------------------------------------------------------------------------------------------

TOKEN = b"t" * 16


def prefill(request_id: str = "r", *names: str, token: bytes = TOKEN, **kwargs: Any) -> Prefill:
    form: dict[str, Any] = {"streams": True, "params": b"params"} | kwargs
    return Prefill(request_id, token, 100, "digest", (*names, request_id), found=16, step_tokens=64, **form)


class Names(NamedPrompts):
    """P's side; ``ask`` gives the answers as what matters of each."""

    def __init__(self) -> None:
        super().__init__("p", 10.0)

    def ask(self, number: int, name: str = "tx", until: Any = "begun", *, at: float = 0.0, engine_id: str = "") -> Any:
        question = messages.Resolve(number=number, name=name, engine_id=engine_id, until=until)
        return said(self.resolve(b"d", question, at))


def said(answers: Any) -> list[Any]:
    """Of each answer its number, and P's params or whether it is the last one."""
    return [(a.number, a.params if isinstance(a, messages.Resolved) else a.final) for _, a in answers]


def test_questions_are_answered_in_time_and_can_be_left() -> None:
    named = Names()
    named.ask(1)
    named.ask(2)
    named.leave(b"d", 1)
    assert bool(named.held.cost) and named.take_late(9.9) == []
    assert said(named.take_late(10.0)) == [(2, False)]
    assert not bool(named.held.cost)


@pytest.mark.parametrize(("begins", "steps"), [(False, 1), (True, 1), (False, 0)])
def test_a_question_for_a_prompt_that_waits_is_held_and_told_so(begins: bool, steps: int) -> None:
    """Unless P's engine has not taken a step since: it may never take one."""
    named = Names()
    named.queue(QueuedPrompt("r", TOKEN, ("tx",)))
    if begins:
        named.begin(prefill("r", "tx", streams=False))
    assert named.ask(1, until="granted") == named.ask(2, "another") == []
    named.plans_seen += steps
    told: Any = {answer.number: answer for _, answer in named.take_late(10.0)}
    assert not told[1].final and not told[2].final
    assert (told[1].known, told[2].known) == (bool(steps), False)


def test_a_prompt_that_ends_answers_all_and_late_questions_for_a_while() -> None:
    named = Names()
    named.begin(prefill("r", "tx"))
    named.ask(1, until="granted")
    assert said(named.end(TOKEN, 0.0)) == [(1, True)]
    assert named.ask(2, at=9.9) == [(2, True)]
    assert named.ask(3, at=10.0) == [], "another prompt may come with this name"


def test_another_engine_is_meant() -> None:
    assert Names().ask(1, engine_id="q") == [(1, True)] and Names().ask(1, engine_id="p") == []


def test_strangers_displace_only_their_own_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "HELD_RESOLVES", 64)
    named = Names()
    named.ask(1)
    questions = [messages.Resolve(number=n, name=f"name {n}") for n in range(500)]
    told = [answer for question in questions for answer in named.resolve(b"stranger", question, 0.0)]
    assert len(named.held) <= 64 and {identity for identity, _ in told} == {b"stranger"}
    assert all(isinstance(answer, messages.Unresolved) and not answer.final for _, answer in told)
    assert said(named.begin(prefill("r", "tx"))) == [(1, b"params")]


def test_names_of_ended_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "GONE_NAMES", 8)
    named = Names()
    for n in range(100):
        named.begin(prefill(f"r{n}", token=n.to_bytes(16, "big")))
        named.end(n.to_bytes(16, "big"), float(n) / 100)
    assert len(named.gone) == 8
    named.take_late(20.0)
    assert not named.gone
