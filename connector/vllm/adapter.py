"""``KVFerryConnector``: vLLM's connector contract, method by method, over the scheduler half and the worker half.

Plans and leases go to the mover in ``bind_connector_metadata``, which precedes the forward in every release;
``start_load_kv`` runs after it in 0.32, a whole prefill later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvferry.connector.config import load_settings
from kvferry.connector.engine.scheduler import SchedulerHalf
from kvferry.connector.engine.worker import WorkerHalf
from kvferry.connector.protocol.step_plan import Load, RankAddress, StepPlan, unpack_ids
from kvferry.connector.protocol.transfer_estimate import EstimateKey, TransferEstimate
from kvferry.connector.vllm import compat
from kvferry.connector.vllm.prometheus import KVFerryPromMetrics, KVFerryStats
from kvferry.transport.host import host_id

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvferry.adapter")


@dataclass
class KVFerryMetadata(compat.KVConnectorMetadata):  # type: ignore[misc]
    """One step's plan on its way to the workers."""

    plan: StepPlan


@dataclass
class KVFerryHandshake(compat.KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker listens, on its way to the scheduler."""

    address: RankAddress


@dataclass
class KVFerryWorkerMeta(compat.KVConnectorWorkerMetadata):  # type: ignore[misc]
    """How long workers' hand-overs took, on its way to the scheduler. ``lost``: one that its step computed with has
    failed."""

    estimates: dict[EstimateKey, TransferEstimate]
    lost: bool = False

    def aggregate(self, other: KVFerryWorkerMeta) -> KVFerryWorkerMeta:
        return KVFerryWorkerMeta(self.estimates | other.estimates, self.lost or other.lost)


class KVFerryConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):  # type: ignore[misc]
    """The plug-in. One instance in the scheduler's process, one in each worker's."""

    if compat.P2P_SOURCE is not None:
        _cache_hit_source = compat.P2P_SOURCE

    def __init__(self, vllm_config: VllmConfig, role: compat.KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = load_settings(transfer.kv_connector_extra_config)
        compat.check_config(vllm_config, kv_cache_config)
        self._config = kv_cache_config
        self._groups = compat.transfer_group_ids(kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._failed_blocks: dict[str, set[int]] = {}
        self._invalid: set[int] = set()
        self._now: list[Load] = []  # that the step under way computes with
        self._lost = False
        self._pool: Any = None
        if role == compat.KVConnectorRole.SCHEDULER:
            parallel = vllm_config.parallel_config
            self._alone = self.stepping_alone(parallel)
            fails = compat.loads_fail_requests(vllm_config)
            self._scheduler = SchedulerHalf(
                settings,
                str(transfer.engine_id),
                compat.block_tables(vllm_config, kv_cache_config),
                tp_size=parallel.tensor_parallel_size,
                pp_size=parallel.pipeline_parallel_size,
                produces=transfer.is_kv_producer,
                consumes=transfer.is_kv_consumer,
                host_id=host_id(),
                lookahead=compat.prefill_lookahead(vllm_config),
                # Where a load fails in the step that computes with it, the request must fail: recomputing, vLLM would
                # go on with what the next step, scheduled by then, made of it. It must find it by its blocks, too.
                step_loads=self._alone and fails and len(kv_cache_config.kv_cache_groups) == 1,
            )
            if transfer.is_kv_consumer and fails:
                logger.warning(
                    "kvferry: kv_load_failure_policy is 'fail', so a failed hand-over fails its request; "
                    'set "kv_load_failure_policy": "recompute" to have it prefilled locally instead'
                )
        else:
            tables = compat.block_tables(vllm_config, kv_cache_config)
            self._block_size = tables[0].block_size if tables else 1
            groups = compat.layer_groups(vllm_config, kv_cache_config)
            self._worker = WorkerHalf(settings, compat.rank_info(vllm_config, settings.model_tag), groups)

    @staticmethod
    def stepping_alone(parallel: Any) -> bool:
        """Whether an empty step is an idle engine: not where ranks step together, or stages have batches in flight."""
        return bool(parallel.data_parallel_size == parallel.pipeline_parallel_size == 1)

    # --- class level --------------------------------------------------------------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Any layout is carried; the engine keeps its own choice."""
        return None

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
        view = compat.request_view(request)
        count = self._scheduling.num_tokens_for_d(view)
        if count and view.prompt_token_ids is not None:
            compat.truncate_prompt(request, count)
        self._scheduling.on_new_request(view)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.num_new_matched_tokens(compat.request_view(request), num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A hand-over carries the request's own blocks, of every transfer group."""
        return self._groups

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        block_ids = blocks.get_block_ids() if num_external_tokens else ((),) * len(self._config.kv_cache_groups)
        self._scheduling.after_alloc(compat.request_view(request), self._select(block_ids), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVFerryMetadata:
        idle = self._alone and scheduler_output.total_num_scheduled_tokens == 0
        computed = scheduler_output.num_scheduled_tokens.keys()
        return KVFerryMetadata(self._scheduling.take_plan(idle=idle, computed=computed))

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        ours = told if isinstance(told, KVFerryWorkerMeta) else None
        if ours is not None and ours.lost:
            # Its blocks have been in the prefix cache since the step was scheduled. vLLM fails the requests that it
            # finds running on them; of one that was aborted meanwhile it forgets nothing, nor what was made from it.
            self._pool.evict_blocks(set(range(self._pool.num_gpu_blocks)))
        self._scheduling.loads_finished(connector_output.finished_recving or (), ours.estimates if ours else None)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool
        self._scheduling.free_blocks = gpu_block_pool.get_num_free_blocks

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        view, ids = compat.request_view(request), self._select(block_ids)
        return self._scheduling.request_finished(view, ids, completed=compat.completed(request))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._set_ranks(metadata.values())

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._set_ranks(metadata.values())

    def _set_ranks(self, told: Iterable[Any]) -> None:
        """MultiConnector tells all its children what the first of them had to tell."""
        handshakes = list(told)
        ours = [handshake.address for handshake in handshakes if isinstance(handshake, KVFerryHandshake)]
        if ours:
            self._scheduling.set_ranks(ours)
        elif handshakes:
            logger.error(
                "kvferry: the workers' addresses did not come (%s did); nothing can be handed over from here. "
                "Under MultiConnector, list KVFerryConnector first",
                type(handshakes[0]).__name__,
            )

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
        places = partial(compat.element_order, self._vllm_config)
        self._working.register(kv_caches, compat.num_blocks(self._config), places)

    def get_handshake_metadata(self) -> KVFerryHandshake | None:
        address = self._working.address
        return None if address is None else KVFerryHandshake(address)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        plan = connector_metadata.plan
        self._working.post(plan)  # before anything else: it is what the request waits for
        if not compat.HAS_TRANSFER_RESULTS:
            self._failed_blocks |= {load.request_id: self._filled(load) for load in plan.loads if not load.now}
        self._now = [load for load in plan.loads if load.now]
        self._working.begin_now()

    def _finish_now(self) -> None:
        """See whether what the step computes with has come. vLLM asks for results after it has given its device the
        forward, and before it tells of any token."""
        loads, self._now = self._now, []
        failed = self._working.finish_now()
        self._lost |= bool(failed)
        for load in loads:
            if load.request_id in failed:
                self._invalid |= self._filled(load)

    def _filled(self, load: Load) -> set[int]:
        """The blocks that a load fills; not those of a local prefix hit before them, which others use too."""
        return set(unpack_ids(load.block_ids[0])[load.tokens[0][0] // self._block_size :].tolist())

    def get_transfer_results(self, finished_req_ids: set[str]) -> compat.KVConnectorTransferResults:
        self._finish_now()
        results = self._working.take_results()
        return compat.KVConnectorTransferResults(results.sent, results.received, results.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """0.26: failures are told by block id, in the same step."""
        self._finish_now()
        results = self._working.take_results()
        for request_id in results.received:
            blocks = self._failed_blocks.pop(request_id, set())
            if request_id in results.failed:
                self._invalid |= blocks
        return results.sent or None, results.received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> KVFerryWorkerMeta | None:
        estimates, lost = self._working.take_estimates(), self._lost
        self._lost = False
        # Below MultiConnector its configuration counts, of which we see nothing: then no load is taken inside a step.
        return KVFerryWorkerMeta(estimates, lost) if (estimates or lost) and compat.speaks_for_engine(self) else None

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        if self._worker is None or self._worker.rank_context is None:
            return None
        return KVFerryStats.drain(self._worker.rank_context.stats)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads were started in ``bind_connector_metadata``."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Hand-overs are whole; nothing to wait for per layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """P's blocks are read in place once the prompt is finished."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    @property
    def _working(self) -> WorkerHalf:
        assert self._worker is not None, "called on the scheduler"
        return self._worker


# MultiConnector looks its children up by name when it adds up their figures, also where they were named by module path.
compat.register_connector("KVFerryConnector", __name__)
