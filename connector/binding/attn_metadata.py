"""Attention backends made ready once, and the attention metadata of each step.

A step's batch is described once per KV cache group, and each builder turns this description into what its layers'
kernels read. Duck-typed: a builder is anything with ``build(common_prefix_len, common_attn_metadata)``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kvferry.connector.binding.attention_group import (
    AttentionGroup,
    attention_groups,
    get_shared_kv_cache_layers,
    layers_of,
    prepare_kernel_block_sizes,
)
from kvferry.connector.binding.kv_binding import add_kv_sharing_layers_to_kv_cache_groups
from kvferry.transport.errors import ConfigError, GeometryError


class AttentionCGSupport(enum.Enum):
    """Batches of which a backend's kernels can be captured in a CUDA graph; the greater value includes the lesser.
    Names and values are vLLM's, so that vLLM's builders can answer with their own enum."""

    ALWAYS = 3  # Any batch, prefill and decode mixed
    UNIFORM_BATCH = 2  # Batches whose requests have equally many query tokens
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # Batches whose requests have one query token each
    NEVER = 0


@dataclass(frozen=True)
class AttentionCGSupportInfo:
    """The least support among backends."""

    min_cg_support: Any = AttentionCGSupport.ALWAYS  # A backend's own enum may stand for ours: the values are compared
    min_cg_attn_backend: str | None = None  # The class name of the first backend that has it, unless all have ALWAYS


@dataclass
class CommonAttentionMetadata:
    """A batch of R requests and T tokens as the builders of one KV cache group get it; vLLM's names of the fields.
    A name with ``_cpu`` is the same on the host, and with ``_upper_bound`` at least that."""

    query_start_loc: torch.Tensor  # [R + 1], the first query token of each request, and the end
    query_start_loc_cpu: torch.Tensor  # [R + 1]
    seq_lens: torch.Tensor  # [R], tokens of each request, those of this step included
    num_reqs: int  # R
    num_actual_tokens: int  # T, padding included
    max_query_len: int  # the most query tokens of a request
    max_seq_len: int  # at least the tokens of the longest request
    block_table_tensor: torch.Tensor  # [R, blocks], block ids of each request
    slot_mapping: torch.Tensor  # [T], the slot in the cache that each token is written to
    causal: bool | torch.Tensor = True  # whether a token sees earlier tokens only; per request where a tensor [R]
    logits_indices_padded: torch.Tensor | None = None  # [tokens], of fast prefill: whose logits are needed
    num_logits_indices: int | None = None  # how many they are, without padding
    max_logits_per_req: int | None = None  # the most of them in one request
    encoder_seq_lens: torch.Tensor | None = None  # [R], of cross-attention: encoder tokens of each request
    encoder_seq_lens_cpu: Any = None  # [R]
    dcp_local_seq_lens: torch.Tensor | None = None  # [R], the tokens of each request on this rank
    dcp_local_seq_lens_cpu_upper_bound: torch.Tensor | None = None  # [R]
    positions: torch.Tensor | None = None  # [T], of each token in its request
    is_prefilling: torch.Tensor | None = None  # [R], whether a request still has prompt tokens to compute
    seq_lens_cpu_upper_bound: torch.Tensor | None = None  # [R]
    req_idx: Any = None  # the number of each row's request in the engine's table; [R]
    mm_req_doc_ranges: Mapping[int, list[tuple[int, int]]] | None = None  # (first, last) that see each other both ways
    rswa_prefix_lens: torch.Tensor | None = None  # [R], tokens that a sliding window never leaves behind
    replayssm_decode_base_cpu: torch.Tensor | None = None  # [R], of Mamba2: computed tokens at the last full write
    _token_to_req_indices_cache: torch.Tensor | None = None  # the request of each token, once a builder computed it


def init_attn_backend(
    kv_cache_config: Any, source: Any, device: torch.device, active_layer_names: Container[str] | None = None,
    draft_layer_names: Container[str] | None = None, *, config: Any = None,
    fast_prefill_backend: Callable[[Any], Any] | None = None,
) -> tuple[list[list[AttentionGroup]], AttentionCGSupportInfo, list[int]]:  # fmt: skip
    """The attention groups of each KV cache group, with their builders; the least CUDA graph support; tokens of a
    kernel block per KV cache group that has a cache (the others come last in ``kv_cache_config``). Layers that share a
    cache join its group. Raises ConfigError: fast prefill without its backend; GeometryError: an unknown layer, a
    target in no group, or backends that have no block size in common.

    Args:
        source: the layers, see ``layers_of``.
        active_layer_names: layers to take; ``None`` for all.
        draft_layer_names: layers of a draft model, which fast prefill leaves alone.
        config: given to the builders, one per micro-batch of its ``parallel_config``; ``source`` where it is a config.
        fast_prefill_backend: makes the backend of a layer that computes only the tokens whose logits are needed.
    """
    config = source if config is None and not isinstance(source, Mapping) else config
    wants_fast_prefill = getattr(getattr(config, "cache_config", None), "kv_sharing_fast_prefill", False)
    if wants_fast_prefill and fast_prefill_backend is None:
        raise ConfigError("kv_sharing_fast_prefill is on, expected fast_prefill_backend to make the backends of it")
    members = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    shared = {name: target for name, target in get_shared_kv_cache_layers(source).items() if name not in members}
    add_kv_sharing_layers_to_kv_cache_groups(shared, kv_cache_config.kv_cache_groups)

    backends = {}
    if fast_prefill_backend is not None:
        layers = layers_of(source)
        for name in reversed(layers):  # The last in a row that share a cache
            target = getattr(layers[name], "kv_sharing_target_layer_name", "")
            if target == "" or name in (draft_layer_names or ()):
                continue  # Layers of no attention, such as Mamba's, do not end the row
            if target is None:
                break
            backends[name] = fast_prefill_backend(layers[name].get_attn_backend())
    groups = attention_groups(kv_cache_config, source, active_layer_names, backends)
    sizes = prepare_kernel_block_sizes(kv_cache_config, groups)
    parallel = getattr(config, "parallel_config", None)
    count = int(parallel.num_ubatches) if parallel is not None and parallel.use_ubatching else 1
    for number, each in enumerate(groups):
        for group in each:
            group.create_metadata_builders(config, device, sizes[number] if number < len(sizes) else None, count)
    workspace = None  # Of the first builder that has one, for all later ones that take one
    for builder in (builder for each in groups for group in each for builder in group.metadata_builders):
        if workspace is None:
            if hasattr(builder, "_get_workspace_buffer"):
                workspace = builder._get_workspace_buffer()
        elif hasattr(builder, "set_workspace_buffer"):
            builder.set_workspace_buffer(workspace)
    return groups, _least_cg_support(groups, config), sizes


def _least_cg_support(groups: Sequence[Sequence[AttentionGroup]], config: Any) -> AttentionCGSupportInfo:
    """A builder without ``get_cudagraph_support`` supports none."""
    least = AttentionCGSupportInfo()
    for group in (group for each in groups for group in each):
        ask = getattr(group.get_metadata_builder(), "get_cudagraph_support", None)
        support = AttentionCGSupport.NEVER if ask is None else ask(config, group.kv_cache_spec)
        if support.value < least.min_cg_support.value:
            least = AttentionCGSupportInfo(support, group.backend.__name__)
    return least


def build_attn_metadata(
    attn_groups: Sequence[Sequence[AttentionGroup]], num_reqs: int, num_tokens: int, query_start_loc_gpu: torch.Tensor,
    query_start_loc_cpu: torch.Tensor, max_query_len: int, seq_lens: torch.Tensor, max_seq_len: int,
    block_tables: Sequence[torch.Tensor], slot_mappings: torch.Tensor | Sequence[torch.Tensor], kv_cache_config: Any,
    seq_lens_cpu_upper_bound: torch.Tensor | None = None, dcp_local_seq_lens: torch.Tensor | None = None,
    dcp_local_seq_lens_cpu_upper_bound: torch.Tensor | None = None, positions: torch.Tensor | None = None,
    is_prefilling: torch.Tensor | None = None, mm_req_doc_ranges: Mapping[int, list[tuple[int, int]]] | None = None,
    model_specific_attn_metadata: Any = None, for_cudagraph_capture: bool = False,
    causal: bool | torch.Tensor | Mapping[int, bool] = True, rswa_prefix_lens: torch.Tensor | None = None,
    ubatch_idx: int = 0, fast_prefill: Any = None, req_idx: Any = None, *,
    common_metadata_type: Any = CommonAttentionMetadata,
) -> dict[str, Any]:  # fmt: skip
    """The metadata of every layer for one step, by layer name; layers of an attention group share one object. What is
    not below is a field of ``CommonAttentionMetadata``. Raises GeometryError: fewer groups, tables, lengths or builders
    than needed; a field that ``common_metadata_type`` lacks, or that the model's metadata gives once more.

    Args:
        block_tables: per KV cache group, ``[R, blocks]``, of manager block ids.
        slot_mappings: per KV cache group, ``[T]``.
        model_specific_attn_metadata: has ``get_extra_common_attn_kwargs(group_number, num_reqs)``, more fields of the
            batch, and ``get_extra_attn_kwargs(builder, num_reqs)``, more arguments of ``build``.
        causal: for all groups, or by group number; groups that the mapping leaves out are causal.
        ubatch_idx: the micro-batch, which decides the builder.
        fast_prefill: with the batch's three fields of logits.
        common_metadata_type: the dataclass that builders get; vLLM's own, for builders of vLLM's.
    """
    groups = len(kv_cache_config.kv_cache_groups)
    if len(attn_groups) < groups:
        raise GeometryError(f"{len(attn_groups)} lists of attention groups for {groups} KV cache groups")
    batch: dict[str, Any] = dict(
        query_start_loc=query_start_loc_gpu, query_start_loc_cpu=query_start_loc_cpu, seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens_cpu_upper_bound, dcp_local_seq_lens=dcp_local_seq_lens,
        dcp_local_seq_lens_cpu_upper_bound=dcp_local_seq_lens_cpu_upper_bound, num_reqs=num_reqs,
        num_actual_tokens=num_tokens, max_query_len=max_query_len, max_seq_len=max_seq_len, positions=positions,
        is_prefilling=is_prefilling, mm_req_doc_ranges=mm_req_doc_ranges, rswa_prefix_lens=rswa_prefix_lens,
        req_idx=req_idx,
    )  # fmt: skip
    for name, tensor in batch.items():
        if "seq_lens" in name and tensor is not None:
            if len(tensor) < num_reqs:
                raise GeometryError(f"{name} has {len(tensor)} rows for {num_reqs} requests")
            batch[name] = tensor[:num_reqs]
    model, capture = model_specific_attn_metadata, for_cudagraph_capture
    built: dict[str, Any] = {}
    reusable: dict[tuple[Any, type], Any] = {}
    token_to_req_indices = None
    for number in range(groups):
        if not attn_groups[number]:
            continue
        if number >= min(len(block_tables), len(slot_mappings)):
            raise GeometryError(
                f"KV cache group {number} has attention groups, {len(block_tables)} block tables and "
                f"{len(slot_mappings)} slot mappings were given, expected at least {number + 1}"
            )
        batch["block_table_tensor"], batch["slot_mapping"] = block_tables[number], slot_mappings[number]
        batch["causal"] = causal.get(number, True) if isinstance(causal, Mapping) else causal
        batch["_token_to_req_indices_cache"] = token_to_req_indices
        more = {} if model is None else model.get_extra_common_attn_kwargs(number, num_reqs)
        common = _common(common_metadata_type, batch, more, fast_prefill)
        for group in attn_groups[number]:
            builder = group.get_metadata_builder(ubatch_idx)
            key = group.kv_cache_spec, type(builder)
            # Groups of recurrent layers with the same spec and builder differ in their block tables only.
            reuses = hasattr(key[0], "shapes") and getattr(builder, "supports_update_block_table", False)
            if reuses and key in reusable:
                metadata = builder.update_block_table(reusable[key], common.block_table_tensor, common.slot_mapping)
            else:
                table, mine = group.map_to_kernel_block_table(common.block_table_tensor), common
                if table is not common.block_table_tensor:
                    mine = replace(common, block_table_tensor=table)
                extra = {} if capture or model is None else model.get_extra_attn_kwargs(builder, num_reqs)
                if capture and hasattr(builder, "build_for_cudagraph_capture"):
                    metadata = builder.build_for_cudagraph_capture(mine)
                else:
                    metadata = builder.build(0, mine, **extra)
                if reuses:
                    reusable[key] = metadata
            built.update(dict.fromkeys(group.layer_names, metadata))
        token_to_req_indices = getattr(common, "_token_to_req_indices_cache", None)
    return built


def _common(kind: Any, batch: Mapping[str, Any], extra: Mapping[str, Any], fast_prefill: Any) -> Any:
    """A group's batch as ``kind``. Of the batch's own fields, the model may replace ``is_prefilling`` alone."""
    twice = extra.keys() & batch.keys() - {"is_prefilling"}
    if twice:
        raise GeometryError(f"model_specific_attn_metadata gives {', '.join(sorted(twice))}, which the batch has")
    every = {**batch, **extra}
    if fast_prefill is not None:
        for name in ("logits_indices_padded", "num_logits_indices", "max_logits_per_req"):
            every[name] = getattr(fast_prefill, name)
    known = {each.name for each in fields(kind)}
    lacking = sorted(name for name, value in every.items() if name not in known and value is not None)
    if lacking:
        raise GeometryError(f"{kind.__name__} has no field {', '.join(lacking)}, which this step needs")
    return kind(**{name: value for name, value in every.items() if name in known})
