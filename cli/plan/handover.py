"""Who reads what from whom in one hand-over between engines that do not run yet, by the functions that ranks themselves
use. Pure.

Axes ``[L, B, H, N, C]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Literal, NamedTuple

from kvferry.cli.plan.model import ModelShape
from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.engine_types import BlockTable
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.read_plan import PlannedSpan, check_complete, plan_reads
from kvferry.connector.geometry.spans import cut_span, span_tokens
from kvferry.connector.geometry.topology import MAX_RANKS, TpKVTopology
from kvferry.transport.errors import ConfigError

MAX_PLANNED_RANKS = 1024
"""Bound on the ranks of one engine: each rank of D is planned against each of P that it reads from."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """How an engine divides its model. ``layout``: the order of the axes in a page, ``HND`` or ``NHD``."""

    tp_size: int = 1
    pp_size: int = 1
    block_size: int = 16
    layout: Literal["HND", "NHD"] = "NHD"


def rank_geometries(shape: ModelShape, deployment: Deployment, name: str) -> tuple[RankGeometry, ...]:
    """The geometry of each rank, stage by stage, as the rank itself would send it to its peers. ``name``: of the
    engine, for errors. Raises ConfigError: vLLM starts no engine of these sizes."""
    tp, pp = deployment.tp_size, deployment.pp_size
    if tp > MAX_RANKS or shape.attention_heads % tp:
        raise ConfigError(f"{name}: TP {tp} does not divide the {shape.attention_heads} attention heads of the model")
    if pp > shape.num_layers:
        raise ConfigError(f"{name}: PP {pp} is outside 1..{shape.num_layers}; each stage needs one of the layers")
    if tp * pp > MAX_PLANNED_RANKS:
        raise ConfigError(f"{name}: TP {tp} x PP {pp} makes {tp * pp} ranks, at most {MAX_PLANNED_RANKS} are planned")
    return tuple(
        _rank(shape, deployment, tp_rank, pp_rank, layers)
        for pp_rank, layers in enumerate(stage_layers(shape.num_layers, pp))
        for tp_rank in range(tp)
    )


def stage_layers(num_layers: int, pp_size: int) -> tuple[range, ...]:
    """The layers of each pipeline stage: the rule of vLLM's ``get_pp_indices``, where ``VLLM_PP_LAYER_PARTITION`` is
    not set. Layers that are left over go to the stages before the last one, from the back."""
    counts = [num_layers // pp_size] * pp_size
    for stage in range(2, num_layers % pp_size + 2):
        counts[-stage] += 1
    first = [sum(counts[:stage]) for stage in range(pp_size)]
    return tuple(range(start, start + count) for start, count in zip(first, counts, strict=True))


def _rank(shape: ModelShape, deployment: Deployment, tp_rank: int, pp_rank: int, layers: range) -> RankGeometry:
    regions, tp = [], deployment.tp_size
    for kv in shape.kv:
        first, count = TpKVTopology.head_interval(tp_rank, tp, kv.total_heads)
        held = tuple(f"model.layers.{layer}.self_attn.attn" for layer in kv.layers if layer in layers)
        region = RegionGeometry(
            kind=kv.kind, layers=held, block_size=deployment.block_size, head_start=first, num_heads=count,
            total_heads=kv.total_heads, content_bytes=kv.content_bytes, dtype=kv.dtype, window=kv.window,
        )  # fmt: skip
        regions.append(region)
    return RankGeometry(
        tp_rank=tp_rank, tp_size=tp, pp_rank=pp_rank, pp_size=deployment.pp_size,
        head_counts=tuple(sorted({region.total_heads for region in regions})),
        regions=tuple(region for region in regions if region.layers),
    )  # fmt: skip


# --- reads ----------------------------------------------------------------------------------------------------------

RankName = tuple[int, int]
"""(pipeline stage, tensor-parallel rank)."""


class PlannedRead(NamedTuple):
    """What one rank of D reads from one rank of P of one kind of KV."""

    d: RankName
    p: RankName
    cache: str  # The kind of KV
    first_layer: int
    last_layer: int
    num_layers: int  # Layers of this kind between these
    first_head: int  # Global
    num_heads: int
    num_tokens: int
    messages: int  # Data messages, 0 where D reads P's pages itself
    nbytes: int
    piece_bytes: int  # The mean length of a run of bytes that lies in one piece on both sides of a copy


class Pair(NamedTuple):
    """A P engine and a D engine of one model, and the most bytes of a message; ``None`` where D reads P's pages."""

    shape: ModelShape
    p: Deployment
    d: Deployment
    slot_bytes: int | None


def plan_handover(pair: Pair, stop: int) -> tuple[PlannedRead, ...]:
    """All reads of the hand-over of a prompt of ``stop`` tokens, in order of D's ranks. Raises ConfigError: an engine
    of these sizes is not possible; IncompatiblePeerError: the two cannot hand over, for example between two dtypes;
    GeometryError: one token does not fit into a message, or there are too many messages."""
    p_ranks = rank_geometries(pair.shape, pair.p, "P")
    found = []
    for local in rank_geometries(pair.shape, pair.d, "D"):
        planned = []
        tokens = [_tokens(region, stop) for region in local.regions]
        sources = TpKVTopology.between(local, p_ranks[0]).source_ranks()
        for remote in (rank for source in sources for rank in p_ranks if rank.tp_rank == source):
            compatible(local, remote)
            for item in plan_reads(local, remote, tokens):
                planned.append(item)
                found.append(_read(pair, local, remote, item))
        check_complete(local, planned, tokens)
    return tuple(found)


def _tokens(region: RegionGeometry, stop: int) -> tuple[int, int]:
    """The tokens that D reads: of a window those in its blocks, as ``LoadPlanner`` asks."""
    first = BlockTable(region.kind, region.block_size, region.window).first_needed(stop)
    return first // region.block_size * region.block_size, stop


def _read(pair: Pair, local: RankGeometry, remote: RankGeometry, item: PlannedSpan) -> PlannedRead:
    span = item.span
    ours, theirs = local.regions[item.region], remote.regions[span.region]
    tokens, messages = span_tokens(span, theirs.shard), 0
    if pair.slot_bytes is not None:
        messages = len(cut_span(span, theirs.content_bytes, pair.slot_bytes, theirs.block_size, theirs.shard))
    layers = [int(name.split(".")[2]) for name in theirs.layers[span.layer : span.layer + span.num_layers]]
    return PlannedRead(
        (local.pp_rank, local.tp_rank), (remote.pp_rank, remote.tp_rank), theirs.kind,
        layers[0], layers[-1], span.num_layers, theirs.head_start + span.head, span.num_heads, tokens, messages,
        nbytes=span.num_layers * span.num_heads * tokens * theirs.content_bytes,
        piece_bytes=_piece_bytes(pair, ours, theirs, span.num_heads),
    )  # fmt: skip


def _piece_bytes(pair: Pair, ours: RegionGeometry, theirs: RegionGeometry, num_heads: int) -> int:
    """The mean bytes of a run of a span of ``num_heads`` heads that lies in one piece in both caches."""
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
