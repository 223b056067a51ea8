"""The Triton exchange against the oracle and the host implementation: in the interpreter, and compiled for a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.kernels.kv_postprocess import exchange_of
from kvferry.kernels.kv_postprocess_triton import alignment
from tests.kernels.kv_postprocess_cases import BOTH, CASES, Arena, Case, fix_up
from tests.kernels.triton_process import python

INTERPRETED = """
import sys
import numpy as np
import torch
from tests.kernels.kv_postprocess_cases import CASES, Arena
from kvferry.kernels import kv_postprocess_triton
from kvferry.kernels.kv_postprocess import exchange_host, exchange_of

tile, scratch, *names = sys.argv[1:]
kv_postprocess_triton.TILE = kv_postprocess_triton.SLAB_TILE = int(tile)
kv_postprocess_triton.SLAB_BYTES = kv_postprocess_triton.SCRATCH_BYTES = int(scratch)
for number, name in enumerate(names):
    case = CASES[name]
    arena, on_host = Arena(case), Arena(case)
    want = arena.expected()
    exchange = exchange_of(arena.cache(), case.ratio, relayout=case.kind != "blksize")
    if exchange is not None:
        programs = (None, 1, 5, 1000)[number % 4]
        indices = torch.stack([arena.indices(), 0 * arena.indices()], dim=1)[:, 0]  # not contiguous
        kv_postprocess_triton.exchange_triton(arena.cache(), indices, exchange, num_programs=programs)
        exchange_host(on_host.cache(), on_host.indices(), exchange)
    print(name, np.count_nonzero(arena.memory != want), np.count_nonzero(arena.memory != on_host.memory))
"""
COMPILED = """
import re
from kvferry.kernels import kv_postprocess_triton as kernels
from tests.kernels.triton_process import ptx

for kernel, tile, warps in (
    (kernels.exchange_kernel, kernels.TILE, kernels.NUM_WARPS),
    (kernels.exchange_through_scratch_kernel, kernels.SLAB_TILE, kernels.SLAB_WARPS),
):
    for align, (dtype, lanes) in kernels.WORDS.items():
        found = re.findall(r"(?:ld|st)\\.global[.\\w]*|bar\\.sync", ptx(kernel, (dtype, lanes, align, tile), warps))
        print(kernel.fn.__name__, align, *(name for i, name in enumerate(found) if i == 0 or name != found[i - 1]))
"""


@pytest.mark.parametrize("tile, scratch", [("4096", "16777216"), ("64", "4096"), ("16", "100")])
def test_bytes_in_the_interpreter_are_those_of_the_oracle_and_of_the_host_path(tile: str, scratch: str) -> None:
    """With small tiles units go through scratch memory."""
    names = [name for name in CASES if tile == "4096" or not ("many" in name or "48" in name)]
    names = names[:: {"4096": 2, "64": 3, "16": 10}[tile]]
    lines = python(INTERPRETED, tile, scratch, *names, interpret=True)
    assert lines == [[name, "0", "0"] for name in names]


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, int], list[str]]:
    """Global accesses and barriers of the kernels' code for a GPU, in order, by kernel and alignment."""
    lines = python(COMPILED, interpret=False)
    assert len(lines) == 10
    return {(name, int(align)): found for name, align, *found in lines}


def test_compiled_for_a_gpu_it_moves_words_as_wide_as_the_alignment_allows(compiled) -> None:
    widths = {16: "v2.b64", 8: "b64", 4: "b32", 2: "b16", 1: "b8"}
    for (_, align), found in compiled.items():
        assert {name for name in found if name.startswith("st.")} == {f"st.global.{widths[align]}"}
        assert f"ld.global.{widths[align]}" in found


def test_compiled_for_a_gpu_every_read_of_a_cell_comes_before_the_barrier_and_every_write_after(compiled) -> None:
    """What makes the exchange safe in place, and what the interpreter cannot show."""
    for (kernel, _), found in compiled.items():
        order = "".join("|" if name == "bar.sync" else name[0] for name in found)
        if kernel == "exchange_kernel":
            assert re.fullmatch(r"\|*l+\|+s+", order), order
        else:
            # The barrier at the end of the loop stands before its body, where the compiler puts it.
            assert re.fullmatch(r"\|+l+s+\|+l+s+", order), order


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, 16),
        ({"content": 10}, 4),
        ({"pad": (4, 0, 0)}, 8),
        ({"pad": (0, 2, 0)}, 4),
        ({"pad": (0, 0, 1)}, 2),
        ({"content": 5, "dtype": torch.int8, "shift": 3}, 1),
    ],
)
def test_alignment_is_that_of_the_worst_row(change: dict[str, Any], expected: int) -> None:
    case = replace(Case("layout", "NHD", content=8), **change)
    memory = torch.zeros(len(Arena(case).memory), dtype=torch.uint8)
    assert memory.data_ptr() % 16 == 0
    cache = Arena(case).cache(memory)
    exchange = exchange_of(cache, 1, relayout=True)
    assert exchange is not None and alignment(cache, exchange) == expected


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("name", CASES)
def test_bytes_on_a_gpu_are_those_of_the_oracle(name: str) -> None:
    case = CASES[name]
    arena = Arena(case)
    want = arena.expected()
    memory = torch.from_numpy(arena.memory).cuda()
    fix_up(case, arena.cache(memory), arena.indices().cuda())
    np.testing.assert_array_equal(memory.cpu().numpy(), want)


@gpu
@pytest.mark.parametrize(
    "case",
    [
        Case("blksize", ratio=4, heads=8, tokens=64, content=256, groups=700),
        Case("blksize", ratio=-4, heads=8, tokens=16, content=256, groups=700),
        Case("layout", "NHD", heads=8, tokens=16, content=256, groups=2000),
        Case("layout", "HND", heads=32, tokens=64, content=256, groups=200),
        Case("layout", "NHD", heads=32, tokens=96, content=256, groups=200),
        Case(BOTH, "NHD", ratio=-4, heads=32, tokens=64, content=128, groups=50),
        Case(BOTH, "NHD", ratio=3, heads=5, tokens=48, content=100, groups=500),
    ],
)
def test_many_blocks_on_a_gpu_are_those_of_the_host_implementation(case: Case) -> None:
    """Enough programs, and warps out of step, for a missing barrier to show."""
    arena = Arena(case)
    cache = arena.cache(torch.from_numpy(arena.memory).cuda())
    for _ in range(3):
        fix_up(case, arena.cache(), arena.indices())
        fix_up(case, cache, arena.indices().cuda())
        np.testing.assert_array_equal(cache.cpu().view(torch.uint8).numpy(), arena.cache().view(torch.uint8).numpy())
