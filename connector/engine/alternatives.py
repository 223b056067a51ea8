"""The other P engines that a request names, for a load that its first P cannot serve. Pure.

``kv_transfer_params["alternatives"]`` is a list of complete ``kv_transfer_params``, each from the answer of another P
that has computed the same prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.connector.engine.transfer_params import RemotePrompt, check_reachable, from_transfer_params
from kvferry.connector.wire.step_plan import RemoteLease
from kvferry.transport.errors import ProtocolError

ALTERNATIVES = "alternatives"
MAX_ALTERNATIVES = 4
"""D connects to every P that is named, and keeps a lease there."""


def alternatives(
    params: Mapping[str, Any] | None, first: RemotePrompt, max_sizes: tuple[int, int], our_host_id: str
) -> tuple[tuple[RemoteLease, ...], list[str]]:
    """The leases of ``first``'s prompt at other P engines, in the order of ``params``.

    Args:
        params: of the request.
        first: what the request's own parameters name.
        max_sizes, our_host_id: as ``from_transfer_params`` and ``check_reachable`` take them.

    Returns:
        The leases that D can use, and why each other one is left out: a bad one must not cost the good ones.
    """
    named = (params or {}).get(ALTERNATIVES)
    if named is None:
        return (), []
    if not isinstance(named, list) or len(named) > MAX_ALTERNATIVES:
        count = f"{len(named)} entries" if isinstance(named, list) else type(named).__name__
        return (), [f"kv_transfer_params[{ALTERNATIVES!r}] is {count}, expected a list of at most {MAX_ALTERNATIVES}"]
    usable: list[RemoteLease] = []
    left_out: list[str] = []
    tokens = {first.token}
    for number, item in enumerate(named):
        try:
            other = _prompt(item, max_sizes)
            check_reachable(other.peer, our_host_id)
            _check_same(first, other)
            if other.token in tokens:
                raise ProtocolError("its lease is named twice")
        except ProtocolError as error:
            left_out.append(f"{ALTERNATIVES}[{number}]: {error}")
            continue
        tokens.add(other.token)
        usable.append(RemoteLease(other.token, other.peer))
    return tuple(usable), left_out


def _prompt(item: object, max_sizes: tuple[int, int]) -> RemotePrompt:
    prompt = from_transfer_params(item, max_sizes) if isinstance(item, Mapping) else None
    if prompt is None:
        raise ProtocolError("it does not say do_remote_prefill; expected the kv_transfer_params of a P's answer")
    if item.get(ALTERNATIVES) is not None:  # type: ignore[attr-defined]  # it is a mapping
        raise ProtocolError("it names alternatives itself")
    return prompt


def _check_same(first: RemotePrompt, other: RemotePrompt) -> None:
    """Check that another P holds what the first one holds.

    Raises:
        ProtocolError: it holds another prompt, or another part of it.
    """
    for field in ("prompt", "num_tokens", "kept", "adapter"):
        if getattr(first, field) != getattr(other, field):
            raise ProtocolError(f"its {field} is not that of the first P")
