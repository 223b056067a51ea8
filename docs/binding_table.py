"""The KV-binding utilities for engines other than vLLM: module, signature in vLLM, and the vLLM release compared.

``docs/generate.py`` writes the table into docs/library.md; ``python docs/binding_table.py`` prints it.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

KV_BINDING = "kvferry.connector.binding.kv_binding"
BLOCK_SIZES = "kvferry.connector.binding.block_sizes"
ATTENTION_GROUP = "kvferry.connector.binding.attention_group"
KV_SPEC = "kvferry.connector.binding.kv_spec"
BLOCK_ZEROER = "kvferry.connector.binding.block_zeroer"
HOST_COPY = "kvferry.connector.binding.host_copy"
AGGREGATOR = "kvferry.connector.engine.aggregator"
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
        "select_common_block_size", BLOCK_SIZES,
        "select_common_block_size(kv_manager_block_size, backends, kv_cache_specs=None)", HELD,
    ),
    Utility(
        "prepare_kernel_block_sizes", BLOCK_SIZES, "prepare_kernel_block_sizes(kv_cache_config, attn_groups)", HELD,
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
        "KVBlockZeroer", BLOCK_ZEROER,
        "KVBlockZeroer(device, attn_groups_iter, kernel_block_sizes, static_forward_context, num_blocks, "
        "runner_only_attn_layers=None)",
        HELD, "takes any alignment, vLLM's class asserts 4 bytes; also runs on the CPU; checks block ids",
    ),
    Utility(
        "copy_kv_blocks", HOST_COPY,
        "copy_kv_blocks(src_kv_caches, dst_kv_caches, src_block_ids, dst_block_ids, direction)",
        HELD, "refuses lists of unequal length, which vLLM's function ignores, ids out of range and different shapes; "
        "compared with the block copies of vLLM's CUDA platform",
    ),
    Utility(
        "yield_req_data", AGGREGATOR, "yield_req_data(scheduler_output)", HELD, "refuses lists of different length",
    ),
    Utility(
        "get_kv_connector_cache_layout", ATTENTION_GROUP, "get_kv_connector_cache_layout(vllm_config=None)",
        HELD, "takes the connector's class",
    ),
    Utility(
        "get_current_attn_backend", ATTENTION_GROUP, "get_current_attn_backend(vllm_config, layer_names=None)",
        HELD, "also takes the layers by name; has no default backend where there are no layers",
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
