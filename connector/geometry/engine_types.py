"""The description of an engine, independent of the engine: its ranks, layer groups and requests. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.connector.geometry.rank_geometry import CacheKind
from kvferry.connector.geometry.recurrent_state import Section
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding


@dataclass(frozen=True, slots=True)
class BlockTable:
    """One of the block tables that the engine keeps for a request.

    ``window`` counts the tokens of a sliding window or of a local chunk. Outside the window the engine frees blocks and
    puts the null block, number 0, in their place. ``extra`` counts the tokens that it keeps beyond a sliding window. In
    a table of kind ``state``, block n holds the state after the last computed token of the n-th ``block_size`` tokens.
    ``sharding``: how ranks shard its tokens; ``block_size`` counts the tokens of a block on all ranks together.
    """

    kind: CacheKind
    block_size: int
    window: int = 0
    extra: int = 0
    sharding: TokenSharding = UNSHARDED[0]

    @property
    def whole(self) -> bool:
        """Whether it holds every token of a request."""
        return self.kind in ("full", "mla")

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
    """The tokens of one request that the engine computes in one step: ``count`` of them, the first is number ``start``.

    ``block_ids``: per block table, the blocks that the request got since its last step; where ``all_blocks``, all that
    it has, as in its first step, and in the first one after the engine has preempted it.
    """

    request_id: str
    start: int
    count: int
    block_ids: Sequence[Sequence[int]]
    all_blocks: bool = False


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """The meaning of a layer group's cache elements; see ``RegionGeometry``. ``scales``: of K and V, by layer."""

    dtype: str
    keys: int | None = None
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind and head count under one block table, number ``table``; see ``RegionGeometry``.

    ``block_size`` counts the tokens of a block on one rank: only tokens that ``sharding`` gives the rank. Without
    ``cache_dtype`` the tensors define the dtype. ``sections``: the sections of each page of a state. Each section has a
    head count of its own, which replaces ``total_heads``.
    """

    kind: CacheKind
    layers: tuple[str, ...]
    block_size: int
    total_heads: int
    window: int = 0
    packing: str = ""
    table: int = 0
    sharding: TokenSharding = UNSHARDED[0]
    cache_dtype: CacheDtype | None = None
    sections: tuple[Section, ...] = ()

    @property
    def head_counts(self) -> frozenset[int]:
        """Global heads of each of its regions."""
        return frozenset(section.total_heads for section in self.sections) or frozenset({self.total_heads})


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This rank's place in its engine, and the model it runs. ``model``: facts that must agree with a peer's."""

    engine_id: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    model: Mapping[str, str]
    dp_rank: int = 0

    @property
    def port_offset(self) -> int:
        """Added to a fixed ``side_channel_port``, so that ranks on one host do not collide."""
        return (self.dp_rank * self.pp_size + self.pp_rank) * self.tp_size + self.tp_rank


@dataclass(frozen=True, slots=True)
class RequestView:
    """The data of an engine's request that the scheduler half reads.

    ``extra``: the inputs of its KV beside its tokens. ``adapter``: a digest of its LoRA adapter; empty where there is
    none, or it is unknown. ``rejected``: the engine refused the request before admission; it comes here only to be
    aborted, with a placeholder as its prompt. ``whole_prompt``: D computes all of its prompt, for its
    log-probabilities, so nothing of it is loaded. ``traceparent``: the span that its spans belong to; empty where it is
    not traced.
    """

    request_id: str
    params: Mapping[str, Any] | None
    prompt_token_ids: Sequence[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    extra: tuple[str, ...] = ()
    adapter: str = ""
    rejected: bool = False
    whole_prompt: bool = False
    traceparent: str = ""
