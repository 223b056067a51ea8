"""Utilities of ``connector/binding``: each refusal is one line that says what to change, and nothing is half done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.connector.binding.attention_group import (
    AttentionGroup,
    attention_groups,
    prepare_kernel_block_sizes,
    select_common_block_size,
)
from kvferry.connector.binding.attn_metadata import CommonAttentionMetadata, build_attn_metadata, init_attn_backend
from kvferry.connector.binding.block_ops import KVBlockZeroer, _make_src_and_dst_indices, copy_kv_blocks
from kvferry.connector.binding.encoder_budget import MultiModalBudget
from kvferry.connector.binding.kv_binding import (
    allocate,
    init_kv_cache,
    initialize_kv_cache_for_kv_sharing,
    reshape,
)
from kvferry.connector.binding.kv_spec import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    MultipleOf,
    UniformTypeKVCacheSpecs,
    get_kv_cache_config_from_groups,
    kernel_shape,
    layer_spec,
)
from kvferry.connector.binding.memory_request import request_memory
from kvferry.connector.binding.mm_placeholders import gather_mm_placeholders, scatter_mm_placeholders
from kvferry.connector.binding.sequence_parallel import is_residual_scattered_for_sp
from kvferry.connector.geometry.token_sharding import (
    ALL_TOKENS,
    TokenRuns,
    TokenShard,
    common_tokens,
    num_common_tokens,
    token_blocks,
)
from kvferry.transport.errors import ConfigError, EmbeddingError, GeometryError


def spec(block: int = 16, heads: int = 3, size: int = 4, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    return AttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=dtype, **more)


def backend(*sizes: Any, name: str = "Fake") -> Any:
    """A backend class that takes these kernel block sizes."""
    return type(name, (), {"get_supported_kernel_block_sizes": staticmethod(lambda spec=None: list(sizes))})


class Layer:
    """An attention layer whose cache is set as an attribute."""

    def __init__(self, kv_spec: Any = None, kind: Any = None, target: str | None = None) -> None:
        self._spec, self._kind = kv_spec, kind
        self.kv_sharing_target_layer_name = target
        self.kv_cache: Any = None

    def get_kv_cache_spec(self, config: Any) -> Any:
        return self._spec

    def get_attn_backend(self) -> Any:
        return self._kind


BLOCKS, GIB, CPU = 5, 1 << 30, torch.device("cpu")
ANY = backend(MultipleOf(1), name="Any")
ALIGNED = spec(block_stride_alignment=500)
SPLIT = spec(block=48)


def config(layout: object, *groups: tuple[object, list[str]], blocks: int = BLOCKS) -> KVCacheConfig:
    return get_kv_cache_config_from_groups([KVCacheGroupSpec(names, each) for each, names in groups], blocks, layout)


def placed(layout: str, each: Any = None, by: Any = None, *more: Any) -> object:
    """Views by the layout ``by`` of caches that lie by ``layout``."""
    made = config(layout, (each or spec(), ["layers.0", "layers.1"]))
    return reshape(made, allocate(made, "cpu"), by or layout, *more)


def odd(*tensors: KVCacheTensor) -> object:
    made = KVCacheConfig(BLOCKS, list(tensors), [KVCacheGroupSpec(["layers.0"], spec())])
    return reshape(made, allocate(made, "cpu"), "LBHNC")


def memory(total: int, free: int, fraction: float, external: int = 0) -> int:
    snapshot = SimpleNamespace(total_memory=total, free_memory=free)
    return request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=fraction), external)


def budget(tokens: int, modality: str | None = None, **scheduler: Any) -> object:
    """A budget of images of so many tokens, and its items of a modality to measure with."""
    settings = {
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_num_encoder_input_tokens": 32, "encoder_cache_size": 32,
        "enable_chunked_prefill": True, "disable_chunked_mm_input": False, **scheduler,
    }  # fmt: skip
    limits, sizes = {"image": 1}, {"image": tokens}
    info = SimpleNamespace(
        supported_mm_limits=limits, allowed_mm_limits=limits, get_mm_max_tokens_per_item=lambda *_, **__: sizes
    )
    dummies = lambda mm_counts, cache=None: {"mm_kwargs": {name: [None] for name in mm_counts}}  # noqa: E731
    processor = SimpleNamespace(info=info, get_dummy_mm_inputs=dummies)
    model = SimpleNamespace(max_model_len=40, get_multimodal_config=lambda: None)
    whole = SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(**settings))
    made = MultiModalBudget(whole, SimpleNamespace(create_processor=lambda model: processor), cache="cache")
    return made.get_dummy_encoder_profile_inputs(modality)


def scattered(ranks: int, splitting_ops: list[str], tokens: int) -> bool:
    passes = SimpleNamespace(enable_sp=True)
    compilation = SimpleNamespace(pass_config=passes, splitting_ops=splitting_ops, use_inductor_graph_partition=False)
    parallel = SimpleNamespace(tensor_parallel_size=ranks)
    whole = SimpleNamespace(compilation_config=compilation, parallel_config=parallel)
    return is_residual_scattered_for_sp(whole, tokens)


class Builder:
    def __init__(self, *made_with: Any) -> None:
        pass

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **more: Any) -> Any:
        return SimpleNamespace(by=self, common=common_attn_metadata)


def two_groups(**shared: str) -> tuple[dict[str, Layer], KVCacheConfig]:
    kinds = {name: backend(MultipleOf(1), name=name) for name in ("Fake", "Other")}
    for kind in kinds.values():
        kind.get_builder_cls = staticmethod(lambda: Builder)
    layers = {name: Layer(None, kinds["Fake" if name[0] == "a" else "Other"]) for name in ("a.0", "a.1", "b.0")}
    layers |= {f"s.{name[1]}": Layer(None, kinds["Other"], target=target) for name, target in shared.items()}
    groups = [KVCacheGroupSpec(["a.0", "a.1"], SPLIT), KVCacheGroupSpec(["b.0"], spec(heads=1))]
    return layers, KVCacheConfig(4, [], groups)


def built(**more: Any) -> Any:
    """Metadata of a step of two requests; ``more``: other arguments."""
    layers, cache_config = two_groups()
    given: dict[str, Any] = {
        "attn_groups": init_attn_backend(cache_config, layers, CPU)[0], "kv_cache_config": cache_config,
        "num_reqs": 2, "num_tokens": 5, "query_start_loc_gpu": torch.tensor([0, 2, 5]),
        "query_start_loc_cpu": torch.tensor([0, 2, 5]), "max_query_len": 3, "seq_lens": torch.tensor([7, 9, 0]),
        "max_seq_len": 9, "block_tables": [torch.tensor([[1, 2], [3 + n, 0]]) for n in range(2)],
        "slot_mappings": torch.arange(10).view(2, 5),
    }  # fmt: skip
    return build_attn_metadata(**(given | more))


def model(**added: Any) -> Any:
    return SimpleNamespace(get_extra_common_attn_kwargs=lambda *given: added, get_extra_attn_kwargs=lambda *given: {})


@dataclass
class Smaller:
    """A batch of another type, without most fields."""

    seq_lens: torch.Tensor
    block_table_tensor: torch.Tensor
    num_reqs: int


def fast_prefill() -> object:
    layers, cache_config = two_groups()
    whole = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=True))
    return init_attn_backend(cache_config, layers, CPU, config=whole)


def shared_with_nothing() -> object:
    layers, cache_config = two_groups(s8="b.1")
    return init_attn_backend(cache_config, layers, CPU)


REFUSED: dict[str, Callable[[], object]] = {
    "do not split into 3 kernel blocks of 16 tokens": lambda: placed("BLHNC", SPLIT, None, [16]),
    r"reaches byte \d+ of an allocation of": lambda: placed("LBHNC", None, "BHLNC"),
    r"layout 'LBHCN' is unknown .did you mean 'LBNHC'": lambda: placed("LBHNC", None, "LBHCN"),
    "no permutation": lambda: placed("LBHNC", None, (0, 1, 2, 3, 3)),
    "expected one size for all": lambda: odd(
        KVCacheTensor(9600, ["layers.0"], 9600, 1920), KVCacheTensor(1, ["b"], 1, 1)
    ),
    "'layers.9' has a place .* in no KV cache group": lambda: odd(KVCacheTensor(9600, ["layers.9"], 1, 1)),
    "no view of its bytes as torch.bfloat16": lambda: odd(
        KVCacheTensor(9601, ["layers.0"], 9600, 768, offset=1)
    ),
    "page_size_padded 512 is less than the page's 768 bytes": lambda: spec(page_size_padded=512).page_size_bytes,
    "kernel blocks of 32 tokens do not divide a manager block of 48": lambda: kernel_shape(SPLIT, 5, 2, 32),
    "kernel blocks of 0 tokens do not divide": lambda: kernel_shape(SPLIT, 5, 2, 0),
    "cannot align pages": lambda: config("LHBNC", (ALIGNED, ["a.0"])),
    "num_blocks 0": lambda: config("LBHNC", blocks=0),
    r"layer 'a.2' has no spec in its group \(did you mean": lambda: layer_spec(
        UniformTypeKVCacheSpecs(16, {"a.0": spec(), "a.1": spec(heads=1)}), "a.2"
    ),
    "layer 'a.9' of group 0 is no attention layer": lambda: attention_groups(
        KVCacheConfig(1, [], [KVCacheGroupSpec(["a.0", "a.9"], spec())]), {"a.0": Layer(spec(), ANY)}
    ),
    "metadata builder 0 of 0": lambda: AttentionGroup(ANY, ["a.0"], spec(), 0).get_metadata_builder(),
    "blocks of 48 tokens that lie beside other layers' cannot be split": lambda: AttentionGroup(
        ANY, ["a.0"], SPLIT, 0, kernel_block_size=16
    ).map_kv_cache_to_kernel_blocks(torch.zeros(5, 3, 48, 8)),
    "'16' is neither a number of tokens nor a MultipleOf": lambda: select_common_block_size(16, [backend("16")]),
    "manager block of 0 tokens": lambda: select_common_block_size(0, [backend(16)]),
    "1 KV cache specs for 2 backends": lambda: select_common_block_size(16, [backend(16), backend(16)], [spec()]),
    r"Some takes \[32\]; Other takes \[24\]": lambda: select_common_block_size(
        96, [backend(32, name="Some"), backend(24, name="Other")]
    ),
    "group 0 has no attention groups, 0 were given": lambda: prepare_kernel_block_sizes(
        KVCacheConfig(2, [], [KVCacheGroupSpec(["layers.0"], spec(block=32))]), []
    ),
    "30.00 GiB of 80.00 GiB are free, expected 31.00 GiB": lambda: memory(80 * GIB, 30 * GIB, 0.5, 9 * GIB),
    "other processes take 40.00 GiB of the 40.00 GiB that .* allows": lambda: memory(
        80 * GIB, 30 * GIB, 0.5, 40 * GIB
    ),
    "external_weight_memory is -1 bytes": lambda: memory(8, 8, 0.5, -1),
    "_utilization is nan, expected more than 0 and at most 1": lambda: memory(8, 8, float("nan")),
    "_utilization is 1.01, expected more than 0 and at most 1": lambda: memory(8, 8, 1.01),
    r"an item may have 8 tokens .* a step takes 7; raise max_num_batched_tokens": lambda: budget(
        8, disable_chunked_mm_input=True, max_num_batched_tokens=7
    ),
    "modality 'image' has items of -1 tokens": lambda: budget(-1),
    r"'imag' does not pass .* \(did you mean 'image'\?\), expected one of image": lambda: budget(4, "imag"),
    "the dummy item of modality 'image' is in the cache already": lambda: budget(4),
    "splitting_ops has 1 operators; set use_inductor_graph_partition": lambda: scattered(2, ["attention"], 4),
    "5 input tokens are no multiple of tensor_parallel_size 2": lambda: scattered(2, [], 5),
    "kv_sharing_fast_prefill is on, expected fast_prefill_backend": fast_prefill,
    "'s.8' shares the KV cache of 'b.1', which is in no group": shared_with_nothing,
    "0 block tables and 2 slot mappings were given": lambda: built(block_tables=[]),
    "KV cache group 1 .* 1 slot mappings were given": lambda: built(slot_mappings=torch.zeros(1, 5)),
    "^seq_lens has 1 rows for 2 requests": lambda: built(seq_lens=torch.tensor([7])),
    "dcp_local_seq_lens has 1 rows for 2 requests": lambda: built(dcp_local_seq_lens=torch.tensor([7])),
    "0 lists of attention groups for 2 KV cache groups": lambda: built(attn_groups=[]),
    "metadata builder 2 of 1": lambda: built(ubatch_idx=2),
    "gives block_table_tensor, causal, which the batch has": lambda: built(
        model_specific_attn_metadata=model(block_table_tensor=1, causal=1)
    ),
    "CommonAttentionMetadata has no field encoder_lens, which this step needs": lambda: built(
        model_specific_attn_metadata=model(encoder_lens=1)
    ),
    r"Smaller has no field causal, max_query_len, .*, which this step needs": lambda: built(
        common_metadata_type=Smaller
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_one_line(message: str) -> None:
    with pytest.raises((ConfigError, GeometryError), match=message) as raised:
        REFUSED[message]()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("target", "with_groups", "message"),
    [
        ("layers.9", False, "'layers.9', which has none"),
        ("layers.5", False, r"'layers.5', which is in no group \(did you mean"),
        ("layers.2", True, "'layers.2', which is in no attention group"),
    ],
)
def test_sharing_that_fails_changes_nothing(target: str, with_groups: bool, message: str) -> None:
    groups = [KVCacheGroupSpec(["layers.0", "layers.1"], spec()), KVCacheGroupSpec(["layers.2"], spec(block=32))]
    attention = [[AttentionGroup(None, ["layers.0"], spec(), 0)]] if with_groups else None
    caches, alone = {f"layers.{n}": torch.zeros(2) for n in (0, 1, 2, 5)}, set[str]()
    with pytest.raises(GeometryError, match=message):
        initialize_kv_cache_for_kv_sharing(
            {"layers.4": "layers.0", "layers.3": target}, groups, caches, attention, alone
        )
    assert len(caches) == 4 and [len(group.layer_names) for group in groups] == [2, 1] and not alone


def test_sharing_layers_join_their_targets_once() -> None:
    layers, cache_config = two_groups(s9="b.0")
    for _ in range(2):
        groups, _, _ = init_attn_backend(cache_config, layers, CPU)
        assert groups[1][0].layer_names == ["b.0", "s.9"] == cache_config.kv_cache_groups[1].layer_names
    several = KVCacheGroupSpec(["b.0", "s.9"], UniformTypeKVCacheSpecs(32, {"b.0": spec(block=32)}))
    assert attention_groups(KVCacheConfig(BLOCKS, [], [several]), layers)[0][0].layer_names == ["b.0", "s.9"]
    layers["z.9"] = Layer()  # It keeps a cache, so the layers before it are not the last that share one
    init_attn_backend(cache_config, layers, CPU, fast_prefill_backend=pytest.fail)


def test_init_binds_kernel_blocks_of_packed_compressed_caches() -> None:
    """Two layers' pages alternate; the backend's kernel blocks of one layer step over the other's."""
    compressed = spec(block=64, heads=1, head_size_v=0, tokens_per_state=4)
    layers = {name: Layer(compressed, backend(16)) for name in ("layers.0", "layers.1")}
    group = AttentionGroup(backend(16), list(layers), compressed, 0, kernel_block_size=16)
    packed = config("BLHNC", (compressed, list(layers)))
    caches = init_kv_cache(layers, packed, "cpu", [64], "BLHNC", attn_groups=[group])
    assert group.kernel_block_stride == 8
    table = group.map_to_kernel_block_table(torch.tensor([[3, 1]]))
    assert table.tolist() == [[24, 25, 26, 27, 8, 9, 10, 11]]
    for name, layer in layers.items():
        caches[name].copy_(torch.randn(caches[name].shape))
        assert torch.equal(layer.kv_cache[table[0]].flatten(), caches[name][[3, 1]].flatten())
        back = group.map_kv_cache_to_manager_blocks(layer.kv_cache, BLOCKS)
        assert (back.shape, back.stride()) == (caches[name].shape, caches[name].stride())


def test_a_batch_of_an_older_type_gets_the_fields_that_it_has() -> None:
    names = [
        each.name for each in fields(CommonAttentionMetadata) if each.name not in ("logits_indices_padded", "req_idx")
    ]
    init = {"__init__": lambda self, **given: self.__dict__.update(given)}
    older: Any = type("Older", (make_dataclass("Fields", names),), init)
    common = built(common_metadata_type=older)["b.0"].common
    assert type(common) is older and common.seq_lens.tolist() == [7, 9] and not hasattr(common, "req_idx")
    with pytest.raises(GeometryError, match="Older has no field req_idx, which this step needs"):
        built(common_metadata_type=older, req_idx=[0, 1])


def test_state_layers_keep_bytes_and_raw_layers_the_allocation() -> None:
    state = SimpleNamespace(
        block_size=16, num_heads=1, state_content_size_bytes=24, page_size_bytes=24, shapes=((3,), (3,)),
        get_num_kernel_states=lambda size: 1,
    )  # fmt: skip
    tensors = [KVCacheTensor(48, ["layers.0"], 48, 24), KVCacheTensor(48, ["raw.0"], 1, 1)]
    groups = [
        KVCacheGroupSpec(["layers.0"], state),
        KVCacheGroupSpec(["raw.0"], SimpleNamespace(has_layer_views=False)),
    ]
    made = KVCacheConfig(2, tensors, groups)
    raw = allocate(made, "cpu")
    views = reshape(made, raw, "LBHNC")
    assert views["layers.0"].shape == (2, 1, 1, 24) and views["layers.0"].dtype == torch.int8
    assert views["raw.0"] is raw


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.complex64]
MASKS = st.lists(st.booleans(), max_size=40)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def embeddings(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random finite values, rows of a wider tensor, so not contiguous."""
    return torch.randn(count, width + 3).to(dtype)[:, 1 : width + 1]


@given(MASKS, st.integers(0, 9), st.sampled_from(DTYPES))
def test_each_token_by_itself(mask: list[bool], width: int, dtype: torch.dtype) -> None:
    embeds = embeddings(sum(mask), width, dtype)
    placed = scatter_mm_placeholders(embeds, torch.tensor(mask, dtype=torch.bool))
    assert placed.shape == (len(mask), width) and placed.dtype == dtype
    rows = iter(embeds)
    for token, takes in enumerate(mask):
        if takes:
            assert bits(placed[token]) == bits(next(rows))
        else:
            assert bool(torch.isnan(placed[token].to(torch.complex64)).all())


@given(MASKS, st.integers(0, 9), st.sampled_from(DTYPES))
def test_gather_is_the_inverse(mask: list[bool], width: int, dtype: torch.dtype) -> None:
    embeds, is_embed = embeddings(sum(mask), width, dtype), torch.tensor(mask, dtype=torch.bool)
    placed = scatter_mm_placeholders(embeds, is_embed)
    taken = gather_mm_placeholders(placed, is_embed)
    assert taken.shape == embeds.shape and taken.dtype == dtype and bits(taken) == bits(embeds)
    if placed.numel() and sum(mask):
        placed[:] = 0
        assert bits(taken) == bits(embeds)  # a copy


def test_without_a_mask_nothing_is_copied() -> None:
    embeds = torch.zeros(3, 2)
    assert scatter_mm_placeholders(embeds, None) is embeds and gather_mm_placeholders(embeds, None) is embeds


TWO = torch.tensor([True, True, False])


@pytest.mark.parametrize(
    ("call", "tensor", "mask", "message"),
    [
        ("both", torch.zeros(3, 2), torch.tensor([1, 0, 1]), r"is_embed is torch.int64 of shape \[3\], expected bool"),
        ("both", torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool), r"of shape \[3, 2\], expected bool, one axis"),
        ("both", torch.zeros(3, 2), torch.tensor(True), r"of shape \[\]"),
        # One embedding would otherwise fill every token, for torch repeats it.
        ("scatter", torch.zeros(1, 2), TWO, "1 embeddings for 2 placeholder tokens that take one"),
        ("scatter", torch.zeros(2, 2, 2), TWO, r"embeds have shape \[2, 2, 2\], expected two axes"),
        ("scatter", torch.zeros(2, 2, dtype=torch.int32), TWO, "embeds are of torch.int32, which has no NaN"),
        ("gather", torch.zeros(4, 2), TWO, "a mask of 3 tokens for 4 placeholders"),
        ("gather", torch.zeros(2), TWO[:2], r"placeholders have shape \[2\], expected two axes"),
    ],
)  # fmt: skip
def test_what_does_not_fit(call: str, tensor: torch.Tensor, mask: torch.Tensor, message: str) -> None:
    for name, act in (("scatter", scatter_mm_placeholders), ("gather", gather_mm_placeholders)):
        if call in (name, "both"):
            with pytest.raises(EmbeddingError, match=message):
                act(tensor, mask)


shards = st.integers(1, 6).flatmap(
    lambda size: st.builds(TokenShard, st.just(size), st.integers(0, size - 1), st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
)
LONG = 1 << 12


def held(shard: TokenShard, tokens: int) -> list[int]:
    """Token by token, as vLLM's slot mapping says it."""
    return [t for t in range(tokens) if t // shard.interleave % shard.size == shard.rank]


def listed(places: TokenRuns) -> list[int]:
    found = [n for a, b in zip(places.starts, places.stops, strict=True) for n in range(a, b)]
    assert len(found) == places.num_tokens
    assert (places.starts[1:] > places.stops[:-1]).all()
    return found


@given(shards, st.integers(0, 200))
def test_tokens_are_counted(shard: TokenShard, tokens: int) -> None:
    assert shard.count(tokens) == len(held(shard, tokens))
    assert shard.whole == (shard.count(96 * 5) == 96 * 5)


@given(shards, shards)
@example(TokenShard(2, 0, 16), TokenShard(2, 1, 1))
@example(TokenShard(2, 0, 16), TokenShard(2, 1, 16))
def test_shares_meet_where_a_long_prompt_has_common_tokens(ours: TokenShard, theirs: TokenShard) -> None:
    assert ours.meets(theirs) == theirs.meets(ours) == bool(set(held(ours, LONG)) & set(held(theirs, LONG)))


@settings(max_examples=200)
@given(shards, shards, st.integers(0, 150), st.integers(0, 150))
@example(TokenShard(2, 0, 16), TokenShard(4, 2, 16), 0, 128)
@example(TokenShard(2, 0, 16), TokenShard(2, 0, 1), 5, 90)
@example(ALL_TOKENS, TokenShard(2, 1, 16), 20, 40)
@example(TokenShard(2, 1, 16), ALL_TOKENS, 3, 70)
def test_common_tokens_are_the_same_on_both_sides(
    ours: TokenShard, theirs: TokenShard, start: int, length: int
) -> None:
    stop = start + length
    both = sorted(set(held(ours, stop)) & set(held(theirs, stop)) & set(range(start, stop)))
    for mine, other in ((ours, theirs), (theirs, ours)):
        number = {token: place for place, token in enumerate(held(mine, stop))}
        places = common_tokens(mine, other, start, stop)
        assert listed(places) == [number[token] for token in both]
        assert num_common_tokens(mine, other, start, stop) == len(both)


def test_blocks_are_as_large_as_the_runs() -> None:
    ids, second, by_token = np.arange(10, 60), TokenShard(2, 1, 16), TokenShard(2, 0, 1)
    for ours, theirs, start, stop, block, size in (
        (ALL_TOKENS, second, 0, 320, 32, 16),
        (ALL_TOKENS, second, 0, 320, 48, 16),
        (ALL_TOKENS, second, 0, 320, 8, 8),
        (ALL_TOKENS, second, 5, 311, 16, 16),  # cut at either end
        (TokenShard(2, 0, 16), by_token, 0, 128, 16, 1),  # every second token of runs of 16
        (by_token, TokenShard(2, 0, 16), 0, 128, 16, 8),
    ):
        assert token_blocks(common_tokens(ours, theirs, start, stop), ids, block, 64 * block, 64).size == size
    whole = token_blocks(common_tokens(second, ALL_TOKENS, 40, 320), ids, 16, 1024, 64)
    assert whole.ids is ids and whole[1:] == (16, 1024, 16)
    places = common_tokens(ALL_TOKENS, TokenShard(4, 1, 4), 0, 256)
    assert token_blocks(places, ids, 16, 16 * 1152 + 128, 1152).stride % 128 == 0, "strides keep their alignment"


def test_vllm_counts_alike() -> None:
    utils = pytest.importorskip("vllm.v1.attention.backends.utils")
    torch = pytest.importorskip("torch")
    lengths = torch.arange(200, dtype=torch.int32)
    for size, interleave in ((2, 1), (2, 16), (4, 8), (3, 5)):
        for rank in range(size):
            theirs = utils.get_dcp_local_seq_lens(lengths, size, rank, interleave).tolist()
            assert theirs == [TokenShard(size, rank, interleave).count(n) for n in range(200)]


ON_CPU = torch.device("cpu")
OF_POOL = 7
SHAPE = (9, 3, 16, 4)


def engine(layout: object, specs: dict[str, Any], kernel: list[int] | None = None) -> tuple[dict[str, Layer], Any, Any]:
    """Layers of one group per spec, their caches bound and filled with ones; groups and zeroer's sizes."""
    layers = {name: Layer(each, backend(*(kernel or [each.block_size]))) for name, each in specs.items()}
    alike: dict[Any, list[str]] = {}
    for name, each in specs.items():
        alike.setdefault(each, []).append(name)
    config = get_kv_cache_config_from_groups([KVCacheGroupSpec(n, s) for s, n in alike.items()], OF_POOL, layout)
    kernel = kernel or [each.block_size for each in alike]
    init_kv_cache(layers, config, ON_CPU, kernel, layout)
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
    zeroer = KVBlockZeroer(ON_CPU, groups, kernel, layers, OF_POOL)
    zeroer.zero_block_ids([])
    assert all(bool((layer.kv_cache.view(torch.uint8) == 255).all()) for layer in layers.values())
    zeroer.zero_block_ids([5, 0, 3])
    for layer in layers.values():
        content = layer.kv_cache.view(torch.uint8).flatten(1)
        assert content[[0, 3, 5]].max() == 0 and content[[1, 2, 4, 6]].min() == 255


def test_layers_that_are_left_alone() -> None:
    layers, groups, kernel = engine("LBHNC", {f"layers.{n}": spec() for n in range(3)})
    layers["layers.1"].kv_cache = []
    zeroer = KVBlockZeroer(ON_CPU, groups, kernel, layers, OF_POOL, {"layers.2"})
    zeroer.warmup(OF_POOL)
    assert layers["layers.0"].kv_cache[0].count_nonzero() == 0
    assert layers["layers.2"].kv_cache.view(torch.uint8).min() == 255
    groups[0].kv_cache_spec = SimpleNamespace(block_size=16, shapes=())
    assert KVBlockZeroer(ON_CPU, groups, kernel, layers, OF_POOL).segments.addresses.size == 0
    layers, groups, kernel = engine("LBHNC", {"layers.0": spec()})
    assert KVBlockZeroer(ON_CPU, groups, [], layers, OF_POOL).segments.addresses.size == 0
    assert KVBlockZeroer(torch.device("cuda"), groups, kernel, layers, OF_POOL).segments.addresses.size == 0
    KVBlockZeroer(ON_CPU, groups, kernel, layers, OF_POOL).warmup(0)
    assert layers["layers.0"].kv_cache.view(torch.uint8).min() == 255


def test_packed_caches_that_were_bound_as_kernel_blocks() -> None:
    """Ids number manager blocks all the same, and the other layer's pages in between stay as they are."""
    packed = spec(block=64, heads=1, head_size_v=0, tokens_per_state=4)
    layers, groups, kernel = engine("BLHNC", {"layers.0": packed, "layers.1": packed})
    whole = {name: layer.kv_cache for name, layer in layers.items()}
    (group,) = groups
    group.kernel_block_size, group.layer_names = 16, ["layers.0"]
    layers["layers.0"].kv_cache = group.map_kv_cache_to_kernel_blocks(whole["layers.0"])
    KVBlockZeroer(ON_CPU, groups, kernel, layers, OF_POOL).zero_block_ids([2, 6])
    content = whole["layers.0"].view(torch.uint8).flatten(1)
    assert content[[2, 6]].max() == 0 and content[[0, 1, 3, 4, 5]].min() == 255
    assert whole["layers.1"].view(torch.uint8).min() == 255


@pytest.mark.parametrize("block_id", [-1, OF_POOL, 1 << 40])
def test_an_id_out_of_range_zeroes_nothing(block_id: int) -> None:
    layers, groups, kernel = engine("LBHNC", {"layers.0": spec()})
    zeroer = KVBlockZeroer(ON_CPU, groups, kernel, layers, OF_POOL)
    with pytest.raises(GeometryError, match=f"block id {block_id} is outside 0..6"):
        zeroer.zero_block_ids([1, block_id])
    assert layers["layers.0"].kv_cache.view(torch.uint8).min() == 255


def test_caches_that_do_not_fit_are_refused() -> None:
    layers, groups, kernel = engine("LBHNC", {"layers.0": spec()})
    with pytest.raises(GeometryError, match="7 kernel blocks are no multiple of 3 blocks"):
        KVBlockZeroer(ON_CPU, groups, kernel, layers, 3)
    with pytest.raises(GeometryError, match="kernel blocks of 5 tokens do not divide a manager block of 16"):
        KVBlockZeroer(ON_CPU, groups, [5], layers, OF_POOL)
    with pytest.raises(GeometryError, match=r"no layer 'layers.0' to zero blocks of"):
        KVBlockZeroer(ON_CPU, groups, kernel, {"layers.1": layers["layers.0"]}, OF_POOL)


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
