"""Where vLLM's releases differ in what the tests use of them."""

from __future__ import annotations

from inspect import signature
from typing import Any

import vllm

try:
    from vllm.v1.core import kv_cache_planning as _planning
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as _planning

RELEASE = tuple(int(part) for part in vllm.__version__.split(".")[:2])
"""Of the vLLM that is imported: (0, 32)."""

get_kv_cache_config_from_groups = _planning.get_kv_cache_config_from_groups
project_kv_cache_groups_to_worker = _planning._project_kv_cache_groups_to_worker


def kv_cache_config(config: Any, specs: dict[str, Any], available_memory: int) -> Any:
    """vLLM's own configuration of the caches of an engine with one worker."""
    more: tuple[Any, ...] = ()
    if "global_kv_cache_groups" in signature(_planning.get_kv_cache_configs).parameters:  # 0.33
        more = (_planning.get_global_kv_cache_groups(config, [specs]),)
    (found,) = _planning.get_kv_cache_configs(config, [specs], [available_memory], *more)
    return found
