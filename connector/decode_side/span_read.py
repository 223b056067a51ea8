"""A read of P's pages by D itself, cut in portions where the engine's step waits for them one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as replace_pages
from itertools import accumulate

from msgspec.structs import replace

from kvferry.connector.geometry.byte_ranges import byte_ranges, join_ranges
from kvferry.connector.geometry.portions import layer_runs, num_portions
from kvferry.connector.geometry.read_plan import PlannedSpan
from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.kernels.paged_copy import Pages
from kvferry.transport.channels import ByteRanges, Copy, PageRead

Side = tuple[PageBox, Pages]
"""A box of D's pages, and P's pages in the same form."""


class SpanRead(PageRead):
    """The spans of one read as ``portions``, each a list of boxes of D's pages with P's pages. ``alone``: no other
    hand-over could go on during the copy."""

    def __init__(self, caches: RankCaches, portions: Sequence[Sequence[Side]], *, alone: bool) -> None:
        self._caches, self._portions, self._alone = caches, portions, alone

    def byte_ranges(self) -> ByteRanges:
        return join_ranges([self._ranges(box, theirs) for sides in self._portions for box, theirs in sides])

    def _ranges(self, box: PageBox, theirs: Pages) -> ByteRanges:
        row_bytes = self._caches.views[box.region].row_bytes
        return byte_ranges(self._caches.pages(box), theirs, box.num_heads, box.num_tokens, row_bytes)

    def launch(self) -> Copy:
        return self._caches.fetch(self._portions, alone=self._alone)

    def note_ends(self, copy: Copy) -> None:
        """Note where the portions of a copy end whose bytes come in order."""
        copy.ends = list(accumulate(sum(self._caches.nbytes(box) for box, _ in sides) for sides in self._portions))


def cut_read(
    caches: RankCaches,
    planned: Sequence[PlannedSpan],
    whole: list[Side],
    sides: Callable[[PlannedSpan], Side],
    layer_order: Sequence[str],
) -> list[list[Side]]:
    """The portions of a read. ``whole``: the sides of each of its ``planned`` spans; ``sides`` gives those of a span.
    ``layer_order``: layers in the order in which the forward waits for them.

    The forward of the step writes the KV of the tokens that it computes, and it may do so before it waits for the
    layer. These tokens follow the ones that are read, so no copy writes their bytes, but in packed regions: there the
    last tile may hold tokens of both. That tile is copied in the first portion, for which the forward waits before it
    begins.
    """
    nbytes = sum(caches.nbytes(box) for box, _ in whole)
    portions = num_portions(nbytes, len(layer_order), on_gpu=caches.device.type != "cpu")
    if portions == 1:
        return [whole]
    places = {layer: place for place, layer in enumerate(layer_order)}
    found: list[list[Side]] = [[] for _ in range(portions)]
    for item, side in zip(planned, whole, strict=True):
        region = caches.geometry.regions[item.region]
        body: Side | None = side
        if region.tile_tokens > 1:
            rest, tail = split_tile(item, region.tile_tokens)
            found[0].append(sides(tail))
            body = None if rest is None else sides(rest)
        if body is not None:
            layers = region.layers[item.layer : item.layer + item.span.num_layers]
            for portion, first, count in layer_runs(layers, places, portions):
                found[portion].append(_layers_of(body, first, count, caches.views[item.region].rows))
    return found


def split_tile(item: PlannedSpan, tile_tokens: int) -> tuple[PlannedSpan | None, PlannedSpan]:
    """A span of a packed region without its last tile, if something is left, and this tile. Tokens that ranks share out
    have tiles of their own on each rank: then the span is not split."""
    span = item.span
    if span.num_tokens <= tile_tokens or not (item.shard.whole and span.shard.whole):
        return None, item
    first, count = span.token + span.num_tokens - tile_tokens, span.num_tokens - tile_tokens
    tail = item._replace(span=replace(span, token=first, num_tokens=tile_tokens))
    return item._replace(span=replace(span, num_tokens=count)), tail


def _layers_of(side: Side, first: int, count: int, rows: int) -> Side:
    """``count`` layers of a box and of P's pages, from number ``first`` on."""
    box, theirs = side
    part = replace(box, layer=box.layer + first, num_layers=count)
    return part, replace_pages(theirs, bases=theirs.bases[first * rows : (first + count) * rows])
