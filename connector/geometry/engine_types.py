"""What an engine tells of itself, in no engine's terms: its ranks, its layer groups, its requests. Pure data."""

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

    ``window`` counts the tokens of a sliding window or of a local chunk, outside of which the engine gives blocks back
    and puts the null block, number 0, in their place; ``extra`` those that it keeps beyond a sliding window. Of kind
    ``state``, block n holds the state after the last computed token of the n-th ``block_size`` tokens. ``split`` says
    how ranks share its tokens out; ``block_size`` counts what a block stands for on all of them together.
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
        """The first token that computing token number ``num_computed`` attends to; rules of vLLM's
        ``get_num_skipped_tokens``."""
        if self.kind == "sliding_window":
            return max(0, num_computed - self.window + 1 - self.extra)
        if self.kind == "chunked_local":
            return num_computed // self.window * self.window
        return 0


@dataclass(frozen=True, slots=True)
class CacheDtype:
    """What the elements of a layer group's caches stand for; see ``GroupGeometry``. ``scales`` of K and V by layer."""

    dtype: str
    keys: int | None = None
    scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind and head count under one block table, number ``table``; see ``GroupGeometry``.

    ``block_size`` counts the tokens of a block on one rank, of those that ``split`` gives it. Without ``numbers`` the
    elements are what their tensors say. ``sections``: what each page consists of where it is a state; each has a head
    count of its own, which count then instead of ``total_heads``.
    """

    kind: CacheKind
    layers: tuple[str, ...]
    block_size: int
    total_heads: int
    window: int = 0
    packing: str = ""
    table: int = 0
    sharding: TokenSharding = UNSHARDED[0]
    numbers: CacheDtype | None = None
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
    """What the scheduler half reads of an engine's request.

    ``extra``: what its KV depends on beside its tokens. ``rejected``: it was refused before it was admitted and comes
    here only to be aborted, with a placeholder for a prompt. ``whole_prompt``: D computes all of its prompt, for its
    log-probabilities, so nothing of it is loaded.
    """

    request_id: str
    params: Mapping[str, Any] | None
    prompt_token_ids: Sequence[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    extra: tuple[str, ...] = ()
    rejected: bool = False
    whole_prompt: bool = False
