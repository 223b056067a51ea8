"""One rank of the self-test, in a process of its own: a real worker half, without an engine.

It obeys JSON lines on stdin and answers each by one line on stdout. It ends at the end of stdin. The parent's end is
``self_test.py``.
"""

from __future__ import annotations

import base64
import json
import logging
import sys
import time
from typing import Any

import msgspec
import numpy as np
import torch

from kvferry.connector.config import Settings
from kvferry.connector.engine.worker import WorkerHalf
from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.protocol.step_plan import (
    KeepLease,
    LeaseGrant,
    Load,
    PeerEngine,
    RankAddress,
    StepPlan,
    pack_ids,
)
from kvferry.transport.errors import KVFerryError

LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, CONTENT = 8, 256, 8, 16, 64
"""64 MiB of int32, in pages of 32 KiB: the KV cache of one prompt of 4096 tokens."""
TOKENS = BLOCKS * BLOCK_TOKENS
NAMES = tuple(f"layer {number}" for number in range(LAYERS))
LEASE_SECONDS = 30.0
_LINES = 8
"""Lines of the log that go into the answer after a failure."""


def pattern(layer: int, salt: int) -> torch.Tensor:
    """The elements of a layer in the order of the prompt's tokens, int32 [B, H, N, C]; each is another, and each
    hand-over has its own ``salt``."""
    numbers = torch.arange(BLOCKS * HEADS * BLOCK_TOKENS * CONTENT, dtype=torch.int32)
    mixed = numbers * -1640531527 + (layer * 65536 + salt) * 40503  # a multiplication by an odd number is one to one
    return mixed.reshape(BLOCKS, HEADS, BLOCK_TOKENS, CONTENT)


def block_ids(seed: int) -> list[int]:
    """The blocks of the prompt in an order that has no runs."""
    return [int(block) for block in np.random.default_rng(seed).permutation(BLOCKS)]


class _LastLines(logging.Handler):
    """Keeps the last warnings of KVFerry."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines = [*self.lines, record.getMessage()][-_LINES:]


class SelfTestRank:
    """One rank: caches of a known pattern, and a worker half that hands them over."""

    def __init__(self, *, side: str, plane: str, device: str, host: str, secret: str, seed: int) -> None:
        self.blocks = block_ids(seed)
        self.caches = {
            name: torch.zeros(BLOCKS, HEADS, BLOCK_TOKENS, CONTENT, dtype=torch.int32, device=device) for name in NAMES
        }
        settings = Settings(plane=plane, side_channel_host=host, secret_key=secret)
        info = RankInfo(engine_id=f"self-test-{side}", tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, model={})
        self.worker = WorkerHalf(settings, info, [LayerGroup("full", NAMES, BLOCK_TOKENS, HEADS)])
        self.worker.register(self.caches)

    def do_address(self) -> str:
        """Where D finds this rank."""
        assert self.worker.address is not None
        return base64.b64encode(msgspec.msgpack.encode(self.worker.address)).decode()

    def do_fill(self, salt: int) -> None:
        """P: write the prompt into the caches."""
        for number, name in enumerate(NAMES):
            self.caches[name][self.blocks] = pattern(number, salt).to(self.caches[name].device)

    def do_grant(self, request: str, token: str) -> None:
        """P: lease the prompt."""
        lease = LeaseGrant(request, base64.b64decode(token), TOKENS, (pack_ids(self.blocks),))
        self.worker.post(StepPlan(leases=(lease,)))
        self.worker.take_results()

    def do_load(self, request: str, token: str, peer: str, seconds: float) -> dict[str, Any]:
        """D: fetch the prompt. The time is the one that the metrics count, from the request to the report."""
        address = msgspec.msgpack.decode(base64.b64decode(peer), type=RankAddress)
        engine = PeerEngine("self-test-p", 1, 1, LEASE_SECONDS, (address,))
        for name in NAMES:
            self.caches[name].zero_()
        load = Load(request, base64.b64decode(token), engine, (pack_ids(self.blocks),), ((0, TOKENS),))
        keep = KeepLease(request, base64.b64decode(token), engine, False)
        self.worker.post(StepPlan(consumer=bytes(16), keeps=(keep,), loads=(load,)))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            results = self.worker.take_results()
            if request in results.failed:
                return {"failed": "; ".join(_log.lines) or "the log has no reason"}
            if request in results.received:
                return self._figures()
            time.sleep(1e-3)
        return {"failed": f"no end within {seconds:g} s; {'; '.join(_log.lines)}"}

    def _figures(self) -> dict[str, Any]:
        assert self.worker.rank_context is not None
        figures = self.worker.rank_context.stats.take()
        assert figures is not None
        ((plane, samples),) = figures["finished"].items()
        return {"plane": plane, "nbytes": samples["nbytes"][0], "microseconds": samples["microseconds"][0]}

    def do_differing(self, salt: int) -> int:
        """D: how many bytes of the prompt are not as P wrote them."""
        wrong = 0
        for number, name in enumerate(NAMES):
            found = self.caches[name][self.blocks].cpu().numpy().view(np.uint8)
            wrong += int((found != pattern(number, salt).numpy().view(np.uint8)).sum())
        return wrong

    def do_close(self) -> None:
        self.worker.close()


_log = _LastLines()


def main() -> None:
    """Serve until stdin ends."""
    logger = logging.getLogger("vllm.kvferry")
    logger.addHandler(_log)
    logger.propagate = False
    rank: SelfTestRank | None = None
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        try:
            if do == "start":
                _log.lines = []
                rank = SelfTestRank(**order)
                answer: dict[str, Any] = {"ok": None}
            else:
                assert rank is not None
                answer = {"ok": getattr(rank, f"do_{do}")(**order)}
        except (KVFerryError, RuntimeError) as error:  # RuntimeError: of PyTorch, such as a full GPU
            answer = {"error": str(error).splitlines()[0]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
