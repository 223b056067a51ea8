"""``kv_transfer_params``: the data that P's answer carries to D, through any router. Pure.

The outer keys are those of vLLM's NIXL connector, so that routers written for it work unchanged; KVFerry's
own data has the one key ``kvferry``. Block ids are not part of it: P sends them when D asks with the lease's token.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.connector.geometry.rank_geometry import CacheKind
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.connector.geometry.topology import MAX_RANKS
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress
from kvferry.transport.errors import ProtocolError, quoted

PARAMS_VERSION = 1
MAX_PORT = 65535

_Hex16 = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+\Z"
"""The sender of the request chooses these strings, and KVFerry logs them: no line breaks, no half characters."""
_Rank = tuple[
    Annotated[int, Meta(ge=0, lt=4096)],
    Annotated[int, Meta(ge=0, lt=4096)],
    Annotated[str, Meta(max_length=255, pattern=_PRINTABLE)],
    Annotated[int, Meta(ge=1, le=MAX_PORT)],
    _Hex16,
    Annotated[str, Meta(pattern=r"^([0-9a-f]{12})?\Z")],
]


_Kept = tuple[CacheKind, Annotated[int, Meta(ge=1, le=1 << 31)], Annotated[int, Meta(ge=0, le=1 << 31)]]


class _Wire(msgspec.Struct, frozen=True):
    v: int
    token: _Hex16
    engine_id: Annotated[str, Meta(max_length=256, pattern=_PRINTABLE)]
    num_tokens: Annotated[int, Meta(ge=1, le=1 << 31)]
    prompt: Annotated[str, Meta(max_length=64)]
    lease_seconds: Annotated[float, Meta(gt=0, le=1e6)]
    tp_size: Annotated[int, Meta(ge=1, le=4096)]
    pp_size: Annotated[int, Meta(ge=1, le=4096)]
    ranks: Annotated[list[_Rank], Meta(min_length=1, max_length=4096)]
    host_id: Annotated[str, Meta(max_length=64, pattern="^[0-9a-f]*$")] = ""
    kept: Annotated[list[_Kept], Meta(max_length=64)] = []
    shardings: Annotated[tuple[TokenSharding, ...], Meta(min_length=1, max_length=4)] = UNSHARDED
    adapter: Annotated[str, Meta(max_length=64, pattern="^[0-9a-f]*$")] = ""


class RemotePrompt(msgspec.Struct, frozen=True):
    """A finished prompt as P describes it to D: the lease's token, the prompt, and the addresses of P's ranks.

    ``kept``: (kind, window, first token) of each of P's block tables that freed blocks outside its window.
    ``adapter``: as in ``RequestView``.
    """

    token: bytes
    num_tokens: int
    prompt: str
    peer: PeerEngine
    kept: tuple[tuple[CacheKind, int, int], ...] = ()
    adapter: str = ""


def prompt_digest(token_ids: Sequence[int], extra: Sequence[str] = ()) -> str:
    """A digest of a prompt: its tokens, and the other inputs of its KV (LoRA adapter, multi-modal inputs)."""
    (digest,) = prompt_digests(token_ids, extra, 0)
    return digest


def prompt_digests(token_ids: Sequence[int], extra: Sequence[str], left_out: int) -> tuple[str, ...]:
    """``prompt_digest`` of a prompt without up to ``left_out`` of its last tokens, the shortest first."""
    # This takes a third of numpy's time for a list, and D's request waits for it.
    packed = struct.pack(f"<{len(token_ids)}i", *token_ids)
    shared = hashlib.blake2b(digest_size=16)
    found: list[str] = []
    for end in range(len(packed) - 4 * left_out, len(packed) + 1, 4):
        shared.update(packed[:end] if not found else packed[end - 4 : end])
        digest = shared.copy()
        for item in extra:
            digest.update(b"\0" + item.encode())
        found.append(digest.hexdigest())
    return tuple(found)


def to_transfer_params(remote_prompt: RemotePrompt) -> dict[str, Any]:
    """P: the ``kv_transfer_params`` of a finished prefill."""
    peer = remote_prompt.peer
    first = peer.ranks[0]
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": peer.engine_id,
        "remote_request_id": remote_prompt.token.hex(),
        "remote_block_ids": [],
        "remote_host": first.host,
        "remote_port": first.port,
        "tp_size": peer.tp_size,
        "pp_size": peer.pp_size,
        "dcp_size": max(sharding.size for sharding in peer.shardings),
        "remote_num_tokens": remote_prompt.num_tokens,
        "transfer_mode": "push",  # to llm-d's router: it may send both legs of the next request at once
        "kvferry": {
            "v": PARAMS_VERSION,
            "token": remote_prompt.token.hex(),
            "engine_id": peer.engine_id,
            "num_tokens": remote_prompt.num_tokens,
            "prompt": remote_prompt.prompt,
            "lease_seconds": peer.lease_seconds,
            "tp_size": peer.tp_size,
            "pp_size": peer.pp_size,
            "host_id": peer.host_id,
            "adapter": remote_prompt.adapter,
            "kept": [list(item) for item in remote_prompt.kept],
            "shardings": [[sharding.size, sharding.interleave] for sharding in peer.shardings],
            "ranks": [[r.pp_rank, r.tp_rank, r.host, r.port, r.incarnation.hex(), r.key] for r in peer.ranks],
        },
    }


def wants_prefill(params: Mapping[str, Any] | None) -> bool:
    """P: whether the request's KV is to be handed over."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def wants_load(params: Mapping[str, Any] | None) -> bool:
    """D: whether the request says that P has computed its prompt."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))


def from_transfer_params(
    params: Mapping[str, Any] | None, max_sizes: tuple[int, int] = (MAX_RANKS, MAX_RANKS)
) -> RemotePrompt | None:
    """D: the prompt that P handed over; ``None`` if the request names none: D then prefills locally. ``max_sizes``: the
    largest tensor- and pipeline-parallel sizes of an engine of this model; D connects to all ranks that are named.

    Raises:
        ProtocolError: the parameters exist and cannot be used; one line.
    """
    if params is None or not wants_load(params):
        return None
    raw = params.get("kvferry")
    if raw is None:
        if params.get("remote_engine_id") is None:
            raise ProtocolError(
                "kv_transfer_params asks for a remote prefill but names no P: the prefill leg handed nothing over, "
                "or the router dropped its answer's kv_transfer_params"
            )
        raise ProtocolError(
            "kv_transfer_params has no 'kvferry' entry: P runs another connector, or the router dropped it; "
            "relay P's kv_transfer_params unchanged"
        )
    if isinstance(raw, Mapping) and raw.get("v") != PARAMS_VERSION:
        raise ProtocolError(
            f"kv_transfer_params version is {quoted(raw.get('v'))}, expected {PARAMS_VERSION}; "
            "run the same KVFerry release on both sides"
        )
    try:
        wire = msgspec.convert(raw, _Wire)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"kv_transfer_params['kvferry'] is malformed: {error}") from None
    if wire.tp_size > max_sizes[0] or wire.pp_size > max_sizes[1]:
        raise ProtocolError(
            f"kv_transfer_params names tp_size {wire.tp_size} and pp_size {wire.pp_size}; an engine of "
            f"this model has at most {max_sizes[0]} and {max_sizes[1]}"
        )
    ranks = tuple(
        RankAddress(pp, tp, host, port, bytes.fromhex(life), key) for pp, tp, host, port, life, key in wire.ranks
    )
    named = {(rank.pp_rank, rank.tp_rank) for rank in ranks}
    if len(named) != len(ranks) or len(ranks) != wire.tp_size * wire.pp_size:
        raise ProtocolError(
            f"kv_transfer_params names {len(named)} ranks, expected {wire.pp_size} x {wire.tp_size} (pp x tp)"
        )
    strange = [name for name in named if name[0] >= wire.pp_size or name[1] >= wire.tp_size]
    if strange:
        pp, tp = min(strange)
        raise ProtocolError(
            f"kv_transfer_params names a rank pp{pp} tp{tp}, expected below pp{wire.pp_size} and tp{wire.tp_size}"
        )
    if any(wire.tp_size % sharding.size for sharding in wire.shardings):
        sizes = ", ".join(str(sharding.size) for sharding in wire.shardings)
        raise ProtocolError(f"kv_transfer_params says that {sizes} of {wire.tp_size} ranks share tokens out in turn")
    peer = PeerEngine(
        wire.engine_id, wire.tp_size, wire.pp_size, wire.lease_seconds, ranks, wire.host_id, wire.shardings
    )
    kept = tuple(wire.kept)
    return RemotePrompt(bytes.fromhex(wire.token), wire.num_tokens, wire.prompt, peer, kept, wire.adapter)


def check_reachable(peer: PeerEngine, our_host_id: str) -> None:
    """Check that P's address does not mean another machine on this host.

    Raises:
        ProtocolError: P sent its loopback address, and P runs on another host.
    """
    if not (peer.host_id and our_host_id) or peer.host_id == our_host_id:
        return
    for rank in peer.ranks:
        if rank.host in ("localhost", "::1") or rank.host.startswith("127."):
            raise ProtocolError(
                f"P runs on another host but told its loopback address {rank.host}; set side_channel_host "
                "(KVFERRY_SIDE_CHANNEL_HOST) on P to the address that this host reaches"
            )
