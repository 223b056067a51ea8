"""The Triton kernel against the oracle and the host implementation: in the interpreter, and compiled for a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.kernels.launch import DeviceTable, stream_buffers
from kvferry.kernels.paged_copy import Pages, copy_pages
from kvferry.kernels.paged_copy_triton import ALL_SMS, CAPPED, alignment, tile_shape
from tests.kernels.paged_copy_cases import CASES, expected
from tests.kernels.paged_parts import differing
from tests.kernels.triton_process import python

INTERPRETED = """
import sys
import numpy as np
import torch
from kvferry.kernels.paged_copy_host import copy_pages_host
from kvferry.kernels.paged_copy_triton import copy_pages_triton
from tests.kernels.paged_copy_cases import CASES, expected

cpu = torch.device("cpu")
for number, name in enumerate(sys.argv[1:]):
    case = CASES[name]
    size = {"num_heads": case.heads, "num_tokens": case.tokens, "content_bytes": case.content}
    (dst, src), (on_host, same_src) = case.arenas(), case.arenas()
    want = expected(case, dst, src)
    copy_pages_triton(dst.pages, src.pages, **size, device=cpu, sms=(None, 1, 5, 1000)[number % 4])
    copy_pages_host(on_host.pages, same_src.pages, **size)
    print(name, np.count_nonzero(dst.memory != want), np.count_nonzero(dst.memory != on_host.memory))
"""
IN_PARTS = """
import numpy as np
import torch
from tests.kernels.paged_parts import differing

for number in range(4):
    print(number, *differing(number, torch.device("cpu")))
"""
COMPILED = """
import itertools
import re
import triton.language as tl
from tests.kernels.compiled import ptx
from kvferry.kernels.paged_copy_triton import ALL_SMS, CAPPED, _copy_kernel, tile_shape

WORDS = ((tl.int64, 8, 16), (tl.int64, 8, 8), (tl.int32, 4, 4), (tl.int16, 2, 2), (tl.int8, 1, 1))
for (name, shape), (dtype, word, align) in itertools.product({"all_sms": ALL_SMS, "capped": CAPPED}.items(), WORDS):
    constants = dtype, align, align // word, *tile_shape(512 // word, word, shape)
    code = ptx(_copy_kernel, constants, shape.num_warps)
    print(f"{name} {align}:", *sorted(set(re.findall(r"st\\.global[.\\w]*", code))))
"""


def test_bytes_in_the_interpreter_are_those_of_the_oracle_and_of_the_host_path() -> None:
    lines = python(INTERPRETED, *CASES, interpret=True)
    assert lines == [[name, "0", "0"] for name in CASES]


def test_parts_of_pages_that_are_there_pass_to_the_wire_and_back() -> None:
    assert python(IN_PARTS, interpret=True) == [[str(number), "0", "0"] for number in range(4)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("number", range(4))
def test_parts_of_pages_on_a_gpu(number: int) -> None:
    assert differing(number, torch.device("cuda", 0)) == (0, 0)


def test_compiled_for_a_gpu_it_stores_as_wide_as_the_alignment_allows() -> None:
    """Runs the compiler only; without the hints on alignment the first would be scalar."""
    stores = {16: "st.global.v2.b64", 8: "st.global.b64", 4: "st.global.b32", 2: "st.global.b16", 1: "st.global.b8"}
    expected = [[shape, f"{align}:", store] for shape in ("all_sms", "capped") for align, store in stores.items()]
    assert python(COMPILED, interpret=False) == expected


@pytest.mark.parametrize(
    "words, word, all_sms, capped",
    [
        (64, 8, (32, 64), (128, 64)),
        (144, 8, (64, 32), (256, 32)),
        (1, 8, (128, 1), (256, 1)),
        (13, 1, (128, 16), (256, 16)),
    ],
)
def test_tile_shape_wastes_few_lanes(words: int, word: int, all_sms: tuple[int, int], capped: tuple[int, int]) -> None:
    assert (tile_shape(words, word, ALL_SMS), tile_shape(words, word, CAPPED)) == (all_sms, capped)


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, 16),
        ({"block_stride": 520}, 8),
        ({"head_stride": 68}, 4),
        ({"token_stride": 34}, 2),
        ({"bases": np.array([1 << 20, (1 << 20) + 1])}, 1),
    ],
)
def test_alignment_is_that_of_the_worst_row(change: dict[str, Any], expected: int) -> None:
    pages = Pages(np.array([1 << 20, 1 << 21]), np.array([3]), 16, 512, 64, 32)
    assert alignment(replace(pages, **change), 2, 2, 32) == expected


def test_alignment_forgets_strides_that_nothing_walks_along() -> None:
    pages = Pages(np.array([1 << 20]), np.array([3]), 16, 512, 33, 35)
    assert alignment(pages, 1, 1, 32) == 16
    assert alignment(pages, 1, 1, 12) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_bytes_on_a_gpu_are_those_of_the_oracle(name: str) -> None:
    case = CASES[name]
    dst, src = case.arenas()
    want = expected(case, dst, src)
    device = torch.device("cuda", 0)
    memories = [torch.from_numpy(arena.memory).to(device) for arena in (dst, src)]
    sides = []
    for arena, memory in zip((dst, src), memories, strict=True):
        start = arena.memory.ctypes.data
        sides.append(replace(arena.pages, bases=arena.pages.bases - start + memory.data_ptr()))
    copy_pages(*sides, num_heads=case.heads, num_tokens=case.tokens, content_bytes=case.content, device=device)
    np.testing.assert_array_equal(memories[0].cpu().numpy(), want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_table_whose_place_on_a_gpu_was_given_away_is_uploaded_again() -> None:
    device = torch.device("cuda", 0)
    buffers, numbers = stream_buffers(device), np.arange(100, dtype=np.int64)
    table = DeviceTable(numbers[:60], numbers[60:])
    place, _ = table.on_device(buffers)
    assert place[:100].tolist() == numbers.tolist()
    assert table.on_device(buffers)[0] is place, "not again while it is there"
    for other in range(40):
        DeviceTable(np.full(100, -other, dtype=np.int64)).on_device(buffers)
    assert place[:100].tolist() != numbers.tolist()
    assert table.on_device(buffers)[0][:100].tolist() == numbers.tolist()
