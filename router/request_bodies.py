"""The bodies of a request's two legs, and errors in OpenAI's form. Pure.

A body is taken apart into its members only: what a member holds is sent on as it came, so that an engine gets the
client's very bytes, and a value costs nothing, whatever its shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

import msgspec

SMALL_BYTES, WINDOW_BYTES = 64 << 10, 1 << 20
"""Bodies above the first size are taken apart off the event loop; above the second they are sent in pieces, and have to
be JSON by the standard."""
MAX_MEMBERS = 1000
MAX_COMMAS, MAX_COLONS = 8 << 20, 1 << 20
"""More than any context has tokens. They bound how long a body is read, during which no other thread runs, and what its
members take."""
Body = dict[str, Any]  # By name, each JSON as it came (``msgspec.Raw``), or what is to be encoded
NOT_JSON = (msgspec.DecodeError, RecursionError, ValueError)
"""What ``members`` and ``msgspec.json.decode`` raise for bytes that are no JSON. ValueError: they are not UTF-8."""
PREFILL_TAG: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""The six keys of ``kv_transfer_params`` by which vLLM's connectors know a prefill leg."""
KINDS = {
    401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError", 502: "BadGatewayError",
    503: "ServiceUnavailableError",
}  # fmt: skip
_NOT_FOR_P = {"stream_options", "min_tokens", "best_of", "prompt_logprobs", "echo"}
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
_NOT_HANDED_OVER = ("use_beam_search", "prompt_embeds", "prompt_logprobs", "previous_response_id", "background")
"""D's engine never asks P for the prompt of a request that has one of these, or computes the prompt itself."""
_NUMBER = re.compile(rb"null|-?\d+")
_PARAMS = re.compile(rb'"kv_transfer_params"\s*:\s*(?=\{)')
_OF_AN_ENGINE = {"remote_host", "do_remote_prefill", "handed_over"}
"""Parameters of an engine have one of these."""
_ONE_PROMPT: msgspec.json.Decoder[Any] = msgspec.json.Decoder(tuple[msgspec.Raw])
_MEMBERS: msgspec.json.Decoder[Body] = msgspec.json.Decoder(dict[str, msgspec.Raw])


def members(content: bytes | bytearray) -> Body | None:
    """The members of a JSON object; None: it is none, and an engine says so. What they hold an engine checks. Raises
    NOT_JSON: no honest client sends such a body."""
    try:
        form = json.detect_encoding(content)  # as vLLM's server reads it: with a BOM, or as UTF-16
        text = content if form == "utf-8" else content.decode(form).encode()
        if text.count(b",") > MAX_COMMAS or text.count(b":") > MAX_COLONS:
            raise ValueError(f"over {MAX_COMMAS} commas or {MAX_COLONS} colons")
        found: Body | None = _MEMBERS.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        if len(content) > WINDOW_BYTES:
            raise
        found = _as_vllm_reads(content)
    if found is not None and len(found) > MAX_MEMBERS:
        raise ValueError(f"over {MAX_MEMBERS} members")
    return found


def _as_vllm_reads(content: bytes | bytearray) -> Body | None:
    """As ``members``, with NaN and half an emoji. None only where vLLM's server fails too: it gets the very bytes, and
    a parameter that a client may not send must not hide in them."""
    try:
        value = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    if not isinstance(value, dict):
        return None
    "".join(value).encode()  # raises for a name of half an emoji
    return {name: msgspec.Raw(json.dumps(one).encode()) for name, one in value.items()}


def without(body: Body, names: Collection[str]) -> Body:
    """The body without these parameters, nor in ``vllm_xargs``, of which vLLM makes parameters. Raises NOT_JSON."""
    found = {name: value for name, value in body.items() if name not in names}
    inner = members(bytes(found["vllm_xargs"])) if "vllm_xargs" in found else None
    if inner is not None and not inner.keys().isdisjoint(names):
        found["vllm_xargs"] = msgspec.Raw(msgspec.json.encode(without(inner, names)))
    return found


def without_params(answer: bytes, *, report: bool = False) -> bytes:
    """An engine's answer, or events that end with all of it, with null for its ``kv_transfer_params``, which name
    hosts: as of a request that had none. ``report``: what became of the prompt stays."""
    for found in reversed(list(_PARAMS.finditer(answer))):  # in a text its quotes are escaped
        try:
            rest = answer[found.end() :].decode()
            params, end = json.JSONDecoder().raw_decode(rest)
        except NOT_JSON:
            return answer
        if not _OF_AN_ENGINE.isdisjoint(params):  # else of the client, such as a tool's schema
            kept = {name: params[name] for name in ("handed_over",) if report and name in params} or None
            return answer[: found.end()] + msgspec.json.encode(kept) + rest[end:].encode()
    return answer


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


def prefill_body(body: Body, path: str = "", params: dict[str, Any] = PREFILL_TAG, *, tokens: int = 1) -> Body:
    """The prefill leg of a request: one token, one choice, not streamed, with these ``kv_transfer_params``. Of no token
    it is a request that vLLM's server refuses, and whose lease its connector then releases."""
    leg = {name: value for name, value in body.items() if name not in _NOT_FOR_P}
    leg |= {"stream": False, "kv_transfer_params": params}
    if path == RESPONSES:
        return leg | {"max_output_tokens": tokens, "store": False}
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = tokens
    return leg | {"max_tokens": tokens, "n": 1}


def source_body(body: Body) -> Body:
    """A request of one token, of the model of ``body``, whose answer says where other engines can read from the one
    that answers."""
    model = {name: body[name] for name in ("model",) if name in body}
    return {**model, "prompt": [1], "max_tokens": 1, "kv_transfer_params": {"sources": []}}


def can_hand_over(body: Body, path: str) -> bool:
    """Whether D's engine would take a prompt from P: the request holds one prompt, whose log probabilities nobody
    wants, and D's server would not refuse it before."""
    if any(_given(body, name) for name in _NOT_HANDED_OVER) or (path == RESPONSES and _given(body, "tools")):
        return False
    if _given(body, "stream_options") and not _given(body, "stream"):
        return False
    if "n" in body and not _NUMBER.fullmatch(body["n"]):
        return False
    if _given(body, "echo") and (path == CHAT or _given(body, "logprobs")):
        return False
    prompt = body.get("prompt")
    if prompt is None or re.match(rb"[^\[]|\[\s*-?\d", _begin(prompt)):  # a text, or token ids
        return True
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


def is_estimate_of(tokens: float, usage: Any) -> bool:
    """Whether an engine that said its ``usage`` has computed about so many tokens: an image is large, but not long."""
    told = [usage.get(name) for name in ("prompt_tokens", "input_tokens")] if isinstance(usage, dict) else []
    return all(tokens / 4 <= one <= tokens * 4 for one in told if isinstance(one, int))


def error_of(status: int, message: str) -> dict[str, Any]:
    """An error as vLLM writes it."""
    kind = KINDS.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
