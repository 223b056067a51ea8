"""One rank of a pair, in a process of its own: a real worker half, without an engine.

It obeys JSON lines on stdin and answers each by one line on stdout. It ends at the end of stdin. The parent's end is
``RankProcess``.
"""

from __future__ import annotations

import base64
import json
import logging
import sys
import time
from collections import deque
from typing import Any

import msgspec
import torch

from kvferry.cli.rank_pair import CacheForm
from kvferry.connector.config import Settings
from kvferry.connector.engine.worker import WorkerHalf
from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.wire.step_plan import KeepLease, LeaseGrant, Load, PeerEngine, RankAddress, StepPlan, pack_ids
from kvferry.transport.errors import KVFerryError

LEASE_SECONDS = 30.0
warnings: deque[str] = deque(maxlen=8)
"""The last warnings of KVFerry, for the answer after a failure."""


class _Log(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())


class PairRank:
    """One rank: caches of a form, and a worker half that hands them over. ``side``: "p" or "d"."""

    def __init__(
        self, *, side: str, plane: str, device: str, host: str, secret: str, seed: int, form: dict[str, Any]
    ) -> None:
        self.form = msgspec.convert(form, CacheForm)
        self.blocks = self.form.block_ids(seed)
        self.caches = self.form.caches(device)
        settings = Settings(plane=plane, side_channel_host=host, secret_key=secret)
        info = RankInfo(engine_id=f"pair-{side}", tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, model={})
        group = LayerGroup("full", self.form.names, self.form.block_tokens, self.form.heads)
        self.worker = WorkerHalf(settings, info, [group])
        self.worker.register(self.caches)

    def do_address(self) -> str:
        """Where D finds this rank."""
        assert self.worker.address is not None
        return base64.b64encode(msgspec.msgpack.encode(self.worker.address)).decode()

    def do_fill(self, salt: int) -> None:
        """P: write the longest prompt into the caches."""
        form = self.form
        for number, cache in enumerate(self.caches.values()):
            paged = form.pattern(number, salt).reshape(form.blocks, form.block_tokens, form.heads, form.content)
            cache[self.blocks] = paged.transpose(1, 2).to(cache.device)

    def do_clear(self) -> None:
        """D: forget what it has loaded."""
        for cache in self.caches.values():
            cache.zero_()

    def do_grant(self, request: str, token: str, tokens: int) -> None:
        """P: lease the first ``tokens`` of the prompt."""
        lease = LeaseGrant(request, base64.b64decode(token), tokens, (self._ids(tokens),))
        self.worker.post(StepPlan(leases=(lease,)))
        self.worker.take_results()

    def do_load(self, request: str, token: str, tokens: int, peer: str, seconds: float) -> dict[str, Any]:
        """D: fetch these tokens. The time is the one that the metrics count, from the request to the report."""
        address = msgspec.msgpack.decode(base64.b64decode(peer), type=RankAddress)
        engine = PeerEngine("pair-p", 1, 1, LEASE_SECONDS, (address,))
        load = Load(request, base64.b64decode(token), engine, (self._ids(tokens),), ((0, tokens),))
        keep = KeepLease(request, base64.b64decode(token), engine, False)
        self.worker.post(StepPlan(consumer=bytes(16), keeps=(keep,), loads=(load,)))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            results = self.worker.take_results()
            if request in results.failed:
                return {"failed": "; ".join(warnings) or "the log has no reason"}
            if request in results.received:
                return self._figures()
            time.sleep(1e-3)
        return {"failed": f"no end within {seconds:g} s; {'; '.join(warnings)}"}

    def _ids(self, tokens: int) -> bytes:
        return pack_ids(self.blocks[: -(-tokens // self.form.block_tokens)])

    def _figures(self) -> dict[str, Any]:
        assert self.worker.rank_context is not None
        figures = self.worker.rank_context.stats.take()
        assert figures is not None
        ((plane, samples),) = figures["finished"].items()
        return {"plane": plane, "nbytes": samples["nbytes"][0], "microseconds": samples["microseconds"][0]}

    def do_differing(self, salt: int, tokens: int) -> int:
        """D: how many bytes of the first ``tokens`` are not as P wrote them."""
        form, wrong = self.form, 0
        for number, cache in enumerate(self.caches.values()):
            found = cache[self.blocks].cpu().transpose(1, 2).reshape(-1, form.heads, form.content)[:tokens]
            wanted = form.pattern(number, salt)[:tokens]
            wrong += int((found.contiguous().view(torch.uint8) != wanted.view(torch.uint8)).sum())
        return wrong

    def do_close(self) -> None:
        self.worker.close()


def main() -> None:
    """Serve until stdin ends."""
    logger = logging.getLogger("vllm.kvferry")
    logger.addHandler(_Log(logging.WARNING))
    logger.propagate = False
    rank: PairRank | None = None
    for line in sys.stdin:
        order = json.loads(line)
        do = order.pop("do")
        try:
            if do == "start":
                warnings.clear()
                rank = PairRank(**order)
                answer: dict[str, Any] = {"ok": None}
            else:
                assert rank is not None
                answer = {"ok": getattr(rank, f"do_{do}")(**order)}
        except (KVFerryError, RuntimeError) as error:  # RuntimeError: of PyTorch, such as a full GPU
            answer = {"error": str(error).splitlines()[0]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
