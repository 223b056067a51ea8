"""The converting unpack on host memory: every number of every dtype, guard bytes and unused blocks included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvferry.kernels import convert
from kvferry.kernels.convert import unpack_converted
from kvferry.kernels.float_formats import FORMATS, Conversion
from kvferry.kernels.paged_copy import wire_pages
from tests.kernels.convert_cases import CASES, DEFINED, PAIRS, decoded, differing, encoded, same, telling, unsigned

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_oracle(name: str) -> None:
    assert differing(CASES[name], CPU) == 0


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_number_there_is(src: str, dst: str) -> None:
    """All in one (layer, head, token)."""
    bits = telling(src)
    found, ones = np.zeros(len(bits), dtype=unsigned(dst)), np.ones((1, 2), dtype=np.float32)
    conversion = Conversion(src, dst, len(bits), len(bits) // 2, ones, ones)
    pages = wire_pages(found.ctypes.data, 1, 1, 1, found.nbytes)
    unpack_converted(pages, bits.ctypes.data, conversion, num_heads=1, num_tokens=1, device=CPU)
    assert same(dst, found, encoded(dst, decoded(src, bits))).all()


def test_the_formats_are_what_torch_says_of_them() -> None:
    for name, form in FORMATS.items():
        info = torch.finfo(getattr(torch, name))
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
