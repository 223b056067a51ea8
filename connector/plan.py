"""What one rank reads from another, as spans, and how a span is cut into messages. Pure. Axes ``[L, B, H, N, C]``.

A span is a box in (layer, head, token) space of one of P's regions (``protocol.Span``, P's numbering). Blocks do
not appear: tokens count from the start of the prompt on both sides, and each side finds those that both hold
(``context.Share``) through its own block table. A chunk is one message, a box inside a span, on the wire contiguous
``[layers][heads][tokens][C]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.connector import topology
from kvferry.connector.context import WHOLE, Share, Split, common, num_common
from kvferry.connector.dtypes import check_numbers, check_same, common_layers
from kvferry.connector.errors import GeometryError, IncompatiblePeerError
from kvferry.connector.geometry import GroupGeometry, RankGeometry
from kvferry.connector.packing import alternatives, passed_over
from kvferry.connector.protocol import Span
from kvferry.connector.topology import MAX_RANKS, HeadRead

MAX_CHUNKS = 1 << 20
"""Bound on the messages that one span is cut into; a peer names the span and the size of a message."""


class PlannedSpan(NamedTuple):
    """A span to read, and where it goes: region ``group``, first ``layer`` and first ``head`` in D's own numbering.

    Layer and head counts and tokens are the span's, but for those outside P's ``share``.
    """

    span: Span
    group: int
    layer: int
    head: int
    share: Share = WHOLE


class Chunk(NamedTuple):
    """A part of a span: offsets ``layer`` and ``token`` count from the span's first ones, tokens among those that both
    sides hold; all of its heads."""

    layer: int
    num_layers: int
    token: int
    num_tokens: int


_new_chunk: Callable[[tuple[int, int, int, int]], Chunk] = partial(tuple.__new__, Chunk)


def compatible(local: RankGeometry, remote: RankGeometry, *, consumer: bool = True, convert: bool = False) -> None:
    """Whether KV can pass between two ranks at all; layouts, block sizes and parallel sizes may differ.

    The order inside packed tiles, and with it their size, must agree (``GroupGeometry.packing``).

    Args:
        local: ours.
        remote: the peer's.
        consumer: whether we are D; P calls it with ``False``.
        convert: whether D converts numbers.

    Raises:
        IncompatiblePeerError: names the field and both values.
        GeometryError: a geometry contradicts itself.
    """
    for geometry in (local, remote):
        check_geometry(geometry)
    needs, has = (local, remote) if consumer else (remote, local)
    held = _layer_index(has)
    missing = []
    over = passed_over(needs, has)
    for number, group in enumerate(needs.groups):
        if number in over:
            continue
        checked: set[int] = set()
        for layer in group.layers:
            where = held.get((group.part, layer))
            if where is None:
                if any(layer in theirs.layers for theirs in has.groups):
                    _refuse_parts(layer, *((needs, has) if consumer else (has, needs)))
                missing.append(layer)
            elif where[0] not in checked:
                checked.add(where[0])
                theirs = has.groups[where[0]]
                _same_form(layer, *((group, theirs) if consumer else (theirs, group)), convert)
    if has.pp_size == 1 and missing:
        _refuse_missing(missing, len({layer for group in has.groups for layer in group.layers}), consumer)


def check_geometry(geometry: RankGeometry) -> None:
    """That a geometry is one that a rank can have.

    Raises:
        GeometryError: ranks outside sizes, heads other than the rank's interval, a share of tokens that is not the
            rank's, a layer listed twice, or scales that are none.
    """
    for axis in ("tp", "pp"):
        rank, size = getattr(geometry, f"{axis}_rank"), getattr(geometry, f"{axis}_size")
        if size > MAX_RANKS or rank >= size:
            raise GeometryError(
                f"{axis}_rank {rank} of {axis}_size {size}, expected a rank below the size, at most {MAX_RANKS}"
            )
    for group in geometry.groups:
        heads = group.total_heads
        if heads not in geometry.head_counts:
            raise GeometryError(
                f"layer {group.layers[0]!r}: {heads} heads in all, which is not one of the head counts "
                f"{', '.join(map(str, geometry.head_counts))}"
            )
        expected = topology.head_interval(geometry.tp_rank, geometry.tp_size, heads)
        if (group.head_start, group.num_heads) != expected:
            raise GeometryError(
                f"layer {group.layers[0]!r}: tp_rank {geometry.tp_rank} of {geometry.tp_size} holds heads "
                f"{group.head_start}..{group.head_start + group.num_heads}, "
                f"expected {expected[0]}..{sum(expected)} of {heads}"
            )
        _check_share(group, geometry)
        check_numbers(group)
    _layer_index(geometry)


def _check_share(group: GroupGeometry, geometry: RankGeometry) -> None:
    share = group.share
    who = f"layer {group.layers[0]!r}: rank {share.rank} of {share.size} that share tokens out, {share.interleave} each"
    if share.split not in geometry.splits or share != share.split.share(geometry.tp_rank):
        raise GeometryError(f"{who}, is not tp_rank {geometry.tp_rank} of an engine with {geometry.splits}")
    if share.whole:
        return
    if group.kind not in ("full", "mla") or group.packing:
        raise GeometryError(f"{who}: caches of kind {group.kind}{group.packing and ', packed,'} are not carried so")
    if group.block_size % share.interleave:
        raise GeometryError(f"{who}: that does not divide a block of {group.block_size}")
    if geometry.tp_size // group.total_heads < share.size:
        raise GeometryError(
            f"{who}: of {geometry.tp_size} tensor-parallel ranks, fewer hold each of {group.total_heads} heads"
        )


def plan_reads(local: RankGeometry, remote: RankGeometry, tokens: Sequence[tuple[int, int]]) -> tuple[PlannedSpan, ...]:
    """What D's rank reads from one P rank: of each of its regions the heads that ``topology.sources`` gives this rank.
    A packed cache is read whole or in parts (``packing.passed_over``).

    Args:
        local: D's rank.
        remote: P's rank.
        tokens: per local region, the tokens to read as (start, stop). A packed region is read in whole tiles.

    Returns:
        Spans that do not overlap; layers that this P rank does not hold are left out. Once the plans of all sources
        are there, ``check_complete`` says whether anything is.

    Raises:
        IncompatiblePeerError: P's rank does not hold the heads.
        GeometryError: a layer listed twice.
    """
    assert len(tokens) == len(local.groups)
    held, over = _layer_index(remote), passed_over(local, remote)
    from_it: dict[tuple[int, Split, Split], HeadRead | None] = {}
    planned: list[PlannedSpan] = []
    for index, (group, (start, stop)) in enumerate(zip(local.groups, tokens, strict=True)):
        if stop <= start or index in over:
            continue
        for layer, theirs, first, count in _runs(group, held):
            share = remote.groups[theirs].share
            key = group.total_heads, group.share.split, share.split
            if key not in from_it:
                reads = topology.sources(local.tp_rank, local.tp_size, remote.tp_size, key[0], False, *key[1:])
                from_it[key] = next((read for read in reads if read.p_rank == remote.tp_rank), None)
            heads = from_it[key]
            if heads is None or not num_common(group.share, share, start, stop):
                continue
            ours, head = _head_box(group, remote.groups[theirs], heads)
            token = start // group.tile_tokens * group.tile_tokens
            span = Span(
                theirs, first, count, head, heads.num_heads, token, whole_tiles(stop, group) - token, group.share
            )
            planned.append(PlannedSpan(span, index, layer, ours, share))
    return tuple(planned)


def plan_sources(
    local: RankGeometry, remotes: Mapping[tuple[int, int], RankGeometry], tokens: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], tuple[PlannedSpan, ...]]:
    """All that D's rank reads, by (pipeline rank, tensor rank) of P; only P ranks that are read from appear.

    Args:
        local: D's rank.
        remotes: P's ranks: for every stage at least those that ``topology.readers`` names.
        tokens: as in ``plan_reads``.

    Raises:
        IncompatiblePeerError: layers that D needs and no stage of P holds, or heads that a P rank does not hold.
        GeometryError: a stage, or a rank that must be read from, is missing from ``remotes``.
    """
    any_remote = next(iter(remotes.values()), None)
    if any_remote is None:
        raise GeometryError("no P rank is known, expected at least one")
    p_ranks = topology.readers(
        local.tp_rank, local.tp_size, any_remote.tp_size, local.head_counts, local.splits, any_remote.splits
    )
    plans: dict[tuple[int, int], tuple[PlannedSpan, ...]] = {}
    for stage in range(any_remote.pp_size):
        for p_rank in p_ranks:
            remote = remotes.get((stage, p_rank))
            if remote is None:
                raise GeometryError(f"P rank (pp {stage}, tp {p_rank}) is not known, and must be read from")
            spans = plan_reads(local, remote, tokens)
            if spans:
                plans[stage, p_rank] = spans
    check_complete(local, [item for spans in plans.values() for item in spans], tokens)
    return plans


def check_complete(local: RankGeometry, planned: Iterable[PlannedSpan], tokens: Sequence[tuple[int, int]]) -> None:
    """That plans, those of all sources together, bring every layer and head that D needs exactly once.

    Raises:
        IncompatiblePeerError: names the first layer that no P rank holds, or that more than one stage holds.
    """
    counts = [np.zeros((len(group.layers), group.num_heads), dtype=np.int64) for group in local.groups]
    shared: dict[int, list[PlannedSpan]] = {}
    for item in planned:
        if not item.share.whole:
            shared.setdefault(item.group, []).append(item)
            continue
        layers = slice(item.layer, item.layer + item.span.num_layers)
        counts[item.group][layers, item.head : item.head + item.span.num_heads] += 1
    for index, items in shared.items():
        counts[index] += _times(local.groups[index], items, tokens[index])
    for whole, parts in alternatives(local).items():  # one stage may give it whole, another one in parts
        for part in parts:
            counts[part] += counts[whole]
        counts[whole] = counts[parts[0]]
    for group, count, (start, stop) in zip(local.groups, counts, tokens, strict=True):
        if stop <= start or not group.share.count(stop) - group.share.count(start) or bool((count == 1).all()):
            continue
        fewest: list[int] = count.min(axis=1).tolist()
        missing = [layer for layer, times in zip(group.layers, fewest, strict=True) if not times]
        if missing:
            _refuse_missing(missing, len(group.layers) - len(missing), consumer=True)
        layer = group.layers[int(np.argmax((count > 1).any(axis=1)))]
        raise IncompatiblePeerError("layers", f"{layer!r} needed once", f"{layer!r} on more than one stage")


def _times(group: GroupGeometry, items: Sequence[PlannedSpan], tokens: tuple[int, int]) -> npt.NDArray[np.int64]:
    """How often each (layer, head) of a region comes in all of its tokens, from ranks that share them out.

    Raises:
        IncompatiblePeerError: some tokens come oftener than others.
    """
    splits = {item.share.split for item in items}
    found = np.zeros((len(group.layers), group.num_heads), dtype=np.int64)
    for split in splits:  # stages that are shared out in different ways hold different layers
        shares = [n for n in range(split.size) if num_common(group.share, split.share(n), *tokens)]
        count = np.zeros((split.size, *found.shape), dtype=np.int64)
        for item in items:
            if item.share.split == split:
                layers = slice(item.layer, item.layer + item.span.num_layers)
                count[item.share.rank, layers, item.head : item.head + item.span.num_heads] += 1
        if (count[shares] != count[shares[0]]).any():
            layer, head = np.argwhere((count[shares] != count[shares[0]]).any(axis=0))[0].tolist()
            there = [n for n in shares if count[n, layer, head]]
            raise IncompatiblePeerError(
                f"tokens of layer {group.layers[layer]!r}", f"those of shares {shares} needed", f"shares {there}"
            )
        found += count[shares[0]]
    return found


def check_span(span: Span, geometry: RankGeometry, num_tokens: int) -> None:
    """That a span that a peer sent lies inside our rank and inside a prompt of ``num_tokens``.

    Raises:
        GeometryError: names what is out of bounds.
    """
    if span.group >= len(geometry.groups):
        raise GeometryError(f"span of group {span.group}, there are {len(geometry.groups)}")
    group = geometry.groups[span.group]
    span.share.check()
    for axis, first, count, bound in (
        ("layers", span.layer, span.num_layers, len(group.layers)),
        ("heads", span.head, span.num_heads, group.num_heads),
        ("tokens", span.token, span.num_tokens, whole_tiles(num_tokens, group)),
    ):
        if first < 0 or count < 1 or first + count > bound:
            raise GeometryError(f"span of {axis} {first}..{first + count} is outside 0..{bound} of group {span.group}")
    if span.token % group.tile_tokens or span.num_tokens % group.tile_tokens:
        raise GeometryError(
            f"span of tokens {span.token}..{span.token + span.num_tokens} cuts through tiles of {group.tile_tokens} "
            f"tokens, which group {span.group} packs ({group.packing})"
        )


def span_tokens(span: Span, share: Share) -> int:
    """Tokens of a span that both sides hold. ``share`` is P's."""
    return num_common(share, span.share, span.token, span.token + span.num_tokens)


def whole_tiles(num_tokens: int, group: GroupGeometry) -> int:
    """Tokens of the tiles that hold the first ``num_tokens``; the same number where the group is not packed."""
    return -(-num_tokens // group.tile_tokens) * group.tile_tokens


def check_spans(spans: Sequence[Span], geometry: RankGeometry, num_tokens: int) -> None:
    """``check_span`` for each, and that together they ask for no more than the rank holds of the prompt.

    Raises:
        GeometryError: names what is out of bounds.
    """
    asked: dict[int, int] = {}
    for span in spans:
        check_span(span, geometry, num_tokens)
        held = span_tokens(span, geometry.groups[span.group].share)
        if not held:
            raise GeometryError(f"span of tokens {span.token}..{span.token + span.num_tokens}, of which we hold none")
        asked[span.group] = asked.get(span.group, 0) + span.num_layers * span.num_heads * held
    for index, elements in asked.items():
        group = geometry.groups[index]
        bound = len(group.layers) * group.num_heads * group.share.count(whole_tiles(num_tokens, group))
        if elements > bound:
            raise GeometryError(f"spans of group {index} ask for {elements} (layer, head, token) elements of {bound}")


def chunks(span: Span, content_bytes: int, chunk_bytes: int, token_align: int = 1, share: Share = WHOLE) -> list[Chunk]:
    """A span cut into messages of at most ``chunk_bytes``; the same on both sides. ``share`` is P's.

    As many whole layers with all tokens as fit; where one layer does not fit, runs of its tokens, with cuts at
    multiples of ``token_align`` (counted from the start of the prompt, as blocks are) wherever one is within reach.

    Raises:
        GeometryError: one token of the span does not fit into ``chunk_bytes``, or more than ``MAX_CHUNKS`` result.
    """
    first, num_tokens = span.token, span.num_tokens
    if not (share.whole and span.share.whole):
        places = common(share, span.share, span.token, span.token + span.num_tokens)
        first, num_tokens = int(places.starts[0]), places.num_tokens
        token_align = token_align if places.dense else 1
    token_bytes = span.num_heads * content_bytes
    layer_bytes = token_bytes * num_tokens
    most = chunk_bytes // token_bytes
    if most < 1:
        raise GeometryError(
            f"one token of {span.num_heads} heads x {content_bytes} bytes does not fit into a message of "
            f"{chunk_bytes} bytes; raise slot_bytes to {token_bytes} or more"
        )
    if layer_bytes <= chunk_bytes:
        step = chunk_bytes // layer_bytes
        if -(-span.num_layers // step) > MAX_CHUNKS:
            raise GeometryError(f"span of {span.num_layers} layers makes more than {MAX_CHUNKS} messages")
        return [
            Chunk(layer, min(step, span.num_layers - layer), 0, num_tokens) for layer in range(0, span.num_layers, step)
        ]
    # Alignment shortens a run by less than half on average.
    if span.num_layers * -(-2 * num_tokens // most) > MAX_CHUNKS:
        raise GeometryError(
            f"span of {span.num_layers} layers x {num_tokens} tokens makes more than {MAX_CHUNKS} messages "
            f"of {chunk_bytes} bytes"
        )
    runs = _token_runs(first, num_tokens, most, max(1, token_align))
    # Ten thousand chunks for a long prompt: zip and tuple.__new__ take half the time of calling Chunk.
    layers = chain.from_iterable(repeat(layer, len(runs)) for layer in range(span.num_layers))
    starts, counts = ([run[side] for run in runs] * span.num_layers for side in (0, 1))
    return list(map(_new_chunk, zip(layers, repeat(1), starts, counts, strict=False)))


def chunk_nbytes(chunk: Chunk, span: Span, content_bytes: int) -> int:
    """Bytes of a chunk on the wire."""
    return chunk.num_layers * span.num_heads * chunk.num_tokens * content_bytes


def _token_runs(first: int, total: int, most: int, align: int) -> list[tuple[int, int]]:
    runs, token = [], 0
    while token < total:
        stop = min(token + most, total)
        if stop < total:
            aligned = (first + stop) // align * align - first
            stop = aligned if aligned > token else stop
        runs.append((token, stop - token))
        token = stop
    return runs


_LayerIndex = dict[tuple[str, str], tuple[int, int]]
"""(region, place in it) by part and layer name."""


def _layer_index(geometry: RankGeometry) -> _LayerIndex:
    index = {
        (group.part, layer): (g, i) for g, group in enumerate(geometry.groups) for i, layer in enumerate(group.layers)
    }
    if len(index) != sum(len(group.layers) for group in geometry.groups):
        seen: set[tuple[str, str]] = set()
        for group in geometry.groups:
            for layer in group.layers:
                if (group.part, layer) in seen:
                    raise GeometryError(f"layer {layer!r} is listed twice")
                seen.add((group.part, layer))
    return index


def _runs(ours: GroupGeometry, held: _LayerIndex) -> list[tuple[int, int, int, int]]:
    """Layers consecutive on both sides, as (first here, region there, first there, count)."""
    runs: list[tuple[int, int, int, int]] = []
    for place, layer in enumerate(ours.layers):
        where = held.get((ours.part, layer))
        if where is None:
            continue
        if runs:
            here, group, there, count = runs[-1]
            if here + count == place and (group, there + count) == where:
                runs[-1] = (here, group, there, count + 1)
                continue
        runs.append((place, *where, 1))
    return runs


def _head_box(ours: GroupGeometry, theirs: GroupGeometry, heads: HeadRead) -> tuple[int, int]:
    """The first of ``heads`` in D's numbering and in P's."""
    low, high = heads.first_head, heads.first_head + heads.num_heads
    if low < theirs.head_start or high > theirs.head_start + theirs.num_heads:
        raise IncompatiblePeerError(
            f"heads of tp_rank {heads.p_rank}",
            f"{low}..{high}",
            f"{theirs.head_start}..{theirs.head_start + theirs.num_heads}",
        )
    return low - ours.head_start, low - theirs.head_start


def _same_form(layer: str, ours: GroupGeometry, theirs: GroupGeometry, convert: bool) -> None:
    """Blocks outside a window may be kept by one side and not by the other; what a block holds is the same."""
    name = f"layer {layer!r}" + (f" ({ours.part})" if ours.part else "")
    if ours.kind != theirs.kind and {ours.kind, theirs.kind} & {"mla", "state"}:
        raise IncompatiblePeerError(f"kind of {name}", ours.kind, theirs.kind)
    # What an operator sets comes before the sizes that follow from it.
    fields = ["total_heads", "packing", "tile_tokens", "rows"]
    if ours.kind == theirs.kind:
        fields.append("window")
    for field in fields:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            raise IncompatiblePeerError(f"{field} of {name}", mine, other)
    check_same(name, ours, theirs, common_layers(ours, theirs), convert=convert)


def _refuse_parts(layer: str, ours: RankGeometry, theirs: RankGeometry) -> None:
    """One side's packed blocks are divided into parts and the other's are not, or are otherwise."""
    mine, other = (
        ", ".join(
            f"{group.part or 'whole'} ({group.packing or 'not packed'})"
            for group in side.groups
            if layer in group.layers
        )
        for side in (ours, theirs)
    )
    raise IncompatiblePeerError(f"packing of layer {layer!r}", mine, other)


def _refuse_missing(missing: Sequence[str], held: int, consumer: bool) -> None:
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    needed, lacking = f"{missing[0]!r}{more} needed", f"{held} layers without it"
    raise IncompatiblePeerError("layers", *((needed, lacking) if consumer else (lacking, needed)))
