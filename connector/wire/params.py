"""``kv_transfer_params``: what P's answer tells D through any router, and whether D can use it. Pure.

The outer keys are those of vLLM's NIXL connector, so that routers written for it work unchanged; KVFerry's own data has
the one key ``kvferry``. Block ids are not part of it: P sends them when D asks with the lease's token. Where the router
sends both legs of a request at once, D does not have P's answer yet: its parameters name a rank of P and a name of the
prompt (``lookup_of``), and P tells D itself what its answer contains (``prompt_of_answer``).
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.geometry.rank_geometry import CacheKind
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.connector.geometry.topology import MAX_RANKS
from kvferry.connector.wire.metrics import LocalReason
from kvferry.connector.wire.step_plan import PeerEngine, PromptLookup, RankAddress, RemoteLease
from kvferry.transport.errors import ProtocolError, quoted

PARAMS_VERSION = 1
MAX_PORT = 65535
ALTERNATIVES = "alternatives"
"""The key of a list of complete ``kv_transfer_params``, each from another P that has computed the same prompt."""
MAX_ALTERNATIVES = 4
"""D connects to every P that is named, and keeps a lease there."""
HANDED_OVER = "handed_over"
"""The key of what became of a prompt, in D's answer to a request whose parameters have ``"report": true``."""
TRANSFER_ID = "transfer_id"
"""The key of a name that a router gives to both legs of a request."""
_LEFT_TO_D = 8
"""Tokens at the end of a prompt that P leaves to D: one for a state or a window, else those of its lookahead."""

_PRINTABLE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]"
"""The sender of the request chooses these strings, and KVFerry logs them: no line breaks, no half characters."""
_NAME = re.compile(_PRINTABLE + r"{1,256}")
_RANDOM = re.compile(r"-[0-9a-fA-F]{8}\Z")
"""vLLM's ``assign_request_id``; its NIXL connector takes it off by the same rule (``get_base_request_id``)."""
_PREFIX = re.compile(r"\A(?:chat)?cmpl-")
_INDEX = re.compile(r"-0\Z")
"""vLLM numbers the prompts of a completion request. A router that gives the id of the request means its only one."""
_FINGERPRINT = re.compile(r"([0-9a-f]{12})?")

_Hex16 = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Rank = tuple[
    Annotated[int, Meta(ge=0, lt=4096)],
    Annotated[int, Meta(ge=0, lt=4096)],
    Annotated[str, Meta(max_length=255, pattern=rf"^{_PRINTABLE}+\Z")],
    Annotated[int, Meta(ge=1, le=MAX_PORT)],
    _Hex16,
    Annotated[str, Meta(pattern=r"^([0-9a-f]{12})?\Z")],
]
_Kept = tuple[CacheKind, Annotated[int, Meta(ge=1, le=1 << 31)], Annotated[int, Meta(ge=0, le=1 << 31)]]


class UnusablePromptError(ProtocolError):
    """D cannot use the prompt that a request's parameters name. ``reason``: why, as a label; not of parameters that are
    malformed, which raise ``ProtocolError`` itself."""

    def __init__(self, reason: LocalReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class _Wire(msgspec.Struct, frozen=True):
    v: int
    token: _Hex16
    engine_id: Annotated[str, Meta(max_length=256, pattern=rf"^{_PRINTABLE}+\Z")]
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
    """A finished prompt as P describes it to D: the lease's token, the prompt, and the addresses of P's ranks."""

    token: bytes
    num_tokens: int
    digest: str
    peer: PeerEngine
    kept: tuple[tuple[CacheKind, int, int], ...] = ()
    """(kind, window, first token) of each of P's block tables that freed blocks outside its window."""
    adapter: str = ""
    """As in ``RequestView``."""


def from_p2p(params: Any) -> Any:
    """``kv_transfer_params`` as they are; those of llm-d's ``p2p`` connector, which name a prompt and P's place, in our
    form (llm-d/llm-d-router, pkg/sidecar/proxy/connector_p2p.go)."""
    legs = [params.get(key) for key in ("remote_decoder", "remote_prefiller")] if isinstance(params, Mapping) else []
    for leg, of_d in zip(legs, (False, True), strict=False):
        if isinstance(leg, Mapping):
            place = {key: leg.get(key) for key in ("remote_host", "remote_port")} if of_d else {}
            role = {"do_remote_prefill": of_d, "do_remote_decode": not of_d}
            return {**params, **role, TRANSFER_ID: leg.get("kv_request_id"), **place}
    return params


# --- P: what goes out ---------------------------------------------------------------------------------------------


def wants_prefill(params: Mapping[str, Any] | None) -> bool:
    """P: whether the request's KV is to be handed over."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


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
        "remote_key": first.key,
        "remote_host_id": peer.host_id,
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
            "prompt": remote_prompt.digest,
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


def usable_name(value: object) -> str:
    """A name as P and D send it: a printable string of 1 to 256 characters; else the empty string."""
    return value if isinstance(value, str) and _NAME.fullmatch(value) else ""


def prompt_names(request_id: str, params: Mapping[str, Any] | None, token: bytes) -> tuple[str, ...]:
    """The names of a prompt at P: its transfer id, its request id as vLLM has it and as the client or the router gave
    it, and the token of its lease, which P's answer carries as ``remote_request_id``.

    vLLM adds a prefix and a random suffix to the request id that it gets. A client may choose an id that gives its
    prompt the name of another: P keeps the first, and D compares the prompt before it loads.
    """
    given = _RANDOM.sub("", request_id)
    bare = _PREFIX.sub("", given)
    names = [(params or {}).get(TRANSFER_ID), request_id, given, bare]
    if given.startswith("cmpl-"):
        names.append(_INDEX.sub("", bare))
    names.append(token.hex())
    return tuple(dict.fromkeys(name for name in map(usable_name, names) if name))


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


# --- D: what comes in ---------------------------------------------------------------------------------------------


def wants_load(params: Mapping[str, Any] | None) -> bool:
    """D: whether the request says that P has computed its prompt."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_prefill"))


def wants_report(params: Mapping[str, Any] | None) -> bool:
    """D: whether the answer is to say what became of the prompt, in ``HANDED_OVER``."""
    return isinstance(params, Mapping) and params.get("report") is True


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
            raise UnusablePromptError(
                "no_p_named",
                "kv_transfer_params asks for a remote prefill but names no prefill engine: the prefill leg "
                "handed nothing over, or the router dropped its answer's kv_transfer_params",
            )
        why = "the prefill engine runs another connector, or the router dropped it; relay them unchanged"
        if "remote_bootstrap_addr" in params:
            why = "remote_bootstrap_addr is taken no more; send the prefill engine's remote_host and remote_port"
        raise UnusablePromptError("no_kvferry_params", f"kv_transfer_params has no 'kvferry' entry: {why}")
    if isinstance(raw, Mapping) and raw.get("v") != PARAMS_VERSION:
        raise UnusablePromptError(
            "other_release",
            f"kv_transfer_params version is {quoted(raw.get('v'))}, expected {PARAMS_VERSION}; "
            "run the same KVFerry release on both sides",
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
    if strange := [name for name in named if name[0] >= wire.pp_size or name[1] >= wire.tp_size]:
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
    token = bytes.fromhex(wire.token)
    return RemotePrompt(token, wire.num_tokens, wire.prompt, peer, tuple(wire.kept), wire.adapter)


def lookup_of(request_id: str, params: Mapping[str, Any] | None) -> PromptLookup | None:
    """D: whom to ask for the prompt of a request; ``None`` where the parameters are P's answer, or name no P.

    Raises:
        ProtocolError: they name a P that cannot be asked; one line.
    """
    if params is None or not wants_load(params) or params.get("kvferry") is not None:
        return None
    if params.get("remote_host") is None or params.get("remote_port") is None:
        return None
    if params.get("remote_block_ids"):  # of vLLM's NIXL connector, whose ranks answer no question of ours
        return None
    field = "remote_request_id" if params.get(TRANSFER_ID) is None else TRANSFER_ID
    named = params.get(field)
    if named is None:
        return None
    host, port, engine_id, key = address_of(params)
    _check_name(field, named)
    return PromptLookup(request_id, host, port, engine_id, str(named), key)


def address_of(params: Mapping[str, Any]) -> tuple[str, int, str, str]:
    """The host and the port of a rank, its engine's id, and the fingerprint of its key; each of the last two is empty
    where ``params`` do not have it. Raises ProtocolError: they cannot be used; one line."""
    host, port, engine_id = (params.get(key) for key in ("remote_host", "remote_port", "remote_engine_id"))
    if isinstance(port, str) and port.isascii() and port.isdigit():
        port = int(port[:6])
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port <= MAX_PORT:
        raise ProtocolError(f"kv_transfer_params: remote_port is {quoted(port)}, expected a number 1 to {MAX_PORT}")
    _check_name("remote_host", host)
    if engine_id is not None and not usable_name(engine_id):
        raise ProtocolError(
            f"kv_transfer_params: remote_engine_id is {quoted(engine_id)}, expected the engine id of the prefill engine"
        )
    key = params.get("remote_key") or ""
    if not isinstance(key, str) or not _FINGERPRINT.fullmatch(key):
        raise ProtocolError(f"kv_transfer_params: remote_key is {quoted(key)}, expected the 12 digits of a fingerprint")
    return str(host), port, engine_id or "", key


def _check_name(field: str, value: object) -> None:
    if not usable_name(value):
        raise ProtocolError(
            f"kv_transfer_params: {field} is {quoted(value)}, expected a printable text of 1 to 256 characters"
        )


def prompt_of_answer(params: bytes, max_sizes: tuple[int, int] = (MAX_RANKS, MAX_RANKS)) -> RemotePrompt:
    """The prompt that P's answer to D describes. ``max_sizes``: as in ``from_transfer_params``.

    Raises:
        ProtocolError: the answer is malformed.
    """
    try:
        decoded = msgspec.msgpack.decode(params)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"the prefill engine's answer is malformed: {quoted(str(error))}") from None
    prompt = from_transfer_params(decoded, max_sizes) if isinstance(decoded, dict) else None
    if prompt is None:
        raise ProtocolError("the prefill engine's answer describes no prompt")
    return prompt


def lease_of_answer(params: bytes) -> RemoteLease:
    """The lease that P's answer names. Raises as ``prompt_of_answer``."""
    prompt = prompt_of_answer(params)
    return RemoteLease(prompt.token, prompt.peer, prompt.digest)


def alternatives(
    params: Mapping[str, Any] | None, first: RemotePrompt, max_sizes: tuple[int, int], our_host_id: str
) -> tuple[tuple[RemoteLease, ...], list[str]]:
    """The leases of ``first``'s prompt at other P engines, for a load that the first P cannot serve.

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
    for number, item in enumerate(named):
        try:
            other = from_transfer_params(item, max_sizes) if isinstance(item, Mapping) else None
            if other is None:
                raise ProtocolError(
                    "it does not say do_remote_prefill; expected the kv_transfer_params of a prefill engine's answer"
                )
            if item.get(ALTERNATIVES) is not None:
                raise ProtocolError("it names alternatives itself")
            check_reachable(other.peer, our_host_id)
            for field in ("digest", "num_tokens", "kept", "adapter"):
                if getattr(first, field) != getattr(other, field):
                    raise ProtocolError(f"its prompt's {field} is not that of the first prefill engine")
            if other.token in {first.token, *(lease.token for lease in usable)}:
                raise ProtocolError("its lease is named twice")
            usable.append(RemoteLease(other.token, other.peer))
        except ProtocolError as error:
            left_out.append(f"{ALTERNATIVES}[{number}]: {error}")
    return tuple(usable), left_out


# --- D: whether it can be used. Each check raises ProtocolError with the reason -----------------------------------


def check_reachable(peer: PeerEngine, our_host_id: str) -> None:
    """Check that P's address does not mean another machine on this host: a loopback address of another host."""
    check_hosts(peer.host_id, [rank.host for rank in peer.ranks], our_host_id)


def check_hosts(host_id: object, hosts: Iterable[str], our_host_id: str) -> None:
    """As ``check_reachable``. ``host_id``: of P; empty or ``None`` where it is unknown."""
    if not (host_id and our_host_id) or host_id == our_host_id:
        return
    for host in hosts:
        if host in ("localhost", "::1") or host.startswith("127."):
            raise UnusablePromptError(
                "loopback",
                f"the prefill engine runs on another host but told its loopback address {host}; set "
                "side_channel_host (KVFERRY_SIDE_CHANNEL_HOST) on the prefill engine to the address that this host "
                "reaches",
            )


def possible_digests(request: RequestView) -> tuple[str, ...]:
    """The digests of a request's prompt, whole and without up to ``_LEFT_TO_D`` of its last tokens: P's lease of it has
    one of them."""
    ids = request.prompt_token_ids
    return () if ids is None else prompt_digests(ids, request.extra, min(_LEFT_TO_D, len(ids) - 1))


def check_prompt(request: RequestView, remote_prompt: RemotePrompt) -> None:
    """Check that P has prefilled the request's prompt."""
    ours = request.num_prompt_tokens
    if remote_prompt.num_tokens > ours:  # fewer are valid: D may compute the last ones
        text = f"the prefill engine prefilled {remote_prompt.num_tokens} prompt tokens, this request has {ours}"
        raise UnusablePromptError("other_prompt", text)
    if request.prompt_token_ids is None:
        text = "its prompt is given as embeddings, which cannot be told apart from the prefill engine's"
        raise UnusablePromptError("embeddings", text)
    ids = request.prompt_token_ids
    prefilled = ids if remote_prompt.num_tokens == ours else ids[: remote_prompt.num_tokens]
    if prompt_digest(prefilled, request.extra) != remote_prompt.digest:
        text = "the prefill engine prefilled another prompt (tokens, LoRA adapter or multi-modal inputs differ)"
        raise UnusablePromptError("other_prompt", text)


def check_adapter(request: RequestView, remote_prompt: RemotePrompt) -> None:
    """Check that P has prefilled the prompt with the request's LoRA adapter, where both know its content."""
    if request.adapter != remote_prompt.adapter and request.adapter and remote_prompt.adapter:
        raise UnusablePromptError(
            "other_adapter",
            "the prefill engine prefilled the prompt with another LoRA adapter of this name; load the same "
            "files on both",
        )


def check_kept(tables: Sequence[BlockTable], remote_prompt: RemotePrompt, num_local: int, stop: int) -> None:
    """Check that P still has the tokens with which D's blocks must be filled: tokens ``[num_local, stop)``.

    D fills a block whole or does not load it, because the engine offers the block to other requests. Where P's blocks
    are smaller than those of D's ``tables``, P may have freed a part of such a block.
    """
    if any(table.kind == "state" for table in tables) and remote_prompt.num_tokens != stop:
        raise UnusablePromptError(
            "window",
            f"the prefill engine's state is that after {remote_prompt.num_tokens} tokens, needed is the one "
            f"after {stop}",
        )
    for kind, window, kept in remote_prompt.kept:
        ours = [table for table in tables if (table.kind, table.window) == (kind, window)]
        needed = (max(t.lacks_from(num_local), t.first_needed(stop) // t.block_size * t.block_size) for t in ours)
        first = min(needed, default=num_local)
        if kept > first:
            raise UnusablePromptError(
                "window",
                f"the prefill engine kept the window of {window} tokens from token {kept} on, our blocks begin "
                f"at {first}",
            )
