"""The router between real HTTP servers that stand in for engines, one leg after the other and both at once."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from kvferry.router import legs, router
from kvferry.router.engines import IDENTITY
from kvferry.router.health import Checks
from kvferry.router.request_bodies import PREFILL_TAG
from tests.router.stand_ins import (
    PARAMS,
    PATIENT,
    PUSH,
    Served,
    answer_of_p,
    decode_engine,
    gone,
    leave_after,
    prefill_engine,
    routed,
)
from tests.support.served import eventually


def test_the_two_legs() -> None:
    p, d = prefill_engine(), decode_engine()
    kept = {"prompt": "x", "temperature": 0.5}
    body = kept | {"max_tokens": 9, "max_completion_tokens": 9, "n": 3, "min_tokens": 4}
    body["kv_transfer_params"] = {"remote_host": "attacker"}
    with routed(p, d) as front:
        response = front.ask(body, authorization="Bearer k")
    assert response.json() == {"text": "from D"} and response.headers["x-from"] == "d"
    (to_p, p_headers, _), (to_d, d_headers, _) = p.seen[0], d.seen[0]
    of_p = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": PREFILL_TAG}
    assert to_p == kept | of_p
    assert to_d == body | {"kv_transfer_params": PARAMS}  # verbatim, and the client's own are gone
    assert p_headers["x-request-id"] == d_headers["x-request-id"] == response.headers["x-request-id"]
    assert p_headers["authorization"] == d_headers["authorization"] == "Bearer k"


def test_streams_piece_by_piece() -> None:
    go_on = threading.Event()
    p, d = prefill_engine(), decode_engine(pieces=3, go_on=go_on)
    came = []
    with routed(p, d) as front, front.streaming() as response:
        for line in response.iter_lines():
            came.append(line)
            go_on.set()  # D makes the next piece only once the client has the first
    assert [line for line in came if line] == ['data: {"i": 0}', 'data: {"i": 1}', 'data: {"i": 2}', "data: [DONE]"]
    assert p.seen[0][0]["stream"] is False


@pytest.mark.parametrize("why", ["error", "late", "refused", "no params", "garbage params"])
def test_decode_only_where_prefill_fails(why: str) -> None:
    how: dict[str, dict[str, Any]] = {
        "error": {"status": 503}, "late": {"go_on": threading.Event()}, "refused": {}, "no params": {"params": None},
        "garbage params": {"params": "x"},
    }  # fmt: skip
    p = prefill_engine(**how[why])
    d = decode_engine()
    late = replace(PATIENT, prefill=0.5) if why == "late" else PATIENT
    with routed(gone() if why == "refused" else p, d, late, cool_down=600) as front:
        theirs = {"do_remote_prefill": True, "remote_host": "attacker"}
        assert front.ask({"prompt": "x", "kv_transfer_params": theirs}).json() == {"text": "from D"}
        assert front.ask({"prompt": "y"}).json() == {"text": "from D"}
        if why == "late":
            assert p.aborted.wait(60), "the late prefill was not cancelled"
    assert all("kv_transfer_params" not in body for body, _, _ in d.seen) and len(d.seen) == 2


def test_client_gone_during_prefill_releases_what_p_computed() -> None:
    """P answers only when the router has seen that the client is gone; D is then asked for one token, for the lease."""
    left = threading.Event()
    p, d = prefill_engine(go_on=left), decode_engine()
    with routed(p, d) as front:
        leave_after(front.url, {"prompt": "x", "max_tokens": 50, "stream": True}, p.arrived)
        eventually(lambda: len(front.router.tasks) == 2 or p.aborted.is_set(), "the router has seen that it is gone")
        left.set()
        assert d.arrived.wait(600), "D was not asked"
        front.idle()
    body, headers, _ = d.seen[0]
    assert body == {"kv_transfer_params": PARAMS, "max_tokens": 0, "prompt": [1]}
    assert headers["x-request-id"] == p.seen[0][1]["x-request-id"] and not p.aborted.is_set()


def test_client_gone_while_its_body_is_read(caplog: pytest.LogCaptureFixture) -> None:
    """No traceback for it, and no engine is asked."""
    caplog.set_level("INFO")
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as front:
        front.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{").close()
        told = ("not read: the client is gone", "fault of the router")
        eventually(lambda: any(part in line for part in told for line in caplog.messages), "the router has seen it")
    assert not [line for line in caplog.messages if "fault" in line] and not p.seen and not d.seen


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_before_the_first_token_cancels_decode(stream: bool) -> None:
    p, d = prefill_engine(), decode_engine(before=30)
    with routed(p, d) as front:
        leave_after(front.url, {"prompt": "x", "stream": stream}, d.arrived)
        assert d.aborted.wait(60)


def test_client_gone_in_mid_stream_cancels_decode() -> None:
    p, d = prefill_engine(), decode_engine(pieces=100, gap=0.1)
    with routed(p, d) as front:
        with front.streaming() as response:
            next(response.iter_lines())
        assert d.aborted.wait(60)


def test_health_and_models() -> None:
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as front:
        assert front.get("/v1/models").json() == {"data": [{"id": "m"}]}
        assert front.get("/health").json()["status"] == "ok"
    with routed(gone(), d, checks=Checks()) as front:
        health = front.get("/health")
        assert health.status_code == 200 and health.json()["status"] == "degraded"
        assert "no prefill engine takes requests" in health.json()["handed_over"]["prefill"]


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


def test_another_p_answers(at_once: Served, caplog: pytest.LogCaptureFixture) -> None:
    other = PUSH | {"remote_engine_id": "p-1"}
    at_once.p.answer = lambda body: answer_of_p(other)
    client = at_once.held_by_both()
    at_once.p.go_on.set()
    eventually(lambda: at_once.d.gone == 1, "D's leg was cancelled")
    at_once.d.go_on.set()
    assert client.result().json() == {"text": "from D"} and at_once.d.params[-1] == other
    at_once.ask({"prompt": "z"})
    assert known(other).items() <= (at_once.d.params[-1] or {}).items(), "the other P is known now"
    assert len([line for line in caplog.messages if "another engine answers at" in line]) == 1


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

    def breaks(params: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(next(iter(at_once.router.engines)).handed_over, "prefilled", breaks)
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
