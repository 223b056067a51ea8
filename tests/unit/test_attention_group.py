"""Specs and backends of duck-typed layers, the groups that they fall into; kernel block sizes against brute force."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvferry.connector.binding.attention_group import (
    AttentionGroup,
    attention_groups,
    prepare_kernel_block_sizes,
    select_common_block_size,
)
from kvferry.connector.binding.kv_spec import KVCacheConfig, KVCacheGroupSpec, MultipleOf
from kvferry.transport.errors import GeometryError
from tests.unit.kv_layers import Layer, backend, spec

ANY = backend(MultipleOf(1), name="Any")


def test_layers_and_builders_that_are_not_there() -> None:
    config = KVCacheConfig(1, [], [KVCacheGroupSpec(["a.0", "a.9"], spec())])
    with pytest.raises(GeometryError, match=r"layer 'a.9' of group 0 is no attention layer"):
        attention_groups(config, {"a.0": Layer(spec(), ANY)})
    with pytest.raises(GeometryError, match="metadata builder 0 of 0"):
        AttentionGroup(ANY, ["a.0"], spec(), 0).get_metadata_builder()


def test_packed_token_caches_do_not_split() -> None:
    group = AttentionGroup(ANY, ["a.0"], spec(block=48), 0, kernel_block_size=16)
    cache = torch.zeros(5, 3, 48, 8)
    with pytest.raises(GeometryError, match="blocks of 48 tokens that lie beside other layers' cannot be split"):
        group.map_kv_cache_to_kernel_blocks(cache)
    with pytest.raises(GeometryError, match="nothing to undo"):
        group.map_kv_cache_to_manager_blocks(cache, 5)
    whole = AttentionGroup(ANY, ["a.0"], spec(block=48), 0)
    table = torch.tensor([[1]])
    assert whole.map_kv_cache_to_kernel_blocks(cache) is cache and whole.map_to_kernel_block_table(table) is table


def test_odd_questions() -> None:
    with pytest.raises(GeometryError, match="'16' is neither a number of tokens nor a MultipleOf"):
        select_common_block_size(16, [backend("16")])
    with pytest.raises(GeometryError, match="manager block of 0 tokens"):
        select_common_block_size(0, [backend(16)])
    with pytest.raises(GeometryError, match="1 KV cache specs for 2 backends"):
        select_common_block_size(16, [backend(16), backend(16)], [spec()])
    with pytest.raises(GeometryError, match=r"Some takes \[32\]; Other takes \[24\]"):
        select_common_block_size(96, [backend(32, name="Some"), backend(24, name="Other")])


def test_groups_whose_blocks_have_no_size() -> None:
    config = KVCacheConfig(2, [], [KVCacheGroupSpec(["layers.0"], spec(block=32))])
    with pytest.raises(GeometryError, match="group 0 has no attention groups, 0 were given"):
        prepare_kernel_block_sizes(config, [])
    config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=1)
    with pytest.raises(GeometryError, match="group 0: a KV cache spec of type SimpleNamespace is of no known kind"):
        prepare_kernel_block_sizes(config, [[]])
