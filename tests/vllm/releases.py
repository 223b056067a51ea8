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

NOT_026 = {
    "test_beside_offloading_connector": "MultiConnector and OffloadingConnector of 0.32",
    "test_copies_behind": "loads inside the step as 0.32 schedules them; tests/gpu runs them with 0.26",
    "test_digest_vllm": "the configuration of 0.32's models",
    "test_families_vllm": "the caches of 0.32's models",
    "test_kv_postprocess_vllm": "0.26's functions take another layout",
    "test_prefix_histories": "0.26's statistics have another form",
    "test_prometheus": "0.26's statistics have another form",
    "test_prompts": "0.26's statistics have another form",
    "test_step_loads": "loads inside the step as 0.32 schedules them; tests/gpu runs them with 0.26",
    "test_step_loads_groups": "KVFerry refuses several groups and windows with 0.26",
    "test_walk": "preempts as 0.32 does, which drops the outputs in flight",
    "test_windows": "KVFerry refuses windows with 0.26",
    "test_026_with_a_window_is_refused": "needs a release that takes it",
    "test_026_with_several_groups_is_refused": "needs a release that takes it",
    "test_a_source_that_answers_late": "0.26's statistics have another form",
    "test_a_step_that_hands_nothing_over_executes_few_lines": "0.26 makes one call more",
    "test_figures_pass_through_multiconnector": "MultiConnector of 0.32",
    "test_figures_reach_vllms_log_line_and_prometheus": "0.26's statistics have another form",
    "test_of_an_edited_history_only_what_is_common": "0.26's statistics have another form",
    "test_preempted_on_d_after_its_load[1-False]": "preempts as 0.32 does",
    "test_preempted_on_p": "preempts as 0.32 does",
    "test_what_cannot_be_read_is_refused": "0.26 refuses some of these engines itself",
}
"""What does not fit 0.26, by module, test or case."""
COMPILED = {
    "test_a_number_becomes_what_the_cache_write_of_vllm_makes_of_it": "what it stores is compared",
    "test_another_block_size_has_what_the_writer_writes_there": "what it stores is compared",
    "test_parts_are_called_alike_whatever_the_block_size": "where it stores an element is compared",
    "test_instruction_sets_that_pack_otherwise_are_told_apart": "where it stores an element is compared",
}
"""What needs the compiled cache write of vLLM's attention on the CPU, by test. Only an installed vLLM has it."""


def why_not(*names: str) -> str | None:
    """Why a test of these names cannot run with the vLLM that is imported; ``None``: it can."""
    for name in names:
        if RELEASE < (0, 32) and name in NOT_026:
            return f"not for vLLM 0.26: {NOT_026[name]}"
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
