"""Head intervals, sources and releases, against a table that says for every rank which heads it holds."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.connector.geometry.topology import (
    MAX_HEADS,
    MAX_RANKS,
    TpKVTopology,
    expected_consumers,
    head_interval,
    overlaps,
    readers,
    release_map,
    releases_of,
    sources,
)
from kvferry.transport.errors import GeometryError, RatioError

sizes = st.integers(1, 9)
heads = st.integers(1, 12)


def held(size: int, total: int, is_mla: bool = False) -> list[set[int]]:
    """The heads of every rank."""
    out = []
    for rank in range(size):
        start, count = head_interval(rank, size, 1 if is_mla else total)
        out.append(set(range(start, start + count)))
    return out


def topology(local: int, remote: int, total: int, rank: int = 0, is_mla: bool = False, blocks=(16, 16)) -> TpKVTopology:
    return TpKVTopology(
        tp_rank=rank,
        remote_tp_size={"d": local, "p": remote},
        is_mla=is_mla,
        total_num_kv_heads=total,
        attn_backend=None,
        engine_id="d",
        remote_block_size={"d": blocks[0], "p": blocks[1]},
    )


@given(sizes, heads)
def test_every_head_is_held_contiguously_and_evenly(size: int, total: int) -> None:
    ranks = held(size, total)
    assert set().union(*ranks) == set(range(total))
    counts = [len(rank) for rank in ranks]
    if size <= total:
        assert sum(counts) == total and max(counts) - min(counts) <= 1
    else:
        assert set(counts) == {1}
        replicas = Counter(head for rank in ranks for head in rank).values()
        assert max(replicas) - min(replicas) <= 1
    assert ranks == sorted(ranks, key=min)


@pytest.mark.parametrize(("size", "total"), [(1, 8), (2, 8), (8, 8), (16, 8), (4, 2), (8, 1), (64, 8)])
def test_heads_split_as_vllm_splits_them(size: int, total: int) -> None:
    for rank in range(size):
        if total >= size:
            assert head_interval(rank, size, total) == (rank * (total // size), total // size)
        else:
            assert head_interval(rank, size, total) == (rank // (size // total), 1)


@given(sizes, sizes, heads, st.booleans())
@example(3, 2, 6, False)
@example(6, 4, 12, False)
@example(7, 9, 3, False)
def test_each_head_is_read_once_from_a_rank_that_holds_it(d_size: int, p_size: int, total: int, is_mla: bool) -> None:
    p_heads = held(p_size, total, is_mla)
    load: Counter[tuple[int, int]] = Counter()
    for d_rank, needed in enumerate(held(d_size, total, is_mla)):
        got: list[int] = []
        reads = sources(d_rank, d_size, p_size, total, is_mla)
        for read in reads:
            interval = range(read.first_head, read.first_head + read.num_heads)
            assert set(interval) <= p_heads[read.p_rank]
            got += interval
            load.update((read.p_rank, head) for head in interval)
        assert got == sorted(needed)
        assert len({read.p_rank for read in reads}) == len(reads)
        around = {read.p_rank: set(range(read.first_head, read.first_head + read.num_heads))
                  for read in overlaps(d_rank, d_size, p_size, total, is_mla)}  # fmt: skip
        assert around == {rank: theirs & needed for rank, theirs in enumerate(p_heads) if theirs & needed}
    for head in range(1 if is_mla else total):  # readers of one head spread over its replicas
        numbers = [load[rank, head] for rank, theirs in enumerate(p_heads) if head in theirs]
        assert max(numbers) - min(numbers) <= 1


@given(sizes, sizes, st.lists(heads, min_size=1, max_size=3).map(tuple))
def test_every_p_rank_is_released_by_all_its_readers_and_by_somebody(
    d_size: int, p_size: int, head_counts: tuple[int, ...]
) -> None:
    releases = release_map(d_size, p_size, head_counts)
    assert len(releases) == p_size
    read_by: dict[int, set[int]] = {rank: set() for rank in range(p_size)}
    for d_rank in range(d_size):
        for read in (read for total in head_counts for read in sources(d_rank, d_size, p_size, total)):
            read_by[read.p_rank].add(d_rank)
        assert readers(d_rank, d_size, p_size, head_counts) == tuple(p for p in read_by if d_rank in read_by[p])
    for p_rank, ranks in enumerate(releases):
        assert ranks and list(ranks) == sorted(set(ranks)) and set(ranks) <= set(range(d_size))
        assert set(ranks) == read_by[p_rank] if read_by[p_rank] else len(ranks) == 1
    for d_rank in range(d_size):
        mine = releases_of(d_rank, d_size, p_size, head_counts)
        assert mine == tuple(p for p, ranks in enumerate(releases) if d_rank in ranks)


def test_idle_replicas_are_shared_out_between_d_ranks() -> None:
    counts = Counter(d for ranks in release_map(2, 8, (1,)) for d in ranks)
    assert counts == {0: 4, 1: 4}


def test_releases_count_all_of_ds_stages() -> None:
    assert release_map(2, 2, (8,)) == ((0,), (1,))
    assert expected_consumers(1, 2, 3, 2, (8,)) == (1, 3, 5)
    assert expected_consumers(0, 2, 1, 1, (8,)) == (0, 1)


def test_cost_does_not_grow_with_the_product_of_sizes() -> None:
    begin = time.thread_time()
    release_map(MAX_RANKS, MAX_RANKS, (8,))
    release_map(MAX_RANKS, MAX_RANKS - 1, (1, MAX_RANKS))
    assert time.thread_time() - begin < 4.0


@pytest.mark.parametrize(
    ("local", "remote", "ratio"), [(4, 4, 1), (8, 2, 4), (2, 8, -4), (1, 9, -9), (9, 3, 3), (1, 1, 1)]
)
def test_ratio_is_flipped_where_the_remote_side_has_more(local: int, remote: int, ratio: int) -> None:
    tp = topology(local, remote, 72)
    assert tp.tp_ratio(remote) == tp.tp_ratio_from_engine_id("p") == ratio
    blocks = topology(1, 1, 8, blocks=(16 * local, 16 * remote))
    assert blocks.block_size_ratio(16 * remote) == blocks.block_size_ratio_from_engine_id("p") == ratio


@pytest.mark.parametrize(("local", "remote"), [(3, 2), (2, 3), (6, 4), (4, 6)])
def test_no_integer_ratio_is_a_typed_error_that_names_overlaps(local: int, remote: int) -> None:
    tp = topology(local, remote, 12, blocks=(16 * local, 16 * remote))
    with pytest.raises(RatioError, match=rf"no integer tp_ratio between local {local} and remote {remote}.*overlaps"):
        tp.tp_ratio(remote)
    with pytest.raises(RatioError, match=r"no integer block_size_ratio .*overlaps"):
        tp.block_size_ratio_from_engine_id("p")
    assert tp.get_target_remote_ranks(remote)


@given(sizes, sizes, heads, st.booleans(), st.data())
def test_target_ranks_cover_what_is_read(
    local: int, remote: int, total: int, is_mla: bool, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, local - 1))
    tp = topology(local, remote, total, rank, is_mla)
    targets = tp.get_target_remote_ranks(remote)
    assert targets == tp.get_target_remote_ranks_from_engine_id("p")
    assert targets == sorted(set(targets)) and set(targets) <= set(range(remote))
    assert {read.p_rank for read in tp.sources(remote)} <= set(targets)
    if local % remote and remote % local:
        assert targets == [read.p_rank for read in overlaps(rank, local, remote, total, is_mla)]


@pytest.mark.parametrize(
    ("local", "remote", "total"), [(8, 2, 8), (2, 8, 8), (8, 4, 2), (4, 8, 2), (16, 1, 4), (1, 16, 4)]
)
@pytest.mark.parametrize("is_mla", [False, True])
def test_target_ranks_of_divisible_sizes_follow_the_ratio(local: int, remote: int, total: int, is_mla: bool) -> None:
    for rank in range(local):
        targets = topology(local, remote, total, rank, is_mla).get_target_remote_ranks(remote)
        if local >= remote:
            assert targets == [rank // (local // remote)]
        else:
            assert targets == [rank * (remote // local) + i for i in range(remote // local)]


def test_replication() -> None:
    assert [topology(1, p, 8).is_kv_replicated("p") for p in (4, 8, 9, 16)] == [False, False, True, True]
    assert not topology(1, 4, 8).replicates_kv_cache("p")
    assert topology(1, 4, 8, is_mla=True).replicates_kv_cache("p")
    assert topology(2, 4, 8).tp_size == 2 and topology(1, 1, 8, blocks=(48, 32)).block_size == 48


@pytest.mark.parametrize(
    "call",
    [
        lambda: head_interval(2, 2, 8),
        lambda: head_interval(-1, 2, 8),
        lambda: head_interval(0, 0, 8),
        lambda: head_interval(0, 1, 0),
        lambda: sources(0, 1, MAX_RANKS + 1, 8),
        lambda: sources(0, 1, 1, 1 << 31),
        lambda: overlaps(0, 1, 0, 8),
        lambda: release_map(1 << 31, 1, (8,)),
        lambda: release_map(1, 1 << 31, (1, 8)),
        lambda: releases_of(4, 4, 4, (8,)),
        lambda: expected_consumers(9, 4, 1, 4, (8,)),
        lambda: expected_consumers(0, 4, 1 << 31, 4, (8,)),
        lambda: head_interval(0, 1, MAX_HEADS + 1),
        lambda: topology(0, 2, 8).tp_ratio(2),
    ],
)
def test_sizes_out_of_range_are_refused(call) -> None:
    with pytest.raises(GeometryError, match=r"^[^\n]+$"):
        call()
