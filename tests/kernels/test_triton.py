"""The Triton kernels against the oracles: in the interpreter, and compiled for a GPU that need not be there.

On a GPU they run in ``test_launch``. Triton decides at import whether it interprets, so each script runs in a process
of its own.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.kernels import zero_blocks_triton
from kvferry.kernels.paged_copy import Pages
from kvferry.kernels.paged_copy_triton import alignment
from kvferry.kernels.zero_blocks import Segments
from tests.kernels import paged_copy_cases, zero_blocks_cases
from tests.kernels.convert_cases import NAMES
from tests.kernels.triton_process import python

INTERPRETED = """
import sys, torch
from importlib import import_module

stem, function, *names = sys.argv[1:]
kernel = getattr(import_module(f"kvferry.kernels.{stem}_triton"), f"{function}_triton")
cases = import_module(f"tests.kernels.{stem}_cases")
for number, name in enumerate(names):
    how = {} if stem == "zero_blocks" else {"sms": (None, 1, 5, 1000)[number % 4]}
    print(name, cases.differing(cases.CASES[name], torch.device("cpu"), kernel, **how))
"""
IN_PARTS = """
import torch
from tests.kernels.paged_parts import differing

for number in range(2):
    print(number, *differing(number, torch.device("cpu")))
"""
COMPILED = """
import re
import triton.language as tl
from tests.kernels.triton_process import ptx
from kvferry.kernels.paged_copy_triton import ALL_SMS, CAPPED, copy_kernel, tile_shape
from kvferry.kernels.zero_blocks_triton import NUM_WARPS, tile_words, zero_kernel

for dtype, word, align in ((tl.int64, 8, 16), (tl.int64, 8, 8), (tl.int32, 4, 4), (tl.int16, 2, 2), (tl.int8, 1, 1)):
    codes = [ptx(zero_kernel, (dtype, align, align // word, tile_words(1 << 20, word)), NUM_WARPS)]
    for shape in (ALL_SMS, CAPPED):
        constants = dtype, word, align, *tile_shape(512 // word, word, shape)
        codes.append(ptx(copy_kernel, constants, shape.num_warps))
    for code in codes:
        stores = set(re.findall(r"st\\.global[.\\w]*", code))
        print(align, *sorted(stores))
"""
CONVERTS = """
import re
from tests.kernels.triton_process import ptx
from kvferry.kernels.convert_triton import FORMATS, convert_kernel, format_constants
from kvferry.kernels.paged_copy_triton import ALL_SMS

def width(word):  # bytes that one instruction moves
    *_, many, one = word.split(".")
    return (int(many[1:]) if many[0] == "v" else 1) * int(one[1:]) // 8

for capability in (80, 90):
    for of, to in (("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "float16"), ("float32", "bfloat16")):
        constants = *format_constants(FORMATS[of], 16, FORMATS[to], 16), 16, 64, 128
        code = ptx(convert_kernel, constants, ALL_SMS.num_warps, capability)
        found = [re.findall(rf"{what}\\.global[.\\w]*", code) for what in ("ld", "st")]
        narrowest = [min(width(word) for word in words) for words in found]
        print(capability, of, to, *narrowest, "ftz" in code)
"""
OF_THE_HOST = re.compile("consecutive|descending|layers-anywhere|gap-between|nhd-to-nhd|prime|one-layer|unpack-hnd")
"""Cases that differ for the host implementation alone, and twins of others: a program in the interpreter takes long, so
it gets every fifth case. On a GPU all are run."""
IN_INTERPRETER = [
    *(f"{src}-{NAMES[(n + 3) % 5]}" for n, src in enumerate(NAMES)), "float32-float16", "into-some-heads",
    "into-interleaved-layers", "odd-content-odd-address", "keys-only", "one-token-one-head-one-layer",
]  # fmt: skip
"""Conversions: each dtype once on each side."""
STORES = {16: "st.global.v2.b64", 8: "st.global.b64", 4: "st.global.b32", 2: "st.global.b16", 1: "st.global.b8"}


@pytest.mark.parametrize(
    ("stem", "function", "names"),
    [
        ("paged_copy", "copy_pages", [name for name in paged_copy_cases.CASES if not OF_THE_HOST.search(name)][::5]),
        ("convert", "unpack_converted", IN_INTERPRETER),
        ("zero_blocks", "zero_blocks", [*zero_blocks_cases.CASES]),
    ],
)
def test_bytes_in_the_interpreter_are_those_of_the_oracle(stem: str, function: str, names: list[str]) -> None:
    assert python(INTERPRETED, stem, function, *names, interpret=True) == [[name, "0"] for name in names]


def test_parts_of_pages_that_are_there_pass_to_the_wire_and_back() -> None:
    assert python(IN_PARTS, interpret=True) == [[str(number), "0", "0"] for number in range(2)]


def test_compiled_for_a_gpu_they_store_as_wide_as_the_alignment_allows() -> None:
    """Without the hints on alignment the stores would be scalar."""
    wanted = [[str(align), store] for align, store in STORES.items() for _ in range(3)]
    assert python(COMPILED, interpret=False) == wanted


def test_compiled_for_a_gpu_a_conversion_moves_wide_words_and_flushes_no_subnormal_number() -> None:
    """Also for a GPU that has no fp8 of its own."""
    lines = python(CONVERTS, interpret=False)
    assert len(lines) == 6
    for _, _, _, loaded, stored, flushed in lines:
        assert int(loaded) >= 8 and int(stored) == 16 and flushed == "False", lines


BASES = np.array([1 << 20, (1 << 20) + 1])


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, 16), ({"block_stride": 520}, 8), ({"head_stride": 68}, 4), ({"token_stride": 34}, 2), ({"bases": BASES}, 1)],
)
def test_alignment_is_that_of_the_worst_row(change: dict[str, Any], expected: int) -> None:
    """Of the strides that something walks along. A GPU faults where it is too large, and the interpreter does not."""
    pages = Pages(np.array([1 << 20, 1 << 21]), np.array([3]), 16, 512, 64, 32)
    assert alignment(replace(pages, **change), 2, 2, 32) == expected
    lone = Pages(np.array([1 << 20]), np.array([3]), 16, 512, 33, 35)
    assert [alignment(lone, 1, 1, content) for content in (32, 12)] == [16, 4]


@pytest.mark.parametrize(
    ("change", "wanted"), [((0, 0, 0), 16), ((8, 0, 0), 8), ((0, 4, 0), 4), ((0, 0, 2), 2), ((1, 0, 0), 1)]
)
def test_alignment_is_that_of_the_worst_segment(change: tuple[int, int, int], wanted: int) -> None:
    numbers = [np.array([1 << 20, (1 << 20) + more], dtype=np.int64) for more in change]
    assert zero_blocks_triton.alignment(Segments(*numbers)) == wanted
