"""A process that is some ranks of one side: real caches, control plane and data planes."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import msgspec
import torch

from kvferry.connector.decode_side.fetch import RankRead
from kvferry.connector.geometry.engine_types import CacheDtype, LayerGroup, RankInfo
from kvferry.connector.geometry.rank_geometry import CacheKind
from kvferry.connector.geometry.recurrent_state import StateArray, sections
from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.connector.pages import copies
from kvferry.connector.pages.copies import WaitPolicy
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import KeepLease, LeaseGrant, Load, PeerEngine, RankAddress, StepPlan, pack_ids
from kvferry.connector.worker import worker_setup
from kvferry.connector.worker.worker import WorkerHalf
from kvferry.transport.channels import Copy
from tests.handover.slow_copies import SlowCopies
from tests.ranks.caches import RankCaches, StateCaches, Table, layer_name
from tests.ranks.pairing import INPUTS, ITEM_SIZES, STATE_SIZE, Pairing, Rank
from tests.support.inside import consumer_of, producer_of, thread_of
from tests.support.ranks import LANES, Timed
from tests.support.remote import Remote

SLOT_BYTES = 64 << 10
"""So small that a hand-over takes several messages."""
LATE = 300_000_000
"""Cycles by which a GPU's copies come later where a step computes with them: some 0.2 s, far more than its launch. On
the host they come once the engine's device waits for them, or has read without."""


class HostedRank:
    """One rank: its caches, its worker half, and what was seen of it."""

    def __init__(
        self, pairing: Pairing, side: str, rank: Rank, engine_id: str, device: str = "cpu", *, late: bool = False
    ) -> None:
        """``late``: its device's copies end long after they were started."""
        self.pairing, self.side, self.rank = pairing, side, rank
        if pairing.plane == "nixl":
            os.environ["UCX_TLS"] = LANES
        copies.BOUNCE_BYTES = SLOT_BYTES // 4  # some chunks pass through a buffer of the GPU, some do not
        kind: type[StateCaches | RankCaches] = StateCaches if pairing.model.kind == "state" else RankCaches
        self.caches = kind(pairing, side, rank, device)
        form, model = pairing.form(side), pairing.model
        settings = Timed(
            plane=pairing.plane, slot_bytes=SLOT_BYTES, staging_bytes=16 << 20, lease_seconds=900.0,
            handshake_timeout_seconds=600.0, transfer_timeout_seconds=600.0, ask_hold_seconds=600.0,
            convert_dtype=side == "d" and pairing.converts,
        )  # fmt: skip
        info = RankInfo(
            engine_id=engine_id, tp_rank=rank[1], tp_size=form.size, pp_rank=rank[0], pp_size=form.pp,
            model={"architectures": "Numbered"},
        )  # fmt: skip
        groups = [_states(self.caches)] if isinstance(self.caches, StateCaches) else [
            LayerGroup(
                cast(CacheKind, table.kind), tuple(map(layer_name, table.layers)), form.block,
                1 if table.kind == "mla" else model.heads, table=number,
                sharding=TokenSharding(form.dcp, form.interleave),
                cache_dtype=self._cache_dtype(table),
            )
            for number, table in enumerate(self.caches.tables)
        ]  # fmt: skip
        self.worker = WorkerHalf(settings, info, groups, loads_fail_requests=late)  # so a step is patient
        slow = patch.object(worker_setup, "copies_on", lambda *_: SlowCopies())
        with slow if late and device == "cpu" else nullcontext():
            self.worker.register(self.caches.registered(), pairing.pages(side))
        assert self.worker.rank_context is not None
        self._context = self.worker.rank_context
        self.copies = self._context.caches.copies
        self._reads = threading.Event()
        if late:
            self._come_late()
        self.asks: list[tuple[Rank, list[list[int]]]] = []
        self.released: list[int] = []
        self.released_when_freed: list[int] | None = None
        self.why_freed = ""
        self.done = self.failed = False
        self.computed = False  # a step has read the caches
        self._listen_in()

    def _cache_dtype(self, table: Table) -> CacheDtype | None:
        """As vLLM tells of them: bytes say nothing."""
        form = self.pairing.form(self.side)
        if form.dtype == "int32":
            return None
        scaled = form.dtype.startswith("float8")
        scales = {layer_name(layer): form.scales(layer) for layer in table.layers} if scaled else {}
        return CacheDtype(form.dtype, self.pairing.keys(table.kind), scales)

    def _listen_in(self) -> None:
        """Note what D asks for and what P is released by; everything goes its way."""
        thread = thread_of(self)
        assert thread is not None
        reads, producer, stats = consumer_of(thread).reads, producer_of(thread), thread.rank_context.stats
        ask, handle, lease_ended = reads.ask, producer.handle, stats.lease_ended

        def asked(read: RankRead, now: float) -> Any:
            address = read.address
            spans = [msgspec.to_builtins(item.span) for item in read.planned]
            self.asks.append(((address.pp_rank, address.tp_rank), spans))
            return ask(read, now)

        def handled(identity: bytes, request: messages.Request, now: float, address: str) -> None:
            if isinstance(request, messages.Release):
                self.released.append(request.decode_rank)
            handle(identity, request, now, address)

        def ended(reason: str) -> None:
            self.released_when_freed, self.why_freed = list(self.released), reason
            lease_ended(reason)

        reads.ask = asked
        producer.handle = handled
        stats.lease_ended = ended  # type: ignore[method-assign]

    @property
    def tables(self) -> tuple[bytes, ...]:
        ids = [pack_ids(ids) for ids in self.pairing.tables(self.side)]
        return tuple(ids[:1] if self.pairing.model.kind == "state" else ids)

    def grant(self, token: bytes) -> None:
        self.worker.post(StepPlan(leases=(LeaseGrant("req-p", token, self.pairing.tokens, self.tables),)))

    def load(self, token: bytes, peer: PeerEngine, *, inside: bool = False) -> None:
        """``inside``: the step computes with it."""
        span = (0, 1) if self.pairing.model.kind == "state" else (self.pairing.start, self.pairing.tokens)
        load = Load("req-d", token, peer, self.tables, (span,) * len(self.tables), now=inside)
        self.worker.post(
            StepPlan(decode_engine=b"c" * 16, keeps=(KeepLease("req-d", token, peer, False),), loads=(load,))
        )

    def _come_late(self) -> None:
        """Its copies; what is launched after them does not by itself."""
        start = self.copies.start

        def late(enqueue: Callable[[], None], wait: WaitPolicy = WaitPolicy.NONE) -> Copy:
            def act() -> None:
                if self.copies.device.type == "cuda":
                    torch.cuda._sleep(LATE)
                else:
                    self._reads.wait(60)
                enqueue()

            return start(act, wait)

        self.copies.start = late  # type: ignore[method-assign]

    def compute(self) -> None:
        """A step that computes with its load: its device reads the caches when the engine would."""
        try:
            self.worker.begin_step()
            if isinstance(self.copies, SlowCopies) and self.copies.held:  # a GPU's stream waits by itself
                self._reads.set()
                assert all(event.wait(60) for event in self.copies.held)
            self.caches.download()
        finally:
            self._reads.set()
        outcome = self.worker.take_outcome()
        self.failed = outcome is None or any(end.failed for end in outcome.ends().values())
        self.done = self.computed = True

    def poll(self) -> None:
        results = self.worker.take_results()
        reported = results.sent if self.side == "p" else results.received
        assert not (reported and self.done), "told twice"
        self.done |= bool(reported)
        self.failed |= bool(results.failed)

    def seen(self) -> dict[str, Any]:
        """What compare.py is given of this rank."""
        finished: dict[str, Any] = {}
        end = time.monotonic() + 600
        while not finished:
            figures = self._context.stats.take()
            finished = {} if figures is None else dict(figures["finished"])
            if not self.computed or self.failed or time.monotonic() > end:
                break
            time.sleep(1e-3)  # a load inside a step is counted after it was reported
        return {
            "pid": os.getpid(),
            "done": self.done,
            "failed": self.failed,
            "wrong": self.caches.wrong() if self.side == "d" else "",
            "bytes_wanted": self.caches.nbytes,
            "bytes": {plane: sum(samples["nbytes"]) for plane, samples in finished.items()},
            "asks": self.asks,
            "released_when_freed": self.released_when_freed,
            "why_freed": self.why_freed,
        }


def _states(caches: StateCaches) -> LayerGroup:
    """The group that an engine tells of, from the shapes of a rank's arrays."""
    form, heads, content = caches.form, len(caches.tables[0].heads), caches.pairing.model.content
    conv = (caches.width, INPUTS) if caches.pairing.dim_first else (INPUTS, caches.width)
    arrays = [StateArray(shape, "int32", ITEM_SIZES["int32"]) for shape in (conv, (heads, content, STATE_SIZE))]
    found = sections("MAMBA2", arrays, form.tp, dim_first=caches.pairing.dim_first, group_counts=frozenset({1}))
    return LayerGroup("state", tuple(map(layer_name, caches.layers)), 1, form.tp, sections=found)


def plant(fault: str, rank: HostedRank) -> None:
    """Damage done on purpose, to see the harness notice it."""
    if not fault:
        return
    caches = rank.caches
    assert isinstance(caches, RankCaches)
    if fault == "wrong element on P" and rank.side == "p" and rank.rank == (0, 0):
        table = caches.tables[0]
        page = int(caches.blocks[0][-1]) * (caches.form.block // caches.form.kernel)
        table.cache[-1, page, -1, 0, -1] ^= 1
    elif fault == "stray element on D" and rank.side == "d" and rank.rank == (0, 0):
        unused = next(n for n in range(rank.pairing.pages("d")) if n not in caches.blocks[0])
        caches.tables[0].cache[0, unused * (caches.form.block // caches.form.kernel), 0, 0, 0] = 7
    elif fault == "stray element in D's padding" and rank.side == "d" and rank.rank == (0, 0):
        caches.buffer[-1] = 7
    elif fault == "asks twice" and rank.side == "d":
        rank.asks *= 2
    elif fault == "device does not wait" and rank.side == "d":
        rank.copies.make_engine_wait = lambda *_: None  # type: ignore[method-assign]


class Host:
    """In its process: the ranks of one pairing after the other."""

    def __init__(self) -> None:
        self.ranks: list[HostedRank] = []

    def open(
        self, pairing: Pairing, side: str, ranks: list[Rank], engine_id: str, gpus: int, inside: bool
    ) -> list[RankAddress]:
        """``gpus``: how many the ranks share, if any. ``inside``: a step of D will compute with its load, and the
        copies are late."""
        for rank in ranks:
            device = f"cuda:{(sum(rank) + (side == 'd')) % gpus}" if gpus else "cpu"
            self.ranks.append(HostedRank(pairing, side, rank, engine_id, device, late=inside and side == "d"))
        return [rank.worker.address for rank in self.ranks if rank.worker.address is not None]

    def grant(self, token: bytes, fault: str) -> None:
        for rank in self.ranks:
            rank.caches.fill()
            plant(fault, rank)
            rank.caches.upload()
            rank.grant(token)

    def load(self, token: bytes, peer: PeerEngine, inside: bool, fault: str) -> None:
        for rank in self.ranks:
            rank.load(token, peer, inside=inside)
        for rank in self.ranks if inside else ():
            plant(fault, rank)
            rank.compute()

    def finish(self, seconds: float, fault: str) -> dict[Rank, dict[str, Any]]:
        """Step like an engine until every rank has reported, or the time is over. What was seen of each."""
        end = time.monotonic() + seconds
        while not all(rank.done for rank in self.ranks) and time.monotonic() < end:
            for rank in self.ranks:
                rank.poll()
            time.sleep(0.0005)
        for rank in self.ranks:
            if rank.side == "d" and not rank.computed:
                rank.caches.download()
                plant(fault, rank)
        return {rank.rank: rank.seen() for rank in self.ranks}

    def close(self) -> None:
        ranks, self.ranks = self.ranks, []
        for rank in ranks:
            rank.worker.close()


PROCESSES = 6  # Up to as many ranks have a process each; more share, those of one side with each other


@dataclass(frozen=True)
class Seen:
    """What was seen of every rank."""

    p: dict[Rank, dict[str, Any]]
    d: dict[Rank, dict[str, Any]]


class RankProcesses:
    """Processes that stay while pairings come and go."""

    def __init__(self, gpus: int = 0, remote: type[Remote] = Remote) -> None:
        """``gpus``: how many GPUs the caches lie on; in host memory where there are none. ``remote``: what
        kind of process each rank has."""
        self.gpus, self._remote = gpus, remote
        self._hosts: list[Remote] = []
        self._count = itertools.count()

    def run(self, pairing: Pairing, *, inside: bool = False, fault: str = "", seconds: float = 600.0) -> Seen:
        """One hand-over. ``inside``: a step of D computes with it. ``fault``: see ``rank_host.plant``. Raises
        RemoteError: ranks that did not start, or a process that ended or hangs; the processes are started anew."""
        if not self._hosts:
            self._hosts = [self._remote("tests.ranks.rank_host:Host") for _ in range(PROCESSES)]
            for host in self._hosts:
                host.timeout = seconds + 30
                host.answer()
        try:
            return self._run(pairing, inside, fault, seconds)
        except BaseException:
            self.close()
            raise

    def _run(self, pairing: Pairing, inside: bool, fault: str, seconds: float) -> Seen:
        p_shares, d_shares = shards(pairing.p.ranks(), pairing.d.ranks())
        number, token = next(self._count), secrets.token_bytes(16)
        p_hosts, d_hosts = self._hosts[: len(p_shares)], self._hosts[len(p_shares) :][: len(d_shares)]
        hosts = [*p_hosts, *d_hosts]
        for host, ranks in zip(hosts, [*p_shares, *d_shares], strict=True):
            side = "p" if host in p_hosts else "d"
            host.start("open", pairing, side, ranks, f"engine-{side}{number}", self.gpus, inside)
        addresses = [host.answer() for host in hosts][: len(p_hosts)]
        shardings = (TokenSharding(pairing.p.dcp, pairing.p.interleave),)
        peer = PeerEngine(
            f"engine-p{number}", pairing.p.size, pairing.p.pp, 300.0, tuple(itertools.chain(*addresses)),
            shardings=shardings,
        )  # fmt: skip
        every(p_hosts, "grant", token, fault)
        every(d_hosts, "load", token, peer, inside, fault)
        seen = every(hosts, "finish", seconds, fault)
        every([*d_hosts, *p_hosts], "close")
        of_p, of_d = ({rank: found for part in parts for rank, found in part.items()}
                      for parts in (seen[: len(p_hosts)], seen[len(p_hosts) :]))  # fmt: skip
        return Seen(of_p, of_d)

    def close(self) -> None:
        hosts, self._hosts = self._hosts, []
        for host in hosts:
            host.close()


def every(hosts: Sequence[Remote], command: str, *arguments: Any) -> list[Any]:
    """One command to all at once; their answers in order."""
    for host in hosts:
        host.start(command, *arguments)
    return [host.answer() for host in hosts]


def shards(p_ranks: list[Rank], d_ranks: list[Rank]) -> tuple[list[list[Rank]], list[list[Rank]]]:
    """The ranks of each process, P's and D's: one each as long as there are enough processes."""
    total = len(p_ranks) + len(d_ranks)
    for_p = len(p_ranks) if total <= PROCESSES else max(1, min(PROCESSES - 1, PROCESSES * len(p_ranks) // total))
    for_d = min(len(d_ranks), PROCESSES - for_p)
    return [p_ranks[n::for_p] for n in range(for_p)], [d_ranks[n::for_d] for n in range(for_d)]
