"""Backends made ready and metadata of a step: what is refused, and batches of another type. tests/vllm has the rest."""

from __future__ import annotations

from dataclasses import dataclass, fields, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.connector.binding.attn_metadata import (
    CommonAttentionMetadata,
    build_attn_metadata,
    init_attn_backend,
)
from kvferry.connector.binding.kv_spec import KVCacheConfig, KVCacheGroupSpec, MultipleOf
from kvferry.transport.errors import ConfigError, GeometryError
from tests.unit.kv_layers import Layer, backend, spec

CPU = torch.device("cpu")
FIELDS = [each.name for each in fields(CommonAttentionMetadata)]


class Builder:
    def __init__(self, *made_with: Any) -> None:
        pass

    def build(self, common_prefix_len: int, common_attn_metadata: Any, **more: Any) -> Any:
        return SimpleNamespace(by=self, common=common_attn_metadata)


def kind(name: str = "Fake") -> Any:
    made = backend(MultipleOf(1), name=name)
    made.get_builder_cls = staticmethod(lambda: Builder)
    return made


def two_groups() -> tuple[dict[str, Layer], KVCacheConfig]:
    layers = {"a.0": Layer(None, kind()), "a.1": Layer(None, kind()), "b.0": Layer(None, kind("Other"))}
    groups = [KVCacheGroupSpec(["a.0", "a.1"], spec(block=48)), KVCacheGroupSpec(["b.0"], spec(heads=1))]
    return layers, KVCacheConfig(4, [], groups)


def test_sharing_layers_join_their_targets_once() -> None:
    layers, config = two_groups()
    layers["s.9"] = Layer(None, kind("Other"), target="b.0")
    for _ in range(2):
        groups, _, _ = init_attn_backend(config, layers, CPU)
        assert groups[1][0].layer_names == ["b.0", "s.9"] == config.kv_cache_groups[1].layer_names
    layers["s.8"] = Layer(None, kind(), target="b.1")
    with pytest.raises(GeometryError, match=r"'s.8' shares the KV cache of 'b.1', which is in no group"):
        init_attn_backend(config, layers, CPU)
    assert config.kv_cache_groups[1].layer_names == ["b.0", "s.9"]


def test_fast_prefill_that_cannot_be() -> None:
    layers, cache_config = two_groups()
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=True))
    with pytest.raises(ConfigError, match="kv_sharing_fast_prefill is on, expected fast_prefill_backend"):
        init_attn_backend(cache_config, layers, CPU, config=config)


def batch(groups: int, **more: Any) -> dict[str, Any]:
    return {
        "num_reqs": 2, "num_tokens": 5, "query_start_loc_gpu": torch.tensor([0, 2, 5]),
        "query_start_loc_cpu": torch.tensor([0, 2, 5]), "max_query_len": 3, "seq_lens": torch.tensor([7, 9, 0]),
        "max_seq_len": 9, "block_tables": [torch.tensor([[1, 2], [3 + n, 0]]) for n in range(groups)],
        "slot_mappings": torch.arange(5 * groups).view(groups, 5), **more,
    }  # fmt: skip


def ready(config: Any = None) -> tuple[list[list[Any]], KVCacheConfig]:
    """The groups of two kinds of layers, with their builders."""
    layers, cache_config = two_groups()
    return init_attn_backend(cache_config, layers, CPU, config=config)[0], cache_config


def test_micro_batches_have_builders_of_their_own() -> None:
    parallel = SimpleNamespace(use_ubatching=True, num_ubatches=2)
    groups, config = ready(config=SimpleNamespace(parallel_config=parallel))
    built = build_attn_metadata(groups, kv_cache_config=config, **batch(2, ubatch_idx=1))
    assert built["b.0"].by is groups[1][0].metadata_builders[1]
    with pytest.raises(GeometryError, match="metadata builder 2 of 2"):
        build_attn_metadata(groups, kv_cache_config=config, **batch(2, ubatch_idx=2))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"block_tables": []}, "KV cache group 0 has attention groups, 0 block tables and 2 slot mappings were given"),
        ({"slot_mappings": torch.zeros(1, 5)}, "KV cache group 1 .* 1 slot mappings were given, expected at least 2"),
        ({"seq_lens": torch.tensor([7])}, "seq_lens has 1 rows for 2 requests"),
        ({"dcp_local_seq_lens": torch.tensor([7])}, "dcp_local_seq_lens has 1 rows for 2 requests"),
        ({"attn_groups": []}, "0 lists of attention groups for 2 KV cache groups"),
    ],
)
def test_batches_that_do_not_fit(more: dict[str, Any], message: str) -> None:
    groups, config = ready()
    with pytest.raises(GeometryError, match=message):
        build_attn_metadata(**{"attn_groups": groups, "kv_cache_config": config, **batch(2), **more})


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"seq_lens": 1}, "model_specific_attn_metadata gives seq_lens, which the batch has"),
        ({"block_table_tensor": 1, "causal": 1}, "gives block_table_tensor, causal, which the batch has"),
        ({"encoder_lens": 1}, "CommonAttentionMetadata has no field encoder_lens, which this step needs"),
    ],
)
def test_fields_that_a_model_may_not_give(added: dict[str, Any], message: str) -> None:
    groups, config = ready()
    model = SimpleNamespace(get_extra_common_attn_kwargs=lambda *given: added, get_extra_attn_kwargs=lambda *given: {})
    with pytest.raises(GeometryError, match=message):
        build_attn_metadata(groups, kv_cache_config=config, **batch(2, model_specific_attn_metadata=model))


def test_a_batch_of_another_type() -> None:
    """It gets the fields that it has; one that this step needs must be among them."""

    @dataclass
    class Smaller:
        seq_lens: torch.Tensor
        block_table_tensor: torch.Tensor
        num_reqs: int

    groups, config = ready()
    with pytest.raises(GeometryError, match=r"Smaller has no field causal, max_query_len, .*, which this step needs"):
        build_attn_metadata(groups, kv_cache_config=config, common_metadata_type=Smaller, **batch(2))
    smaller = make_dataclass("Smaller", [name for name in FIELDS if name not in ("logits_indices_padded", "req_idx")])
    older: Any = type("Older", (smaller,), {"__init__": lambda self, **given: self.__dict__.update(given)})
    built = build_attn_metadata(groups, kv_cache_config=config, common_metadata_type=older, **batch(2))
    common = built["b.0"].common
    assert type(common) is older and common.seq_lens.tolist() == [7, 9] and not hasattr(common, "req_idx")
    with pytest.raises(GeometryError, match="Older has no field req_idx, which this step needs"):
        build_attn_metadata(groups, kv_cache_config=config, common_metadata_type=older, **batch(2, req_idx=[0, 1]))
