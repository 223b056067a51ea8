"""Two ranks without an engine, each a real worker half in a process of its own, that hand a known pattern over.

``kvferry doctor`` checks data planes by them, ``kvferry bench`` measures them.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import tempfile
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta

from kvferry.cli.terminal import FailedError
from kvferry.connector.config import Settings
from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.wire.step_plan import KeepLease, LeaseGrant, Load, PeerEngine, RankAddress, StepPlan, pack_ids
from kvferry.connector.worker.worker import WorkerHalf
from kvferry.transport.control.key_file import make_key_file
from kvferry.transport.errors import KVFerryError

ELEMENT_BYTES = 4
"""The elements are int32 whatever the model's dtype is: a hand-over moves bytes."""
BLOCK_TOKENS = 16
LEASE_SECONDS = 30.0
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["kvferry.cli.rank_pair"])  # imports PyTorch once, not for each rank

Count = Annotated[int, Meta(ge=1, le=1 << 24)]


class CacheForm(msgspec.Struct, frozen=True):
    """The caches of one rank. ``content``: int32 elements of one (head, token) of a layer, K and V together.
    ``tokens``: of the longest prompt."""

    layers: Count = 8
    heads: Count = 8
    content: Count = 64
    tokens: Count = 4096

    @property
    def blocks(self) -> int:
        return -(-self.tokens // BLOCK_TOKENS)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.layers * self.heads * self.content * ELEMENT_BYTES

    def caches(self, device: str) -> dict[str, torch.Tensor]:
        """[B, H, N, C] int32 of zeros for each layer, in memory [B, N, H, C], as vLLM's default is."""
        shape = self.blocks, BLOCK_TOKENS, self.heads, self.content
        return {
            f"layer {number}": torch.zeros(shape, dtype=torch.int32, device=device).transpose(1, 2)
            for number in range(self.layers)
        }

    def pattern(self, layer: int, salt: int) -> torch.Tensor:
        """The elements of a layer in the order of the prompt's tokens, int32 [T, H, C]. Each element is another, and
        each hand-over has its own ``salt``."""
        count = self.blocks * BLOCK_TOKENS
        numbers = torch.arange(count * self.heads * self.content, dtype=torch.int32)
        mixed = numbers * -1640531527 + (layer * 65536 + salt) * 40503  # times an odd number: one to one
        return mixed.reshape(count, self.heads, self.content)


# --- the process of a rank ------------------------------------------------------------------------------------------


class PairRank:
    """One rank: caches of a form, and a worker half that hands them over. ``side``: "p" or "d". ``seed``: of the order
    of the blocks, which has no runs."""

    def __init__(self, side: str, plane: str, device: str, host: str, key: str, seed: int, form: CacheForm) -> None:
        self.form, self.caches, self.warnings = form, form.caches(device), deque[str](maxlen=8)
        self.blocks = np.random.default_rng(seed).permutation(form.blocks).tolist()
        log = logging.Handler(logging.WARNING)
        log.emit = lambda record: self.warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("vllm.kvferry").handlers = [log]
        settings = Settings(plane=plane, side_channel_host=host, key_file=key)
        info = RankInfo(engine_id=f"pair-{side}", tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, model={})
        group = LayerGroup("full", tuple(self.caches), BLOCK_TOKENS, form.heads)
        self.worker = WorkerHalf(settings, info, [group])
        self.worker.register(self.caches)

    def address(self) -> RankAddress | None:
        return self.worker.address

    def fill(self, salt: int) -> None:
        """P: write the longest prompt into the caches."""
        form = self.form
        for number, cache in enumerate(self.caches.values()):
            paged = form.pattern(number, salt).reshape(form.blocks, BLOCK_TOKENS, form.heads, form.content)
            cache[self.blocks] = paged.transpose(1, 2).to(cache.device)

    def clear(self) -> None:
        for cache in self.caches.values():
            cache.zero_()

    def grant(self, request: str, token: bytes, tokens: int) -> None:
        """P: lease the first ``tokens`` of the pattern."""
        self.worker.post(StepPlan(leases=(LeaseGrant(request, token, tokens, (self._ids(tokens),)),)))
        self.worker.take_results()

    def load(self, request: str, token: bytes, tokens: int, peer: RankAddress, deadline: float) -> tuple[int, float]:
        """D: fetch what P has leased. Returns the bytes, and the seconds from the request to D's report, as the metrics
        count them. Raises FailedError: why it was not possible, in one line."""
        engine = PeerEngine("pair-p", 1, 1, LEASE_SECONDS, (peer,))
        load = Load(request, token, engine, (self._ids(tokens),), ((0, tokens),))
        keep = KeepLease(request, token, engine, False)
        self.worker.post(StepPlan(decode_engine=bytes(16), keeps=(keep,), loads=(load,)))
        while time.monotonic() < deadline:
            results = self.worker.take_results()
            if request in results.failed:
                raise FailedError("; ".join(self.warnings) or "the log has no reason")
            if request in results.received:
                assert self.worker.rank_context is not None
                figures = self.worker.rank_context.stats.take()
                assert figures is not None
                (samples,) = figures["finished"].values()
                return samples["nbytes"][0], max(1, samples["microseconds"][0]) / 1e6
            time.sleep(1e-3)
        raise FailedError(f"no end in time; {'; '.join(self.warnings)}")

    def _ids(self, tokens: int) -> bytes:
        return pack_ids(self.blocks[: -(-tokens // BLOCK_TOKENS)])

    def differing(self, salt: int, tokens: int) -> int:
        """D: how many bytes of the first ``tokens`` are not as P wrote them."""
        form, wrong = self.form, 0
        for number, cache in enumerate(self.caches.values()):
            found = cache[self.blocks].cpu().transpose(1, 2).reshape(-1, form.heads, form.content)[:tokens]
            wanted = form.pattern(number, salt)[:tokens]
            wrong += int((found.contiguous().view(torch.uint8) != wanted.view(torch.uint8)).sum())
        return wrong

    def close(self) -> None:
        self.worker.close()


def _serve(orders: Connection, kind: type[PairRank]) -> None:
    """Make ranks and call their methods, as ``orders`` says, until its other end is closed."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    for name in [name for name in os.environ if name.startswith("KVFERRY_")]:
        del os.environ[name]
    logging.getLogger("vllm.kvferry").propagate = False
    rank: PairRank | None = None
    with suppress(EOFError):
        while True:
            do, arguments = orders.recv()
            try:
                if do == "start":
                    rank, answer = kind(*arguments), None
                else:
                    answer = getattr(rank, do)(*arguments)
            except (KVFerryError, FailedError, RuntimeError) as error:  # RuntimeError: of PyTorch, such as a full GPU
                answer = FailedError(str(error).splitlines()[0])
            orders.send(answer)


# --- the parent -----------------------------------------------------------------------------------------------------


class RankProcess:
    """The parent's end of the process of one rank."""

    def __init__(self, kind: type[PairRank]) -> None:
        self._orders, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve, args=(theirs, kind), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, do: str, deadline: float, *arguments: Any) -> Any:
        """The answer to an order by ``deadline`` (``time.monotonic``). Raises FailedError: it is an error, or none came
        in time, or the process has ended."""
        self.order(do, *arguments)
        return self.answer(deadline)

    def order(self, do: str, *arguments: Any) -> None:
        with suppress(OSError):  # ``answer`` reports the end
            self._orders.send((do, arguments))

    def answer(self, deadline: float) -> Any:
        if not self._orders.poll(max(0.0, deadline - time.monotonic())):
            raise FailedError("no answer in time: the process hangs, or the machine is overloaded")
        try:
            answer = self._orders.recv()
        except (EOFError, OSError):
            self._process.join(10)
            raise FailedError(f"its process has ended with status {self._process.exitcode}") from None
        if isinstance(answer, FailedError):
            raise answer
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._orders.close()


class RankPair:
    """Two processes that hand prompts over from the first to the second, with a key made for them; ``host``: where they
    listen. Each method may raise FailedError; only ``close`` may follow, and then ``start`` with new processes."""

    def __init__(self, host: str, kind: type[PairRank] = PairRank) -> None:
        self._host, self._kind = host, kind
        self._ranks: list[RankProcess] = []
        self._peer: RankAddress | None = None
        self._serial = self._salt = 0

    def start(self, plane: str, device: torch.device, form: CacheForm, deadline: float) -> None:
        """Make caches on both sides and fill those of P, until ``deadline`` (``time.monotonic``). The pair must be new,
        or ``stop`` must come before."""
        while len(self._ranks) < 2:
            self._ranks.append(RankProcess(self._kind))
        with tempfile.TemporaryDirectory() as directory:
            make_key_file(key := Path(directory) / "key")
            for seed, (rank, side) in enumerate(zip(self._ranks, "pd", strict=True)):
                rank.order("start", side, plane, device_of(device, side), self._host, str(key), seed, form)
            for rank in self._ranks:
                rank.answer(deadline)
        self._peer = self._ranks[0].ask("address", deadline)
        self.fill(deadline)

    def fill(self, deadline: float) -> None:
        """Have another pattern on P, and none on D."""
        self._salt += 1
        p, d = self._ranks
        p.order("fill", self._salt)
        d.ask("clear", deadline)
        p.answer(deadline)

    def hand_over(self, tokens: int, deadline: float) -> tuple[int, float]:
        """As ``PairRank.load`` of the first ``tokens``."""
        p, d = self._ranks
        self._serial += 1
        prompt = f"pair {self._serial}", secrets.token_bytes(16), tokens
        p.ask("grant", deadline, *prompt)
        moved: tuple[int, float] = d.ask("load", deadline, *prompt, self._peer, deadline - 1.0)
        return moved

    def differing(self, tokens: int, deadline: float) -> int:
        """How many bytes on D are not as P wrote them."""
        wrong: int = self._ranks[1].ask("differing", deadline, self._salt, tokens)
        return wrong

    def stop(self, deadline: float) -> None:
        """End the ranks; their processes can start others."""
        for rank in reversed(self._ranks):
            rank.ask("close", deadline)

    def close(self) -> None:
        while self._ranks:
            self._ranks.pop().close()


def device_of(device: torch.device, side: str) -> str:
    """P takes the first GPU, and D another one where there is one."""
    if device.type == "cpu":
        return "cpu"
    return f"cuda:{1 if side == 'd' and torch.cuda.device_count() > 1 else 0}"
