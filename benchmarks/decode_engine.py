"""One side of ``interference.py``: a process that decodes like an engine, with a ``WorkerHalf`` over the same cache.

    python benchmarks/decode_engine.py p|d DEVICE

Obeys JSON lines on stdin, each answered by one on stdout. The main thread is the engine's: per step it takes the
results of hand-overs, posts what is next, launches a decode step of a whole batch kernel by kernel, and waits for the
tokens. Axes: S sequences, L layers, B blocks, N tokens in a block, H KV heads, D head dimension.
"""

from __future__ import annotations

import base64
import hashlib
import json
import select
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from paged_decode import paged_decode, paged_decode_reference

from kvferry.connector.config import Settings
from kvferry.connector.engine.worker import WorkerHalf
from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.wire.step_plan import (
    KeepLease,
    LeaseGrant,
    Load,
    PeerEngine,
    RankAddress,
    StepPlan,
    pack_ids,
)

TARGETS = 6
"""Hand-overs that D may have under way at once, each into blocks of its own: back to back, one ends in every step at
least, and the next is posted only in the step after."""
LEASES_AHEAD = 3 * TARGETS
LEASE_SECONDS = 600.0
DRAIN_SECONDS = 60.0


@dataclass(frozen=True)
class Shape:
    """A model, the batch that it decodes, and the hand-overs beside it. ``context`` tokens of each sequence."""

    layers: int
    hidden: int
    ffn: int
    vocab: int
    q_heads: int
    kv_heads: int
    dim: int
    batch: int
    context: int
    handover: int
    dtype: torch.dtype
    block: int = 16


LLAMA_8B = Shape(32, 4096, 14336, 128256, 32, 8, 128, 64, 2048, 8192, torch.bfloat16)
"""128 KiB per token, 1 GiB per hand-over."""
TOY = Shape(2, 64, 128, 256, 4, 2, 16, 2, 64, 256, torch.float32)
"""For a host without GPU, to see that all of this runs."""


class Decoder:
    """Weights, a paged cache [B, N, H, 2 D] per layer, and a batch whose last token is computed again and again."""

    def __init__(self, shape: Shape, device: torch.device, blocks_beside: int, seed: int) -> None:
        self.shape, self.device = shape, device
        torch.manual_seed(seed)
        per_sequence = shape.context // shape.block
        num_blocks = shape.batch * per_sequence + blocks_beside
        order = torch.randperm(num_blocks)  # as after hours of traffic
        self.tables = order[: shape.batch * per_sequence].reshape(shape.batch, -1).to(device, torch.int32)
        self.beside: list[int] = order[shape.batch * per_sequence :].tolist()
        self.last = self.tables[:, -1].long()
        heads, width = shape.kv_heads, 2 * shape.dim
        self.caches = [self._random(num_blocks, shape.block, heads, width, scale=1.0) for _ in range(shape.layers)]
        q_width, kv_width = shape.q_heads * shape.dim, heads * width
        self.weights = [
            (
                self._random(shape.hidden, q_width + kv_width),
                self._random(q_width, shape.hidden),
                self._random(shape.hidden, 2 * shape.ffn),
                self._random(shape.ffn, shape.hidden),
            )
            for _ in range(shape.layers)
        ]
        self.embedding = self._random(shape.vocab, shape.hidden)
        self.tokens = torch.arange(shape.batch, device=device)
        self._check()

    def step(self) -> list[int]:
        """One token for each sequence, which the host waits for."""
        shape = self.shape
        q_width = shape.q_heads * shape.dim
        x = self.embedding[self.tokens]
        for cache, (qkv, o, gate_up, down) in zip(self.caches, self.weights, strict=True):
            projected = F.rms_norm(x, (shape.hidden,)) @ qkv
            q = projected[:, :q_width].view(shape.batch, shape.q_heads, shape.dim)
            cache[self.last, -1] = projected[:, q_width:].view(shape.batch, shape.kv_heads, 2 * shape.dim)
            x = x + paged_decode(q, cache, self.tables, shape.context).view(shape.batch, q_width) @ o
            gate, up = (F.rms_norm(x, (shape.hidden,)) @ gate_up).chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ down
        self.tokens = (x @ self.embedding.T).argmax(-1)
        token_ids: list[int] = self.tokens.tolist()
        return token_ids

    def _random(self, *sizes: int, scale: float = 0.02) -> torch.Tensor:
        return torch.empty(sizes, dtype=self.shape.dtype, device=self.device).normal_(0, scale)

    def _check(self) -> None:
        """That the attention is one: a kernel that reads less would not be in anybody's way."""
        shape = self.shape
        q = self._random(2, shape.q_heads, shape.dim, scale=1.0)
        arguments = q, self.caches[0], self.tables[:2], shape.context
        torch.testing.assert_close(paged_decode(*arguments), paged_decode_reference(*arguments), rtol=0.02, atol=0.005)


class Side:
    """P or D: decodes, and hands over or is handed."""

    def __init__(self, role: str, device: torch.device) -> None:
        self.role, self.device = role, device
        self.shape = TOY if device.type == "cpu" else LLAMA_8B
        blocks = self.shape.handover // self.shape.block
        self.decoder = Decoder(self.shape, device, (TARGETS if role == "d" else 1) * blocks, seed=ord(role))
        beside = self.decoder.beside
        self.targets = [beside[n : n + blocks] for n in range(0, len(beside), blocks)]
        self.names = [f"model.layers.{n}.self_attn.attn" for n in range(self.shape.layers)]
        self.worker: WorkerHalf | None = None
        self.peer: PeerEngine | None = None
        for _ in range(5):
            self.decoder.step()

    # Commands

    def do_open(self, settings: dict[str, Any]) -> str:
        """A new ``WorkerHalf``; its address in MessagePack and base64."""
        if self.role == "d":  # what a digest finds is what came through this one
            for cache in self.decoder.caches:
                cache[torch.tensor(self.targets, device=self.device).flatten()] = 0
        group = LayerGroup("full", tuple(self.names), self.shape.block, self.shape.kv_heads)
        info = RankInfo(f"engine-{self.role}", 0, 1, 0, 1, model={"architectures": "Decoding"})
        self.worker = WorkerHalf(Settings(lease_seconds=LEASE_SECONDS, **settings), info, [group])
        caches = [cache.permute(0, 2, 1, 3) for cache in self.decoder.caches]  # [B, H, N, C]
        self.worker.register(dict(zip(self.names, caches, strict=True)))
        self.number = self.open_leases = 0
        self.free, self.running = list(range(len(self.targets))), dict[str, int]()
        return base64.b64encode(msgspec.msgpack.encode(self.worker.address)).decode()

    def do_peer(self, address_of_p: str) -> None:
        address = msgspec.msgpack.decode(base64.b64decode(address_of_p), type=RankAddress)
        self.peer = PeerEngine("engine-p", 1, 1, LEASE_SECONDS, (address,))

    def do_close(self) -> None:
        assert self.worker is not None
        self.worker.close()
        self.worker = None

    def do_segment(self, begin: float, seconds: float, per_second: float | None) -> dict[str, Any]:
        """Decode until ``begin + seconds`` of the monotonic clock, all of them with hand-overs arriving ``per_second``:
        0 for none, None for one after the other. Milliseconds of the steps since ``begin``, what was handed over."""
        while time.monotonic() < begin:
            self._step(0.0)
        self._figures()
        self.begun, self.posted = begin, 0
        steps = []
        while (now := time.monotonic()) < begin + seconds:
            self._step(per_second)
            steps.append((time.monotonic() - now) * 1e3)
        elapsed, finished = time.monotonic() - begin, self._figures()
        end = time.monotonic() + DRAIN_SECONDS
        while self.running:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(self.running)} hand-overs did not end within {DRAIN_SECONDS:g} s")
            self._step(0.0)
        return {"steps": steps, "seconds": elapsed, "finished": finished}

    def do_targets(self) -> list[list[int]]:
        """Blocks of each place for a hand-over."""
        return self.targets

    def do_digest(self, target: int) -> list[int]:
        """A number per layer that depends on every element of a hand-over's blocks and on its place."""
        ids = torch.tensor(self.targets[target], device=self.device)
        digests = []
        for cache in self.decoder.caches:
            words = cache[ids].view(torch.int16).to(torch.int64).flatten()
            digests.append(int((words * torch.arange(1, len(words) + 1, device=self.device)).sum()))
        return digests

    # Steps

    def turn(self, per_second: float | None = 0.0) -> None:
        """What an engine does for its connector in a step. D posts hand-overs, P their leases, ahead."""
        if self.worker is None:
            return
        results = self.worker.take_results()
        if self.role == "p":
            self.open_leases -= len(results.sent)
            leases = tuple(self._lease() for _ in range(LEASES_AHEAD - self.open_leases))
            self.open_leases += len(leases)
            if leases:
                self.worker.post(StepPlan(leases=leases))
            return
        if results.failed:
            raise RuntimeError(f"{len(results.failed)} hand-overs failed")
        self.free.extend(self.running.pop(name) for name in results.received)
        for _ in range(self._due(per_second)):
            self.worker.post(self._load())

    def _step(self, per_second: float | None) -> None:
        self.turn(per_second)
        self.decoder.step()

    def _due(self, per_second: float | None) -> int:
        if per_second is None:
            return len(self.free)
        if per_second == 0:
            return 0
        due = int((time.monotonic() - self.begun) * per_second + 0.5) - self.posted  # the first after half a period
        self.posted += min(due, len(self.free))
        return min(due, len(self.free))

    def _next(self) -> tuple[str, bytes]:
        """Name and token of the next hand-over, the same on both sides."""
        self.number += 1
        return f"r{self.number}", hashlib.sha256(f"hand-over {self.number}".encode()).digest()[:16]

    def _lease(self) -> LeaseGrant:
        name, token = self._next()
        return LeaseGrant(name, token, self.shape.handover, (pack_ids(self.targets[0]),))

    def _load(self) -> StepPlan:
        assert self.peer is not None
        name, token = self._next()
        self.running[name] = self.free.pop()
        ids = (pack_ids(self.targets[self.running[name]]),)
        load = Load(name, token, self.peer, ids, ((0, self.shape.handover),))
        watch = KeepLease(name, token, self.peer, siblings=False)
        return StepPlan(consumer=b"interference-d00", keeps=(watch,), loads=(load,))

    def _figures(self) -> dict[str, Any]:
        """Hand-overs that finished since the last call, by plane."""
        assert self.worker is not None and self.worker.rank_context is not None
        figures = self.worker.rank_context.stats.take()
        return dict(figures["finished"]) if figures is not None else {}


def main() -> None:
    torch.set_num_threads(1)
    device = torch.device(sys.argv[2])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    side = Side(sys.argv[1], device)
    print(json.dumps({"answer": "ready"}), flush=True)
    while True:
        while not select.select([sys.stdin], [], [], 1e-3)[0]:
            side.turn()
        line = sys.stdin.readline()
        if not line:
            break
        order = json.loads(line)
        try:
            answer = {"answer": getattr(side, "do_" + order.pop("do"))(**order)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
    if side.worker is not None:
        side.worker.close()


if __name__ == "__main__":
    with torch.no_grad():
        main()
