"""The command ``kvferry check``: sends a prompt through a router, or to two engines, and says whether D loaded it from
P, or why not."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import msgspec

from kvferry.cli.metrics_page import PageError, read, server_url
from kvferry.cli.terminal import FailedError, parsed_json
from kvferry.router.request_bodies import PREFILL_TAG, Body
from kvferry.transport.errors import NO_PARAMS, NO_REPORT, UsageError, quoted, what_to_do

PROMPT_TOKENS = 512
"""Unless the model takes fewer. ``kvferry router`` hands such a prompt over in any case."""
TOKEN_IDS = range(100, 228)
"""Each vocabulary has these. A prompt of random ones is in no prefix cache."""


class DecodeReport(msgspec.Struct):
    """What a decode engine says of one prompt. ``milliseconds``: of the hand-over. ``peer``: its name for P."""

    result: Literal["loaded", "local", "failed"]
    reason: str = ""
    tokens: int = 0
    plane: str | None = None
    milliseconds: float | None = None
    peer: str | None = None


class CheckResult(msgspec.Struct):
    """``handed_over``: the prompt was loaded from a P. ``said``: one line. ``todo``: what to do where it was not.
    ``prefill``, ``decode``: URLs, where they are known. ``seconds``: of the request."""

    handed_over: bool
    said: str
    todo: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    prefill: str = ""
    decode: str = ""
    seconds: float | None = None
    report: DecodeReport | None = None


class _Server:
    """An HTTP server with a key, and when all requests to it have to end. ``name``: of its prompts."""

    def __init__(self, url: str, api_key: str, end: float, name: str) -> None:
        self.url, self._key, self._end, self._name = server_url(url), api_key, end, name

    def get(self, path: str) -> Any:
        """Raises PageError: as ``read``, or it is no JSON."""
        return self._asked(path, None)[1]

    def complete(self, body: Body) -> tuple[Mapping[str, str], Any]:
        """Raises FailedError: there is no answer."""
        with _answering(self):
            return self._asked("/v1/completions", json.dumps(body).encode())

    def _asked(self, path: str, data: bytes | None) -> tuple[Mapping[str, str], Any]:
        headers = {"Content-Type": "application/json", "X-KVFerry-Check": "1", "X-Request-Id": self._name}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            answered, body = read(self.url + path, max(0.1, self._end - time.monotonic()), data, headers)
        except PageError as error:
            if error.status in (401, 403):
                raise UsageError(f"{self.url} wants a key (HTTP {error.status}): --api-key or VLLM_API_KEY") from None
            raise
        try:
            return answered, parsed_json(body)
        except ValueError as error:
            raise PageError(f"its answer to {path} is no JSON: {error}") from None


def check(urls: Sequence[str], *, model: str, timeout: float, api_key: str) -> CheckResult:
    """What became of one prompt. ``urls``: of a ``kvferry router``, or of a P and of a D. Raises UsageError: an
    argument is not usable; FailedError: there is no answer. Both are one line."""
    if len(urls) > 2:
        raise UsageError(
            f"{len(urls)} URLs; give that of a kvferry router, or those of one prefill and one decode engine"
        )
    end, name = time.monotonic() + timeout, f"check-{uuid.uuid4().hex}"
    servers, models = [_Server(url, api_key, end, name) for url in urls], []
    for server in servers:
        with _answering(server):
            if _is_router(server) != (len(servers) == 1):
                to_do = "is a kvferry router: give its URL alone"
                if len(servers) == 1:
                    to_do = "is no kvferry router; give two engines as kvferry check PREFILL_URL DECODE_URL"
                raise UsageError(f"{server.url} {to_do}")
            models.append(_model(server, model))
    tokens = min(PROMPT_TOKENS, *(max(2, most // 2) for _, most in models))
    prompt = [secrets.choice(TOKEN_IDS) for _ in range(tokens)]
    asked = [{"model": named, "prompt": prompt, "max_tokens": 1, "temperature": 0} for named, _ in models]
    began = time.monotonic()
    if len(servers) == 2:
        headers, answer = _both_legs(servers[0], servers[1], asked[0], asked[1])
    else:
        headers, answer = servers[0].complete(asked[0])
    result = of_answer(headers, answer, tokens)
    result.seconds = round(time.monotonic() - began, 3)
    return result


def _both_legs(p: _Server, d: _Server, first: Body, second: Body) -> tuple[Mapping[str, str], Any]:
    """D's answer, and the headers that a router makes, from one leg after the other."""
    said = {"x-kvferry-prefill": p.url, "x-kvferry-decode": d.url}
    params = _inside(p.complete(first | {"kv_transfer_params": PREFILL_TAG})[1], "kv_transfer_params")
    if not isinstance(params, dict) or not params:
        return said | {"x-kvferry-alone": f"prefill engine {p.url} handed nothing over: {NO_PARAMS}"}, None
    params = {name: value for name, value in params.items() if name != "source"} | {"report": True}
    return said, d.complete(second | {"kv_transfer_params": params})[1]


@contextmanager
def _answering(server: _Server) -> Iterator[None]:
    """Raises FailedError: the server gives no answer."""
    try:
        yield
    except PageError as error:
        raise FailedError(f"{server.url} gives no answer to the check: {_why(error)}") from None


def _why(error: PageError) -> str:
    """With what the server says in its answer, in one line."""
    try:
        said = msgspec.convert(parsed_json(error.body)["error"]["message"], str)
    except (ValueError, KeyError, TypeError, msgspec.ValidationError):
        return f"{error}; is it started?" if error.gone else str(error)
    return f"{error}: {_plain(said)}"


def _plain(text: str) -> str:
    """A text of a server, in one line without a terminal's escapes."""
    return ascii(text)[1:-1][:300]


def _is_router(server: _Server) -> bool:
    """Whether it is ``kvferry router``. Raises PageError: nobody answers."""
    try:
        return _inside(server.get("/router/status"), "engines") is not None
    except PageError as error:
        if not error.status and "no JSON" not in str(error):
            raise
        return False


def _model(server: _Server, model: str) -> tuple[str, int]:
    """The model that is asked, and the most tokens that it takes. Raises UsageError: there is none of this name."""
    try:
        found = server.get("/v1/models")
        models = {str(one["id"]): one.get("max_model_len") for one in found["data"]}
    except (PageError, KeyError, TypeError, AttributeError) as error:
        if not model:
            why = _why(error) if isinstance(error, PageError) else "it is another form"
            raise FailedError(f"{server.url} names no model at /v1/models: {why}; is a decode engine up?") from None
        models = {model: None}
    if model and model not in models:
        raise UsageError(f"{server.url} has no model {quoted(model)}; it has {quoted(', '.join(models))}")
    if not models:
        raise FailedError(f"{server.url} has no model")
    named = model or next(iter(models))
    most = models[named]
    return named, most if isinstance(most, int) else 2 * PROMPT_TOKENS


def _inside(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def of_answer(headers: Mapping[str, str], answer: Any, tokens: int) -> CheckResult:
    """What D's answer says of a prompt of so many tokens."""
    prefill, decode, alone = (_plain(headers.get(f"x-kvferry-{name}", "")) for name in ("prefill", "decode", "alone"))
    result = CheckResult(False, "", prompt_tokens=tokens, prefill=prefill, decode=decode)
    d, p = f"decode engine {decode}".rstrip(), f"prefill engine {prefill}".rstrip()
    with suppress(msgspec.ValidationError):
        result.report = msgspec.convert(_inside(answer, "kv_transfer_params", "handed_over"), DecodeReport)
    if (report := result.report) is not None:
        result.handed_over, result.tokens = report.result == "loaded", report.tokens
        if result.handed_over:
            took = "" if report.milliseconds is None else f" in {report.milliseconds:.1f} ms"
            over = f" over {_plain(report.plane)}" if report.plane else ""
            result.said = f"handed over: {d} loaded {report.tokens} of {tokens} prompt tokens from {p}{over}{took}"
        else:
            how = "could not load the prompt from" if report.result == "failed" else "did not ask for the prompt at"
            result.said = f"not handed over: {d} {how} {p}: {_plain(report.reason)}"
            result.todo = what_to_do(report.reason)
    elif alone:
        result.said, result.todo = f"not handed over: {alone}", "look at its log, and at /health of a router"
    else:
        result.said = f"not handed over: the answer of {d} says nothing of it"
        result.todo = NO_REPORT
    return result
