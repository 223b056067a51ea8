"""Which ranks fit each other; sections of state pages; dtypes, with the error that docs/compatibility.md promises."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from kvferry.connector.geometry.compatibility import check_geometry, compatible, draft_layers
from kvferry.connector.geometry.dtypes import (
    CONVERTIBLE,
    WireElements,
    canonical,
    check_elements,
    check_same_elements,
    common_layers,
    converted_pairs,
)
from kvferry.connector.geometry.engine_types import BlockTable, LayerGroup, RankInfo
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.recurrent_state import Section, StateArray, sections, whole_page
from kvferry.connector.geometry.regions import regions
from kvferry.kernels.convert import unpack_converted
from kvferry.kernels.float_formats import Conversion
from kvferry.kernels.paged_copy import wire_pages
from kvferry.transport.errors import GeometryError, IncompatiblePeerError
from tests.unit.labelled_model import MODEL, OURS, Model, edit


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (Model(MODEL.kinds, 4, False).rank((0, 2), (0, 1), 16), "total_heads of layer .* differs, ours is 8, .* is 4"),
        (edit(OURS, 0, content_bytes=16), r"content_bytes of layer 'layers\.0' differs, ours is 8, the peer's is 16"),
        (edit(OURS, 0, dtype="float8_e4m3fn"), "dtype of layer .* ours is bfloat16, the peer's is float8_e4m3fn"),
        (edit(OURS, 1, window=128), r"window of layer 'layers\.1' differs, ours is 64, the peer's is 128"),
        (edit(OURS, 1, kind="state"), "kind of layer .* ours is sliding_window, the peer's is state"),
        (edit(OURS, 0, rows=2), r"rows of layer 'layers\.0' differs, ours is 1, the peer's is 2"),
        (
            edit(OURS, 0, part="k", packing="pairs"),
            r"packing of layer 'layers\.0' differs, ours is whole \(not packed\), the peer's is k \(pairs\)",
        ),
        (edit(OURS, 0, layers=("layers.0", "other")), r"layers differs, ours is 'layers\.2' needed"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_by_name(theirs: RankGeometry, message: str) -> None:
    with pytest.raises((IncompatiblePeerError, GeometryError), match=rf"^[^\n]*({message})[^\n]*$"):
        compatible(OURS, theirs)


def test_p_states_a_mismatch_from_its_own_side() -> None:
    with pytest.raises(IncompatiblePeerError, match="ours is 8, the peer's is 16"):
        compatible(OURS, edit(OURS, 0, content_bytes=16), consumer=False)
    few = edit(OURS, 0, layers=("layers.0",))
    compatible(OURS, few, consumer=False)  # D needs fewer layers than P has
    with pytest.raises(IncompatiblePeerError, match=r"the peer's is 'layers\.2' needed"):
        compatible(few, OURS, consumer=False)


def test_layers_and_block_sizes_may_differ_and_one_side_may_keep_what_has_left_the_window() -> None:
    compatible(OURS, MODEL.rank((2, 3), (1, 3), 48, random.Random(1)))
    compatible(OURS, edit(OURS, 1, kind="full", window=0))
    compatible(edit(OURS, 1, kind="full", window=0), OURS)


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (edit(OURS, tp_rank=2), "tp_rank 2 of tp_size 2"),
        (edit(OURS, 0, block_size=1 << 30), "blocks of 1073741824 tokens, limit 1048576"),
        (edit(OURS, tp_size=1 << 31), "tp_rank 0 of tp_size"),
        (edit(OURS, 0, head_start=4), r"holds heads 4\.\.8, expected 0\.\.4 of 8"),
        (edit(OURS, 0, layers=("layers.0", "layers.1")), r"layer 'layers\.1' is listed twice"),
        (
            edit(OURS, head_counts=(1, 4)),
            r"layer 'layers\.0': 8 heads in all, which is not one of the head counts 1, 4",
        ),
        (edit(edit(OURS, 0, total_heads=1 << 31), head_counts=(1 << 31,)), "total_num_kv_heads"),
    ],
)
def test_a_geometry_that_contradicts_itself_is_refused(geometry: RankGeometry, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        check_geometry(geometry)


def with_head(draft: str, layer: str = "layers.3") -> RankGeometry:
    """A rank whose model that drafts has one layer."""
    head = replace(OURS.regions[0], layers=(layer,), draft=draft)
    return replace(OURS, regions=(*OURS.regions, head))


def test_layers_that_draft_may_be_missing_at_p() -> None:
    for theirs in (OURS, with_head("eagle 2"), with_head("eagle 1", "layers.4")):
        compatible(with_head("eagle 1"), theirs)
        compatible(theirs, with_head("eagle 1"), consumer=False)
    compatible(OURS, with_head("eagle 1"))
    other = edit(with_head("eagle 2"), 2, dtype="float32", content_bytes=16)
    compatible(with_head("eagle 1"), other)
    assert not converted_pairs(with_head("eagle 1"), other), "nothing is read of it"


def test_a_layer_that_drafts_is_no_layer_of_the_model() -> None:
    with pytest.raises(IncompatiblePeerError, match=r"'layers\.3' needed"):
        compatible(with_head(""), with_head("eagle 1"))
    with pytest.raises(IncompatiblePeerError, match=r"dtype of layer 'layers\.3' .* ours is bfloat16"):
        compatible(with_head("eagle 1"), edit(with_head("eagle 1"), 2, dtype="float8_e4m3fn"))
    with pytest.raises(IncompatiblePeerError, match=r"packing of layer 'layers\.3'"):
        compatible(with_head("eagle 1"), edit(with_head("eagle 1"), 2, part="k", packing="pairs"))


def test_a_packed_cache_that_drafts_is_read_whole_or_in_parts_or_not_at_all() -> None:
    whole = with_head("eagle 1")
    parts = [replace(whole.regions[2], part=part, packing="tiles") for part in "kv"]
    d = replace(whole, regions=(*whole.regions, *parts))
    assert draft_layers(d, [(0, 0, 2), (1, 0, 1)]) == [(2, 0)]
    assert draft_layers(d, [(0, 0, 2), (3, 0, 1), (4, 0, 1)]) == draft_layers(d, [(2, 0, 1)]) == []


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


GROUP = RegionGeometry(
    kind="full", layers=("a", "b"), block_size=16, head_start=0, num_heads=2, total_heads=2, content_bytes=64,
    dtype="bfloat16", keys=16,
)  # fmt: skip


def edited(**changes: Any) -> RegionGeometry:
    return msgspec.structs.replace(GROUP, **changes)


FP8: dict[str, Any] = {"dtype": "float8_e4m3fn", "content_bytes": 32, "scales": ((0.5, 0.25), (2.0, 1.0))}
OTHER_SCALES = {**FP8, "scales": ((0.5, 0.25), (2.0, 1.5))}


def compare(ours: dict[str, Any], theirs: dict[str, Any], convert: bool) -> None:
    a, b = edited(**ours), edited(**theirs)
    check_same_elements("layer 'a'", a, b, common_layers(a, b), convert=convert)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {"keys": None}),  # nobody needs to know
        (FP8, FP8),
        (FP8, {**FP8, "layers": ("b", "a"), "scales": FP8["scales"][::-1]}),
        (FP8, {**FP8, "layers": ("b",), "scales": FP8["scales"][1:]}),
        ({"scales": ((1.0, 1.0), (1.0, 1.0))}, {}),
        ({"dtype": "nvfp4"}, {"dtype": "nvfp4"}),
        ({**FP8, "packing": "tiles"}, {**FP8, "packing": "tiles"}),
    ],
)
def test_numbers_that_agree_are_copied(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for convert in (False, True):
        compare(ours, theirs, convert)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {"dtype": "float32", "content_bytes": 128}),
        ({}, FP8),
        (FP8, {}),
        (FP8, OTHER_SCALES),
        (FP8, {**FP8, "dtype": "float8_e5m2"}),
        ({"keys": None}, {"dtype": "float16", "keys": None}),
    ],
)
def test_numbers_that_do_not_agree_are_converted_where_that_is_on(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    compare(ours, theirs, convert=True)
    with pytest.raises(IncompatiblePeerError, match=r"convert_dtype is off"):
        compare(ours, theirs, convert=False)


@pytest.mark.parametrize(
    ("ours", "theirs", "convert", "message"),
    [
        ({}, FP8, False, r"dtype of layer 'a' \(.* off\) differs, ours is bfloat16, the peer's is float8_e4m3fn"),
        (FP8, OTHER_SCALES, False, r"scales of K and V of layer 'b' .* ours is 2 and 1, the peer's is 2 and 1.5"),
        (FP8, {**FP8, "scales": ()}, False, r"scales of K and V of layer 'a' .* ours is 0.5 and 0.25, .* is 1 and 1"),
        ({}, {"content_bytes": 32}, True, "content_bytes of layer 'a' differs, ours is 64, the peer's is 32"),
        ({}, {**FP8, "keys": 20}, True, "elements of K in layer 'a' differs, ours is 16, the peer's is 20"),
        ({}, {**FP8, "keys": None}, True, "elements of K in layer 'a' differs, ours is 16, the peer's is unknown"),
        ({"keys": None}, {**FP8, "keys": None}, True, r"dtype .* \(where K ends is not known\)"),
        ({}, {"dtype": "int8", "content_bytes": 32}, True, r"dtype of layer 'a' \(int8 is not converted\) differs"),
        ({"packing": "amx"}, {**FP8, "packing": "amx"}, True, r"dtype .* \(blocks whose tokens are packed are not con"),
        ({"kind": "state"}, {"kind": "state", "dtype": "float16"}, True, r"\(states are not converted\)"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    ours: dict[str, Any], theirs: dict[str, Any], convert: bool, message: str
) -> None:
    with pytest.raises(IncompatiblePeerError, match=rf"^[^\n]*{message}[^\n]*$"):
        compare(ours, theirs, convert)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": ((1.0, 1.0),)}, "layer 'a': 1 pairs of scales for 2 layers"),
        ({"scales": ((1.0, 1.0), (0.0, 1.0))}, "layer 'b': scales 0 and 1, expected positive numbers"),
        ({"scales": ((1.0, math.nan), (1.0, 1.0))}, "layer 'a': scales 1 and nan"),
        ({"content_bytes": 63}, "63 bytes of content are no number of bfloat16"),
    ],
)
def test_what_a_peer_tells_must_make_sense(changes: dict[str, Any], message: str) -> None:
    check_elements(GROUP)
    with pytest.raises(GeometryError, match=message):
        check_elements(edited(**changes))


def rank(*regions: RegionGeometry) -> RankGeometry:
    return RankGeometry(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, head_counts=(2,), regions=regions)


def test_only_regions_whose_numbers_differ_are_converted() -> None:
    ours = rank(edited(layers=("a",)), edited(layers=("b",), **{**FP8, "scales": ((2.0, 1.0),)}), edited(layers=("c",)))
    theirs = rank(edited(layers=("x",), dtype="float16"), edited(**FP8), edited(layers=("c",)))
    assert converted_pairs(ours, theirs) == {(0, 1)}
    other = msgspec.structs.replace(theirs, regions=(edited(**OTHER_SCALES), edited(part="k", dtype="float16")))
    assert converted_pairs(ours, other) == {(0, 0), (1, 0)}


def test_a_source_takes_the_scales_of_its_own_layers() -> None:
    theirs = edited(**{**FP8, "layers": ("z", "a", "b"), "scales": ((9.0, 9.0), *FP8["scales"])})
    got = WireElements(theirs, 1).conversion(edited(layers=("q", "a", "b"), dtype="float16"), 1, 2)
    assert (got.src, got.dst, got.content, got.keys) == ("float8_e4m3fn", "float16", 32, 16)
    assert got.src_scales.tolist() == [[0.5, 0.25], [2.0, 1.0]] and got.dst_scales.tolist() == [[1.0, 1.0]] * 2


def test_dtypes_are_as_torch_names_and_describes_them() -> None:
    assert canonical("torch.bfloat16") == "bfloat16" and canonical("fp8") == canonical("fp8_e4m3") == "float8_e4m3fn"
    assert canonical("int8_per_token_head") == "int8_per_token_head"
    for name, known in CONVERTIBLE.items():
        info = torch.finfo(getattr(torch, name))
        assert (known.itemsize, known.maximum) == (info.bits // 8, info.max)
        assert (known.smallest_normal, known.relative_error) == (info.smallest_normal, info.eps / 2)
        assert known.absolute_error == info.smallest_normal * info.eps / 2


SCALE_ERROR = 2.0**-23
"""Bound on the relative error of multiplying by one scale and dividing by another, each rounded to float32."""


def error_bound(dtype: str, number: float, scale: float = 1.0) -> float:
    """How far a number with the layer's ``scale`` on D may be from ``number`` after its conversion to ``dtype``."""
    to = CONVERTIBLE[dtype]
    size = abs(number)
    rounding = max(size * to.relative_error, to.absolute_error * scale)
    return rounding * (1 + SCALE_ERROR) + size * SCALE_ERROR


@pytest.mark.parametrize("dtype", CONVERTIBLE)
@pytest.mark.parametrize("scale", [1.0, 0.037])
def test_the_error_bound_holds_and_is_reached(dtype: str, scale: float) -> None:
    rng = np.random.default_rng(0)
    limit = min(CONVERTIBLE[dtype].maximum * scale, 1e30)
    sizes = np.exp(rng.uniform(np.log(1e-12), np.log(limit), 20000))
    numbers = (sizes * rng.choice([-1, 1], len(sizes))).astype(np.float32)
    numbers = numbers[np.abs(numbers) <= limit]
    found = torch.empty(len(numbers), dtype=getattr(torch, dtype))
    to = np.full((1, 2), scale, dtype=np.float32)
    pages = wire_pages(found.data_ptr(), 1, 1, 1, found.nbytes)
    conversion = Conversion("float32", dtype, len(numbers), 0, np.ones((1, 2), dtype=np.float32), to)
    unpack_converted(pages, numbers.ctypes.data, conversion, num_heads=1, num_tokens=1, device=torch.device("cpu"))
    errors = np.abs(found.double().numpy() * np.float64(to[0, 0]) - numbers.astype(np.float64))
    bounds = np.array([error_bound(dtype, float(number), float(to[0, 0])) for number in numbers])
    assert (errors <= bounds).all()
    if dtype != "float32":  # whose numbers these are
        assert (errors > 0.95 * bounds).any(), "a bound that nothing comes near promises too little"
