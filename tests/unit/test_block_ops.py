"""Whole blocks zeroed and copied, against plain indexing: all of the named blocks, not a byte of any other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.connector.binding.attention_group import attention_groups
from kvferry.connector.binding.block_ops import KVBlockZeroer, _make_src_and_dst_indices, copy_kv_blocks
from kvferry.connector.binding.kv_binding import init_kv_cache
from kvferry.connector.binding.kv_spec import KVCacheGroupSpec, KVCacheLayout, get_kv_cache_config_from_groups
from kvferry.transport.errors import GeometryError
from tests.unit.kv_layers import Layer, backend, spec

CPU = torch.device("cpu")
BLOCKS = 7
SHAPE = (9, 3, 16, 4)


def engine(layout: object, specs: dict[str, Any], kernel: list[int] | None = None) -> tuple[dict[str, Layer], Any, Any]:
    """Layers of one group per spec, their caches bound and filled with ones; groups and zeroer's sizes."""
    layers = {name: Layer(each, backend(*(kernel or [each.block_size]))) for name, each in specs.items()}
    alike: dict[Any, list[str]] = {}
    for name, each in specs.items():
        alike.setdefault(each, []).append(name)
    config = get_kv_cache_config_from_groups([KVCacheGroupSpec(n, s) for s, n in alike.items()], BLOCKS, layout)
    kernel = kernel or [each.block_size for each in alike]
    init_kv_cache(layers, config, CPU, kernel, layout)
    for layer in layers.values():
        layer.kv_cache.view(torch.uint8).fill_(255)
    return layers, [group for groups in attention_groups(config, layers) for group in groups], kernel


CASES = {
    "bf16": {"layers.0": spec(), "layers.1": spec()},
    "odd-bytes": {"layers.0": spec(dtype=torch.int8, state_content_bytes=11, block=3)},
    "odd-words": {"layers.0": spec(size=1, block=5), "layers.1": spec(size=1, block=5)},
    "padded": {"layers.0": spec(heads=1, page_size_padded=512), "layers.1": spec(heads=1, page_size_padded=512)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_zeroed_blocks_and_no_others(layout: KVCacheLayout, case: str) -> None:
    layers, groups, kernel = engine(layout, CASES[case])
    zeroer = KVBlockZeroer(CPU, groups, kernel, layers, BLOCKS)
    zeroer.zero_block_ids([])
    assert all(bool((layer.kv_cache.view(torch.uint8) == 255).all()) for layer in layers.values())
    zeroer.zero_block_ids([5, 0, 3])
    for layer in layers.values():
        content = layer.kv_cache.view(torch.uint8).flatten(1)
        assert content[[0, 3, 5]].max() == 0 and content[[1, 2, 4, 6]].min() == 255


def test_layers_that_are_left_alone() -> None:
    layers, groups, kernel = engine("LBHNC", {f"layers.{n}": spec() for n in range(3)})
    layers["layers.1"].kv_cache = []
    zeroer = KVBlockZeroer(CPU, groups, kernel, layers, BLOCKS, {"layers.2"})
    zeroer.warmup(BLOCKS)
    assert layers["layers.0"].kv_cache[0].count_nonzero() == 0
    assert layers["layers.2"].kv_cache.view(torch.uint8).min() == 255
    groups[0].kv_cache_spec = SimpleNamespace(block_size=16, shapes=())
    assert KVBlockZeroer(CPU, groups, kernel, layers, BLOCKS).segments.addresses.size == 0
    layers, groups, kernel = engine("LBHNC", {"layers.0": spec()})
    assert KVBlockZeroer(CPU, groups, [], layers, BLOCKS).segments.addresses.size == 0
    assert KVBlockZeroer(torch.device("cuda"), groups, kernel, layers, BLOCKS).segments.addresses.size == 0
    KVBlockZeroer(CPU, groups, kernel, layers, BLOCKS).warmup(0)
    assert layers["layers.0"].kv_cache.view(torch.uint8).min() == 255


def test_packed_caches_that_were_bound_as_kernel_blocks() -> None:
    """Ids number manager blocks all the same, and the other layer's pages in between stay as they are."""
    packed = spec(block=64, heads=1, head_size_v=0, tokens_per_state=4)
    layers, groups, kernel = engine("BLHNC", {"layers.0": packed, "layers.1": packed})
    whole = {name: layer.kv_cache for name, layer in layers.items()}
    (group,) = groups
    group.kernel_block_size, group.layer_names = 16, ["layers.0"]
    layers["layers.0"].kv_cache = group.map_kv_cache_to_kernel_blocks(whole["layers.0"])
    KVBlockZeroer(CPU, groups, kernel, layers, BLOCKS).zero_block_ids([2, 6])
    content = whole["layers.0"].view(torch.uint8).flatten(1)
    assert content[[2, 6]].max() == 0 and content[[0, 1, 3, 4, 5]].min() == 255
    assert whole["layers.1"].view(torch.uint8).min() == 255


@pytest.mark.parametrize("block_id", [-1, BLOCKS, 1 << 40])
def test_an_id_out_of_range_zeroes_nothing(block_id: int) -> None:
    layers, groups, kernel = engine("LBHNC", {"layers.0": spec()})
    zeroer = KVBlockZeroer(CPU, groups, kernel, layers, BLOCKS)
    with pytest.raises(GeometryError, match=f"block id {block_id} is outside 0..6"):
        zeroer.zero_block_ids([1, block_id])
    assert layers["layers.0"].kv_cache.view(torch.uint8).min() == 255


def test_caches_that_do_not_fit_are_refused() -> None:
    layers, groups, kernel = engine("LBHNC", {"layers.0": spec()})
    with pytest.raises(GeometryError, match="7 kernel blocks are no multiple of 3 blocks"):
        KVBlockZeroer(CPU, groups, kernel, layers, 3)
    with pytest.raises(GeometryError, match="kernel blocks of 5 tokens do not divide a manager block of 16"):
        KVBlockZeroer(CPU, groups, [5], layers, BLOCKS)
    with pytest.raises(GeometryError, match=r"no layer 'layers.0' to zero blocks of"):
        KVBlockZeroer(CPU, groups, kernel, {"layers.1": layers["layers.0"]}, BLOCKS)


def caches(dtype: torch.dtype, *, permuted: bool, value: int | None = None) -> dict[str, torch.Tensor]:
    made = {}
    for name in ("a", "b"):
        shape = (SHAPE[0], SHAPE[2], SHAPE[1], SHAPE[3]) if permuted else SHAPE
        raw = torch.empty(shape, dtype=dtype)
        raw.view(torch.uint8).random_(0, 256) if value is None else raw.view(torch.uint8).fill_(value)
        made[name] = raw.permute(0, 2, 1, 3) if permuted else raw
    return made


def both() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return caches(torch.int8, permuted=False), caches(torch.int8, permuted=False, value=7)


def test_nothing_to_copy() -> None:
    source, target = both()
    copy_kv_blocks(source, target, [], [], "h2d")
    copy_kv_blocks({}, target, [1], [1], "h2d")
    copy_kv_blocks(source, {}, [1], [1], "h2d")
    assert all(bool((cache == 7).all()) for cache in target.values())


@pytest.mark.parametrize(
    ("theirs", "ours", "direction", "message"),
    [
        ([1, 2], [3], "h2d", "2 source blocks for 1 destinations"),
        ([1, -1], [3, 4], "h2d", "block id -1 is outside 0..8"),
        ([1, 2], [3, 9], "d2h", "block id 9 is outside 0..8"),
        ([1, 2], [3, 3], "d2h", "destination block is named twice"),
        ([1], [3], "d2d", "direction 'd2d' is unknown"),
    ],
)
def test_bad_calls_copy_nothing(theirs: list[int], ours: list[int], direction: Any, message: str) -> None:
    source, target = both()
    with pytest.raises(GeometryError, match=message):
        copy_kv_blocks(source, target, theirs, ours, direction)
    assert all(bool((cache == 7).all()) for cache in target.values())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "layer 'b' has no destination"),
        (
            {"b": torch.zeros(9, 3, 16, 5, dtype=torch.int8)},
            r"layer 'b': blocks of \[3, 16, 5\] torch.int8 cannot take",
        ),
        ({"b": torch.zeros(SHAPE, dtype=torch.uint8)}, "torch.uint8 cannot take"),
    ],
)
def test_layers_that_do_not_fit_copy_nothing(wrong: dict[str, torch.Tensor], message: str) -> None:
    source, target = both()
    with pytest.raises(GeometryError, match=message):
        copy_kv_blocks(source, {"a": target["a"], **wrong}, [1], [1], "h2d")
    assert bool((target["a"] == 7).all())


@pytest.mark.parametrize("block_id", [1.5, 1.0, "1", None])
def test_an_index_that_is_no_whole_number(block_id: Any) -> None:
    for sources, targets in (([block_id], [1]), ([1], [block_id])):
        with pytest.raises(GeometryError, match="a block id is no whole number: "):
            _make_src_and_dst_indices(sources, targets, "cpu", "cpu")
