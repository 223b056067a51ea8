"""The front of an engine: it decides, its tensor-parallel ranks compute. No torch.

Here are KVFerry's scheduler half, the free blocks, and the aggregator, which makes one report out of the reports of all
ranks: a prompt is loaded, or its blocks are free, only once every rank has reported so.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec
from tp_step import CacheForm, StepOrder, StepOutput, decode_output

from kvferry.connector.config import load_settings
from kvferry.connector.geometry.engine_types import BlockTable, RequestView
from kvferry.connector.scheduler.scheduler import SchedulerHalf
from kvferry.connector.wire.step_plan import RankAddress
from kvferry.connector.worker.aggregator import ConnectorOutput, KVOutputAggregator
from kvferry.transport.host import host_id

SECONDS = 300.0
"""The longest wait for one answer of a rank."""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["kvferry.connector.worker.worker", "torch.distributed"]
)  # imported once, not per rank
Digests = list[dict[int, set[str]]]
"""Per layer, by global KV head: the digests of all ranks that hold the head, one where they agree."""


def _serve_rank(*args: Any) -> None:
    from tp_rank import serve  # imports torch, which the front does not need

    serve(*args)


class RankProcess:
    """The engine's end of one rank's process."""

    def __init__(self, name: str, *args: Any) -> None:
        self.name = name
        self._pipe, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve_rank, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, frame: bytes) -> None:
        try:
            self._pipe.send_bytes(frame)
        except OSError:
            raise RuntimeError(f"{self.name} ended early; its message is above") from None

    def receive(self) -> bytes:
        if not wait([self._pipe, self._process.sentinel], SECONDS):
            raise RuntimeError(f"{self.name} gave no answer for {SECONDS:g} s")
        try:
            return self._pipe.recv_bytes()
        except (EOFError, OSError):
            raise RuntimeError(f"{self.name} ended early; its message is above") from None

    def close(self) -> None:
        """Let the rank end. ``join`` waits for it."""
        self._pipe.close()

    def join(self) -> None:
        self._process.join(5)
        self._process.kill()
        self._process.join()


class Engine:
    """One engine of ``tp_size`` ranks: ``start`` waits for them, ``close`` ends them."""

    def __init__(self, engine_id: str, form: CacheForm, tp_size: int, plane: str, folder: Path) -> None:
        self.engine_id, self.form = engine_id, form
        self.scheduler = SchedulerHalf(
            load_settings({"plane": plane, "lease_seconds": SECONDS}), engine_id, [BlockTable("full", form.block_size)],
            tp_size=tp_size, pp_size=1, host_id=host_id(),
            produces=engine_id == "prefill", consumes=engine_id == "decode",
        )  # fmt: skip
        self.aggregator = KVOutputAggregator(tp_size)
        self.free = list(range(form.num_blocks))
        self._leased: dict[str, list[int]] = {}
        self.ranks = [
            RankProcess(f"{engine_id} rank {rank}", engine_id, form, rank, tp_size, plane, str(folder / engine_id))
            for rank in range(tp_size)
        ]

    def start(self) -> None:
        """Wait until every rank serves its cache, and learn their addresses."""
        self.scheduler.set_ranks(msgspec.msgpack.decode(rank.receive(), type=RankAddress) for rank in self.ranks)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for rank in self.ranks:
            rank.join()

    # --- steps --------------------------------------------------------------------------------------------------

    def step(self, **work: Any) -> tuple[StepOutput, list[StepOutput]]:
        """One step on every rank: the aggregated output, and each rank's own."""
        order = StepOrder(plan=self.scheduler.take_plan(idle=not work), **work)
        frame = msgspec.msgpack.encode(order)
        for rank in self.ranks:
            rank.send(frame)
        outputs = [decode_output(rank.receive()) for rank in self.ranks]
        if len({output.token for output in outputs}) > 1:
            raise RuntimeError(f"ranks of {self.engine_id} computed different tokens")
        output = self.aggregator.aggregate(outputs)
        assert output is not None
        report: ConnectorOutput = output.kv_connector_output
        for request in report.finished_sending or ():
            self.free += self._leased.pop(request)
        self.scheduler.loads_finished(report.finished_recving or (), report.load_ends)
        self.scheduler.leases_ended(report.finished_sending or ())
        return output, outputs

    def compute(self, tokens: list[int], start: int, blocks: list[int]) -> int:
        """The token after ``tokens``, the first of which is at position ``start``; the cache holds those before."""
        token = self.step(tokens=tokens, start=start, blocks=blocks)[0].token
        assert token is not None
        return token

    def decode(self, tokens: list[int], blocks: list[int], count: int) -> list[int]:
        """``count`` tokens after ``tokens``. The cache holds the KV of all of ``tokens`` but the last."""
        made: list[int] = []
        while len(made) < count:
            last = made[-1] if made else tokens[-1]
            made.append(self.compute([last], len(tokens) - 1 + len(made), blocks))
        return made

    def allocate(self, num_tokens: int) -> list[int]:
        """Zeroed manager blocks for so many tokens, in no order; the same numbers on every rank."""
        count = -(-num_tokens // self.form.block_size)
        if count > len(self.free):
            raise RuntimeError(f"{num_tokens} tokens need {count} blocks, {len(self.free)} are free")
        taken = [self.free.pop((7 * n) % len(self.free)) for n in range(count)]
        self.step(new_blocks=taken)
        return taken

    def digests(self, blocks: list[int], num_tokens: int) -> Digests:
        """Digests of the KV bytes of a prompt."""
        outputs = self.step(blocks=blocks, digest_tokens=num_tokens)[1]
        layers = zip(*(output.digests for output in outputs), strict=True)
        return [{head: {own[head] for own in each if head in own} for head in set().union(*each)} for each in layers]

    # --- requests -----------------------------------------------------------------------------------------------

    def generate(self, tokens: list[int], count: int) -> list[int]:
        """Prefill and decode, nothing handed over."""
        blocks = self.allocate(len(tokens) + count)
        first = self.compute(tokens, 0, blocks)
        made = [first, *self.decode([*tokens, first], blocks, count - 1)]
        self.free += blocks
        return made

    def prefill(self, request: str, tokens: list[int]) -> tuple[dict[str, Any], Digests]:
        """P: compute a prompt and lease its blocks. The parameters tell D where to fetch them."""
        blocks = self.allocate(len(tokens))
        self.compute(tokens, 0, blocks)
        digests = self.digests(blocks, len(tokens))
        view = RequestView(request, {"do_remote_decode": True}, tokens, len(tokens), len(tokens))
        held, params = self.scheduler.request_finished(view, (blocks,), completed=True)
        if not held or params is None:
            raise RuntimeError(f"{request} was not leased")
        self._leased[request] = blocks
        self.step()  # brings the lease to the ranks
        return params, digests

    def corrupt(self, request: str) -> None:
        """P: change one number of a leased prompt on every rank."""
        self.step(corrupt=self._leased[request][0])

    def fetch_and_decode(
        self, request: str, tokens: list[int], params: dict[str, Any], count: int
    ) -> tuple[Digests, list[int], str]:
        """D: fetch a prompt's KV, then decode. A load that fails is an error here, never a recomputation.

        Returns:
            Digests of the KV bytes before anything is computed, the tokens, and a clause on the load.
        """
        view = RequestView(request, params, tokens, len(tokens), 0)
        num_tokens, _ = self.scheduler.num_new_matched_tokens(view, 0)
        assert num_tokens is not None, "only of a prompt that P is asked for by name"
        blocks = self.allocate(len(tokens) + count)
        self.scheduler.after_alloc(view, (blocks,), num_tokens)
        milliseconds, planes = self._await_load(request)
        digests = self.digests(blocks, num_tokens)
        made = self.decode(tokens, blocks, count)
        self.scheduler.request_finished(view, (blocks,), completed=True)
        self.free += blocks
        loaded = f"{num_tokens} of {len(tokens)} tokens loaded by {planes} in {milliseconds:.1f} ms"
        return digests, made, loaded

    def _await_load(self, request: str) -> tuple[float, str]:
        """Step until every rank has reported a load: milliseconds, and the data planes of all ranks."""
        started, planes = time.perf_counter(), set()
        while True:
            output, outputs = self.step()
            planes |= {plane for each in outputs for plane in each.planes}
            if request in (output.kv_connector_output.finished_recving or ()):
                break
            if time.perf_counter() - started > SECONDS / 2:
                reported = self.aggregator.pending().get(request, ())
                raise RuntimeError(f"{request} was not loaded in {SECONDS / 2:g} s; ranks that reported it: {reported}")
        if request in output.kv_connector_output.failed_recving:
            raise RuntimeError(f"the load of {request} failed")
        return (time.perf_counter() - started) * 1e3, "+".join(sorted(planes)) or "none"
