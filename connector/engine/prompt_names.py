"""The names by which D may ask for a prompt before it knows the token of its lease. Pure.

A router that sends both legs of a request at once gives both the same ``transfer_id``, or names the request id of P's
leg in ``remote_request_id``. vLLM adds a prefix and a random suffix to the request id that it gets. A client may choose
an id that gives its prompt the name of another: P keeps the first, and D compares the prompt before it loads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TRANSFER_ID = "transfer_id"
_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,256}")
_RANDOM = re.compile(r"-[0-9a-fA-F]{8}\Z")
"""vLLM's ``assign_request_id``; its NIXL connector takes it off by the same rule (``get_base_request_id``)."""
_PREFIX = re.compile(r"\A(?:chat)?cmpl-")
_INDEX = re.compile(r"-0\Z")
"""vLLM numbers the prompts of a completion request. A router that gives the id of the request means its only one."""


def usable_name(value: object) -> str:
    """A name as P and D send it: a printable string of 1 to 256 characters; else the empty string."""
    return value if isinstance(value, str) and _NAME.fullmatch(value) else ""


def prompt_names(request_id: str, params: Mapping[str, Any] | None, token: bytes) -> tuple[str, ...]:
    """The names of a prompt at P: its transfer id, its request id as vLLM has it and as the client or the router gave
    it, and the token of its lease, which P's answer carries as ``remote_request_id``."""
    given = _RANDOM.sub("", request_id)
    bare = _PREFIX.sub("", given)
    names = [(params or {}).get(TRANSFER_ID), request_id, given, bare]
    if given.startswith("cmpl-"):
        names.append(_INDEX.sub("", bare))
    names.append(token.hex())
    return tuple(dict.fromkeys(name for name in map(usable_name, names) if name))
