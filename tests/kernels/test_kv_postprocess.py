"""The fix-ups on host memory against an oracle that numbers every (token, head), guards and unused blocks included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels import kv_postprocess
from kvferry.kernels.kv_postprocess import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
)
from kvferry.transport.errors import GeometryError
from tests.kernels.kv_postprocess_cases import BOTH, CASES, Arena, Case, fix_up


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


@pytest.mark.parametrize("case", [Case("blksize", ratio=-2, groups=4), Case(BOTH, "NHD", ratio=2, tokens=16, groups=4)])
@pytest.mark.parametrize("fault", ["nothing", "ids", "missing", "ratio", "byte"])
def test_the_comparison_sees_a_fault(case: Case, fault: str) -> None:
    """Plants one fault in a fix-up that is otherwise right."""
    arena = Arena(case)
    want, indices, ratio = arena.expected(), arena.indices(), case.ratio
    if fault == "ids":
        unused = next(i for i in range(len(arena.cache())) if i not in arena.ids)
        indices = torch.cat([torch.tensor([unused]), indices[1:]])
    elif fault == "missing":
        indices = indices[case.group :]
    elif fault == "ratio":
        ratio *= 2
    if fault != "nothing":
        fix_up(replace(case, ratio=ratio), arena.cache(), indices)
    if fault == "byte":
        np.testing.assert_array_equal(arena.memory, want)
        arena.memory[len(arena.memory) // 2] ^= 1
    assert not np.array_equal(arena.memory, want)


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
