"""Runs against an oracle that names every byte's address on both sides."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.geometry.byte_ranges import (
    byte_ranges,
    check_layouts,
    join_ranges,
    pages_of,
)
from kvferry.connector.geometry.rank_geometry import PageLayout, RankGeometry, RegionGeometry
from kvferry.connector.geometry.spans import Span
from kvferry.kernels.paged_copy import Pages
from kvferry.transport.channels import ByteRanges
from kvferry.transport.errors import GeometryError

CONTENT = 6


def side(layout: str, heads: int, block_size: int, blocks: int, head: int, token: int, base: int, pad: int) -> Pages:
    order = np.random.default_rng(blocks + base).permutation(blocks + 3)[:blocks].astype(np.int64)
    if layout == "HND":
        token_stride, head_stride = CONTENT, CONTENT * block_size
    else:
        token_stride, head_stride = CONTENT * heads, CONTENT
    block_stride = CONTENT * heads * block_size + pad
    bases = base + np.array([0, 1 << 20, 5 << 20], dtype=np.int64)
    return Pages(bases, order, block_size, block_stride, head_stride, token_stride, head, token)


def address(pages: Pages, layer: int, head: int, token: int) -> int:
    block, within = divmod(pages.token + token, pages.block_size)
    return int(
        pages.bases[layer]
        + pages.block_ids[block] * pages.block_stride
        + (pages.head + head) * pages.head_stride
        + within * pages.token_stride
    )


@given(
    layouts=st.tuples(st.sampled_from(["HND", "NHD"]), st.sampled_from(["HND", "NHD"])),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    offsets=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    pads=st.tuples(st.sampled_from([0, 10]), st.sampled_from([0, 10])),
    tokens=st.integers(1, 20),
    heads=st.integers(1, 3),
    skipped=st.tuples(st.integers(0, 1), st.integers(0, 1)),
)
def test_every_byte_once_and_from_its_own_place(layouts, sizes, offsets, pads, tokens, heads, skipped) -> None:
    given = zip(layouts, sizes, offsets, pads, skipped, strict=True)
    both = [
        side(layout, heads + head, size, 30, head, token, (n + 1) << 32, pad)
        for n, (layout, size, token, pad, head) in enumerate(given)
    ]
    found = byte_ranges(both[0], both[1], heads, tokens, CONTENT)
    copied = {}
    for to, of, nbytes in zip(*(column.tolist() for column in found), strict=True):
        for byte in range(nbytes):
            assert to + byte not in copied, "a byte is written twice"
            copied[to + byte] = of + byte
    places = list(itertools.product(range(3), range(heads), range(tokens)))
    assert copied == {
        address(both[0], *place) + byte: address(both[1], *place) + byte for place in places for byte in range(CONTENT)
    }


def test_whole_blocks_are_one_run() -> None:
    both = [side("HND", 4, 8, 5, 0, 0, base << 32, 0) for base in (1, 2)]
    found = byte_ranges(both[0], both[1], 4, 36, CONTENT)
    assert sorted(set(found.nbytes.tolist())) == [4 * CONTENT, 4 * 8 * CONTENT]
    assert len(found.nbytes) == 3 * (4 + 4), "four whole blocks, and a partial one head by head"


def test_taken_parts_are_bounded_and_complete() -> None:
    left = ByteRanges(np.arange(10), np.arange(10), np.full(10, 100))
    rest: ByteRanges | None = left
    for more in (True, True, True, True, False):
        assert rest is not None
        first, rest = rest.split(250)
        assert len(first.nbytes) == 2 and (rest is not None) == more
    assert left.split(1)[0].nbytes.tolist() == [100], "one at least"
    assert len(join_ranges([left, left]).nbytes) == 20


SPAN = Span(0, 0, 2, 0, 1, 0, 20)


@pytest.mark.parametrize(
    ("bases", "ids", "named"),
    [((0, 1), [0, 9], "outside"), ((0, 1), [-1, 0], "outside"), ((0, 1), [1], "16 tokens"), ((0,), [0, 1], "1 layers")],
)
def test_a_peers_pages_are_checked(bases: tuple[int, ...], ids: list[int], named: str) -> None:
    layout = PageLayout(bases, 9, 2, 8, 100, 50, 5)
    with pytest.raises(GeometryError, match=named):
        pages_of(layout, np.array(ids, dtype=np.int64), SPAN)


def test_a_peers_manager_blocks_are_kernel_blocks_and_its_rows_are_layers() -> None:
    layout = PageLayout((1000, 9000), 9, 2, 8, 2000, 500, 5, rows=3, row_stride=40)
    pages = pages_of(layout, np.array([3, 1], dtype=np.int64), SPAN)
    assert pages.block_ids.tolist() == [6, 7, 2, 3]
    assert pages.bases.tolist() == [1000, 1040, 1080, 9000, 9040, 9080]


@pytest.mark.parametrize(
    ("layouts", "named"),
    [
        ([], "0 groups of pages, it has 1"),
        ([PageLayout((7, 8), 9, 2, 16, 100, 50, 5, rows=2, row_stride=40)], "pages of 32 tokens in 2 layers"),
        ([PageLayout((7,), 9, 2, 8, 100, 50, 5, rows=2, row_stride=40)], "in 1 layers"),
        ([PageLayout((7, 8), 9, 2, 8, 100, 50, 5, rows=3, row_stride=40)], "of 3 rows, it told 16 in 2 of 2"),
    ],
)
def test_a_peers_pages_are_those_of_its_geometry(layouts: list[PageLayout], named: str) -> None:
    region = RegionGeometry(
        kind="full", layers=("a", "b"), block_size=16, head_start=0, num_heads=1, total_heads=1, content_bytes=8,
        dtype="int32", rows=2,
    )  # fmt: skip
    geometry = RankGeometry(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, head_counts=(1,), regions=(region,))
    check_layouts([PageLayout((7, 8), 9, 2, 8, 100, 50, 5, rows=2, row_stride=40)], geometry)
    with pytest.raises(GeometryError, match=named):
        check_layouts(layouts, geometry)
