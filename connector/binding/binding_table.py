"""The KV-binding utilities for engines other than vLLM: where each is, how vLLM's users know it, what holds it equal.

``python -m kvferry.connector.binding.binding_table`` prints the table in the README.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

HELD = "0.32"
OWN = "own oracle"


class Utility(NamedTuple):
    """``module`` below ``kvferry.connector``; ``seed`` the signature that vLLM's users know; ``held`` the vLLM release
    that a test runs beside it on the same inputs, or ``own oracle`` where none has it; ``differs`` what is other."""

    name: str
    module: str
    seed: str
    held: str
    differs: str = ""


UTILITIES = (
    Utility(
        "init_kv_cache", "binding.kv_binding",
        "init_kv_cache(forward_context, kv_cache_config, device, kernel_block_sizes, vllm_config, "
        "kv_cache_allocation_context=None, *, block_tables=None, attn_groups=())",
        HELD, "`layout` in place of `vllm_config`; no HiSparse",
    ),
    Utility(
        "allocate", "binding.kv_binding", "_allocate_kv_cache(kv_cache_config, device)",
        HELD, "with `reshape`, vLLM 0.32's `allocate_kv_cache`",
    ),
    Utility(
        "reshape", "binding.kv_binding", "_reshape_kv_cache(kv_cache_config, kv_cache_raw_tensors, attn_backends)",
        HELD, "by stride order in place of backends; refuses views that leave the allocation",
    ),
    Utility(
        "bind_kv_cache", "binding.kv_binding",
        "bind_kv_cache(kv_caches, forward_context, runner_kv_caches, num_attn_module=1)",
        HELD, "binds all or nothing; sets `kv_cache` where a layer has no `bind_kv_cache`",
    ),
    Utility(
        "extract_layer_index", "binding.kv_binding", "extract_layer_index(layer_name, num_attn_module=1)", HELD,
    ),
    Utility(
        "add_kv_sharing_layers_to_kv_cache_groups", "binding.kv_binding",
        "add_kv_sharing_layers_to_kv_cache_groups(shared_kv_cache_layers, kv_cache_groups, "
        "runner_only_attn_layers=None)",
        HELD, "changes all or nothing",
    ),
    Utility(
        "initialize_kv_cache_for_kv_sharing", "binding.kv_binding",
        "initialize_kv_cache_for_kv_sharing(shared_kv_cache_layers, kv_cache_groups, kv_caches, attn_groups=None, "
        "runner_only_attn_layers=None)",
        OWN,
    ),
    Utility(
        "select_common_block_size", "binding.block_sizes",
        "select_common_block_size(kv_manager_block_size, backends, kv_cache_specs=None)", HELD,
    ),
    Utility(
        "prepare_kernel_block_sizes", "binding.block_sizes",
        "prepare_kernel_block_sizes(kv_cache_config, attn_groups)", HELD,
    ),
    Utility(
        "get_kv_cache_spec", "binding.attention_group", "get_kv_cache_spec(vllm_config)",
        HELD, "takes the layers by name too; a block alignment is a number of bytes",
    ),
    Utility(
        "get_kv_cache_config_from_groups", "binding.kv_spec",
        "get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, available_memory)",
        HELD, "`num_blocks` and `layout` in place of config and memory",
    ),
    Utility(
        "AttentionGroup", "binding.attention_group",
        "AttentionGroup(backend, layer_names, kv_cache_spec, kv_cache_group_id)",
        HELD, "block tables are mapped into new tensors; builders get no block table width",
    ),
    Utility(
        "KVBlockZeroer", "binding.block_zeroer",
        "KVBlockZeroer(device, attn_groups_iter, kernel_block_sizes, static_forward_context, num_blocks, "
        "runner_only_attn_layers=None)",
        HELD, "any alignment, vLLM's asserts 4 bytes; runs on the CPU too; checks block ids",
    ),
    Utility(
        "copy_kv_blocks", "binding.host_copy",
        "copy_kv_blocks(src_kv_caches, dst_kv_caches, src_block_ids, dst_block_ids, direction)",
        HELD, "refuses lists of unequal length, which vLLM's ignores, ids out of range and forms that differ; "
        "compared with the block copies of vLLM's CUDA platform",
    ),
    Utility(
        "yield_req_data", "engine.aggregator", "yield_req_data(scheduler_output)", HELD, "refuses lists that differ"
    ),
    Utility(
        "get_kv_connector_cache_layout", "binding.attention_group", "get_kv_connector_cache_layout(vllm_config=None)",
        HELD, "takes the connector's class",
    ),
    Utility(
        "get_current_attn_backend", "binding.attention_group",
        "get_current_attn_backend(vllm_config, layer_names=None)",
        HELD, "takes the layers by name too; no default backend where there are no layers",
    ),
)  # fmt: skip


def resolve(utility: Utility) -> object:
    """The function or class that a row is about."""
    return getattr(importlib.import_module(f"kvferry.connector.{utility.module}"), utility.name)


def markdown() -> str:
    """The table as Markdown."""
    rows = ["| utility | in `kvferry.connector` | as vLLM's users know it | held equal to | differs |"]
    rows.append("|---|---|---|---|---|")
    for utility in UTILITIES:
        held = utility.held if utility.held == OWN else f"vLLM {utility.held}"
        rows.append(f"| `{utility.name}` | `{utility.module}` | `{utility.seed}` | {held} | {utility.differs} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
