"""Kernel block sizes against brute force over all divisors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_layers import backend, spec

from kvferry.connector.binding.attention_group import AttentionGroup
from kvferry.connector.binding.block_sizes import prepare_kernel_block_sizes, select_common_block_size
from kvferry.connector.binding.kv_spec import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MultipleOf,
    UniformTypeKVCacheSpecs,
)
from kvferry.transport.errors import GeometryError

SIZES = st.one_of(
    st.sampled_from([4, 8, 12, 16, 24, 32, 64]), st.builds(MultipleOf, st.sampled_from([1, 4, 8, 16, 24]))
)


def takes(sizes: list, size: int) -> bool:
    return any(size % one.base == 0 if isinstance(one, MultipleOf) else size == one for one in sizes)


@given(
    st.sampled_from([8, 16, 32, 48, 64, 96]), st.lists(st.lists(SIZES, min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_the_greatest_common_size_that_divides(manager: int, backends: list[list]) -> None:
    fits = [n for n in range(1, manager + 1) if manager % n == 0 and all(takes(sizes, n) for sizes in backends)]
    if fits:
        assert select_common_block_size(manager, [backend(*sizes) for sizes in backends]) == max(fits)
    else:
        with pytest.raises(GeometryError, match=f"no kernel block size divides a manager block of {manager} tokens"):
            select_common_block_size(manager, [backend(*sizes) for sizes in backends])


def test_a_backend_is_asked_for_its_spec() -> None:
    picky = type("Picky", (), {"get_supported_kernel_block_sizes": staticmethod(lambda spec: [spec.block_size // 2])})
    assert select_common_block_size(32, [picky], [spec(block=32)]) == 16


def test_of_several_sizes_the_greatest() -> None:
    assert select_common_block_size(96, [backend(16, 32, 24), backend(32, 8, 16)]) == 32


def test_odd_questions() -> None:
    with pytest.raises(GeometryError, match="'16' is neither a number of tokens nor a MultipleOf"):
        select_common_block_size(16, [backend("16")])
    with pytest.raises(GeometryError, match="manager block of 0 tokens"):
        select_common_block_size(0, [backend(16)])
    with pytest.raises(GeometryError, match="1 KV cache specs for 2 backends"):
        select_common_block_size(16, [backend(16), backend(16)], [spec()])
    with pytest.raises(GeometryError, match=r"Some takes \[32\]; Other takes \[24\]"):
        select_common_block_size(96, [backend(32, name="Some"), backend(24, name="Other")])


def group(number: int, sizes: list, group_spec: object) -> AttentionGroup:
    return AttentionGroup(backend(*sizes), [f"layers.{number}"], group_spec, number)


def test_every_group_by_its_kind() -> None:
    state = SimpleNamespace(block_size=64, shapes=((2,),))
    raw = SimpleNamespace(block_size=128, has_layer_views=False)
    both = UniformTypeKVCacheSpecs(48, {"layers.0": spec(block=48)})
    specs = [both, state, spec(encoder_only=True), raw, spec(block=32)]
    config = KVCacheConfig(2, [], [KVCacheGroupSpec([f"layers.{n}"], each) for n, each in enumerate(specs)])
    groups = [
        [group(0, [16], spec(block=48)), group(0, [MultipleOf(8)], spec(block=48))],
        [],
        [],
        [],
        [group(4, [8], spec())],
    ]
    assert prepare_kernel_block_sizes(config, groups) == [16, 64, 128, 8]
    with pytest.raises(GeometryError, match="group 4 has no attention groups, 4 were given"):
        prepare_kernel_block_sizes(config, groups[:4])
    config.kv_cache_groups.append(KVCacheGroupSpec(["x"], SimpleNamespace(block_size=1)))
    with pytest.raises(GeometryError, match="group 5: a KV cache spec of type SimpleNamespace is of no known kind"):
        prepare_kernel_block_sizes(config, groups)


def test_packed_groups_stay_whole() -> None:
    """Layers side by side in a block; and one whose tensors merely stand in the same config."""
    config = KVCacheConfig(
        2,
        [KVCacheTensor(9, ["layers.0"], 1, 3), KVCacheTensor(9, ["layers.1"], 3, 1)],
        [KVCacheGroupSpec(["layers.0"], spec(block=32)), KVCacheGroupSpec(["layers.1"], spec(block=32))],
    )
    groups = [[group(0, [16], spec(block=32))], [group(1, [16], spec(block=32))]]
    assert prepare_kernel_block_sizes(config, groups) == [32, 16]
