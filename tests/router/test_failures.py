"""Engines that fail, several of each role; limits; and what clients are told."""

from __future__ import annotations

import itertools
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvferry.router import http_client
from kvferry.router.app import Limits
from kvferry.router.engines import REFUSALS, Role
from kvferry.router.health import Checks
from kvferry.router.legs import LegTimeouts
from tests.router.stand_ins import (
    PARAMS,
    PUSH,
    Engine,
    RawEngine,
    Served,
    decode_engine,
    gone,
    leave_after,
    prefill_engine,
    routed,
)
from tests.support.served import eventually


def failing(status: int = 503) -> Engine:
    async def answer(request: Request, body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": "planted"}}, status)

    return Engine(answer)


@pytest.mark.parametrize("bad", [0, 503], ids=["gone", "error"])
def test_another_p_is_asked_once(bad: int) -> None:
    p, d = prefill_engine(), decode_engine()
    with routed([failing(bad) if bad else gone(), p], [d], cool_down=600) as front:
        for _ in range(2):
            assert front.ask({"prompt": "x"}).json() == {"text": "from D"}
    assert [body["kv_transfer_params"] for body, _, _ in d.seen] == [PARAMS] * 2 and len(p.seen) == 2


@pytest.mark.parametrize(("statuses", "asked"), [((503, 503, 200), [1, 1, 0]), ((400, 200), [1, 0])])
def test_two_p_that_fail_or_one_that_refuses_leave_the_prompt_to_d(statuses: tuple[int], asked: list[int]) -> None:
    p, d = [prefill_engine(status=status) for status in statuses], decode_engine()
    with routed(p, [d], cool_down=600) as front:
        assert front.ask({"prompt": "x"}).json() == {"text": "from D"}
    assert [len(each.seen) for each in p] == asked and "kv_transfer_params" not in d.seen[0][0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_d_that_is_gone_is_replaced_with_the_same_parameters(stream: bool) -> None:
    p, d = prefill_engine(), decode_engine()
    with routed([p], [gone(), d], cool_down=600) as front:
        for _ in range(2):
            assert front.ask({"prompt": "x", "stream": stream, "seed": 1}).status_code == 200
        engines = front.router.engines  # a client has the whole stream before the router has counted its end
        eventually(lambda: not any(engine.requests or engine.load for engine in engines), "no request is counted")
    assert [body["kv_transfer_params"] for body, _, _ in d.seen] == [PARAMS] * 2


def test_a_d_that_breaks_before_a_byte_is_replaced_and_one_that_breaks_after_is_not() -> None:
    p, d = prefill_engine(), decode_engine()
    for first, status, asked in ((b"", 200, 1), (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", 502, 0)):
        d.seen.clear()
        with routed(p, [RawEngine("D", first), d], cool_down=600) as front:
            assert front.ask({"prompt": "x"}).status_code == status
        assert [body["kv_transfer_params"] for body, _, _ in d.seen] == [PARAMS] * asked


def test_a_d_that_answers_with_an_error_is_replaced_once_without_parameters() -> None:
    """It has released the lease."""
    bad, d = [failing(500), failing(500)], decode_engine()
    with routed([prefill_engine()], [*bad, d], cool_down=600) as front:
        answer = front.ask({"prompt": "x"})
        assert answer.status_code == 500 and answer.json() == {"error": {"message": "planted"}}
        assert ["kv_transfer_params" in engine.seen[0][0] for engine in bad] == [True, False] and not d.seen
        assert front.ask({"prompt": "y"}).json() == {"text": "from D"}


def test_without_an_engine_the_error_says_so() -> None:
    with routed([], []) as front:
        answer = front.ask({"prompt": "x"})
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert front.get("/v1/models").status_code == 503


@pytest.mark.parametrize("end", ["closed", "reset"])
@pytest.mark.parametrize("role", ["P", "D"])
@pytest.mark.parametrize("first", [b"", b"H", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"])
def test_a_request_that_has_reached_an_engine_is_not_sent_to_it_again(
    role: str, first: bytes, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first``: what comes of the answer on a kept connection."""
    monkeypatch.setattr(http_client, "IDLE_SECONDS", 600.0)
    engine = RawEngine(role, lambda connection, number: first if number else None, end)
    p, d = (engine, decode_engine()) if role == "P" else (prefill_engine(), engine)
    with routed(p, d, cool_down=600) as front:
        front.ask({"prompt": "x"})
        assert front.ask({"prompt": "x"}).status_code == (200 if role == "P" else 502)
        assert not all(engine.usable(front.router.clock()) for engine in front.router.engines)
    assert engine.seen == [(0, 0), (0, 1)]


# --- engines that end, or stand still


CHUNK = 'data: {"choices":[{"index":0,"text":"","delta":{},"finish_reason":"abort"}]}\n\n'
ROLE = 'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
USAGE = 'data: {"choices":[],"usage":{"completion_tokens":0}}\n\n'
BEGUN = 'event: response.created\ndata: {"usage":null}\n\n'
BEGUN_MESSAGE = 'event: message_start\ndata: {"usage":{"output_tokens":0}}\n\n'
DONE = "data: [DONE]\n\n"
ENDED = [
    "", DONE, USAGE + DONE, ROLE + DONE, ROLE + ROLE + CHUNK + USAGE + DONE, CHUNK + DONE, ": keep-alive\n\n" + DONE,
    BEGUN + 'event: response.completed\ndata: {"usage":{"output_tokens":0}}\n\n',
    BEGUN_MESSAGE + 'event: message_delta\ndata: {"usage":{"output_tokens":0}}\n\n',
    '{"choices":[{"text":"","finish_reason":"abort"}]}', '{"output":[],"usage":{"output_tokens":0}}',
    BEGUN.replace("null", '"%s"' % ("i" * 300_000)) + DONE,
]  # fmt: skip


def saying(text: str) -> Engine:
    async def answer(request: Request, body: dict[str, Any]) -> Response:
        return Response(text, media_type="application/json" if text.startswith("{") else "text/event-stream")

    return Engine(answer)


@pytest.mark.parametrize("text", [
    '{"metadata":{"finish_reason":"abort"},"tools":[{"output_tokens":0}],"usage":{"output_tokens":1}}',
    BEGUN + 'event: response.completed\ndata: {"response":{"metadata":{"finish_reason":"abort"}}}\n\n',
])  # fmt: skip
def test_what_a_client_says_is_no_word_of_an_engine_that_ends(text: str) -> None:
    d = saying(text)
    with routed([], d) as front:
        assert front.ask({"input": "x"}, "/v1/responses").text == text
        assert front.get("/health").status_code == 200


@pytest.mark.parametrize("text", ENDED)
def test_an_answer_without_a_token_is_an_engine_that_ends_and_another_one_is_asked(text: str) -> None:
    p, ending, d, whole = prefill_engine(), saying(text), decode_engine(), text.startswith("{")
    with routed([ending, p] if whole else p, [ending, d], cool_down=600) as front:
        for _ in range(2):
            answer = front.ask({"prompt": "x", "stream": not whole})
            assert answer.status_code == 200 and ("from D" if whole else '"i": 0') in answer.text
    assert len(ending.seen) == 1 + whole and [body["kv_transfer_params"] for body, _, _ in d.seen] == [PARAMS] * 2
    with routed(p, ending) as front:
        answer = front.ask({"prompt": "x"})
        assert "shutting down" in answer.text and (answer.status_code == 502 or text.startswith(":"))


@pytest.mark.parametrize("text", [ROLE + ROLE + USAGE[:9], BEGUN_MESSAGE + ENDED[-3].replace("0", "1"), "{}"])
def test_an_answer_that_has_something_is_given_as_it_is(text: str) -> None:
    with routed(prefill_engine(), saying(text)) as front:
        assert front.ask({"prompt": "x"}).text == text


class Waiting:
    """An engine whose requests wait, and whose counters ``move`` or not."""

    def more_looks(self, count: int) -> None:
        until = self.looks + count
        eventually(lambda: self.looks > until, f"it is looked at {count} times")

    def __init__(self, *, move: bool) -> None:
        self.go_on, self.move = threading.Event(), move
        self._counts = itertools.count()
        self.looks = self._last = 0

    def of(self, engine: Engine) -> Engine:
        engine.metrics = self.page
        return engine

    def page(self) -> str:
        self.looks += 1
        self._last = next(self._counts) if self.move else self._last
        return f"process_cpu_seconds {next(self._counts)}\nvllm:kv_cache_usage_perc{{}} {self._last}\n"


SOON = Checks(interval=0.05, timeout=600.0, still=0.0)
STILL_LOOKS = SOON.failures + 1
"""So many looks at an engine that stands still, and it is given up."""


def test_a_p_that_stands_still_is_given_up_and_one_that_moves_is_not(caplog: Any) -> None:
    waiting = Waiting(move=True)
    p, d = waiting.of(prefill_engine(go_on=waiting.go_on)), decode_engine()
    with routed(p, d, checks=SOON) as front:
        client = front.begin({"prompt": "x"})
        assert p.arrived.wait(60)
        waiting.more_looks(3 * STILL_LOOKS)
        assert not client.done() and front.get("/router/status").json()["oldest_waiting_seconds"] > 0
        waiting.move = False
        assert client.result().json() == {"text": "from D"} and "kv_transfer_params" not in d.seen[0][0]
        assert p.aborted.wait(60) and not front.get("/health").json()["prefill"][front.p[0]]
        assert front.ask({"prompt": "y"}).json() == {"text": "from D"} and len(p.seen) == 1
        assert "kvferry_router_oldest_waiting_seconds 0.0" in front.get("/metrics").text
    assert len([line for line in caplog.messages if "is left out: it stands still" in line]) == 1


@pytest.mark.parametrize(("tokens", "checks"), [(1_000_000, SOON), (1, replace(SOON, still=5.0))])
def test_a_step_may_take_a_while(tokens: int, checks: Checks) -> None:
    """A second for each 1,000 tokens, and five, however frequent the checks."""
    waiting = Waiting(move=False)
    p, d = waiting.of(prefill_engine(go_on=waiting.go_on)), decode_engine()
    with routed(p, d, checks=checks) as front:
        client = front.begin({"prompt": "x" * 4 * tokens})
        assert p.arrived.wait(60)
        waiting.more_looks(3 * STILL_LOOKS)
        waiting.go_on.set()
        assert client.result().json() == {"text": "from D"} and d.seen[0][0]["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_d_that_stands_still_is_replaced_before_it_has_sent_a_byte(stopped: bool, stream: bool) -> None:
    """``stopped``: its server, too."""
    p, d, silent, listener = prefill_engine(), decode_engine(), decode_engine(before=600), socket.create_server(("", 0))
    checks = Checks(interval=0.05, timeout=0.5, still=0.0)
    with routed(p, Waiting(move=False).of(silent), checks=checks) as front, d.running() as d_url, listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}" if stopped else front.d[0]
        front.decode_engines(url, d_url)
        answer = front.ask({"prompt": "x", "stream": stream})
        assert '"i": 0' in answer.text or "from D" in answer.text
    assert [body["kv_transfer_params"] for body, _, _ in d.seen] == [PARAMS]


def test_an_only_d_that_stands_still_is_waited_for_as_long_as_a_p() -> None:
    waiting = Waiting(move=False)
    d = waiting.of(decode_engine(go_on=waiting.go_on))
    with routed(prefill_engine(), d, LegTimeouts(60.0, 1.0, 60.0), checks=SOON) as front, front.streaming() as response:
        lines = [line for line in response.iter_lines() if line]
        assert lines[0] == 'data: {"i": 0}' and "stands still" in lines[1] and len(lines) == 2
        assert waiting.looks >= 1.0 / SOON.interval
        waiting.go_on.set()


@pytest.mark.parametrize("how", ["another request waits", "down"])
def test_a_passed_request_tells_nothing_of_an_engine_and_is_given_up_with_it(how: str) -> None:
    waiting, silent = Waiting(move=False), decode_engine(before=600)
    with routed(prefill_engine(), waiting.of(silent), LegTimeouts(60.0, 0.5, 60.0), checks=SOON) as front:
        (engine,) = front.router.engines.of(Role.DECODE)
        passed = front.begin({"prompt": "x"}, **{"content-encoding": "identity"})
        assert silent.arrived.wait(60)
        waiting.more_looks(3 * STILL_LOOKS)
        assert not engine.still and front.get("/router/status").json()["oldest_waiting_seconds"] > 0
        if how == "down":
            silent.health = lambda: 503
        else:
            assert front.ask({"prompt": "x"}).status_code == 502
        assert passed.result().status_code == 502 and "stands still" in passed.result().text


def test_a_p_that_refuses_what_d_answers_is_left_out_and_named(caplog: Any) -> None:
    p, d = prefill_engine(status=401), decode_engine()
    with routed(p, d, cool_down=600, checks=SOON) as front:
        for number in range(3 * REFUSALS):
            assert front.ask({"prompt": "x" * 4 * number}).json() == {"text": "from D"}
        assert len(p.seen) == REFUSALS
        said = front.get("/health").json()
        assert said["status"] == "degraded" and said["prefill"] == {front.p[0]: False}
        assert "it answers 401" in said["handed_over"][front.p[0]]
        eventually(lambda: [line for line in caplog.messages if "--served-model-name" in line], "it is logged")
    refusing = failing(400)
    with routed(prefill_engine(status=400), refusing) as front:
        for number in range(3 * REFUSALS):
            assert front.ask({"prompt": "x" * 4 * number}).status_code == 400
        assert front.get("/health").json()["status"] == "ok", "the requests are at fault"
        assert all(engine.usable(front.router.clock()) for engine in front.router.engines)


# --- both legs at once


def test_a_d_that_is_gone_is_replaced_at_once_under_the_same_name(at_once: Served) -> None:
    at_once.decode_engines(gone(), at_once.d_url)
    at_once.p.held = True
    assert at_once.ask({"prompt": "y"}).json() == {"text": "from D"}, "before P has answered"
    at_once.p.go_on.set()
    at_once.nothing_left()
    assert (at_once.d.params[-1] or {})["transfer_id"] == (at_once.p.params[-1] or {})["transfer_id"]


def test_a_d_that_breaks_while_p_computes_is_replaced_with_ps_lease(at_once: Served) -> None:
    with RawEngine("D", b"").running() as broken_after_it_was_asked:
        at_once.decode_engines(broken_after_it_was_asked, at_once.d_url)
        assert at_once.ask({"prompt": "y"}).json() == {"text": "from D"}
    at_once.nothing_left()
    assert at_once.d.params[-1] == PUSH and at_once.p.gone == 0


# --- limits, and the form of errors


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_gets_413(chunked: bool) -> None:
    body = b'{"prompt": "' + b"x" * 5000 + b'"}'
    with routed(prefill_engine(), decode_engine(), limits=Limits(body_bytes=1000)) as front:
        content = iter([body[:3000], body[3000:]]) if chunked else body
        answer = front.post(content)
        assert answer.status_code == 413 and "1000 bytes" in answer.json()["error"]["message"]
        assert front.ask({"prompt": "x"}).status_code == 200


LONG, SHORT = {"prompt": "x" * 7000}, {"prompt": "x" * 3500}
BODIES = Limits(body_bytes=8000, all_body_bytes=10_000)


@pytest.mark.parametrize(
    ("limits", "why"), [(BODIES, "over 10000 bytes"), (Limits(requests=1), "1 requests are in flight")]
)
def test_more_requests_or_bytes_of_bodies_than_allowed_get_503(limits: Limits, why: str) -> None:
    go_on = threading.Event()
    p, d = prefill_engine(go_on=go_on), decode_engine()
    with routed(p, d, limits=limits) as front:
        client = front.begin(LONG)
        assert p.arrived.wait(60)
        refused = front.ask(SHORT)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert why in refused.json()["error"]["message"]
        go_on.set()
        client.result()
        assert front.ask(LONG).status_code == 200
    assert len(p.seen) == 2


def test_a_body_counts_until_the_last_task_of_its_request_has_ended() -> None:
    """Of a client that left: the router still has P's lease released."""
    go_on = threading.Event()
    p, d = prefill_engine(go_on=go_on), decode_engine()
    with routed(p, d, limits=BODIES) as front:
        leave_after(front.url, LONG, p.arrived)
        eventually(lambda: front.router.metrics.in_flight == 0, "the client is gone")
        assert front.ask(SHORT).status_code == 503
        go_on.set()
        eventually(lambda: not front.router.tasks, "P's lease is released")
        assert front.ask(LONG).status_code == 200


def test_a_body_that_is_refused_or_breaks_off_counts_no_longer() -> None:
    with routed(prefill_engine(), decode_engine(), limits=BODIES) as front:
        for content in (b"x" * 7000, b"[" + b"1," * 3400 + b"1]", b"x" * 9000):
            assert front.post(content).status_code in (400, 413)
        front.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 8000\r\n\r\n" + b"x" * 7000).close()
        eventually(lambda: front.ask(LONG).status_code == 200, "the bytes of all that were refused are forgotten")


@pytest.mark.parametrize("content", [b"", b"[1", b"[]", b"3", b"\xff", b'{"a":[1,}', b'{"a": "\\ud83d"', b"a=b"])
def test_what_is_no_json_object_d_refuses_by_itself(content: bytes) -> None:
    d = decode_engine()
    with routed(prefill_engine(), d) as front:
        headers = {"content-type": "text/odd"} if content else {}
        answer = front.post(content, headers=headers)
    assert answer.status_code == 400 and answer.json() == {"error": {"message": "no JSON object"}}
    assert d.refused == [(content, headers.get("content-type"))] and not d.seen


TOO_DEEP = [b"[" * 100_000, b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}"]
NUMBER_BEYOND_PYTHON = b'{"a": NaN, "kv_transfer_params": {}, "b": ' + b"1" * 5000 + b"}"
HALF_A_NAME = b'{"\\ud83d": 1}'


@pytest.mark.parametrize("content", [*TOO_DEEP, NUMBER_BEYOND_PYTHON, HALF_A_NAME])
def test_what_d_might_read_otherwise_is_refused(content: bytes) -> None:
    d = decode_engine()
    with routed(prefill_engine(), d) as front:
        answer = front.post(content)
        error = answer.json()["error"]
    assert answer.status_code == error["code"] == 400 and "no engine is asked" in error["message"]
    assert not d.refused and not d.seen


def test_a_fault_of_the_router_is_an_error_without_a_traceback() -> None:
    async def fault(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    with routed([], gone()) as front:
        front.router.answer = fault  # type: ignore[method-assign]
        answer = front.ask({"prompt": "x"})
        assert answer.status_code == 500 and "planted" not in answer.text
        assert answer.json()["error"]["type"] == "InternalServerError"
        assert front.router.metrics.in_flight == 0


def test_a_client_that_sends_slowly_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.app.BODY_SECONDS", 0.2)
    with (
        routed(prefill_engine(), decode_engine()) as front,
        front.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{") as client,
    ):
        assert b" 408 " in client.recv(100)


def test_a_client_that_leaves_while_a_d_is_replaced_leaves_no_lease(at_once: Served) -> None:
    """D has broken off, and P computes: P's leg ends as it would, and the other D loads the prompt, once."""
    at_once.p.held = True
    broken = threading.Event()
    raw = RawEngine("D", b"")
    with raw.running() as raw_url:
        at_once.decode_engines(raw_url, at_once.d_url)
        at_once.router.engines.cool_down = 600
        threading.Thread(target=lambda: (eventually(lambda: raw.seen, "D is asked"), broken.set()), daemon=True).start()
        leave_after(at_once.url, {"prompt": "y", "max_tokens": 50, "seed": 1}, broken)
        eventually(lambda: at_once.router.metrics.in_flight == 0, "the router has seen that it is gone")
        at_once.p.go_on.set()
        eventually(lambda: len(at_once.d.bodies) == 2, "the other D is asked")
        at_once.nothing_left()
    assert at_once.p.gone == 0 and at_once.d.params[1:] == [PUSH] and at_once.d.bodies[-1]["max_tokens"] == 0


def test_a_d_that_breaks_in_its_answer_is_not_replaced_at_once_either(at_once: Served) -> None:
    at_once.p.held = True
    raw = RawEngine("D", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")
    with raw.running() as raw_url:
        at_once.decode_engines(raw_url, at_once.d_url)
        assert at_once.ask({"prompt": "y"}).status_code == 502
        eventually(lambda: at_once.p.gone == 1, "P's leg was cancelled")
    assert len(at_once.d.bodies) == 1
