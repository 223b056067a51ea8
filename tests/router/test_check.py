"""``kvferry check`` through a router, before other servers, and its user's mistakes, one line each."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from typer.testing import CliRunner, Result

from kvferry.cli import check as check_module
from kvferry.cli.check import PROMPT_TOKENS
from kvferry.cli.main import app
from kvferry.connector.wire.metrics import FAILURE_KINDS, PROMPT_ENDS
from kvferry.router.request_bodies import PREFILL_TAG
from kvferry.transport.errors import NO_PARAMS, NO_REPORT, TO_DO, what_to_do
from tests.router.stand_ins import (
    PARAMS,
    Engine,
    RawEngine,
    Served,
    decode_engine,
    gone,
    prefill_engine,
    routed,
    served,
)

LOADED = {
    "result": "loaded", "reason": "", "tokens": 511, "plane": "cma", "milliseconds": 3.14159, "peer": "p-0",
}  # fmt: skip


def reporting(said: Any = LOADED, usage: Any = None, status: int = 200) -> Engine:
    """A D that says this of each prompt for which it is asked to."""

    async def answer(request: Request, body: dict[str, Any]) -> Response:
        if status != 200:
            return JSONResponse({"error": {"message": "no\nway", "code": status}}, status)
        params = body.get("kv_transfer_params") or {}
        told = {"kv_transfer_params": {"handed_over": said}} if params.get("report") is True else {}
        return JSONResponse({"choices": [], "usage": usage} | told)

    return Engine(answer)


def check(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["check", *arguments], env={"VLLM_API_KEY": ""})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_prompt_that_is_handed_over() -> None:
    p, d = prefill_engine(), reporting()
    with routed(p, d) as front:
        first, second = check(front.url), check(front.url + "/v1", "--json", "--model", "m", "--api-key", "k")
        plain = front.ask({"prompt": "x"})
        (p_url,), (d_url,) = front.p, front.d
    assert first.exit_code == second.exit_code == 0
    of = f"decode engine {d_url} loaded 511 of 512 prompt tokens from prefill engine {p_url} over cma in 3.1 ms"
    assert first.stdout == f"handed over: {of}\n"
    found = json.loads(second.stdout)
    assert found["handed_over"] and found["report"] == LOADED and found["tokens"] == 511
    assert (found["prefill"], found["decode"]) == (p_url, d_url) and found["seconds"] > 0
    (one, _, _), (other, headers, _), (asked, _, _) = d.seen
    assert len(one["prompt"]) == PROMPT_TOKENS and one["prompt"][:16] != other["prompt"][:16]
    assert headers["authorization"] == "Bearer k" and p.seen[1][1]["authorization"] == "Bearer k"
    assert "report" not in asked["kv_transfer_params"] and "report" not in p.seen[0][0]["kv_transfer_params"]
    assert not [name for name in plain.headers if name.startswith("x-kvferry")] and plain.json() == {
        "choices": [], "usage": None,
    }  # fmt: skip


def test_where_both_legs_are_sent_at_once(at_once: Served) -> None:
    at_once.d.answer = lambda body: JSONResponse(
        {"kv_transfer_params": {"handed_over": LOADED} if body["kv_transfer_params"].get("report") else None}
    )
    assert check(at_once.url).exit_code == 0
    assert (at_once.d.params[-1] or {})["transfer_id"]


@pytest.mark.parametrize(
    "reason",
    [
        "key", "wrong_role", "no_p_named", "incompatible", "other_release", "plane", "unreachable", "timeout",
        "not_allowed", "expired", "one of a later release",
    ],
)  # fmt: skip
def test_each_reason_of_d_is_named_with_what_to_do(reason: str) -> None:
    result = "failed" if reason in FAILURE_KINDS else "local"
    with routed(prefill_engine(), reporting(LOADED | {"result": result, "reason": reason})) as front:
        found = check(front.url)
    assert found.exit_code == 1 and found.stdout.startswith("not handed over: ") and f": {reason}\n" in found.stdout
    assert what_to_do(reason) in found.stdout and found.stdout.count("\n") == 2


def test_there_is_something_to_do_about_every_reason() -> None:
    assert TO_DO.keys() == {reason for _, reason in PROMPT_ENDS if reason}


@pytest.mark.parametrize(
    ("p", "words"),
    [
        ([], "no prefill engine takes requests"),
        (gone, "failed: no connection"),
        (lambda: RawEngine("prefill", b"HTTP/1.1 200 OK\r\nno header\r\n\r\n"), "failed: "),  # several lines of aiohttp
        (lambda: prefill_engine(status=500), "answered 500"),
        (lambda: prefill_engine(params=None), "start it with KVFerryConnector, as kv_both or kv_producer"),
    ],
)
def test_p_hands_nothing_over(p: Any, words: str) -> None:
    with routed(p() if callable(p) else p, reporting()) as front:
        found = check(front.url)
    assert found.exit_code == 1 and words in found.stdout and found.stdout.count("\n") == 2


def test_a_d_that_says_nothing_of_it() -> None:
    with routed(prefill_engine(), decode_engine()) as front:
        found = check(front.url)
    assert found.exit_code == 1 and "start it with KVFerryConnector" in found.stdout


def test_a_small_model_and_a_text_that_is_none_of_a_terminal() -> None:
    d = reporting(LOADED | {"plane": "\x07" + 1000 * "x"})
    d.models = [{"id": "m", "max_model_len": 64}]
    with routed(prefill_engine(), d) as front:
        found = check(front.url)
    assert found.exit_code == 0 and "511 of 32 prompt tokens" in found.stdout and len(d.seen[0][0]["prompt"]) == 32
    assert found.stdout.count("\n") == 1 and "\x07" not in found.stdout and len(found.stdout) < 600


def test_all_its_requests_have_one_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = [0.0], list[float]()

    def read(url: str, seconds: float, *_: object) -> tuple[dict[str, str], bytes]:
        left.append(seconds)
        now[0] += 25.0
        return {}, b'{"engines": [], "data": [{"id": "m"}]}'

    monkeypatch.setattr(check_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(check_module, "read", read)
    assert check("http://127.0.0.1:9").exit_code == 1 and left == [60.0, 35.0, 10.0]


def test_an_answer_that_is_no_json() -> None:
    async def answer(request: Request, body: dict[str, Any]) -> Response:
        return Response("no")

    with routed(prefill_engine(), Engine(answer)) as front:
        found = check(front.url)
    assert found.exit_code == 1 and "its answer to /v1/completions is no JSON" in found.stderr


@pytest.mark.parametrize(
    "said", [{"result": "loaded", "tokens": "x", "plane": 7, "peer": None}, "x", {"result": []}, [1]]
)
def test_a_report_of_another_form_ends_without_a_traceback(said: Any) -> None:
    with routed(prefill_engine(), reporting(said)) as front:
        assert check(front.url).exit_code in (0, 1)


def test_two_engines_are_asked_as_any_router_asks_them() -> None:
    p, d = prefill_engine(params=PARAMS | {"source": {"host": "p"}}), reporting()
    d.models = [{"id": "as-d-names-it", "max_model_len": 64}]
    with p.running() as p_url, d.running() as d_url:
        found = check(p_url, d_url, "--api-key", "k")
    of = f"decode engine {d_url} loaded 511 of 32 prompt tokens from prefill engine {p_url} over cma in 3.1 ms"
    assert (found.exit_code, found.stdout) == (0, f"handed over: {of}\n"), found.output
    ((first, of_first, _),), ((second, of_second, _),) = p.seen, d.seen
    assert first["kv_transfer_params"] == PREFILL_TAG and second["kv_transfer_params"] == PARAMS | {"report": True}
    assert first["prompt"] == second["prompt"] and (first["model"], second["model"]) == ("m", "as-d-names-it")
    assert of_first["x-request-id"] == of_second["x-request-id"] and of_second["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("p", "d", "status", "words"),
    [
        (prefill_engine, lambda: reporting(LOADED | {"result": "failed", "reason": "key"}), 1, what_to_do("key")),
        (prefill_engine, decode_engine, 1, NO_REPORT),
        (lambda: prefill_engine(params=None), reporting, 1, f"handed nothing over: {NO_PARAMS}"),
        (lambda: prefill_engine(status=500), reporting, 1, "gives no answer to the check: HTTP 500"),
        (prefill_engine, lambda: reporting(status=401), 2, "wants a key"),
    ],
)
def test_what_two_engines_lack_is_said(p: Any, d: Any, status: int, words: str) -> None:
    with p().running() as p_url, d().running() as d_url:
        found = check(p_url, d_url)
    assert found.exit_code == status and words in found.output and (p_url in found.output or d_url in found.output)
    assert found.output.count("\n") == (1 if found.stderr else 2)


def test_one_engine_three_urls_or_a_router_among_two_are_refused() -> None:
    with routed(prefill_engine(), reporting()) as front, decode_engine().running() as url:
        for urls, words in (
            ([url], f"{url} is no kvferry router; give two engines as kvferry check PREFILL_URL DECODE_URL"),
            ([url, front.url], f"{front.url} is a kvferry router: give its URL alone"),
            ([url] * 3, "3 URLs; give that of a kvferry router, or"),
        ):
            found = check(*urls)
            assert found.exit_code == 2 and words in found.stderr and found.stderr.count("\n") == 1


def test_a_key_follows_no_redirection() -> None:
    keys = list[str | None]()

    def take(request: Request) -> Response:
        keys.append(request.headers.get("authorization"))
        return JSONResponse({"engines": []})

    with served(Starlette(routes=[Route("/{path:path}", take)])) as other:
        redirect = Route("/{path:path}", lambda request: RedirectResponse(other + request.url.path))
        with served(Starlette(routes=[redirect])) as url:
            found = check(url, "--api-key", "secret")
    assert found.exit_code == 2 and not keys


WRONG: list[tuple[tuple[str, ...], int, str]] = [
    (("",), 2, "expected http://HOST:PORT"),
    (("http://user:secret@h:1",), 2, "expected http://HOST:PORT"),
    (("http://a..b:1",), 2, "'http://a..b:1' is no URL of an engine"),
    ((gone(),), 1, "gives no answer to the check: no connection: Connection refused; is it started?"),
    (("http://127.0.0.1:9", "--timeout", "0"), 2, "--timeout"),
]


@pytest.mark.parametrize(("arguments", "status", "words"), WRONG)
def test_wrong_input_is_one_line(arguments: tuple[str, ...], status: int, words: str) -> None:
    found = check(*arguments)
    assert found.exit_code == status and words in found.stderr and "secret" not in found.output
    assert found.stderr.count("\n") == 1 or "--timeout" in arguments


def test_a_model_that_there_is_not_a_key_that_is_needed_and_errors_of_d() -> None:
    with routed(prefill_engine(), reporting()) as front:
        found = check(front.url, "--model", "x")
        assert found.exit_code == 2 and "has no model 'x'; it has 'm'" in found.stderr
    for status, code, words in (
        (401, 2, "wants a key"),
        (403, 2, "wants a key"),
        (500, 1, "HTTP 500"),
        (404, 1, "HTTP 404"),
    ):
        with routed(prefill_engine(), reporting(status=status)) as front:
            found = check(front.url)
        assert found.exit_code == code and words in found.stderr and found.stderr.count("\n") == 1
    with routed([], []) as front:
        found = check(front.url)
        assert found.exit_code == 1 and "no decode engine takes requests" in found.stderr
