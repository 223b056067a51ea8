"""Attention backends made ready and metadata built: ours and the installed vLLM's on the same layers and batches."""

from __future__ import annotations

import copy
import random
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1 import kv_cache_interface as kvi
from vllm.v1.attention import backend as attention_backend
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm.v1.worker.gpu import attn_utils as theirs

from kvferry.connector.binding import attn_metadata
from tests.vllm.fake_layers import Compared, FakeAttention, placed, random_backend, vllm_config

pytestmark = pytest.mark.vllm
CPU = torch.device("cpu")


class RecordingBuilder(attention_backend.AttentionMetadataBuilder):
    """vLLM's builder by class; its metadata is what it was given."""

    supports_update_block_table = False

    def __init__(self, spec: Any, layer_names: list[str], config: Any, device: Any, **more: Any) -> None:
        assert not more
        self.made_with = (spec, list(layer_names), config, device)
        self.workspace: Any = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **more: Any) -> Any:
        if self.fills:
            common_attn_metadata._token_to_req_indices_cache = torch.arange(3)
        return ("built", self.made_with[:2], common_prefix_len, listed(common_attn_metadata), sorted(more.items()))

    def update_block_table(self, metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
        return ("updated", metadata, blk_table.tolist(), slot_mapping.tolist())

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return ("captured", self.build(0, common_attn_metadata))

    fills = False


def listed(value: Any) -> dict[str, Any]:
    """Every field of a batch; tensors as lists."""
    every = {each.name: getattr(value, each.name) for each in fields(value)}
    every.pop("_num_computed_tokens_cache", None)
    return {name: one.tolist() if isinstance(one, torch.Tensor) else one for name, one in every.items()}


def builder_class(draw: random.Random) -> type:
    support = draw.choice([*attention_backend.AttentionCGSupport])
    members: dict[str, Any] = {
        "_cudagraph_support": support,
        "supports_update_block_table": draw.random() < 0.7,
        "fills": draw.random() < 0.3,
    }
    if draw.random() < 0.5:
        members["_get_workspace_buffer"] = lambda self: self
    if draw.random() < 0.5:
        members["set_workspace_buffer"] = lambda self, workspace: setattr(self, "workspace", workspace)
    return type("Recording", (RecordingBuilder,), members)


class FakeMamba(AttentionLayerBase):
    """Passes for a layer with a recurrent state: one of vLLM's layers, and none of its ``Attention``."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return None

    def get_attn_backend(self) -> Any:
        return self.backend


def random_backends(draw: random.Random) -> list[Any]:
    """Each by a name of its own: where two have one name, the group has the first layer's."""
    made = [random_backend(draw) for _ in range(draw.randint(1, 3))]
    for number, each in enumerate(made):
        each.__qualname__ = each.__name__ = f"Backend{number}"
        builder = builder_class(draw)
        each.get_builder_cls = staticmethod(lambda cls=builder: cls)
    return made


def random_engine(draw: random.Random, cache: Any) -> Any:
    """What both sides read as vLLM's config: layers of a placed cache, states beside them, layers that share."""
    state = kvi.MambaSpec(block_size=64, shapes=((2, 3),), dtypes=(torch.float32,))
    states = [f"mamba.{number}" for number in range(draw.choice([0, 0, 1, 2, 3]))]
    # A layer that shares joins a group of one spec; of several specs, vLLM has none for it.
    alike = [group for group in cache.kv_cache_groups if not hasattr(group.kv_cache_spec, "kv_cache_specs")]
    homes = [name for group in alike for name in group.layer_names]
    kinds = random_backends(draw)
    layers: dict[str, Any] = {
        name: FakeAttention(None, draw.choice(kinds)) for group in cache.kv_cache_groups for name in group.layer_names
    }
    cache.kv_cache_groups += [kvi.KVCacheGroupSpec([name], state) for name in states]
    sharing = [f"shared.{number}" for number in range(draw.choice([0, 1, 2, 4]) if homes else 0)]
    for name in draw.sample(states + sharing, len(states + sharing)):
        target = draw.choice(homes) if homes and draw.random() < 0.97 else "nowhere"
        kind = draw.choice(kinds)
        layers[name] = FakeMamba(kind) if name in states else FakeAttention(None, kind, target)
    if draw.random() < 0.2:
        layers["last"] = FakeAttention(None, kinds[0])
    for layer in layers.values():
        if draw.random() < 0.3:
            layer.num_heads = draw.choice([0, 2])
    if draw.random() < 0.03:
        del layers[next(iter(layers))]
    settings = vllm_config(layers=layers)
    settings.cache_config.kv_sharing_fast_prefill = draw.random() < 0.4
    settings.cache_config.mamba_cache_mode = "none"
    settings.parallel_config = SimpleNamespace(
        use_ubatching=draw.random() < 0.3, num_ubatches=2, decode_context_parallel_size=1
    )
    settings.model_config.max_model_len = 256
    settings.scheduler_config = SimpleNamespace(max_num_seqs=8)
    return settings


def fast_prefill_backend(backend: Any) -> Any:
    return create_fast_prefill_custom_backend("FastPrefill", backend)


def prepared(seen: Compared, draw: random.Random, cache: Any) -> tuple[Any, Any, Any, Any] | None:
    """vLLM's and our attention groups of one engine, with the KV cache configs that they are of."""
    settings = random_engine(draw, cache)
    caches = copy.deepcopy(cache), copy.deepcopy(cache)
    names = [name for group in cache.kv_cache_groups for name in group.layer_names]
    shared = [name for name in settings.compilation_config.static_forward_context if name.startswith("shared")]
    active = None if draw.random() < 0.7 else {*draw.sample(names, draw.randint(1, len(names))), *shared[:1]}
    drafts = draw.choice([None, set(shared[-1:])])
    fast = fast_prefill_backend if settings.cache_config.kv_sharing_fast_prefill else None
    pair = seen.both(
        lambda *given: theirs.init_attn_backend(caches[0], *given),
        lambda *given: attn_metadata.init_attn_backend(caches[1], *given, fast_prefill_backend=fast),
        settings, CPU, active, drafts,
    )  # fmt: skip
    return None if pair is None else (*pair, caches, active)


def form(groups: Any) -> list[list[Any]]:
    """What the groups are. vLLM takes active layers from a set: their order is left out."""
    return [
        sorted(
            (
                sorted(each.layer_names), each.backend.__name__, repr(each.kv_cache_spec), each.kv_cache_group_id,
                each.kernel_block_size,
                [(repr(b.made_with[0]), sorted(b.made_with[1]), id(b.made_with[2]), b.made_with[3], type(b).__name__)
                 for b in each.metadata_builders],
            )
            for each in one
        )
        for one in groups
    ]  # fmt: skip


def workspaces(groups: Any) -> list[int | None]:
    """For each builder, the number of the builder whose workspace it got."""
    builders = [builder for one in groups for each in one for builder in each.metadata_builders]
    return [None if each.workspace is None else builders.index(each.workspace) for each in builders]


def test_init_attn_backend() -> None:
    seen = Compared()
    for draw, _, cache in placed(range(110)):
        pair = prepared(seen, draw, cache)
        if pair is None:
            continue
        (wanted, support, sizes), (groups, our_support, our_sizes), caches, active = pair
        assert form(groups) == form(wanted) and our_sizes == sizes
        assert [each.layer_names for each in caches[1].kv_cache_groups] == [
            each.layer_names for each in caches[0].kv_cache_groups
        ]
        assert our_support.min_cg_support.value == support.min_cg_support.value
        if active is None:
            assert our_support.min_cg_attn_backend == support.min_cg_attn_backend
            assert [[each.layer_names for each in one] for one in groups] == [
                [each.layer_names for each in one] for one in wanted
            ]
            assert workspaces(groups) == workspaces(wanted)
        every = [each for one in groups for each in one]
        seen["active"] += active is not None
        seen["fast"] += any(each.backend.__name__.startswith("Fast") for each in every)
        seen["split"] += any(each.kernel_block_size is not None for each in every)
        seen["shared workspace"] += any(each is not None for each in workspaces(groups))
        seen["micro-batches"] += any(len(each.metadata_builders) == 2 for each in every)
    seen.at_least(agreed=170, refused=15, active=15, fast=15, split=15)
    assert min(seen["shared workspace"], seen["micro-batches"]) > 15


class Model:
    """Fields of the batch and arguments of ``build`` that a model adds."""

    def __init__(self, draw: random.Random) -> None:
        self.replaces, self.adds = draw.random() < 0.5, draw.random() < 0.5

    def get_extra_common_attn_kwargs(self, kv_cache_group_id: int, num_reqs: int) -> dict[str, Any]:
        more: dict[str, Any] = {"is_prefilling": torch.ones(num_reqs, dtype=torch.bool)} if self.replaces else {}
        return more | ({"encoder_seq_lens": torch.arange(num_reqs) + kv_cache_group_id} if self.adds else {})

    def get_extra_attn_kwargs(self, attn_metadata_builder: Any, num_reqs: int) -> dict[str, Any]:
        return {"model": (type(attn_metadata_builder).__name__, num_reqs)}


def random_batch(draw: random.Random, groups: int) -> dict[str, Any]:
    requests, spare = draw.randint(1, 4), draw.randint(0, 2)
    queries = torch.tensor([0] + [draw.randint(1, 5) for _ in range(requests)]).cumsum(0)
    lengths = torch.randint(5, 60, (requests + spare,))
    tokens = int(queries[-1]) + draw.randint(0, 3)

    def maybe(tensor: Any) -> Any:
        return tensor if draw.random() < 0.5 else None

    per_group = {number: draw.random() < 0.5 for number in range(groups) if draw.random() < 0.7}
    return {
        "num_reqs": requests, "num_tokens": tokens, "query_start_loc_gpu": queries, "query_start_loc_cpu": queries + 0,
        "max_query_len": 5, "seq_lens": lengths, "max_seq_len": 60,
        "block_tables": [torch.randint(0, 9, (requests, 2), dtype=torch.int32) for _ in range(groups)],
        "slot_mappings": torch.randint(0, 99, (groups, tokens)),
        "seq_lens_cpu_upper_bound": maybe(lengths + 1), "dcp_local_seq_lens": maybe(lengths // 2),
        "dcp_local_seq_lens_cpu_upper_bound": maybe(lengths // 2 + 1), "positions": maybe(torch.arange(tokens)),
        "is_prefilling": maybe(torch.zeros(requests, dtype=torch.bool)), "mm_req_doc_ranges": maybe({0: [(1, 2)]}),
        "model_specific_attn_metadata": maybe(Model(draw)), "for_cudagraph_capture": draw.random() < 0.3,
        "causal": draw.choice([True, False, torch.ones(requests, dtype=torch.bool), per_group]),
        "rswa_prefix_lens": maybe(torch.arange(requests)), "req_idx": maybe([1, 2]),
        "fast_prefill": maybe(theirs.FastPrefillBatchMetadata(torch.tensor([3, 4, 4]), 2, 1)),
    }  # fmt: skip


def test_build_attn_metadata() -> None:
    """The same metadata for every layer, with our batches and with vLLM's; the same object for the same layers."""
    seen, prepare = Compared(), Compared()
    for draw, _, cache in placed(range(100)):
        pair = prepared(prepare, draw, cache)
        if pair is None or pair[3] is not None:
            continue
        (wanted_groups, _, _), (groups, _, _), caches, _ = pair
        batch = random_batch(draw, len(caches[0].kv_cache_groups)) | {"ubatch_idx": draw.choice([0, 0, 1])}
        if any(each.backend.__name__.startswith("Fast") for one in groups for each in one):
            continue  # vLLM's builder of fast prefill needs metadata of a dataclass
        kind = draw.choice([attn_metadata.CommonAttentionMetadata, attention_backend.CommonAttentionMetadata])
        ours = {"kv_cache_config": caches[1], "common_metadata_type": kind, **batch}
        built = seen.both(
            lambda g=wanted_groups, c=caches[0], b=batch: theirs.build_attn_metadata(g, kv_cache_config=c, **b),
            lambda g=groups, b=ours: attn_metadata.build_attn_metadata(g, **b),
        )
        if built is None:
            continue
        wanted, got = built
        assert list(got) == list(wanted) and got == wanted
        assert [[a is b for b in got.values()] for a in got.values()] == [
            [a is b for b in wanted.values()] for a in wanted.values()
        ]
        seen["updated"] += any(one[0] == "updated" for one in got.values())
        seen["split"] += any(each.kernel_block_size is not None for one in groups for each in one)
    seen.at_least(agreed=90, refused=8, updated=8, split=8)


def test_our_batch_has_the_fields_of_vllms() -> None:
    """Under the same names and with the same defaults; vLLM's cache of computed tokens apart, which no caller gives."""
    ours, other = (
        [(each.name, each.default) for each in fields(kind)]
        for kind in (attn_metadata.CommonAttentionMetadata, attention_backend.CommonAttentionMetadata)
    )
    assert set(ours) == {each for each in other if each[0] != "_num_computed_tokens_cache"}
    support = {each.name: each.value for each in attn_metadata.AttentionCGSupport}
    assert support == {each.name: each.value for each in attention_backend.AttentionCGSupport}
