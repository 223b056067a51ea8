"""Views of caches, also of those that vLLM sizes, places and reshapes; real tensors in host memory are the oracle."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1 import kv_cache_interface as kvi
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.geometry.regions import rank_geometry, regions
from kvferry.connector.geometry.view import CacheView, kernel_block_ids, view_of
from kvferry.connector.vllm.from_vllm import block_tables, layer_groups
from kvferry.transport.errors import ConfigError, GeometryError
from tests.support.families import Family
from tests.vllm.releases import get_kv_cache_config_from_groups, project_kv_cache_groups_to_worker

DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn]


def read_element(view: CacheView, layer: int, block: int, head: int, token: int) -> bytes:
    address = view.bases[layer] + block * view.block_stride + head * view.head_stride + token * view.token_stride
    return ctypes.string_at(address, view.content_bytes)


def labelled(tensors: dict[str, torch.Tensor]) -> None:
    """Random bytes through the tensors; every element differs from every other in practice."""
    generator = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        raw = torch.randint(0, 256, (*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size()), generator=generator)
        tensor.copy_(raw.to(torch.uint8).view(tensor.dtype))


def assert_reads_back(view: CacheView, tensors: dict[str, torch.Tensor]) -> None:
    for place, tensor in enumerate(tensors.values()):
        four = tensor.unsqueeze(1) if tensor.dim() == 3 else tensor
        expected = four.contiguous().view(torch.uint8).numpy()
        for block, head, token in itertools.product(*map(range, four.shape[:3])):
            assert read_element(view, place, block, head, token) == expected[block, head, token].tobytes()


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(range(4)), st.tuples(*[st.integers(1, 4)] * 5), st.sampled_from(DTYPES),
    st.integers(0, 3), st.integers(0, 9),
)  # fmt: skip
def test_any_order_of_axes_and_any_padding(order, shape, dtype, pad, offset) -> None:
    """``order``: how L, B, H and N nest in memory; ``pad``: elements left out after each step of the outermost two."""
    strides, step = [0] * 4, shape[4]
    for depth, axis in enumerate(reversed(order)):
        strides[axis] = step
        step = step * shape[axis] + (pad if depth in (1, 2) else 0)
    arena = torch.zeros(offset + step, dtype=dtype)
    five = arena[offset:].as_strided(shape, (*strides, 1), offset)
    tensors = {f"layer.{i}": five[i] for i in range(shape[0])}
    labelled(tensors)
    view = view_of(tensors, page_tokens=shape[3], num_pages=shape[1])
    assert view.bases == tuple(t.data_ptr() for t in tensors.values())
    assert (view.num_blocks, view.num_heads, view.block_size) == shape[1:4]
    assert view.content_bytes == shape[4] * arena.element_size()
    assert view.dtype == str(dtype).removeprefix("torch.") and view.device == "cpu"
    assert view.nbytes == five.numel() * arena.element_size()
    if shape[2] > 1 and shape[3] > 1:
        assert view.layout == ("HND" if order.index(2) < order.index(3) else "NHD")
    else:
        assert view.layout == "HND/NHD"
    assert_reads_back(view, tensors)


def test_mla_tensors_have_one_head_whose_stride_does_not_matter() -> None:
    arena = torch.zeros(5, 8, 12, dtype=torch.bfloat16)
    tensors = {"a": arena[:, :, :6], "b": arena[:, :, 6:]}
    labelled(tensors)
    view = view_of(tensors, page_tokens=8)
    assert view.num_heads == 1 and view.layout == "HND/NHD" and view.token_stride == 24
    assert_reads_back(view, tensors)
    odd = torch.zeros(4096).as_strided((3, 1, 4, 8), (32, 7, 8, 1))
    assert view_of({"a": odd, "b": torch.zeros(3, 1, 4, 8)}, 4).head_stride == 128


def test_block_ids_expand_to_kernel_blocks() -> None:
    cache = torch.arange(12).reshape(12, 1, 1, 1).expand(12, 1, 16, 1).contiguous()
    view = view_of({"a": cache}, page_tokens=48, num_pages=4)
    assert (view.blocks_per_page, view.num_pages, view.page_tokens) == (3, 4, 48)
    ids = kernel_block_ids(view, [2, 0, 3])
    assert ids.dtype == np.int64 and ids.tolist() == [6, 7, 8, 0, 1, 2, 9, 10, 11]
    pages = cache.unflatten(0, (4, 3))[[2, 0, 3]].flatten(0, 1)[:, 0, 0, 0]
    read = [int.from_bytes(read_element(view, 0, int(block), 0, 0), "little") for block in ids]
    assert read == pages.tolist()
    assert kernel_block_ids(view, np.array([], dtype=np.int32)).tolist() == []
    with pytest.raises(GeometryError, match="2 dimensions"):
        kernel_block_ids(view, np.zeros((2, 2), dtype=np.int64))
    for wrong, bad in (([0, 4], 4), ([-1, 2], -1), ([3, 1 << 40], 1 << 40)):
        with pytest.raises(GeometryError, match=rf"block id {bad} is outside 0\.\.3"):
            kernel_block_ids(view, wrong)


def strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(4096, dtype=dtype).as_strided(shape, stride)


GOOD = torch.zeros(4, 2, 8, 16)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "no layers"),
        ({"x": torch.zeros(4, 8)}, r"'x': cache tensor of shape \[4, 8\], expected"),
        ({"x": torch.zeros(0, 2, 8, 16)}, r"'x': cache tensor of shape \[0, 2, 8, 16\] is empty"),
        ({"x": torch.zeros(4, 2, 8, 32)[..., ::2]}, "'x': content has a stride of 2 elements"),
        ({"a": GOOD, "x": torch.zeros(4, 2, 8, 8)}, r"'x': shape .* differs from .* of layer 'a'"),
        ({"a": GOOD, "x": torch.zeros(4, 8, 2, 16).transpose(1, 2)}, r"'x': strides .* differs .* of layer 'a'"),
        ({"a": GOOD, "x": torch.zeros(4, 2, 8, 16, dtype=torch.int32)}, "'x': dtype int32 differs from float32"),
        ({"a": GOOD, "x": torch.zeros(4, 2, 8, 16, device="meta")}, "'x': device meta differs from cpu"),
        ({"x": torch.zeros(1, 2, 8, 16).expand(4, 2, 8, 16)}, "'x': elements overlap, a stride of 0 bytes"),
        ({"x": strided((4, 2, 8, 16), (256, 120, 16, 1))}, "'x': elements overlap, a stride of 480 bytes"),
        ({"x": strided((4, 2, 8, 16), (240, 128, 16, 1))}, "'x': elements overlap, a stride of 960 bytes"),
    ],
)
def test_what_is_not_such_a_cache_is_refused_by_layer(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(GeometryError, match=rf"^[^\n]*{message}[^\n]*$"):
        view_of(tensors, page_tokens=8)


@pytest.mark.parametrize(
    ("page_tokens", "num_pages", "message"),
    [
        (12, None, "manager block of 12 tokens does not split into blocks of 8"),
        (0, None, "manager block of 0 tokens"),
        (24, None, "4 kernel blocks of 8 tokens, expected a multiple of 3"),
        (16, 4, "4 kernel blocks of 8 tokens, expected 4 x 2"),
    ],
)
def test_blocks_that_do_not_fit_manager_blocks_are_refused(page_tokens, num_pages, message: str) -> None:
    with pytest.raises(GeometryError, match=f"layer 'x': .*{message}"):
        view_of({"x": GOOD}, page_tokens, num_pages)


@given(st.tuples(*[st.integers(1, 4)] * 3), st.tuples(*[st.integers(0, 40)] * 3), st.integers(1, 6))
def test_no_cache_with_shared_bytes_is_let_in(shape, strides, content) -> None:
    """Whatever is accepted has distinct bytes throughout."""
    tensor = torch.zeros(600, dtype=torch.int8).as_strided((*shape, content), (*strides, 1))
    try:
        view = view_of({"x": tensor}, shape[2])
    except GeometryError:
        return
    offsets = [
        b * view.block_stride + h * view.head_stride + t * view.token_stride + c
        for b, h, t, c in itertools.product(*map(range, (*shape, content)))
    ]
    assert len(set(offsets)) == len(offsets)


LAYOUTS = list(kvi.KVCacheLayout)
PAGES = 5


def full(block=16, heads=3, size=4, dtype=torch.bfloat16, kind=kvi.FullAttentionSpec, **more):
    return kind(block_size=block, num_kv_heads=heads, head_size=size, dtype=dtype, **more)


def window(**more):
    return full(kind=kvi.SlidingWindowSpec, sliding_window=64, dcp_sharded=False, **more)


def mla(**more):
    return full(**{"kind": kvi.MLAAttentionSpec, "heads": 1, "size": 6, **more})


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


def check_group(tensors: dict[str, torch.Tensor], view: CacheView) -> None:
    """Random content of every (layer, block, head, token), from vLLM's tensors to addresses and back."""
    as_bytes = [tensor.view(torch.uint8) for tensor in tensors.values()]
    cells = list(itertools.product(range(len(tensors)), *map(range, as_bytes[0].shape[:3])))
    assert view.nbytes == len(cells) * view.content_bytes
    written, back = np.random.default_rng(0).integers(0, 256, (2, len(cells), view.content_bytes), dtype=np.uint8)
    for (layer, *cell), content in zip(cells, written, strict=True):
        as_bytes[layer][tuple(cell)] = torch.from_numpy(content)
    for place, content in zip(cells, written, strict=True):
        assert ctypes.string_at(address(view, *place), view.content_bytes) == content.tobytes()
    for place, content in zip(cells, back, strict=True):
        ctypes.memmove(address(view, *place), content.tobytes(), view.content_bytes)
    for (layer, *cell), content in zip(cells, back, strict=True):
        assert np.array_equal(as_bytes[layer][tuple(cell)].numpy(), content)


CASES = {
    "gqa": lambda: {"g": (full(), ["a", "b", "c"])},
    "one-head": lambda: {"g": (full(heads=1), ["a", "b"])},
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


@pytest.mark.vllm
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


@pytest.mark.vllm
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


@pytest.mark.vllm
def test_compressed_states_are_not_taken_for_kernel_blocks() -> None:
    """Four tokens to a stored state: the shape alone looks like a block split in four."""
    spec = mla(block=64, tokens_per_state=4)
    caches = allocate({"g": (spec, ["a", "b"])}, kvi.KVCacheLayout.BLHNC)
    with pytest.raises(GeometryError, match="5 kernel blocks of 16 tokens, expected 5 x 4"):
        view_of(caches, spec.block_size, PAGES)


@pytest.mark.vllm
def test_a_stage_keeps_the_place_of_groups_that_it_has_no_layer_of() -> None:
    """Pipeline stages: a plan counts the engine's block tables, so a stage must not close the gap."""
    specs = {"a": full(), "b": full(), "c": mla()}
    engine = [kvi.KVCacheGroupSpec(["c"], specs["c"]), kvi.KVCacheGroupSpec(["a", "b"], specs["a"])]
    stage = project_kv_cache_groups_to_worker(engine, {"b": specs["b"]})
    found = layer_groups(engine_of(heads=8), kvi.KVCacheConfig(PAGES, kv_cache_tensors=[], kv_cache_groups=stage))
    assert [(group.kind, group.layers, group.table) for group in found] == [("mla", (), 0), ("full", ("b",), 1)]


def engine_of(heads: int, tp: int = 1, **config: int) -> Any:
    """As much of a VllmConfig as tells how many heads there are."""
    model = SimpleNamespace(
        get_total_num_kv_heads=lambda: heads, hf_text_config=SimpleNamespace(**config), dtype=torch.bfloat16,
        model_arch_config=SimpleNamespace(per_layer_overrides=None),
    )  # fmt: skip
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, decode_context_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


@pytest.mark.vllm
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_where_layers_differ_in_their_heads_each_group_has_its_own_number(tp: int) -> None:
    """Gemma 4, by the configuration classes of transformers and of vLLM: fewer KV heads, and larger ones, in its layers
    of full attention. A model whose heads are all of one size has a number that only its own size of an engine has."""
    convertor = pytest.importorskip("vllm.transformers_utils.model_arch_config_convertor")

    def totals(size_of_full: int) -> list[int]:
        config = Family(
            "Gemma4TextConfig", "Gemma4ForCausalLM",
            {"num_attention_heads": 16, "num_key_value_heads": 8, "attention_k_eq_v": True, "head_dim": 32,
             "num_global_key_value_heads": 2, "global_head_dim": size_of_full,
             "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
        ).configuration()  # fmt: skip
        arch = convertor.ModelArchConfigConvertorBase(config, config).convert()
        ours = [arch[layer] for layer in (0, 2)]
        assert [(layer.total_num_kv_heads, layer.head_size) for layer in ours] == [(8, 32), (2, size_of_full)]
        specs = [
            kind(heads=max(1, layer.total_num_kv_heads // tp), size=layer.head_size)
            for kind, layer in zip((window, full), ours, strict=True)
        ]
        groups = [kvi.KVCacheGroupSpec([name], spec) for name, spec in zip("ab", specs, strict=True)]
        engine = engine_of(arch.total_num_kv_heads, tp)
        engine.model_config.model_arch_config, engine.model_config.hf_text_config = arch, config
        found = layer_groups(engine, kvi.KVCacheConfig(PAGES, kv_cache_tensors=[], kv_cache_groups=groups))
        return [group.total_heads for group in found]

    assert totals(64) == [8, 2]
    assert totals(32) == [8, 2] if tp <= 2 else [max(8, tp), tp] if tp != 4 else [8, 4]


@pytest.mark.vllm
def test_layers_of_one_table_that_differ_are_regions_of_their_own() -> None:
    specs = {"a": mla(), "indexer": mla(size=3), "b": mla()}
    group = kvi.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    caches = allocate({"g": (group, list(specs))}, kvi.KVCacheLayout.BLHNC)
    with pytest.raises(GeometryError, match=r"'indexer': shape .* differs from .* of layer 'a'"):
        view_of(caches, 16, PAGES)
    config = kvi.KVCacheConfig(PAGES, kv_cache_tensors=[], kv_cache_groups=[kvi.KVCacheGroupSpec(list(specs), group)])
    groups = layer_groups(engine_of(heads=16), config)
    info = RankInfo("e", tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, model={})
    found = regions(groups, caches, info, PAGES)
    assert [(region.table, region.view.layers) for region in found] == [(0, ("a", "b")), (0, ("indexer",))]
    assert [region.geometry.content_bytes for region in found] == [12, 6]
    for region in found:
        check_group({name: caches[name] for name in region.view.layers}, region.view)
    assert rank_geometry(info, groups, found).head_counts == (1,)


@pytest.mark.vllm
def test_layers_that_use_another_ones_cache_are_its_bytes() -> None:
    """KV-sharing layers come as aliases, or do not come at all."""
    caches = allocate({"g": (full(), ["a", "b"])}, kvi.KVCacheLayout.LBHNC)
    group = LayerGroup("full", ("a", "b", "sharer"), 16, total_heads=3)
    (found,) = regions([group], {**caches, "sharer": caches["a"]}, RankInfo("e", 0, 1, 0, 1, {}), PAGES)
    assert found.view.layers == ("a", "b")


@pytest.mark.vllm
def test_layers_that_draft_are_regions_of_their_own_unless_they_use_a_cache_of_the_model() -> None:
    caches = allocate({"g": (full(), ["a", "b"])}, kvi.KVCacheLayout.LBHNC)
    group = LayerGroup("full", ("sharer", "a", "b"), 16, total_heads=3)
    drafts = {"sharer": "mtp 1", "b": "mtp 1"}
    found = regions([group], {**caches, "sharer": caches["a"]}, RankInfo("e", 0, 1, 0, 1, {}), PAGES, drafts=drafts)
    assert [(region.view.layers, region.geometry.draft) for region in found] == [(("a",), ""), (("b",), "mtp 1")]


@pytest.mark.vllm
def test_a_kind_of_cache_that_is_not_known_is_refused_by_name() -> None:
    class GivesBlocksBackByItsOwnRules(kvi.FullAttentionSpec):
        pass

    spec = full(kind=GivesBlocksBackByItsOwnRules)
    config = kvi.KVCacheConfig(PAGES, kv_cache_tensors=[], kv_cache_groups=[kvi.KVCacheGroupSpec(["a"], spec)])
    for ask in (lambda: block_tables(engine_of(2), config), lambda: layer_groups(engine_of(2), config)):
        with pytest.raises(ConfigError, match=r"^[^\n]*GivesBlocksBackByItsOwnRules[^\n]*$"):
            ask()
