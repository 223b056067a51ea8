"""What a client gets is what D alone would say, whatever it asks and whatever D answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from kvferry.router.request_bodies import (
    MAX_COLONS,
    MAX_COMMAS,
    NOT_JSON,
    PREFILL_TAG,
    SMALL_BYTES,
    WINDOW_BYTES,
    members,
    pieces_of,
    without,
)
from tests.router.stand_ins import (
    PARAMS,
    Engine,
    RawEngine,
    Served,
    decode_engine,
    prefill_engine,
    routed,
)
from tests.support.served import eventually

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunk(piece: bytes) -> bytes:
    """Of an answer that does not end."""
    return STREAM + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(piece), piece)


def answering(answer: Callable[[dict[str, Any]], Response]) -> Engine:
    async def serve(request: Request, body: dict[str, Any]) -> Response:
        return answer(body)

    return Engine(serve)


# --- which requests P computes


HANDED_OVER: list[dict[str, Any]] = [
    {"prompt": "x"}, {"prompt": ["x"]}, {"prompt": [[1, 2]]}, {"prompt": [1, 2]}, {"messages": []},
    {"prompt": "x", "n": None}, {"prompt": "x", "n": 3}, {"prompt": "x", "echo": True}, {"prompt": "x", "logprobs": 3},
    {"prompt": "x", "echo": False, "logprobs": 1},
    {"prompt": "x", "use_beam_search": False, "prompt_embeds": None, "prompt_logprobs": None},
    {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}, {"prompt": "x", "stream_options": None},
]  # fmt: skip
LEFT_TO_D: list[dict[str, Any]] = [
    {"prompt": ["x", "y"]}, {"prompt": [[1], [2]]}, {"prompt": []}, {"prompt": "x", "use_beam_search": True},
    {"prompt": "x", "prompt_embeds": "AAAA"}, {"prompt": "x", "prompt_logprobs": 0},
    {"prompt": "x", "echo": True, "logprobs": 0}, {"messages": [], "echo": True},
]  # fmt: skip


@pytest.mark.parametrize("left", [False, True])
def test_p_computes_no_prompt_that_d_will_not_ask_for(left: bool) -> None:
    bodies = LEFT_TO_D if left else HANDED_OVER
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as front:
        for body in bodies:
            before, path = len(p.seen), "/v1/chat/completions" if "messages" in body else "/v1/completions"
            assert front.ask(body, path).status_code == 200
            assert len(p.seen) == before + (not left), body
            assert left or not p.seen[-1][0].keys() & {"max_completion_tokens", "stream_options"}
            assert d.seen[-1][0] == body | ({} if left else {"kv_transfer_params": PARAMS})


def test_a_request_that_d_refuses_leaves_no_lease() -> None:
    """D's server did not tell its engine: it does of a request of no token, with what P took."""
    p, d = prefill_engine(), answering(lambda body: PlainTextResponse("refused", 400))
    with routed(p, d) as front:
        answered = front.ask({"prompt": "x", "max_tokens": 5, "temperature": "hot"})
        assert answered.status_code == 400 and answered.text == "refused"
        eventually(lambda: len(d.seen) == 2, "D is told to release the lease")
    assert d.seen[1][0] == {"prompt": [1], "kv_transfer_params": PARAMS, "max_tokens": 0}


def test_a_request_that_d_refuses_at_once_leaves_no_lease(at_once: Served) -> None:
    at_once.d.held = True
    at_once.d.answer = lambda body: PlainTextResponse("no", 400 if body.get("max_tokens") == 5 else 200)
    client = at_once.begin({"prompt": "y", "max_tokens": 5})
    engine = next(iter(at_once.router.engines))
    assert at_once.d.engine.arrived.wait(60)
    eventually(lambda: len(at_once.p.bodies) == 2 and engine.load == 0, "P has answered")
    at_once.d.go_on.set()
    client.result()
    eventually(lambda: len(at_once.d.bodies) == 3, "D is told to release the lease")
    assert (at_once.d.params[-1] or {})["remote_num_tokens"] == 3 and at_once.d.bodies[-1]["max_tokens"] == 0
    at_once.nothing_left()


@pytest.mark.parametrize("leaves", [False, True])
def test_p_computes_no_longer_when_d_has_answered(at_once: Served, leaves: bool) -> None:
    at_once.p.held = True
    go_on = threading.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b'data: {"i": 0}\n\n'
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        yield b"data: [DONE]\n\n"

    at_once.d.answer = lambda body: StreamingResponse(pieces(), media_type="text/event-stream")
    with at_once.front.streaming(prompt="y") as response:
        lines = response.iter_lines()
        assert next(lines) == 'data: {"i": 0}'
        if not leaves:
            go_on.set()
            assert [line for line in lines if line] == ["data: [DONE]"]
    eventually(lambda: at_once.p.gone == 1, "P's leg has ended")
    go_on.set()
    at_once.nothing_left()


def test_one_bad_request_takes_no_engine_from_others() -> None:
    def answer(body: dict[str, Any]) -> Response:
        return JSONResponse({"kv_transfer_params": PARAMS}, 500 if "structured_outputs" in body else 200)

    p, d = answering(answer), answering(answer)
    with routed(p, d, cool_down=600) as front:
        for _ in range(4):
            assert front.ask({"prompt": "x", "structured_outputs": [1]}).status_code == 500
        assert front.ask({"prompt": "x"}).status_code == 200
        assert d.seen[-1][0]["kv_transfer_params"] == PARAMS and front.get("/health").status_code == 200
        for number in range(3):
            front.ask({"prompt": "x" * 4 * number, "structured_outputs": [1]})
        assert not any(engine.usable(front.router.clock()) for engine in front.router.engines)


# --- what is sent on


def test_engines_get_the_very_bytes_of_a_value() -> None:
    """Half an emoji, a number beyond all others, a key twice, spaces, an escape: an engine has its own errors."""
    seen: list[bytes] = []

    async def serve(request: Request, body: dict[str, Any]) -> Response:
        seen.append(await request.body())
        return JSONResponse({"kv_transfer_params": PARAMS})

    p, d = Engine(serve), Engine(serve)
    values = [b'"\\ud83d x"', b"1e999", b"1" * 23, b'{"a": 1, "a":2}', b'"\\u0041\\/"', b"NaN", b'"\xc3\xa9"']
    with routed(p, d) as front:
        assert front.post('{"prompt": "é"}'.encode("utf-16")).status_code == 200, "a body may have a BOM"
        for value in values:
            answer = front.post(b'\r\n{ "prompt" : "x", "odd" :%s, "max_tokens":5}' % value)
            assert answer.status_code == 200, (value, answer.text)
            assert all(b'"odd":%s' % value in one for one in seen[-2:]), value


def test_what_names_hosts_is_dropped() -> None:
    keys = "kv_transfer_params", "ec_transfer_params", "kv_transfer\\u005fparams"
    forms = (
        "{%s, %s}", "\ufeff{%s, %s}", '{"a": "\\ud83d", %s, %s}', '{"vllm_xargs": {"a": 1, %s}, %s}',
        '{"vllm_xargs": {"a": 1, "b": "\\ud83d", %s}, %s}',
    )  # fmt: skip
    d = decode_engine()
    with routed(prefill_engine(params=None), d) as front:
        for key, form in itertools.product(keys, forms):
            d.seen.clear()
            member = f'"{key}": {{"remote_host": "attacker"}}'
            assert front.post((form % (member, '"prompt": "x"')).encode()).status_code == 200
            assert front.post((form % (member, member)).encode()).status_code == 200
            assert len(d.seen) == 2 and not any("transfer" in str(body) for body, _, _ in d.seen), (key, form)
            assert ("vllm_xargs" in form) == (d.seen[0][0].get("vllm_xargs", {}).get("a") == 1)
            body = members((form % (member, '"prompt": "x"')).encode()) or {}
            assert b"attacker" not in b"".join(map(bytes, pieces_of(without(body, {json.loads(f'"{key}"')}))))


def test_cookies_and_lists_of_headers() -> None:
    async def serve(request: Request, body: dict[str, Any]) -> Response:
        answer = JSONResponse({"headers": [(name, value) for name, value in request.headers.items()]})
        answer.set_cookie("a", "1"), answer.set_cookie("b", "2")
        return answer

    with routed(prefill_engine(), Engine(serve)) as front:
        headers = [("cookie", "a=1"), ("cookie", "b=2"), ("x-list", "1"), ("x-list", "2")]
        answer = front.post(b'{"prompt": "x"}', headers=headers)
    assert [line.split(";")[0] for line in answer.headers.get_list("set-cookie")] == ["a=1", "b=2"]
    got = dict(answer.json()["headers"])
    assert got["cookie"] == "a=1; b=2" and got["x-list"] == "1, 2"


def test_responses_go_through_both_legs() -> None:
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as front:
        body = {"input": "x", "max_output_tokens": 9, "stream": False}
        assert front.ask(body, "/v1/responses").json() == {"text": "from D"}
        front.ask({"input": "x", "previous_response_id": "resp_1"}, "/v1/responses")
        front.ask({"input": "x", "tools": [{"type": "mcp"}]}, "/v1/responses")
    assert [body for body, _, _ in p.seen] == [
        {"input": "x", "max_output_tokens": 1, "stream": False, "store": False, "kv_transfer_params": PREFILL_TAG}
    ]
    assert d.seen[0][0] == body | {"kv_transfer_params": PARAMS} and len(d.seen) == 3


def test_what_d_says_of_a_response_before_its_engine_has_it_is_no_answer(at_once: Served) -> None:
    """P does not hand over, and D is asked again."""
    at_once.p.held, said = True, threading.Event()
    opening = b"event: response.created\ndata: {}\n\n", b"event: response.in_progress\ndata: {}\n\n"

    async def pieces(body: dict[str, Any]) -> AsyncIterator[bytes]:
        for piece in opening:
            yield piece
            await asyncio.sleep(0.01)
        said.set()
        while "kv_transfer_params" in body:
            await asyncio.sleep(0.01)
        yield b"event: response.completed\ndata: {}\n\n"

    at_once.d.answer = lambda body: StreamingResponse(pieces(body), media_type="text/event-stream")
    at_once.p.answer = lambda body: Response(status_code=503)
    answer = at_once.begin({"input": "x", "stream": True}, "/v1/responses")
    assert said.wait(60)
    at_once.p.go_on.set()
    assert answer.result().content == b"".join(opening) + b"event: response.completed\ndata: {}\n\n"
    assert len(at_once.d.bodies) == 3


# --- streams


@pytest.mark.parametrize("events", [
    b"event: response.created\ndata: {}\n\n: ping\n\ndata: {}\n\ndata: [DONE]\n\n", b"id: 1\r\ndata: {}\r\n\r\n",
    b"data: {}\r\r", b"data: x",
])  # fmt: skip
def test_a_stream_is_passed_on_as_it_is(events: bytes) -> None:
    raw = RawEngine("D", STREAM + b"Content-Length: %d\r\n\r\n%s" % (len(events), events))
    with routed([], raw) as front:
        answer = front.ask({"prompt": "x", "stream": True})
    assert answer.status_code == 200 and answer.content == events


@pytest.mark.parametrize("comments", [b": keep-alive\n\n", b":\r\n\r\n: x\r\n", b"\n\n: keep"])
def test_a_comment_is_no_answer(comments: bytes) -> None:
    """A D that is lost after one is replaced, and the client has seen that its request is alive."""
    raw, d = RawEngine("D", chunk(comments)), decode_engine(pieces=1)
    with routed([], [raw, d]) as front:
        answer = front.ask({"prompt": "x", "stream": True})
        eventually(lambda: front.router.metrics.in_flight == 0, "it is counted")
    assert answer.content.removeprefix(comments).lstrip() == b'data: {"i": 0}\n\ndata: [DONE]\n\n'
    assert answer.content.startswith(comments) and front.counts("failed_legs") == {"decode": 1}


@pytest.mark.parametrize("begun", [": keep-alive", 'data: {"i"'])
def test_a_d_that_fails_in_a_stream_ends_it_with_an_error_of_its_own(begun: str) -> None:
    raw = RawEngine("D", chunk(begun.encode() + (b"\n\n" if begun[0] == ":" else b"")))
    with routed([], raw) as front:
        *before, error, end = front.ask({"prompt": "x", "stream": True}).text.split("\n\n")
        assert front.counts("failed_legs") == {"decode": 1}
    assert before[0] == begun and end == ""
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 502


def test_a_long_answer_is_not_held_and_ends_early_where_d_does() -> None:
    long = b'"' + b"x" * (3 << 20) + b'"'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(long)
    for sent, whole in ((long, True), (long[: 2 << 20], False)):
        with routed([], RawEngine("D", head + sent)) as front:
            if whole:
                assert front.ask({"prompt": "x"}).content == long
            else:
                found = b""
                with front.streaming() as response, pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
                    for piece in response.iter_raw():
                        found += piece
                assert found and long.startswith(found), "no error within an answer that is no stream"


# --- large bodies


def large(value: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": value, "stream": False, "stop": ["]", '\\"{'], "max_tokens": 5}).encode()


@pytest.mark.parametrize("value", ["x\\" * (1 << 19), list(range(250_000)), "é\n" * 150_000, ['{"' * (1 << 19)],
                                   "x" * (WINDOW_BYTES - 30) + "\\" * 9])  # fmt: skip
def test_a_large_body_is_taken_apart_and_sent_as_a_small_one_is(value: Any) -> None:
    p, d = prefill_engine(), decode_engine()
    content = large(value)
    found = members(content) or {}
    assert len(content) > SMALL_BYTES and {k: json.loads(bytes(v)) for k, v in found.items()} == json.loads(content)
    with routed(p, d) as front:
        assert front.post(content).json() == {"text": "from D"}
    assert d.seen[0][0] == json.loads(content) | {"kv_transfer_params": PARAMS} and p.seen[0][0]["prompt"] == value


SPACE = b" " * WINDOW_BYTES


@pytest.mark.parametrize("content", [
    b"[]" + SPACE, b'{"a": ' + b"[" * WINDOW_BYTES, b'{"a": "' + b"x" * WINDOW_BYTES, b'{"a" ' + SPACE + b"}",
    b'{"a": 1}' + SPACE + b"x", b'{"a": [' + b"[]," * (MAX_COMMAS + 1) + b"[]]}", b'{"a": NaN,' + SPACE + b"}",
    b"{" + b",".join(b'"%d":1' % n for n in range(20_000)) + b"}", b'{"a": "' + b":" * (MAX_COLONS + 1) + b'"}',
])  # fmt: skip
def test_a_large_body_that_is_no_object_or_of_no_honest_shape_is_refused(content: bytes) -> None:
    with pytest.raises(NOT_JSON):
        members(content)


def test_a_body_is_read_as_vllm_reads_it() -> None:
    texts = '{"a": NaN, "b": 1}', '{"a": "\\ud83d", "b": 1e999, "a": [2.50, "é"]}', '{"a": {"b": 1}}'
    for text, form in itertools.product(texts, ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be")):
        content = text.encode(form)
        read = {name: json.loads(bytes(value)) for name, value in (members(content) or {}).items()}
        assert repr(read) == repr(json.loads(content)), (text, form)


def test_nobody_waits_while_a_large_body_is_read() -> None:
    """The shape is the worst one: it is refused when it is over the bound."""
    p, d = prefill_engine(), decode_engine()
    content = b'{"prompt": [' + b"[]," * (MAX_COMMAS + 1) + b"[]]}"
    with routed(p, d) as front, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(front.post, content)
        while not answer.done():
            assert front.ask({"prompt": "x"}).status_code == 200
        assert answer.result().status_code == 400
