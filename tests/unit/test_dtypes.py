"""Dtypes: their names, when two ranks' numbers agree, and the error bound that docs/compatibility.md promises."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvferry.connector.geometry.dtypes import (
    CONVERTIBLE,
    WireElements,
    canonical,
    check_elements,
    check_same_elements,
    common_layers,
    converted_pairs,
)
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.kernels.convert import unpack_converted
from kvferry.kernels.float_formats import Conversion
from kvferry.kernels.paged_copy import wire_pages
from kvferry.transport.errors import GeometryError, IncompatiblePeerError

GROUP = RegionGeometry(
    kind="full", layers=("a", "b"), block_size=16, head_start=0, num_heads=2, total_heads=2, content_bytes=64,
    dtype="bfloat16", keys=16,
)  # fmt: skip


def edit(**changes: Any) -> RegionGeometry:
    return msgspec.structs.replace(GROUP, **changes)


FP8: dict[str, Any] = {"dtype": "float8_e4m3fn", "content_bytes": 32, "scales": ((0.5, 0.25), (2.0, 1.0))}
OTHER_SCALES = {**FP8, "scales": ((0.5, 0.25), (2.0, 1.5))}


def compare(ours: dict[str, Any], theirs: dict[str, Any], convert: bool) -> None:
    a, b = edit(**ours), edit(**theirs)
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
        check_elements(edit(**changes))


def rank(*regions: RegionGeometry) -> RankGeometry:
    return RankGeometry(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, head_counts=(2,), regions=regions)


def test_only_regions_whose_numbers_differ_are_converted() -> None:
    ours = rank(edit(layers=("a",)), edit(layers=("b",), **{**FP8, "scales": ((2.0, 1.0),)}), edit(layers=("c",)))
    theirs = rank(edit(layers=("x",), dtype="float16"), edit(**FP8), edit(layers=("c",)))
    assert converted_pairs(ours, theirs) == {(0, 1)}
    other = msgspec.structs.replace(theirs, regions=(edit(**OTHER_SCALES), edit(part="k", dtype="float16")))
    assert converted_pairs(ours, other) == {(0, 0), (1, 0)}


def test_a_source_takes_the_scales_of_its_own_layers() -> None:
    theirs = edit(**{**FP8, "layers": ("z", "a", "b"), "scales": ((9.0, 9.0), *FP8["scales"])})
    got = WireElements(theirs, 1).conversion(edit(layers=("q", "a", "b"), dtype="float16"), 1, 2)
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
