"""One rank of an engine that is stepped by hand: its caches, KVFerry's worker half, a model runner's calls to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kvferry.connector.vllm import from_vllm
from tests.vllm.labelled import CONTENT, HEADS, labels

RUNNERS = ("v1", "v2", "v026")
"""vLLM's two model runners of 0.32, and the calls that 0.26 makes. V1 runs attention from Python, where a connector is
asked for each layer; V2 replays a graph of the whole forward, and ``v2 eager`` is V2 without a graph."""


class Owner(Protocol):
    """What a rank reads of its engine."""

    config: VllmConfig
    kv_config: KVCacheConfig
    layers: list[str]
    table_of: list[int]
    block: int
    num_blocks: int
    origin: int
    runner: str
    tp: int
    dcp: int
    interleave: int
    layout: str


class Steps(Protocol):
    """A forward, see ``stepped_forward``."""

    def update(self, layer: int) -> None: ...
    def attend(self, layer: int) -> None: ...
    def finish(self) -> None: ...


MakeForward = Callable[["Worker"], Steps]


class Worker:
    """One rank: caches, the connector's worker half, and the calls that one of vLLM's model runners makes."""

    def __init__(self, engine: Owner, rank: int) -> None:
        self.engine, self.rank = engine, rank
        count, first = max(1, HEADS // engine.tp), rank * HEADS // engine.tp
        self.heads = range(first, first + count)
        shape = (engine.num_blocks, count, engine.block, CONTENT)
        if engine.layout == "NHD":
            self.caches = {
                name: torch.full((shape[0], shape[2], shape[1], shape[3]), -1.0).transpose(1, 2)
                for name in engine.layers
            }
        else:
            self.caches = {name: torch.full(shape, -1.0) for name in engine.layers}
        with _rank(rank):
            self.connector: Any = KVConnectorFactory.create_connector(
                config=engine.config, role=KVConnectorRole.WORKER, kv_cache_config=engine.kv_config
            )
        self._v2: ActiveKVConnector | None = None
        self.hook_order: Sequence[int] = range(len(engine.layers))
        """In which order a forward comes to its layers."""
        if engine.runner.startswith("v2"):
            with self._group():
                self._v2 = ActiveKVConnector(engine.config, self.caches)
        else:
            self.connector.register_kv_caches(self.caches)
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    @contextmanager
    def _group(self) -> Iterator[None]:
        """vLLM keeps a process's connector in a global; this process has several."""
        with mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector):
            yield

    def run(self, step: Any, forward: MakeForward) -> KVConnectorOutput | None:
        """One step of the model runner: its calls to the connector around the forward."""
        idle = step.total_num_scheduled_tokens == 0
        with self._group():
            if self.engine.runner == "v026":
                output = self._run_v026(step, forward, idle)
            elif self._v2 is not None:
                output = self._run_v2(self._v2, step, forward, idle)
            elif idle:
                output = KVConnectorModelRunnerMixin.kv_connector_no_forward(
                    step, self.engine.config
                ).kv_connector_output
            else:
                late = self.engine.config.speculative_config is not None  # after the drafts are made
                with (
                    self._layers(),
                    KVConnectorModelRunnerMixin._get_kv_connector_output(step, defer_finalize=late) as output,
                ):
                    self._attend(forward)
                if late:
                    KVConnectorModelRunnerMixin.finalize_kv_connector()
        if output is not None:
            self.received.update(output.finished_recving or ())
            self.sent.update(output.finished_sending or ())
            self.failed.update(getattr(output, "failed_recving", ()))  # 0.26 tells blocks
        return output

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

    def _attend(self, forward: MakeForward) -> None:
        """The forward, as vLLM's attention layers run it: each writes its KV, then asks the connector, then reads."""
        made, names = forward(self), self.engine.layers

        def attention(layer_name: str) -> None:
            made.attend(names.index(layer_name))

        hooked = maybe_transfer_kv_layer(attention)
        for layer in self.hook_order:
            made.update(layer)
            hooked(names[layer])
        made.finish()

    def _replay(self, forward: MakeForward) -> None:
        """The forward as a graph, of which the connector hears nothing."""
        made = forward(self)
        for layer in range(len(self.engine.layers)):
            made.update(layer)
            made.attend(layer)
        made.finish()

    def _run_v2(self, kv: ActiveKVConnector, step: Any, forward: MakeForward, idle: bool) -> KVConnectorOutput | None:
        if idle:
            return kv.no_forward(step).kv_connector_output
        if self.engine.runner == "v2 eager":
            with self._layers():
                kv.pre_forward(step)
                self._attend(forward)
        else:
            kv.pre_forward(step)
            self._replay(forward)
        if hasattr(kv, "finish_forward"):  # not in 0.26
            kv.finish_forward()
        if not hasattr(kv, "finalize_step") or self.engine.config.speculative_config is None:
            return kv.post_forward(step.finished_req_ids)
        output = kv.post_forward(step.finished_req_ids, defer_finalize=True)  # 0.33: before the drafts are made
        kv.finalize_step()
        return output

    def _run_v026(self, step: Any, forward: MakeForward, idle: bool) -> KVConnectorOutput:
        """The order of 0.26: loads before the forward, completions and bad blocks asked for apart."""
        kv = self.connector
        kv.bind_connector_metadata(step.kv_connector_metadata)
        with set_forward_context(None, self.engine.config):
            kv.start_load_kv(get_forward_context())
        if not idle:
            self._replay(forward)
            kv.wait_for_save()
        output = KVConnectorOutput()
        output.finished_sending, output.finished_recving = kv.get_finished(step.finished_req_ids)
        output.invalid_block_ids = kv.get_block_ids_with_load_errors()
        output.kv_connector_stats = kv.get_kv_connector_stats()
        output.kv_connector_worker_meta = kv.build_connector_worker_meta()
        kv.clear_connector_metadata()
        return output

    def kv(
        self, tables: Sequence[Sequence[int]], start: int, stop: int, layers: Sequence[int] | None = None
    ) -> torch.Tensor:
        """[L,H,T,C] int32: the labels of the rank's own tokens [start, stop), by plain indexing; of all layers, or of
        these."""
        found = []
        for number in range(len(self.engine.layers)) if layers is None else layers:
            name = self.engine.layers[number]
            ids = torch.tensor(list(tables[self.engine.table_of[number]]))
            cache = self.caches[name].view(torch.int32)[ids]
            found.append(cache.permute(1, 0, 2, 3).reshape(len(self.heads), -1, CONTENT)[:, start:stop])
        return torch.stack(found)

    def write(
        self, tables: Sequence[Sequence[int]], start: int, ids: Sequence[int], layers: Sequence[int] | None = None
    ) -> None:
        """What a forward leaves in the cache of all layers, or of these."""
        values = labels(self.heads, start, ids, self.engine.origin)
        for number in range(len(self.engine.layers)) if layers is None else layers:
            cache = self.caches[self.engine.layers[number]].view(torch.int32)
            block_ids = tables[self.engine.table_of[number]]
            for place, token in enumerate(self.held(start + len(ids))):
                block, slot = divmod(place, self.engine.block)
                if token >= start:
                    assert block_ids[block], f"token {token} of layer {number} goes to the null block"
                    cache[block_ids[block], :, slot] = values[number, :, token - start]

    def held(self, stop: int) -> list[int]:
        """The tokens before ``stop`` that this rank keeps, which are all but for context parallelism."""
        engine = self.engine
        return [token for token in range(stop) if token // engine.interleave % engine.dcp == self.rank % engine.dcp]


@contextmanager
def _rank(rank: int) -> Iterator[None]:
    """There are no process groups here; the ranks are told by hand. And no CPU attention, which packs its blocks."""
    with (
        mock.patch.object(from_vllm, "get_tensor_model_parallel_rank", lambda: rank),
        mock.patch.object(from_vllm, "packing_name", lambda config, spec, layers: ""),
        mock.patch.object(from_vllm, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0)),
    ):
        yield
