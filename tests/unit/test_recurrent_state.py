"""Sections of state pages: they cover a page exactly, agree between tensor-parallel sizes, or there are none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvferry.connector.geometry.engine_types import BlockTable, LayerGroup, RankInfo
from kvferry.connector.geometry.recurrent_state import Section, StateArray, sections, whole_page
from kvferry.connector.geometry.regions import regions
from kvferry.transport.errors import GeometryError

Shapes = Sequence[tuple[int, ...]]


@pytest.mark.parametrize("make", [lambda kind: LayerGroup(kind, ("a",), 16, 1), lambda kind: BlockTable(kind, 16)])
def test_a_kind_that_does_not_exist_is_refused_by_name(make):
    with pytest.raises(GeometryError, match=r"'slidingwindow' .*did you mean 'sliding_window'\?\); expected full, mla"):
        make("slidingwindow")


def arrays(*shapes: tuple[int, ...]) -> list[StateArray]:
    """Two bytes per element, then four."""
    kinds = (("f2", 2), ("f4", 4)) * 4
    return [StateArray(shape, *kind) for shape, kind in zip(shapes, kinds, strict=False)]


def nbytes(shapes: Shapes) -> int:
    return sum(math.prod(array.shape) * array.item for array in arrays(*shapes))


def times_covered(found: Sequence[Section], size: int) -> np.ndarray:
    """How many sections each byte of a page belongs to."""
    times = np.zeros(size, dtype=int)
    for section in found:
        for head in range(section.heads):
            for row in range(section.rows):
                first = section.offset + head * section.head_stride + row * section.row_stride
                assert first + section.content_bytes <= section.end
                times[first : first + section.content_bytes] += 1
    return times


@pytest.mark.parametrize("dim_first", [False, True])
@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        ("MAMBA2", [(3, 8 * 4 + 2 * 2 * 6), (8, 4, 6)]),
        ("GDN_ATTN", [(3, 2 * 2 * 10 + 4 * 6), (4, 6, 10)]),
        ("MAMBA1", [(3, 40), (40, 5)]),
        ("SHORT_CONV", [(2, 40)]),
        ("LINEAR", [(4, 5, 5)]),
    ],
)
def test_sections_cover_a_page_exactly(family: str, shapes: Shapes, dim_first: bool) -> None:
    if dim_first:
        shapes = [tuple(reversed(shape)) if shape[0] in (2, 3) else shape for shape in shapes]
    found = sections(family, arrays(*shapes), 2, dim_first=dim_first)
    assert found and (times_covered(found, nbytes(shapes)) == 1).all()
    assert max(section.end for section in found) == nbytes(shapes)


def test_channels_count_alike_for_every_size() -> None:
    """Few enough to plan with, and the same number whatever a rank holds."""
    for channels in (24, 2048, 5120, 8192, 16384):
        totals = set()
        for tp in (1, 2, 4, 8):
            conv, state = sections("MAMBA1", arrays((3, channels // tp), (channels // tp, 16)), tp, dim_first=False)
            totals.add((conv.total_heads, state.total_heads))
            assert conv.heads * tp == conv.total_heads == state.total_heads <= 2048
        assert len(totals) == 1


@pytest.mark.parametrize(
    ("held", "tp", "group_counts", "total"),
    [(4, 2, set(), 8), (1, 1, set(), 1), (1, 4, {1}, 1), (1, 4, {4}, 4), (1, 4, {4, 8}, 4)],
)
def test_groups_of_all_ranks(held: int, tp: int, group_counts: set[int], total: int) -> None:
    found = sections(
        "MAMBA2", arrays((3, 8 + 2 * held * 6), (2, 4, 6)), tp, dim_first=False, group_counts=frozenset(group_counts)
    )
    totals = {section.name: section.total_heads for section in found}
    assert totals == {"conv.x": 2 * tp, "conv.b": total, "conv.c": total, "ssm": 2 * tp}


@pytest.mark.parametrize(
    ("family", "shapes", "tp", "group_counts"),
    [
        ("MAMBA2", [(3, 20), (2, 4, 6)], 4, set()),  # one group to a rank: copies, or its own
        ("MAMBA2", [(3, 20), (2, 4, 6)], 4, {1, 4}),
        ("MAMBA2", [(3, 20), (2, 4, 6)], 4, {2}),
        ("MAMBA2", [(3, 19), (2, 4, 6)], 1, set()),  # channels that do not add up
        ("MAMBA2", [(3, 18), (2, 4, 6)], 1, set()),
        ("MAMBA2", [(3, 8), (2, 4, 6)], 1, set()),
        ("MAMBA2", [(3, 6), (2, 4, 6)], 1, set()),
        ("MAMBA2", [(3, 20), (2, 4, 6), (2, 5, 4), (2, 5), (1, 5, 6)], 1, {1}),  # a replay ring
        ("MAMBA1", [(3, 11), (11, 4)], 13, set()),  # thirteen ranks
        ("SHORT_CONV", [(3, 11)], 13, set()),
        ("SHORT_CONV", [(3, 2048)], 11, set()),
        ("CUSTOM", [(3, 20), (2, 4, 6)], 1, {1}),
    ],
)
def test_what_is_not_understood_has_none(family: str, shapes: Shapes, tp: int, group_counts: set[int]) -> None:
    assert sections(family, arrays(*shapes), tp, dim_first=False, group_counts=frozenset(group_counts)) == ()


@pytest.mark.parametrize("size", [1, 7, 10112])
def test_a_page_of_one_piece(size: int) -> None:
    section = whole_page(size, 4, "a b c")
    assert (times_covered([section], size) == 1).all()
    assert (section.total_heads, section.heads, section.end) == (4, 1, size)


def pages(content: int) -> torch.Tensor:
    """``[5, 1, 1, C]`` of bytes, each page followed by 24 of padding."""
    return torch.zeros(5, 1, 1, content + 24, dtype=torch.int8)[..., :content]


def test_pages_that_are_no_states_are_refused() -> None:
    found = sections("LINEAR", arrays((4, 5, 5)), 1, dim_first=False)
    group = LayerGroup("state", ("a",), 1, 1, sections=found)
    with pytest.raises(GeometryError, match=r"^layer 'a': pages of \[1, 1, 199\], its states need \[1, 1, 200\]"):
        regions([group], {"a": pages(199)}, RankInfo("e", 0, 1, 0, 1, {}), 5)
