"""What the router does not know goes to a D as it came and comes back as it is; what would harm an engine does not."""

from __future__ import annotations

import gzip
import json
import socket
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvferry.router.app import Limits
from kvferry.router.engines import Role
from kvferry.router.request_bodies import NEVER_SENT
from tests.router.stand_ins import (
    PARAMS,
    PLAIN,
    Front,
    RawEngine,
    Served,
    decode_engine,
    prefill_engine,
    routed,
    served,
)
from tests.router.test_http_client import engine

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PACKED = gzip.compress(b'{"prompt": "x"}', mtime=0)
ITS_OWN = {"connection", "date", "transfer-encoding"}


def stand_in(seen: list[str] | None = None) -> Starlette:
    """A D that says what it was sent; a long answer where the query says so. ``seen``: paths, once a body was read."""

    async def echo(request: Request) -> Response:
        body = await request.body()
        (seen if seen is not None else []).append(request.scope["raw_path"].decode())
        headers = sorted(pair for pair in request.headers.items() if pair[0] not in ("host", "connection"))
        headers = [pair for pair in headers if pair != ("content-length", "0")]
        said = [request.method, request.scope["raw_path"].decode(), request.url.query, headers, body.hex()]
        answer = JSONResponse(said, 418, {"x-request-id": "of D", "content-encoding": "x-odd", "server": "of D"})
        answer.set_cookie("a", "1"), answer.set_cookie("b", "2")
        return answer

    async def moved(request: Request) -> Response:
        return Response(status_code=307, headers={"location": str(request.url.replace(path="/there"))})

    return Starlette(routes=[
        Route("/moved", moved, methods=["POST"]),
        Route("/{path:path}", echo, methods=METHODS),
    ])  # fmt: skip


@pytest.mark.parametrize(("method", "target", "content", "headers"), [
    ("GET", "/v1/models/a%2Fb%20?a=%20&b", b"", {}), ("POST", CHAT + "/", b"{}", {}), ("GET", CHAT, b"", {}),
    ("PUT", "//odd/../x/", b"\0\xff", {"content-type": "x/y"}), ("DELETE", RESPONSES + "/x", b"", {}),
    ("POST", "/tokenize", PACKED, {"content-encoding": "gzip"}), ("HEAD", "/x", b"", {}), ("POST", "/empty", b"", {}),
    ("POST", CHAT, PACKED, {"content-encoding": "gzip"}), ("PATCH", "/%E9?%E9", b"x" * (1 << 20), {"x-list": "1, 2"}),
    ("OPTIONS", MESSAGES, b"", {"origin": "http://x"}), ("POST", MESSAGES, b"[", {"x-data-parallel-rank": "1"}),
])  # fmt: skip
def test_a_request_comes_and_goes_as_it_is(method: str, target: str, content: bytes, headers: dict[str, str]) -> None:
    with served(stand_in()) as d, routed(prefill_engine(), d) as front:
        own = {"content-length": str(len(content))} if content or method == "POST" else {}
        sent = {"x-request-id": "mine", "accept-encoding": "gzip", **headers, **own}
        how: dict[str, Any] = {"content": content or None, "headers": sent, "timeout": 800, **PLAIN}
        answers = []
        for base in (d, front.url):
            with httpx.stream(method, base + target, **how) as answer:
                found = [pair for pair in answer.headers.multi_items() if pair[0] not in ITS_OWN]
                answers.append((answer.status_code, answer.reason_phrase, found, b"".join(answer.iter_raw())))
    assert answers[0] == answers[1] and answers[0][0] == 418


def until(connection: socket.socket, end: bytes) -> bytes:
    found = b""
    while end not in found:
        found += connection.recv(1 << 16)
    return found


def test_bodies_are_streamed_both_ways_and_a_place_is_the_routers() -> None:
    def back(connection: socket.socket) -> None:
        until(connection, b"1\r\na\r\n")
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nA\r\n")
        until(connection, b"1\r\nb\r\n0\r\n\r\n")
        connection.sendall(b"1\r\nB\r\n0\r\n\r\n")

    with engine(back) as d, routed([], d) as front:
        client = front.raw(b"POST /back HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        until(client, b"1\r\nA\r\n")
        client.sendall(b"1\r\nb\r\n0\r\n\r\n")
        until(client, b"1\r\nB\r\n0\r\n\r\n")
    with served(stand_in()) as d, routed([], d) as front:
        assert front.request("POST", "/moved").headers["location"] == "/there"


def test_a_post_is_sent_once_and_a_broken_answer_is_seen() -> None:
    part = RawEngine("D", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
    with routed([], [RawEngine("D", b""), RawEngine("D", b"")]) as front:
        assert front.request("POST", "/tokenize", content=b"{}").status_code == 502
        assert sum(front.counts("requests").values()) == 1
    with routed([], part) as front, pytest.raises(httpx.RemoteProtocolError):
        front.request("POST", "/tokenize", content=b"{}")
    assert len(part.seen) == 1


# --- what is refused


def status_of(front: Front, head: bytes) -> bytes:
    with front.raw(head + b"Host: x\r\nConnection: close\r\n\r\n") as client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


EVASIONS = (
    "/sleep", "//sleep", "/sleep/", "/%73leep", "/%2573leep", "/v1/../sleep", "/SLEEP", "/sleep%0a", "/%5Csleep",
    "/api/sleep?level=2", "http://x/sleep", "/adapters/a", "/v1/load_lora_adapter", "/sleep;x=1", "/x%2fsleep",
    "/inference/v1/abort_requests", "/fault_tolerance/apply",
)  # fmt: skip


def test_what_changes_an_engine_is_refused_however_it_is_written() -> None:
    seen: list[str] = []
    with served(stand_in(seen)) as d, routed([], d) as front:
        for target in EVASIONS:
            answer = status_of(front, b"POST %s HTTP/1.1\r\n" % target.encode())
            assert answer.startswith(b"HTTP/1.1 403 ") and b"ask that engine itself" in answer, target
        assert not seen
        for target in ("/is_sleeping", "/v1/models/sleep.v1", "/v1/models/sleepy-pause"):
            assert front.get(target).status_code == 418


def test_what_is_no_request_for_an_engine_gets_one_line() -> None:
    with routed([], decode_engine()) as front:
        upgrade = (
            b"GET /v1/realtime HTTP/1.1\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n"
        )
        for head, status in ((upgrade, 501), (b"OPTIONS * HTTP/1.1\r\n", 400), (b"GET /router/none HTTP/1.1\r\n", 404),
                             (b"POST /health HTTP/1.1\r\n", 405), (b"GET / HTTP/0.x\r\n", 400), (b"G\0T / x\r\n", 400),
                             (b"GET / HTTP/1.1\r\nx: " + b"y" * (1 << 17) + b"\r\n", 400)):  # fmt: skip
            answer = status_of(front, head)
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert answer.split()[1] == b"%d" % status and error["code"] == status and "\n" not in error["message"]
        charset = {"content-type": "multipart/form-data; boundary=x; charset=utf-7"}
        assert front.request("POST", "/v1/audio/transcriptions", content=b"x", headers=charset).status_code == 415


NAMED = '{"a": [{"%s" :\t%s}]}'
BODIES = (
    (NAMED % ("kv_transfer_params", "{}")).encode(), (NAMED % ("ec_transfer_params", '"x"')).encode(),
    (NAMED % ("k\\u0076_transfer\\u005Fparams", "{}")).encode(), (NAMED % (NEVER_SENT[0], "1")).encode("utf-16"),
    b'--x\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{"kv_transfer_params":1}\r\n--x--',
)  # fmt: skip
HARMLESS = (NAMED % ("kv_transfer_params", "null"), json.dumps({"text": NAMED % ("kv_transfer_params", "{}")}))


@pytest.mark.parametrize("path", ["/invocations", CHAT + "/batch", CHAT + "/", "/inference/v1/generate", "/%2e/x"])
def test_no_passed_body_names_hosts_for_an_engine(path: str) -> None:
    seen: list[str] = []
    with served(stand_in(seen)) as d, routed(prefill_engine(), d) as front:
        for body in BODIES:
            for content in (body, (bytes([byte]) for byte in body)):
                answer = front.request("POST", path, content=content)
                assert answer.status_code == 400 and "leave them out" in answer.json()["error"]["message"], body
        lies = front.request("POST", "/v1/completions", content=BODIES[0], headers={"content-encoding": "gzip"})
        assert lies.status_code == 400 and not seen
        assert [front.request("POST", path, content=body).status_code for body in HARMLESS] == [418, 418]


# --- what belongs to one engine


def test_which_of_several_d_has_stored_a_response_is_not_known() -> None:
    seen: list[str] = []
    with served(stand_in(seen)) as d, routed([], d) as front:
        assert front.ask({"input": "y", "previous_response_id": "resp_1"}, RESPONSES).status_code == 418
        assert front.get(f"{RESPONSES}/resp_1").status_code == 418 and len(seen) == 2, "it can be only this one"
        front.router.engines.add("http://d:1", Role.DECODE)
        for answer in (
            front.ask({"input": "y", "previous_response_id": "resp_1"}, RESPONSES),
            front.ask({"input": "y", "background": True}, RESPONSES),
            front.get(f"{RESPONSES}/resp_1"),
            front.request("POST", f"{RESPONSES}/resp_1/cancel"),
        ):
            assert answer.status_code == 400 and "send the whole conversation" in answer.json()["error"]["message"]
        assert front.ask({"input": "y", "previous_response_id": None}, RESPONSES).status_code == 418 and len(seen) == 3


def test_a_rank_of_d_is_not_one_of_p(at_once: Served) -> None:
    at_once.ask({"prompt": "y"}, **{"x-data-parallel-rank": "3"})
    seen = [
        headers.get("x-data-parallel-rank") for each in (at_once.p, at_once.d) for *_, headers, _ in each.engine.seen
    ]
    assert seen == [None, None, None, "3"]


# --- Anthropic's API


def test_messages_go_through_both_legs_and_have_errors_of_their_form() -> None:
    import anthropic  # takes seconds of a core

    p, d = prefill_engine(), decode_engine(break_after=1)
    begun = b'event: content_block_delta\ndata: {"type": "content_block_delta"}\n\n'
    raw = RawEngine("D", b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n" + begun)
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    with routed(p, d) as front:
        assert front.ask(body, MESSAGES).json() == {"text": "from D"}
        assert p.seen[0][0]["max_tokens"] == 1 and p.seen[0][0]["stream"] is False
        assert d.seen[0][0] == body | {"kv_transfer_params": PARAMS}
        client = anthropic.Anthropic(base_url=front.url, api_key="x", max_retries=0)
        with pytest.raises(anthropic.APIStatusError):
            list(client.messages.create(**body, stream=True))
    with routed([], raw) as front:
        text = front.ask(body | {"stream": True}, MESSAGES).text
        assert text.startswith(begun.decode()) and '\n\nevent: error\ndata: {"type":"error","error":{' in text
    with routed([], [], limits=Limits(body_bytes=10)) as front:
        for path, asked, status in ((MESSAGES, {}, 503), (MESSAGES, body, 413), (MESSAGES + "/count_tokens", {}, 503)):
            answer = front.ask(asked, path)
            assert answer.status_code == status and answer.json()["type"] == "error" and answer.json()["error"]["type"]
