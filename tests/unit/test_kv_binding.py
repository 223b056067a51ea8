"""Allocation, views and binding: what vLLM's utilities of the same names do not have, or do otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvferry.connector.binding.attention_group import AttentionGroup
from kvferry.connector.binding.kv_binding import (
    allocate,
    bind_kv_cache,
    init_kv_cache,
    initialize_kv_cache_for_kv_sharing,
    reshape,
)
from kvferry.connector.binding.kv_spec import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    get_kv_cache_config_from_groups,
)
from kvferry.transport.errors import GeometryError
from tests.unit.kv_layers import Layer, backend, spec

BLOCKS = 5


def config(layout: object, *groups: tuple[object, list[str]], blocks: int = BLOCKS) -> KVCacheConfig:
    return get_kv_cache_config_from_groups([KVCacheGroupSpec(names, each) for each, names in groups], blocks, layout)


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC", "BHLNC", "LHBNC"])
def test_blocks_that_are_no_dense_pages_do_not_split(layout: str) -> None:
    placed = config(layout, (spec(block=48), ["layers.0", "layers.1"]))
    with pytest.raises(GeometryError, match="do not split into 3 kernel blocks of 16 tokens"):
        reshape(placed, allocate(placed, "cpu"), layout, [16])


def test_a_layout_that_does_not_belong_to_the_places_is_refused() -> None:
    placed = config("LBHNC", (spec(), ["layers.0", "layers.1"]))
    with pytest.raises(GeometryError, match=r"reaches byte \d+ of an allocation of"):
        reshape(placed, allocate(placed, "cpu"), "BHLNC")
    with pytest.raises(GeometryError, match=r"layout 'LBHCN' is unknown .did you mean 'LBNHC'"):
        reshape(placed, allocate(placed, "cpu"), "LBHCN")
    with pytest.raises(GeometryError, match="no permutation"):
        reshape(placed, allocate(placed, "cpu"), (0, 1, 2, 3, 3))


def test_odd_configs_are_refused_in_one_line() -> None:
    group = KVCacheGroupSpec(["layers.0"], spec())
    place = KVCacheTensor(9600, ["layers.0"], 9600, 1920)
    with pytest.raises(GeometryError, match="expected one size for all"):
        allocate(KVCacheConfig(BLOCKS, [place, KVCacheTensor(1, ["b"], 1, 1)], [group]), "cpu")
    with pytest.raises(GeometryError, match=r"'layers.9' has a place .* in no KV cache group"):
        odd = KVCacheConfig(BLOCKS, [KVCacheTensor(9600, ["layers.9"], 1, 1)], [group])
        reshape(odd, allocate(odd, "cpu"), "LBHNC")
    odd = KVCacheConfig(BLOCKS, [KVCacheTensor(9601, ["layers.0"], 9600, 768, offset=1)], [group])
    with pytest.raises(GeometryError, match=r"no view of its bytes as torch.bfloat16"):
        reshape(odd, allocate(odd, "cpu"), "LBHNC")
    assert allocate(KVCacheConfig(1), "cpu").numel() == 0 and reshape(KVCacheConfig(1), torch.empty(0), "LBHNC") == {}


@pytest.mark.parametrize(
    ("names", "filled", "message"),
    [
        (["layers.0", "other.1"], False, "no layer 'other.1'"),
        (["layers.0", "layers.x"], False, "'layers.x' holds 0 numbers"),
        (["layers.0", "layers.0.1"], False, r"'layers.0.1' holds 2 numbers, expected one"),
        (["layers.0"], True, "holds 1 caches already"),
    ],
)
def test_bind_binds_all_or_nothing(names: list[str], filled: bool, message: str) -> None:
    layers = {"layers.0": Layer(), "layers.0.1": Layer(), "layers.x": Layer()}
    runner = [torch.empty(0)] if filled else []
    with pytest.raises(GeometryError, match=message):
        bind_kv_cache({name: torch.zeros(1) for name in names}, layers, runner)
    assert len(runner) == filled and all(layer.kv_cache is None for layer in layers.values())


def groups_of_two() -> list[KVCacheGroupSpec]:
    return [KVCacheGroupSpec(["layers.0", "layers.1"], spec()), KVCacheGroupSpec(["layers.2"], spec(block=32))]


def test_sharing_aliases_the_target_and_joins_its_attention_group() -> None:
    groups, alone = groups_of_two(), set[str]()
    attention = [
        [AttentionGroup(None, ["layers.0"], spec(), 0), AttentionGroup(None, ["layers.1"], spec(), 0)],
        [AttentionGroup(None, ["layers.2"], spec(block=32), 1)],
    ]
    caches = {f"layers.{n}": torch.zeros(2) for n in range(3)}
    initialize_kv_cache_for_kv_sharing(
        {"layers.3": "layers.1", "layers.4": "layers.2"}, groups, caches, attention, alone
    )
    assert caches["layers.3"] is caches["layers.1"] and caches["layers.4"] is caches["layers.2"]
    assert [[group.layer_names for group in each] for each in attention] == [
        [["layers.0"], ["layers.1", "layers.3"]],
        [["layers.2", "layers.4"]],
    ]
    assert groups[0].layer_names[-1] == "layers.3" and alone == {"layers.3", "layers.4"}


@pytest.mark.parametrize(
    ("shared", "with_groups", "message"),
    [
        ({"layers.4": "layers.0", "layers.3": "layers.9"}, False, "'layers.9', which has none"),
        ({"layers.4": "layers.0", "layers.3": "layers.5"}, False, r"'layers.5', which is in no group \(did you mean"),
        ({"layers.4": "layers.0", "layers.3": "layers.2"}, True, "'layers.2', which is in no attention group"),
    ],
)
def test_sharing_that_fails_changes_nothing(shared: dict[str, str], with_groups: bool, message: str) -> None:
    groups, alone = groups_of_two(), set[str]()
    attention = [[AttentionGroup(None, ["layers.0"], spec(), 0)]] if with_groups else None
    caches = {f"layers.{n}": torch.zeros(2) for n in (0, 1, 2, 5)}
    with pytest.raises(GeometryError, match=message):
        initialize_kv_cache_for_kv_sharing(shared, groups, caches, attention, alone)
    assert len(caches) == 4 and [len(group.layer_names) for group in groups] == [2, 1] and not alone


def test_init_binds_kernel_blocks_of_packed_compressed_caches() -> None:
    """Two layers' pages alternate; the backend's kernel blocks of one layer step over the other's."""
    compressed = spec(block=64, heads=1, head_size_v=0, tokens_per_state=4)
    layers = {name: Layer(compressed, backend(16)) for name in ("layers.0", "layers.1")}
    placed = config("BLHNC", (compressed, list(layers)))
    group = AttentionGroup(backend(16), list(layers), compressed, 0, kernel_block_size=16)
    caches = init_kv_cache(layers, placed, "cpu", [64], "BLHNC", attn_groups=[group])
    assert group.kernel_block_stride == 8
    table = group.map_to_kernel_block_table(torch.tensor([[3, 1]]))
    assert table.tolist() == [[24, 25, 26, 27, 8, 9, 10, 11]]
    for name, layer in layers.items():
        caches[name].copy_(torch.randn(caches[name].shape))
        assert torch.equal(layer.kv_cache[table[0]].flatten(), caches[name][[3, 1]].flatten())
        back = group.map_kv_cache_to_manager_blocks(layer.kv_cache, BLOCKS)
        assert (back.shape, back.stride()) == (caches[name].shape, caches[name].stride())


def test_state_layers_keep_bytes_and_raw_layers_the_allocation() -> None:
    state = SimpleNamespace(
        block_size=16, num_heads=1, state_content_size_bytes=24, page_size_bytes=24, shapes=((3,), (3,)),
        get_num_kernel_states=lambda size: 1,
    )  # fmt: skip
    placed = KVCacheConfig(
        2,
        [KVCacheTensor(48, ["layers.0"], 48, 24), KVCacheTensor(48, ["raw.0"], 1, 1)],
        [KVCacheGroupSpec(["layers.0"], state), KVCacheGroupSpec(["raw.0"], SimpleNamespace(has_layer_views=False))],
    )
    raw = allocate(placed, "cpu")
    views = reshape(placed, raw, "LBHNC")
    assert views["layers.0"].shape == (2, 1, 1, 24) and views["layers.0"].dtype == torch.int8
    assert views["raw.0"] is raw
