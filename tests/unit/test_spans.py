"""Spans that a peer asks for, within bounds, cut into messages; their runs of bytes, against an oracle."""

from __future__ import annotations

import itertools
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry.byte_ranges import (
    byte_ranges,
    check_layouts,
    join_ranges,
    pages_of,
)
from kvferry.connector.geometry.rank_geometry import PageLayout, RankGeometry, RegionGeometry
from kvferry.connector.geometry.spans import (
    MAX_CHUNKS,
    Chunk,
    Span,
    check_span,
    check_spans,
    cut_span,
)
from kvferry.kernels.paged_copy import Pages
from kvferry.transport.channels import ByteRanges
from kvferry.transport.errors import GeometryError
from tests.support.turns import LineCount
from tests.unit.labelled_model import OURS

GOOD = Span(0, 0, 2, 0, 4, 10, 90)
MIB = 1 << 20


def chunks(*given: Any) -> list[Chunk]:
    return list(cut_span(*given))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"region": 2}, "span of region 2, there are 2 regions"),
        ({"layer": 1}, r"layers 1\.\.3 is outside 0\.\.2"),
        ({"token": 11}, r"tokens 11\.\.101 is outside 0\.\.100"),
        ({"num_tokens": 0}, "tokens"),
        ({"layer": -1}, r"layers -1\.\.1"),
    ],
)
def test_a_span_out_of_bounds_is_refused(changes: dict[str, int], message: str) -> None:
    check_span(GOOD, OURS, 100)
    with pytest.raises(GeometryError, match=message):
        check_span(msgspec.structs.replace(GOOD, **changes), OURS, 100)


def test_asking_for_the_same_box_again_and_again_is_refused() -> None:
    check_spans([GOOD, Span(0, 0, 2, 0, 4, 0, 10)], OURS, 100)
    with pytest.raises(GeometryError, match=r"ask for 1440 .* of 800"):
        check_spans([GOOD, GOOD], OURS, 100)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 5), st.integers(0, 70), st.integers(1, 200),
    st.integers(1, 40), st.integers(1, 6000), st.integers(1, 48),
)  # fmt: skip
def test_chunks_partition_a_span(layers, heads, token, tokens, content, room, align) -> None:
    span = Span(0, 3, layers, 1, heads, token, tokens)
    room = max(room, heads * content)
    cut = cut_span(span, content, room, align)
    parts = list(cut)
    assert len(cut) == len(parts) and parts == list(cut), "counted without being made, and made again"
    seen = np.zeros((layers, tokens), dtype=int)
    for part in parts:
        assert part.num_layers == 1 or part.num_tokens == tokens
        assert 1 <= part.num_layers * span.num_heads * part.num_tokens * content <= room
        seen[part.layer : part.layer + part.num_layers, part.token : part.token + part.num_tokens] += 1
        end = token + part.token + part.num_tokens
        if part.token + part.num_tokens < tokens and end % align:  # only where no aligned cut was within reach
            assert end - part.num_tokens >= end // align * align
    assert (seen == 1).all() and parts == sorted(parts)
    whole, total = room // (heads * content * tokens), 2 * tokens * heads * content
    assert len(parts) == -(-layers // whole) if whole else len(parts) <= layers * (total // room + 2)


@pytest.mark.parametrize(
    ("span", "sizes", "message"),
    [
        (Span(0, 0, 1, 0, 2, 0, 4), (8, 15), r"2 heads x 8 bytes .* of 15 bytes; raise slot_bytes to 16"),
        (Span(0, 0, 1000, 0, 1, 0, 1 << 30), (1, 64), f"more than {MAX_CHUNKS} messages"),
        (Span(0, 0, 1 << 30, 0, 1, 0, 1), (1, 1), f"more than {MAX_CHUNKS} messages"),
    ],
)
def test_chunks_that_cannot_be_are_refused(span: Span, sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        cut_span(span, *sizes)


def test_a_long_read_makes_its_chunks_one_by_one() -> None:
    cut = cut_span(Span(0, 0, 80, 0, 8, 0, 100_000), 512, 64 << 10, 16)
    with LineCount() as lines:
        assert len(cut) == 80 * 6250
        assert [chunk.token for chunk in islice(cut, 3)] == [0, 16, 32]
    assert lines.count < 100_000, "those of one layer"


def test_large_messages_with_an_end_of_32_mib() -> None:
    eight_k, whole = Span(0, 0, 32, 0, 8, 0, 8192), Span(0, 0, 32, 0, 8, 0, 32768)
    for room, sizes in ((128, [*[128] * 7, 96, 32]), (64, [64] * 16), (1024, [1024])):
        assert [part.num_layers * 32 for part in chunks(eight_k, 512, room * MIB, 16)] == sizes
    assert [part.num_tokens for part in chunks(whole, 512, 128 * MIB, 16)] == [*[32768] * 31, 24576, 8192]


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
