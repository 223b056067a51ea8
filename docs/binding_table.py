"""The KV-binding utilities for engines other than vLLM: module, signature in vLLM, and the vLLM release compared.

``docs/generate.py`` writes the table into docs/library.md; ``python docs/binding_table.py`` prints it.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

KV_BINDING = "kvferry.connector.binding.kv_binding"
ATTENTION_GROUP = "kvferry.connector.binding.attention_group"
KV_SPEC = "kvferry.connector.binding.kv_spec"
ATTN_METADATA = "kvferry.connector.binding.attn_metadata"
MEMORY_REQUEST = "kvferry.connector.binding.memory_request"
SEQUENCE_PARALLEL = "kvferry.connector.binding.sequence_parallel"
MM_PLACEHOLDERS = "kvferry.connector.binding.mm_placeholders"
ENCODER_BUDGET = "kvferry.connector.binding.encoder_budget"
BLOCK_OPS = "kvferry.connector.binding.block_ops"
AGGREGATOR = "kvferry.connector.worker.aggregator"
HELD = "0.32"
OWN = "own test oracle"


class Utility(NamedTuple):
    """One row.

    ``module``: where the utility is defined. ``seed``: its signature in vLLM. ``held``: the vLLM release whose
    function a test runs on the same inputs, or ``OWN`` where no supported release has the function. ``differs``: what
    differs from vLLM's function.
    """

    name: str
    module: str
    seed: str
    held: str
    differs: str = ""


UTILITIES = (
    Utility(
        "init_kv_cache", KV_BINDING,
        "init_kv_cache(forward_context, kv_cache_config, device, kernel_block_sizes, vllm_config, "
        "kv_cache_allocation_context=None, *, block_tables=None, attn_groups=())",
        HELD, "takes `layout` instead of `vllm_config`; no HiSparse",
    ),
    Utility(
        "allocate", KV_BINDING, "_allocate_kv_cache(kv_cache_config, device)",
        HELD, "`allocate` and then `reshape` do what `allocate_kv_cache` of vLLM 0.32 does",
    ),
    Utility(
        "reshape", KV_BINDING, "_reshape_kv_cache(kv_cache_config, kv_cache_raw_tensors, attn_backends)",
        HELD, "takes a stride order instead of backends; refuses views that leave the allocation",
    ),
    Utility(
        "bind_kv_cache", KV_BINDING,
        "bind_kv_cache(kv_caches, forward_context, runner_kv_caches, num_attn_module=1)",
        HELD, "binds all layers or none; sets `kv_cache` where a layer has no `bind_kv_cache`",
    ),
    Utility(
        "extract_layer_index", KV_BINDING, "extract_layer_index(layer_name, num_attn_module=1)", HELD,
    ),
    Utility(
        "add_kv_sharing_layers_to_kv_cache_groups", KV_BINDING,
        "add_kv_sharing_layers_to_kv_cache_groups(shared_kv_cache_layers, kv_cache_groups, "
        "runner_only_attn_layers=None)",
        HELD, "changes all groups or none",
    ),
    Utility(
        "initialize_kv_cache_for_kv_sharing", KV_BINDING,
        "initialize_kv_cache_for_kv_sharing(shared_kv_cache_layers, kv_cache_groups, kv_caches, attn_groups=None, "
        "runner_only_attn_layers=None)",
        OWN,
    ),
    Utility(
        "select_common_block_size", ATTENTION_GROUP,
        "select_common_block_size(kv_manager_block_size, backends, kv_cache_specs=None)", HELD,
    ),
    Utility(
        "prepare_kernel_block_sizes", ATTENTION_GROUP,
        "prepare_kernel_block_sizes(kv_cache_config, attn_groups)", HELD,
    ),
    Utility(
        "get_kv_cache_spec", ATTENTION_GROUP, "get_kv_cache_spec(vllm_config)",
        HELD, "also takes the layers by name; a block alignment is a number of bytes",
    ),
    Utility(
        "get_kv_cache_config_from_groups", KV_SPEC,
        "get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, available_memory)",
        HELD, "takes `num_blocks` and `layout` instead of the configuration and the memory size",
    ),
    Utility(
        "AttentionGroup", ATTENTION_GROUP,
        "AttentionGroup(backend, layer_names, kv_cache_spec, kv_cache_group_id)",
        HELD, "maps block tables into new tensors; gives builders no block table width",
    ),
    Utility(
        "KVBlockZeroer", BLOCK_OPS,
        "KVBlockZeroer(device, attn_groups_iter, kernel_block_sizes, static_forward_context, num_blocks, "
        "runner_only_attn_layers=None)",
        HELD, "takes any alignment, vLLM's class asserts 4 bytes; also runs on the CPU; checks block ids",
    ),
    Utility(
        "_make_src_and_dst_indices", BLOCK_OPS,
        "_make_src_and_dst_indices(src_block_ids, dst_block_ids, src_device, dst_device)",
        HELD, "the copy to a device has ended on return; refuses ids that are not whole numbers",
    ),
    Utility(
        "copy_kv_blocks", BLOCK_OPS,
        "copy_kv_blocks(src_kv_caches, dst_kv_caches, src_block_ids, dst_block_ids, direction)",
        HELD, "refuses lists of unequal length, which vLLM's function ignores, ids out of range and different shapes; "
        "compared with the block copies of vLLM's CUDA platform",
    ),
    Utility(
        "yield_req_data", AGGREGATOR, "yield_req_data(scheduler_output)", HELD,
        "refuses lists of different length; the third value is that of vLLM 0.33, before which it was false for new "
        "requests",
    ),
    Utility(
        "get_kv_connector_cache_layout", ATTENTION_GROUP, "get_kv_connector_cache_layout(vllm_config=None)",
        HELD, "takes the connector's class",
    ),
    Utility(
        "get_current_attn_backend", ATTENTION_GROUP, "get_current_attn_backend(vllm_config, layer_names=None)",
        HELD, "also takes the layers by name; has no default backend where there are no layers",
    ),
    Utility(
        "init_attn_backend", ATTN_METADATA,
        "init_attn_backend(kv_cache_config, vllm_config, device, active_layer_names=None, draft_layer_names=None)",
        HELD, "also takes the layers by name; takes a function that makes the backends of fast prefill; a sharing "
        "layer in a group of several specs gets the spec of its target layer; does not check batch invariance",
    ),
    Utility(
        "build_attn_metadata", ATTN_METADATA,
        "build_attn_metadata(attn_groups, num_reqs, num_tokens, query_start_loc_gpu, query_start_loc_cpu, "
        "max_query_len, seq_lens, max_seq_len, block_tables, slot_mappings, kv_cache_config, "
        "seq_lens_cpu_upper_bound=None, dcp_local_seq_lens=None, dcp_local_seq_lens_cpu_upper_bound=None, "
        "positions=None, is_prefilling=None, mm_req_doc_ranges=None, model_specific_attn_metadata=None, "
        "for_cudagraph_capture=False, causal=True, rswa_prefix_lens=None, ubatch_idx=0, fast_prefill=None, "
        "req_idx=None)",
        HELD, "the batch is a dataclass of KVFerry, or vLLM's class as `common_metadata_type`; maps block tables "
        "into new tensors; refuses fewer sequence lengths than requests",
    ),
    Utility(
        "request_memory", MEMORY_REQUEST,
        "request_memory(init_snapshot, cache_config, external_weight_memory=0)",
        HELD, "refuses a utilization outside 0 to 1 and negative external weights",
    ),
    Utility(
        "is_residual_scattered_for_sp", SEQUENCE_PARALLEL,
        "is_residual_scattered_for_sp(vllm_config, num_input_tokens)",
        OWN, "vLLM 0.32 does not have it any more",
    ),
    Utility(
        "sanity_check_mm_encoder_outputs", MM_PLACEHOLDERS,
        "sanity_check_mm_encoder_outputs(mm_embeddings, expected_num_items)",
        HELD, "a single tensor must have three axes, also with no items",
    ),
    Utility(
        "gather_mm_placeholders", MM_PLACEHOLDERS, "gather_mm_placeholders(placeholders, is_embed)",
        OWN, "vLLM 0.14 is the last release that has it; refuses masks that are not bool, and lengths that differ",
    ),
    Utility(
        "scatter_mm_placeholders", MM_PLACEHOLDERS, "scatter_mm_placeholders(embeds, is_embed)",
        OWN, "vLLM 0.14 is the last release that has it; refuses masks that are not bool, and one "
        "embedding for several tokens",
    ),
    Utility(
        "MultiModalBudget", ENCODER_BUDGET, "MultiModalBudget(vllm_config, mm_registry, *, enable_cache=True)",
        HELD, "takes the processor's cache itself, or none",
    ),
)  # fmt: skip


def resolve(utility: Utility) -> object:
    """The function or class of a row."""
    return getattr(importlib.import_module(utility.module), utility.name)


def markdown() -> str:
    """The table as Markdown."""
    rows = ["| utility | module | signature in vLLM | compared with | difference |"]
    rows.append("|---|---|---|---|---|")
    for utility in UTILITIES:
        held = utility.held if utility.held == OWN else f"vLLM {utility.held}"
        rows.append(f"| `{utility.name}` | `{utility.module}` | `{utility.seed}` | {held} | {utility.differs} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
