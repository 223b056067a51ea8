"""Which rank reads which KV heads from which rank, for any pair of tensor-parallel sizes. Pure integers.

D is the consumer (local side of a read), P the producer (remote side). A rank holds an interval of global KV heads;
what D's rank takes from P's rank is the intersection of the two. MLA has one latent "head" that every rank holds.
Under context parallelism the ranks that hold a head share its tokens out (``context.TokenSharding``).
Pipeline stages do not appear here: every stage has the same tensor-parallel structure, and layers are matched by name
(``plan.py``), so each function applies to one stage at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.transport.errors import GeometryError, RatioError

MAX_RANKS = 4096
"""Bound on a tensor-parallel size; a peer names its own, and the release map has one entry per rank."""
MAX_HEADS = 1 << 16
"""Bound on a model's KV heads, named by peers too."""


class HeadRead(NamedTuple):
    """Global KV heads ``[first_head, first_head + num_heads)`` as held by P's tensor-parallel rank ``p_rank``."""

    p_rank: int
    first_head: int
    num_heads: int


def _check(rank: int, size: int, total_heads: int) -> None:
    if not 1 <= size <= MAX_RANKS:
        raise GeometryError(f"tensor-parallel size {size} is outside 1..{MAX_RANKS}")
    if not 0 <= rank < size:
        raise GeometryError(f"tensor-parallel rank {rank} is outside 0..{size - 1}")
    if not 1 <= total_heads <= MAX_HEADS:
        raise GeometryError(f"total_num_kv_heads {total_heads} is outside 1..{MAX_HEADS}")


def head_interval(rank: int, tp_size: int, total_heads: int) -> tuple[int, int]:
    """The global KV heads of a rank as ``(start, count)``; ``count`` is at least 1.

    As vLLM splits where it can: ``total_heads / tp_size`` each, and one replicated head each where there are more
    ranks than heads. Sizes that do not divide get contiguous intervals whose counts differ by at most one.

    Raises:
        GeometryError: a rank or size out of range.
    """
    _check(rank, tp_size, total_heads)
    start = rank * total_heads // tp_size
    return start, max(1, (rank + 1) * total_heads // tp_size - start)


def _holders(head: int, size: int, total_heads: int) -> tuple[int, int]:
    """The ranks that hold a head as ``(first, count)``; more than one only where heads are replicated."""
    last = ((head + 1) * size - 1) // total_heads
    first = min(last, -(-head * size // total_heads))
    return first, last - first + 1


def overlaps(d_rank: int, d_size: int, p_size: int, total_heads: int, is_mla: bool = False) -> tuple[HeadRead, ...]:
    """Every P rank that holds a head of D's rank, and which; replicas are all listed. In order of P's rank.

    Raises:
        GeometryError: a rank or size out of range.
    """
    total_heads = 1 if is_mla else total_heads
    start, count = head_interval(d_rank, d_size, total_heads)
    _check(0, p_size, total_heads)
    first, _ = _holders(start, p_size, total_heads)
    last_first, last_count = _holders(start + count - 1, p_size, total_heads)
    found = []
    for p_rank in range(first, last_first + last_count):
        theirs, held = head_interval(p_rank, p_size, total_heads)
        low, high = max(start, theirs), min(start + count, theirs + held)
        found.append(HeadRead(p_rank, low, high - low))
    return tuple(found)


@lru_cache(maxsize=1024)
def sources(
    d_rank: int,
    d_size: int,
    p_size: int,
    total_heads: int,
    is_mla: bool = False,
    d_sharding: TokenSharding = UNSHARDED[0],
    p_sharding: TokenSharding = UNSHARDED[0],
) -> tuple[HeadRead, ...]:
    """What D's rank reads from whom: each of its heads exactly once, in order of heads.

    Where P replicates a head, the D ranks that hold it spread evenly over P's replicas; the choice depends on the
    arguments only, so both sides come to the same one. Where P's ranks share out the tokens of a head, each head comes
    once from every share that has tokens of D's and that a rank holds.

    Raises:
        GeometryError: a rank or size out of range.
    """
    total_heads = 1 if is_mla else total_heads
    start, count = head_interval(d_rank, d_size, total_heads)
    _check(0, p_size, total_heads)
    reads: list[HeadRead] = []
    for head in range(start, start + count):
        if d_sharding.size == p_sharding.size == 1:
            p_ranks = [_replica(head, d_rank, d_size, p_size, total_heads)]
        else:
            p_ranks = _shard_holders(head, d_rank, d_size, p_size, total_heads, d_sharding, p_sharding)
        for p_rank in p_ranks:
            if reads and reads[-1].p_rank == p_rank:
                reads[-1] = reads[-1]._replace(num_heads=reads[-1].num_heads + 1)
            else:
                reads.append(HeadRead(p_rank, head, 1))
    return tuple(reads)


def _replica(head: int, d_rank: int, d_size: int, p_size: int, total_heads: int) -> int:
    first_reader, num_readers = _holders(head, d_size, total_heads)
    first_replica, num_replicas = _holders(head, p_size, total_heads)
    return first_replica + (d_rank - first_reader) * num_replicas // num_readers


def _shard_holders(
    head: int,
    d_rank: int,
    d_size: int,
    p_size: int,
    total_heads: int,
    d_sharding: TokenSharding,
    p_sharding: TokenSharding,
) -> list[int]:
    """Of each of P's shares of a head that has tokens of D's rank, one replica."""
    first_reader, num_readers = _holders(head, d_size, total_heads)
    first_replica, num_replicas = _holders(head, p_size, total_heads)
    found, meets = [], _meeting(d_sharding, p_sharding)
    held = sorted(
        {rank % p_sharding.size for rank in range(first_replica, first_replica + min(num_replicas, p_sharding.size))}
    )
    for shard, meeting in ((shard, meets[shard]) for shard in held):
        first = first_replica + (shard - first_replica) % p_sharding.size
        replicas = range(first, first_replica + num_replicas, p_sharding.size)
        if d_rank % d_sharding.size not in meeting or not replicas:
            continue
        before, place, beyond = (
            rank // d_sharding.size * len(meeting) + bisect_left(meeting, rank % d_sharding.size)
            for rank in (first_reader, d_rank, first_reader + num_readers)
        )
        found.append(replicas[(place - before) * len(replicas) // (beyond - before)])
    return found


@lru_cache(maxsize=256)
def _meeting(d_sharding: TokenSharding, p_sharding: TokenSharding) -> tuple[tuple[int, ...], ...]:
    """For each of P's shares, D's shares that have tokens in common with it."""
    return tuple(
        tuple(d for d in range(d_sharding.size) if d_sharding.shard(d).meets(p_sharding.shard(p)))
        for p in range(p_sharding.size)
    )


def readers(
    d_rank: int,
    d_size: int,
    p_size: int,
    head_counts: tuple[int, ...],
    d_shardings: tuple[TokenSharding, ...] = UNSHARDED,
    p_shardings: tuple[TokenSharding, ...] = UNSHARDED,
) -> tuple[int, ...]:
    """The P ranks that D's rank reads from, ascending: those of the ``sources`` of each head count and split.

    Raises:
        GeometryError: a rank or size out of range.
    """
    found = {
        read.p_rank
        for heads in head_counts
        for d_sharding in d_shardings
        for p_sharding in p_shardings
        for read in sources(d_rank, d_size, p_size, heads, False, d_sharding, p_sharding)
    }
    return tuple(sorted(found))


def release_map(
    d_size: int,
    p_size: int,
    head_counts: tuple[int, ...],
    d_shardings: tuple[TokenSharding, ...] = UNSHARDED,
    p_shardings: tuple[TokenSharding, ...] = UNSHARDED,
) -> tuple[tuple[int, ...], ...]:
    """For each P rank, D's ranks that must release a lease there: never none.

    All of P's readers are in its entry; a P rank that nobody reads (a replica) gets one D rank, these evenly spread.

    Args:
        d_size: D's tensor-parallel size.
        p_size: P's.
        head_counts: global KV heads of each kind of layer that the model has, 1 for MLA.
        d_splits: how D's ranks share out the tokens of its block tables.
        p_splits: how P's do.

    Raises:
        GeometryError: a size out of range.
    """
    return _release_maps(d_size, p_size, head_counts, d_shardings, p_shardings)[0]


def releases_of(d_rank: int, d_size: int, p_size: int, head_counts: tuple[int, ...]) -> tuple[int, ...]:
    """The P ranks at which D's rank must release: the inverse of ``release_map``. May be empty for a D rank.

    Raises:
        GeometryError: a rank or size out of range.
    """
    _check(d_rank, d_size, 1)
    return _release_maps(d_size, p_size, head_counts, UNSHARDED, UNSHARDED)[1][d_rank]


@lru_cache(maxsize=256)
def _release_maps(
    d_size: int,
    p_size: int,
    head_counts: tuple[int, ...],
    d_shardings: tuple[TokenSharding, ...],
    p_shardings: tuple[TokenSharding, ...],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """(D ranks by P rank, P ranks by D rank)."""
    _check(0, p_size, 1)
    _check(0, d_size, 1)
    by_p: list[list[int]] = [[] for _ in range(p_size)]
    for d_rank in range(d_size):
        for p_rank in readers(d_rank, d_size, p_size, head_counts, d_shardings, p_shardings):
            by_p[p_rank].append(d_rank)
    for p_rank, found in enumerate(by_p):
        if not found:
            found.append(p_rank * d_size // p_size)
    by_d: list[list[int]] = [[] for _ in range(d_size)]
    for p_rank, found in enumerate(by_p):
        for d_rank in found:
            by_d[d_rank].append(p_rank)
    return tuple(map(tuple, by_p)), tuple(map(tuple, by_d))


def expected_consumers(
    p_rank: int,
    d_size: int,
    d_pp_size: int,
    p_size: int,
    head_counts: tuple[int, ...],
    d_shardings: tuple[TokenSharding, ...] = UNSHARDED,
    p_shardings: tuple[TokenSharding, ...] = UNSHARDED,
) -> tuple[int, ...]:
    """D's ranks that must release at a P rank, over all of D's pipeline stages, as ``pp_rank * d_size + tp_rank``.

    One D stage cannot know which layers another one reads, so every stage releases, at every P stage.

    Raises:
        GeometryError: a rank or size out of range.
    """
    if not 1 <= d_pp_size <= MAX_RANKS:
        raise GeometryError(f"pipeline-parallel size {d_pp_size} is outside 1..{MAX_RANKS}")
    _check(p_rank, p_size, 1)
    stage = release_map(d_size, p_size, head_counts, d_shardings, p_shardings)[p_rank]
    return tuple(pp * d_size + tp for pp in range(d_pp_size) for tp in stage)


def _ratio(what: str, local: int, remote: int) -> int:
    """Positive ``local / remote`` where local is the greater or equal, else negative ``remote / local``."""
    if local < 1 or remote < 1:
        raise GeometryError(f"no {what} between local {local} and remote {remote}: sizes are at least 1")
    if local >= remote:
        ratio, rest = divmod(local, remote)
    else:
        ratio, rest = divmod(remote, local)
        ratio = -ratio
    if rest:
        raise RatioError(what, local, remote)
    return ratio


@dataclass
class TpKVTopology:
    """How the ranks of a local and a remote engine face each other.

    ``remote_tp_size`` and ``remote_block_size`` map engine ids to tensor-parallel sizes and to tokens per block; the
    entries under ``engine_id`` are the local engine's own. ``attn_backend`` is kept for callers and not used:
    layouts are read from strides.
    """

    tp_rank: int
    remote_tp_size: dict[str, int]
    is_mla: bool
    total_num_kv_heads: int
    attn_backend: object
    engine_id: str
    remote_block_size: dict[str, int]

    @property
    def tp_size(self) -> int:
        """The local engine's tensor-parallel size."""
        return self.remote_tp_size[self.engine_id]

    @property
    def block_size(self) -> int:
        """The local engine's tokens per block."""
        return self.remote_block_size[self.engine_id]

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Local ranks per remote rank; negative remote ranks per local rank where the remote side has more.

        Raises:
            RatioError: neither size divides the other. Nothing that moves bytes needs this number.
        """
        return _ratio("tp_ratio", self.tp_size, remote_tp_size)

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Remote blocks per local block; negative local blocks per remote block where the remote one is larger.

        Raises:
            RatioError: neither size divides the other. Nothing that moves bytes needs this number.
        """
        return _ratio("block_size_ratio", self.block_size, remote_block_size)

    def tp_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """``tp_ratio`` of a known engine."""
        return self.tp_ratio(self.remote_tp_size[remote_engine_id])

    def block_size_ratio_from_engine_id(self, remote_engine_id: str) -> int:
        """``block_size_ratio`` of a known engine."""
        return self.block_size_ratio(self.remote_block_size[remote_engine_id])

    def is_kv_replicated(self, engine_id: str) -> bool:
        """Whether several ranks of an engine hold the same KV head: it has more ranks than heads."""
        return self.remote_tp_size[engine_id] > self.total_num_kv_heads

    def replicates_kv_cache(self, remote_engine_id: str) -> bool:
        """Whether ranks of an engine hold equal caches, by replicated heads or because MLA cannot be split."""
        return self.is_mla or self.is_kv_replicated(remote_engine_id)

    def get_target_remote_ranks(self, remote_tp_size: int) -> list[int]:
        """The remote ranks that face the local one, ascending; never empty, for any pair of sizes.

        Where sizes and heads divide as vLLM requires, the ranks that ``tp_ratio`` says: one, or a run of them.
        Otherwise every rank whose heads intersect ours. ``sources`` says which of them are read.

        Raises:
            GeometryError: a size out of range.
        """
        if self._divides(remote_tp_size):
            ratio = self.tp_ratio(remote_tp_size)
            if ratio > 0:
                return [self.tp_rank // ratio]
            return list(range(self.tp_rank * -ratio, (self.tp_rank + 1) * -ratio))
        return [read.p_rank for read in self.overlaps(remote_tp_size)]

    def get_target_remote_ranks_from_engine_id(self, remote_engine_id: str) -> list[int]:
        """``get_target_remote_ranks`` of a known engine."""
        return self.get_target_remote_ranks(self.remote_tp_size[remote_engine_id])

    def overlaps(self, remote_tp_size: int) -> tuple[HeadRead, ...]:
        """``overlaps`` with the local side as D."""
        return overlaps(self.tp_rank, self.tp_size, remote_tp_size, self.total_num_kv_heads, self.is_mla)

    def sources(self, remote_tp_size: int) -> tuple[HeadRead, ...]:
        """``sources`` with the local side as D."""
        return sources(self.tp_rank, self.tp_size, remote_tp_size, self.total_num_kv_heads, self.is_mla)

    def release_map(self, remote_tp_size: int) -> tuple[tuple[int, ...], ...]:
        """``release_map`` with the local side as D."""
        return release_map(self.tp_size, remote_tp_size, (1 if self.is_mla else self.total_num_kv_heads,))

    def _divides(self, remote_tp_size: int) -> bool:
        sizes = sorted((self.tp_size, remote_tp_size))
        if sizes[0] < 1 or sizes[1] % sizes[0]:
            return False
        heads = self.total_num_kv_heads
        return self.is_mla or all(heads % size == 0 or size % heads == 0 for size in sizes)
