"""One process of ``stale_reads.py``: ``stale_reads_rank.py ROLE OPTIONS``, the P or the D of its races.

One JSON line per order on stdin, one per answer on stdout. Times are of ``time.monotonic``, which both processes share.
"""

from __future__ import annotations

import base64
import json
import queue
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import torch

from kvferry.connector.config import Settings
from kvferry.connector.decode_side import link, read
from kvferry.connector.wire.step_plan import LeaseGrant, PeerEngine, StepPlan, pack_ids
from kvferry.transport.channels import ByteRanges, Copy
from kvferry.transport.planes import cma
from tests.support.inside import consumer_of, thread_of
from tests.support.ranks import Rank, load_plan, peer

POOL, BLOCKS, BLOCK_SIZE = 24, 7, 16
"""Blocks of P's cache and of D's, blocks of one prompt, tokens of one block."""
PIECES = 8
"""Into how many pieces a slow reader of host memory divides its read, with a pause after each."""
TURN_SECONDS = 2e-4
CYCLES_PER_SECOND = 1.5e9
"""About the clock of a GPU: how long a slow reader's kernel waits need not be exact."""


def say(**answer: Any) -> None:
    """One answer."""
    print(json.dumps(answer), flush=True)


def orders() -> queue.SimpleQueue[dict[str, Any] | None]:
    """The orders, as they come in; ``None`` is the end."""
    found: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            found.put(json.loads(line))
        found.put(None)

    threading.Thread(target=listen, daemon=True).start()
    return found


def taken(source: queue.SimpleQueue[dict[str, Any] | None]) -> Iterator[dict[str, Any] | None]:
    """The orders that are here now; waits for a moment where there is none."""
    with_wait = True
    while True:
        try:
            yield source.get(timeout=TURN_SECONDS) if with_wait else source.get_nowait()
        except queue.Empty:
            return
        with_wait = False


class Producer:
    """P: a pool of 24 blocks. Blocks whose lease has ended are overwritten in the same turn."""

    def __init__(self, rank: Rank, device: str) -> None:
        self._rank, self._device = rank, device
        self._free = list(range(POOL))
        self._leased: dict[str, list[int]] = {}
        self._waiting: list[int] = []
        self._orders = orders()

    def serve(self) -> None:
        """Until the orders end."""
        while True:
            for order in taken(self._orders):
                if order is None:
                    return
                self._waiting.append(order["race"])
            self._rank.poll()
            for name in [name for name in self._leased if name in self._rank.sent]:
                blocks = self._leased.pop(name)
                begun = time.monotonic()
                self._write(blocks, -2 - int(name))
                say(reused=int(name), begun=begun, ended=time.monotonic())
                self._free += blocks
            while self._waiting and len(self._free) >= BLOCKS:
                self._grant(self._waiting.pop(0))

    def _grant(self, race: int) -> None:
        blocks, self._free = self._free[:BLOCKS], self._free[BLOCKS:]
        self._write(blocks, race)
        token = secrets.token_bytes(16)
        lease = LeaseGrant(str(race), token, BLOCKS * BLOCK_SIZE, (pack_ids(blocks),))
        self._rank.worker.post(StepPlan(leases=(lease,)))
        self._leased[str(race)] = blocks
        say(granted=race, token=base64.b64encode(token).decode())

    def _write(self, blocks: list[int], value: int) -> None:
        for cache in self._rank.caches.values():
            cache[blocks] = value
        if self._device == "cuda":
            torch.cuda.synchronize()


class Decoder:
    """D: reads slowly, and says of each load whether it was done, and whether its bytes were P's."""

    def __init__(self, rank: Rank, device: str) -> None:
        self._rank, self._device = rank, device
        self._orders = orders()
        self._blocks: dict[str, list[int]] = {}
        self._slow: dict[str, float] = {}
        self._begun: dict[str, float] = {}
        self._copies: dict[str, Copy] = {}
        self._read_as = ""
        thread: Any = thread_of(rank)
        self._receiver = consumer_of(thread).reads
        self._slow_down()

    def serve(self, engine: PeerEngine) -> None:
        """Until the orders end."""
        while True:
            for order in taken(self._orders):
                if order is None:
                    return
                name, blocks = str(order["race"]), order["blocks"]
                self._blocks[name], self._slow[name] = blocks, order["slow"]
                token, tokens = base64.b64decode(order["token"]), BLOCKS * BLOCK_SIZE
                self._rank.worker.post(load_plan(name, token, engine, blocks, 0, tokens))
            self._rank.poll()
            for name in [name for name in self._blocks if name in self._rank.received]:
                self._say_end(name, self._blocks.pop(name))

    def _say_end(self, name: str, blocks: list[int]) -> None:
        done = name not in self._rank.failed
        right = done and all(bool((cache[blocks] == int(name)).all()) for cache in self._rank.caches.values())
        copy = self._copies.pop(name, None)
        read = [self._begun[name], copy.ended_at or time.monotonic()] if copy is not None else None
        say(race=int(name), done=done, right=right, read=read)

    # --- slow reads ---------------------------------------------------------------------------------------------

    def _slow_down(self) -> None:
        """Make the copies take as long as each order says. They are real, and of real memory of P."""
        begin, receiver = self._receiver.begin_pull, self._receiver

        def begin_pull(read: Any, *rest: Any) -> Any:
            name = read.active_load.load.request_id
            self._begun[name] = time.monotonic()
            with self._of(name):
                event = begin(read, *rest)
            self._copies[name] = next(reversed(receiver.writes)).copy
            return event

        receiver.begin_pull = begin_pull
        if self._device == "cuda":
            self._slow_down_kernels()
        else:
            self._slow_down_calls()

    def _slow_down_kernels(self) -> None:
        assert self._rank.worker.rank_context is not None
        copies: Any = self._rank.worker.rank_context.caches.copies
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
        turn, copy_ranges = cma.CmaCopy.turn, cma.copy_ranges

        rank = self

        def slow_turn(self: cma.CmaCopy) -> None:
            with rank._of(next(w.read.active_load.load.request_id for w in rank._receiver.writes if w.copy is self)):
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
    commit = read.SourceRead.commit

    def unfenced(self: Any, now: float) -> Any:
        return commit(self, now) or self.answered(True, now)

    read.SourceRead.commit = unfenced  # type: ignore[method-assign]


def find_no_board(*_: object) -> None:
    """In place of ``BoardReader``: D asks P for each grant, and commits each read."""
    raise OSError("switched off")


def main() -> None:
    torch.set_num_threads(1)
    role, options = sys.argv[1], json.loads(sys.argv[2])
    if options["fence"] == "off":
        take_every_read_for_good()
    if options["fence"] == "commit":
        mock.patch.object(link, "BoardReader", find_no_board).start()
    lease = options["lease_seconds"]
    settings = Settings(plane=options["plane"], lease_seconds=lease, ask_hold_seconds=lease)
    rank = Rank(
        engine_id=f"engine-{role}", settings=settings, blocks=POOL, block_size=BLOCK_SIZE, layers=8, content=64,
        device=options["device"],
    )  # fmt: skip
    say(engine=base64.b64encode(msgspec.msgpack.encode(peer([rank]))).decode())
    if role == "p":
        Producer(rank, options["device"]).serve()
    else:
        engine = msgspec.msgpack.decode(base64.b64decode(options["engine"]), type=PeerEngine)
        Decoder(rank, options["device"]).serve(engine)
    rank.close()


if __name__ == "__main__":
    main()
