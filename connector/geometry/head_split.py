"""How ranks split KV heads, and the choice of the rank that each head is read from. Pure integers.

These functions are private to ``topology``: every other module asks ``TpKVTopology``. ``d_`` names D's side, the local
one; ``p_`` names P's side, the remote one.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.transport.errors import GeometryError

MAX_RANKS = 4096
"""Bound on a tensor-parallel size. A peer names its own, and the release map has one entry per rank."""
MAX_HEADS = 1 << 16
"""Bound on a model's KV heads, which peers name too."""


class HeadRead(NamedTuple):
    """Global KV heads ``[first_head, first_head + num_heads)``, which P's tensor-parallel rank ``p_rank`` holds."""

    p_rank: int
    first_head: int
    num_heads: int


def check(rank: int, size: int, total_heads: int) -> None:
    """Raises GeometryError where a rank, a size or a head count is out of range."""
    if not 1 <= size <= MAX_RANKS:
        raise GeometryError(f"tensor-parallel size {size} is outside 1..{MAX_RANKS}")
    if not 0 <= rank < size:
        raise GeometryError(f"tensor-parallel rank {rank} is outside 0..{size - 1}")
    if not 1 <= total_heads <= MAX_HEADS:
        raise GeometryError(f"total_num_kv_heads {total_heads} is outside 1..{MAX_HEADS}")


def is_replicated(size: int, total_heads: int) -> bool:
    """Whether several of ``size`` ranks hold the same head."""
    return size > total_heads


def head_interval(rank: int, tp_size: int, total_heads: int) -> tuple[int, int]:
    """See ``TpKVTopology.head_interval``."""
    check(rank, tp_size, total_heads)
    start = rank * total_heads // tp_size
    return start, max(1, (rank + 1) * total_heads // tp_size - start)


def _holders(head: int, size: int, total_heads: int) -> tuple[int, int]:
    """The ranks that hold a head as ``(first, count)``. ``count`` is above 1 only where heads are replicated."""
    last = ((head + 1) * size - 1) // total_heads
    first = min(last, -(-head * size // total_heads))
    return first, last - first + 1


def overlaps(d_rank: int, d_size: int, p_size: int, total_heads: int) -> tuple[HeadRead, ...]:
    """See ``TpKVTopology.overlaps``."""
    start, count = head_interval(d_rank, d_size, total_heads)
    check(0, p_size, total_heads)
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
    d_rank: int, d_size: int, p_size: int, total_heads: int, d_sharding: TokenSharding, p_sharding: TokenSharding
) -> tuple[HeadRead, ...]:
    """See ``TpKVTopology.sources``."""
    sharded = d_sharding.size > 1 or p_sharding.size > 1
    replicated = is_replicated(p_size, total_heads)
    start, count = head_interval(d_rank, d_size, total_heads)
    check(0, p_size, total_heads)
    reads: list[HeadRead] = []
    for head in range(start, start + count):
        if sharded:
            p_ranks = _shard_holders(head, d_rank, d_size, p_size, total_heads, d_sharding, p_sharding)
        elif not replicated:
            p_ranks = [_holders(head, p_size, total_heads)[0]]
        else:
            p_ranks = [_replica(head, d_rank, d_size, p_size, total_heads)]
        for p_rank in p_ranks:
            if reads and reads[-1].p_rank == p_rank:
                reads[-1] = reads[-1]._replace(num_heads=reads[-1].num_heads + 1)
            else:
                reads.append(HeadRead(p_rank, head, 1))
    return tuple(reads)


def _replica(head: int, d_rank: int, d_size: int, p_size: int, total_heads: int) -> int:
    """The P rank that D's rank reads a head from, where all ranks that hold it hold all of its tokens."""
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
    """One replica of each of P's shares of a head that has tokens of D's rank, by P rank."""
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


def source_ranks(
    d_rank: int,
    d_size: int,
    p_size: int,
    head_counts: tuple[int, ...],
    d_shardings: tuple[TokenSharding, ...],
    p_shardings: tuple[TokenSharding, ...],
) -> tuple[int, ...]:
    """See ``TpKVTopology.source_ranks``."""
    found = {
        read.p_rank
        for heads in head_counts
        for d_sharding in d_shardings
        for p_sharding in p_shardings
        for read in sources(d_rank, d_size, p_size, heads, d_sharding, p_sharding)
    }
    return tuple(sorted(found))


@lru_cache(maxsize=256)
def release_maps(
    d_size: int,
    p_size: int,
    head_counts: tuple[int, ...],
    d_shardings: tuple[TokenSharding, ...],
    p_shardings: tuple[TokenSharding, ...],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """The D ranks that release at each P rank (``TpKVTopology.release_map``), and the P ranks by D rank."""
    check(0, p_size, 1)
    check(0, d_size, 1)
    by_p: list[list[int]] = [[] for _ in range(p_size)]
    for d_rank in range(d_size):
        for p_rank in source_ranks(d_rank, d_size, p_size, head_counts, d_shardings, p_shardings):
            by_p[p_rank].append(d_rank)
    for p_rank, found in enumerate(by_p):
        if not found:
            found.append(p_rank * d_size // p_size)
    by_d: list[list[int]] = [[] for _ in range(d_size)]
    for p_rank, found in enumerate(by_p):
        for d_rank in found:
            by_d[d_rank].append(p_rank)
    return tuple(map(tuple, by_p)), tuple(map(tuple, by_d))
