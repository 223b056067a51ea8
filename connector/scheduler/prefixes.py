"""Prefixes that one engine reads from another, though no P has handed them over: how they are named. Pure.

A prefix ends at a multiple of ``PREFIX_TOKENS`` tokens. Its digest is chained: over the digest of the prefix before it,
and what the KV of the tokens between the two depends on. So two prompts have the digests of their common prefix alike,
and no others. The first one is chained to a digest of the model and of what all of the KV depends on: its salt and its
LoRA adapter. Digests depend neither on the block size nor on the prefix cache of an engine.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvferry.connector.geometry.engine_types import KVContent
from kvferry.connector.geometry.model_identity import WEIGHTS
from kvferry.connector.wire.messages import DIGEST_BYTES, MAX_DIGESTS, PREFIX_TOKENS
from kvferry.connector.wire.params import address_of
from kvferry.connector.wire.step_plan import PrefixOffer, PromptLookup, RankAddress, pack_ids
from kvferry.transport.errors import ProtocolError, quoted

LEAST_GAIN = 2 * PREFIX_TOKENS
"""D asks for no prefix, and reads none, that saves it fewer tokens."""
SOURCES = "sources"
"""The key of a list of engines that may have a prefix of the request's prompt, the best one first."""
SOURCE = "source"
"""The key of the engine that has answered, in the answer to a request with ``SOURCES``."""
LLM_D, DYNAMO = "remote_kv_source", "kv_hint"
"""The keys of llm-d's sidecar and of Dynamo's router for the same; vLLM's ``Request.kv_hints`` has Dynamo's form."""
_KEYS = (SOURCES, LLM_D, DYNAMO)
MAX_SOURCES = 4


def model_seed(model: Mapping[str, str]) -> bytes:
    """What the digests of a model's prefixes are chained to. ``model``: its identity, as ``Hello`` has it. The name of
    the weights does not count."""
    facts = {name: fact.partition(" of ")[0] if name == WEIGHTS else fact for name, fact in model.items()}
    return _digest(b"kvferry prefix 1", msgspec.msgpack.encode(sorted(facts.items())))


def prefix_digests(seed: bytes, content: KVContent, first: int = 0, before: bytes = b"") -> bytes:
    """The digests of a prompt's prefixes, of ``DIGEST_BYTES`` each, from number ``first`` on.

    Args:
        seed: ``model_seed``.
        before: the digest of the prefix before ``first``; not needed where ``first`` is 0.
    """
    stop = min(len(content.token_ids) // PREFIX_TOKENS, MAX_DIGESTS)
    tokens = content.token_ids[first * PREFIX_TOKENS : stop * PREFIX_TOKENS]
    packed, step = struct.pack(f"<{len(tokens)}i", *tokens), 4 * PREFIX_TOKENS
    last = before if first else _digest(seed, msgspec.msgpack.encode(content.scope))
    found = []
    for number, at in enumerate(range(0, len(packed), step), first):
        inputs = _inputs(content, number * PREFIX_TOKENS) if content.inputs else b""
        last = hashlib.blake2b(last + packed[at : at + step] + inputs, digest_size=DIGEST_BYTES).digest()
        found.append(last)
    return b"".join(found)


def _inputs(content: KVContent, start: int) -> bytes:
    """The multi-modal inputs among ``PREFIX_TOKENS`` tokens from ``start`` on, and where they begin."""
    within = [
        (name, at - start) for at, count, name in content.inputs if at < start + PREFIX_TOKENS and start < at + count
    ]
    return msgspec.msgpack.encode(within) if within else b""


def _digest(before: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(before + content, digest_size=DIGEST_BYTES).digest()


def names_sources(params: Mapping[str, Any] | None) -> bool:
    """Whether a request names engines that may have a prefix of its prompt. An empty list counts: who sends it asks for
    ``source_params`` in the answer."""
    return isinstance(params, Mapping) and (any(params.get(key) is not None for key in _KEYS) or _is_next_turn(params))


def with_hints(params: object, hints: object) -> dict[str, Any]:
    """The parameters of a request, with its ``kv_hints``: a struct of vLLM."""
    return {**(params if isinstance(params, Mapping) else {}), DYNAMO: msgspec.to_builtins(hints)}


def _is_next_turn(params: Mapping[str, Any]) -> bool:
    """Whether P is told what D answered to the last turn, as for NIXL's ``bidirectional_kv_xfer``."""
    return bool(params.get("do_remote_decode") and params.get("remote_block_ids") and params.get("remote_host"))


def source_params(engine_id: str, first: RankAddress) -> dict[str, Any]:
    """What a later request must have in its ``sources`` to read from this engine."""
    return {
        "remote_host": first.host, "remote_port": first.port, "remote_engine_id": engine_id, "remote_key": first.key,
    }  # fmt: skip


def next_turn_params(request_id: str, source: dict[str, Any]) -> dict[str, Any]:
    """What D answers to a hand-over: a router for NIXL's ``bidirectional_kv_xfer`` sends it to P with the next turn.
    What D has is found by content, and not by blocks: one stands there because such routers look for some."""
    of_d = {"do_remote_prefill": False, "do_remote_decode": True, "remote_request_id": request_id}
    return {**of_d, "remote_block_ids": [[0]], **source}


def sources_of(request_id: str, params: Mapping[str, Any] | None) -> tuple[PromptLookup, ...]:
    """The engines to ask for a prefix of a request's prompt, the best one first; none where it names none.

    Raises:
        ProtocolError: it names one that cannot be asked; one line.
    """
    params = params if isinstance(params, Mapping) else {}
    named = params.get(SOURCES, [])
    if not isinstance(named, list) or len(named) > MAX_SOURCES or not all(isinstance(each, Mapping) for each in named):
        raise ProtocolError(
            f"kv_transfer_params: {SOURCES} is {quoted(named)}, expected a list of at most {MAX_SOURCES} engines, each "
            "with remote_host, remote_port and remote_engine_id"
        )
    also = [params.get(LLM_D), *_hinted(params.get(DYNAMO)), params if _is_next_turn(params) else None]
    found = [*named, *(each for each in also if isinstance(each, Mapping))][:MAX_SOURCES]
    addresses = map(address_of, found)
    return tuple(PromptLookup(request_id, host, port, engine_id, "", key) for host, port, engine_id, key in addresses)


def _hinted(hint: object) -> Iterator[dict[str, Any]]:
    """The sources of Dynamo's hint, as ``address_of`` takes them. Actions that are not known are no error."""
    actions = hint.get("actions") if isinstance(hint, Mapping) else None
    for action in actions if isinstance(actions, list) else ():
        payload = action.get("payload") if isinstance(action, Mapping) else None
        if isinstance(payload, Mapping) and action.get("action_type") == "kv.fetch":
            host, _, port = str(payload.get("source_control_endpoint")).removeprefix("tcp://").rpartition(":")
            yield {"remote_host": host.strip("[]"), "remote_port": port}


class OfferedBlocks:
    """The blocks of an engine that D may read, with the digests of the prefixes that end in them: 20 bytes a block.

    A request that finds such a block in the prefix cache has the same prefix, so its digests begin behind it.
    """

    def __init__(self, seed: bytes, block_size: int) -> None:
        self._seed, self._per_block = seed, block_size // PREFIX_TOKENS
        self._prefixes = array("i")  # by block id: the number of prefixes up to the last one in it; 0: none is offered
        self._digests = bytearray()  # of that last one

    def offer(
        self, content: KVContent, block_ids: Sequence[int], asked: tuple[KVContent, bytes] | None = None
    ) -> tuple[PrefixOffer, list[int]] | None:
        """A request has ended, and these blocks hold the KV of ``content``. Returns what the ranks must learn, and the
        blocks that are offered from now on; ``None`` where they know all of it. ``asked``: the content of its prompt
        with digests, which need not be computed again."""
        per_block = self._per_block
        stop = min(len(content.token_ids) // PREFIX_TOKENS, len(block_ids) * per_block, MAX_DIGESTS)
        first, before = 0, b""
        for place in reversed(range(-(-stop // per_block))):
            block = block_ids[place]
            known = self._prefixes[block] if block < len(self._prefixes) else 0
            if place * per_block < known <= (place + 1) * per_block:
                first, before = known, bytes(self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES])
                break
        if first >= stop:
            return None
        had = asked[1][first * DIGEST_BYTES : stop * DIGEST_BYTES] if asked and content.begins_with(asked[0]) else b""
        done, before = first + len(had) // DIGEST_BYTES, had[-DIGEST_BYTES:] or before
        digests = (had + prefix_digests(self._seed, content, done, before))[: (stop - first) * DIGEST_BYTES]
        blocks = list(block_ids[first // per_block : -(-stop // per_block)])
        missing = max(blocks) + 1 - len(self._prefixes)
        if missing > 0:
            self._prefixes.extend([0] * missing)
            self._digests.extend(bytes(missing * DIGEST_BYTES))
        for place, block in enumerate(blocks, first // per_block):
            last = min((place + 1) * per_block, stop)
            self._prefixes[block] = last
            at = (last - first) * DIGEST_BYTES
            self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES] = digests[at - DIGEST_BYTES : at]
        return PrefixOffer(first, pack_ids(blocks), digests), blocks

    def reused(self, block_id: int) -> bool:
        """The engine gives a block to another request. Returns whether it was offered."""
        offered = block_id < len(self._prefixes) and self._prefixes[block_id] > 0
        if offered:
            self._prefixes[block_id] = 0
        return offered

    def clear(self) -> None:
        """The ranks know of no offer any more."""
        self._prefixes, self._digests = array("i"), bytearray()
