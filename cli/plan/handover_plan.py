"""Who reads what from whom in one hand-over, by the functions that ranks themselves use. Pure.

Axes ``[L, B, H, N, C]``.
"""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

from kvferry.cli.plan.deployment import Deployment, rank_geometries
from kvferry.cli.plan.model_shape import ModelShape
from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.engine_types import BlockTable
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.read_plan import PlannedSpan, check_complete, plan_reads
from kvferry.connector.geometry.spans import cut_span, span_tokens
from kvferry.connector.geometry.topology import TpKVTopology

RankName = tuple[int, int]
"""(pipeline stage, tensor-parallel rank)."""


class PlannedRead(NamedTuple):
    """What one rank of D reads from one rank of P of one kind of cache.

    ``cache``: the kind of KV, or the section of a state. ``num_layers`` layers of the model have it, from
    ``first_layer`` to ``last_layer``. ``first_head``: a global head. ``num_tokens``: of a state its rows. ``messages``:
    data messages, 0 where D reads P's pages itself. ``piece_bytes``: the mean length of a run of bytes that lies in one
    piece on both sides of a copy.
    """

    d: RankName
    p: RankName
    cache: str
    first_layer: int
    last_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    num_tokens: int
    messages: int
    nbytes: int
    piece_bytes: int


class Pair(NamedTuple):
    """A P engine and a D engine of one model, and the most bytes of a message; ``None`` where D reads P's pages."""

    shape: ModelShape
    p: Deployment
    d: Deployment
    slot_bytes: int | None


def plan_handover(pair: Pair, stop: int, start: int = 0) -> tuple[PlannedRead, ...]:
    """All reads of the hand-over of tokens ``start`` to ``stop`` of a prompt, in order of D's ranks.

    Raises:
        ConfigError: an engine of these sizes is not possible.
        IncompatiblePeerError: the two engines cannot hand over, for example between two dtypes.
        GeometryError: one token does not fit into a message, or there are too many messages.
    """
    p_ranks = rank_geometries(pair.shape, pair.p, "P")
    by_rank: dict[int, list[RankGeometry]] = {}
    for rank in p_ranks:
        by_rank.setdefault(rank.tp_rank, []).append(rank)
    found = []
    for local in rank_geometries(pair.shape, pair.d, "D"):
        planned = []
        tokens = [_tokens(region, start, stop) for region in local.regions]
        for p_rank in TpKVTopology.between(local, p_ranks[0]).source_ranks():
            for remote in by_rank[p_rank]:
                compatible(local, remote)
                for item in plan_reads(local, remote, tokens):
                    planned.append(item)
                    found.append(_read(pair, local, remote, item))
        check_complete(local, planned, tokens)
    return tuple(found)


def _tokens(region: RegionGeometry, start: int, stop: int) -> tuple[int, int]:
    """The tokens that D reads: of a window those in its blocks, of a state the one state, as ``LoadPlanner`` asks."""
    if region.kind == "state":
        return 0, 1
    first = BlockTable(region.kind, region.block_size, region.window).first_needed(stop)
    return max(start, first // region.block_size * region.block_size), stop


def _read(pair: Pair, local: RankGeometry, remote: RankGeometry, item: PlannedSpan) -> PlannedRead:
    span = item.span
    ours, theirs = local.regions[item.region], remote.regions[span.region]
    tokens = span_tokens(span, theirs.shard)
    messages = 0
    if pair.slot_bytes is not None:
        messages = len(cut_span(span, theirs.content_bytes, pair.slot_bytes, theirs.block_size, theirs.shard))
    layers = [int(name.split(".")[2]) for name in theirs.layers[span.layer : span.layer + span.num_layers]]
    return PlannedRead(
        d=(local.pp_rank, local.tp_rank),
        p=(remote.pp_rank, remote.tp_rank),
        cache=theirs.part or theirs.kind,
        first_layer=layers[0],
        last_layer=layers[-1],
        num_layers=span.num_layers,
        first_head=theirs.head_start + span.head,
        num_heads=span.num_heads,
        num_tokens=tokens,
        messages=messages,
        nbytes=span.num_layers * span.num_heads * tokens * theirs.content_bytes,
        piece_bytes=_piece_bytes(pair, ours, theirs, span.num_heads),
    )


def _piece_bytes(pair: Pair, ours: RegionGeometry, theirs: RegionGeometry, num_heads: int) -> int:
    """The mean bytes of a run of a span of ``num_heads`` heads that lies in one piece in both caches."""
    if ours.kind == "state":  # heads lie side by side; those of a convolution in each of its rows
        return num_heads * ours.content_bytes * (1 if ours.part.startswith("conv") else ours.block_size)
    content, ends = ours.content_bytes, lcm(ours.block_size, theirs.block_size)
    tokens = ends / (ends // ours.block_size + ends // theirs.block_size - 1)  # between two ends of blocks of either
    layouts = {pair.d.layout, pair.p.layout}
    whole = ours.num_heads == theirs.num_heads == num_heads
    if num_heads == 1 and (layouts == {"HND"} or whole):
        return round(tokens * content)
    if len(layouts) > 1:
        return content
    if layouts == {"HND"}:  # the heads of a block lie one behind the other
        return round(tokens * content) * (num_heads if ours.block_size == theirs.block_size else 1)
    return round(tokens * num_heads * content) if whole else num_heads * content
