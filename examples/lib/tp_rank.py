"""One tensor-parallel rank of an engine, in a process of its own: its part of the model, its cache, its worker half."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from multiprocessing.connection import Connection

import msgspec
import torch
import torch.distributed
from paged_llama import Llama, PagedLlama
from tp_step import CacheForm, StepOrder, StepOutput

from kvferry.connector.config import load_settings
from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.worker.worker import WorkerHalf
from kvferry.transport.errors import KVFerryError


class TpRank:
    """The rank ``tp_rank`` of the engine ``engine_id``."""

    def __init__(self, engine_id: str, form: CacheForm, tp_rank: int, tp_size: int, plane: str) -> None:
        model = Llama()
        self.model = PagedLlama(model, form, tp_rank, tp_size)
        info = RankInfo(
            engine_id=engine_id, tp_rank=tp_rank, tp_size=tp_size, pp_rank=0, pp_size=1,
            model={"architectures": "ExampleLlama", "seed": str(model.seed)},
        )  # fmt: skip
        layers = LayerGroup("full", tuple(self.model.layers), form.block_size, model.kv_heads)
        self.worker = WorkerHalf(load_settings({"plane": plane, "lease_seconds": 300.0}), info, [layers])
        self.worker.register(self.model.kv_caches, form.num_blocks)

    def step(self, order: StepOrder) -> StepOutput:
        """Start the step's hand-overs, compute its tokens, and report the hand-overs that have ended."""
        if order.new_blocks:
            self.model.zero_blocks(order.new_blocks)  # before the plan: a load in it writes to these blocks
        self.worker.post(order.plan)
        token = self.model.forward(order.tokens, order.start, order.blocks) if order.tokens else None
        if order.corrupt is not None:
            self.model.negate_one_number(order.corrupt)
        digests = self.model.kv_digests(order.blocks, order.digest_tokens) if order.digest_tokens else []
        results = self.worker.take_results()
        assert self.worker.rank_context is not None
        stats = self.worker.rank_context.stats.take() if results.received else None
        return StepOutput(results, token, digests, sorted(stats["finished"]) if stats else [])


def serve(
    pipe: Connection, engine_id: str, form: CacheForm, tp_rank: int, tp_size: int, plane: str, store: str
) -> None:
    """Answer the engine's orders until it closes the pipe. ``store`` is a file by which the ranks find each other."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks of the example are on one host
    if tp_size > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=tp_rank, world_size=tp_size, timeout=timedelta(seconds=300)
        )
    try:
        rank = TpRank(engine_id, form, tp_rank, tp_size, plane)
    except KVFerryError as error:
        sys.stderr.write(f"{engine_id} rank {tp_rank}: {error}\n")  # at once, beside what other ranks write
        sys.exit(1)
    try:
        pipe.send_bytes(msgspec.msgpack.encode(rank.worker.address))
        while True:
            order = msgspec.msgpack.decode(pipe.recv_bytes(), type=StepOrder)
            pipe.send_bytes(msgspec.msgpack.encode(rank.step(order)))
    except (EOFError, BrokenPipeError):
        pass  # the engine ends
    finally:
        rank.worker.close()
