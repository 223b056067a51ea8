"""vLLM's real scheduler and KVFerry's two halves in one process, stepped by hand; only the forward is made up.

The forward writes labels into the scheduled tokens' KV. A label says layer, KV head, position, token id, element, and
which engine computed it, so a test can tell what D loaded from what D computed, and any other bytes are a fault.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.connector.vllm import compat
from kvferry.connector.vllm.step_load_recovery import filled_blocks
from kvferry.connector.vllm.worker_meta import standing_loads
from tests.support.clocks import put_forward
from tests.support.inside import consumer_of, leases_of, thread_of, worker_half
from tests.vllm.labelled import BLOCK, HEAD_SIZE, HEADS, LAYERS
from tests.vllm.stepped_config import engine_config
from tests.vllm.stepped_forward import Forward, Origins
from tests.vllm.stepped_model import RunnerMemory
from tests.vllm.stepped_rank import Worker

PREFILL: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What routers written for vLLM's NIXL connector send with the prefill leg."""


@dataclass
class Answer:
    """What the front end got of one request."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    params: dict[str, Any] | None = None
    external: int | None = None
    """Prompt tokens that vLLM counted as loaded from outside."""
    cached: int | None = None
    """Prompt tokens of which a client is told that they were cached."""


class Engine:
    """One engine. ``step`` is what EngineCore does in one turn; ``origin`` marks the KV that it computes."""

    _numbers = iter(range(1 << 30))

    def __init__(
        self,
        model: ModelConfig,
        origin: int,
        *,
        role: str = "kv_both",
        policy: str = "recompute",
        extra: dict[str, Any] | None = None,
        tp: int = 1,
        runner: str = "v1",
        num_blocks: int = 41,
        max_batched: int = 256,
        connector: str = "KVFerryConnector",
        module: str | None = "kvferry.connector.vllm.adapter",
        spec: KVCacheSpec | None = None,
        ahead: int = 0,
        drafts: int = 0,
        scheduling: str = "fcfs",
        dp_rank: int | None = None,
        block: int = BLOCK,
        window: int | None = None,
        dcp: int = 1,
        interleave: int = 1,
        layout: str = "HND",
        engine_id: str | None = None,
    ) -> None:
        """``ahead``: steps that are scheduled and run before the output of the first is looked at, as with async
        scheduling, vLLM's default on GPUs. ``drafts``: tokens of speculative decoding. ``dp_rank``: of an engine with
        several data-parallel ranks, each of which has a scheduler of its own. ``window``: the last layer attends to as
        many tokens only, and has a block table of its own. ``dcp``: tensor-parallel ranks that hold the same heads and
        share tokens out, ``interleave`` each in turn. ``layout``: whether heads or tokens come first in a
        block."""
        self.layout = layout
        self.dcp, self.interleave = dcp, interleave
        self.origin, self.tp, self.runner, self.num_blocks = origin, tp, runner, num_blocks
        self.block, self.window = block, window
        self.layers = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]
        self.config = engine_config(
            model, role=role, policy=policy, extra=extra or {}, tp=tp, max_batched=max_batched, connector=connector,
            module=module, ahead=bool(ahead), drafts=drafts, scheduling=scheduling, dp_rank=dp_rank, block=block,
            dcp=dcp, interleave=interleave, engine_id=engine_id,
        )  # fmt: skip
        self.config.cache_config.num_gpu_blocks = num_blocks
        self._ahead = ahead
        self._outputs: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._memory = RunnerMemory(drafts)
        self.before_update: Callable[[Any], None] | None = None
        """Called with a step between its forward and the look at its output, where EngineCore takes aborts."""
        self.device: Callable[[], None] = lambda: None
        """Called at the beginning of a forward: what a device waits for while its thread goes on."""
        self.at_layer: Callable[[int], None] = lambda layer: None
        """Called before the attention of a layer reads."""
        self._lost: set[int] = set()  # blocks that loads inside steps failed to fill, until the scheduler hears of it
        # Requests whose forward has read other than right KV, in which blocks, and where.
        self.wrong: list[tuple[str, set[int], str]] = []
        heads = max(1, HEADS // tp)
        form = {"block_size": block, "num_kv_heads": heads, "head_size": HEAD_SIZE, "dtype": torch.float32}
        groups = [KVCacheGroupSpec(self.layers, spec or FullAttentionSpec(**form))]
        if window is not None:
            windowed = SlidingWindowSpec(sliding_window=window, **form)
            groups[0].layer_names = self.layers[:-1]
            groups.append(KVCacheGroupSpec(self.layers[-1:], windowed))
        self.table_of = [0] * (LAYERS - 1) + [len(groups) - 1]
        self.kv_config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(block * dcp, sha256)
        structured = StructuredOutputManager(self.config)
        kind = AsyncScheduler if ahead else Scheduler
        self.scheduler = kind(self.config, self.kv_config, structured, block_size=block * dcp, log_stats=True)
        if ahead:  # with async scheduling the drafts are a model's, which writes KV ahead
            self.scheduler.num_lookahead_tokens = drafts
        self.connector: Any = self.scheduler.connector
        self.workers: list[Worker] = []
        try:
            self.workers += [Worker(self, rank) for rank in range(tp)]
        except BaseException:
            self.close()
            raise
        handshakes = {(0, worker.rank): worker.connector.get_handshake_metadata() for worker in self.workers}
        if all(metadata is not None for metadata in handshakes.values()):
            self.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, tp)
        self._pipe = multiprocessing.Pipe()
        self.answers: dict[str, Answer] = {}
        self.origins: dict[str, Origins] = {}
        self.loads: Counter[str] = Counter()
        self.step_loads: Counter[str] = Counter()
        """Those that the step they are told in computes with, and that no worker reports."""
        self.streamed_loads: set[str] = set()
        """Those of prompts that P still computes when D plans them."""
        self.fallen_loads: set[str] = set()
        """Those inside steps that have failed."""
        self.leases: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()
        """Tokens that forwards of this engine computed, by request."""
        self.drafts_kept = 0
        self.stats: list[Any] = []
        self.baseline = self.free_blocks

    # --- requests -----------------------------------------------------------------------------------------------

    def add(
        self,
        ids: Sequence[int],
        params: object = None,
        *,
        request_id: str | None = None,
        max_tokens: int = 1,
        salt: str | None = None,
        rejected: bool = False,
        priority: int = 0,
        lora: LoRARequest | None = None,
        **sampling: Any,
    ) -> str:
        """Submit a prompt; the request's id. ``params`` are its kv_transfer_params.

        ``rejected``: as vLLM's front end submits a request that it refused, only to have it aborted.
        """
        request_id = request_id or f"req-{next(self._numbers)}"
        extra = None if params is None else {"kv_transfer_params": params}
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(ids),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **sampling),
            pooling_params=None,
            lora_request=lora,
            cache_salt=salt,
            block_hasher=self._hasher,
            priority=priority,
            abort_immediately=rejected,
        )
        self.answers[request_id] = Answer()
        self.scheduler.add_request(request)
        if rejected:
            self.abort(request_id)
        return request_id

    def abort(self, request_id: str) -> None:
        """What a client that disconnects leads to."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def preempt(self, request_id: str) -> None:
        """What the scheduler does to a running request when it is out of blocks."""
        request = self.scheduler.requests[request_id]
        self.scheduler.running.remove(request)
        more = {}
        if compat.DROPS_STALE_OUTPUT:
            more["drop_stale_output"] = self.scheduler.requires_kv_delivery
        self.scheduler._preempt_request(request, time.monotonic(), **more)

    def status(self, request_id: str) -> RequestStatus | None:
        request = self.scheduler.requests.get(request_id)
        return None if request is None else request.status

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, tell the workers, run the forward, aggregate, update: one turn of EngineCore."""
        step = self.scheduler.schedule()
        self._note(step.kv_connector_metadata)
        step.kv_connector_metadata = self._travel(step.kv_connector_metadata)
        self.computed.update(step.num_scheduled_tokens)
        self._memory.begin(step)
        turns = {name: self._memory.turn(self.scheduler.requests[name], step) for name in step.num_scheduled_tokens}
        carried = [worker.run(step, lambda w: Forward(self, w, turns)) for worker in self.workers]
        sampled = self._memory.sample(turns, {request_id for request_id, _, _ in self.wrong})
        self.drafts_kept += sum(max(0, len(tokens) - 1) for tokens in sampled)
        index = {request_id: number for number, request_id in enumerate(turns)}
        merged = self._aggregator.aggregate(
            [ModelRunnerOutput(list(turns), index, sampled, kv_connector_output=kv) for kv in carried]
        )
        assert merged is not None
        if merged.kv_connector_output is not None:
            self._lost |= merged.kv_connector_output.invalid_block_ids
        self._lost |= self._not_filled(step, merged)
        for _, blocks, text in self.wrong:  # what vLLM makes of what it was told is seen in the answers
            assert self._lost & blocks, text
        self.wrong.clear()
        self._outputs.append((step, merged))
        while self._outputs and (len(self._outputs) > self._ahead or not step.total_num_scheduled_tokens):
            self._update(*self._outputs.popleft())
        if not self._ahead and self.config.speculative_config is not None:
            self.scheduler.update_draft_token_ids(self._memory.drafted(turns))

    def _update(self, step: Any, merged: ModelRunnerOutput) -> None:
        if self.before_update is not None:
            self.before_update(step)
        if merged.kv_connector_output is not None:
            self._lost -= merged.kv_connector_output.invalid_block_ids
        self._lost -= self._not_filled(step, merged)
        if merged.kv_connector_output is not None and merged.kv_connector_output.kv_connector_stats:
            self.stats.append(merged.kv_connector_output.kv_connector_stats)
        for client in self.scheduler.update_from_output(step, merged).values():
            for output in client.outputs:
                answer = self.answers[output.request_id]
                answer.tokens += output.new_token_ids
                answer.params = output.kv_transfer_params or answer.params
                if output.finish_reason is not None:
                    answer.finish = str(output.finish_reason)
                if output.prefill_stats is not None:
                    answer.external = output.prefill_stats.num_external_cached_tokens
                    answer.cached = output.prefill_stats.num_cached_tokens

    def _not_filled(self, step: Any, merged: ModelRunnerOutput) -> set[int]:
        """The blocks that loads inside the step failed to fill."""
        carried = merged.kv_connector_output
        stand = standing_loads(carried.kv_connector_worker_meta if carried else None)
        loads = getattr(getattr(step.kv_connector_metadata, "plan", None), "loads", ())
        failed = [load for load in loads if load.now and stand[load.request_id] < self.tp]
        self.fallen_loads.update(load.request_id for load in failed)
        return set().union(*(filled_blocks(load, self.block * self.dcp) for load in failed))

    def _note(self, metadata: Any) -> None:
        for child in getattr(metadata, "metadata", (metadata,)):
            plan = getattr(child, "plan", None)
            if plan is not None:
                self.loads.update(load.request_id for load in plan.loads if not load.now)
                self.step_loads.update(load.request_id for load in plan.loads if load.now)
                self.streamed_loads.update(load.request_id for load in plan.loads if load.step_tokens)
                self.leases.update(lease.request_id for lease in plan.leases)

    def _travel(self, metadata: Any) -> Any:
        """Metadata goes to workers in other processes; here through a pipe as well."""
        self._pipe[0].send(metadata)
        return self._pipe[1].recv()

    def block_tables(self, request_id: str) -> tuple[list[int], ...]:
        """Of a request."""
        tables: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return tables

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def all_loads(self) -> Counter[str]:
        """Those beside the steps and inside them; which of the two a load was depends on how fast others were."""
        return self.loads + self.step_loads

    @property
    def idle(self) -> bool:
        """Nothing left: no request, all blocks free, every load and every lease reported by every worker."""
        all_reported = all(w.received == self.loads and w.sent == self.leases for w in self.workers)
        all_reported = all_reported and not self._outputs
        return all_reported and not self.scheduler.requests and self.free_blocks == self.baseline

    def why_busy(self) -> str:
        requests = {name: str(request.status) for name, request in self.scheduler.requests.items()}
        reported = [(dict(w.received), dict(w.sent)) for w in self.workers]
        return (
            f"requests {requests}, {self.free_blocks} of {self.baseline} blocks free, loads {dict(self.loads)}, "
            f"leases {dict(self.leases)}, workers reported (received, sent) {reported}"
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()
        with suppress(AttributeError):
            self.scheduler.shutdown()
        for end in getattr(self, "_pipe", ()):
            end.close()


def run(engines: Sequence[Engine], until: Callable[..., bool], seconds: float = 300.0) -> None:
    """Step the engines in turn until the condition holds; fails where it does not in time."""
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "not in time: " + "; ".join(engine.why_busy() for engine in engines)
        for engine in engines:
            engine.step()
        time.sleep(0.001)


def settle(*engines: Engine, seconds: float = 300.0) -> None:
    """Step until nothing is left anywhere, and once more: what is reported twice kills vLLM's scheduler."""
    run(engines, lambda: all(engine.idle for engine in engines), seconds)
    for engine in engines:
        engine.step()
        assert engine.idle, engine.why_busy()
        loads = engine.all_loads
        assert max([0, *loads.values()]) <= 1, f"loaded twice: {loads}"


def prefill(engine: Engine, ids: Sequence[int], **kwargs: Any) -> dict[str, Any]:
    """Run a prompt on P; the kv_transfer_params that its answer has."""
    request_id = engine.add(ids, PREFILL, **kwargs)
    run([engine], lambda: engine.answers[request_id].finish is not None)
    params = engine.answers[request_id].params
    assert params is not None, "P handed nothing over"
    return params


def transfer_thread_of(engine: Engine, rank: int = 0) -> Any:
    """The transfer thread's object of one rank, to hold its hand in tests of faults."""
    return thread_of(worker_half(engine.workers[rank]))


def let_time_pass(engine: Engine, seconds: float) -> None:
    """For its transfer threads it is ``seconds`` later from now on: a lease ends at a chosen moment."""
    for rank in range(engine.tp):
        put_forward(transfer_thread_of(engine, rank), seconds)


def renew_after(p: Engine, d: Engine, seconds: float) -> None:
    """It is ``seconds`` later for both, and D has renewed its leases on P meanwhile."""

    def deadlines() -> list[float]:
        return [held.lifetime.state.deadline for held in list(leases_of(transfer_thread_of(p)).values())]

    eventually(lambda: bool(consumer_of(transfer_thread_of(d)).leases.kept))  # what is claimed later is renewed later
    before = deadlines()
    assert before, "there is a lease to renew"
    let_time_pass(d, seconds)
    eventually(lambda: all(now > then for now, then in zip(deadlines(), before, strict=True)))
    let_time_pass(p, seconds)


def eventually(condition: Callable[..., object], seconds: float = 300.0) -> None:
    """Wait for a transfer thread without stepping any engine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)
