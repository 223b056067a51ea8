"""The converting unpack on host memory: every number of every dtype, guard bytes and unused blocks included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvferry.kernels import convert
from kvferry.kernels.convert import FORMATS, Conversion, unpack_converted
from kvferry.kernels.paged_copy import wire_pages
from tests.kernels.convert_cases import (
    CASES,
    DEFINED,
    NAMES,
    PAIRS,
    converted,
    decoded,
    differing,
    encoded,
    same,
    telling,
    unsigned,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_oracle(name: str) -> None:
    assert differing(CASES[name], CPU) == 0


def one_row(src: str, dst: str, bits: np.ndarray, of: float = 1.0, to: float = 1.0) -> np.ndarray:
    """All of ``bits`` in one (layer, head, token)."""
    found = np.zeros(len(bits), dtype=unsigned(dst))
    scales = [np.full((1, 2), scale, dtype=np.float32) for scale in (of, to)]
    conversion = Conversion(src, dst, len(bits), len(bits) // 2, *scales)
    pages = wire_pages(found.ctypes.data, 1, 1, 1, found.nbytes)
    unpack_converted(pages, bits.ctypes.data, conversion, num_heads=1, num_tokens=1, device=CPU)
    return found


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_number_there_is(src: str, dst: str) -> None:
    bits = telling(src)
    assert same(dst, one_row(src, dst, bits), encoded(dst, decoded(src, bits))).all()


@pytest.mark.parametrize(("src", "dst"), [(src, dst) for src, dst in PAIRS if src != "float32"])
def test_there_and_back_loses_nothing_where_the_other_dtype_is_wider(src: str, dst: str) -> None:
    wider = DEFINED[dst][0] >= DEFINED[src][0] and DEFINED[dst][1] >= DEFINED[src][1]
    bits = telling(src)
    bits = bits[np.isfinite(decoded(src, bits))]
    back = one_row(dst, src, one_row(src, dst, bits))
    assert bool((back == bits).all()) == wider


@pytest.mark.parametrize("dst", NAMES)
def test_what_is_too_large_becomes_the_largest_and_nan_stays(dst: str) -> None:
    largest = FORMATS[dst].maximum
    numbers = np.array([3.4e38, -3.4e38, np.inf, -np.inf, np.nan], dtype=np.float32)
    found = decoded(dst, one_row("float32", dst, numbers.view(np.uint32)))
    if dst != "float32":
        np.testing.assert_array_equal(found, [largest, -largest, largest, -largest, np.nan])
    np.testing.assert_array_equal(found[2:], [largest, -largest, np.nan])


def test_the_formats_are_what_torch_says_of_them() -> None:
    for name, form in FORMATS.items():
        info = torch.finfo(form.dtype)
        assert str(form.dtype) == f"torch.{name}"
        assert (info.max, info.eps) == (form.maximum, 2.0**-form.mantissa)
        assert info.smallest_normal == 2.0 ** (1 - form.bias)
        assert decoded(name, np.array([form.max_bits]))[0] == form.maximum
        assert np.isnan(decoded(name, np.array([form.nan_bits]))[0])
        assert form.has_infinity == DEFINED[name][3]


def test_scratch_of_any_size_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASES["more-than-the-scratch-holds"], heads=5, tokens=30)
    for size in (1, 4 * 30 * 128 * 2, 1 << 30):
        monkeypatch.setattr(convert, "SCRATCH_BYTES", size)
        assert differing(case, CPU) == 0


def test_nothing_to_unpack_is_no_error() -> None:
    case = CASES["into-some-heads"]
    arena = case.arena()
    before = arena.memory.copy()
    for heads, tokens in ((0, 5), (2, 0)):
        unpack_converted(arena.pages, 0, case.conversion(), num_heads=heads, num_tokens=tokens, device=CPU)
    np.testing.assert_array_equal(arena.memory, before)


def test_the_oracle_tells_keys_from_values() -> None:
    """Or the cases above would not."""
    case = CASES["keys-longer-than-values"]
    right = case.conversion()
    assert (converted(right, case.wire()) != converted(replace(right, keys=12), case.wire())).any()
    assert (converted(right, case.wire()) != converted(replace(right, dst_scales=right.src_scales), case.wire())).any()
