"""Block zeroing: the reference here, the Triton kernel in the interpreter and through the compiler.

Triton decides at import whether it interprets, so each runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from zero_blocks_cases import CASES, Arena, expected

from kvferry.kernels.zero_blocks import Segments, zero_blocks
from kvferry.kernels.zero_blocks_triton import alignment, tile_words

HERE = Path(__file__).parent
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
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvferry.kernels import zero_blocks_triton

names = ("DTYPE", "ALIGN", "WORDS_ALIGN", "BLOCK_W")
for dtype, word, align in ((tl.int64, 8, 16), (tl.int64, 8, 8), (tl.int32, 4, 4), (tl.int16, 2, 2), (tl.int8, 1, 1)):
    source = ASTSource(
        fn=zero_blocks_triton._zero_kernel,
        signature={"table": "*i64"} | dict.fromkeys(names, "constexpr"),
        constexprs=dict(zip(names, (dtype, align, align // word, zero_blocks_triton.tile_words(1 << 20, word)))),
    )
    target = GPUTarget("cuda", 90, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": zero_blocks_triton.NUM_WARPS}).asm["ptx"]
    print(align, *sorted(set(re.findall(r"st\\.global[.\\w]*", ptx))))
"""


def python(script: str, *arguments: str, interpret: bool) -> list[list[str]]:
    """Words of each line that the script prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_the_reference_are_those_of_the_oracle(name: str) -> None:
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
