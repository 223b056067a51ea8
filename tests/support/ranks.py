"""Ranks of P and D without a model: real caches, real control plane, real data planes, every element labelled."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.link import LinkPhase
from kvferry.connector.geometry.engine_types import CacheDtype, LayerGroup, RankInfo
from kvferry.connector.geometry.regions import ElementOrder
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.connector.geometry.topology import TpKVTopology
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.wire.metrics import Figures, no_figures
from kvferry.connector.wire.step_plan import (
    KeepLease,
    LeaseGrant,
    Load,
    PeerEngine,
    RankAddress,
    StepPlan,
    StepResults,
    pack_ids,
)
from kvferry.connector.worker.loop import TransferThread
from kvferry.connector.worker.worker import WorkerHalf
from tests.support.inside import (
    clock_of,
    consumer_of,
    leases_of,
    producer_of,
    prompts_of,
    sends_of,
    set_clock,
    thread_of,
)

LANES = "cuda,tcp" if torch.cuda.is_available() else "tcp"
"""``UCX_TLS`` for NIXL: with a GPU it demands CUDA's copies, for host memory too; without one UCX warns of them on
stdout."""


@contextmanager
def lanes_of(plane: str) -> Iterator[None]:
    """The plane ``nixl`` goes over TCP here, unless ``UCX_TLS`` names other lanes."""
    before = os.environ.get("UCX_TLS")
    if plane == "nixl":
        os.environ["UCX_TLS"] = before or LANES
    try:
        yield
    finally:
        if plane == "nixl" and before is None:
            del os.environ["UCX_TLS"]


class Timed(Settings, frozen=True, kw_only=True):
    """As ``Settings``, with the properties of the same names as fields."""

    lease_cap_seconds: float = 600.0
    ask_hold_seconds: float = 10.0
    handshake_timeout_seconds: float = 10.0
    transfer_timeout_seconds: float = 30.0


class _Later:
    """A clock that is ahead of another."""

    def __init__(self, clock: Any, seconds: float) -> None:
        self.inner, self._seconds = clock, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def turn(self) -> float:
        return float(self.inner.turn()) + self._seconds


def _of(transfer_thread: Any) -> Any:
    clock: Any = clock_of(transfer_thread)
    return clock.inner if isinstance(clock, _Later) else clock


def put_forward(transfer_thread: Any, seconds: float) -> None:
    """It is ``seconds`` later for the transfer thread than it would be; a lease ends at a chosen moment."""
    set_clock(transfer_thread, _Later(_of(transfer_thread), seconds))


def hold_up(transfer_thread: Any, seconds: float) -> None:
    """The host lets the transfer thread's thread stand still for so long, as far as its clock says."""
    _of(transfer_thread).clock = lambda: time.monotonic() + seconds
    transfer_thread.wake()


def labels(layers: Sequence[int], heads: Sequence[int], tokens: int, content: int) -> torch.Tensor:
    """[L, H, T, C] int32, the labels of a whole prompt."""
    layer = torch.tensor(layers, dtype=torch.int64)[:, None, None, None]
    head = torch.tensor(heads, dtype=torch.int64)[None, :, None, None]
    token = torch.arange(tokens, dtype=torch.int64)[None, None, :, None]
    element = torch.arange(content, dtype=torch.int64)[None, None, None, :]
    return (element + content * (token + 4099 * (head + 67 * layer))).to(torch.int32)


WHOLE_SPLIT = UNSHARDED[0]


class Rank:
    """One rank of one engine: caches [B, H, N, C] per layer, and a worker half that serves them."""

    def __init__(
        self,
        *,
        engine_id: str = "engine",
        layers: int = 4,
        total_heads: int = 4,
        blocks: int = 32,
        block_size: int = 16,
        content: int = 16,
        layout: str = "HND",
        tp_rank: int = 0,
        tp_size: int = 1,
        settings: Settings | None = None,
        model: dict[str, str] | None = None,
        packing: str = "",
        places: ElementOrder | None = None,
        sharding: TokenSharding = WHOLE_SPLIT,
        cache_dtype: CacheDtype | None = None,
        device: str = "cpu",
    ) -> None:
        self.block_size, self.content = block_size, content
        first, count = TpKVTopology.head_interval(tp_rank, tp_size, total_heads)
        self.heads = list(range(first, first + count))
        self.layers = [f"model.layers.{n}.attn" for n in range(layers)]
        axes = (count, block_size) if layout == "HND" else (block_size, count)
        empty = {n: torch.full((blocks, *axes, content), -1, dtype=torch.int32, device=device) for n in self.layers}
        self.caches = empty if layout == "HND" else {n: cache.transpose(1, 2) for n, cache in empty.items()}
        self.settings = settings or Settings()
        info = RankInfo(
            engine_id=engine_id, tp_rank=tp_rank, tp_size=tp_size, pp_rank=0, pp_size=1,
            model=model or {"architectures": "Labelled"},
        )  # fmt: skip
        layer_group = LayerGroup(
            "full", tuple(self.layers), block_size, total_heads, packing=packing, sharding=sharding,
            cache_dtype=cache_dtype,
        )  # fmt: skip
        self.worker = WorkerHalf(self.settings, info, [layer_group])
        with lanes_of(self.settings.plane):
            self.worker.register(self.caches, places=places)
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.steps: list[StepResults] = []

    @property
    def address(self) -> RankAddress:
        assert self.worker.address is not None
        return self.worker.address

    @property
    def context(self) -> RankContext:
        assert self.worker.rank_context is not None
        return self.worker.rank_context

    @property
    def thread(self) -> TransferThread:
        return thread_of(self)

    @property
    def producer(self) -> Any:
        return producer_of(self)

    @property
    def consumer(self) -> Any:
        return consumer_of(self)

    def figures(self) -> Figures:
        """What the rank has counted since the last call; something has happened."""
        figures = self.context.stats.take()
        assert figures is not None
        return figures

    def counts(self, series: str) -> dict[str, int]:
        """Likewise, of one series by its labels; perhaps nothing."""
        return (self.context.stats.take() or no_figures())["counts"].get(series, {})

    def lease_ends(self) -> dict[str, int]:
        counts = self.figures()["counts"]
        ends = counts.get("num_released_leases", {}) | counts.get("num_expired_leases", {})
        return {end or "released": number for end, number in ends.items()}

    @property
    def plane(self) -> str:
        """The data planes of the hand-overs so far, from the rank's own figures."""
        return "+".join(self.figures()["finished"])

    def fill(self, block_ids: Sequence[int], tokens: int, salt: int = 0) -> None:
        """Write the labels of a prompt into these blocks; another ``salt`` is another prompt."""
        wanted, token = self.wanted(tokens) + salt, torch.arange(tokens)
        blocks, slots = torch.tensor(list(block_ids))[token // self.block_size], token % self.block_size
        for number, name in enumerate(self.layers):
            cache = self.caches[name]
            cache[blocks, :, slots] = wanted[number].transpose(0, 1).to(cache.device)  # [T, H, C]

    def read(self, block_ids: Sequence[int], tokens: int) -> torch.Tensor:
        """[L, H, T, C] int32 of a prompt, by plain indexing."""
        ids = torch.tensor(block_ids)
        stacked = torch.stack([self.caches[name] for name in self.layers])[:, ids]  # [L, n, H, N, C]
        flat = stacked.permute(0, 2, 1, 3, 4).reshape(len(self.layers), len(self.heads), -1, self.content)
        return flat[:, :, :tokens].cpu()

    def wanted(self, tokens: int) -> torch.Tensor:
        """[L, H, T, C] int32 that a hand-over must bring."""
        return labels(range(len(self.layers)), self.heads, tokens, self.content)

    def poll(self) -> None:
        """What an engine step does with results; an id told twice fails."""
        results = self.worker.take_results()
        self.steps.append(results)
        assert not self.sent & results.sent and not self.received & results.received, "told twice"
        assert results.failed <= results.received
        self.sent |= results.sent
        self.received |= results.received
        self.failed |= results.failed

    def close(self) -> None:
        self.worker.close()


def peer(ranks: Sequence[Rank], lease_seconds: float | None = None, engine_id: str = "engine-p") -> PeerEngine:
    """These ranks as the one P engine that D is told of."""
    term = lease_seconds or ranks[0].settings.lease_seconds
    return PeerEngine(engine_id, len(ranks), 1, term, tuple(rank.address for rank in ranks))


def grant(
    ranks: Sequence[Rank], request_id: str, block_ids: Sequence[int], tokens: int, token: bytes | None = None
) -> bytes:
    """Lease a prompt on every rank; the token."""
    token = token or secrets.token_bytes(16)
    for rank in ranks:
        lease = LeaseGrant(request_id, token, tokens, (pack_ids(list(block_ids)),))
        rank.worker.post(StepPlan(leases=(lease,)))
    return token


def load_plan(
    request_id: str, token: bytes, engine: PeerEngine, block_ids: Sequence[int], start: int, stop: int,
    decode_engine: bytes = b"c" * 16, watch: bool = True, now: bool = False,
) -> StepPlan:  # fmt: skip
    """The plan that makes a D rank fetch tokens [start, stop); ``now``: its step computes with them."""
    load = Load(request_id, token, engine, (pack_ids(list(block_ids)),), ((start, stop),), now=now)
    keeps = (KeepLease(request_id, token, engine, False),) if watch else ()
    return StepPlan(decode_engine=decode_engine, keeps=keeps, loads=(load,))


def wait(condition: Callable[..., bool], ranks: Sequence[Rank] = (), seconds: float = 300.0) -> bool:
    """Poll the ranks until ``condition`` holds; False if it does not within a time that is none on a loaded machine."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for rank in ranks:
            rank.poll()
        if condition():
            return True
        time.sleep(0.0005)
    return False


def standing(rank: Rank) -> frozenset[str]:
    """The requests whose loads stand, of the step that the rank has begun. Waits until that is known."""
    outcome = rank.worker.take_outcome()
    assert outcome is not None, "the step has loads"
    return frozenset(name for name, end in outcome.ends().items() if not end.failed)


def reason_of(rank: Rank) -> str:
    """The kind of the one failure that the rank counted."""
    (kind,) = rank.counts("num_failed_handovers")
    return str(kind)


def let_time_pass(rank: Rank, seconds: float) -> None:
    """For this rank's transfer thread it is ``seconds`` later from now on: a lease ends at a chosen moment."""
    put_forward(rank.thread, seconds)


def on_its_thread(rank: Rank, act: Callable[[], object]) -> None:
    """Do this on the rank's transfer thread, before a turn, and return once it is done."""
    thread: Any = rank.thread
    turn, done = thread.turn, threading.Event()

    def once(now: float) -> bool:
        thread.turn = turn
        act()
        done.set()
        return bool(turn(now))

    thread.turn = once
    thread.wake()
    assert done.wait(300)


def left_in_tables(rank: Rank) -> dict[str, int]:
    """The lengths of the transfer thread's tables. All but the links are empty when nothing goes on."""
    thread = rank.thread
    producer, consumer = producer_of(thread), consumer_of(thread)
    return {
        "leases": len(leases_of(producer)), "early requests": len(producer.waiting),
        "outgoing reads": len(sends_of(producer).turns),
        "computing prompts": len(prompts_of(producer)) + len(producer.steps.flights),
        "loads": len(consumer.loads.running), "reads": len(consumer.reads.by_number),
        "names": len(producer.prompts.by_name),
        "lookups": len(consumer.lookups.open) + len(consumer.lookups.left),
        "kept leases": int(bool(consumer.renewals.kept)), "links": len(list(consumer.links)),
    }  # fmt: skip


def no_failed_link(d: Rank) -> bool:
    """Whether D would try anew: a failed link answers for a second."""
    return all(link.phase is not LinkPhase.FAILED for link in consumer_of(d).links)
