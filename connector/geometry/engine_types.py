"""The description of an engine, independent of the engine: its ranks, layer groups and requests. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from kvferry.connector.geometry.rank_geometry import CacheKind
from kvferry.connector.geometry.recurrent_state import Section
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.transport.errors import GeometryError, did_you_mean


def _check_kind(kind: str) -> None:
    known = get_args(CacheKind)
    if kind not in known:
        raise GeometryError(
            f"kind: {kind!r} is no kind of cache{did_you_mean(kind, known)}; expected {', '.join(known)}"
        )


@dataclass(frozen=True, slots=True)
class BlockTable:
    """One of the block tables that the engine keeps for a request. Raises GeometryError: no kind has this name."""

    kind: CacheKind
    """In a ``state`` table, block n holds the state after the last computed token of the n-th ``block_size`` tokens."""
    block_size: int  # Tokens of a block, on all ranks together; of a ring more than a prompt has, as it has one block
    window: int = 0
    """Tokens of a sliding window or local chunk. Outside of it the engine has block 0, the null block, in the table."""
    extra: int = 0  # Tokens that it keeps beyond a sliding window
    sharding: TokenSharding = UNSHARDED[0]  # How ranks shard its tokens
    cached: bool = True
    """The engine's prefix cache has its blocks too. Else tokens that the engine finds there are not in this table."""

    def __post_init__(self) -> None:
        _check_kind(self.kind)

    def lacks_from(self, cached_tokens: int) -> int:
        """The first token that the table lacks of a request of which the prefix cache has ``cached_tokens``."""
        return cached_tokens if self.cached else 0

    @property
    def whole(self) -> bool:
        """Whether it holds every token of a request."""
        return self.kind in ("full", "mla")

    def moves_state(self, start: int, stop: int) -> bool:
        """Whether the engine moves a state to another block before it computes the tokens from ``start`` to ``stop``,
        after at least one token."""
        return self.kind == "state" and (start - 1) // self.block_size != (stop - 1) // self.block_size

    def first_needed(self, num_computed: int) -> int:
        """The first token that token number ``num_computed`` attends to, by the rules of vLLM's
        ``get_num_skipped_tokens``."""
        if self.kind == "sliding_window":
            return max(0, num_computed - self.window + 1 - self.extra)
        if self.kind == "chunked_local":
            return num_computed // self.window * self.window
        return 0


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """The tokens of one request that the engine computes in one step."""

    request_id: str  # Of its ``RequestView``
    start: int  # The number of the first one
    count: int  # Their number
    block_ids: Sequence[Sequence[int]]  # Per block table, the blocks that the request got since its last step
    all_blocks: bool = False
    """They are all that it has, as in its first step, and in the first one after the engine has preempted it."""


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """The meaning of a layer group's cache elements."""

    dtype: str  # By torch's name
    keys: int | None = None  # The first elements of each (head, token) that are keys, the others are values
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # Of K and V, by layer


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one ``kind`` and head count under one block table. Raises GeometryError: no kind has this name."""

    kind: CacheKind
    layers: tuple[str, ...]  # Names of the layers of this rank
    block_size: int  # Tokens of a block on one rank: only those that ``sharding`` gives the rank
    total_heads: int  # KV heads of one layer, on all ranks together
    window: int = 0  # As the block table has it
    packing: str = ""  # The backend's own order of content, by name; P and D must have the same one
    table: int = 0  # The number of the block table
    sharding: TokenSharding = UNSHARDED[0]  # As the block table has it
    cache_dtype: CacheDtype | None = None  # Without it the tensors define the dtype
    sections: tuple[Section, ...] = ()
    """Of each page of a state. Each has a head count of its own, which replaces ``total_heads``. A ``state`` without
    sections is a ring of ``block_size`` rows for each head, and all ranks hold all heads."""
    entry_tokens: int = 1
    """Tokens for which the cache has one entry together, where it compresses them; a divisor of ``block_size``."""

    def __post_init__(self) -> None:
        _check_kind(self.kind)

    @property
    def head_counts(self) -> frozenset[int]:
        """Global heads of each of its regions."""
        return frozenset(section.total_heads for section in self.sections) or frozenset({self.total_heads})


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This rank's place in its engine, and the model it runs. ``model``: facts that must agree with a peer's."""

    engine_id: str  # By which log lines and peers name the engine
    tp_rank: int  # Tensor-parallel
    tp_size: int  # Tensor-parallel ranks of a stage
    pp_rank: int  # Pipeline stage
    pp_size: int  # Pipeline stages
    model: Mapping[str, str]
    dp_rank: int = 0  # Data-parallel: engines of one model on one host have different ones

    @property
    def port_offset(self) -> int:
        """Added to a fixed ``side_channel_port``, so that ranks on one host do not collide."""
        return (self.dp_rank * self.pp_size + self.pp_rank) * self.tp_size + self.tp_rank


@dataclass(frozen=True, slots=True)
class KVContent:
    """All that the KV of a request depends on, beside the model."""

    token_ids: Sequence[int]
    scope: tuple[str, ...] = ()  # Of all tokens: the cache salt, and the LoRA adapter's name and content
    inputs: tuple[tuple[int, int, str], ...] = ()
    """Of each multi-modal input, in their order: its first token, how many it takes, and its identifier."""

    def begins_with(self, other: KVContent) -> bool:
        """Whether the KV of ``other`` is the first of this content."""
        same = self.scope == other.scope and self.inputs == other.inputs
        return same and list(self.token_ids[: len(other.token_ids)]) == list(other.token_ids)


@dataclass(frozen=True, slots=True)
class RequestView:
    """The data of an engine's request that the scheduler half reads."""

    request_id: str  # Of no other request that the engine has
    params: Mapping[str, Any] | None  # Its ``kv_transfer_params``
    prompt_token_ids: Sequence[int] | None  # Without them, as of embeddings, nothing is handed over
    num_prompt_tokens: int  # Tokens of its prompt
    num_computed_tokens: int  # Tokens whose KV its blocks hold
    extra: tuple[str, ...] = ()  # The inputs of its KV beside its tokens
    adapter: str = ""  # A digest of its LoRA adapter; empty where there is none, or it is unknown
    rejected: bool = False
    """The engine refused it before admission; it comes here only to be aborted, with a placeholder as its prompt."""
    whole_prompt: bool = False
    """D computes all of its prompt, for its log-probabilities, so nothing of it is loaded."""
    traceparent: str = ""  # The span that its spans belong to; empty where it is not traced
    content: KVContent | None = None  # Where a prefix of it may be read from another engine
