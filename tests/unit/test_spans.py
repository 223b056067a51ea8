"""Spans that a peer asks for, within bounds; and how they are cut into messages."""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry.spans import (
    MAX_CHUNKS,
    Chunk,
    Span,
    check_span,
    check_spans,
    cut_span,
)
from kvferry.transport.errors import GeometryError
from tests.support.lines import LineCount
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
