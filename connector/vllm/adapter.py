"""``KVFerryConnector``: vLLM's connector contract, method by method, over the scheduler half and the worker half.

A step's plan is posted to the transfer thread when the model runner gets the step, at the latest in
``bind_connector_metadata``, which precedes the forward; ``start_load_kv`` may run after it.

vLLM's contract has no calls at some moments, so ``hooks`` wraps methods of vLLM.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, cast

import vllm

from kvferry.connector.vllm import check_release

check_release(vllm.__version__)  # before the imports that an older one lacks

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from kvferry.connector.config import Settings, load_settings, unknown_variables
from kvferry.connector.scheduler.planning import NULL_BLOCK
from kvferry.connector.scheduler.prefixes import model_seed, names_sources, with_hints
from kvferry.connector.scheduler.scheduler import SchedulerHalf
from kvferry.connector.scheduler.steps_in_flight import StepsInFlight
from kvferry.connector.step_loads.step_loads import StepOutcome
from kvferry.connector.vllm import compat, from_vllm, hooks, plugin
from kvferry.connector.vllm.prometheus import KVFerryPromMetrics, KVFerryStats
from kvferry.connector.vllm.step_load_recovery import StepLoadRecovery
from kvferry.connector.vllm.store_beside import fence, wanted
from kvferry.connector.vllm.weights import EngineWeights
from kvferry.connector.vllm.worker_meta import KVFerryWorkerMeta
from kvferry.connector.wire.step_plan import LoadEnd, LookupResult, PromptLookup, RankAddress, StepPlan, StepResults
from kvferry.connector.worker.prefill_events import PrefillEvents
from kvferry.connector.worker.worker import WorkerHalf
from kvferry.connector.worker.worker_setup import check_before_caches
from kvferry.transport.errors import ConfigError, KVFerryError
from kvferry.transport.host import host_id
from kvferry.transport.registry import MemoryKind
from kvferry.transport.tracing import open_tracer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvferry.adapter")


@dataclass
class KVFerryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's plan on its way to the workers."""

    plan: StepPlan


@dataclass
class KVFerryHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker and those of its PCP group listen, on its way to the scheduler."""

    addresses: tuple[RankAddress, ...]


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The plug-in. One instance in the scheduler's process, one in each worker's."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = load_settings(transfer.kv_connector_extra_config)
        compat.check_config(vllm_config, kv_cache_config)
        self._config = kv_cache_config
        self._groups: tuple[int, ...] = kv_cache_config.transfer_group_ids
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._ends: dict[str, LoadEnd] = {}
        self._posted: StepPlan | None = None
        self._recovery: StepLoadRecovery | None = None
        self._steps: StepsInFlight | None = None
        self._block_pool: Any = None
        if role == KVConnectorRole.SCHEDULER:
            parallel = vllm_config.parallel_config
            self.alone = self.stepping_alone(parallel)
            self._rank_here: KVFerryConnector | None = None
            fails = from_vllm.loads_fail_requests(vllm_config)
            tables = from_vllm.block_tables(vllm_config, kv_cache_config)
            scheduler = self._vllm_scheduler = hooks.find_scheduler()
            beside = compat.why_beside(vllm_config, kv_cache_config, scheduler)
            if beside and transfer.is_kv_consumer and settings.step_hold_seconds:
                logger.info("kvferry: all loads go beside the steps, and take about three steps more: %s", beside)
            fits = transfer.is_kv_consumer and (from_vllm.blocks_leave_at_end(kv_cache_config) or not beside)
            recovers = fits and hooks.can_recover(scheduler)
            if recovers:
                self._steps = StepsInFlight()
                self._recovery = StepLoadRecovery(
                    scheduler, self._steps, tables=tables, ranks=parallel.world_size, fails=fails,
                    ended=lambda request_id, end: self._scheduling.step_load_ended(request_id, end),  # noqa: PLW0108
                )  # fmt: skip
                hooks.before_update(scheduler, self, partial(self._look_at, self._recovery))
            self._scheduler = SchedulerHalf(
                settings,
                str(transfer.engine_id),
                tables,
                tp_size=from_vllm.tp_size(parallel),
                pp_size=parallel.pipeline_parallel_size,
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
                host_id=host_id(),
                max_sizes=from_vllm.max_sizes(vllm_config),
                lookahead=compat.prefill_lookahead(vllm_config),
                step_loads=not beside,
                steps=self._steps,
                clears_blocks=kv_cache_config.needs_kv_cache_zeroing,
                drafts=int(getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0),
                shares_steps=parallel.data_parallel_size > 1,
                # Below MultiConnector, another connector may load tokens, and these may prove to be missing.
                streams=lambda: self._engine_connector is self,
                is_paused=lambda: compat.is_paused(scheduler),
                prefix_seed=self._prefix_seed(vllm_config, settings),
                watch_blocks=self._watch_blocks,
                look_up=self._look_up,
            )
            if fits and not recovers:
                self._scheduler.stats.count("num_missing_hooks")
            self._engine_id = str(transfer.engine_id)
            for variable, why in unknown_variables().items():
                logger.warning("kvferry: %s: %s; remove it, or correct its name", variable, why)
            if transfer.is_kv_consumer and fails:
                logger.warning(
                    "kvferry: kv_load_failure_policy is 'fail', so a failed hand-over fails its request; "
                    'set "kv_load_failure_policy": "recompute" to have it prefilled locally instead'
                )
        else:
            self._prefills: PrefillEvents | None = None  # where they follow the layers of the step under way
            self._layers_run_once = from_vllm.layers_run_once(vllm_config)
            groups = from_vllm.layer_groups(vllm_config, kv_cache_config)
            self._weights = EngineWeights(vllm_config, settings.model_tag)
            info = from_vllm.rank_info(vllm_config, from_vllm.model_identity_of(vllm_config, self._weights))
            name = {"service.instance.id": info.engine_id, "kvferry.rank": f"pp{info.pp_rank} tp{info.tp_rank}"}
            self._worker = WorkerHalf(
                settings,
                info,
                groups,
                loads_fail_requests=from_vllm.loads_fail_requests(vllm_config),
                tracer=open_tracer(vllm_config.observability_config.otlp_traces_endpoint, name),
            )
            self._seen_at_once = False  # what has ended is reported in ``_report``, not with a step

    def _prefix_seed(self, vllm_config: VllmConfig, settings: Settings) -> bytes:
        """As ``SchedulerHalf`` takes it."""
        if not settings.prefix_reads:
            return b""
        compat.check_prefix_reads(vllm_config, self._config)
        weights = EngineWeights(vllm_config, settings.model_tag)
        return model_seed(from_vllm.model_identity_of(vllm_config, weights))

    @staticmethod
    def stepping_alone(parallel: Any) -> bool:
        """Whether an empty step is an idle engine: not where ranks step together, or stages have batches in flight."""
        return bool(parallel.data_parallel_size == parallel.pipeline_parallel_size == 1)

    # --- class level --------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        return KVFerryStats(data=data) if data is not None else KVFerryStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFerryPromMetrics:
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- scheduler side -----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        view = from_vllm.request_view(request)
        count = self._scheduling.num_tokens_for_d(view)
        if count and view.prompt_token_ids is not None:
            compat.truncate_prompt(request, count)
            view = from_vllm.request_view(request)
        if request.kv_hints is not None:
            view = replace(view, params=with_hints(view.params, request.kv_hints))
        if self._scheduling.prefix_seed and names_sources(view.params):
            view = replace(view, content=from_vllm.kv_content(request, request.num_prompt_tokens))
        self._scheduling.on_new_request(view)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.num_new_matched_tokens(from_vllm.request_view(request), num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A hand-over carries the request's own blocks, of every transfer group."""
        return self._groups

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        block_ids = blocks.get_block_ids() if num_external_tokens else ((),) * len(self._config.kv_cache_groups)
        if num_external_tokens:
            fence(self._engine_connector, block_ids)
        self._scheduling.after_alloc(from_vllm.request_view(request), self._select(block_ids), num_external_tokens)
        compat.not_cached(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVFerryMetadata:
        idle = self.alone and scheduler_output.total_num_scheduled_tokens == 0
        computed = scheduler_output.num_scheduled_tokens.keys()
        preempted = scheduler_output.preempted_req_ids or ()
        half = self._scheduling
        ours = half.prefills and half.prefills & computed
        scheduled = from_vllm.scheduled_tokens(scheduler_output, ours, self._groups) if ours else ()
        plan = half.take_plan(idle=idle, computed=computed, preempted=preempted, scheduled=scheduled)
        if self._recovery is not None:
            self._recovery.scheduled(scheduler_output, plan)
        return KVFerryMetadata(plan)

    def reset_cache(self) -> bool:
        """``/reset_prefix_cache?reset_external=true``, and the end of ``/pause``. False: leases or loads are ending, so
        the caller must ask again."""
        if self._vllm_scheduler is not None:
            compat.fail_loads(self._vllm_scheduler)
        return self._scheduling.reset_caches()

    def has_pending_push_work(self) -> bool:
        """True has the engine take a step, also while it is paused or has no request."""
        return self._scheduling.has_urgent_plan

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        received, sent = connector_output.finished_recving, connector_output.finished_sending
        if meta is None and not received and not sent:
            return
        ours = meta if isinstance(meta, KVFerryWorkerMeta) else KVFerryWorkerMeta({})
        if self._engine_connector not in (None, self):
            due = wanted(self._vllm_scheduler, self._scheduling.reports_due(received or (), ours.ends))
            connector_output.finished_recving = received = due
        self._scheduling.loads_finished(received or (), ours.ends, ours.estimates)
        self._scheduling.lookups_answered(ours.met)
        self._scheduling.leases_ended(sent or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._steps is not None:
            self._steps.freed(block_id for ids in block_ids for block_id in ids if block_id != NULL_BLOCK)
        view, ids, completed = from_vllm.request_view(request), self._select(block_ids), from_vllm.completed(request)
        if completed and self._scheduling.prefix_seed:
            # The KV of the last token is not computed.
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            if (content := from_vllm.kv_content(request, computed)) is not None:
                self._scheduling.offer_prefix(content, ids[0], self._scheduling.asked_prefixes(view.request_id))
        return self._scheduling.request_finished(view, ids, completed=completed)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM calls this also where it binds the manager of the KV cache."""
        self._block_pool = gpu_block_pool

    def _watch_blocks(self, block_ids: Iterable[int]) -> None:
        """The blocks are a request's, and stay as they are: only the callback is new."""
        blocks = [self._block_pool.blocks[block_id] for block_id in block_ids]
        self._block_pool.touch(blocks)
        self._block_pool.unpin_blocks(blocks, lambda block: self._scheduling.block_reused(block.block_id))

    def _look_at(self, recovery: StepLoadRecovery, output: Any, result: Any) -> tuple[Any, Sequence[Any]]:
        """The scheduler is about to look at ``result``, the output of the step ``output``. Returns what it looks at
        instead, and the requests that have been ended with an error."""
        if self._rank_here is not None:
            result = self._rank_here._report(result)
        return result, recovery.processed(output, result)

    def _find_rank(self) -> None:
        """The only rank of the engine, before its first step: vLLM runs it in the scheduler's process, and in its
        thread. That process may have other engines, too."""
        one = self._vllm_config.parallel_config.world_size == 1
        rank = get_kv_transfer_group() if one and has_kv_transfer_group() else None
        if isinstance(rank, KVFerryConnector) and rank._vllm_config.kv_transfer_config.engine_id == self._engine_id:
            self._rank_here = rank
            if self._steps is not None:  # else nothing calls ``_look_at``
                rank._seen_at_once = self._steps.seen_at_once = True

    def _look_up(self, wanted: PromptLookup | None) -> dict[str, LookupResult] | None:
        return None if self._rank_here is None else self._rank_here._working.look_up(wanted)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        """MultiConnector tells all its children what the first of them had to tell."""
        handshakes = list(metadata.values())
        told = [handshake.addresses for handshake in handshakes if isinstance(handshake, KVFerryHandshake)]
        ours = set().union(*told)
        if ours:
            self._scheduling.set_ranks(ours)
            self._find_rank()
        elif handshakes:
            logger.error(
                "kvferry: the workers' addresses did not come (%s did); nothing can be handed over from here. "
                "Under MultiConnector, list KVFerryConnector first",
                type(handshakes[0]).__name__,
            )

    set_xfer_handshake_metadata = set_xfer_handshake_metadata_pp_aware

    @property
    def _engine_connector(self) -> Any:
        """In the scheduler's process: this connector, or MultiConnector; ``None`` where vLLM's scheduler is unknown."""
        return getattr(self._vllm_scheduler, "connector", None)

    def _select(self, block_ids: Iterable[Any]) -> list[Any]:
        every = list(block_ids)
        return [every[index] for index in self._groups]

    @property
    def _scheduling(self) -> SchedulerHalf:
        assert self._scheduler is not None, "called on a worker"
        return self._scheduler

    # --- worker side --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        compat.permit_amx()
        places = partial(from_vllm.element_order, self._vllm_config)
        runner = hooks.find_model_runner()
        if runner is not None:
            hooks.before_step(runner, self, self.before_step)
            self._weights.follow(runner, self, self._weights_changed)
        drafts = from_vllm.draft_layers(self._vllm_config, runner)
        self._working.register(kv_caches, int(self._config.num_blocks), places, drafts)

    def _weights_changed(self) -> None:
        self._working.change_model(from_vllm.model_identity_of(self._vllm_config, self._weights))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """0.33 asks. ``compat.check_config`` refuses sleep mode with earlier releases, which do not tell of it."""
        return True

    def unregister_kv_caches(self) -> None:
        """0.33: the engine is about to unmap the caches. Requests and leases have ended then, unless it was told to
        keep them."""
        self._working.unregister()

    def restore_kv_caches(self) -> None:
        """0.33: the caches are mapped again, at the same addresses. vLLM then asks for the handshake metadata again."""
        self._working.restore()

    def before_step(self, scheduler_output: Any) -> None:
        """Start a step's loads when the model runner gets the step, not when it has prepared it: a millisecond or two
        for a new request, and more for a long one."""
        metadata = scheduler_output.kv_connector_metadata
        if isinstance(metadata, KVFerryMetadata) and not metadata.plan.nothing:
            if joins := {load.request_id for load in metadata.plan.joins}:
                self._working.join(metadata.plan, others=scheduler_output.num_scheduled_tokens.keys() != joins)
            if metadata.plan.stops or metadata.plan.reused:
                self._working.take_back(metadata.plan)
            # The runner may give the device work on new blocks first; loads ``behind`` it are posted after it.
            if not any(load.behind for load in metadata.plan.loads):
                self._post(metadata.plan)

    def _post(self, plan: StepPlan) -> None:
        if plan is not self._posted:
            self._posted = plan
            self._working.post(plan)

    def get_handshake_metadata(self) -> KVFerryHandshake | None:
        address = self._working.address
        return None if address is None else KVFerryHandshake(from_vllm.addresses(self._vllm_config, address))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        plan = connector_metadata.plan
        if plan.nothing:
            self._working.post(plan)
            self._prefills = None
            return
        working = self._working
        self._post(plan)
        working.begin_step()
        prefills = working.prefills
        # With micro-batches or a draft model a layer may run more than once in a step.
        self._prefills = prefills if plan.prefill_chunks and self._layers_run_once else None

    def _report(self, result: Any) -> Any:
        """``result``, the output of a step, with what has ended by now on this rank, the engine's only one. The
        scheduler is about to look at it, and would see what comes with a later step's output two steps later."""
        working = self._working
        results = working.take_results()
        if not (results.received or results.sent or working.has_news):
            return result
        self._ends |= results.ends
        told = KVConnectorOutput(
            finished_sending=results.sent or None,
            finished_recving=results.received or None,
            kv_connector_stats=self.get_kv_connector_stats(),
            kv_connector_worker_meta=self._news(None),
            failed_recving=results.failed,
        )
        return compat.with_report(result, told)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = StepResults() if self._seen_at_once else self._working.take_results()
        self._ends |= results.ends
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def build_connector_worker_meta(self) -> KVFerryWorkerMeta | None:
        if not (self._working.has_news or self._ends):
            return None
        outcome = self._working.take_outcome()
        if self._seen_at_once:
            return None if outcome is None else KVFerryWorkerMeta(outcome=outcome)
        return self._news(outcome)

    def _news(self, outcome: StepOutcome | None) -> KVFerryWorkerMeta | None:
        ends, self._ends = self._ends, {}
        estimates, met = self._working.take_estimates(), self._working.take_lookups()
        # Below MultiConnector its configuration counts, of which we see nothing: then no load is taken inside a step.
        if not compat.speaks_for_engine(self):
            estimates, outcome = {}, None
        news = estimates or outcome or met or ends
        return KVFerryWorkerMeta(estimates, outcome, met, ends) if news else None

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        """vLLM asks on the workers when a step is launched, and in the scheduler when its output has been processed."""
        half = self._scheduler or self._worker
        figures = None if half is None else half.take_stats()
        return None if figures is None else KVFerryStats(data=cast(dict[str, Any], figures))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads were started before the step: in ``before_step``, or in ``bind_connector_metadata``."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """vLLM calls this before the attention of each layer, but for CUDA graphs of the whole forward."""
        if self._worker is not None and self._prefills is not None:
            self._prefills.layer_begins()

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """P's blocks are read in place, also while P computes."""
        if self._prefills is not None:
            self._prefills.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Nothing is waited for: the transfer thread sees when the device has computed the step. The V1 model runner
        calls this also while an error leaves the forward, from a ``finally``."""
        prefills = self._working.prefills
        if prefills is not None and prefills.under_way:
            if sys.exc_info()[0] is None:
                prefills.end_step()
            else:
                prefills.fail_step()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            if parent_process() is not None:
                # vLLM and the interpreter now look through all objects several times, 1 s each, for a process that
                # ends: more than vLLM waits for it.
                gc.freeze()

    @property
    def _working(self) -> WorkerHalf:
        assert self._worker is not None, "called on the scheduler"
        return self._worker


def check_early() -> None:
    """Refuse before vLLM loads the weights what would be refused after: vLLM imports this module for the first time in
    the constructor of its configuration. What it refuses, the halves and ranks would refuse, too, at their start.
    A worker may import it while a model runner loads its model: too late, and ranks that all try their ports would
    refuse each other.

    Raises:
        KVFerryError: a setting, the key file, a data plane that is named or a port cannot be used, or MultiConnector
            has several KVFerryConnectors; one line.
    """
    if (found := hooks.find_config()) is None or hooks.find_model_runner() is not None:
        return
    config, transfer = found
    try:
        settings = load_settings(transfer.kv_connector_extra_config)
        compat.check_children(config)
        compat.check_options(config)
        ranks = compat.ranks_here(config)
        if ranks is not None:
            port = settings.side_channel_port
            ports = range(port, port + ranks) if port and ranks else (0,)
            check_before_caches(settings, MemoryKind(current_platform.device_type), ports)
    except ConfigError as error:
        raise KVFerryError(str(error)) from None  # of a ValueError, pydantic would make several lines


# MultiConnector looks its children up by name when it adds up their figures, also where they were named by module path.
plugin.register()
check_early()
