"""The converting Triton kernel against the oracle: in the interpreter, and compiled for a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from convert_cases import CASES
from triton_process import python

from kvferry.kernels.convert import unpack_converted

INTERPRETED = """
import sys
import torch
from kvferry.kernels.convert_triton import unpack_converted_triton
from convert_cases import CASES

for number, name in enumerate(sys.argv[1:]):
    case = CASES[name]
    arena, wire = case.arena(), case.wire()
    want = case.expected(arena, wire)
    unpack_converted_triton(
        arena.pages, wire.ctypes.data, case.conversion(), num_heads=case.heads, num_tokens=case.tokens,
        device=torch.device("cpu"), sms=(None, 1, 5, 1000)[number % 4],
    )
    print(name, case.differing(arena, want))
"""
COMPILED = """
import re
from compiled import ptx
from kvferry.kernels.convert_triton import FORMATS, _convert_kernel, _destination_constants, _source_constants
from kvferry.kernels.paged_copy_triton import ALL_SMS

def width(word):  # bytes that one instruction moves
    *_, many, one = word.split(".")
    return (int(many[1:]) if many[0] == "v" else 1) * int(one[1:]) // 8

for capability in (80, 90):
    for of, to in (("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "float16"), ("float32", "bfloat16")):
        constants = *_source_constants(FORMATS[of], 16), *_destination_constants(FORMATS[to], 16), 16, 64, 128
        code = ptx(_convert_kernel, constants, ALL_SMS.num_warps, capability)
        found = [re.findall(rf"{what}\\.global[.\\w]*", code) for what in ("ld", "st")]
        narrowest = [min(width(word) for word in words) for words in found]
        print(capability, of, to, *narrowest, "ftz" in code)
"""


def test_numbers_in_the_interpreter_are_those_of_the_oracle() -> None:
    names = [name for name in CASES if name != "more-than-the-scratch-holds"]
    assert python(INTERPRETED, *names, interpret=True) == [[name, "0"] for name in names]


def test_compiled_for_a_gpu_it_moves_wide_words_and_flushes_no_subnormal_number() -> None:
    """Runs the compiler only, also for a GPU that has no fp8 of its own."""
    lines = python(COMPILED, interpret=False)
    assert len(lines) == 6
    for _, _, _, loaded, stored, flushed in lines:
        assert int(loaded) >= 8 and int(stored) == 16 and flushed == "False", lines


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_numbers_on_a_gpu_are_those_of_the_oracle(name: str) -> None:
    case = CASES[name]
    arena, wire = case.arena(), case.wire()
    want = case.expected(arena, wire)
    device = torch.device("cuda", 0)
    memory, sent = torch.from_numpy(arena.memory).to(device), torch.from_numpy(wire.view(np.uint8)).to(device)
    pages = replace(arena.pages, bases=arena.pages.bases - arena.memory.ctypes.data + memory.data_ptr())
    unpack_converted(
        pages, sent.data_ptr(), case.conversion(), num_heads=case.heads, num_tokens=case.tokens, device=device
    )
    arena.memory[:] = memory.cpu().numpy()
    assert case.differing(arena, want) == 0
