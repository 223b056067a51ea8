"""Spans that a peer asks for, within bounds; and how they are cut into messages."""

from __future__ import annotations

from itertools import islice

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry.spans import (
    MAX_CHUNKS,
    TAPER_BYTES,
    TAPERED,
    Chunk,
    Span,
    check_span,
    check_spans,
    chunks,
    cut_span,
)
from kvferry.transport.errors import GeometryError
from tests.support.lines import LineCount
from tests.unit.labelled_model import OURS

GOOD = Span(0, 0, 2, 0, 4, 10, 90)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"region": 2}, "span of region 2, there are 2 regions"),
        ({"layer": 1}, r"layers 1\.\.3 is outside 0\.\.2"),
        ({"num_layers": 1 << 31}, "layers"),
        ({"head": 1}, r"heads 1\.\.5 is outside 0\.\.4"),
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


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 5), st.integers(0, 70), st.integers(1, 200),
    st.integers(1, 40), st.integers(1, 6000), st.integers(1, 48),
)  # fmt: skip
def test_chunks_partition_a_span(layers, heads, token, tokens, content, room, align) -> None:
    span = Span(0, 3, layers, 1, heads, token, tokens)
    room = max(room, heads * content)
    parts = chunks(span, content, room, align)
    seen = np.zeros((layers, tokens), dtype=int)
    for part in parts:
        assert part.num_layers >= 1 and part.num_tokens >= 1
        assert part.num_layers == 1 or part.num_tokens == tokens
        assert part.num_layers * span.num_heads * part.num_tokens * content <= room
        seen[part.layer : part.layer + part.num_layers, part.token : part.token + part.num_tokens] += 1
        end = token + part.token + part.num_tokens
        if part.token + part.num_tokens < tokens and end % align:  # only where no aligned cut was within reach
            assert end - part.num_tokens >= end // align * align
    assert (seen == 1).all()
    assert parts == sorted(parts)
    whole = room // (heads * content * tokens)
    assert (
        len(parts) == -(-layers // whole)
        if whole
        else len(parts) <= layers * (2 * tokens * heads * content // room + 2)
    )


def test_chunks_are_as_large_as_fit() -> None:
    span = Span(0, 0, 10, 0, 2, 8, 64)
    assert chunks(span, 8, 4 * 1024) == [Chunk(0, 4, 0, 64), Chunk(4, 4, 0, 64), Chunk(8, 2, 0, 64)]
    assert chunks(span, 8, 512, 16)[:4] == [
        Chunk(0, 1, 0, 24),
        Chunk(0, 1, 24, 32),
        Chunk(0, 1, 56, 8),
        Chunk(1, 1, 0, 24),
    ]


def test_chunks_that_cannot_be_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"2 heads x 8 bytes .* of 15 bytes; raise slot_bytes to 16"):
        chunks(Span(0, 0, 1, 0, 2, 0, 4), 8, 15)
    with pytest.raises(GeometryError, match=f"more than {MAX_CHUNKS} messages"):
        chunks(Span(0, 0, 1000, 0, 1, 0, 1 << 30), 1, 64)
    with pytest.raises(GeometryError, match=f"more than {MAX_CHUNKS} messages"):
        chunks(Span(0, 0, 1 << 30, 0, 1, 0, 1), 1, 1)


@given(
    st.integers(1, 40), st.integers(0, 200), st.integers(1, 600), st.integers(16, 4096), st.integers(1, 70),
    st.integers(1, 40),
)  # fmt: skip
def test_chunks_are_counted_without_being_made(layers, token, tokens, room, align, content) -> None:
    room = max(room, 2 * content)
    cut = cut_span(Span(0, 0, layers, 0, 2, token, tokens), content, room, align)
    assert len(cut) == len(list(cut)) == len(list(cut)), "and they can be made again"


def test_a_long_read_makes_its_chunks_one_by_one() -> None:
    cut = cut_span(Span(0, 0, 80, 0, 8, 0, 100_000), 512, 64 << 10, 16)
    with LineCount() as lines:
        assert len(cut) == 80 * 6250
        assert [chunk.token for chunk in islice(cut, 3)] == [0, 16, 32]
    assert lines.count < 100_000, "those of one layer"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 70), st.integers(1, 40000), st.integers(1, 256))
def test_the_last_of_large_messages_is_smaller(layers, heads, token, tokens, mib) -> None:
    span = Span(0, 0, layers, 0, heads, token, tokens)
    parts = chunks(span, 512, mib << 20, 16)
    sizes = [part.num_layers * part.num_tokens * heads * 512 for part in parts]
    assert sum(sizes) == layers * tokens * heads * 512
    order = [(part.layer, part.token) for part in parts]
    assert order == sorted(order), "in the order of the wire"
    block, one_layer = 16 * heads * 512, tokens * heads * 512
    if len(parts) > 1:
        last = sizes[-1]
        assert last < TAPERED * TAPER_BYTES or last - block < one_layer, "parted by layers, and then by blocks"
    assert len(parts) <= -(-sum(sizes) // (mib << 20)) * 2 + 1 + layers


def test_large_messages_with_an_end_of_32_mib() -> None:
    mib = 1 << 20
    eight_k, whole = Span(0, 0, 32, 0, 8, 0, 8192), Span(0, 0, 32, 0, 8, 0, 32768)
    sizes = [part.num_layers * 32 for part in chunks(eight_k, 512, 128 * mib, 16)]
    assert sizes == [*[128] * 7, 96, 32]
    assert [part.num_layers * 32 for part in chunks(eight_k, 512, 64 * mib, 16)] == [64] * 16
    assert [part.num_layers * 32 for part in chunks(eight_k, 512, 1024 * mib, 16)] == [1024]
    tokens = [part.num_tokens for part in chunks(whole, 512, 128 * mib, 16)]
    assert tokens == [*[32768] * 31, 24576, 8192]
