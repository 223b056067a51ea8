"""Views of caches that vLLM itself sizes, places and reshapes, in every layout that it defines.

vLLM's tensors write a label into every element; the view's addresses read it back, and the other way round.
"""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvferry.connector.errors import GeometryError
from kvferry.connector.view import CacheView, kernel_block_ids, view_of

pytestmark = pytest.mark.vllm
kvi = pytest.importorskip("vllm.v1.kv_cache_interface")
if not hasattr(kvi, "KVCacheLayout"):
    pytest.skip("this vLLM has no KVCacheLayout", allow_module_level=True)

from vllm.v1.core.kv_cache_utils import (  # noqa: E402
    _project_kv_cache_groups_to_worker,
    get_kv_cache_config_from_groups,
)
from vllm.v1.worker.utils import allocate_kv_cache  # noqa: E402

from kvferry.connector.compat import layer_groups  # noqa: E402

LAYOUTS = list(kvi.KVCacheLayout)
PAGES = 5


def full(block=16, heads=3, size=4, dtype=torch.bfloat16, **more):
    return kvi.FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=dtype, **more)


def window(block=16, heads=3, size=4, dtype=torch.bfloat16, **more):
    return kvi.SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=size, dtype=dtype, sliding_window=64, dcp_sharded=False, **more
    )


def mla(block=16, size=6, dtype=torch.bfloat16, **more):
    return kvi.MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=size, dtype=dtype, **more)


def allocate(groups: dict[str, tuple[object, list[str]]], layout, kernel: list[int] | None = None):
    """vLLM's own sizing, placement and reshaping; only the config object is a stand-in."""
    specs = [kvi.KVCacheGroupSpec(names, spec) for spec, names in groups.values()]
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            prefix_cache_retention_interval=None,
            num_gpu_blocks_override=PAGES,
        ),
    )
    cache_config = get_kv_cache_config_from_groups(config, specs, available_memory=1 << 20)
    assert cache_config.num_blocks == PAGES
    return allocate_kv_cache(cache_config, torch.device("cpu"), layout, kernel)


def address(view: CacheView, layer: int, block: int, head: int, token: int) -> int:
    return view.bases[layer] + block * view.block_stride + head * view.head_stride + token * view.token_stride


def label(*place: int) -> np.random.Generator:
    return np.random.default_rng(place)


def check_group(tensors: dict[str, torch.Tensor], view: CacheView) -> None:
    """Labels of (layer, block, head, token, content): written by vLLM's tensors and read at addresses, then back."""
    cells = list(itertools.product(range(len(tensors)), *map(range, next(iter(tensors.values())).shape[:3])))
    assert view.nbytes == len(cells) * view.content_bytes
    named = list(tensors.values())
    as_bytes = [tensor.view(torch.uint8) for tensor in named]
    for layer, *cell in cells:
        content = label(layer, *cell).integers(0, 256, view.content_bytes, dtype=np.uint8)
        as_bytes[layer][tuple(cell)] = torch.from_numpy(content)
    for cell in cells:
        content = label(*cell).integers(0, 256, view.content_bytes, dtype=np.uint8)
        assert ctypes.string_at(address(view, *cell), view.content_bytes) == content.tobytes()
    for cell in cells:
        content = label(7, *cell).integers(0, 256, view.content_bytes, dtype=np.uint8)
        ctypes.memmove(address(view, *cell), content.tobytes(), view.content_bytes)
    for layer, *cell in cells:
        content = label(7, layer, *cell).integers(0, 256, view.content_bytes, dtype=np.uint8)
        assert np.array_equal(as_bytes[layer][tuple(cell)].numpy(), content)


CASES = {
    "gqa": lambda: {"g": (full(), ["a", "b", "c"])},
    "one-head": lambda: {"g": (full(heads=1), ["a", "b"])},
    "one-layer": lambda: {"g": (full(), ["a"])},
    "float32": lambda: {"g": (full(dtype=torch.float32, size=2), ["a", "b"])},
    "fp8": lambda: {"g": (full(dtype=torch.float8_e4m3fn), ["a", "b"])},
    "uneven-k-and-v": lambda: {"g": (full(size=4, head_size_v=6), ["a", "b"])},
    "odd-content": lambda: {"g": (full(dtype=torch.int8, state_content_bytes=11), ["a", "b"])},
    "mla": lambda: {"g": (mla(), ["a", "b"])},
    "hybrid": lambda: {"g": (full(), ["a", "b"]), "w": (window(), ["c", "d"])},
    "hybrid-uneven": lambda: {"g": (full(), ["a", "b", "e"]), "w": (window(), ["c", "d"])},
    "padded": lambda: {"g": (full(page_size_padded=1024), ["a", "b"])},
    "hybrid-padded": lambda: {
        "g": (full(page_size_padded=1024), ["a", "b"]),
        "w": (window(heads=1, page_size_padded=1024), ["c"]),
    },
    "aligned-mla": lambda: {"g": (mla(alignment=512), ["a", "b"])},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout(layout, case: str) -> None:
    groups = CASES[case]()
    padded = any(getattr(spec, "page_size_padded", None) for spec, _ in groups.values())
    if padded and not layout.is_block_compact and any(spec.num_heads > 1 for spec, _ in groups.values()):
        with pytest.raises(AssertionError, match="Page padding"):
            allocate(groups, layout)
        return
    caches = allocate(groups, layout)
    for spec, names in groups.values():  # one after the other: groups overlay each other
        tensors = {name: caches[name] for name in names}
        view = view_of(tensors, spec.block_size, PAGES)
        assert view.layers == tuple(names) and view.blocks_per_page == 1 and view.page_tokens == 16
        assert (view.num_heads, view.content_bytes) == (spec.num_heads, spec.state_content_size_bytes)
        if spec.num_heads > 1:
            assert view.layout == ("NHD" if layout.name in ("LBNHC", "BLNHC") else "HND")
        check_group(tensors, view)


@pytest.mark.parametrize("kernel", [4, 16, 48])
@pytest.mark.parametrize("spec", [full(block=48), mla(block=48), window(block=48)], ids=["full", "mla", "window"])
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.is_layer_compact], ids=lambda layout: layout.name)
def test_blocks_split_into_kernel_blocks(layout, spec, kernel: int) -> None:
    groups = {"g": (spec, ["a", "b"])}
    if kernel != spec.block_size and spec.num_heads > 1 and not layout.is_block_compact:
        with pytest.raises(ValueError, match="dense"):
            allocate(groups, layout, [kernel])
        return
    caches = allocate(groups, layout, [kernel])
    view = view_of(caches, spec.block_size, PAGES)
    assert (view.block_size, view.page_tokens, view.num_pages) == (kernel, 48, PAGES)
    check_group(caches, view)
    pages = [3, 0]
    blocks = kernel_block_ids(view, pages)
    grouped = kvi.group_kernel_blocks(caches["b"], PAGES)[pages].reshape(len(blocks), *caches["b"].shape[1:])
    for place, block in enumerate(blocks.tolist()):
        expected = grouped[place, -1, 1].view(torch.uint8).numpy().tobytes()
        assert ctypes.string_at(address(view, 1, block, view.num_heads - 1, 1), view.content_bytes) == expected


def test_compressed_states_are_not_taken_for_kernel_blocks() -> None:
    """Four tokens to a stored state: the shape alone looks like a block split in four."""
    spec = mla(block=64, tokens_per_state=4)
    caches = allocate({"g": (spec, ["a", "b"])}, kvi.KVCacheLayout.BLHNC)
    with pytest.raises(GeometryError, match="5 kernel blocks of 16 tokens, expected 5 x 4"):
        view_of(caches, spec.block_size, PAGES)


def test_layers_of_several_forms_in_one_group_are_named() -> None:
    specs = {"a": mla(), "b": mla(), "indexer": mla(size=3)}
    group = kvi.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    caches = allocate({"g": (group, list(specs))}, kvi.KVCacheLayout.BLHNC)
    with pytest.raises(GeometryError, match=r"'indexer': shape .* differs from .* of layer 'a'"):
        view_of(caches, 16, PAGES)
    for names in (["a", "b"], ["indexer"]):
        tensors = {name: caches[name] for name in names}
        check_group(tensors, view_of(tensors, 16, PAGES))


def test_a_stage_keeps_the_place_of_groups_that_it_has_no_layer_of() -> None:
    """Pipeline stages: a plan counts the engine's block tables, so a stage must not close the gap."""
    specs = {"a": full(), "b": full(), "c": mla()}
    engine = [kvi.KVCacheGroupSpec(["c"], specs["c"]), kvi.KVCacheGroupSpec(["a", "b"], specs["a"])]
    stage = _project_kv_cache_groups_to_worker(engine, {"b": specs["b"]})
    found = layer_groups(kvi.KVCacheConfig(num_blocks=PAGES, kv_cache_tensors=[], kv_cache_groups=stage))
    assert [(group.kind, group.layers) for group in found] == [("mla", ()), ("full", ("b",))]


def test_a_view_of_the_wrong_layer_is_caught() -> None:
    """The labels tell layers apart: with bases swapped the comparison fails."""
    caches = allocate({"g": (full(), ["a", "b"])}, kvi.KVCacheLayout.BLNHC)
    swapped = view_of({"b": caches["b"], "a": caches["a"]}, 16)
    with pytest.raises(AssertionError):
        check_group(caches, swapped)
