"""Specs and places of layers against brute force: strides by counting, places by painting every byte."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector.binding.kv_spec import (
    KVCacheGroupSpec,
    KVCacheLayout,
    UniformTypeKVCacheSpecs,
    get_kv_cache_config_from_groups,
    is_encoder_only,
    kernel_shape,
    layer_spec,
    layout_strides,
)
from kvferry.transport.errors import GeometryError
from tests.unit.kv_layers import spec

ORDERS = [layout.stride_order for layout in KVCacheLayout]


def test_sizes_of_a_page() -> None:
    assert (spec().num_heads, spec().state_content_size_bytes, spec().page_size_bytes) == (3, 16, 768)
    assert spec(size=4, head_size_v=6).state_content_size_bytes == 20
    assert spec(size=4, head_size_v=0, heads=1).page_size_bytes == 16 * 8
    packed = spec(num_head_slots=2, state_content_bytes=11)
    assert (packed.num_heads, packed.page_size_bytes) == (2, 2 * 16 * 11)
    assert spec(tokens_per_state=4).get_num_kernel_states(16) == 4
    assert spec(tokens_per_state=Fraction(1, 4)).get_num_kernel_states(16) == 64
    assert spec(page_size_padded=1024).page_size_bytes == 1024
    with pytest.raises(GeometryError, match="page_size_padded 512 is less than the page's 768 bytes"):
        _ = spec(page_size_padded=512).page_size_bytes
    assert spec().copy_with_new_block_size(32).page_size_bytes == 1536


def test_kernel_blocks_must_divide() -> None:
    assert kernel_shape(spec(block=48), 5, 2, 16) == (2, 15, 3, 16, 16)
    for tokens in (0, 5, 32, 96):
        with pytest.raises(
            GeometryError, match=f"kernel blocks of {tokens} tokens do not divide a manager block of 48"
        ):
            kernel_shape(spec(block=48), 5, 2, tokens)


@given(st.sampled_from(ORDERS), st.tuples(*[st.integers(1, 5)] * 5))
def test_dense_strides_are_those_of_a_contiguous_array(order: tuple[int, ...], shape: Any) -> None:
    physical = torch.empty([shape[axis] for axis in order], dtype=torch.int8)
    logical = physical.permute([order.index(axis) for axis in range(5)])
    assert layout_strides(shape, order) == logical.stride()


def test_blocks_are_aligned() -> None:
    placed = get_kv_cache_config_from_groups(
        [KVCacheGroupSpec(["a.0", "a.1"], spec(block_stride_alignment=500))], 5, "BLHNC"
    )
    assert {t.block_stride for t in placed.kv_cache_tensors} == {2000} and placed.kv_cache_tensors[0].size == 10000
    placed = get_kv_cache_config_from_groups([KVCacheGroupSpec(["a.0"], spec(block_stride_alignment=500))], 5, "LBHNC")
    assert placed.kv_cache_tensors[0].block_stride == 1000
    with pytest.raises(GeometryError, match="cannot align pages"):
        get_kv_cache_config_from_groups([KVCacheGroupSpec(["a.0"], spec(block_stride_alignment=500))], 5, "LHBNC")
    with pytest.raises(GeometryError, match="num_blocks 0"):
        get_kv_cache_config_from_groups([], 0, "LBHNC")


def test_what_a_spec_is() -> None:
    class EncoderOnlyAttentionSpec:
        """As vLLM names it."""

    assert is_encoder_only(EncoderOnlyAttentionSpec()) and is_encoder_only(spec(encoder_only=True))
    assert not is_encoder_only(spec())
    both = UniformTypeKVCacheSpecs(16, {"a.0": spec(), "a.1": spec(heads=1)})
    assert (
        both.page_size_bytes == 1024 and layer_spec(both, "a.1") == spec(heads=1) and layer_spec(spec(), "x") == spec()
    )
    with pytest.raises(GeometryError, match=r"layer 'a.2' has no spec in its group \(did you mean"):
        layer_spec(both, "a.2")
