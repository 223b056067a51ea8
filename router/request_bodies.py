"""Paths that the router knows, the bodies of a request's two legs, and errors in the form of an API.

A body is taken apart into its members only: what a member holds is sent on as it came, so that an engine gets the
client's very bytes, and a value costs nothing, whatever its shape.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
WITH_P = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
"""A POST to one of these gets a prefill leg. Each other request goes to a D as it came."""
_CHANGES = re.compile(
    r"(?<![\w.-])(abort_requests|adapters|collective_rpc|fault_tolerance|finish_weight_update|"
    r"init_weight_transfer_engine|load_lora_adapter|pause|release_kv_cache_memory|reset_(prefix|mm|encoder)_cache|"
    r"resume|scale_elastic_ep|shutdown_weight_transfer_engine|sleep|start_(draft_)?weight_update|st(art|op)_profile|"
    r"unload_lora_adapter|update_weight_version|update_weights|wake_up|weight_checker)(?![\w.-])"
)
"""Parts of paths by which vLLM's server changes an engine. ``tests/vllm/test_wiring.py`` compares them with it."""
SMALL_BYTES, WINDOW_BYTES = 64 << 10, 1 << 20
"""Bodies above the first size are taken apart off the event loop; above the second they are sent in pieces, and have to
be JSON by the standard."""
MAX_MEMBERS = 1000
MAX_COMMAS, MAX_COLONS = 8 << 20, 1 << 20
"""More than any context has tokens. They bound how long a body is read, during which no other thread runs, and what its
members take."""
T = TypeVar("T")
Content = TypeVar("Content", bytes, bytearray)
Body = dict[str, Any]  # By name, each JSON as it came (``msgspec.Raw``), or what is to be encoded
NOT_JSON = (msgspec.DecodeError, RecursionError, ValueError)
"""What ``members`` and ``msgspec.json.decode`` raise for bytes that are no JSON. ValueError: they are not UTF-8."""
PREFILL_TAG: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""The six keys of ``kv_transfer_params`` by which vLLM's connectors know a prefill leg."""
NEVER_SENT = ("kv_transfer_params", "ec_transfer_params")  # They name hosts that an engine would connect to
KINDS = {
    401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError", 502: "BadGatewayError",
    503: "ServiceUnavailableError",
}  # fmt: skip
_NOT_FOR_P = {"stream_options", "min_tokens", "best_of", "prompt_logprobs", "echo"}
_NOT_HANDED_OVER = ("use_beam_search", "prompt_embeds", "prompt_logprobs", "previous_response_id", "background")
"""D's engine never asks P for the prompt of a request that has one of these, or computes the prompt itself."""
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
    """The body without these parameters, nor in ``vllm_xargs``, of which vLLM makes parameters; its own values are
    texts, numbers and lists of these. Raises NOT_JSON."""
    found = {name: value for name, value in body.items() if name not in names}
    inner = members(bytes(found["vllm_xargs"])) if "vllm_xargs" in found else None
    if inner is not None and not inner.keys().isdisjoint(names):
        kept = {name: value for name, value in inner.items() if name not in names}
        found["vllm_xargs"] = msgspec.Raw(msgspec.json.encode(kept))
    return found


def changes_engine(path: str) -> bool:
    """Whether an engine, or a proxy before it, may read this path as one that changes an engine, whatever prefix it
    has and however it is written."""
    for _ in range(3):
        path = unquote(path)
    return _CHANGES.search(path.lower()) is not None


class HostNames:
    """Looks for NEVER_SENT in a body that is passed on in pieces: as the name of a JSON member that is not null, at any
    depth, with escapes, as UTF-8 or UTF-16, also in a field of a form."""

    _name = rb'"(?:%b)":[^n]' % b"|".join(
        b"".join(rb"(?:%c|\\u00%02x)" % (letter, letter) for letter in name.encode()) for name in NEVER_SENT
    )
    _find, _longest = re.compile(_name, re.IGNORECASE).search, 6 * max(map(len, NEVER_SENT)) + 4

    def __init__(self) -> None:
        self._tail = b""

    def found(self, piece: bytes) -> bool:
        text = self._tail + piece.translate(None, b"\0 \t\r\n")
        self._tail = text[-self._longest :]
        return self._find(text) is not None


async def off_loop(content: Content, work: Callable[[Content], T]) -> T:
    """What ``work`` makes of a body. Others do not wait for a large one."""
    return work(content) if len(content) <= SMALL_BYTES else await asyncio.to_thread(work, content)


def pieces_of(body: Body) -> list[bytes | msgspec.Raw]:
    """The body as JSON, without a copy of what is large."""
    pieces: list[bytes | msgspec.Raw] = [b"{"]
    for name, value in body.items():
        pieces.append((b"," if len(pieces) > 1 else b"") + msgspec.json.encode(name) + b":")
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
    return leg | {"max_tokens": 1, "n": 1}


def small_body(body: Body, params: dict[str, Any], tokens: int) -> Body:
    """A completion of one prompt token, of the model of ``body``. Of no token it is one that vLLM's server refuses, and
    whose lease its connector then releases."""
    model = {name: body[name] for name in ("model",) if name in body}
    return {**model, "prompt": [1], "max_tokens": tokens, "kv_transfer_params": params}


def can_hand_over(body: Body, path: str) -> bool:
    """Whether D's engine would take a prompt from P: the request holds one prompt, whose log probabilities nobody
    wants."""
    if any(given(body, name) for name in _NOT_HANDED_OVER) or (path == RESPONSES and given(body, "tools")):
        return False
    if path == MESSAGES and "max_tokens" not in body:  # D refuses it, and says what it has been sent
        return False
    if given(body, "echo") and (path == CHAT or given(body, "logprobs")):
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


def given(body: Body, name: str) -> bool:
    """Whether a parameter is neither null nor false."""
    value = body.get(name)
    return value is not None and _begin(value).rstrip() not in (b"null", b"false")


def error_of(status: int, message: str, path: str = "") -> dict[str, Any]:
    """An error as vLLM writes it: on the path of Anthropic's API in Anthropic's form, elsewhere in OpenAI's."""
    kind = KINDS.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    if path.startswith(MESSAGES):
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
