"""The router between real HTTP servers that stand in for engines: they record requests and answer by script."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvferry.router.app import App
from kvferry.router.health import Checks
from kvferry.router.legs import ClientRequest, LegTimeouts
from kvferry.router.request_bodies import PREFILL_TAG, members, prefill_body
from tests.router.stand_ins import (
    PARAMS,
    Engine,
    ask,
    closed_port,
    decode_engine,
    leave_after,
    make_router,
    prefill_engine,
    routed,
    served,
    streaming,
)
from tests.support.served import eventually


def test_the_two_legs() -> None:
    p, d = prefill_engine(), decode_engine()
    body = {
        "prompt": "x",
        "max_tokens": 9,
        "max_completion_tokens": 9,
        "n": 3,
        "min_tokens": 4,
        "temperature": 0.5,
        "kv_transfer_params": {"remote_host": "attacker"},
    }
    with routed(p, d) as url:
        response = ask(url, body, authorization="Bearer k")
    assert response.json() == {"text": "from D"} and response.headers["x-from"] == "d"
    (to_p, p_headers, _), (to_d, d_headers, _) = p.seen[0], d.seen[0]
    assert to_p == {
        "prompt": "x",
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "temperature": 0.5,
        "stream": False,
        "kv_transfer_params": PREFILL_TAG,
    }
    assert to_d == body | {"kv_transfer_params": PARAMS}  # verbatim, and the client's own are gone
    assert p_headers["x-request-id"] == d_headers["x-request-id"] == response.headers["x-request-id"]
    assert p_headers["authorization"] == d_headers["authorization"] == "Bearer k"


def test_prefill_body_adds_no_chat_key_and_leaves_the_original() -> None:
    body = {"messages": [], "stream": True, "stream_options": {"include_usage": True}}
    leg = prefill_body(body)
    assert "max_completion_tokens" not in leg and "stream_options" not in leg and leg["stream"] is False
    assert body["stream"] is True


def test_request_id_of_the_client_is_kept() -> None:
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as url:
        assert ask(url, {"messages": []}, "/v1/chat/completions", **{"x-request-id": "mine"}).status_code == 200
    assert p.seen[0][1]["x-request-id"] == d.seen[0][1]["x-request-id"] == "mine"
    assert p.seen[0][2] == d.seen[0][2] == "/v1/chat/completions"


def test_streams_piece_by_piece() -> None:
    go_on = threading.Event()
    p, d = prefill_engine(), decode_engine(pieces=3, go_on=go_on)
    came = []
    with routed(p, d) as url, streaming(url) as response:
        for line in response.iter_lines():
            came.append(line)
            go_on.set()  # D makes the next piece only once the client has the first
    assert [line for line in came if line] == ['data: {"i": 0}', 'data: {"i": 1}', 'data: {"i": 2}', "data: [DONE]"]
    assert p.seen[0][0]["stream"] is False


@pytest.mark.parametrize("why", ["error", "late", "refused", "no params", "garbage params"])
def test_decode_only_where_prefill_fails(why: str) -> None:
    p = {
        "error": prefill_engine(status=503),
        "late": prefill_engine(delay=30),
        "no params": prefill_engine(params=None),
        "garbage params": prefill_engine(params="x"),
        "refused": prefill_engine(),
    }[why]
    d = decode_engine()
    with served(p.app) as p_url, served(d.app) as d_url:
        first = f"http://127.0.0.1:{closed_port()}" if why == "refused" else p_url
        router = make_router([first], [d_url], LegTimeouts(prefill=0.5), cool_down=600)
        with served(App(router)) as url:
            began = time.monotonic()
            theirs = {"do_remote_prefill": True, "remote_host": "attacker"}
            assert ask(url, {"prompt": "x", "kv_transfer_params": theirs}).json() == {"text": "from D"}
            assert time.monotonic() - began < 25, "the late answer was not waited for"
            assert ask(url, {"prompt": "y"}).json() == {"text": "from D"}
        if why == "late":
            assert p.aborted.wait(60), "the late prefill was not cancelled"
    assert all("kv_transfer_params" not in body for body, _, _ in d.seen) and len(d.seen) == 2


def test_several_prompts_in_one_request_are_decoded_only() -> None:
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as url:
        ask(url, {"prompt": ["a", "b"]})
        assert not p.seen
        ask(url, {"prompt": [1, 2, 3]})
        assert len(p.seen) == 1


def test_client_gone_during_prefill_releases_what_p_computed() -> None:
    """P answers only when the router has seen that the client is gone; D is then asked for one token, for the lease."""
    gone = threading.Event()
    p, d = prefill_engine(go_on=gone), decode_engine()
    with served(p.app) as p_url, served(d.app) as d_url:
        router = make_router([p_url], [d_url])
        with served(App(router)) as url:
            leave_after(url, {"prompt": "x", "max_tokens": 50, "stream": True}, p.arrived)
            eventually(lambda: len(router.tasks) == 2 or p.aborted.is_set(), "the router has seen that it is gone")
            gone.set()
            assert d.arrived.wait(20), "D was not asked"
            eventually(lambda: not router.tasks, "nothing is left")
    body, headers, _ = d.seen[0]
    assert body["kv_transfer_params"] == PARAMS and (body["max_tokens"], body["stream"]) == (0, False)
    assert headers["x-request-id"] == p.seen[0][1]["x-request-id"] and not p.aborted.is_set()


def test_client_gone_during_a_long_prefill_cancels_it() -> None:
    p, d = prefill_engine(go_on=threading.Event()), decode_engine()
    with served(p.app) as p_url, served(d.app) as d_url:
        router = make_router([p_url], [d_url], LegTimeouts(abandoned_prefill=0.1))
        with served(App(router)) as url:
            leave_after(url, {"prompt": "x"}, p.arrived)
            assert p.aborted.wait(60)
            eventually(lambda: not router.tasks, "nothing is left")
    assert not d.seen


def test_client_gone_while_its_body_is_read(caplog: pytest.LogCaptureFixture) -> None:
    """No traceback for it, and no engine is asked."""
    caplog.set_level("INFO")
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as url:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        told = ("not read: the client is gone", "fault of the router")
        eventually(lambda: any(part in line for part in told for line in caplog.messages), "the router has seen it")
    assert not [line for line in caplog.messages if "fault" in line] and not p.seen and not d.seen


@pytest.mark.parametrize("stream", [False, True])
def test_client_gone_before_the_first_token_cancels_decode(stream: bool) -> None:
    p, d = prefill_engine(), decode_engine(before=30)
    with routed(p, d) as url:
        leave_after(url, {"prompt": "x", "stream": stream}, d.arrived)
        assert d.aborted.wait(60)


def test_client_gone_in_mid_stream_cancels_decode() -> None:
    p, d = prefill_engine(), decode_engine(pieces=100, gap=0.1)
    with routed(p, d) as url:
        with streaming(url) as response:
            next(response.iter_lines())
        assert d.aborted.wait(60)
        assert ask(url, {"prompt": "y"}).json() == {"text": "from D"}


def test_client_gone_before_decode_was_asked_still_releases() -> None:
    """P has answered and D was not asked: D is sent the parameters, for P's blocks."""
    p, d = prefill_engine(), decode_engine()
    with served(d.app) as d_url:
        router = make_router(["http://unused"], [d_url])

        async def go() -> None:
            body = b'{"prompt": "x", "max_tokens": 50, "stream": true}'
            await router.let_go(ClientRequest("/v1/completions", members(body) or {}, {"x-request-id": "r"}), PARAMS)
            await router.http.close()

        asyncio.run(go())
    assert d.seen[0][0]["kv_transfer_params"] == PARAMS and d.seen[0][0]["max_tokens"] == 0 and not p.seen


def test_decode_unreachable_is_one_clear_error() -> None:
    p = prefill_engine()
    with served(p.app) as p_url, served(App(make_router([p_url], [f"http://127.0.0.1:{closed_port()}"]))) as url:
        response = ask(url, {"prompt": "x"})
        assert response.status_code == 502 and "decode engine" in response.json()["error"]["message"]
        assert httpx.get(url + "/health", trust_env=False).status_code == 503


def test_decode_breaking_off_ends_the_stream_with_an_error() -> None:
    p, d = prefill_engine(), decode_engine(break_after=1)
    with routed(p, d) as url:
        lines = ask(url, {"prompt": "x", "stream": True}).text.split("\n\n")
    assert lines[0] == 'data: {"i": 0}'
    assert json.loads(lines[1].removeprefix("data: "))["error"]["code"] == 502
    assert "[DONE]" not in "".join(lines)


def test_errors_of_decode_reach_the_client() -> None:
    async def refuse(request: Request, body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": "too long"}}, 400)

    with routed(prefill_engine(status=400), Engine(refuse)) as url:
        assert ask(url, {"prompt": "x"}).json() == {"error": {"message": "too long"}}


def test_health_and_models() -> None:
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as url:
        assert httpx.get(url + "/v1/models", trust_env=False).json() == {"data": ["m"]}
        assert httpx.get(url + "/health", trust_env=False).json()["status"] == "ok"
    with (
        served(d.app) as d_url,
        served(App(make_router([f"http://127.0.0.1:{closed_port()}"], [d_url]), checks=Checks())) as url,
    ):
        health = httpx.get(url + "/health", trust_env=False)
        assert health.status_code == 200 and health.json()["status"] == "degraded"


def test_engines_take_turns() -> None:
    a, b, d = prefill_engine(), prefill_engine(), decode_engine()
    with (
        served(a.app) as a_url,
        served(b.app) as b_url,
        served(d.app) as d_url,
        served(App(make_router([a_url, b_url], [d_url]))) as url,
    ):
        for _ in range(4):
            ask(url, {"prompt": "x"})
    assert len(a.seen) == len(b.seen) == 2
