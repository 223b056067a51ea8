"""``kv_postprocess`` and its two companions, on the host and by Triton: the same bytes as an oracle's."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import kv_postprocess
from kvferry.kernels.kv_postprocess import (
    exchange_of,
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
)
from kvferry.kernels.kv_postprocess_triton import alignment
from kvferry.transport.errors import GeometryError
from tests.kernels.kv_postprocess_cases import BOTH, CASES, Arena, Case, fix_up
from tests.kernels.triton_process import python


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_oracle(name: str) -> None:
    case = CASES[name]
    arena = Arena(case)
    want = arena.expected()
    assert np.array_equal(arena.memory, want) == case.nothing_moves
    fix_up(case, arena.cache(), arena.indices())
    np.testing.assert_array_equal(arena.memory, want)


cases = st.builds(
    Case, kind=st.sampled_from(["blksize", "layout", BOTH]), layout=st.sampled_from(["HND", "NHD"]),
    heads=st.integers(1, 5), tokens=st.integers(1, 4), content=st.sampled_from([1, 2, 3, 4, 8, 13, 16]),
    dtype=st.sampled_from([torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2]),
    ratio=st.sampled_from([1, 2, 3, 4, 8, -2, -3, -5, -8]), groups=st.integers(1, 4),
    pad=st.tuples(*[st.sampled_from([0, 0, 0, 1, 4, 8])] * 3), shift=st.sampled_from([0, 0, 1, 2, 4]),
    ids=st.sampled_from([torch.int64, torch.int32]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(case=cases, seed=st.integers(0, 1 << 30), small_bounce=st.booleans())
def test_any_shape(case: Case, seed: int, small_bounce: bool) -> None:
    case = replace(case, tokens=case.tokens * max(1, case.ratio))
    if case.kind == "layout":
        case = replace(case, ratio=1)
    arena = Arena(case, seed)
    want = arena.expected()
    with pytest.MonkeyPatch.context() as patch:
        if small_bounce:
            patch.setattr(kv_postprocess, "BOUNCE_BYTES", 1000)
        fix_up(case, arena.cache(), arena.indices())
    np.testing.assert_array_equal(arena.memory, want)


@pytest.mark.parametrize("kind", ["blksize", "layout", BOTH])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_no_indices_or_no_bytes_touch_nothing(kind: str, ids: torch.dtype) -> None:
    arena = Arena(Case(kind, "NHD" if kind == BOTH else "HND", ratio=1 if kind == "layout" else 2))
    before = arena.memory.copy()
    fix_up(arena.case, arena.cache(), torch.zeros(0, dtype=ids))
    fix_up(arena.case, arena.cache()[:, :, :, :0], torch.tensor([1, 0], dtype=ids))
    fix_up(arena.case, arena.cache()[:, :0], torch.tensor([1, 0], dtype=ids))
    np.testing.assert_array_equal(arena.memory, before)


def test_a_cache_that_was_made_in_inference_mode_is_fixed_outside_of_it() -> None:
    with torch.inference_mode():
        cache = torch.randn(3, 4, 2, 8).transpose(1, 2)
    want = cache.clone()
    want[1] = cache[1].transpose(0, 1).reshape(2, 4, 8)
    kv_postprocess_layout_on_receive(cache, torch.tensor([1]))
    assert torch.equal(cache, want)


def test_a_storage_that_begins_at_an_odd_address_below_an_aligned_cache() -> None:
    """The widest word that fits the cache's address need not fit its distance from the storage's."""
    buffer = np.random.default_rng(0).integers(0, 256, 2000, dtype=np.uint8)
    odd = -buffer.ctypes.data % 16 + 1
    memory = torch.from_numpy(buffer[odd:])
    cache = memory[15 : 15 + 3 * 2 * 4 * 16].view(3, 4, 2, 16).transpose(1, 2)
    assert cache.data_ptr() % 16 == 0
    before, want = buffer.copy(), cache.clone()
    want[2] = cache[2].transpose(0, 1).reshape(2, 4, 16)
    kv_postprocess_layout_on_receive(cache, torch.tensor([2]))
    assert torch.equal(cache, want)
    start, size = odd + 15, 3 * 2 * 4 * 16
    np.testing.assert_array_equal(
        np.delete(buffer, slice(start, start + size)), np.delete(before, slice(start, start + size))
    )


GOOD = torch.zeros(4, 2, 6, 8)
IDS = torch.tensor([1, 3])


@pytest.mark.parametrize(
    "cache, indices, ratio, says",
    [
        (GOOD, IDS, 0, r"block_size_ratio is 0; expected remote blocks per local block, .* as a negative integer"),
        (GOOD, IDS, 4, r"block_size_ratio 4 does not divide the 6 tokens"),
        (GOOD, IDS, -3, r"2 local blocks hold no whole number of remote blocks of 3 each"),
        (GOOD, torch.tensor([1, 4]), 2, r"block id 4 is outside 0\.\.3"),
        (GOOD, torch.tensor([1, 2, 1]), 2, r"block id 1 is given more than once"),
        (GOOD, torch.tensor([1.0]), 2, r"torch.float32 of shape \(1,\); expected int64 or int32"),
        (GOOD, torch.tensor([[1, 2]]), 2, r"torch.int64 of shape \(1, 2\); expected"),
        (GOOD, torch.tensor([1], device="meta"), 2, r"indices are on meta, the cache is on cpu"),
        (GOOD[0, 0], IDS, 2, r"shape \(6, 8\); expected \[B, H, N, C\] or \[B, N, C\]"),
        (GOOD[..., ::2], IDS, 2, r"the content of one head and token has to be dense"),
        (torch.zeros(1, 2, 6, 8).expand(4, 2, 6, 8), IDS, 2, r"an expanded tensor"),
    ],
)
def test_what_cannot_be_is_one_line(cache: torch.Tensor, indices: torch.Tensor, ratio: Any, says: str) -> None:
    before = cache.clone()
    for function in (kv_postprocess_blksize_on_receive, kv_postprocess_blksize_and_layout_on_receive):
        with pytest.raises(GeometryError, match=says) as raised:
            function(cache, indices, ratio)
        assert "\n" not in str(raised.value)
    assert torch.equal(cache, before)


def test_an_error_comes_also_where_nothing_would_move() -> None:
    """A wrong call does not work by luck on a model of one head."""
    with pytest.raises(GeometryError, match="block id 9"):
        kv_postprocess_blksize_on_receive(torch.zeros(4, 6, 8), torch.tensor([9]), 2)
    with pytest.raises(GeometryError, match="does not divide"):
        kv_postprocess_blksize_and_layout_on_receive(torch.zeros(4, 6, 8), torch.tensor([1]), 5)


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
