"""``kv_transfer_params`` of a request whose two legs the router has sent at once: D does not have P's answer yet. Pure.

They name a rank of P, or the page where its address is, and a name by which P knows the prompt. P then tells D what its
answer to the router contains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvferry.connector.engine.prompt_names import TRANSFER_ID, usable_name
from kvferry.connector.engine.transfer_params import MAX_PORT, RemotePrompt, from_transfer_params, wants_load
from kvferry.connector.geometry.topology import MAX_RANKS
from kvferry.connector.protocol.step_plan import PeerEngine, Rendezvous
from kvferry.transport.control.bootstrap import checked_url
from kvferry.transport.errors import ProtocolError, quoted

_HEX = frozenset("0123456789abcdef")


def rendezvous_of(request_id: str, params: Mapping[str, Any] | None) -> Rendezvous | None:
    """D: whom to ask for the prompt of a request; ``None`` where the parameters are P's answer, or name no P.

    Raises:
        ProtocolError: they name a P that cannot be asked; one line.
    """
    if params is None or not wants_load(params) or params.get("kvferry") is not None:
        return None
    if params.get("remote_block_ids"):  # of vLLM's NIXL connector, whose ranks answer no question of ours
        return None
    field = TRANSFER_ID if params.get(TRANSFER_ID) is not None else "remote_request_id"
    place, name = _place(params), params.get(field)
    if place is None or name is None:
        return None
    _check_text(field, name)
    engine_id = params.get("remote_engine_id")
    if engine_id is not None:
        _check_text("remote_engine_id", engine_id)
    key = params.get("remote_key") or ""
    if not isinstance(key, str) or (key and (len(key) != 12 or not _HEX.issuperset(key))):
        raise ProtocolError(f"kv_transfer_params: remote_key is {quoted(key)}, expected the 12 digits of a fingerprint")
    return Rendezvous(request_id, *place, engine_id or "", name, key)


def _place(params: Mapping[str, Any]) -> tuple[str, int] | None:
    """Host and port of a rank of P; or the address of the page that names it, and 0."""
    page, host, port = (params.get(f"remote_{name}") for name in ("bootstrap_addr", "host", "port"))
    if page is not None:
        _check_text("remote_bootstrap_addr", page)
        checked_url(page)
        if params.get("remote_engine_id") is None:
            raise ProtocolError("kv_transfer_params: remote_bootstrap_addr needs remote_engine_id beside it")
        return page, 0
    if host is None or port is None:
        return None
    _check_text("remote_host", host)
    return host, _port(port)


def _check_text(field: str, value: object) -> None:
    if not usable_name(value):
        raise ProtocolError(
            f"kv_transfer_params: {field} is {quoted(value)}, expected a printable text of 1 to 256 characters"
        )


def _port(port: object) -> int:
    if isinstance(port, str) and port.isascii() and port.isdigit():
        port = int(port[:6])
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port <= MAX_PORT:
        raise ProtocolError(f"kv_transfer_params: remote_port is {quoted(port)}, expected a number 1 to {MAX_PORT}")
    return port


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


def peer_of_answer(params: bytes) -> PeerEngine:
    """The P engine that P's answer names. Raises as ``prompt_of_answer``."""
    return prompt_of_answer(params).peer
