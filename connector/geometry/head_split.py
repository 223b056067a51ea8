"""How ranks split KV heads, and which P rank each D rank reads a head from. Pure integers.

With H heads and T tensor-parallel ranks, rank r holds the heads from ``r * H // T`` to ``(r + 1) * H // T``, end
excluded, and at least one head. Where T divides H, or H divides T, this is vLLM's split
(``ModelConfig.get_num_kv_heads``, and the weight loader of ``QKVParallelLinear``). All choices depend on sizes only, so
P and D compute the same ones without a message.

These functions are private to ``topology``; all other modules use ``TpKVTopology``. ``d_`` names D's side, the local
one; ``p_`` names P's side, the remote one. Intervals are ``(first, count)``.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

from kvferry.connector.geometry.token_sharding import TokenSharding
from kvferry.transport.errors import GeometryError

MAX_RANKS = 4096
"""Bound on a tensor-parallel size. Peers send their size, and the release map has one entry per rank."""
MAX_HEADS = 1 << 16
"""Bound on a model's KV heads. Peers send this number too."""


class HeadRead(NamedTuple):
    """A read from P's tensor-parallel rank ``p_rank``: the global KV heads from ``first_head`` to
    ``first_head + num_heads``, end excluded."""

    p_rank: int
    first_head: int
    num_heads: int


def check(rank: int, size: int, total_heads: int) -> None:
    """Check that a rank, a tensor-parallel size and a head count are in range.

    Raises:
        GeometryError: one of them is not; names it.
    """
    if not 1 <= size <= MAX_RANKS:
        raise GeometryError(f"tensor-parallel size {size} is outside 1..{MAX_RANKS}")
    if not 0 <= rank < size:
        raise GeometryError(f"tensor-parallel rank {rank} is outside 0..{size - 1}")
    if not 1 <= total_heads <= MAX_HEADS:
        raise GeometryError(f"total_num_kv_heads {total_heads} is outside 1..{MAX_HEADS}")


def head_interval(rank: int, tp_size: int, total_heads: int) -> tuple[int, int]:
    """See ``TpKVTopology.head_interval``."""
    check(rank, tp_size, total_heads)
    start = rank * total_heads // tp_size
    return start, max(1, (rank + 1) * total_heads // tp_size - start)


def _holders(head: int, size: int, total_heads: int) -> tuple[int, int]:
    """The ranks that hold a head as ``(first, count)``. ``count`` is above 1 only where heads are replicated.

    The inverse of ``head_interval``. ``last`` is the greatest rank r with ``r * H // T <= head``. Without replicas it
    is the only holder; with replicas the first holder is the smallest r with ``r * H // T >= head``.
    """
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
    start, count = head_interval(d_rank, d_size, total_heads)
    check(0, p_size, total_heads)
    reads: list[HeadRead] = []
    for head in range(start, start + count):
        if sharded:
            p_ranks = _shard_holders(head, d_rank, d_size, p_size, total_heads, d_sharding, p_sharding)
        else:
            p_ranks = [_replica(head, d_rank, d_size, p_size, total_heads)]
        for p_rank in p_ranks:
            if reads and reads[-1].p_rank == p_rank:
                reads[-1] = reads[-1]._replace(num_heads=reads[-1].num_heads + 1)
            else:
                reads.append(HeadRead(p_rank, head, 1))
    return tuple(reads)


def _replica(head: int, d_rank: int, d_size: int, p_size: int, total_heads: int) -> int:
    """The P rank that D's rank reads a head from, where each holder of the head has all of its tokens.

    The D ranks that hold the head (readers) spread evenly over the P ranks that hold it (replicas): reader i of n reads
    from replica ``i * replicas // n``.
    """
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
    """The P ranks that D's rank reads a head from, where ranks shard its tokens: one for each of P's shards that has
    tokens of D's rank, in the order of the shards.

    The rank of P's shard s is s modulo P's sharding size, so every ``p_sharding.size``-th holder is a replica of the
    same shard. As in ``_replica``, the readers of a shard spread evenly over its replicas. Readers are the D ranks that
    hold the head and whose own shard has tokens in common with s (``meeting``). ``before``, ``place`` and ``beyond``
    count such ranks below the first reader, below D's rank, and below the end of the readers.
    """
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
    """For each of P's shards, the numbers of D's shards that have tokens in common with it, ascending."""
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
    """The D ranks that release at each P rank (``TpKVTopology.release_map``), and the P ranks at which each D rank
    releases.

    Every D rank releases where it reads. A P rank from which no D rank reads gets one D rank: otherwise its lease would
    last until it expires.

    Raises:
        GeometryError: a size is out of range.
    """
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
