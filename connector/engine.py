"""What an engine tells of itself, in no engine's terms: its ranks, its layer groups, its requests. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connector.geometry import GroupKind


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """One block table of the engine: its layers, and the tokens of one of its blocks; see ``GroupGeometry``."""

    kind: GroupKind
    layers: tuple[str, ...]
    block_size: int
    window: int = 0
    packing: str = ""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """This rank's place in its engine, and the model it runs. ``model``: facts that must agree with a peer's."""

    engine_id: str
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    total_num_kv_heads: int
    is_mla: bool
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
    here only to be aborted, with a placeholder for a prompt.
    """

    request_id: str
    params: Mapping[str, Any] | None
    prompt_token_ids: Sequence[int] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    extra: tuple[str, ...] = ()
    rejected: bool = False
