"""Specs and backends of duck-typed layers, the groups that they fall into; kernel block sizes against brute force."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvferry.connector.binding.attention_group import (
    AttentionGroup,
    attention_groups,
    get_current_attn_backend,
    get_current_attn_backends,
    get_kv_cache_spec,
    get_shared_kv_cache_layers,
    prepare_kernel_block_sizes,
    select_common_block_size,
)
from kvferry.connector.binding.kv_spec import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MultipleOf,
    UniformTypeKVCacheSpecs,
)
from kvferry.transport.errors import GeometryError
from tests.unit.kv_layers import Layer, backend, spec

ANY = backend(MultipleOf(1), name="Any")


def test_specs_of_layers_that_keep_a_cache() -> None:
    state = SimpleNamespace(block_size=1, shapes=())
    layers = {
        "a.0": Layer(spec(), ANY), "a.1": Layer(None, ANY), "a.2": Layer(spec(), ANY, target="a.0"),
        "m.3": Layer(state, None), "x": object(),
    }  # fmt: skip
    assert get_kv_cache_spec(layers) == {"a.0": spec(), "m.3": state}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert get_kv_cache_spec(config) == get_kv_cache_spec(layers)
    assert get_shared_kv_cache_layers(config) == {"a.2": "a.0"}


def test_what_a_layer_is_given() -> None:
    asked: list[object] = []

    class Curious(Layer):
        def get_kv_cache_spec(self, config: object) -> object:
            asked.append(config)
            return None

    layers = {"a.0": Curious()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    get_kv_cache_spec(layers, "given")
    get_kv_cache_spec(config)
    get_kv_cache_spec(layers)
    assert asked == ["given", config, None]


def test_backends_in_order_and_once() -> None:
    """A class that was made anew for every layer is one backend."""
    layers = {
        "a.0": Layer(None, backend(1, name="X")),
        "a.1": Layer(None, ANY),
        "a.2": Layer(None, backend(2, name="X")),
    }
    found = get_current_attn_backends(layers)
    assert [each.__name__ for each in found] == ["X", "Any"]
    assert get_current_attn_backend(layers).__name__ == "X" and get_current_attn_backend(layers, ["a.1"]) is ANY
    assert get_current_attn_backends(layers, ["a.1", "nowhere"]) == [ANY]
    with pytest.raises(GeometryError, match="no attention layer among 'nowhere' layers"):
        get_current_attn_backend(layers, ["nowhere"])


def test_groups_agree_in_backend_spec_and_query_heads() -> None:
    layers = {f"a.{n}": Layer(spec(), ANY) for n in range(4)}
    layers["a.1"] = Layer(spec(), backend(16, name="Other"))
    vars(layers["a.3"])["num_heads"] = 8
    layers["s.4"] = Layer(None, ANY, target="b.5")
    specs = {"b.5": spec(heads=1), "b.6": spec()}
    layers |= {name: Layer(each, ANY) for name, each in specs.items()}
    config = KVCacheConfig(1, [], [
        KVCacheGroupSpec([f"a.{n}" for n in range(4)], spec()),
        KVCacheGroupSpec(["b.5", "b.6", "s.4"], UniformTypeKVCacheSpecs(16, specs)),
    ])  # fmt: skip
    found = attention_groups(config, layers)
    assert [[group.layer_names for group in each] for each in found] == [
        [["a.0", "a.2"], ["a.1"], ["a.3"]],
        [["b.5", "s.4"], ["b.6"]],
    ]
    assert [group.kv_cache_group_id for each in found for group in each] == [0, 0, 0, 1, 1]
    assert found[1][0].kv_cache_spec == spec(heads=1)
    config.kv_cache_groups[0].layer_names.append("a.9")
    with pytest.raises(GeometryError, match=r"layer 'a.9' of group 0 is no attention layer"):
        attention_groups(config, layers)


def test_builders_get_the_spec_of_a_kernel_block() -> None:
    made: list[tuple] = []
    picky = backend(16)
    picky.get_builder_cls = staticmethod(lambda: lambda *given: made.append(given) or len(made))
    group = AttentionGroup(picky, ["a.0"], spec(block=48), 0)
    with pytest.raises(GeometryError, match="metadata builder 0 of 0"):
        group.get_metadata_builder()
    group.create_metadata_builders("config", torch.device("cpu"), 48, 2)
    assert [each[0].block_size for each in made] == [16, 16] and made[0][1:] == (["a.0"], "config", torch.device("cpu"))
    assert group.kernel_block_size == 16 and group.get_metadata_builder(1) == 2
    table = group.map_to_kernel_block_table(torch.tensor([[2, 0], [1, 3]], dtype=torch.int32))
    assert table.dtype == torch.int32
    assert table.tolist() == [[6, 7, 8, 0, 1, 2], [3, 4, 5, 9, 10, 11]]


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
