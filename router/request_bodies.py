"""The bodies of a request's two legs, and errors in OpenAI's form. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

NOT_JSON = (msgspec.DecodeError, RecursionError, ValueError)
"""What ``msgspec.json.decode`` raises for bytes that are no JSON. ValueError: they are not UTF-8."""
PREFILL_TAG: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The six keys of ``kv_transfer_params`` by which vLLM's connectors know a prefill leg."""
KINDS = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "BadRequestError", 413: "BadRequestError", 429: "RateLimitError", 500: "InternalServerError",
    502: "BadGatewayError", 503: "ServiceUnavailableError",
}  # fmt: skip


def prefill_body(body: dict[str, Any], params: dict[str, Any] | None = PREFILL_TAG) -> dict[str, Any]:
    """The prefill leg of a request: one token, one choice, not streamed, with these ``kv_transfer_params``."""
    leg = {k: v for k, v in body.items() if k not in ("stream_options", "min_tokens", "best_of", "use_beam_search")}
    leg |= {"stream": False, "max_tokens": 1, "n": 1}
    if params is not None:
        leg["kv_transfer_params"] = dict(params)
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg


def without_params(body: dict[str, Any]) -> dict[str, Any]:
    """D's leg without a hand-over: D prefills by itself."""
    return {name: value for name, value in body.items() if name != "kv_transfer_params"}


def can_hand_over(body: dict[str, Any]) -> bool:
    """Whether the request holds one prompt; one set of parameters cannot name several."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int)):
        return True
    return len(prompt) == 1


def error_of(status: int, message: str) -> dict[str, Any]:
    """An error as vLLM writes it."""
    kind = KINDS.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
