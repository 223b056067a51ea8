"""vLLM's connector API, and what differs between vLLM's releases.

Tested are 0.32 and 0.33. Later ones are expected to work. ``from_vllm.py`` turns vLLM's objects into KVFerry's structs.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from kvferry.connector.vllm.cache_kinds import (
    GAPPED,
    RING,
    cache_kind,
    entry_tokens,
    first_spec,
    keeps_blocks,
    layer_specs,
)
from kvferry.connector.vllm.from_vllm import blocks_leave_at_end, check_groups, shardings
from kvferry.connector.vllm.store_beside import check_store
from kvferry.connector.wire.messages import PREFIX_TOKENS
from kvferry.transport.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

TELLS_OF_SLEEP = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
"""0.33: the connector is called before sleep mode unmaps the KV cache, and after it is mapped again."""

_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def permit_amx() -> None:
    """Ask the kernel for AMX on behalf of this process, where the processor has it.

    vLLM's AMX attention uses the tiles without asking; some other kernel usually has before. Where a prompt was loaded,
    D's first forward is a single token, which none of those take part in, and the worker would die of SIGILL.
    """
    if current_platform.is_cpu() and platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)  # EINVAL without AMX


def ranks_here(vllm_config: VllmConfig) -> int | None:
    """How many ranks listen on this host, at the control ports from the first on; 0 where that is not known; ``None``
    where ranks may run on other hosts only."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend not in ("uni", "mp") or not parallel.data_parallel_size_local:
        return None
    several = parallel.data_parallel_size > 1 or parallel.nnodes > 1
    # Each of several API servers makes a configuration, the last ones perhaps when the ranks have their ports already.
    return 0 if several or getattr(parallel, "_api_process_count", 1) > 1 else int(parallel.world_size)


def check_children(vllm_config: VllmConfig) -> None:
    """Refuse KVFerry twice below MultiConnector, which dies when both answer for one request; and a store that KVFerry
    would take blocks from. Raises ConfigError."""
    children = vllm_config.kv_transfer_config.kv_connector_extra_config.get("connectors", ())
    children = [child for child in children if isinstance(child, dict)]
    ours = [child for child in children if child.get("kv_connector") == "KVFerryConnector"]
    if any(child.get("kv_role") != "kv_producer" for child in ours):  # one that only produces writes no block
        check_store(child.get("kv_connector") for child in children)
    if len(ours) > 1:
        raise ConfigError(f"connectors of MultiConnector: {len(ours)} are KVFerryConnector, expected one")


def check_options(vllm_config: VllmConfig) -> None:
    """Refuse what cannot be served with any model, at start-up and in one line.

    Raises:
        ConfigError: names the option and what to do.
    """
    if vllm_config.model_config is not None and vllm_config.model_config.enable_sleep_mode and not TELLS_OF_SLEEP:
        raise ConfigError(
            f"enable_sleep_mode: vLLM {vllm.__version__} does not tell connectors when it unmaps the KV cache; peers "
            "would read pages that are gone; leave out --enable-sleep-mode, or run vLLM 0.33"
        )
    experts = vllm_config.aux_output_config.enable_return_routed_experts
    if experts and vllm_config.kv_transfer_config.is_kv_consumer:
        raise ConfigError(
            "enable_return_routed_experts: D has no experts of the tokens that it loads; "
            "leave out --enable-return-routed-experts"
        )


def check_config(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse what cannot be served, with this model's caches, in one line. Raises ConfigError."""
    check_options(vllm_config)
    check_groups(kv_cache_config)
    replicas = vllm_config.parallel_config.prefill_context_parallel_size
    for index in kv_cache_config.transfer_group_ids if replicas > 1 else ():
        for spec in layer_specs(kv_cache_config.kv_cache_groups[index].kv_cache_spec):
            if type(spec).__name__ != "MLAAttentionSpec" or entry_tokens(spec) > 1:  # of others vLLM tells no rule
                raise ConfigError(
                    f"prefill_context_parallel_size {replicas}: KV cache group {index} is a {type(spec).__name__} with "
                    f"{entry_tokens(spec)} tokens in an entry; only MLA with one is carried; expected 1"
                )
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        for table, sharding in zip(
            kv_cache_config.transfer_group_ids, shardings(vllm_config, kv_cache_config), strict=True
        ):
            block_size = kv_cache_config.kv_cache_groups[table].kv_cache_spec.block_size
            if block_size % sharding.interleave:
                raise ConfigError(
                    f"cp_kv_cache_interleave_size {sharding.interleave} does not divide the blocks of KV cache group "
                    f"{table}, {block_size} tokens; expected a divisor"
                )


def why_beside(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, scheduler: Scheduler | None) -> str:
    """Which rule sends all loads of this engine beside the steps; empty where they may go inside. ``scheduler``: of the
    engine, half constructed."""
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "a pipeline stage's output leaves before the last stage has the tokens"
    if scheduler is not None and scheduler.vllm_config.kv_transfer_config is not vllm_config.kv_transfer_config:
        return "below MultiConnector a store may keep the KV of a step before it is known that its load has failed"
    if len(kv_cache_config.transfer_group_ids) < len(groups):
        return "not all KV cache groups of the model are handed over"
    if blocks_leave_at_end(kv_cache_config):
        return ""
    specs = [first_spec(group.kv_cache_spec) for group in groups]
    if untested := {type(spec).__name__ for spec in specs} & {RING, GAPPED}:
        return f"it was not tested with KV caches of kind {'/'.join(sorted(untested))}"
    # A step writes a state where it was loaded. vLLM has moved states and cleared blocks before it binds the connector,
    # and reads states in the forward. MambaManager gives a block the hash of tokens that end in it, the step's and not
    # the load's (``moves_state``), and lends it to no request of the same step. What was computed from a failed load
    # leaves the prefix cache, states too; and a request that begins anew reads no state (``has_initial_state``).
    modes = {spec.mamba_cache_mode for spec in specs if cache_kind(spec)[0] == "state"}
    # With blocks of one size, prefix hits end where blocks end, and vLLM copies none before a step for them.
    hits_end_with_blocks = (
        len({spec.block_size for spec in specs}) == parallel.decode_context_parallel_size == 1
        and vllm_config.cache_config.prefix_match_unit is None
    )
    if not modes <= ({"none", "align"} if hits_end_with_blocks else {"none"}):
        return f"vLLM copies states of mamba_cache_mode {'/'.join(sorted(modes))} between blocks of requests"
    return ""


def check_prefix_reads(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Check that prefixes of this engine can be read, and that it can read them. Raises ConfigError."""
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    block_size = groups[0].kv_cache_spec.block_size if groups else 0
    kinds = {cache_kind(first_spec(group.kv_cache_spec))[0] for group in groups}
    if len(groups) == 1 and kinds <= {"full", "mla"} and not keeps_blocks(groups[0].kv_cache_spec):
        why = f"vLLM frees blocks of {type(first_spec(groups[0].kv_cache_spec)).__name__} while a request runs"
    elif len(groups) != 1 or not kinds <= {"full", "mla"}:
        found = f"{len(groups)} KV cache groups, {', '.join(sorted(kinds))}"
        why = f"the model has {found}, expected one of full attention or MLA"
    elif parallel.decode_context_parallel_size > 1:
        why = f"decode_context_parallel_size is {parallel.decode_context_parallel_size}, expected 1"
    elif block_size % PREFIX_TOKENS:
        why = f"blocks hold {block_size} tokens, expected a multiple of {PREFIX_TOKENS}"
    elif vllm_config.speculative_config is not None:
        why = "speculative decoding is on"
    elif vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        why = f"kv_load_failure_policy is {policy!r}, expected 'recompute': a prefix may be gone when it is read"
    else:
        return
    raise ConfigError(f"prefix_reads: {why}; or leave prefix_reads out")


def speaks_for_engine(connector: KVConnectorBase_V1) -> bool:
    """On a worker: whether the engine's connector is this one, and not MultiConnector, with this one below."""
    return has_kv_transfer_group() and get_kv_transfer_group() is connector


def preempt(scheduler: Scheduler, request: Request, now: float) -> None:
    """Preempt a running request between two steps, and have vLLM drop its outputs in flight."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, now, drop_stale_output=True)
    if request.prefill_stats is not None:
        request.num_preemptions -= 1  # its prefill begins again, so vLLM must note again where its tokens come from
    # As vLLM does where it preempts between two steps: the request may be scheduled again in the next one.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def with_report(result: ModelRunnerOutput, report: KVConnectorOutput) -> ModelRunnerOutput:
    """A step's output with what the engine's only rank has to report. The step itself carries of it at most figures,
    and what becomes of the loads inside it."""
    result, own = copy(result), result.kv_connector_output  # an output without anything is the same for all steps
    for name in ("kv_connector_stats", "kv_connector_worker_meta"):
        if (of_step := getattr(own, name, None)) is not None:
            more = getattr(report, name)
            setattr(report, name, of_step if more is None else of_step.aggregate(more))
    result.kv_connector_output = report
    return result


def with_errors(told: dict[int, EngineCoreOutputs], requests: Sequence[Request]) -> dict[int, EngineCoreOutputs]:
    """What an update tells the clients, and that these requests have ended with an error, as vLLM tells it of those
    that it ends there itself."""
    for request in requests:
        told.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )
    return told


def not_cached(request: Request, tokens: int) -> None:
    """So many of its tokens come from P: a client that is told how many were cached is told of D's own, as by D alone.
    vLLM adds both; by source its metrics have them apart."""
    if request.prefill_stats is not None:
        request.prefill_stats.num_cached_tokens -= tokens


def restart_waiting(scheduler: Scheduler, request: Request) -> None:
    """Have a request that does not run begin from its first token, once nothing writes its blocks."""
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        request.num_computed_tokens = 0
        scheduler.failed_recving_kv_req_ids.add(request.request_id)  # at the end of its load, vLLM frees its blocks
    elif request.status == RequestStatus.PREEMPTED:
        request.num_output_placeholders = 0  # their outputs do not come
    elif request.num_computed_tokens:
        request.num_computed_tokens = 0
        scheduler.kv_cache_manager.free(request)


def is_paused(scheduler: Scheduler | None) -> bool:
    """Whether a scheduler begins no new request, as vLLM's ``pause_generation`` tells it."""
    return scheduler is not None and bool(scheduler.pause_state != PauseState.UNPAUSED)


def fail_loads(scheduler: Scheduler) -> None:
    """Have vLLM compute the requests that wait for a load, or end them under the policy ``fail``; also where the report
    of the load has come already."""
    for request in scheduler.requests.values():
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            restart_waiting(scheduler, request)


def prefill_lookahead(vllm_config: VllmConfig) -> int:
    """Tokens at the end of a prompt that D must compute itself: a drafter of several modules has read as far ahead as
    that on P, in drafts that D never saw."""
    return max(0, int(vllm_config.num_prefill_lookahead_tokens) - 1)


def truncate_prompt(request: Request, count: int) -> None:
    """Take the last ``count`` tokens off a request that P has not begun. D has them from its client."""
    assert request.prompt_token_ids is not None and request.num_computed_tokens == 0
    request.prompt_token_ids = request.prompt_token_ids[:-count]  # not in place: the list may be the caller's
    del request._all_token_ids[-count:]
    request.num_prompt_tokens -= count
    request.max_tokens = 1  # what it samples continues another prompt
    # Else a block that the sampled token ends would go by the hash of one that the prompt's token ends.
    request.block_hashes.clear()
    request.update_block_hashes()
