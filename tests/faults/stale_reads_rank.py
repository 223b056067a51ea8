"""The P and the D of ``stale_reads.py``, each in a process of its own.

Times are of ``time.monotonic``, which both processes share.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from kvferry.connector.decode_side import link, read
from kvferry.connector.wire.step_plan import LeaseGrant, PeerEngine, StepPlan, pack_ids
from kvferry.transport.channels import ByteRanges, Copy
from kvferry.transport.planes import cma
from tests.support.inside import consumer_of, thread_of
from tests.support.ranks import Rank, Timed, load_plan, peer
from tests.support.remote import tell

POOL, BLOCKS, BLOCK_SIZE = 24, 7, 16
"""Blocks of P's cache and of D's, blocks of one prompt, tokens of one block."""
PIECES = 8
"""Into how many pieces a slow reader of host memory divides its read, with a pause after each."""
TURN_SECONDS = 2e-4
CYCLES_PER_SECOND = 1.5e9
"""About the clock of a GPU: how long a slow reader's kernel waits need not be exact."""


class RacingRank:
    def __init__(self, fence: str, lease_seconds: float, device: str, plane: str) -> None:
        settings = Timed(plane=plane, lease_seconds=lease_seconds, ask_hold_seconds=lease_seconds)
        self._device = device
        self._rank = Rank(
            engine_id=f"engine-{type(self).__name__}", settings=settings, blocks=POOL, block_size=BLOCK_SIZE,
            layers=8, content=64, device=device,
        )  # fmt: skip
        self.close = self._rank.close


class Producer(RacingRank):
    """P: a pool of 24 blocks. Blocks whose lease has ended are overwritten in the same turn."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._free = list(range(POOL))
        self._leased: dict[str, list[int]] = {}
        self._waiting: list[int] = []

    def where(self) -> PeerEngine:
        return peer([self._rank])

    def grant(self, race: int) -> None:
        """Lease a prompt, once there are blocks for it."""
        self._waiting.append(race)

    def idle(self) -> float:
        self._rank.poll()
        for name in [name for name in self._leased if name in self._rank.sent]:
            blocks, begun = self._leased.pop(name), time.monotonic()
            self._write(blocks, -2 - int(name))
            tell({"race": int(name), "begun": begun, "ended": time.monotonic()})
            self._free += blocks
        while self._waiting and len(self._free) >= BLOCKS:
            self._grant(self._waiting.pop(0))
        return TURN_SECONDS

    def _grant(self, race: int) -> None:
        blocks, self._free = self._free[:BLOCKS], self._free[BLOCKS:]
        self._write(blocks, race)
        token = secrets.token_bytes(16)
        lease = LeaseGrant(str(race), token, BLOCKS * BLOCK_SIZE, (pack_ids(blocks),))
        self._rank.worker.post(StepPlan(leases=(lease,)))
        self._leased[str(race)] = blocks
        tell({"race": race, "token": token})

    def _write(self, blocks: list[int], value: int) -> None:
        for cache in self._rank.caches.values():
            cache[blocks] = value
        if self._device == "cuda":
            torch.cuda.synchronize()


class Decoder(RacingRank):
    """D: reads slowly, and says of each load whether it was done, and whether its bytes were P's."""

    def __init__(self, fence: str, **options: Any) -> None:
        if fence == "off":
            take_every_read_for_good()
        if fence == "commit":  # D asks P for each grant, and commits each read
            mock.patch.object(link, "BoardReader", side_effect=OSError("switched off")).start()
        super().__init__(fence, **options)
        self._blocks: dict[str, list[int]] = {}
        self._slow: dict[str, float] = {}
        self._begun: dict[str, float] = {}
        self._copies: dict[str, Copy] = {}
        self._read_as = ""
        self._receiver: Any = consumer_of(thread_of(self._rank)).reads
        self._slow_down()

    def load(self, race: int, token: bytes, slow: float, blocks: list[int], engine: PeerEngine) -> None:
        name = str(race)
        self._blocks[name], self._slow[name] = blocks, slow
        self._rank.worker.post(load_plan(name, token, engine, blocks, 0, BLOCKS * BLOCK_SIZE))

    def idle(self) -> float:
        self._rank.poll()
        for name in [name for name in self._blocks if name in self._rank.received]:
            blocks, done = self._blocks.pop(name), name not in self._rank.failed
            right = done and all(bool((cache[blocks] == int(name)).all()) for cache in self._rank.caches.values())
            copy = self._copies.pop(name, None)
            read = [self._begun[name], copy.ended_at or time.monotonic()] if copy is not None else None
            tell({"race": int(name), "done": done, "right": right, "read": read})
        return TURN_SECONDS

    # --- slow reads ---------------------------------------------------------------------------------------------

    def _slow_down(self) -> None:
        """Make the copies take as long as each order says. They are real, and of real memory of P."""
        begin, receiver = self._receiver.begin_pull, self._receiver

        def begin_pull(read: Any, *rest: Any) -> None:
            name = read.fetch.load.request_id
            self._begun[name] = time.monotonic()
            with self._of(name):
                begin(read, *rest)
            self._copies[name] = next(reversed(receiver.writes)).copy

        receiver.begin_pull = begin_pull
        if self._device == "cuda":
            self._slow_down_kernels()
        else:
            self._slow_down_calls()

    def _slow_down_kernels(self) -> None:
        copies: Any = self._rank.context.caches.copies
        start = copies.start

        def slow_start(enqueue: Any, *rest: Any) -> Copy:
            cycles = int(self._slow.get(self._read_as, 0.0) * CYCLES_PER_SECOND)

            def slowly() -> None:
                torch.cuda._sleep(cycles * 3 // 4)
                enqueue()
                torch.cuda._sleep(cycles // 4)

            return start(slowly, *rest)

        copies.start = slow_start

    def _slow_down_calls(self) -> None:
        turn, copy_ranges, rank = cma.CmaCopy.turn, cma.copy_ranges, self

        def slow_turn(self: cma.CmaCopy) -> None:
            with rank._of(next(w.read.fetch.load.request_id for w in rank._receiver.writes if w.copy is self)):
                turn(self)
                self.ended_at = time.monotonic()

        def slow_ranges(pid: int, ranges: ByteRanges) -> None:
            pause = self._slow.get(self._read_as, 0.0) / PIECES
            size = -(-len(ranges.nbytes) // PIECES)
            for first in range(0, len(ranges.nbytes), size):
                copy_ranges(pid, ByteRanges(*(column[first : first + size] for column in ranges)))
                time.sleep(pause)

        cma.CmaCopy.turn, cma.copy_ranges = slow_turn, slow_ranges  # type: ignore[method-assign]

    @contextmanager
    def _of(self, name: str) -> Iterator[None]:
        self._read_as = name
        try:
            yield
        finally:
            self._read_as = ""


def take_every_read_for_good() -> None:
    """The planted fault: D does not ask whether the lease stood until the end of its read."""
    read.Reads.commit = lambda self, read, now: read.prove(now)  # type: ignore[method-assign]
