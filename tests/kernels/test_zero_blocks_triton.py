"""Block zeroing: the host implementation here, the Triton kernel in the interpreter and through the compiler.

Triton decides at import whether it interprets, so each runs in a process of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_process import python
from zero_blocks_cases import CASES, Arena, expected

from kvferry.kernels.zero_blocks import Segments, zero_blocks
from kvferry.kernels.zero_blocks_triton import alignment, tile_words

INTERPRETED = """
import sys
import numpy as np
import torch
from kvferry.kernels.zero_blocks_triton import zero_blocks_triton
from zero_blocks_cases import CASES, Arena, expected

for name in sys.argv[1:]:
    arena = Arena(CASES[name])
    want = expected(CASES[name], arena)
    ids = np.array(CASES[name].block_ids, dtype=np.int64)
    zero_blocks_triton(arena.segments, ids, device=torch.device("cpu"))
    print(name, np.count_nonzero(want == 0) > 0, np.count_nonzero(arena.memory != want))
"""
COMPILED = """
import re
import triton.language as tl
from compiled import ptx
from kvferry.kernels.zero_blocks_triton import NUM_WARPS, _zero_kernel, tile_words

for dtype, word, align in ((tl.int64, 8, 16), (tl.int64, 8, 8), (tl.int32, 4, 4), (tl.int16, 2, 2), (tl.int8, 1, 1)):
    code = ptx(_zero_kernel, (dtype, align, align // word, tile_words(1 << 20, word)), NUM_WARPS)
    print(align, *sorted(set(re.findall(r"st\\.global[.\\w]*", code))))
"""


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_the_host_implementation_are_those_of_the_oracle(name: str) -> None:
    arena = Arena(CASES[name])
    want = expected(CASES[name], arena)
    assert 0 in want
    zero_blocks(arena.segments, np.array(CASES[name].block_ids, dtype=np.int64), device=torch.device("cpu"))
    assert np.array_equal(arena.memory, want)


def test_bytes_in_the_interpreter_are_those_of_the_oracle() -> None:
    assert python(INTERPRETED, *CASES, interpret=True) == [[name, "True", "0"] for name in CASES]


def test_compiled_for_a_gpu_it_stores_as_wide_as_the_alignment_allows() -> None:
    """Runs the compiler only; without the hints on alignment the first would be scalar."""
    assert dict(python(COMPILED, interpret=False)) == {
        "16": "st.global.v2.b64",
        "8": "st.global.b64",
        "4": "st.global.b32",
        "2": "st.global.b16",
        "1": "st.global.b8",
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_to_zero_needs_no_device(device: str) -> None:
    none = np.zeros(0, dtype=np.int64)
    arena = Arena(CASES["one"])
    zero_blocks(arena.segments, none, device=torch.device(device))
    zero_blocks(Segments(none, none, none), np.array([1]), device=torch.device(device))
    assert arena.memory.min() == 255


@pytest.mark.parametrize(
    ("change", "wanted"), [((0, 0, 0), 16), ((8, 0, 0), 8), ((0, 4, 0), 4), ((0, 0, 2), 2), ((1, 0, 0), 1)]
)
def test_alignment_is_that_of_the_worst_segment(change: tuple[int, int, int], wanted: int) -> None:
    numbers = [np.array([1 << 20, (1 << 20) + more], dtype=np.int64) for more in change]
    assert alignment(Segments(*numbers)) == wanted


def test_tiles_are_no_wider_than_the_largest_segment() -> None:
    assert [tile_words(n, 8) for n in (1, 8, 9, 100, 1 << 14, 1 << 20)] == [1, 1, 2, 16, 2048, 2048]
