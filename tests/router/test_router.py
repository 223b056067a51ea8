"""The router between real HTTP servers that stand in for engines: they record requests and answer by script."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from kvferry.router.health import Checks
from kvferry.router.request_bodies import PREFILL_TAG, prefill_body
from tests.router.stand_ins import PARAMS, PATIENT, decode_engine, gone, leave_after, prefill_engine, routed
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


def test_prefill_body_adds_no_chat_key_and_leaves_the_original() -> None:
    body = {"messages": [], "stream": True, "stream_options": {"include_usage": True}}
    leg = prefill_body(body)
    assert "max_completion_tokens" not in leg and "stream_options" not in leg and leg["stream"] is False
    assert body["stream"] is True


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
