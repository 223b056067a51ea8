"""Which rank reads which KV heads from which rank, for any pair of tensor-parallel sizes. Pure integers.

``TpKVTopology`` answers every such question. D is the consumer, the local side of a read; P is the producer, the remote
side. A rank holds an interval of global KV heads. D's rank takes from P's rank the intersection of their intervals. MLA
has one latent "head", and every rank holds it. Under context parallelism the ranks that hold a head shard its tokens
(``token_sharding.TokenSharding``). All choices depend on sizes only, so P and D make the same ones without a message.

Pipeline stages have no part in the choice of ranks: all stages have the same tensor-parallel structure, and layers are
matched by name (``read_plan``). So every answer holds for each pair of stages.

``d_`` names D's side, ``p_`` P's side. Intervals are ``(first, count)``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

from kvferry.connector.geometry.rank_geometry import RankGeometry
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.transport.errors import GeometryError, RatioError

MAX_RANKS = 4096
"""Bound on a tensor-parallel size. Peers send their size, and the release map has one entry per rank."""
MAX_HEADS = 1 << 16  # Bound on a model's KV heads. Peers send this number too.
LOCAL, REMOTE = "local", "remote"
"""Engine ids in a topology that stands for engines of a form (``TpKVTopology.between``)."""


class HeadRead(NamedTuple):
    """A read of ``num_heads`` global KV heads, from ``first_head`` on, from P's tensor-parallel rank ``p_rank``."""

    p_rank: int
    first_head: int
    num_heads: int


class EngineForm(Protocol):
    """The facts about a remote engine on which the choice of ranks depends: its tensor-parallel size, and the ways in
    which its ranks shard tokens, one or more block tables each."""

    @property
    def tp_size(self) -> int: ...
    @property
    def shardings(self) -> tuple[TokenSharding, ...]: ...


@dataclass
class TpKVTopology:
    """How a rank of the local engine faces the ranks of remote engines: which ranks it reads from, which KV heads, and
    which ranks must release a lease. ``between`` makes the one that a hand-over uses. The first seven fields and the
    methods that share a name with vLLM's ``TpKVTopology`` mean the same as there. Questions without an argument for the
    remote engine are about the only remote engine that the topology knows; those without a head count are about
    ``total_num_kv_heads``. All methods raise ``GeometryError`` where a rank or a size is out of range."""

    tp_rank: int  # The local rank
    remote_tp_size: dict[str, int]  # Tensor-parallel size by engine id, the local engine's under ``engine_id``
    is_mla: bool  # Whether all layers are MLA
    total_num_kv_heads: int  # Global KV heads; of the layers that have most, where layers differ
    attn_backend: object  # Not used. Layouts are read from strides.
    engine_id: str  # The local engine
    remote_block_size: dict[str, int]
    """Tokens per manager block by engine id, the local engine's under ``engine_id``."""
    head_counts: tuple[int, ...] = ()
    """Global KV heads of each kind of layer, 1 for MLA; by default of one kind, ``total_num_kv_heads``."""
    shardings: tuple[TokenSharding, ...] = UNSHARDED  # How local ranks shard tokens
    remote_shardings: dict[str, tuple[TokenSharding, ...]] = field(default_factory=dict)
    """The same by engine id; an engine that is missing does not shard tokens."""
    pp_size: int = 1  # The local engine's pipeline stages

    def __post_init__(self) -> None:
        self.head_counts = self.head_counts or (1 if self.is_mla else self.total_num_kv_heads,)

    @classmethod
    def between(cls, local: RankGeometry, remote: EngineForm) -> TpKVTopology:
        """The topology of D's rank ``local`` and a P engine, under the engine ids ``LOCAL`` and ``REMOTE``. One object
        serves all peers of the same form: do not change it. ``block_size`` is that of the rank's first region, or 0."""
        return _between(
            local.tp_rank, local.tp_size, local.pp_size,
            bool(local.regions) and all(region.kind == "mla" for region in local.regions), local.head_counts,
            local.shardings, local.regions[0].block_size if local.regions else 0, remote.tp_size, remote.shardings,
        )  # fmt: skip

    @staticmethod
    def head_interval(rank: int, tp_size: int, total_heads: int) -> tuple[int, int]:
        """The global KV heads of a rank as ``(start, count)``. With H heads and T ranks, rank r holds the heads from
        ``r * H // T`` to ``(r + 1) * H // T``, end excluded, and at least one. Where T divides H, or H divides T, this
        is vLLM's split (``ModelConfig.get_num_kv_heads``, and the weight loader of ``QKVParallelLinear``)."""
        _check(rank, tp_size, total_heads)
        start = rank * total_heads // tp_size
        return start, max(1, (rank + 1) * total_heads // tp_size - start)

    # --- sizes and ratios ---------------------------------------------------------------------------------------

    @property
    def tp_size(self) -> int:
        """The local engine's tensor-parallel size."""
        return self.remote_tp_size[self.engine_id]

    @property
    def block_size(self) -> int:
        """The local engine's tokens per block."""
        return self.remote_block_size[self.engine_id]

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Local ranks per remote rank. Negative: remote ranks per local rank, where the remote side has more. Raises
        RatioError: neither size divides the other. Nothing that moves bytes needs this number."""
        return _ratio("tp_ratio", self.tp_size, remote_tp_size)

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Remote blocks per local block. Negative: local blocks per remote block, where the remote block is larger.
        Raises RatioError: neither size divides the other. Nothing that moves bytes needs this number."""
        return _ratio("block_size_ratio", self.block_size, remote_block_size)

    def tp_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """``tp_ratio`` of a known engine."""
        return self.tp_ratio(self.remote_tp_size[remote_engine_id])

    def block_size_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """``block_size_ratio`` of a known engine."""
        return self.block_size_ratio(self.remote_block_size[remote_engine_id])

    def is_kv_replicated(self, engine_id: str, total_heads: int | None = None) -> bool:
        """Whether several ranks of a known engine, also of the local one, hold the same of ``total_heads`` KV heads."""
        return self.remote_tp_size[engine_id] > (total_heads or self.total_num_kv_heads)

    def replicates_kv_cache(self, remote_engine_id: str) -> bool:
        """Whether ranks of an engine hold equal caches, by replicated heads or because MLA cannot be split."""
        return self.is_mla or self.is_kv_replicated(remote_engine_id)

    def describe(self, remote_block_size: int = 0) -> str:
        """For a log line: the remote ranks that the local rank reads from, and the ratios where there are integer ones.
        ``remote_block_size``: tokens per block of the remote engine, 0 where unknown."""
        peer = self._peer()
        size, ranks = self.remote_tp_size[peer], ", ".join(f"tp{rank}" for rank in self.source_ranks(peer))
        text = f"this rank reads from {ranks} of {size} tensor-parallel ranks, tp_ratio {_known(self.tp_ratio, size)}"
        if remote_block_size and self.block_size:
            text += f", block_size_ratio {_known(self.block_size_ratio, remote_block_size)}"
        return f"{text}, the prefill engine replicates KV heads" if self.replicates_kv_cache(peer) else text

    # --- D's rank reads -----------------------------------------------------------------------------------------

    def get_target_remote_ranks(self, remote_tp_size: int) -> list[int]:
        """The remote ranks that face the local rank, ascending; never empty. Where sizes and heads divide as vLLM
        requires, these are the ranks that ``tp_ratio`` gives, else those of ``overlaps``."""
        if self._divides(remote_tp_size):
            ratio = self.tp_ratio(remote_tp_size)
            if ratio > 0:
                return [self.tp_rank // ratio]
            return list(range(self.tp_rank * -ratio, (self.tp_rank + 1) * -ratio))
        return [read.p_rank for read in self.overlaps(remote_tp_size)]

    def get_target_remote_ranks_from_engine_id(self, remote_engine_id: str) -> list[int]:
        """``get_target_remote_ranks`` of a known engine."""
        return self.get_target_remote_ranks(self.remote_tp_size[remote_engine_id])

    def overlaps(self, remote_tp_size: int | None = None, total_heads: int | None = None) -> tuple[HeadRead, ...]:
        """Every remote rank that holds a KV head of the local rank, and which heads, in order of ranks. All replicas
        are listed."""
        p_size, total_heads = self._size(remote_tp_size), self._heads(total_heads)
        start, count = self.head_interval(self.tp_rank, self.tp_size, total_heads)
        _check(0, p_size, total_heads)
        first, _ = _holders(start, p_size, total_heads)
        last_first, last_count = _holders(start + count - 1, p_size, total_heads)
        found = []
        for p_rank in range(first, last_first + last_count):
            theirs, held = self.head_interval(p_rank, p_size, total_heads)
            low, high = max(start, theirs), min(start + count, theirs + held)
            found.append(HeadRead(p_rank, low, high - low))
        return tuple(found)

    def sources(
        self,
        remote_tp_size: int | None = None,
        total_heads: int | None = None,
        sharding: TokenSharding = UNSHARDED[0],
        remote_sharding: TokenSharding = UNSHARDED[0],
    ) -> tuple[HeadRead, ...]:
        """The reads of the local rank: each of its KV heads once, in order of heads; where remote ranks shard its
        tokens, once from every shard that has tokens of the local rank's. The local ranks that hold a head spread
        evenly over its remote replicas."""
        size, heads = self._size(remote_tp_size), self._heads(total_heads)
        return _head_sources(self.tp_rank, self.tp_size, size, heads, sharding, remote_sharding)

    def source_ranks(self, remote_engine_id: str | None = None) -> tuple[int, ...]:
        """The remote ranks that the local rank reads from, ascending: those in ``sources`` of every head count and
        every pair of shardings. Empty where no remote rank holds tokens of the local rank's."""
        return _source_ranks(self.tp_rank, *self._pair(remote_engine_id))

    # --- D's ranks release --------------------------------------------------------------------------------------

    def release_map(self, remote_engine_id: str | None = None) -> tuple[tuple[int, ...], ...]:
        """For each remote rank, the local tensor-parallel ranks that must release a lease there: all that read from it.
        A remote rank from which none reads (a replica) gets one local rank, else its lease would last until it expires;
        these are spread evenly."""
        return _release_maps(*self._pair(remote_engine_id))[0]

    def release_ranks(self, remote_engine_id: str | None = None) -> tuple[int, ...]:
        """The remote ranks at which the local rank must release: the inverse of ``release_map``. May be empty."""
        _check(self.tp_rank, self.tp_size, 1)
        return _release_maps(*self._pair(remote_engine_id))[1][self.tp_rank]

    def expected_consumers(self, remote_rank: int, remote_engine_id: str | None = None) -> tuple[int, ...]:
        """The local ranks that must release at a remote rank, as ``pp_rank * tp_size + tp_rank``. A pipeline stage
        cannot know which layers another stage reads. So all local stages release at all remote stages."""
        if not 1 <= self.pp_size <= MAX_RANKS:
            raise GeometryError(f"pipeline-parallel size {self.pp_size} is outside 1..{MAX_RANKS}")
        peer = self._peer(remote_engine_id)
        _check(remote_rank, self.remote_tp_size[peer], 1)
        stage = self.release_map(peer)[remote_rank]
        return tuple(pp_rank * self.tp_size + tp_rank for pp_rank in range(self.pp_size) for tp_rank in stage)

    # --- defaults -----------------------------------------------------------------------------------------------

    def _peer(self, remote_engine_id: str | None = None) -> str:
        """The engine that a question is about."""
        if remote_engine_id is not None:
            return remote_engine_id
        known = [*self.remote_tp_size.keys() - {self.engine_id}]
        if len(known) != 1:
            raise GeometryError(f"{len(known)} remote engines are known, expected one; name the engine or its size")
        return known[0]

    def _size(self, remote_tp_size: int | None) -> int:
        return self.remote_tp_size[self._peer()] if remote_tp_size is None else remote_tp_size

    def _heads(self, total_heads: int | None) -> int:
        return total_heads or (1 if self.is_mla else self.total_num_kv_heads)

    def _pair(
        self, remote_engine_id: str | None
    ) -> tuple[int, int, tuple[int, ...], tuple[TokenSharding, ...], tuple[TokenSharding, ...]]:
        """D's and P's tensor-parallel sizes, the model's head counts, D's and P's shardings."""
        peer = self._peer(remote_engine_id)
        theirs = self.remote_shardings.get(peer, UNSHARDED)
        return self.tp_size, self.remote_tp_size[peer], self.head_counts, self.shardings, theirs

    def _divides(self, remote_tp_size: int) -> bool:
        sizes = sorted((self.tp_size, remote_tp_size))
        if sizes[0] < 1 or sizes[1] % sizes[0]:
            return False
        heads = self.total_num_kv_heads
        return self.is_mla or all(heads % size == 0 or size % heads == 0 for size in sizes)


@lru_cache(maxsize=256)
def _between(
    tp_rank: int, tp_size: int, pp_size: int, is_mla: bool, head_counts: tuple[int, ...],
    shardings: tuple[TokenSharding, ...], block_size: int, remote_tp_size: int,
    remote_shardings: tuple[TokenSharding, ...],
) -> TpKVTopology:  # fmt: skip
    return TpKVTopology(
        tp_rank=tp_rank, remote_tp_size={LOCAL: tp_size, REMOTE: remote_tp_size}, is_mla=is_mla,
        total_num_kv_heads=max(head_counts), attn_backend=None, engine_id=LOCAL, remote_block_size={LOCAL: block_size},
        head_counts=head_counts, shardings=shardings, remote_shardings={REMOTE: remote_shardings}, pp_size=pp_size,
    )  # fmt: skip


def _known(ratio: Callable[[int], int], remote: int) -> str:
    """A ratio for a log line, or the two sizes that have none."""
    try:
        return str(ratio(remote))
    except RatioError as error:
        return f"none ({error.local} to {error.remote})"


def _ratio(what: str, local: int, remote: int) -> int:
    """Positive ``local / remote`` where local is the greater or equal, else negative ``remote / local``."""
    if local < 1 or remote < 1:
        raise GeometryError(f"no {what} between local {local} and remote {remote}: sizes are at least 1")
    ratio, rest = divmod(max(local, remote), min(local, remote))
    if rest:
        raise RatioError(what, local, remote)
    return ratio if local >= remote else -ratio


def _check(rank: int, size: int, total_heads: int) -> None:
    """Raises GeometryError where a rank, a tensor-parallel size or a head count is out of range; names it."""
    if not 1 <= size <= MAX_RANKS:
        raise GeometryError(f"tensor-parallel size {size} is outside 1..{MAX_RANKS}")
    if not 0 <= rank < size:
        raise GeometryError(f"tensor-parallel rank {rank} is outside 0..{size - 1}")
    if not 1 <= total_heads <= MAX_HEADS:
        raise GeometryError(f"total_num_kv_heads {total_heads} is outside 1..{MAX_HEADS}")


def _holders(head: int, size: int, total_heads: int) -> tuple[int, int]:
    """The ranks that hold a head as ``(first, count)``. ``count`` is above 1 only where heads are replicated. The
    inverse of ``TpKVTopology.head_interval``. ``last`` is the greatest rank r with ``r * H // T <= head``. Without
    replicas it is the only holder; with replicas the first holder is the smallest r with ``r * H // T >= head``."""
    last = ((head + 1) * size - 1) // total_heads
    first = min(last, -(-head * size // total_heads))
    return first, last - first + 1


@lru_cache(maxsize=1024)
def _head_sources(
    d_rank: int, d_size: int, p_size: int, total_heads: int, d_sharding: TokenSharding, p_sharding: TokenSharding
) -> tuple[HeadRead, ...]:
    start, count = TpKVTopology.head_interval(d_rank, d_size, total_heads)
    _check(0, p_size, total_heads)
    reads: list[HeadRead] = []
    for head in range(start, start + count):
        for p_rank in _shard_holders(head, d_rank, d_size, p_size, total_heads, d_sharding, p_sharding):
            if reads and reads[-1].p_rank == p_rank:
                reads[-1] = reads[-1]._replace(num_heads=reads[-1].num_heads + 1)
            else:
                reads.append(HeadRead(p_rank, head, 1))
    return tuple(reads)


def _shard_holders(
    head: int, d_rank: int, d_size: int, p_size: int, total_heads: int, d_sharding: TokenSharding,
    p_sharding: TokenSharding,
) -> list[int]:  # fmt: skip
    """The P ranks that D's rank reads a head from: one for each of P's shards that has tokens of D's rank. The rank of
    P's shard s is s modulo P's sharding size, so every ``p_sharding.size``-th holder of the head is a replica of the
    same shard. Readers are the D ranks that hold the head and whose own shard has tokens in common with s
    (``meeting``). They spread evenly over the replicas: reader i of n reads from replica ``i * replicas // n``.
    ``before``, ``place`` and ``beyond`` count readers below the first one, below D's rank, and below the end."""
    first_reader, num_readers = _holders(head, d_size, total_heads)
    first_replica, num_replicas = _holders(head, p_size, total_heads)
    found, meets = [], _meeting(d_sharding, p_sharding)
    size, end = p_sharding.size, first_replica + num_replicas
    for first in range(first_replica, min(end, first_replica + size)):
        meeting, replicas = meets[first % size], range(first, end, size)
        if d_rank % d_sharding.size not in meeting:
            continue
        before, place, beyond = (
            rank // d_sharding.size * len(meeting) + bisect_left(meeting, rank % d_sharding.size)
            for rank in (first_reader, d_rank, first_reader + num_readers)
        )
        found.append(replicas[(place - before) * len(replicas) // (beyond - before)])
    return found


@lru_cache(maxsize=256)
def _meeting(d_sharding: TokenSharding, p_sharding: TokenSharding) -> tuple[tuple[int, ...], ...]:
    """For each of P's shards, the numbers of D's shards that have tokens in common with it, ascending."""
    return tuple(
        tuple(d for d in range(d_sharding.size) if d_sharding.shard(d).meets(p_sharding.shard(p)))
        for p in range(p_sharding.size)
    )


def _source_ranks(
    d_rank: int, d_size: int, p_size: int, head_counts: tuple[int, ...], d_shardings: tuple[TokenSharding, ...],
    p_shardings: tuple[TokenSharding, ...],
) -> tuple[int, ...]:  # fmt: skip
    found = {
        read.p_rank
        for heads in head_counts
        for d_sharding in d_shardings
        for p_sharding in p_shardings
        for read in _head_sources(d_rank, d_size, p_size, heads, d_sharding, p_sharding)
    }
    return tuple(sorted(found))


@lru_cache(maxsize=256)
def _release_maps(
    d_size: int, p_size: int, head_counts: tuple[int, ...], d_shardings: tuple[TokenSharding, ...],
    p_shardings: tuple[TokenSharding, ...],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:  # fmt: skip
    """The D ranks that release at each P rank (``TpKVTopology.release_map``), and the P ranks at which each D rank
    releases."""
    _check(0, p_size, 1)
    _check(0, d_size, 1)
    by_p: list[list[int]] = [[] for _ in range(p_size)]
    for d_rank in range(d_size):
        for p_rank in _source_ranks(d_rank, d_size, p_size, head_counts, d_shardings, p_shardings):
            by_p[p_rank].append(d_rank)
    for p_rank, found in enumerate(by_p):
        if not found:
            found.append(p_rank * d_size // p_size)
    by_d: list[list[int]] = [[] for _ in range(d_size)]
    for p_rank, found in enumerate(by_p):
        for d_rank in found:
            by_d[d_rank].append(p_rank)
    return tuple(map(tuple, by_p)), tuple(map(tuple, by_d))
