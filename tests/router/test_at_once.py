"""The router that asks both engines at once: what each is told, and what becomes of the other leg when one fails."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from kvferry.router import legs, router
from kvferry.router.identities import CALM_ANSWERS, IDENTITY, Identity
from kvferry.router.request_bodies import PREFILL_TAG
from tests.router.stand_ins import PUSH, Served, answer_of_p, gone, leave_after
from tests.support.served import eventually


def known(of: dict[str, Any]) -> dict[str, Any]:
    """What D is told of the P that answered with these parameters, but for the names of the request."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "transfer_mode": "push"} | {
        name: of[name] for name in (*IDENTITY, "remote_key") if name in of
    }


def test_both_are_asked_at_once_from_the_second_request_on(at_once: Served) -> None:
    at_once.p.held = True  # P answers only when D has been asked
    client = at_once.begin({"prompt": "y", "max_tokens": 5}, **{"x-request-id": "mine"})
    for engine in (at_once.p, at_once.d):
        assert engine.engine.arrived.wait(60), "both are asked while P computes"
    at_once.p.go_on.set()
    assert client.result().json() == {"text": "from D"}
    of_p, of_d = at_once.p.params[-1], at_once.d.params[-1]
    assert of_p is not None and of_d is not None
    name = of_p["transfer_id"]
    assert of_p == PREFILL_TAG | {"transfer_id": name} and len(name) == 32
    assert of_d == known(PUSH) | {"transfer_id": name, "remote_request_id": "mine"}
    assert [engine.engine.seen[-1][1]["x-request-id"] for engine in (at_once.p, at_once.d)] == ["mine", "mine"]
    at_once.nothing_left()
    at_once.ask({"prompt": "z"})
    eventually(lambda: len(at_once.p.bodies) == 3, "P is asked, too; D may answer before")
    assert (at_once.p.params[-1] or {})["transfer_id"] != name


def test_a_p_that_does_not_offer_it_is_asked_first(pair: Served) -> None:
    modes: list[dict[str, Any]] = [{"transfer_mode": mode} for mode in (None, "pull")]
    for missing in (*modes, {"remote_host": None}, {"remote_port": "5600"}, {"remote_engine_id": ""}):
        params = PUSH | missing
        pair.p.answer = lambda body, params=params: answer_of_p(params)
        for _ in range(2):
            pair.ask({"prompt": "x"})
            assert pair.p.params[-1] == PREFILL_TAG and pair.d.params[-1] == params


@pytest.mark.parametrize("pair", [{"serial": True}], indirect=True)
def test_serial_is_always_one_after_the_other(pair: Served) -> None:
    for _ in range(3):
        pair.ask({"prompt": "x"})
    assert pair.p.params == [PREFILL_TAG] * 3 and pair.d.params == [PUSH] * 3


NOT_UTF_8 = Response(b'{"a": "\xff"}', media_type="application/json")


@pytest.mark.parametrize("failure", [Response(status_code=503), answer_of_p(None), NOT_UTF_8])
def test_p_fails_while_d_waits(at_once: Served, failure: Any) -> None:
    """D is asked again without parameters, and P, which may be another one by now, serially."""
    at_once.p.answer = lambda body: failure
    client = at_once.held_by_both()
    at_once.p.go_on.set()
    eventually(lambda: at_once.d.gone == 1, "D's leg was cancelled")
    eventually(lambda: len(at_once.d.bodies) == 3, "D is asked again")
    at_once.d.go_on.set()
    assert client.result().json() == {"text": "from D"}
    assert at_once.d.bodies[-1] == {"prompt": "y"}
    at_once.p.answer = lambda body: answer_of_p()
    at_once.ask({"prompt": "z"})
    assert at_once.p.params[-1] == PREFILL_TAG and at_once.d.params[-1] == PUSH


def test_another_p_that_answers_after_d_keeps_no_lease(at_once: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """D was told of a P that has ended, and prefilled by itself."""
    monkeypatch.setattr(router, "LATE_SECONDS", 60.0)
    other = PUSH | {"remote_engine_id": "p-1"}
    at_once.p.held = True
    at_once.p.answer = lambda body: answer_of_p(other)
    assert at_once.ask({"prompt": "y"}).json() == {"text": "from D"}
    at_once.p.go_on.set()
    eventually(lambda: at_once.d.bodies[-1].get("max_tokens") == 0, "D is told to release the lease")
    assert at_once.d.params[-1] == other
    at_once.nothing_left()


def test_another_p_answers(at_once: Served) -> None:
    other = PUSH | {"remote_engine_id": "p-1"}
    at_once.p.answer = lambda body: answer_of_p(other)
    client = at_once.held_by_both()
    at_once.p.go_on.set()
    eventually(lambda: at_once.d.gone == 1, "D's leg was cancelled")
    at_once.d.go_on.set()
    assert client.result().json() == {"text": "from D"} and at_once.d.params[-1] == other
    at_once.ask({"prompt": "z"})
    assert known(other).items() <= (at_once.d.params[-1] or {}).items(), "the other P is known now"


def test_a_client_that_leaves_while_ds_leg_is_ended_leaves_no_lease(
    at_once: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another P has answered than the one that D was told of."""
    other = PUSH | {"remote_engine_id": "p-1"}
    at_once.p.answer = lambda body: answer_of_p(other)
    at_once.d.held = True
    ending, end = threading.Event(), legs.ended

    async def slowly(leg: asyncio.Task[Any]) -> None:
        if not ending.is_set():
            ending.set()
            await asyncio.sleep(600)  # the client leaves meanwhile
        await end(leg)

    monkeypatch.setattr(router, "ended", slowly)
    leave_after(at_once.url, {"prompt": "y", "max_tokens": 5}, ending)
    at_once.d.go_on.set()
    eventually(lambda: at_once.d.bodies[-1].get("max_tokens") == 0, "D is told to release the lease")
    assert at_once.d.params[-1] == other
    at_once.nothing_left()


def test_a_place_where_several_answer_is_asked_serially() -> None:
    identity = Identity("http://p")
    other = PUSH | {"remote_engine_id": "p-1"}
    for params in (PUSH, other, other):
        identity.learn(params)
    assert (identity.get() or {})["remote_engine_id"] == "p-1", "a P that started again is known"
    identity.learn(PUSH)
    assert identity.get() is None
    for _ in range(CALM_ANSWERS):
        identity.learn(PUSH)
        assert identity.get() is None
    identity.learn(PUSH)
    assert identity.get() is not None, "one of them is left"
    identity.learn(other)
    assert (identity.get() or {})["remote_engine_id"] == "p-1"


REFUSAL = {"error": {"message": "too long"}}


@pytest.mark.parametrize("streamed", [False, True])
def test_an_error_of_d_while_p_computes_leaves_no_lease(
    at_once: Served, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "LATE_SECONDS", 1e-9)
    at_once.p.held = True
    event = b"data: " + json.dumps(REFUSAL).encode() + b"\n\n"
    error = Response(event, media_type="text/event-stream") if streamed else JSONResponse(REFUSAL, 400)
    at_once.d.answer = lambda body: error
    answer = at_once.ask({"prompt": "y", "max_tokens": 5})
    assert answer.content == event if streamed else answer.status_code == 400 and answer.json() == REFUSAL
    eventually(lambda: at_once.router.metrics.in_flight == 0, "the answer is over")
    at_once.p.go_on.set()
    eventually(lambda: len(at_once.d.bodies) == 3, "D is told to release the lease")
    assert (at_once.d.params[-1] or {})["remote_num_tokens"] == 3 and at_once.d.bodies[-1]["max_tokens"] == 0
    at_once.nothing_left()
    assert at_once.p.gone == 0


def test_a_d_that_is_gone_ends_ps_leg(at_once: Served) -> None:
    at_once.p.held = True
    at_once.decode_engines(gone())
    answer = at_once.ask({"prompt": "y"})
    assert answer.status_code == 502 and "decode engine" in answer.json()["error"]["message"]
    eventually(lambda: at_once.p.gone == 1, "P's leg was cancelled")


def test_an_error_that_nobody_expects_ends_ds_leg(at_once: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seat would count as a request of D for good."""
    at_once.d.held = True

    def breaks(params: Any, now: float) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(next(iter(at_once.router.engines)).identity, "learn", breaks)
    assert at_once.ask({"prompt": "y"}).status_code == 500
    eventually(lambda: at_once.d.gone == 1, "D's leg was cancelled")
    at_once.nothing_left()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("p_has_answered", [False, True])
def test_a_client_that_leaves_ends_both_legs(
    at_once: Served, stream: bool, p_has_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where P has answered, D is told to release the lease: it may have left before it read its request."""
    if p_has_answered:  # the router may not have read it yet
        monkeypatch.setattr(router, "LATE_SECONDS", 60.0)
    at_once.d.held, at_once.p.held = True, not p_has_answered
    leave_after(at_once.url, {"prompt": "y", "stream": stream, "seed": 1}, at_once.d.engine.arrived)
    eventually(lambda: at_once.d.gone == 1, "D's leg was cancelled")
    at_once.d.go_on.set()
    if not p_has_answered:
        eventually(lambda: at_once.p.gone == 1, "P's leg was cancelled")
    at_once.nothing_left()
    assert len(at_once.d.bodies) == 2 + p_has_answered and (at_once.d.params[1] or {})["transfer_id"]
    if p_has_answered:
        assert at_once.d.params[2] == PUSH and at_once.d.bodies[2]["max_tokens"] == 0
