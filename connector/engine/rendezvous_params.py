"""``kv_transfer_params`` of a request whose two legs the router has sent at once: D does not have P's answer yet. Pure.

They name a rank of P, and a name by which P knows the prompt. P then tells D what its answer to the router contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.connector.engine.prompt_names import TRANSFER_ID, usable_name
from kvferry.connector.engine.transfer_params import MAX_PORT, RemotePrompt, from_transfer_params, wants_load
from kvferry.connector.geometry.topology import MAX_RANKS
from kvferry.connector.wire.step_plan import RemoteLease, Rendezvous
from kvferry.transport.bootstrap.page import checked_url
from kvferry.transport.errors import ProtocolError, quoted

_HEX = frozenset("0123456789abcdef")


def rendezvous_of(request_id: str, params: Mapping[str, Any] | None) -> Rendezvous | None:
    """D: whom to ask for the prompt of a request; ``None`` where the parameters are P's answer, or name no P.

    Raises:
        ProtocolError: they name a P that cannot be asked; one line.
    """
    if params is None or not wants_load(params) or params.get("kvferry") is not None:
        return None
    if params.get("remote_host") is None and params.get("remote_bootstrap_addr") is not None:
        return _by_page(request_id, params)
    if params.get("remote_host") is None or params.get("remote_port") is None:
        return None
    if params.get("remote_block_ids"):  # of vLLM's NIXL connector, whose ranks answer no question of ours
        return None
    given = params.get(TRANSFER_ID)
    named = params.get("remote_request_id") if given is None else given
    if named is None:
        return None
    host, port, engine_id = params["remote_host"], params["remote_port"], params.get("remote_engine_id")
    if isinstance(port, str) and port.isascii() and port.isdigit():
        port = int(port[:6])
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port <= MAX_PORT:
        raise ProtocolError(f"kv_transfer_params: remote_port is {quoted(port)}, expected a number 1 to {MAX_PORT}")
    for field, value in (("remote_host", host), (TRANSFER_ID if given is not None else "remote_request_id", named)):
        if not usable_name(value):
            raise ProtocolError(
                f"kv_transfer_params: {field} is {quoted(value)}, expected a printable text of 1 to 256 characters"
            )
    if engine_id is not None and not usable_name(engine_id):
        raise ProtocolError(f"kv_transfer_params: remote_engine_id is {quoted(engine_id)}, expected P's engine id")
    key = params.get("remote_key") or ""
    if not isinstance(key, str) or (key and (len(key) != 12 or not _HEX.issuperset(key))):
        raise ProtocolError(f"kv_transfer_params: remote_key is {quoted(key)}, expected the 12 digits of a fingerprint")
    return Rendezvous(request_id, host, port, engine_id or "", named, key)


def _by_page(request_id: str, params: Mapping[str, Any]) -> Rendezvous:
    """As routers for vLLM's Mooncake connector have it: an HTTP page tells the address of P's first rank."""
    url, engine_id, name = params["remote_bootstrap_addr"], params.get("remote_engine_id"), params.get(TRANSFER_ID)
    if not isinstance(url, str):
        raise ProtocolError(f"kv_transfer_params: remote_bootstrap_addr is {quoted(url)}, expected http://HOST:PORT")
    checked_url(url)
    for field, value in (("remote_engine_id", engine_id), (TRANSFER_ID, name)):
        if not usable_name(value):
            raise ProtocolError(
                f"kv_transfer_params: {field} is {quoted(value)}, expected a printable text of 1 to 256 characters "
                "beside remote_bootstrap_addr"
            )
    return Rendezvous(request_id, url, 0, str(engine_id), str(name), key="")


def prompt_of_answer(params: bytes, max_sizes: tuple[int, int] = (MAX_RANKS, MAX_RANKS)) -> RemotePrompt:
    """The prompt that P's answer to D describes. ``max_sizes``: as in ``from_transfer_params``.

    Raises:
        ProtocolError: the answer is malformed.
    """
    try:
        decoded = msgspec.msgpack.decode(params)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"P's answer is malformed: {quoted(str(error))}") from None
    prompt = from_transfer_params(decoded, max_sizes) if isinstance(decoded, dict) else None
    if prompt is None:
        raise ProtocolError("P's answer describes no prompt")
    return prompt


def lease_of_answer(params: bytes) -> RemoteLease:
    """The lease that P's answer names. Raises as ``prompt_of_answer``."""
    prompt = prompt_of_answer(params)
    return RemoteLease(prompt.token, prompt.peer, prompt.prompt)
