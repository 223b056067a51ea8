"""A copy between two paged caches as runs of bytes, each contiguous on both sides. Pure. Axes ``[L, B, H, N, C]``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.connector.geometry.rank_geometry import PageLayout, RankGeometry, RegionGeometry
from kvferry.connector.geometry.spans import Span
from kvferry.connector.geometry.token_sharding import ALL_TOKENS, TokenShard, common_blocks
from kvferry.connector.geometry.view import first_outside, row_bases, split_pages
from kvferry.kernels.paged_copy import Pages, wire_pages
from kvferry.transport.channels import ByteRanges, Pieces
from kvferry.transport.errors import GeometryError

Int64s = npt.NDArray[np.int64]


def byte_ranges(to: Pages, of: Pages, num_heads: int, num_tokens: int, content_bytes: int) -> ByteRanges:
    """The longest runs of a copy of ``num_heads`` x ``num_tokens`` in all layers of both sides. A run is a whole block
    if heads are contiguous too, else a block's tokens of one head, one token's heads, or one (head, token): the largest
    unit that is contiguous in both layouts."""
    starts, lengths = _segments(to, of, num_tokens)
    dense_tokens = to.token_stride == of.token_stride == content_bytes
    row, heads, each = num_heads * content_bytes, np.arange(num_heads), np.arange(num_tokens)
    if num_heads == 1 or to.head_stride == of.head_stride == content_bytes:  # heads of a token lie together
        if to.token_stride == of.token_stride == row:
            return _build(to, of, starts, lengths * row, heads[:1])
        return _build(to, of, each, np.full(num_tokens, row), heads[:1])
    if not dense_tokens:
        return _build(to, of, each, np.full(num_tokens, content_bytes), heads)
    whole = (lengths * content_bytes == to.head_stride) & (to.head_stride == of.head_stride)
    if not whole.any():
        return _build(to, of, starts, lengths * content_bytes, heads)
    parts = [
        _build(to, of, starts[whole], lengths[whole] * row, heads[:1]),
        _build(to, of, starts[~whole], lengths[~whole] * content_bytes, heads),
    ]
    return join_ranges(parts)


def wire_ordered(pages: Pages, num_heads: int, num_tokens: int, content_bytes: int) -> Pieces:
    """The pieces of these pages in the order of the wire, ``[L, H, T, C]``."""
    wire = wire_pages(0, len(pages.bases), num_heads, num_tokens, content_bytes)
    found = byte_ranges(pages, wire, num_heads, num_tokens, content_bytes)
    order = np.argsort(found.src)
    return Pieces(found.dst[order], found.nbytes[order])


def _segments(to: Pages, of: Pages, num_tokens: int) -> tuple[Int64s, Int64s]:
    """First tokens and lengths of the pieces that leave no block on either side."""
    cuts = [np.arange(-side.token % side.block_size, num_tokens, side.block_size, dtype=np.int64) for side in (to, of)]
    edges = np.unique(np.concatenate([np.array([0, num_tokens]), *cuts]))
    return edges[:-1], edges[1:] - edges[:-1]


def _build(to: Pages, of: Pages, starts: Int64s, nbytes: Int64s, heads: Int64s) -> ByteRanges:
    """All layers x starts x heads."""
    lengths = np.empty((len(to.bases), len(starts), len(heads)), dtype=np.int64)
    lengths[:] = nbytes[:, None]
    addresses = []
    for side in (to, of):
        block, within = np.divmod(starts + side.token, side.block_size)
        offsets = side.block_ids[block] * side.block_stride + within * side.token_stride
        head = (heads + side.head) * side.head_stride
        addresses.append((side.bases[:, None, None] + offsets[None, :, None] + head[None, None, :]).reshape(-1))
    return ByteRanges(addresses[0], addresses[1], lengths.reshape(-1))


def join_ranges(parts: list[ByteRanges]) -> ByteRanges:
    """All runs of ``parts``, which has at least one element."""
    if len(parts) == 1:
        return parts[0]
    return ByteRanges(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def check_layouts(layouts: Sequence[PageLayout], geometry: RankGeometry) -> None:
    """Check that a peer's pages agree with the geometry that the peer sent. Raises GeometryError."""
    if len(layouts) != len(geometry.regions):
        raise GeometryError(f"the peer describes {len(layouts)} groups of pages, it has {len(geometry.regions)}")
    for index, (layout, region) in enumerate(zip(layouts, geometry.regions, strict=True)):
        tokens = layout.blocks_per_page * layout.block_size
        if tokens != region.block_size or len(layout.bases) != len(region.layers) or layout.rows != region.rows:
            raise GeometryError(
                f"group {index}: the peer describes pages of {tokens} tokens in {len(layout.bases)} layers of "
                f"{layout.rows} rows, it told {region.block_size} in {len(region.layers)} of {region.rows}"
            )


def reach(layout: PageLayout, region: RegionGeometry) -> int:
    """Bytes from the base of a layer to the end of its last page."""
    steps = (
        (layout.num_pages * layout.blocks_per_page, layout.block_stride),
        (region.num_heads, layout.head_stride),
        (layout.block_size, layout.token_stride),
        (layout.rows, layout.row_stride),
    )
    return sum((count - 1) * stride for count, stride in steps) + region.content_bytes // layout.rows


def translate_pages(
    layouts: Sequence[PageLayout], geometry: RankGeometry, translate: Callable[[int, int], int]
) -> tuple[PageLayout, ...]:
    """A peer's pages under the addresses of a ``PullChannel``; ``translate`` is the channel's function."""
    return tuple(
        msgspec.structs.replace(layout, bases=tuple(translate(base, reach(layout, region)) for base in layout.bases))
        for layout, region in zip(layouts, geometry.regions, strict=True)
    )


def pages_of(layout: PageLayout, block_ids: Int64s, span: Span, shard: TokenShard = ALL_TOKENS) -> Pages:
    """A peer's pages as one side of a copy of ``span``, in which each row of a layer is a layer. ``shard``: the peer's.
    Raises GeometryError: block ids or layers outside its caches, or too few blocks for the span."""
    if span.layer + span.num_layers > len(layout.bases):
        raise GeometryError(f"the peer describes {len(layout.bases)} layers, {span.layer + span.num_layers} are needed")
    if first_outside(block_ids, layout.num_pages) is not None:
        raise GeometryError(f"the peer granted block ids outside 0..{layout.num_pages - 1}")
    kernel_ids = split_pages(block_ids, layout.blocks_per_page)
    needed = shard.count(span.token + span.num_tokens)
    if len(kernel_ids) * layout.block_size < needed:
        raise GeometryError(
            f"the peer granted blocks of {len(kernel_ids) * layout.block_size} tokens, {needed} are needed"
        )
    _, table = common_blocks(
        shard, span.shard, span.token, span.token + span.num_tokens, kernel_ids, layout.block_size,
        layout.block_stride, layout.token_stride,
    )  # fmt: skip
    return Pages(
        bases=row_bases(layout.bases[span.layer : span.layer + span.num_layers], layout.rows, layout.row_stride),
        block_ids=table.ids, block_size=table.size, block_stride=table.stride, head_stride=layout.head_stride,
        token_stride=layout.token_stride, head=span.head, token=table.token,
    )  # fmt: skip
