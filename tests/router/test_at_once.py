"""The router that asks both engines at once: what each is told, and what becomes of the other leg when one fails."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvferry.router.app import make_app
from kvferry.router.engines import EngineEvent, EngineState, Role
from kvferry.router.identities import DISTRUST_SECONDS, IDENTITY, Identities
from kvferry.router.request_bodies import PREFILL_TAG
from tests.router.stand_ins import Engine, ask, closed_port, leave_after, make_router, served
from tests.support.served import eventually

PLACE = {"remote_engine_id": "p-0", "remote_host": "10.0.0.1", "remote_port": 5600, "remote_key": "0a1b2c3d4e5f"}
PUSH = {"do_remote_prefill": True, "transfer_mode": "push", **PLACE, "remote_num_tokens": 3, "kvferry": {"token": "00"}}


def known(of: dict[str, Any]) -> dict[str, Any]:
    """What D is told of the P that answered with these parameters, but for the names of the request."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "transfer_mode": "push"} | {
        name: of[name] for name in (*IDENTITY, "remote_key") if name in of
    }


class Scripted:
    """An engine whose requests wait for ``go_on``, once ``held``, and then get ``answer(body)``. ``gone``: clients that
    left while they waited."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.held = answer, False
        self.go_on = threading.Event()
        self.gone = 0
        self.engine = Engine(self._serve)

    async def _serve(self, request: Request, body: dict[str, Any]) -> Response:
        if self.held:
            gone = asyncio.ensure_future(self.engine.until_gone(request))
            while not self.go_on.is_set():
                if gone.done():
                    self.gone += 1
                    return Response()
                await asyncio.sleep(0.005)
            gone.cancel()
        answer: Response = self.answer(body)
        return answer

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for body, _, _ in self.engine.seen]

    @property
    def params(self) -> list[dict[str, Any] | None]:
        return [body.get("kv_transfer_params") for body in self.bodies]


def token_of_p(params: Any = PUSH, text: str = "a", token: int = 11, finish: str = "length") -> JSONResponse:
    choice = {"index": 0, "text": text, "finish_reason": finish, "prompt_token_ids": [1, 2, 3], "token_ids": [token]}
    return JSONResponse({"id": "cmpl-p", "created": 1, "model": "m", "choices": [choice], "kv_transfer_params": params})


def stream_of_d(*chunks: tuple[str, list[int]], finish: str = "length") -> Response:
    """Of a completion whose chunks have these texts and token ids."""

    def lines() -> Iterator[bytes]:
        for number, (text, ids) in enumerate(chunks):
            choice = {"index": 0, "text": text, "token_ids": ids, "finish_reason": None, "prompt_token_ids": None}
            choice |= {} if number else {"prompt_token_ids": [1, 2, 3]}
            choice |= {"finish_reason": finish} if number == len(chunks) - 1 else {}
            event = {"id": "cmpl-d", "created": 2, "object": "text_completion", "model": "m", "choices": [choice]}
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


class Served:
    """P, D and the router. ``router``: so that tests see that nothing is left."""

    def __init__(self, **options: Any) -> None:
        self.p = Scripted(lambda body: token_of_p())
        self.d = Scripted(lambda body: JSONResponse({"text": "from D"}))
        self.options = options
        self.url, self.d_url, self.router = "", "", make_router([], [])

    @contextmanager
    def running(self) -> Iterator[Served]:
        with served(self.p.engine.app) as p_url, served(self.d.engine.app) as self.d_url:
            self.router = make_router([p_url], [self.d_url], cool_down=0.0, **self.options)
            with served(make_app(self.router)) as self.url:
                yield self

    def learn(self) -> None:
        """The first request to P, by which the router knows it."""
        assert ask(self.url, {"prompt": "x"}).json() == {"text": "from D"}
        assert self.p.params[-1] == PREFILL_TAG and self.d.params[-1] == PUSH
        self.p.engine.arrived.clear()
        self.d.engine.arrived.clear()

    def decode_engines(self, *urls: str) -> None:
        """From now on, in this order."""
        engines = self.router.engines
        for engine in engines.of(Role.DECODE):
            engines.apply(engine, EngineEvent.REMOVE)
        for url in urls:
            engines.add(url, Role.DECODE, EngineState.UP)

    def nothing_left(self) -> None:
        eventually(lambda: not self.router.tasks, "nothing is left")


@pytest.fixture
def at_once(request: pytest.FixtureRequest) -> Iterator[Served]:
    with Served(**getattr(request, "param", {})).running() as served_pair:
        yield served_pair


class Client(threading.Thread):
    """A request whose answer is waited for by ``result``."""

    def __init__(self, url: str, body: dict[str, Any], **headers: str) -> None:
        super().__init__(daemon=True)
        self._ask = lambda: ask(url, body, **headers)
        self.start()

    def run(self) -> None:
        self.answer = self._ask()

    def result(self) -> Any:
        self.join(60)
        return self.answer


def test_both_are_asked_at_once_from_the_second_request_on(at_once: Served) -> None:
    at_once.learn()
    at_once.p.held = True  # P answers only when D has been asked
    client = Client(at_once.url, {"prompt": "y", "max_tokens": 5}, **{"x-request-id": "mine"})
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
    ask(at_once.url, {"prompt": "z"})
    eventually(lambda: len(at_once.p.bodies) == 3, "P is asked, too; D may answer before")
    assert (at_once.p.params[-1] or {})["transfer_id"] != name


@pytest.mark.parametrize(
    "params",
    [
        {name: value for name, value in PUSH.items() if name != "transfer_mode"},
        PUSH | {"transfer_mode": "pull"},
        PUSH | {"remote_host": None},
        PUSH | {"remote_port": "5600"},
        PUSH | {"remote_engine_id": ""},
    ],
)
def test_a_p_that_does_not_offer_it_is_asked_first(at_once: Served, params: dict[str, Any]) -> None:
    at_once.p.answer = lambda body: token_of_p(params)
    for _ in range(2):
        ask(at_once.url, {"prompt": "x"})
    assert at_once.p.params == [PREFILL_TAG] * 2 and at_once.d.params == [params] * 2


@pytest.mark.parametrize("at_once", [{"serial": True}], indirect=True)
def test_serial_is_always_one_after_the_other(at_once: Served) -> None:
    for _ in range(3):
        ask(at_once.url, {"prompt": "x"})
    assert at_once.p.params == [PREFILL_TAG] * 3 and at_once.d.params == [PUSH] * 3


@pytest.mark.parametrize("failure", [lambda body: Response(status_code=503), lambda body: token_of_p(None)])
def test_p_fails_while_d_waits(at_once: Served, failure: Any) -> None:
    """D is asked again without parameters, and P, which may be another one by now, serially."""
    at_once.learn()
    at_once.d.held, at_once.p.held = True, True
    at_once.p.answer = failure
    client = Client(at_once.url, {"prompt": "y"})
    assert at_once.d.engine.arrived.wait(60)
    at_once.p.go_on.set()
    eventually(lambda: at_once.d.gone == 1, "D's leg was cancelled")
    eventually(lambda: len(at_once.d.bodies) == 3, "D is asked again")
    at_once.d.go_on.set()
    assert client.result().json() == {"text": "from D"}
    assert at_once.d.bodies[-1] == {"prompt": "y"}
    at_once.p.answer = lambda body: token_of_p()
    ask(at_once.url, {"prompt": "z"})
    assert at_once.p.params[-1] == PREFILL_TAG and at_once.d.params[-1] == PUSH


def test_another_p_answers(at_once: Served) -> None:
    at_once.learn()
    other = PUSH | {"remote_engine_id": "p-1"}
    at_once.d.held, at_once.p.held = True, True
    at_once.p.answer = lambda body: token_of_p(other)
    client = Client(at_once.url, {"prompt": "y"})
    assert at_once.d.engine.arrived.wait(60)
    at_once.p.go_on.set()
    eventually(lambda: at_once.d.gone == 1, "D's leg was cancelled")
    at_once.d.go_on.set()
    assert client.result().json() == {"text": "from D"} and at_once.d.params[-1] == other
    ask(at_once.url, {"prompt": "z"})
    assert known(other).items() <= (at_once.d.params[-1] or {}).items(), "the other P is known now"


def test_a_place_where_several_answer_is_asked_serially() -> None:
    now = 0.0
    identities = Identities(lambda: now)
    other = PUSH | {"remote_engine_id": "p-1"}
    for params in (PUSH, other, other):
        identities.learn("http://p", params)
    assert (identities.get("http://p") or {})["remote_engine_id"] == "p-1", "a P that started again is known"
    identities.learn("http://p", PUSH)
    assert identities.get("http://p") is None
    identities.learn("http://p", PUSH)
    assert identities.get("http://p") is None
    now += DISTRUST_SECONDS
    assert identities.get("http://p") is not None


def test_d_may_answer_before_p(at_once: Served) -> None:
    """And what becomes of P then changes nothing."""
    at_once.learn()
    at_once.p.held = True
    at_once.p.answer = lambda body: Response(status_code=503)
    assert ask(at_once.url, {"prompt": "y"}).json() == {"text": "from D"}
    at_once.p.go_on.set()
    at_once.nothing_left()
    assert len(at_once.d.bodies) == 2


def test_an_error_of_d_ends_ps_leg(at_once: Served) -> None:
    at_once.learn()
    at_once.p.held = True
    at_once.d.answer = lambda body: JSONResponse({"error": {"message": "too long"}}, 400)
    answer = ask(at_once.url, {"prompt": "y"})
    assert answer.status_code == 400 and answer.json() == {"error": {"message": "too long"}}
    eventually(lambda: at_once.p.gone == 1, "P's leg was cancelled")


def test_a_d_that_is_gone_ends_ps_leg(at_once: Served) -> None:
    at_once.learn()
    at_once.p.held = True
    at_once.decode_engines(f"http://127.0.0.1:{closed_port()}")
    answer = ask(at_once.url, {"prompt": "y"})
    assert answer.status_code == 502 and "decode engine" in answer.json()["error"]["message"]
    eventually(lambda: at_once.p.gone == 1, "P's leg was cancelled")


def test_an_answer_of_p_that_is_not_utf_8_hands_nothing_over(at_once: Served) -> None:
    at_once.learn()
    at_once.d.held = True
    at_once.p.answer = lambda body: Response(b'{"a": "\xff"}', media_type="application/json")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, at_once.url, {"prompt": "y"})
        eventually(lambda: at_once.d.gone == 1 or answer.done(), "D's first leg has ended")
        at_once.d.go_on.set()
        assert answer.result().json() == {"text": "from D"}
    at_once.nothing_left()


def test_an_error_that_nobody_expects_ends_ds_leg(at_once: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seat would count as a request of D for good."""
    at_once.learn()
    at_once.d.held = True

    def breaks(url: str, params: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(at_once.router.identities, "learn", breaks)
    assert ask(at_once.url, {"prompt": "y"}).status_code == 500
    eventually(lambda: at_once.d.gone == 1, "D's leg was cancelled")
    at_once.nothing_left()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("p_has_answered", [False, True])
def test_a_client_that_leaves_ends_both_legs(at_once: Served, stream: bool, p_has_answered: bool) -> None:
    at_once.learn()
    at_once.d.held, at_once.p.held = True, not p_has_answered
    leave_after(at_once.url, {"prompt": "y", "stream": stream, "seed": 1}, at_once.d.engine.arrived)
    eventually(lambda: at_once.d.gone == 1, "D's leg was cancelled")
    if not p_has_answered:
        eventually(lambda: at_once.p.gone == 1, "P's leg was cancelled")
    at_once.nothing_left()
    assert len(at_once.d.bodies) == 2 and (at_once.d.params[-1] or {})["transfer_id"]


def streamed(url: str, **more: Any) -> tuple[str, list[dict[str, Any]], bool]:
    """The text of a streamed completion, its events, and whether it ended as it should."""
    lines = ask(url, {"prompt": "y", "stream": True, "temperature": 0, "max_tokens": 9} | more).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    return text, events, "data: [DONE]" in lines


def after_p(at_once: Served) -> None:
    """D answers only when P has, so that P's token is the first."""
    at_once.learn()
    at_once.d.held = True

    def answer(body: dict[str, Any]) -> Response:
        threading.Timer(0.2, at_once.d.go_on.set).start()
        return token_of_p()

    at_once.p.answer = answer


@pytest.mark.parametrize(
    "chunks",
    [
        [("a", [11]), ("b", [12]), ("c", [13])],
        [("", []), ("a", [11]), ("bc", [12, 13])],
        [("ab", [11, 12]), ("c", [13])],
        [("abc", [11, 12, 13])],
    ],
)
def test_ps_token_stands_for_ds_first(at_once: Served, chunks: list[tuple[str, list[int]]]) -> None:
    after_p(at_once)
    at_once.d.answer = lambda body: stream_of_d(*chunks)
    text, events, ended = streamed(at_once.url)
    assert text == "abc" and ended and len(at_once.d.bodies) == 2
    assert {(event["id"], event["created"]) for event in events} == {("cmpl-p", 1)}
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert all(choice["token_ids"] is None and choice["prompt_token_ids"] is None for choice in choices)
    at_once.nothing_left()


@pytest.mark.parametrize("first", [("x", [99]), ("ab", [99, 12]), ("x", [11])])
def test_another_first_token_of_d_has_it_asked_for_the_rest(at_once: Served, first: tuple[str, list[int]]) -> None:
    after_p(at_once)
    at_once.d.answer = lambda body: (
        stream_of_d(("b", [12]), ("c", [13])) if body["prompt"] == [1, 2, 3, 11] else stream_of_d(first)
    )
    text, events, ended = streamed(at_once.url)
    assert text == "abc" and ended and {event["id"] for event in events} == {"cmpl-p"}
    rest = at_once.d.bodies[-1]
    assert (rest["prompt"], rest["max_tokens"]) == ([1, 2, 3, 11], 8) and "kv_transfer_params" not in rest
    at_once.nothing_left()


def test_the_d_that_has_the_kv_is_asked_for_the_rest(at_once: Served) -> None:
    after_p(at_once)
    at_once.d.answer = lambda body: (
        stream_of_d(("b", [12])) if body["prompt"] == [1, 2, 3, 11] else stream_of_d(("x", [99]))
    )
    at_once.decode_engines(at_once.d_url, f"http://127.0.0.1:{closed_port()}")
    text, _, ended = streamed(at_once.url)
    assert text == "ab" and ended


def test_an_end_as_ps_token_ends_ds_leg_when_d_has_loaded(at_once: Served) -> None:
    at_once.learn()
    at_once.d.held = True
    at_once.p.answer = lambda body: token_of_p(text="", finish="stop")
    text, events, ended = streamed(at_once.url, stream_options={"include_usage": True})
    assert text == "" and ended and events[0]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    assert at_once.d.gone == 0, "P's lease is D's to release"
    at_once.d.go_on.set()
    at_once.nothing_left()
    assert len(at_once.d.bodies) == 2


def test_a_d_that_is_first_needs_no_token_of_p(at_once: Served) -> None:
    at_once.learn()
    at_once.p.held = True
    at_once.d.answer = lambda body: stream_of_d(("a", [11]), ("b", [12]))
    text, events, ended = streamed(at_once.url)
    at_once.p.go_on.set()
    assert text == "ab" and ended and all(event["choices"][0]["token_ids"] is None for event in events)


@pytest.mark.parametrize("way", ["whole", "rest"])
def test_a_d_that_fails_after_ps_token_ends_the_stream_with_an_error(at_once: Served, way: str) -> None:
    after_p(at_once)
    if way == "rest":
        at_once.d.answer = lambda body: (
            Response(status_code=503) if body["prompt"] == [1, 2, 3, 11] else stream_of_d(("x", [99]))
        )
    else:
        at_once.d.answer = lambda body: Response("no", 503)
    _, events, ended = streamed(at_once.url)
    assert events[0]["choices"][0]["text"] == "a" and events[-1]["error"]["code"] == 502 and not ended
    at_once.nothing_left()


@pytest.mark.parametrize("at_once", [{"serial": True}], indirect=True)
@pytest.mark.parametrize(
    ("answer", "whole"),
    [
        (token_of_p(), False),
        (token_of_p(text=""), True),
        (token_of_p(text="\ufffd"), True),
        (token_of_p(PUSH | {"remote_num_tokens": 2}), True),
        (token_of_p(PUSH | {"remote_num_tokens": None}), True),
        (token_of_p({name: value for name, value in PUSH.items() if name != "kvferry"}), True),
        (token_of_p(finish="abort"), True),
        (JSONResponse({"kv_transfer_params": PUSH, "choices": "x"}), True),
    ],
)
def test_when_ps_token_is_left_to_d(at_once: Served, answer: Response, whole: bool) -> None:
    """Where P computed less than the prompt its token is not that of the answer."""
    at_once.p.answer = lambda body: answer
    at_once.d.answer = lambda body: stream_of_d(("b", [12]))
    text, _, ended = streamed(at_once.url)
    assert ended and text == ("b" if whole else "ab")
    assert at_once.d.bodies[-1]["prompt"] == ("y" if whole else [1, 2, 3, 11])
    assert (at_once.d.params[-1] or {})["transfer_mode"] == "push"


@pytest.mark.parametrize("at_once", [{"relay": False}], indirect=True)
def test_without_relay_d_makes_all_tokens(at_once: Served) -> None:
    after_p(at_once)
    at_once.d.answer = lambda body: stream_of_d(("x", [99]), ("c", [13]))
    text, events, ended = streamed(at_once.url)
    assert text == "xc" and ended and events[0]["id"] == "cmpl-d"
    assert "return_token_ids" not in at_once.p.bodies[-1] | at_once.d.bodies[-1]


@pytest.mark.parametrize("at_once", [{"serial": True}], indirect=True)
def test_another_d_is_asked_for_the_rest_where_the_first_is_gone(at_once: Served) -> None:
    """With P's lease."""
    at_once.decode_engines(f"http://127.0.0.1:{closed_port()}", at_once.d_url)
    at_once.d.answer = lambda body: stream_of_d(("b", [12]))
    text, _, ended = streamed(at_once.url)
    assert text == "ab" and ended
    assert at_once.d.params == [PUSH] and at_once.d.bodies[0]["prompt"] == [1, 2, 3, 11]
    at_once.nothing_left()
