"""The plan of a read: the spans that one rank of D reads from one rank of P. Pure. Axes ``[L, B, H, N, C]``.

A span is a box of layers, heads and tokens of one of P's regions (``spans.Span``), in P's numbers of layers and heads.
Tokens count from the start of the prompt on both sides. A plan contains no blocks: each side finds the tokens that both
sides hold (``token_sharding.TokenShard``) through its own block table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvferry.connector.geometry.compatibility import LayerIndex, layer_index, refuse_missing
from kvferry.connector.geometry.packing import alternatives, excluded_regions
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.spans import MAX_RANGES, MAX_SPANS, Span, whole_tiles
from kvferry.connector.geometry.token_sharding import ALL_TOKENS, TokenShard, TokenSharding, num_common_tokens
from kvferry.connector.geometry.topology import HeadRead, TpKVTopology
from kvferry.transport.errors import GeometryError, IncompatiblePeerError

MAX_WINDOWS = 64
"""Bound on the windows of a read: P's first step may have been short, and each message takes 0.2 ms of both sides."""
STREAM_PARTS = 8
"""Messages of one window at least, where they can be small enough: the layers that P has computed leave while it
computes the others (``prefill_events.LAYER_GROUPS``)."""
STREAM_MESSAGES = 4
"""Messages of one part at least, where they are not few bytes: as many as ``tcp`` has flows."""


class PlannedSpan(NamedTuple):
    """A span to read, and its destination: ``region``, first ``layer`` and first ``head`` in D's numbers. The
    destination has the layer count, head count and tokens of the span. ``shard`` is P's: this P rank sends only the
    tokens of the span that the shard holds."""

    span: Span
    region: int
    layer: int
    head: int
    shard: TokenShard = ALL_TOKENS


def plan_reads(local: RankGeometry, remote: RankGeometry, tokens: Sequence[tuple[int, int]]) -> tuple[PlannedSpan, ...]:
    """The spans that D's rank ``local`` reads from one P rank; they do not overlap. In each region these are the heads
    that ``TpKVTopology.sources`` assigns to this P rank, in the layers that it holds: ``check_complete`` finds missing
    ones. A packed cache is read whole or in parts, never both (``packing.excluded_regions``). Raises
    IncompatiblePeerError: P's rank does not hold the heads; GeometryError: P lists a layer twice, or the plan has more
    than ``MAX_SPANS`` spans. ``tokens``: for each local region, those to read as (start, stop); in a packed region the
    plan widens them to whole tiles."""
    assert len(tokens) == len(local.regions)
    planned: list[PlannedSpan] = []
    for route in routes(local, remote):
        start, stop = tokens[route.region]
        region, theirs = local.regions[route.region], remote.regions[route.theirs]
        if stop <= start or not num_common_tokens(region.shard, theirs.shard, start, stop):
            continue
        ours, head = _head_box(region, theirs, route.heads)
        token = start // region.tile_tokens * region.tile_tokens
        num_tokens = whole_tiles(stop, region) - token
        num_layers, num_heads = route.num_layers, route.heads.num_heads
        span = Span(route.theirs, route.first, num_layers, head, num_heads, token, num_tokens, region.shard)
        planned.append(PlannedSpan(span, route.region, route.layer, ours, theirs.shard))
    if len(planned) > MAX_SPANS:
        raise GeometryError(f"{len(planned)} spans to read from one rank of the prefill engine, limit {MAX_SPANS}")
    return tuple(planned)


def check_complete(local: RankGeometry, planned: Iterable[PlannedSpan], tokens: Sequence[tuple[int, int]]) -> None:
    """Check that the plans of all P ranks in ``TpKVTopology.source_ranks``, of all stages, together contain every layer
    and head that D needs exactly once; a region without tokens to read needs nothing. Raises IncompatiblePeerError:
    names the first layer that no P rank holds, or that more than one stage holds, or whose tokens some shards lack."""
    boxes: list[_Box] = []
    shared: dict[int, list[PlannedSpan]] = {}
    for item in planned:
        if item.shard.whole:
            boxes.append((item.region, item.layer, item.span.num_layers, item.head, item.span.num_heads))
        else:
            shared.setdefault(item.region, []).append(item)
    with_tokens = zip(local.regions, tokens, strict=True)
    wanted = tuple([num_common_tokens(r.shard, r.shard, start, stop) > 0 for r, (start, stop) in with_tokens])
    if shared:
        times = {index: _times(local.regions[index], items, tokens[index]) for index, items in shared.items()}
        _check_once(local, _counts(local, boxes, times), wanted)
    else:
        _check_boxes(local, tuple(boxes), wanted)


_Box = tuple[int, int, int, int, int]  # of D's: (region, first layer, number of layers, first head, number of heads)


@lru_cache(maxsize=32)
def _check_boxes(local: RankGeometry, boxes: tuple[_Box, ...], wanted: tuple[bool, ...]) -> None:
    """``check_complete`` where each rank of P holds all tokens. The result is the same for all prompts, so it is
    cached; an error is not."""
    _check_once(local, _counts(local, boxes, {}), wanted)


def _counts(
    local: RankGeometry, boxes: Iterable[_Box], times: Mapping[int, npt.NDArray[np.int64]]
) -> list[npt.NDArray[np.int64]]:
    """How often the plans contain each (layer, head): for each region an array ``[L, H]``, the sum of ``boxes`` and
    ``times`` (by region number)."""
    counts = [np.zeros((len(region.layers), region.num_heads), dtype=np.int64) for region in local.regions]
    for region, layer, num_layers, head, num_heads in boxes:
        counts[region][layer : layer + num_layers, head : head + num_heads] += 1
    for index, more in times.items():
        counts[index] += more
    for whole, parts in alternatives(local).items():  # one stage may send it whole, another one in parts
        for part in parts:
            counts[part] += counts[whole]
        counts[whole] = counts[parts[0]]
    return counts


def _check_once(local: RankGeometry, counts: Iterable[npt.NDArray[np.int64]], wanted: Iterable[bool]) -> None:
    """Check that each (layer, head) of the wanted regions is in the plans once: ``counts`` are arrays ``[L, H]``. A
    layer that drafts may be missing."""
    for region, count, needed in zip(local.regions, counts, wanted, strict=True):
        if region.draft:
            count = np.where(count.any(axis=1, keepdims=True), count, 1)  # noqa: PLW2901
        if not needed or bool((count == 1).all()):
            continue
        fewest: list[int] = count.min(axis=1).tolist()
        missing = [layer for layer, times in zip(region.layers, fewest, strict=True) if not times]
        if missing:
            refuse_missing(missing, len(region.layers) - len(missing), consumer=True)
        layer = region.layers[int(np.argmax((count > 1).any(axis=1)))]
        raise IncompatiblePeerError("layers", f"{layer!r} needed once", f"{layer!r} on more than one stage")


def _times(region: RegionGeometry, items: Sequence[PlannedSpan], tokens: tuple[int, int]) -> npt.NDArray[np.int64]:
    """As ``_counts``, of a region whose tokens P's ranks shard: a (layer, head) counts once if all shards that have
    tokens of D's rank bring it once."""
    shardings = {item.shard.sharding for item in items}
    found = np.zeros((len(region.layers), region.num_heads), dtype=np.int64)
    for sharding in shardings:  # stages with different shardings hold different layers
        shards = [n for n in range(sharding.size) if num_common_tokens(region.shard, sharding.shard(n), *tokens)]
        count = np.zeros((sharding.size, *found.shape), dtype=np.int64)
        for item in items:
            if item.shard.sharding == sharding:
                layers = slice(item.layer, item.layer + item.span.num_layers)
                count[item.shard.rank, layers, item.head : item.head + item.span.num_heads] += 1
        if (count[shards] != count[shards[0]]).any():
            layer, head = np.argwhere((count[shards] != count[shards[0]]).any(axis=0))[0].tolist()
            there = [n for n in shards if count[n, layer, head]]
            raise IncompatiblePeerError(
                f"tokens of layer {region.layers[layer]!r}", f"those of shares {shards} needed", f"shares {there}"
            )
        found += count[shards[0]]
    return found


class _Route(NamedTuple):
    """Consecutive layers and heads that D's rank reads from one of P's regions, for any prompt. ``num_layers`` layers:
    from number ``layer`` on in D's region ``region``, from number ``first`` on in P's region ``theirs``. ``heads`` are
    global KV heads."""

    region: int
    layer: int
    theirs: int
    first: int
    num_layers: int
    heads: HeadRead


@lru_cache(maxsize=32)
def routes(local: RankGeometry, remote: RankGeometry) -> tuple[_Route, ...]:
    """The part of a plan that is the same for all prompts, and takes most time. Raises GeometryError: P lists a layer
    twice."""
    held, over, topology = layer_index(remote), excluded_regions(local, remote), TpKVTopology.between(local, remote)
    from_it: dict[tuple[int, TokenSharding, TokenSharding], HeadRead | None] = {}
    routes: list[_Route] = []
    for index, region in enumerate(local.regions):
        for layer, theirs, first, count in () if index in over else _runs(region, held):
            key = region.total_heads, region.shard.sharding, remote.regions[theirs].shard.sharding
            if key not in from_it:
                reads = topology.sources(None, *key)
                from_it[key] = next((read for read in reads if read.p_rank == remote.tp_rank), None)
            heads = from_it[key]
            if heads is not None:
                routes.append(_Route(index, layer, theirs, first, count, heads))
    return tuple(routes)


def _runs(ours: RegionGeometry, held: LayerIndex) -> list[tuple[int, int, int, int]]:
    """Layers that are consecutive on both sides, as (first layer in D's region, P's region, first layer in P's region,
    number of layers). ``held``: P's layers."""
    runs: list[tuple[int, int, int, int]] = []
    for place, layer in enumerate(ours.layers):
        where = held.get((ours.part, ours.draft, layer))
        if where is None:
            continue
        if runs:
            here, region, there, count = runs[-1]
            if here + count == place and (region, there + count) == where:
                runs[-1] = (here, region, there, count + 1)
                continue
        runs.append((place, *where, 1))
    return runs


def _head_box(ours: RegionGeometry, theirs: RegionGeometry, heads: HeadRead) -> tuple[int, int]:
    """The first of ``heads`` in D's and in P's numbers. Raises IncompatiblePeerError: P does not hold all of them."""
    low, high = heads.first_head, heads.first_head + heads.num_heads
    if low < theirs.head_start or high > theirs.head_start + theirs.num_heads:
        held = f"{theirs.head_start}..{theirs.head_start + theirs.num_heads}"
        raise IncompatiblePeerError(f"heads of tp_rank {heads.p_rank}", f"{low}..{high}", held)
    return low - ours.head_start, low - theirs.head_start


# --- reads whose prompt P still computes: what P computes first is read first ---------------------------------------


def in_windows(
    planned: Sequence[PlannedSpan], remote: RankGeometry, found: int, step_tokens: int
) -> tuple[PlannedSpan, ...]:
    """A plan of ``plan_reads`` in the order in which P's rank ``remote`` computes the tokens. The spans are cut at the
    tokens ``found`` (that P had before it began to compute), ``found + step_tokens`` (of one step, more than 0),
    ``found + 2 * step_tokens``, and so on; those that are packed in tiles, between tiles. Where there would be more
    than ``MAX_WINDOWS`` windows, ``MAX_SPANS`` spans or ``MAX_RANGES`` ranges of tokens, windows are longer."""
    if not planned:
        return ()
    first = min(item.span.token for item in planned)
    stop = max(item.span.token + item.span.num_tokens for item in planned)
    ranges = {(item.span.token, item.span.num_tokens) for item in planned}
    most = min(MAX_WINDOWS, MAX_SPANS // len(planned), MAX_RANGES // len(ranges)) - 1  # beside the tokens found
    if most < 1:
        return tuple(planned)
    steps = -(-max(0, stop - max(first, found)) // step_tokens)
    width = step_tokens * max(1, -(-steps // most))
    bounds = [first, *(bound for bound in range(found, stop, width) if bound > first), stop]
    ordered: list[PlannedSpan] = []
    for start, end in pairwise(bounds):
        ordered += (part for item in planned if (part := _within(item, remote, start, end, last=end == stop)))
    return tuple(ordered)


def part_bytes(planned: Sequence[PlannedSpan], remote: RankGeometry) -> int:
    """Bytes of a message that holds one of ``STREAM_PARTS`` parts of the layers of a span, for the largest span."""
    return max(
        -(-item.span.num_layers // STREAM_PARTS)
        * item.span.num_heads
        * item.span.num_tokens
        * remote.regions[item.span.region].content_bytes
        for item in planned
    )


def _within(item: PlannedSpan, remote: RankGeometry, start: int, end: int, *, last: bool) -> PlannedSpan | None:
    """The part of a span in tokens ``[start, end)``, or ``None``."""
    span, tile = item.span, remote.regions[item.span.region].tile_tokens
    low = max(span.token, start // tile * tile)
    high = min(span.token + span.num_tokens, end if last else end // tile * tile)
    if low >= high or not num_common_tokens(item.shard, span.shard, low, high):
        return None
    whole = low == span.token and high == span.token + span.num_tokens
    return item if whole else item._replace(span=replace(span, token=low, num_tokens=high - low))
