"""The router as its users see it: OpenAI's client, headers, metrics, the command."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from typer.testing import CliRunner

from kvferry.cli.main import app
from tests.router.stand_ins import PARAMS, Engine, Front, decode_engine, prefill_engine, routed, router_process
from tests.support.served import eventually

SECRET, UNBOUND = "user:secret", ("--host", "a..b")


def sse(event: dict[str, Any] | None) -> bytes:
    return b"data: " + (b"[DONE]" if event is None else json.dumps(event).encode()) + b"\n\n"


def chat_engine(tokens: int = 3) -> Engine:
    """Answers chats and completions in OpenAI's form, as P and as D."""

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        chat = request.url.path.endswith("/chat/completions")
        head = {"id": "1", "created": 1, "model": "m"}
        words = ["word "] * min(tokens, body.get("max_tokens") or tokens)
        usage = {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)}
        if body.get("stream"):
            kind = "chat.completion.chunk" if chat else "text_completion"
            parts = [{"delta": {"role": "assistant", "content": w}} if chat else {"text": w} for w in words]
            ends = [None] * (len(words) - 1) + ["stop"]
            choices = [{"index": 0, "finish_reason": end} | part for part, end in zip(parts, ends, strict=True)]
            events = [head | {"object": kind, "choices": [choice]} for choice in choices]
            return StreamingResponse((sse(event) for event in [*events, None]), media_type="text/event-stream")
        text = "".join(words)
        part = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        kind = "chat.completion" if chat else "text_completion"
        choice = {"index": 0, "finish_reason": "stop"} | part
        return JSONResponse(head | {"object": kind, "choices": [choice], "usage": usage, "kv_transfer_params": PARAMS})

    return Engine(answer)


def openais_client(front: Front) -> Any:
    import openai  # takes seconds of a core

    return openai.OpenAI(base_url=front.url + "/v1", api_key="key", max_retries=0)


def test_openais_client() -> None:
    p, d = chat_engine(), chat_engine()
    with routed(p, d) as front, openais_client(front) as client:
        assert client.completions.create(model="m", prompt="x").choices[0].text == "word " * 3
        messages: Any = [{"role": "user", "content": "x"}]
        chat = client.chat.completions.create(model="m", messages=messages)
        assert chat.choices[0].message.content == "word " * 3 and chat.usage is not None
        pieces = [c.choices[0].text for c in client.completions.create(model="m", prompt="x", stream=True, seed=1)]
        assert pieces == ["word "] * 3
        chunks = client.chat.completions.create(model="m", messages=messages, stream=True, seed=1)
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["word "] * 3
    assert len(p.seen) == len(d.seen) == 4
    assert {headers["authorization"] for _, headers, _ in p.seen + d.seen} == {"Bearer key"}


def test_the_trace_context_and_an_id_go_to_both_legs() -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    p, d = prefill_engine(), decode_engine()
    with routed(p, d) as front:
        headers = [*trace.items(), ("tracestate", "a=1"), ("tracestate", "b=2"), ("x-request-id", "mine")]
        answer = front.post(b'{"prompt": "x"}', headers=headers)
        made = [front.ask({"prompt": "x"}).headers["x-request-id"] for _ in range(2)]
    assert [headers["x-request-id"] for _, headers, _ in p.seen] == ["mine", *made] and len(set(made)) == 2
    assert answer.headers["x-request-id"] == "mine"
    for _, seen, _ in (p.seen[0], d.seen[0]):
        assert seen["traceparent"] == trace["traceparent"] and seen["tracestate"] == "a=1, b=2"
        assert seen["x-request-id"] == "mine"


def samples(front: Front) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(front.get("/metrics").text):
        for name, labels, value, *_ in family.samples:
            if labels.pop("le", "+Inf") == "+Inf":
                found[name + "".join(f"[{label}]" for _, label in sorted(labels.items()))] = value
    return found


def test_where_a_client_learns_the_urls_of_engines_is_in_security_md() -> None:
    said = (Path(__file__).parents[2] / "SECURITY.md").read_text()
    with routed(prefill_engine(), decode_engine()) as front:
        for path in ("/router/status", "/health", "/metrics"):
            assert f"`{path}`" in said and front.d[0] in front.get(path).text


def test_metrics_and_the_data_of_the_status_page() -> None:
    go_on = threading.Event()
    p, d = prefill_engine(), decode_engine(pieces=2, go_on=go_on)
    long = {"prompt": "x" * 5000}
    with routed(p, d) as front:
        front.ask(long), front.ask(long)
        front.post(b"[")
        with front.streaming(**long) as response:
            lines = response.iter_lines()
            next(lines)
            during, busy = samples(front), f"kvferry_router_engine_requests[decode][{front.d[0]}]"
            assert during["kvferry_router_in_flight"] == during[busy] == 1
            of_p = [f"kvferry_router_engine_{name}[prefill][{front.p[0]}]" for name in ("load", "requests")]
            assert during[of_p[0]] == during[of_p[1]] == 0, "D has loaded what it handed over"
            go_on.set()
            assert list(lines)
        after = samples(front)
        status = front.get("/router/status").json()
    assert after["kvferry_router_requests_total[200]"] == 3 and after["kvferry_router_requests_total[400]"] == 1
    assert after["kvferry_router_decode_legs_total[serial]"] == 3
    assert after["kvferry_router_request_seconds_count"] == after["kvferry_router_first_byte_seconds_bucket"] == 3
    assert after["kvferry_router_in_flight"] == after[busy] == 0
    unknown = status["engines"][1].pop("handed_over")
    assert not unknown["known"] and not any(unknown["prompts"].values()) and unknown["degraded"] is None
    assert status["engines"][1] == {
        "url": front.d[0], "role": "decode", "state": "up", "requests": 0, "load": 0.0, "passed_over": False,
    }  # fmt: skip


# --- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no decode engine is named"),
        (["--decode", "x"], "expected http://HOST:PORT"),
        (["--decode", "dns://x"], "expected dns://NAME:PORT"),
        (["--decode", "http://d:1", "--prefill", "http://d:1"], "name it once"),
        (["--decode", "http://d:1", "--host", "192.0.2.1"], "port 9000 of '192.0.2.1' cannot be bound: "),
        (["--decode", "http://d:1", "--host", "a..b"], "port 9000 of 'a..b' cannot be bound: it is no name of a host"),
        (["--engines-file", "/none"], "the engines file /none is not usable: No such file or directory"),
        (["--engines-file", "/dev/null"], "the engines file /dev/null is not usable: it names no engine"),
        (["--prefill-timeout", "-1"], "--prefill-timeout is -1, expected a number above 0"),
        (["--connect-timeout", "0"], "--connect-timeout is 0, expected a number above 0"),
        (["--abandoned-prefill-timeout", "inf"], "--abandoned-prefill-timeout is inf, expected a number above 0"),
        (["--health-interval", "inf"], "--health-interval is inf, expected a number above 0"),
        (["--otlp-traces-endpoint", "foo"], "--otlp-traces-endpoint is 'foo', expected a URL such as http://"),
        (["--decode", "dns://[x:1"], "expected dns://NAME:PORT"),
        (["--decode", f"http://{SECRET}@d:1", *UNBOUND], "the URL of engine 'd:1' has a user or a password"),
        (["--decode", f"http://{SECRET}/x@d:1", *UNBOUND], "the URL of engine 'd:1' has a user or a password"),
        (["--decode", f"{SECRET}@d:1", *UNBOUND], "the URL of engine 'd:1' has a user or a password"),
        (["--decode", f"dns://{SECRET}@d:1", *UNBOUND], "'d:1' names no engines; expected dns://NAME:PORT"),
        (["--otlp-traces-endpoint", f"ftp://{SECRET}@h"], "--otlp-traces-endpoint is 'h', expected a URL"),
        (["--otlp-traces-endpoint", "http://[h"], "--otlp-traces-endpoint is 'http://[h', expected a URL"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["router", *arguments])
    assert result.exit_code == 2 and said in result.output and len(result.output.splitlines()) == 1
    assert "secret" not in result.output


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_in_use_is_one_line(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        arguments = ["router", "--decode", "http://127.0.0.1:1", "--host", host, "--port", str(port)]
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and result.stderr == f"kvferry: port {port} of {host} is in use; give --port\n"


def test_the_command_says_where_it_serves(tmp_path: Path) -> None:
    (tmp_path / "engines").write_text("decode http://127.0.0.1:1\n")
    arguments = "--prefill", "http://127.0.0.1:2", "--engines-file", str(tmp_path / "engines")
    environment = {"KVFERRY_PLAN": "tcp"}
    with router_process(*arguments, stderr=subprocess.PIPE, environment=environment) as (site, process):
        assert process.stderr is not None
        first = next(process.stderr).decode()
        assert "WARNING KVFERRY_PLAN: no setting has this variable (did you mean 'KVFERRY_PLANE'?)" in first
        line = next(line for line in process.stderr if b"serving on" in line).decode()
        assert line.endswith(f"kvferry.router INFO serving on {site.url}: 1 P, 1 D\n")
        assert site.get("/health").status_code == 503


@pytest.mark.parametrize("level", ["debug", "info"])
def test_the_log_as_json_has_few_lines_that_requests_cause(level: str) -> None:
    """Of one place in the code and one reason: 10 in ten seconds."""
    p, d, asked = prefill_engine(params=None), decode_engine(), 60
    with p.running() as p_url, d.running() as d_url:
        options = "--prefill", p_url, "--decode", d_url, "--log-json", "--log-level", level
        with router_process(*options, stderr=subprocess.PIPE) as (site, process):
            eventually(lambda: site.healthy or process.poll(), "the router serves, or has ended")
            began = time.monotonic()
            assert {site.ask({"prompt": "x"}).status_code for _ in range(asked)} == {200}
            most = 10 * (1 + math.ceil((time.monotonic() - began) / 10))
            process.terminate()
            assert process.stderr is not None
            lines = [json.loads(line) for line in process.stderr]
    assert all(line.keys() == {"asctime", "name", "levelname", "message"} for line in lines)
    assert any(line["message"].startswith("serving on ") for line in lines)
    said = [line for line in lines if "handed nothing over" in line["message"]]
    assert {line["levelname"] for line in said} <= {"INFO"}
    assert len(said) in (range(asked, asked + 1) if level == "debug" else range(1, min(most, asked) + 1))
