"""With ``--prefix-reads`` P is told which other engine should have the beginning of a prompt, and clients do not see
the addresses in the answers of engines."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.router import legs as router_legs
from kvferry.router.engines import EngineState, Role, Seat
from kvferry.router.http_client import Answer
from kvferry.router.legs import MAX_BODY_BYTES
from kvferry.router.request_bodies import without_params
from tests.router.stand_ins import COMPLETIONS, PARAMS, PLAIN, Engine, prefill_engine, routed, served
from tests.support.served import eventually
from tests.support.turns import LineCount

TURN = 2000
"""Bytes of one turn of a user: some blocks of the router's affinity."""
LONG = "an answer that pays " * 140
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
NEXT_TURN = {"do_remote_decode": True, "remote_host": "10.0.0.9", "remote_port": 5600, "remote_key": '"}{'}


def engine(name: str, params: dict[str, Any], source: Any = None, text: str = LONG) -> Engine:
    """One that says where others can read from it, where it is asked."""
    answered: dict[str, Any] = {"remote_host": name, "remote_port": 5600} if source is None else source

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        asked = (body.get("kv_transfer_params") or {}).get("sources") == []
        told = {"source": answered} if asked else params if "kv_transfer_params" in body else None
        if body.get("stream"):
            return StreamingResponse(f'data: {{"text": "{word}"}}\n\n' for word in text.split())
        return JSONResponse({"kv_transfer_params": told, "choices": [], "text": text})

    return Engine(answer)


def legs(stand: Engine) -> list[dict[str, Any]]:
    """Its requests, without those of the router itself."""
    return [body for body, _, _ in stand.seen if body["prompt"] != [1]]


def asked_of_itself(stand: Engine) -> int:
    return sum(body["prompt"] == [1] for body, _, _ in stand.seen)


def history(turns: int) -> str:
    return "".join(chr(ord("a") + turn) * TURN for turn in range(turns))


def told(stand: Engine) -> list[Any]:
    """The sources in each of its requests."""
    return [(leg.get("kv_transfer_params") or {}).get("sources") for leg in legs(stand)]


@pytest.mark.parametrize(("text", "named"), [("a short answer", False), (LONG, True)])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_computed_sooner_than_read_is_no_reason(text: str, named: bool, stream: bool) -> None:
    """P has all but the answer; D's share is worth one block of the router's affinity, or nothing."""
    p, d = engine("p", PARAMS), engine("d", {}, text=text)
    with routed(p, d, prefix_reads=True) as front:
        for turns in (1, 3):
            front.ask({"prompt": history(turns), "model": "m", "stream": stream})
            front.idle()
    assert [bool(sources) for sources in told(p)] == [False, named]


def test_a_d_that_prefills_is_told_of_the_d_that_has_the_prefix() -> None:
    p, both = prefill_engine(status=503), [engine("d", NEXT_TURN), engine("d", NEXT_TURN)]
    with routed(p, both, prefix_reads=True) as front:
        for turns in (1, 3):
            assert front.ask({"prompt": history(turns), "model": "m"}).json()["kv_transfer_params"] is None
            front.idle()
    assert sorted(map(told, both), key=repr) == [[None], [[{"remote_host": "d", "remote_port": 5600}]]]


@pytest.mark.parametrize("serial", [True, False])
def test_p_is_told_of_the_d_that_answered_the_last_turn(serial: bool) -> None:
    p, d = engine("p", PARAMS), engine("d", {})
    with routed(p, d, prefix_reads=True, serial=serial) as front:
        front.ask({"prompt": history(1), "model": "m"})
        front.idle()
        eventually(lambda: asked_of_itself(p) == asked_of_itself(d) == 1, "both have said where they are")
        front.ask({"prompt": history(3), "model": "m"})
        front.ask({"prompt": "z" * TURN, "model": "m"})
        first, second, other = legs(p)
    assert "sources" not in first["kv_transfer_params"] and "sources" not in other["kv_transfer_params"]
    assert second["kv_transfer_params"]["sources"] == [{"remote_host": "d", "remote_port": 5600}], "it has the answer"
    assert all("sources" not in (leg.get("kv_transfer_params") or {}) for leg in legs(d))


@pytest.mark.parametrize("state", [EngineState.DOWN, EngineState.LEAVING])
def test_a_p_that_is_gone_is_no_source_and_one_that_leaves_is(state: EngineState) -> None:
    p, q, d = engine("p", PARAMS), engine("q", PARAMS), engine("d", {})
    with routed([p, q], d, prefix_reads=True) as front:
        for turns in (1, 2):
            front.ask({"prompt": history(turns), "model": "m"})
            front.idle()
        had, other = (p, q) if legs(p) else (q, p)
        front.ask({"prompt": "z" * TURN, "model": "m"})  # the other one is asked, too
        front.idle()
        assert legs(other)
        gone = next(each for each in front.router.engines if each.url == front.p[[p, q].index(had)])
        seat = Seat(gone, 1.0, front.router.engines)  # a request of its own
        gone.state = state
        front.ask({"prompt": history(3), "model": "m"})
        front.idle()
        told = legs(other)[-1]["kv_transfer_params"]
        seat.release()
    leaving = [gone.source] if state is EngineState.LEAVING else []
    assert told["sources"] == [{"remote_host": "d", "remote_port": 5600}, *leaving]


@pytest.mark.parametrize("source", [{}, 7, "x"])
def test_engines_that_read_no_prefixes(source: Any) -> None:
    p, d = engine("p", PARAMS, source), engine("d", {}, source)
    with routed(p, d, prefix_reads=True) as front:
        for turns in (1, 2):
            assert front.ask({"prompt": history(turns), "model": "m"}).status_code == 200
            front.idle()
        assert asked_of_itself(p) == asked_of_itself(d) == 1
        assert all("sources" not in leg["kv_transfer_params"] for leg in legs(p))


def test_an_engine_that_could_not_say_is_asked_again() -> None:
    refused: list[int] = []

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        if (body.get("kv_transfer_params") or {}).get("sources") == [] and not refused:
            refused.append(1)
            return JSONResponse({"error": {"message": "busy"}}, 429)
        return JSONResponse({"kv_transfer_params": {"source": {"remote_port": 1}}, "choices": []})

    p, d = Engine(answer), engine("d", {})
    with routed(p, d, prefix_reads=True) as front:
        for _ in range(2):
            front.ask({"prompt": history(1), "model": "m"})
            front.idle()
        assert asked_of_itself(p) == 2 and front.router.engines.of(Role.PREFILL)[0].source == {"remote_port": 1}
    assert legs(d)[0].get("kv_transfer_params") is None, "P has told where it can be read, and handed nothing over"


def test_nothing_changes_without_the_option() -> None:
    p, d = engine("p", PARAMS), engine("d", {})
    with routed(p, d) as front:
        for turns in (1, 2):
            front.ask({"prompt": history(turns), "model": "m"})
        assert not asked_of_itself(p) and not asked_of_itself(d)


# --- what clients see of D's parameters


TEXT = json.dumps('"kv_transfer_params": {"remote_host": "h"}, é').encode()


def answer_with(params: Any, text: bytes = TEXT) -> bytes:
    """D's answer, with numbers and spaces as no encoder writes them, and texts and tools of the client that look like
    one of its members."""
    echo, form = b'"id": 1.50,"tools": {"kv_transfer_params": {"of": "the client"}}', json.dumps(params).encode()
    return b'{%b,"text": %b, "kv_transfer_params": %b,"metrics" : null,%b}' % (echo, text, form, echo)


def completed(params: Any) -> bytes:
    """The last event of the stream of a response."""
    return b'event: response.completed\ndata: {"response":%b,"n":7}\n\n' % answer_with(params)


def saying(content: Any, status: int = 200) -> Engine:
    """A D that answers with these bytes, or with these pieces of a stream."""

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        if isinstance(content, bytes):
            return Response(content, status, media_type="application/json")
        return StreamingResponse(content(), media_type="text/event-stream")

    return Engine(answer)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_a_client_sees_no_parameters(path: str) -> None:
    d = saying(answer_with(NEXT_TURN))
    with routed(prefill_engine(), d, prefix_reads=True) as front:
        given = front.ask({"prompt": "x"}, path)
        assert given.content == answer_with(None) and given.headers["content-length"] == str(len(given.content))
        assert d.seen[0][0]["kv_transfer_params"] == PARAMS, "D was asked for them"
        assert front.ask({"prompt": "x", "kv_transfer_params": {"sources": []}}, path).content == answer_with(None)


def test_a_large_answer_and_a_check() -> None:
    text = b'"%b"' % (b"x" * MAX_BODY_BYTES)
    with routed(prefill_engine(), saying(answer_with(NEXT_TURN, text)), prefix_reads=True) as front:
        assert front.ask({"prompt": "x"}).content == answer_with(None, text)
    said = {"handed_over": {"result": "loaded"}}
    with routed(prefill_engine(), saying(answer_with(NEXT_TURN | said)), prefix_reads=True) as front:
        checked = front.ask({"prompt": "x"}, **{"x-kvferry-check": "1"})
    assert json.loads(checked.content)["kv_transfer_params"] == said


@pytest.mark.parametrize("content", [b'{"error": {"message": "no"}}', b'x "kv_transfer_params": {', b""])
def test_errors_and_what_is_no_json_stay(content: bytes) -> None:
    for status in (200, 400, 500):
        with routed(prefill_engine(), saying(content, status), prefix_reads=True) as front:
            given = front.ask({"prompt": "x"})
            assert given.status_code == status and given.content == content


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_stream_is_not_held_back_and_the_last_event_of_a_response_has_no_parameters(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event comes in three pieces, each of which the router has read before the next one is sent."""
    go_on, last, read, received_pieces = threading.Event(), completed(NEXT_TURN), list[bytes](), Answer.pieces
    at = last.index(b"do_remote"), last.index(b"5600")

    async def noted(answer: Answer) -> AsyncIterator[bytes]:
        async for piece in received_pieces(answer):
            read.append(piece)
            yield piece

    async def pieces() -> AsyncIterator[bytes]:
        yield b"event: a\ndata: 1\n\n"
        for piece in last[: at[0]], last[at[0] : at[1]], last[at[1] :]:
            while not go_on.is_set():
                await asyncio.sleep(0.005)
            yield piece
            while piece not in read:
                await asyncio.sleep(0.005)

    monkeypatch.setattr(Answer, "pieces", noted)

    with routed(prefill_engine(), saying(pieces), prefix_reads=True) as front:
        asked = {"prompt": "x", "stream": True}
        with httpx.stream("POST", front.url + path, json=asked, timeout=800, **PLAIN) as given:
            received = given.iter_raw()
            assert next(received) == b"event: a\ndata: 1\n\n"
            go_on.set()
            rest = b"".join(received)
    assert rest == (completed(None) if path == RESPONSES else last)


def test_a_response_that_d_has_stored() -> None:
    stored = Response(answer_with(NEXT_TURN), media_type="application/json")
    stands = Starlette(routes=[Route(RESPONSES + "/resp_1", lambda _: stored)])
    with served(stands) as d, routed([], d, prefix_reads=True) as front:
        assert front.get(RESPONSES + "/resp_1").content == answer_with(None)
        assert front.request("HEAD", RESPONSES + "/resp_1").headers["content-length"] == str(len(stored.body))


@pytest.mark.parametrize("alone", [True, False])
def test_an_answer_that_was_not_asked_for_parameters_is_not_looked_at(
    alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D alone, before anything is known; and a router without the option."""
    monkeypatch.setattr(router_legs, "without_params", None)
    with routed([] if alone else prefill_engine(), saying(answer_with(NEXT_TURN)), prefix_reads=alone) as front:
        assert front.ask({"prompt": "x"}).content == answer_with(NEXT_TURN)


def test_an_answer_is_read_once_however_often_it_has_the_name_and_a_large_one_off_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted, threads = set[int](), set[str]()
    for times in (1, 2000):
        begun = completed(None).replace(b'"text"', b'"text": [%b], "more"' % b",".join([answer_with({})] * times))
        with LineCount() as lines:
            assert without_params(begun) == begun
        counted.add(lines.count)
    assert len(counted) == 1
    monkeypatch.setattr(
        router_legs,
        "without_params",
        lambda *a, **k: (threads.add(threading.current_thread().name), without_params(*a, **k))[1],
    )
    with routed(
        prefill_engine(), saying(answer_with(NEXT_TURN, b'"%b"' % (b"x" * 100_000))), prefix_reads=True
    ) as front:
        assert b"remote_host" not in front.ask({"prompt": "x"}).content
    assert all(name.startswith("asyncio_") for name in threads) and threads
