"""The bodies of a request's two legs, and errors in OpenAI's form. Pure.

A body is taken apart into its members only: what a member holds is sent on as it came, so that an engine gets the
client's very bytes, and a value costs nothing, whatever its shape.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

SMALL_BYTES, WINDOW_BYTES = 64 << 10, 1 << 20
"""Bodies above the first size are taken apart off the event loop; above the second they are sent in pieces."""
AT_ONCE_BYTES = 16 << 20
"""A body of up to that size msgspec takes apart in one call, in 40 ms; no other thread runs meanwhile."""
MAX_MEMBERS, MAX_BRACKETS, MAX_DEPTH = 1000, 1 << 20, 512
"""Of a large body. An image has no brackets, and a conversation some for each message."""
Body = dict[str, Any]
"""By name, each JSON as it came (``msgspec.Raw``), or what is to be encoded."""
NOT_JSON = (msgspec.DecodeError, RecursionError, ValueError)
"""What ``members`` and ``msgspec.json.decode`` raise for bytes that are no JSON. ValueError: they are not UTF-8."""
PREFILL_TAG: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""The six keys of ``kv_transfer_params`` by which vLLM's connectors know a prefill leg."""
KINDS = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "BadRequestError", 413: "BadRequestError", 429: "RateLimitError", 500: "InternalServerError",
    502: "BadGatewayError", 503: "ServiceUnavailableError",
}  # fmt: skip
RESPONSES = "/v1/responses"
_ONCE = {"max_tokens": 1, "n": 1}
_NOT_FOR_P = {"stream_options", "min_tokens", "best_of", "prompt_logprobs", "echo", "logprobs", "top_logprobs"}
_NOT_HANDED_OVER = ("use_beam_search", "prompt_embeds", "prompt_logprobs", "previous_response_id", "background")
"""D's engine never asks P for the prompt of a request that has one of these, or computes the prompt itself."""
_NUMBER = re.compile(rb"null|-?\d+")
_ONE_PROMPT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(tuple[msgspec.Raw])
_MEMBERS: msgspec.json.Decoder[Body] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SPACE, _COLON = re.compile(rb"[ \t\r\n]*+"), re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
_STRING = re.compile(rb'(?s:[^"\\]++|\\.)*+')
_NESTED, _FLAT = re.compile(rb'[^"\[\]{}]*+'), re.compile(rb'[^"\[\]{},]*+')


def members(content: bytes | bytearray) -> Body:
    """The members of a JSON object. What they hold an engine checks.

    Raises:
        NOT_JSON: it is none.
    """
    form = json.detect_encoding(content)  # as vLLM's server reads it: with a BOM, or as UTF-16
    if form != "utf-8":
        content = content.decode(form).encode()
    brackets = content.count(b"[") + content.count(b"{")  # those in texts too, which do no harm
    if len(content) <= AT_ONCE_BYTES and brackets <= MAX_BRACKETS:
        try:
            found: Body = _MEMBERS.decode(content)
            if len(found) <= MAX_MEMBERS:
                return found
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # half an emoji, say: an engine has its own error for it
            pass
    return _taken_apart(content)


def _taken_apart(content: bytes | bytearray) -> Body:
    found: Body = {}
    brackets = 0

    def run(pattern: re.Pattern[bytes], at: int) -> int:
        """The end of a run: each call is short, so that other threads go on."""
        while (end := pattern.match(content, at, at + WINDOW_BYTES).end()) == at + WINDOW_BYTES:  # type: ignore[union-attr]
            at = end
        return end

    def string(at: int) -> int:
        """The end of the string whose content begins here."""
        while content[at : at + 1] not in (b'"', b""):
            at = run(_STRING, at)
            if content[at : at + 1] == b"\\":  # cut by a window
                at += 2
        return at + 1

    def value(at: int) -> int:
        """The end of the value that begins here."""
        nonlocal brackets
        depth = 0
        while True:
            at = run(_NESTED if depth else _FLAT, at)
            one = content[at : at + 1]
            if one == b"" or (depth == 0 and one in b",]}"):
                return at
            if one == b'"':
                at = string(at + 1)
                continue
            depth += 1 if one in b"[{" else -1
            brackets += 1
            if brackets > MAX_BRACKETS or depth > MAX_DEPTH:
                raise ValueError(f"over {MAX_BRACKETS} brackets, or over {MAX_DEPTH} within each other")
            at += 1

    at = run(_SPACE, 0)
    if content[at : at + 1] != b"{":
        raise ValueError("it does not begin with {")
    at = run(_SPACE, at + 1)
    while content[at : at + 1] == b'"' or found:
        name_at, at = at, string(at + 1)
        colon = _COLON.match(content, at)
        if colon is None or len(found) == MAX_MEMBERS:
            raise ValueError(f"no member at byte {at}, or over {MAX_MEMBERS} of them")
        end = value(colon.end())
        name = msgspec.json.decode(content[name_at:at], type=str)
        found[name] = msgspec.Raw(memoryview(content)[colon.end() : end])
        at = end
        if content[at : at + 1] != b",":
            break
        at = run(_SPACE, at + 1)
    if content[at : at + 1] != b"}" or run(_SPACE, at + 1) != len(content):
        raise ValueError(f"no end of the object at byte {at}")
    return found


def encoded(body: Body) -> bytes | None:
    """The body as JSON; None where it is large: see ``pieces_of``."""
    size = sum(len(value) for value in body.values() if isinstance(value, msgspec.Raw))
    return None if size > WINDOW_BYTES else msgspec.json.encode(body)


def pieces_of(body: Body) -> list[bytes | msgspec.Raw]:
    """The body as JSON, without a copy of what is large."""
    pieces: list[bytes | msgspec.Raw] = []
    for name, value in body.items():
        pieces.append((b"," if pieces else b"{") + msgspec.json.encode(name) + b":")
        pieces.append(value if isinstance(value, msgspec.Raw) else msgspec.json.encode(value))
    return [*pieces, b"}"]


def prefill_body(body: Body, path: str = "", params: dict[str, Any] = PREFILL_TAG) -> Body:
    """The prefill leg of a request: one token, one choice, not streamed, with these ``kv_transfer_params``."""
    leg = {name: value for name, value in body.items() if name not in _NOT_FOR_P}
    leg |= {"stream": False, "kv_transfer_params": params}
    if path == RESPONSES:
        return leg | {"max_output_tokens": 1, "store": False}
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg | _ONCE


def without_params(body: Body) -> Body:
    """D's leg without a hand-over: D prefills by itself."""
    return {name: value for name, value in body.items() if name != "kv_transfer_params"}


def can_hand_over(body: Body, path: str) -> bool:
    """Whether D's engine would take a prompt from P: the request holds one prompt, whose log probabilities nobody
    wants, and D's server would not refuse it before."""
    if any(_given(body, name) for name in _NOT_HANDED_OVER) or (path == RESPONSES and _given(body, "tools")):
        return False
    if _given(body, "stream_options") and not _given(body, "stream"):
        return False
    if "n" in body and not _NUMBER.fullmatch(body["n"]):
        return False
    if _given(body, "echo") and _given(body, "logprobs"):
        return False
    prompt = body.get("prompt")
    if prompt is None or not _begin(prompt).startswith(b"["):
        return True
    if re.match(rb"\[\s*-?\d", _begin(prompt)):
        return True  # token ids
    try:
        _ONE_PROMPT.decode(prompt)
    except NOT_JSON:
        return False
    return True


def _begin(value: Any) -> bytes:
    return bytes(memoryview(value)[:64])


def _given(body: Body, name: str) -> bool:
    value = body.get(name)
    return value is not None and _begin(value).rstrip() not in (b"null", b"false")


def error_of(status: int, message: str) -> dict[str, Any]:
    """An error as vLLM writes it."""
    kind = KINDS.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
