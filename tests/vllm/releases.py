"""Where vLLM's releases differ in what the tests use of them."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import vllm

try:
    from vllm.v1.core import kv_cache_planning as _planning
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as _planning

RELEASE = tuple(int(part) for part in vllm.__version__.split(".")[:2])
"""Of the vLLM that is imported: (0, 32)."""

COMPILED = {
    "test_a_number_becomes_what_the_cache_write_of_vllm_makes_of_it": "what it stores is compared",
    "test_another_block_size_has_what_the_writer_writes_there": "what it stores is compared",
    "test_parts_are_called_alike_whatever_the_block_size": "where it stores an element is compared",
    "test_instruction_sets_that_pack_otherwise_are_told_apart": "where it stores an element is compared",
}
"""What needs the compiled cache write of vLLM's attention on the CPU, by test. Only an installed vLLM has it."""


def why_not(name: str) -> str | None:
    """Why a test of this name cannot run with the vLLM that is imported; ``None``: it can."""
    if name in COMPILED and not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        return f"needs vLLM's compiled cache write on the CPU: {COMPILED[name]}"
    return None


get_kv_cache_config_from_groups = _planning.get_kv_cache_config_from_groups
project_kv_cache_groups_to_worker = _planning._project_kv_cache_groups_to_worker


def kv_cache_config(config: Any, specs: dict[str, Any], available_memory: int) -> Any:
    """vLLM's own configuration of the caches of an engine with one worker."""
    more: tuple[Any, ...] = ()
    if "global_kv_cache_groups" in signature(_planning.get_kv_cache_configs).parameters:  # 0.33
        more = (_planning.get_global_kv_cache_groups(config, [specs]),)
    (found,) = _planning.get_kv_cache_configs(config, [specs], [available_memory], *more)
    return found
