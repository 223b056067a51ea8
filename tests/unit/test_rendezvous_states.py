"""D's questions to P, and P's answers, as tables: every question is answered, left or repeated, and nothing grows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.decode_side import lookup as r
from kvferry.connector.prefill_side import lookup
from kvferry.connector.prefill_side.lookup import NamedPrompts
from kvferry.connector.wire import messages
from kvferry.connector.wire.states import Tick
from kvferry.connector.wire.step_plan import LeaseGrant, Prefill, QueuedPrompt

PHASE = r.LookupPhase
BEGUN, GRANTED = r.AskName("begun"), r.AskName("granted")


def run(*events: r.LookupEvent, now: float = 0.0) -> tuple[r.LookupPhase, list[r.LookupEffect]]:
    state = r.LookupState()
    effects: list[r.LookupEffect] = [BEGUN]
    for event in events:
        state, new = r.LOOKUP.step(state, event, now)
        effects += new
    return state.phase, effects


@pytest.mark.parametrize("plane_sends", [True, False])
def test_d_takes_blocks_early_only_where_p_sends(plane_sends: bool) -> None:
    way = (r.NameResolved(granted=False, streams=True), r.PlaneFound(plane_sends))
    if plane_sends:
        assert run(*way) == (PHASE.FOUND, [BEGUN, r.BeginLinks(), r.ReportFound(streams=True)])
    else:
        assert run(*way) == (PHASE.AWAITING_GRANT, [BEGUN, r.BeginLinks(), GRANTED])
        assert run(*way, r.NameResolved(True, False))[1][-1] == r.ReportFound(streams=False)


def test_a_prompt_that_does_not_stream_is_awaited_with_the_links_begun() -> None:
    phase, effects = run(r.NameResolved(granted=False, streams=False))
    assert (phase, effects) == (PHASE.AWAITING_GRANT, [BEGUN, r.BeginLinks(), GRANTED])


def test_a_granted_prompt_needs_one_question() -> None:
    assert run(r.NameResolved(granted=True, streams=False)) == (PHASE.FOUND, [BEGUN, r.ReportFound(streams=False)])


@pytest.mark.parametrize("asked", [BEGUN, GRANTED])
def test_an_open_question_is_repeated_after_a_pause(asked: r.AskName) -> None:
    way = () if asked == BEGUN else (r.NameResolved(granted=False, streams=False),)
    state = r.LookupState()
    for event in (*way, r.NameUnresolved(final=False)):
        state, _ = r.LOOKUP.step(state, event, 1.0)
    assert r.LOOKUP.step(state, Tick(), 1.0 + r.RETRY_SECONDS / 2)[1] == ()
    state, effects = r.LOOKUP.step(state, Tick(), 1.0 + r.RETRY_SECONDS)
    assert effects == (asked,)
    assert r.LOOKUP.step(state, Tick(), 100.0)[1] == (), "P holds the question"


@pytest.mark.parametrize("way", [(), (r.NameResolved(False, False),)], ids=["begun", "granted"])
def test_d_hears_that_p_s_engine_has_the_prompt(way: tuple[r.LookupEvent, ...]) -> None:
    phase, effects = run(*way, r.NameUnresolved(final=False, known=True))
    assert effects[-1] == r.ReportKnown() and (phase, effects[:-1]) == run(*way), "and waits on"
    assert r.ReportKnown() not in run(*way, r.NameUnresolved(final=True, detail="why", known=True))[1]
    assert r.ReportKnown() not in run(r.NameLeft(), r.NameUnresolved(final=False, known=True))[1]


def test_a_p_that_must_be_found_first_is_asked_then() -> None:
    state = r.LookupState(PHASE.LOCATING)
    assert r.LOOKUP.step(state, r.PeerLocated(), 0.0) == (r.LookupState(), (BEGUN,))
    assert r.LOOKUP.step(state, r.NameLeft(), 0.0) == (r.LookupState(PHASE.ENDED), ()), "nobody was asked"
    assert r.LOOKUP.step(state, r.PeerFailed("why"), 0.0)[1] == (r.ReportLost("why"),)


@pytest.mark.parametrize("way", [(), (r.NameResolved(False, False),)])
def test_a_connection_that_is_lost_once_is_made_again(way: tuple[r.LookupEvent, ...]) -> None:
    state = r.LookupState()
    for event in way:
        state, _ = r.LOOKUP.step(state, event, 0.0)
    lost, effects = r.LOOKUP.step(state, r.ContactLost("busy"), 1.0)
    assert (lost.phase, effects) == (state.phase, ())
    again, effects = r.LOOKUP.step(lost, Tick(), 1.0 + r.RETRY_SECONDS)
    assert effects == ((GRANTED,) if way else (BEGUN,))
    assert r.LOOKUP.step(again, r.ContactLost("gone"), 2.0)[1] == (r.ReportLost("gone"),)
    answered, _ = r.LOOKUP.step(again, r.NameUnresolved(False), 2.0)
    assert r.LOOKUP.step(answered, r.ContactLost("later"), 600.0)[1] == (), "once since P has last answered"


EVENTS: Any = st.sampled_from(
    [
        r.PeerLocated(),
        r.NameResolved(True, False), r.NameResolved(False, True), r.NameResolved(False, False), r.PeerFailed("p"),
        r.NameUnresolved(True, "why"), r.NameUnresolved(False), r.NameUnresolved(False, known=True),
        r.PlaneFound(True), r.PlaneFound(False), Tick(), r.NameLeft(), r.AnswerTaken(), r.ContactLost("lost"),
    ]
)  # fmt: skip


@given(st.lists(EVENTS, max_size=12))
def test_its_end_is_reported_once_and_its_lease_taken_or_released(events: list[r.LookupEvent]) -> None:
    phase, effects = run(*events)
    reports = [effect for effect in effects if isinstance(effect, r.ReportFound | r.ReportLost)]
    released = effects.count(r.ReleaseUnneeded())
    left = any(isinstance(event, r.NameLeft) for event in events)
    assert len(reports) <= 1 and released <= left
    assert bool(reports) >= (phase is PHASE.FOUND) and (phase in (PHASE.FOUND, PHASE.LEFT, PHASE.ENDED)) >= left
    if phase is PHASE.ENDED and not left:
        assert len(reports) == 1


KNOWN = (r.NameResolved(False, True),), (r.NameResolved(False, False),), (r.NameResolved(True, False),)


@pytest.mark.parametrize("answers", [*KNOWN, (r.NameResolved(False, True), r.PlaneFound(True))])
def test_the_lease_of_a_request_that_ends_is_released(answers: tuple[r.LookupEvent, ...]) -> None:
    phase, effects = run(*answers, r.NameLeft())
    assert phase is PHASE.ENDED and effects[-1] == r.ReleaseUnneeded()
    assert (r.SendLeave() in effects) == (answers == KNOWN[1]), "a question is open only while the grant is awaited"
    first = answers[0]
    if run(*answers)[0] is PHASE.FOUND:
        assert isinstance(first, r.NameResolved)
        assert run(*answers, r.AnswerTaken(), r.NameLeft())[1][-1] == r.ReportFound(first.streams), "the engine's"


def test_a_question_outlives_its_request_while_p_does_not_know_the_prompt() -> None:
    """P may have the prompt already: the lease must not stay until it ends by time."""
    left, effects = r.LOOKUP.step(r.LookupState(), r.NameLeft(), 1.0)
    assert (left.phase, effects) == (PHASE.LEFT, ())
    for answer in KNOWN:
        assert r.LOOKUP.step(left, *answer, 2.0) == (r.LookupState(PHASE.ENDED), (r.ReleaseUnneeded(),))
    for end in (r.PeerFailed("p"), r.NameUnresolved(final=True)):
        assert r.LOOKUP.step(left, end, 2.0) == (r.LookupState(PHASE.ENDED), ())
    again, _ = r.LOOKUP.step(left, r.NameUnresolved(final=False), 2.0)
    assert r.LOOKUP.step(again, Tick(), 2.0 + r.RETRY_SECONDS)[1] == (BEGUN,)
    late = 1.0 + r.LEFT_SECONDS
    assert r.LOOKUP.step(left, Tick(), late)[1] == (r.SendLeave(),)
    assert r.LOOKUP.step(again, Tick(), late) == (r.LookupState(PHASE.ENDED), ()), "no question is open"


# --- P ------------------------------------------------------------------------------------------------------------


def prefill(request_id: str = "r", *names: str, token: bytes = b"t" * 16, **kwargs: Any) -> Prefill:
    form: dict[str, Any] = {"streams": True, "params": b"params"} | kwargs
    return Prefill(request_id, token, 100, "digest", (*names, request_id), found=16, step_tokens=64, **form)


def question(number: int, name: str = "tx", until: Any = "begun", engine_id: str = "") -> messages.Resolve:
    return messages.Resolve(number=number, name=name, engine_id=engine_id, until=until)


GRANT = LeaseGrant("r", b"t" * 16, 100, ())


def test_questions_wait_for_what_they_ask() -> None:
    named = NamedPrompts("p", 10.0)
    assert named.resolve(b"d", question(1), 0.0) == named.resolve(b"d", question(2, until="granted"), 0.0) == []
    ((identity, answer),) = named.begin(prefill("r", "tx"))
    assert (identity, answer.number) == (b"d", 1)
    assert answer == messages.Resolved(number=1, params=b"params", streams=True, found=16, step_tokens=64)
    ((_, second),) = named.grant(GRANT)
    assert second == messages.Resolved(number=2, params=b"params", granted=True, found=16, step_tokens=64)
    assert [a.granted for _, a in named.resolve(b"d", question(3), 0.0)] == [True]  # type: ignore[union-attr]
    assert not bool(named.held.cost)


def test_the_lease_s_own_params_count() -> None:
    named = NamedPrompts("p", 10.0)
    named.begin(prefill("r", "tx", streams=False))
    named.resolve(b"d", question(1, until="granted"), 0.0)
    ((_, answer),) = named.grant(LeaseGrant("r", b"t" * 16, 100, (), params=b"final"))
    assert answer.params == b"final"  # type: ignore[union-attr]


def test_a_prompt_that_ends_answers_all_and_its_names_are_free() -> None:
    named = NamedPrompts("p", 10.0)
    named.resolve(b"d", question(1, until="granted"), 0.0)
    assert named.begin(prefill("r", "tx", params=b"")) == [], "it will not be handed over"
    ((_, answer),) = named.end(b"t" * 16, 0.0)
    assert isinstance(answer, messages.Unresolved) and answer.final
    ((_, late),) = named.resolve(b"d", question(2), 5.0)
    assert isinstance(late, messages.Unresolved) and late.final
    assert named.resolve(b"d", question(3), 10.0) == [], "another prompt may come with this name"
    assert [a.number for _, a in named.begin(prefill("s", "tx", token=b"u" * 16))] == [3]
    named.end(b"u" * 16, 10.0)
    assert not named.prompts and not named.tokens and b"u" * 16 not in named


def test_questions_are_answered_in_time_and_can_be_left() -> None:
    named = NamedPrompts("p", 10.0)
    for number in (1, 2):
        named.resolve(b"d", question(number), 0.0)
    named.leave(b"d", 1)
    assert bool(named.held.cost) and named.take_late(9.9) == []
    ((_, answer),) = named.take_late(10.0)
    assert isinstance(answer, messages.Unresolved) and (answer.number, answer.final) == (2, False)
    assert not bool(named.held.cost)


@pytest.mark.parametrize(("begins", "steps"), [(False, 1), (True, 1), (False, 0)])
def test_a_question_for_a_prompt_that_waits_is_held_and_told_so(begins: bool, steps: int) -> None:
    """Unless P's engine has not taken a step since: it may never take one."""
    named = NamedPrompts("p", 10.0)
    named.queue(QueuedPrompt("r", b"t" * 16, ("tx",)))
    if begins:
        named.begin(prefill("r", "tx", streams=False))
    assert named.resolve(b"d", question(1, until="granted"), 0.0) == []
    assert named.resolve(b"d", question(2, "another"), 0.0) == []
    named.posted_plans += steps
    told = {answer.number: answer for _, answer in named.take_late(10.0)}
    assert all(isinstance(answer, messages.Unresolved) and not answer.final for answer in told.values())
    assert (told[1].known, told[2].known) == (bool(steps), False)  # type: ignore[union-attr]


def test_a_prompt_that_waited_begins_or_ends_like_any_other() -> None:
    named = NamedPrompts("p", 10.0)
    queued = QueuedPrompt("r", b"t" * 16, ("tx", "r"))
    named.queue(queued)
    assert named.resolve(b"d", question(1), 0.0) == []
    ((_, answer),) = named.begin(prefill("r", "tx"))
    assert isinstance(answer, messages.Resolved) and answer.streams
    named.end(b"t" * 16, 0.0)
    named.queue(msgspec.structs.replace(queued, token=b"u" * 16))
    named.resolve(b"d", question(2), 0.0)
    assert named.begin(prefill("r", "tx", token=b"u" * 16, params=b"")) == [], "its request was aborted"
    ((_, answer),) = named.end(b"u" * 16, 0.0)
    assert isinstance(answer, messages.Unresolved) and answer.final
    assert not named.prompts and not named.tokens


def test_another_engine_is_meant() -> None:
    ((_, answer),) = NamedPrompts("p", 10.0).resolve(b"d", question(1, engine_id="q"), 0.0)
    assert isinstance(answer, messages.Unresolved) and answer.final and "engine p" in answer.detail
    assert NamedPrompts("p", 10.0).resolve(b"d", question(1, engine_id="p"), 0.0) == []


def test_strangers_displace_only_their_own_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "HELD_RESOLVES", 64)
    named = NamedPrompts("p", 10.0)
    named.resolve(b"honest", question(1), 0.0)
    told = [a for n in range(500) for a in named.resolve(b"stranger", question(n, f"name {n}"), 0.0)]
    assert len(named.held) <= 64 and {identity for identity, _ in told} == {b"stranger"}
    assert all(isinstance(a, messages.Unresolved) and not a.final for _, a in told)
    assert [identity for identity, _ in named.begin(prefill("r", "tx"))] == [b"honest"]


def test_names_of_ended_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "GONE_NAMES", 8)
    named = NamedPrompts("p", 10.0)
    for n in range(100):
        token = n.to_bytes(16, "big")
        named.begin(prefill(f"r{n}", token=token))
        named.end(token, float(n) / 100)
    assert len(named.gone) == 8
    named.take_late(20.0)
    assert not named.gone


def test_the_first_prompt_keeps_a_name() -> None:
    named = NamedPrompts("p", 10.0)
    named.begin(prefill("r", "tx"))
    named.begin(prefill("s", "tx", token=b"u" * 16, params=b"second"))
    assert [a.params for _, a in named.resolve(b"d", question(1), 0.0)] == [b"params"]  # type: ignore[union-attr]
    assert [a.params for _, a in named.resolve(b"d", question(2, "s"), 0.0)] == [b"second"]  # type: ignore[union-attr]
    named.end(b"u" * 16, 0.0)
    assert [a.params for _, a in named.resolve(b"d", question(3), 0.0)] == [b"params"]  # type: ignore[union-attr]
