"""vLLM's real scheduler and KVFerry's two halves in one process, stepped by hand; only the forward is made up.

The forward writes labels into the scheduled tokens' KV. A label says layer, KV head, position, token id, element, and
which engine computed it, so a test can tell what D loaded from what D computed, and any other bytes are a fault. Every
step checks all KV that it reads, and every token that a client gets.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvferry.connector.vllm import from_vllm
from kvferry.connector.vllm.step_load_recovery import filled_blocks
from kvferry.connector.vllm.worker_meta import load_ends
from kvferry.connector.wire.params import from_p2p, wants_load, wants_prefill
from tests.support.inside import request_phase, scheduler_half, thread_of, worker_half
from tests.support.ranks import put_forward
from tests.support.tiny_model import ModelSpec, build_model
from tests.vllm.labelled import BLOCK, CONTENT, HEAD_SIZE, HEADS, LAYERS, labels, next_token

PREFILL: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""What routers written for vLLM's NIXL connector send with the prefill leg."""
PATIENT: dict[str, Any] = {"lease_seconds": 1800.0, "handover_timeout_seconds": 600.0}
"""Times that no test reaches: what ends or is freed has ended or been released, on a loaded machine as well."""
ROOM = {"slot_bytes": 64 << 10, "staging_bytes": 1 << 20}
"""Small staging slots: even a short prompt is several chunks."""
KVFERRY = {
    "kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.connector.vllm.adapter",
    "kv_role": "kv_both",
}  # fmt: skip
"""As a child of MultiConnector."""
RUNNERS = ("v1", "v2")
"""vLLM's two model runners. V1 runs attention from Python, where a connector is
asked for each layer; V2 replays a graph of the whole forward, and ``v2 eager`` is V2 without a graph."""
MAX_LENGTH = 512
WRONG = 1
"""What the model says after wrong KV; after right KV it never does."""


def tiny_model(folder: Path, heads: int = HEADS) -> ModelConfig:
    """vLLM's configuration of a model of a few kilobytes, which is written to ``folder``. Nothing reads its weights."""
    spec = ModelSpec(
        layers=LAYERS, hidden=HEAD_SIZE * max(4, heads), heads=heads, kv_heads=HEADS, head_dim=CONTENT // 2,
        intermediate=32, vocabulary=300, max_tokens=1024,
    )  # fmt: skip
    model = str(build_model(folder, spec))
    return ModelConfig(model=model, tokenizer=model, dtype="float32", max_model_len=MAX_LENGTH, seed=0)


# --- the model runner and its forward -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One request in one step: tokens ``ids[start:]`` are fed, the last ``len(drafts)`` of which are drafts.
    ``complete``: all that is known of the request is fed, so the step samples."""

    ids: list[int]
    start: int
    drafts: list[int]
    complete: bool

    def sampled(self) -> list[int]:
        """The model's next token, and those after it as far as the drafts were right."""
        if not self.complete:
            return []
        known = self.ids[: len(self.ids) - len(self.drafts)]
        tokens = [next_token(known)]
        for draft in self.drafts:
            if draft != tokens[-1]:
                break
            tokens.append(next_token([*known, *tokens]))
        return tokens


class RunnerMemory:
    """Each request's tokens and drafts, as a model runner has them that may be a step ahead of the scheduler. With
    speculative decoding it feeds drafts, keeps those that the model agrees with, and computes the rest anew."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._known: dict[str, list[int]] = {}
        self._drafts: dict[str, list[int]] = {}

    def begin(self, step: Any) -> None:
        """What was sampled before a preemption and not told counts no more."""
        for request_id in {new.req_id for new in step.scheduled_new_reqs} | step.scheduled_cached_reqs.resumed_req_ids:
            self._known.pop(request_id, None)
            self._drafts.pop(request_id, None)

    def turn(self, request: Request, step: Any) -> Turn:
        """What this step feeds of a request. The scheduler counts drafts of a step under way as computed, the runner
        knows which of them were right."""
        count = step.num_scheduled_tokens[request.request_id]
        known, told = self._known.get(request.request_id, []), list(request.all_token_ids)
        known = known if known[: len(told)] == told else told
        places = len(step.scheduled_spec_decode_tokens.get(request.request_id, ()))
        start = min(request.num_computed_tokens - count, len(known) - 1)
        drafts = [*self._drafts.get(request.request_id, ()), *[0] * places][:places]  # vLLM pads a new request's first
        return Turn([*known, *drafts][: start + count], start, drafts, start + count - places >= len(known))

    def sample(self, turns: dict[str, Turn], wrong: Collection[str]) -> list[list[int]]:
        """The step's tokens by request; drafts for the next one are made after them. ``wrong``: requests that the step
        computed from wrong KV."""
        sampled = []
        for request_id, turn in turns.items():
            tokens = [WRONG] * len(turn.sampled()) if request_id in wrong else turn.sampled()
            sampled.append(tokens)
            self._drafts[request_id] = []
            if turn.complete:
                self._known[request_id] = [*turn.ids[: len(turn.ids) - len(turn.drafts)], *tokens]
                self._drafts[request_id] = self._draft(self._known[request_id])
        return sampled

    def _draft(self, known: list[int]) -> list[int]:
        """Some right, then some wrong: all are found out, at every length."""
        ids, wrong = [*known], len(known) % 3
        for number in range(self._num_drafts):
            ids.append(1 if number >= self._num_drafts - wrong else next_token(ids))
        return ids[len(known) :]

    def drafted(self, turns: dict[str, Turn]) -> DraftTokenIds:
        """What the engine asks for after a step, where its scheduler is not ahead."""
        return DraftTokenIds(list(turns), [list(self._drafts[request_id]) for request_id in turns])


@dataclass
class Origins:
    """Where the KV below the first computed token came from, at the request's first forward."""

    ours: int
    theirs: int


class Forward:
    """One step of one rank: ``update`` and ``attend`` for each layer, then ``finish``."""

    def __init__(self, engine: Engine, worker: Worker, turns: dict[str, Turn]) -> None:
        self.engine, self.worker, self.turns = engine, worker, turns
        self.tables = {request_id: engine.block_tables(request_id) for request_id in turns}
        self._found: dict[str, dict[int, torch.Tensor]] = {request_id: {} for request_id in turns}
        engine.device()

    def update(self, layer: int) -> None:
        """Write what the step computes."""
        for request_id, turn in self.turns.items():
            self.worker.write(self.tables[request_id], turn.start, turn.ids[turn.start :], [layer])

    def attend(self, layer: int) -> None:
        """Look at all KV that the step reads."""
        self.engine.at_layer(layer)
        for request_id, turn in self.turns.items():
            stop = len(self.worker.held(turn.start))
            self._found[request_id][layer] = self.worker.kv(self.tables[request_id], 0, stop, [layer])[0]

    def finish(self) -> None:
        """From wrong KV comes wrong KV."""
        engine, worker = self.engine, self.worker
        for request_id, turn in self.turns.items():
            tables, held = self.tables[request_id], worker.held(turn.start)
            found = torch.stack([self._found[request_id][layer] for layer in range(LAYERS)])
            differs = (found >> 1) != (labels(worker.heads, 0, turn.ids[: turn.start], 0)[:, :, held] >> 1)
            for layer, kind in enumerate(engine.kind_of):
                if kind not in ("full", "mla"):
                    window = engine.window or 0
                    first = turn.start // window * window if kind == "chunk" else max(0, turn.start - window + 1)
                    differs[layer, :, :first] = False
            wrong = differs.any(dim=3).any(dim=1).any(dim=0).nonzero().flatten().tolist()
            if wrong:
                text = f"{request_id}: wrong KV at positions {[held[n] for n in wrong]} of {turn.start}"
                engine.wrong.append((request_id, set().union(*tables) - {0}, text))
                worker.write(tables, turn.start, [token + 1 for token in turn.ids[turn.start :]])
            ours = int(((found[0] & 1) == engine.origin).all(dim=2).all(dim=0).sum())
            engine.origins.setdefault(request_id, Origins(ours, len(held) - ours))


# --- a rank -------------------------------------------------------------------------------------------------------


@contextmanager
def place_of(rank: int, tp: int = 1 << 30, dcp_rank: int = 0) -> Iterator[None]:
    """There are no process groups here; the ranks are told by hand. And no CPU attention, which packs its blocks.
    ``rank``: vLLM's, of ``tp`` tensor-parallel ranks for each of prefill context parallelism."""
    with (
        mock.patch.object(from_vllm, "get_tensor_model_parallel_rank", lambda: rank % tp),
        mock.patch.object(from_vllm, "get_pcp_group", lambda: SimpleNamespace(rank_in_group=rank // tp)),
        mock.patch.object(from_vllm, "get_dcp_group", lambda: SimpleNamespace(rank_in_group=dcp_rank)),
        mock.patch.object(from_vllm, "packing_name", lambda config, spec, layers: ""),
        mock.patch.object(from_vllm, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0)),
    ):
        yield


class Worker:
    """One rank: caches, the connector's worker half, and the calls that one of vLLM's model runners makes."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.engine, self.rank = engine, rank
        count, first = max(1, HEADS // engine.tp), rank * HEADS // engine.tp
        self.heads = range(1) if "mla" in engine.kind_of else range(first, first + count)
        self.caches = self.make_caches()
        # As vLLM's initialize_model_parallel lays the ranks of a stage out, and groups them.
        stage = torch.arange(engine.ranks).reshape(-1, engine.tp)
        self.dcp_rank = int((stage.T.reshape(-1, engine.dcp) == rank).nonzero()[0, 1])
        with place_of(rank, engine.tp, self.dcp_rank):
            self.connector: Any = KVConnectorFactory.create_connector(
                config=engine.config, role=KVConnectorRole.WORKER, kv_cache_config=engine.kv_config
            )
        self._v2: ActiveKVConnector | None = None
        self.hook_order: Sequence[int] = range(len(engine.layers))
        """In which order a forward comes to its layers."""
        if engine.runner.startswith("v2"):
            with self.group():
                self._v2 = ActiveKVConnector(engine.config, self.caches)
        else:
            self.connector.register_kv_caches(self.caches)
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def make_caches(self) -> dict[str, torch.Tensor]:
        engine = self.engine
        inner = (len(self.heads), engine.block) if engine.layout == "HND" else (engine.block, len(self.heads))
        shape = engine.num_blocks, *inner, CONTENT
        made = {name: torch.full(shape, -1.0, dtype=engine.dtype) for name in engine.layers}
        return {name: cache if engine.layout == "HND" else cache.transpose(1, 2) for name, cache in made.items()}

    @contextmanager
    def group(self) -> Iterator[None]:
        """vLLM keeps a process's connector in a global; this process has several."""
        with mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector):
            yield

    def run(self, step: Any, turns: dict[str, Turn]) -> KVConnectorOutput | None:
        """One step of the model runner: its calls to the connector around the forward."""
        idle, config = step.total_num_scheduled_tokens == 0, self.engine.config
        with self.group():
            if hasattr(self.connector, "before_step"):
                self.connector.before_step(step)  # as ``hooks.before_step`` has the runner do
            if self.engine.runner == "v1":
                self.connector.handle_preemptions(step.kv_connector_metadata)
            if self._v2 is not None:
                output = self._run_v2(self._v2, step, turns, idle)
            elif idle:
                output = KVConnectorModelRunnerMixin.kv_connector_no_forward(step, config).kv_connector_output
            else:
                late = config.speculative_config is not None  # after the drafts are made
                with (
                    self._layers(),
                    KVConnectorModelRunnerMixin._get_kv_connector_output(step, defer_finalize=late) as output,
                ):
                    self._attend(turns)
                if late:
                    KVConnectorModelRunnerMixin.finalize_kv_connector()
        if output is not None and not self.engine.one_process:
            self.note(output)
        return output

    def note(self, output: KVConnectorOutput) -> None:
        """What this rank reports."""
        self.received.update(output.finished_recving or ())
        self.sent.update(output.finished_sending or ())
        self.failed.update(output.failed_recving)

    @contextmanager
    def _layers(self) -> Iterator[None]:
        """A forward's context, in which connectors find the layers and their caches."""
        config, names = self.engine.config, self.engine.layers
        layers = {name: SimpleNamespace(kv_cache=self.caches[name]) for name in names}
        with (
            mock.patch.object(config.compilation_config, "static_forward_context", layers),
            set_forward_context({name: SimpleNamespace() for name in names}, config, slot_mapping={}),
        ):
            yield

    def _attend(self, turns: dict[str, Turn]) -> None:
        """The forward, as vLLM's attention layers run it: each writes its KV, then asks the connector, then reads."""
        made, names = self.engine.forward_class(self.engine, self, turns), self.engine.layers

        def attention(layer_name: str) -> None:
            made.attend(names.index(layer_name))

        hooked = maybe_transfer_kv_layer(attention)
        for layer in self.hook_order:
            made.update(layer)
            hooked(names[layer])
        made.finish()

    def _replay(self, turns: dict[str, Turn]) -> None:
        """The forward as a graph, of which the connector hears nothing."""
        made = self.engine.forward_class(self.engine, self, turns)
        for layer in range(len(self.engine.layers)):
            made.update(layer)
            made.attend(layer)
        made.finish()

    def _run_v2(self, kv: ActiveKVConnector, step: Any, turns: dict[str, Turn], idle: bool) -> KVConnectorOutput | None:
        if idle:
            return kv.no_forward(step).kv_connector_output
        if self.engine.runner == "v2 eager":
            with self._layers():
                kv.pre_forward(step)
                self._attend(turns)
        else:
            kv.pre_forward(step)
            self._replay(turns)
        kv.finish_forward()
        if not hasattr(kv, "finalize_step") or self.engine.config.speculative_config is None:
            return kv.post_forward(step.finished_req_ids)
        output = kv.post_forward(step.finished_req_ids, defer_finalize=True)  # 0.33: before the drafts are made
        kv.finalize_step()
        return output

    def kv(
        self, tables: Sequence[Sequence[int]], start: int, stop: int, layers: Sequence[int] = range(LAYERS)
    ) -> torch.Tensor:
        """[L,H,T,C] int32: the labels of the rank's own tokens [start, stop) in these layers, by plain indexing."""
        found = []
        for number in layers:
            ids = torch.tensor(list(tables[self.engine.table_of[number]]))
            cache = self.caches[self.engine.layers[number]].view(torch.int32)[ids]
            found.append(cache.permute(1, 0, 2, 3).reshape(len(self.heads), -1, CONTENT)[:, start:stop])
        return torch.stack(found)

    def write(
        self, tables: Sequence[Sequence[int]], start: int, ids: Sequence[int], layers: Sequence[int] = range(LAYERS)
    ) -> None:
        """What a forward leaves in the caches of these layers."""
        held = torch.tensor(self.held(start + len(ids)), dtype=torch.int64)
        places = (held >= start).nonzero().flatten()
        for number, values in zip(layers, labels(self.heads, start, ids, self.engine.origin, layers), strict=True):
            table = torch.tensor(list(tables[self.engine.table_of[number]]), dtype=torch.int64)
            blocks = table[places // self.engine.block]
            assert blocks.all(), f"a token of layer {number} from {start} on goes to the null block"
            cache = self.caches[self.engine.layers[number]].view(torch.int32)
            cache[blocks, :, places % self.engine.block] = values[:, held[places] - start].transpose(0, 1)

    def held(self, stop: int) -> list[int]:
        """The tokens before ``stop`` that this rank keeps, which are all but for context parallelism."""
        dcp, interleave = self.engine.dcp, self.engine.interleave
        if dcp == 1:
            return list(range(stop))
        return [token for token in range(stop) if token // interleave % dcp == self.dcp_rank]


# --- an engine ----------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What the front end got of one request. ``external``: prompt tokens that vLLM counted as loaded from outside,
    ``cached``: those of which a client is told that they were cached."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    params: dict[str, Any] | None = None
    external: int | None = None
    cached: int | None = None

    def take(self, name: str, output: Any) -> None:
        """The part of an answer that a step gives."""
        for token in output.new_token_ids:
            assert token == next_token([*self.prompt, *self.tokens]), f"{name}: a wrong token"
            self.tokens.append(token)
        self.params = output.kv_transfer_params or self.params
        if output.finish_reason is not None:
            self.finish = str(output.finish_reason)
            assert self.finish != "length" or len(self.tokens) == self.max_tokens, f"{name}: {len(self.tokens)} tokens"
        if output.prefill_stats is not None:
            self.external = output.prefill_stats.num_external_cached_tokens
            self.cached = output.prefill_stats.num_cached_tokens


class Engine:
    """One engine. ``step`` is what EngineCore does in one turn; ``origin`` marks the KV that it computes."""

    _numbers = iter(range(1 << 30))
    worker_class, forward_class = Worker, Forward
    one_process = False
    """The scheduler finds its only rank in its own process, as where vLLM starts an engine of one GPU."""
    kind_of: Sequence[str] = ()
    """The kind of each layer's cache, where the engine's caches are made here."""

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
        ahead: int = 0,
        drafts: int = 0,
        scheduling: str = "fcfs",
        dp_rank: int | None = None,
        block: int = BLOCK,
        window: int | None = None,
        groups: Sequence[str] = (),
        dcp: int = 1,
        interleave: int = 1,
        pcp: int = 1,
        layout: str = "HND",
        engine_id: str | None = None,
        dtype: torch.dtype = torch.float32,
        one_process: bool = False,
    ) -> None:
        """``policy`` is that of failed loads. ``ahead``: steps that are scheduled and run before the output of the
        first is looked at, as with async scheduling, vLLM's default on GPUs. ``drafts``: tokens of speculative
        decoding. ``dp_rank``: of an engine with several data-parallel ranks, each of which has a scheduler of its own.
        ``window``: the last layer attends to as many tokens only, and has a block table of its own. ``groups``: block
        tables of these kinds, of which the last ones have one layer each; the window is that of each ``window`` and
        ``chunk``. ``dcp``:
        ranks that hold the same heads and share tokens out, ``interleave`` each in turn. ``pcp``: ranks that share out
        the computation of a prompt. ``layout``: whether heads or tokens come first in a block."""
        self.tp, self.runner, self.num_blocks, self.layout, self.dtype = tp, runner, num_blocks, layout, dtype
        self.dcp, self.interleave, self.block, self.window = dcp, interleave, block, window
        self.ranks = tp * pcp
        self.one_process = one_process and self.ranks == 1
        self.layers = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]
        transfer = KVTransferConfig(
            engine_id=engine_id, kv_connector=connector, kv_connector_module_path=module, kv_role=role,
            kv_load_failure_policy=policy, kv_connector_extra_config=extra or {},
        )  # fmt: skip
        parallel = ParallelConfig(
            tensor_parallel_size=tp, decode_context_parallel_size=dcp, cp_kv_cache_interleave_size=interleave,
            prefill_context_parallel_size=pcp, distributed_executor_backend="mp",
        )  # fmt: skip
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=max_batched, max_model_len=MAX_LENGTH, policy=scheduling,
                is_encoder_decoder=False, enable_chunked_prefill=True,
            ),
            speculative_config=self.speculative(model, drafts) if drafts else None,
            parallel_config=parallel if pcp == 1 else ParallelConfig(),  # no model runner on the CPU takes it
            device_config=DeviceConfig(device="cpu"),
            kv_transfer_config=transfer,
        )  # fmt: skip
        config.parallel_config = parallel
        config.scheduler_config.async_scheduling = bool(ahead)  # vLLM forces it off on the CPU
        if dp_rank is not None:  # as EngineCoreProc.run_engine_core does
            transfer.engine_id = f"{transfer.engine_id}_dp{dp_rank}"
            config.parallel_config.data_parallel_index = dp_rank
        config.cache_config.num_gpu_blocks = num_blocks
        form = {
            "block_size": block, "num_kv_heads": max(1, HEADS // tp), "head_size": HEAD_SIZE, "dtype": dtype,
        }  # fmt: skip
        specs: dict[str, Callable[[], Any]] = {
            "full": lambda: FullAttentionSpec(**form),
            "mla": lambda: MLAAttentionSpec(**form | {"num_kv_heads": 1, "head_size": CONTENT}),
            "window": lambda: SlidingWindowSpec(sliding_window=window, **form),
            "chunk": lambda: ChunkedLocalAttentionSpec(attention_chunk_size=window, **form),
        }
        kinds = groups or (("full",) if window is None else ("full", "window"))
        self.table_of = [max(0, number - LAYERS + len(kinds)) for number in range(LAYERS)]
        self.kind_of = [kinds[table] for table in self.table_of]
        named = [[name for name, table in zip(self.layers, self.table_of, strict=True) if table == number]
                 for number in range(len(kinds))]  # fmt: skip
        made = [KVCacheGroupSpec(names, specs[kind]()) for names, kind in zip(named, kinds, strict=True)]
        self.kv_config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=made)
        self.start(config, self.kv_config, origin, {"block_size": block * dcp}, block * dcp, ahead=ahead, drafts=drafts)

    def speculative(self, model: ModelConfig, drafts: int) -> SpeculativeConfig:
        """With which so many tokens are drafted; by no model, if not said otherwise."""
        return SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=drafts,
            prompt_lookup_max=4,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        )

    def start(
        self, config: VllmConfig, scheduled: KVCacheConfig, origin: int, sizes: dict[str, int], hash_size: int,
        *, ahead: int = 0, drafts: int = 0,
    ) -> None:  # fmt: skip
        """Scheduler and workers. ``scheduled``: the scheduler's KV cache configuration, ``sizes``: its block sizes."""
        self.config, self.origin = config, origin
        self._ahead = ahead
        self._outputs: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._memory = RunnerMemory(drafts)
        self.before_update: Callable[[Any], object] | None = None
        """Called with a step between its forward and the look at its output, where EngineCore takes aborts."""
        self.device: Callable[[], None] = lambda: None
        """Called at the beginning of a forward: what a device waits for while its thread goes on."""
        self.at_layer: Callable[[int], None] = lambda layer: None
        """Called before the attention of a layer reads."""
        self._lost: set[int] = set()  # blocks that loads inside steps failed to fill, until the scheduler hears of it
        self._tainted: set[int] = set()  # of requests that have computed with these, until the scheduler hears of it
        # Requests whose forward has read other than right KV, in which blocks, and where.
        self.wrong: list[tuple[str, set[int], str]] = []
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_size, sha256)
        kind = AsyncScheduler if ahead else Scheduler
        self.scheduler = kind(config, scheduled, StructuredOutputManager(config), log_stats=True, **sizes)
        if ahead:  # with async scheduling the drafts are a model's, which writes KV ahead
            self.scheduler.num_lookahead_tokens = drafts
        self.connector: Any = self.scheduler.connector
        if self.one_process:  # its only rank may report right before the scheduler looks at an output
            look = self.scheduler._update_from_kv_xfer_finished

            def update(carried: KVConnectorOutput) -> None:
                self.workers[0].note(carried)
                self._note_stats(carried)
                look(carried)

            self.scheduler._update_from_kv_xfer_finished = update
        self.workers: list[Worker] = []
        try:
            self.workers += [self.worker_class(self, rank) for rank in range(self.ranks)]
        except BaseException:
            self.close()
            raise
        self.introduce()
        self._aggregator = KVOutputAggregator.from_connector(self.connector, self.ranks)
        self._pipe = multiprocessing.Pipe()
        self.answers: dict[str, Answer] = {}
        self.origins: dict[str, Origins] = {}
        self.loads: Counter[str] = Counter()
        self.step_loads: Counter[str] = Counter()
        """Those that the step they are told in computes with, and that no worker reports."""
        self.joined: Counter[str] = Counter()
        """Those beside the steps that were reported early, and that the step they are told in joins."""
        self.streamed_loads: set[str] = set()
        """Those of prompts that P still computes when D plans them."""
        self.fallen_loads: set[str] = set()
        """Those inside steps that have failed."""
        self.leases: Counter[str] = Counter()
        self.computed: Counter[str] = Counter()
        """Tokens that forwards of this engine computed, by request."""
        self.drafts_kept = 0
        self.stats: list[Any] = []
        self.prompts: Counter[str] = Counter()
        """What became of prompts, as the front end was told with the answers."""
        self.prefixes: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        """Likewise of prefixes, and all counts by series."""
        self.to_count = 0
        """Requests that ``prompts`` must have in the end."""
        self.baseline = self.free_blocks

    def introduce(self) -> None:
        """The workers' addresses, as the engine core collects them: without DCP, by tensor-parallel rank."""
        handshakes = {
            (0, worker.rank if self.dcp > 1 else worker.rank % self.tp): self.handshake(worker)
            for worker in self.workers
        }
        if all(metadata is not None for metadata in handshakes.values()):
            with self.workers[0].group() if self.one_process else nullcontext():
                self.connector.set_xfer_handshake_metadata_pp_aware(handshakes)

    def handshake(self, worker: Worker) -> Any:
        """What a worker tells, together with the others of its PCP group."""
        group = self.workers[worker.rank % self.tp :: self.tp]

        def alone(found: list[Any], ours: object, **_: object) -> None:
            found[:] = [ours]

        def gather(found: list[Any], ours: object, **_: object) -> None:
            with mock.patch.object(torch.distributed, "all_gather_object", alone):
                found[:] = [one.connector.get_handshake_metadata().addresses[0] for one in group]

        pcp = SimpleNamespace(world_size=len(group), cpu_group=None)
        with (
            mock.patch.object(from_vllm, "get_pcp_group", lambda: pcp),
            mock.patch.object(torch.distributed, "all_gather_object", gather),
        ):
            return worker.connector.get_handshake_metadata()

    @property
    def engine_id(self) -> str:
        return str(self.config.kv_transfer_config.engine_id)

    @property
    def address(self) -> Any:
        """Where the first rank listens."""
        return self.handshake(self.workers[0]).addresses[0]

    # --- requests -----------------------------------------------------------------------------------------------

    def add(
        self,
        ids: Sequence[int],
        params: object = None,
        *,
        request_id: str | None = None,
        max_tokens: int = 1,
        rejected: bool = False,
        priority: int = 0,
        lora: LoRARequest | None = None,
        salt: str | None = None,
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
        self.to_count += self._counts(params)
        self.scheduler.add_request(request)
        room = self.config.model_config.max_model_len - request.num_prompt_tokens
        self.answers[request_id] = Answer(list(request.prompt_token_ids), min(request.max_tokens, room))
        if rejected:
            self.abort(request_id)
        return request_id

    def _counts(self, params: object) -> bool:
        """Whether KVFerry counts what becomes of the prompt of a request with these parameters."""
        transfer = self.config.kv_transfer_config
        ours: Any = from_p2p(params)
        prefills, loads = wants_prefill(ours), wants_load(ours)
        return loads or (not transfer.is_kv_producer if prefills else transfer.is_kv_consumer)

    def abort(self, request_id: str) -> None:
        """What a client that disconnects leads to."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def preempt(self, request_id: str) -> None:
        """What the scheduler does to a running request when it is out of blocks."""
        request = self.scheduler.requests[request_id]
        self.scheduler.running.remove(request)
        delivers = self.scheduler.requires_kv_delivery
        self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=delivers)

    def status(self, request_id: str) -> RequestStatus | None:
        request = self.scheduler.requests.get(request_id)
        return None if request is None else request.status

    def finish(self, *names: str, beside: Sequence[Engine] = ()) -> Answer:
        """Step until these requests have ended; the last one's answer."""
        run([*beside, self], lambda: all(self.answers[name].finish is not None for name in names))
        return self.answers[names[-1]]

    def prefill(self, ids: Sequence[int], params: object = PREFILL, **kwargs: Any) -> dict[str, Any]:
        """Run a prompt on P; the kv_transfer_params that its answer has."""
        answer = self.finish(self.add(ids, params, **kwargs))
        assert answer.params is not None, "P handed nothing over"
        return answer.params

    def named(self, **more: Any) -> dict[str, Any]:
        """The parameters of D's leg where both legs are sent at once, as a router has them that has seen P's answer."""
        return {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.engine_id,
            "remote_host": self.address.host, "remote_port": self.address.port, "tp_size": self.tp, **more,
        }  # fmt: skip

    def phase(self, request_id: str) -> Any:
        """Of a request in D's scheduler half; ``None`` for one that has ended."""
        return request_phase(scheduler_half(self), request_id)

    # --- a step -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, tell the workers, run the forward, aggregate, update: one turn of EngineCore."""
        with self.workers[0].group() if self.one_process else nullcontext():
            step = self.scheduler.schedule()
        self._note(step.kv_connector_metadata)
        self._pipe[0].send(step.kv_connector_metadata)  # as to workers in other processes
        step.kv_connector_metadata = self._pipe[1].recv()
        self.computed.update(step.num_scheduled_tokens)
        self._memory.begin(step)
        turns = {name: self._memory.turn(self.scheduler.requests[name], step) for name in step.num_scheduled_tokens}
        carried = [worker.run(step, turns) for worker in self.workers]
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
            assert (self._lost | self._tainted) & blocks, text
            if len(self.kv_config.kv_cache_groups) > 1 or self.window:  # others may have these, and no lost one
                self._tainted |= blocks
        self.wrong.clear()
        self._outputs.append((step, merged))
        while self._outputs and (len(self._outputs) > self._ahead or not step.total_num_scheduled_tokens):
            self._update(*self._outputs.popleft())
        if not self._ahead and self.config.speculative_config is not None:
            self.scheduler.update_draft_token_ids(self._memory.drafted(turns))

    def _update(self, step: Any, merged: ModelRunnerOutput) -> None:
        if self.before_update is not None:
            self.before_update(step)
        carried = merged.kv_connector_output
        if carried is not None:
            self._lost -= carried.invalid_block_ids
        if not_filled := self._not_filled(step, merged):
            self._lost -= not_filled
            self._tainted = self._tainted if self._lost else set()
        if carried is not None and not self.one_process:
            self._note_stats(carried)
        with self.workers[0].group() if self.one_process else nullcontext():
            clients = self.scheduler.update_from_output(step, merged).values()
        for client in clients:
            told = client.scheduler_stats.kv_connector_stats if client.scheduler_stats else None
            counts = (told or {}).get("counts", {})
            self.prompts.update(counts.get("prompts", {}))
            self.prefixes.update(counts.get("prefix_reads", {}))
            self.totals.update({series: sum(each.values()) for series, each in counts.items()})
            for output in client.outputs:
                self.answers[output.request_id].take(output.request_id, output)

    def _note_stats(self, carried: KVConnectorOutput) -> None:
        if carried.kv_connector_stats:
            self.stats.append(carried.kv_connector_stats)

    def _not_filled(self, step: Any, merged: ModelRunnerOutput) -> set[int]:
        """The blocks that loads inside the step failed to fill."""
        carried = merged.kv_connector_output
        ends = load_ends(carried.kv_connector_worker_meta if carried else None)
        plan = getattr(step.kv_connector_metadata, "plan", None)
        loads = [] if plan is None else [*plan.joins, *(load for load in plan.loads if load.now)]
        stands = {name for name, end in ends.items() if not end.failed and end.ranks >= self.ranks}
        failed = [load for load in loads if load.request_id not in stands]
        self.fallen_loads.update(load.request_id for load in failed)
        return set().union(*(filled_blocks(load, scheduler_half(self).tables) for load in failed))

    def _note(self, metadata: Any) -> None:
        for child in getattr(metadata, "metadata", (metadata,)):
            plan = getattr(child, "plan", None)
            if plan is not None:
                self.loads.update(load.request_id for load in plan.loads if not load.now)
                self.step_loads.update(load.request_id for load in plan.loads if load.now)
                self.joined.update(load.request_id for load in plan.joins)
                self.streamed_loads.update(load.request_id for load in plan.loads if load.step_tokens)
                self.leases.update(lease.request_id for lease in plan.leases)

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
    def failed(self) -> set[str]:
        """Requests whose load beside the steps has failed on a rank."""
        return set().union(*(worker.failed for worker in self.workers))

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

    # --- transfer threads ---------------------------------------------------------------------------------------

    @property
    def threads(self) -> list[Any]:
        """The transfer thread's object of each rank, to hold its hand in tests of faults."""
        return [thread_of(worker_half(worker)) for worker in self.workers]

    @property
    def thread(self) -> Any:
        """Of the first rank."""
        return self.threads[0]

    def let_time_pass(self, seconds: float) -> None:
        """For its transfer threads it is ``seconds`` later from now on: a lease ends at a chosen moment."""
        for thread in self.threads:
            put_forward(thread, seconds)

    def close(self) -> None:
        for worker in self.workers:
            worker.connector.shutdown()
        with suppress(AttributeError):
            self.scheduler.shutdown()
        for end in getattr(self, "_pipe", ()):
            end.close()


Pair = tuple[Engine, Engine]


class EngineGroup:
    """Makes engines and closes them."""

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self.engines: list[Engine] = []

    def engine(self, origin: int, extra: dict[str, Any] | None = None, **kwargs: Any) -> Engine:
        extra = extra or {}
        if "connectors" not in extra:
            extra = {**PATIENT, **extra}
        engine = Engine(self._model, origin, extra=extra, **kwargs)
        self.engines.append(engine)
        return engine

    def pair(self, **kwargs: Any) -> Pair:
        """P and D with the same settings."""
        extra = {**ROOM, **kwargs.pop("extra", {})}
        return self.engine(0, extra=extra, **kwargs), self.engine(1, extra=extra, **kwargs)

    def multi(self, origin: int, *children: dict[str, Any], **kwargs: Any) -> Engine:
        """An engine with these connectors below MultiConnector."""
        extra = {"connectors": list(children)}
        return self.engine(origin, connector="MultiConnector", module=None, extra=extra, **kwargs)

    def close(self) -> None:
        while self.engines:
            self.engines.pop().close()


class Lines(logging.Handler):
    """What was logged below ``vllm.kvferry``, which does not reach the root logger."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def __call__(self, *words: str) -> list[str]:
        """The lines that have all these words."""
        texts = [record.getMessage() for record in self.records]
        return [text for text in texts if all(word in text for word in words)]


# --- what tests do with engines -----------------------------------------------------------------------------------


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
        if engine.config.kv_transfer_config.kv_connector == "KVFerryConnector":
            assert sum(engine.prompts.values()) == engine.to_count, f"counted {engine.prompts} of {engine.to_count}"


def loaded(p: Engine | None, d: Engine, name: str, theirs: int | None = None) -> Answer:
    """A request of D ends, whose first forward found so many tokens of P: all but the last one, if not said. Without
    ``p`` D alone is stepped."""
    answer = d.finish(name, beside=[p] if p else ())
    assert d.origins[name].theirs == (len(answer.prompt) - 1 if theirs is None else theirs)
    return answer


def hand_over(p: Engine, d: Engine, ids: Sequence[int], theirs: int | None = None, **kwargs: Any) -> str:
    """One prompt from P to D, both to the end; D's request id."""
    name = d.add(ids, p.prefill(ids), **kwargs)
    loaded(p, d, name, theirs)
    return name


def eventually(condition: Callable[..., object], seconds: float = 300.0) -> None:
    """Wait for a transfer thread without stepping any engine."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)
