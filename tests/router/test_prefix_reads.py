"""With ``--prefix-reads`` P is told which other engine should have the beginning of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvferry.router.engines import EngineState, Role, Seat
from tests.router.stand_ins import PARAMS, Engine, prefill_engine, routed
from tests.support.served import eventually

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
            assert front.ask({"prompt": history(turns), "model": "m"}).status_code == 200
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
