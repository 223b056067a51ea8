"""Every kind of KV cache that vLLM has: carried and compared byte for byte, or refused by name.

vLLM's own classes say which there are. The caches that its models ask for are laid out by vLLM and go under its
scheduler; no model is built, and no forward is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1 import kv_cache_interface as vllms
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.geometry.regions import regions
from kvferry.connector.vllm import cache_kinds, compat, from_vllm
from kvferry.connector.vllm.adapter import KVFerryConnector
from kvferry.transport.errors import ConfigError, GeometryError
from tests.vllm.labelled import HEADS, prompt
from tests.vllm.releases import RELEASE
from tests.vllm.stepped import MAX_LENGTH, PATIENT, PREFILL, Lines, settle
from tests.vllm.stepped_family import Cache, FamilyEngine
from tests.vllm.test_families_vllm import KINDS

pytestmark = pytest.mark.vllm
Make = Callable[[int, int], dict[str, Any]]
"""The specs of a rank by layer, for a block size and a number of tensor-parallel ranks."""


def classes(base: Any = vllms.KVCacheSpec) -> Iterator[Any]:
    """vLLM's specs; one of another module, such as a test's, is none of them."""
    for kind in base.__subclasses__():
        if kind.__module__ == vllms.__name__:
            yield kind
            yield from classes(kind)


def test_every_spec_of_vllm_is_carried_or_refused_by_name() -> None:
    """An upgrade that adds a class shall be read before it is trusted."""
    named = {kind.__name__ for kind in classes()} - {"AttentionSpec"}
    assert named == {*cache_kinds.CARRIED, *cache_kinds.REFUSED, cache_kinds.WRAPPER}


FIELDS = {
    "KVCacheSpec": {"block_size", "dcp_sharded", "block_stride_alignment", "is_draft"},
    "AttentionSpec": {
        "max_tp_shards", "num_kv_heads", "head_size", "dtype", "head_size_v", "kv_quant_mode", "page_size_padded",
        "num_head_slots", "state_content_bytes", "tokens_per_state",
    },
    "FullAttentionSpec": {"sliding_window", "attention_chunk_size", "non_causal"},
    "MLAAttentionSpec": {
        "cache_dtype_str", "topk_buffer_width", "alignment", "model_version", "cache_role", "is_index_group_leader",
        "non_causal_multi_token_decode",
    },
    "RSWASpec": {"rswa_window"},
    "SinkFullAttentionSpec": {"sink_len"},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size"},
    "SlidingWindowSpec": {"sliding_window", "extra_retained_tokens"},
    "SlidingWindowMLASpec": {"cache_dtype_str", "alignment", "model_version", "bounded_replay"},
    "MambaSpec": {
        "shapes", "dtypes", "page_size_padded", "mamba_type", "mamba_cache_mode", "num_speculative_blocks",
        "num_prefill_checkpoint_blocks", "prefill_checkpoint_alignment", "num_heads", "tokens_per_state",
        "tp_replicated",
    },
    "UniformTypeKVCacheSpecs": {"kv_cache_specs"},
    "KVCacheGroupSpec": {
        "layer_names", "kv_cache_spec", "is_eagle_group", "host_resident", "enable_kv_transfer", "role",
    },
}  # fmt: skip
"""By class, what its own fields are, beside those that it inherits."""


@pytest.mark.parametrize("kind", [vllms.KVCacheSpec, *classes(), vllms.KVCacheGroupSpec])
def test_no_spec_has_a_field_that_is_not_known(kind: Any) -> None:
    """What a new field of a known class means for a hand-over must be read, as of a new class."""
    if kind.__name__ not in cache_kinds.REFUSED:
        known = {name for base in kind.__mro__ for name in FIELDS.get(base.__name__, ())}
        assert {field.name for field in fields(kind)} <= known


# --- carried ------------------------------------------------------------------------------------------------------


def sharded(kind: str, block: int, tp: int, **more: Any) -> Any:
    """A cache of heads that the ranks share out."""
    form = {"block_size": block, "num_kv_heads": HEADS // tp, "head_size": 8, "dtype": torch.bfloat16}
    return getattr(vllms, kind)(**form, **more)


def alike(kind: str, block: int, size: int = 64, **more: Any) -> Any:
    """A cache that all ranks hold."""
    form = {"block_size": block, "num_kv_heads": 1, "head_size": size, "dtype": torch.bfloat16, "max_tp_shards": 1}
    return getattr(vllms, kind)(**form, **more)


def ring(rows: int, slots: int = 1, **more: Any) -> Any:
    form = {"block_size": rows, "num_kv_heads": slots, "head_size": 16, "head_size_v": 0, "dtype": torch.float32}
    return vllms.CircularBufferSpec(**form, **more)


DRAFT = {"is_draft": True} if RELEASE >= (0, 33) else {}
MODELS: dict[str, Make] = {
    "deepseek-v4": lambda block, tp: {
        "mla": alike("MLAAttentionSpec", block, tokens_per_state=4),
        "window": alike("SlidingWindowMLASpec", 64, sliding_window=128),
        "compressor": alike("SlidingWindowMLASpec", 4, sliding_window=8),
    },
    "deepseek-v4.1": lambda block, tp: {
        "mla": alike("MLAAttentionSpec", block, tokens_per_state=2),
        "window": alike("SlidingWindowMLASpec", 64, sliding_window=128, bounded_replay=True),
        "ring": ring(8),
        "draft": alike("MLAAttentionSpec", block, tokens_per_state=2, **DRAFT),
    },
    "glm-5-next": lambda block, tp: {
        "mla": alike("MLAAttentionSpec", block),
        "indexer": alike("MLAAttentionSpec", block, tokens_per_state=4),
        "tail": ring(4, 2, dcp_sharded=False),
    },
    "qwen-4": lambda block, tp: {"heads": sharded("FullAttentionSpec", block, tp), "ring": ring(4)},
    "unlimited-ocr": lambda block, tp: {"heads": sharded("RSWASpec", block, tp, rswa_window=32)},
    "hidden states": lambda block, tp: {
        "mla": alike("MLAAttentionSpec", block), "indexer": alike("MLAAttentionSpec", block, tokens_per_state=4),
        "hidden": alike("HiddenStateCacheSpec", block),
    },
}  # fmt: skip
"""What layers of these models ask vLLM for, in small."""


def configured(model: Any, block: int, tp: int, layout: str = "BLNHC") -> VllmConfig:
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=block, enable_prefix_caching=True, num_gpu_blocks_override=400),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=250, max_model_len=MAX_LENGTH, is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=tp, distributed_executor_backend="mp"),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVFerryConnector", kv_connector_module_path="kvferry.connector.vllm.adapter",
            kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=PATIENT,
        ),
    )  # fmt: skip
    config.cache_config.kv_cache_layout = layout
    config.scheduler_config.async_scheduling = False
    register_all_kvcache_specs(config)
    return config


def engine(model: Any, make: Make, origin: int, block: int, tp: int, layout: str = "BLNHC") -> Any:
    return closing(FamilyEngine(configured(model, block, tp, layout), make(block, tp), origin, {}))


def wanted(cache: Cache, start: int) -> int:
    """How many entries computing from token ``start`` on reads."""
    return start // cache.entry - cache.first_needed(start) // cache.entry


def hand_over(p: FamilyEngine, d: FamilyEngine, ids: list[int], answer: int = 8, *, at_once: bool = False) -> int:
    """How many tokens D loaded, of a prompt of which it has none but from P. ``at_once``: D asks for it by name before
    P computes it."""
    name = f"{p.origin}-{len(ids)}-{sum(ids)}"
    if at_once:
        d.add(ids, p.named(transfer_id=name), request_id=name, max_tokens=answer)
        d.step()
    p.add(ids, PREFILL | {"transfer_id": name}, request_id=name)
    params = p.finish(name, beside=[d] if at_once else []).params
    if not at_once:
        d.add(ids, params, request_id=name, max_tokens=answer)
    external = d.finish(name, beside=[p]).external
    settle(p, d)
    assert d.origins[name].theirs == sum(wanted(cache, len(ids) - 1) for cache in d.rank.views) > 0
    assert external is not None
    return external


@pytest.mark.parametrize("name", MODELS)
def test_handed_over_between_unequal_ranks(tiny: Any, name: str) -> None:
    """Both ways, and then decoded until the windows have passed."""
    with engine(tiny, MODELS[name], 0, 64, 2) as p, engine(tiny, MODELS[name], 1, 128, 1) as d:
        for one, other in ((p, d), (d, p)):
            for tokens, answer in ((2, 8), (66, 80), (131, 8)):
                assert hand_over(one, other, prompt(tokens, tokens + one.origin), answer) in (tokens - 1, tokens)
            assert hand_over(one, other, prompt(300, one.origin + 2), at_once=True) in (299, 300)
        ids = prompt(257)
        assert hand_over(p, d, ids) in (256, 257)
        p.scheduler.reset_prefix_cache()  # of a hit of its own, vLLM computes a window anew, which no test here knows
        assert hand_over(p, d, ids[:256] + prompt(20, 1)) in (19, 20), "the rest is in D's prefix cache"
        assert not (p.failed | d.failed)


def test_only_whole_entries_move() -> None:
    """While P computes, D reads what is there: half an entry is nothing."""
    cache = {"mla": torch.zeros(8, 1, 16, 64, dtype=torch.bfloat16)}
    (found,) = regions([LayerGroup("mla", ("mla",), 64, 1, entry_tokens=4)], cache, RankInfo("p", 0, 1, 0, 1, {}), 8)
    assert (found.geometry.block_size, found.geometry.content_bytes, found.geometry.tile_tokens) == (64, 32, 4)
    assert found.view.block_size == 64 and found.view.token_stride == 32


SINKS = "SinkFullAttentionSpec"


def test_every_carried_spec_is_handed_over_in_some_test() -> None:
    used = {type(spec).__name__ for make in MODELS.values() for spec in make(64, 2).values()}
    assert used.union(*KINDS.values()) == {*cache_kinds.CARRIED, cache_kinds.WRAPPER} - {SINKS}


def test_vllm_starts_no_engine_with_sinks(tiny: Any) -> None:
    """Its manager of these caches does not take what it is given. Once it does, they belong to the table above."""
    with pytest.raises(TypeError, match="needs_kv_cache_zeroing"):
        engine(tiny, lambda block, tp: {"heads": sharded(SINKS, block, tp, sink_len=block)}, 0, 64, 1)


# --- refused ------------------------------------------------------------------------------------------------------


def test_rings_of_other_sizes_are_refused(tiny: Any, lines: Lines) -> None:
    """A token's row depends on the number of rows. D prefills."""

    def larger(block: int, tp: int) -> dict[str, Any]:
        return MODELS["glm-5-next"](block, tp) | {"tail": ring(8, 2, dcp_sharded=False)}

    with engine(tiny, MODELS["glm-5-next"], 0, 64, 1) as p, engine(tiny, larger, 1, 64, 1) as d:
        ids = prompt(66)
        request_id = d.add(ids, p.prefill(ids), max_tokens=3)
        d.finish(request_id, beside=[p])
        assert d.origins[request_id].theirs == 0
        assert lines("packing of layer 'tail' (ring 0)", "ring of 8 rows", "ring of 4 rows")


def group(spec: Any, **more: Any) -> Any:
    return vllms.KVCacheGroupSpec(["layer"], spec, **more)


class NewSpec(vllms.FullAttentionSpec):
    """One that a later release adds."""


FORM = {"block_size": 64, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
REFUSED: dict[str, tuple[Any, str]] = {
    "cross attention": (group(vllms.CrossAttentionSpec(**FORM)), "CrossAttentionSpec are not carried: vLLM takes"),
    "encoders": (group(vllms.EncoderOnlyAttentionSpec(**FORM)), "EncoderOnlyAttentionSpec are not carried: its layers"),
    "hot": (
        group(vllms.HiSparseHotSpec(block_size=64, page_size=64, blocks_per_request=1)),
        "HiSparseHotSpec are not carried: vLLM fills it",
    ),
    "resident": (
        group(vllms.HiSparseResidentSpec(block_size=64, page_size=64)), "HiSparseResidentSpec are not carried: vLLM",
    ),
    "on the host": (
        group(alike("MLAAttentionSpec", 64), host_resident=True, role=vllms.KVCacheGroupRole.HISPARSE_SOURCE),
        "group 0 has the role 'hisparse_source'.* leave out HiSparse",
    ),
    "another role": (
        group(alike("MLAAttentionSpec", 64), role=vllms.KVCacheGroupRole.HISPARSE_INDEXER), "role 'hisparse_indexer'",
    ),
    "several entries of a token": (
        group(alike("MLAAttentionSpec", 64, tokens_per_state=Fraction(1, 2))), "1/2 tokens in an entry",
    ),
    "blocks that end in an entry": (
        group(alike("MLAAttentionSpec", 64, tokens_per_state=128)), "128 tokens in an entry and 64 in a block",
    ),
    "a later release's": (group(NewSpec(**FORM)), "NewSpec are not carried: this KVFerry does not know"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_is_refused_at_start_up_in_one_line(tiny: Any, name: str) -> None:
    refused, why = REFUSED[name]
    with pytest.raises(ConfigError, match=why) as caught:
        KVFerryConnector(configured(tiny, 64, 1), KVConnectorRole.SCHEDULER, vllms.KVCacheConfig(8, [], [refused]))
    assert "run this model without KVFerry" in str(caught.value) and "\n" not in str(caught.value)


def test_entries_whose_bytes_do_not_divide_are_refused(tiny: Any) -> None:
    entries = {"mla": alike("MLAAttentionSpec", 128, tokens_per_state=128, state_content_bytes=584)}
    with pytest.raises(GeometryError, match="entries of 584 bytes for 128 tokens"):
        engine(tiny, lambda block, tp: entries, 0, 128, 1)


def test_a_group_that_vllm_fills_itself_is_left_out(tiny: Any) -> None:
    """As HiSparse's copies on the GPU: their specs may be any."""
    groups = [
        group(alike("MLAAttentionSpec", 64)),
        group(vllms.HiSparseResidentSpec(block_size=64, page_size=64), enable_kv_transfer=False),
    ]
    config, kv_config = configured(tiny, 64, 1), vllms.KVCacheConfig(8, [], groups)
    connector = KVFerryConnector(config, KVConnectorRole.SCHEDULER, kv_config)
    assert connector.get_loaded_kv_cache_group_ids(None) == (0,)
    assert [table.kind for table in from_vllm.block_tables(config, kv_config)] == ["mla"]


def test_all_ranks_have_a_whole_ring_under_decode_context_parallelism(tiny: Any) -> None:
    """Though DeepSeek-V4.1's says of itself that it is shared out."""
    config = configured(tiny, 64, 2)
    config.parallel_config.decode_context_parallel_size = 2
    groups = [group(alike("MLAAttentionSpec", 64)), group(ring(8, dcp_sharded=True))]
    tables = from_vllm.block_tables(config, vllms.KVCacheConfig(8, [], groups))
    assert [table.sharding.size for table in tables] == [2, 1]


def test_blocks_that_vllm_frees_while_a_request_runs_are_read_beside_the_steps(tiny: Any) -> None:
    """And no prefix of these requests is offered to others."""
    for spec, stays in ((sharded("RSWASpec", 64, 1, rswa_window=32), False), (alike("MLAAttentionSpec", 64), True)):
        kv_config = vllms.KVCacheConfig(8, [], [group(spec)])
        assert from_vllm.blocks_leave_at_end(kv_config) is stays
        if not stays:
            with pytest.raises(ConfigError, match="vLLM frees blocks of RSWASpec while a request runs"):
                compat.check_prefix_reads(configured(tiny, 64, 1), kv_config)


def test_where_states_and_rings_are_loaded(tiny: Any) -> None:
    """Inside the step, but where vLLM copies a state to another block before the connector hears of the step."""

    def state(mode: str, block: int = 64, **more: Any) -> Any:
        form = {"block_size": block, "shapes": ((64,),), "dtypes": (torch.float32,), "mamba_cache_mode": mode}
        return vllms.MambaSpec(**form, **more)

    on_the_way = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    for spec, why in (
        (state("none", 4096), ""),
        (state("align"), ""),
        (state("align", **on_the_way), ""),
        (state("align", 128), "vLLM copies states of mamba_cache_mode align"),
        (state("all"), "vLLM copies states of mamba_cache_mode all"),
        (ring(8), "it was not tested with KV caches of kind CircularBufferSpec"),
        (alike("MLAAttentionSpec", 64), ""),
    ):
        kv_config = vllms.KVCacheConfig(8, [], [group(alike("MLAAttentionSpec", 64)), group(spec)])
        said = compat.why_beside(configured(tiny, 64, 1), kv_config, None)
        assert why in said and bool(said) is bool(why)
