"""Head intervals, sources and releases, against a table that says for every rank which heads it holds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.connector.geometry.rank_geometry import RankGeometry
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.connector.geometry.topology import MAX_HEADS, MAX_RANKS, TpKVTopology
from kvferry.transport.errors import GeometryError, RatioError
from tests.support.lines import LineCount

head_interval = TpKVTopology.head_interval
sizes = st.integers(1, 9)
heads = st.integers(1, 12)


def held(size: int, total: int, is_mla: bool = False) -> list[set[int]]:
    """The heads of every rank."""
    found = [head_interval(rank, size, 1 if is_mla else total) for rank in range(size)]
    return [set(range(start, start + count)) for start, count in found]


def topology(
    local: int, remote: int, total: int, rank: int = 0, is_mla: bool = False, blocks=(16, 16), **more
) -> TpKVTopology:
    return TpKVTopology(
        tp_rank=rank, remote_tp_size={"d": local, "p": remote}, is_mla=is_mla, total_num_kv_heads=total,
        attn_backend=None, engine_id="d", remote_block_size={"d": blocks[0], "p": blocks[1]}, **more,
    )  # fmt: skip


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


@given(sizes, sizes, heads, st.booleans())
@example(3, 2, 6, False)
@example(6, 4, 12, False)
@example(7, 9, 3, False)
def test_each_head_is_read_once_from_a_rank_that_holds_it(d_size: int, p_size: int, total: int, is_mla: bool) -> None:
    p_heads = held(p_size, total, is_mla)
    load: Counter[tuple[int, int]] = Counter()
    for d_rank, needed in enumerate(held(d_size, total, is_mla)):
        got: list[int] = []
        tp = topology(d_size, p_size, total, d_rank, is_mla)
        reads = tp.sources()
        assert reads == tp.sources(p_size) and tp.source_ranks() == tuple(sorted(read.p_rank for read in reads))
        for read in reads:
            interval = range(read.first_head, read.first_head + read.num_heads)
            assert set(interval) <= p_heads[read.p_rank]
            got += interval
            load.update((read.p_rank, head) for head in interval)
        assert got == sorted(needed)
        assert len({read.p_rank for read in reads}) == len(reads)
        around = {p: set(range(first, first + count)) for p, first, count in tp.overlaps()}
        assert around == {rank: theirs & needed for rank, theirs in enumerate(p_heads) if theirs & needed}
    for head in range(1 if is_mla else total):  # readers of one head spread over its replicas
        numbers = [load[rank, head] for rank, theirs in enumerate(p_heads) if head in theirs]
        assert max(numbers) - min(numbers) <= 1


@given(sizes, sizes, st.lists(heads, min_size=1, max_size=3).map(tuple))
def test_every_p_rank_is_released_by_all_its_readers_and_by_somebody(
    d_size: int, p_size: int, head_counts: tuple[int, ...]
) -> None:
    ranks_of_d = [topology(d_size, p_size, max(head_counts), rank, head_counts=head_counts) for rank in range(d_size)]
    releases = ranks_of_d[0].release_map()
    assert len(releases) == p_size
    read_by: dict[int, set[int]] = {rank: set() for rank in range(p_size)}
    for d_rank, tp in enumerate(ranks_of_d):
        for read in (read for total in head_counts for read in tp.sources(total_heads=total)):
            read_by[read.p_rank].add(d_rank)
        assert tp.source_ranks() == tuple(p for p in read_by if d_rank in read_by[p])
    for p_rank, ranks in enumerate(releases):
        assert ranks and list(ranks) == sorted(set(ranks)) and set(ranks) <= set(range(d_size))
        assert set(ranks) == read_by[p_rank] if read_by[p_rank] else len(ranks) == 1
    for d_rank, tp in enumerate(ranks_of_d):
        assert tp.release_map() == releases
        assert tp.release_ranks() == tuple(p for p, ranks in enumerate(releases) if d_rank in ranks)


def test_cost_does_not_grow_with_the_product_of_sizes() -> None:
    with LineCount() as lines:
        topology(MAX_RANKS, MAX_RANKS, 8).release_map()
        topology(MAX_RANKS, MAX_RANKS - 1, MAX_RANKS, head_counts=(1, MAX_RANKS)).release_map()
    assert lines.count < 300 * MAX_RANKS


@pytest.mark.parametrize(
    ("local", "remote", "ratio"), [(4, 4, 1), (8, 2, 4), (2, 8, -4), (1, 9, -9), (9, 3, 3), (1, 1, 1)]
)
def test_ratio_is_flipped_where_the_remote_side_has_more(local: int, remote: int, ratio: int) -> None:
    tp = topology(local, remote, 72)
    assert tp.tp_ratio(remote) == tp.tp_ratio_from_engine_id("p") == ratio
    blocks = topology(1, 1, 8, blocks=(16 * local, 16 * remote))
    assert blocks.block_size_ratio(16 * remote) == blocks.block_size_ratio_from_engine_id("p") == ratio


@pytest.mark.parametrize(("local", "remote"), [(3, 2), (4, 6)])
def test_no_integer_ratio_is_a_typed_error_that_names_overlaps(local: int, remote: int) -> None:
    tp = topology(local, remote, 12, blocks=(16 * local, 16 * remote))
    with pytest.raises(RatioError, match=rf"no integer tp_ratio between local {local} and remote {remote}.*overlaps"):
        tp.tp_ratio(remote)
    with pytest.raises(RatioError, match=r"no integer block_size_ratio .*overlaps"):
        tp.block_size_ratio_from_engine_id("p")
    assert tp.get_target_remote_ranks(remote)


@given(sizes, sizes, heads, st.booleans())
@example(8, 4, 2, False)
@example(1, 16, 4, True)
def test_target_ranks_cover_what_is_read_and_follow_an_integer_ratio(
    local: int, remote: int, total: int, is_mla: bool
) -> None:
    for rank in range(local):
        tp = topology(local, remote, total, rank, is_mla)
        targets = tp.get_target_remote_ranks(remote)
        assert targets == tp.get_target_remote_ranks_from_engine_id("p") == sorted(set(targets))
        assert {read.p_rank for read in tp.sources(remote)} <= set(targets) <= set(range(remote))
        if local % remote and remote % local:
            assert targets == [read.p_rank for read in tp.overlaps()]
        elif is_mla or all(total % size == 0 or size % total == 0 for size in (local, remote)):
            few, many = max(1, local // remote), max(1, remote // local)
            assert targets == [rank // few * many + i for i in range(many)]


def test_replication() -> None:
    assert [topology(1, p, 8).is_kv_replicated("p") for p in (4, 8, 9, 16)] == [False, False, True, True]
    assert not topology(1, 4, 8).replicates_kv_cache("p")
    assert topology(1, 4, 8, is_mla=True).replicates_kv_cache("p")
    assert topology(2, 4, 8).tp_size == 2 and topology(1, 1, 8, blocks=(48, 32)).block_size == 48


@pytest.mark.parametrize(
    "call",
    [
        *(lambda size=size: head_interval(*size) for size in ((2, 2, 8), (-1, 2, 8), (0, 0, 8), (0, 1, 0))),
        lambda: topology(1, MAX_RANKS + 1, 8).sources(),
        lambda: topology(1, 1, 1 << 31).sources(),
        lambda: topology(1, 0, 8).overlaps(),
        lambda: topology(1 << 31, 1, 8).release_map(),
        lambda: topology(1, 1 << 31, 8, head_counts=(1, 8)).release_map(),
        lambda: topology(4, 4, 8, rank=4).release_ranks(),
        lambda: topology(4, 4, 8).expected_consumers(9),
        lambda: topology(4, 4, 8, pp_size=1 << 31).expected_consumers(0),
        lambda: head_interval(0, 1, MAX_HEADS + 1),
        lambda: topology(0, 2, 8).tp_ratio(2),
    ],
)
def test_sizes_out_of_range_are_refused(call) -> None:
    with pytest.raises(GeometryError, match=r"^[^\n]+$"):
        call()


# The topology of a hand-over


def geometry(rank: int, size: int, head_counts: tuple[int, ...] = (8,), shardings=UNSHARDED, pp_size=1) -> RankGeometry:
    return RankGeometry(
        tp_rank=rank, tp_size=size, pp_rank=0, pp_size=pp_size, head_counts=head_counts, shardings=shardings, regions=()
    )


def test_one_topology_serves_all_peers_of_a_form() -> None:
    for rank in range(3):  # all that a hand-over adds has a default, so it is what vLLM's constructor gives
        made, plain = TpKVTopology.between(geometry(rank, 3), geometry(0, 2)), topology(3, 2, 8, rank)
        assert made.sources() == plain.sources() and made.release_map() == plain.release_map()
    ours = geometry(1, 4)
    first = TpKVTopology.between(ours, geometry(0, 2))
    assert first is TpKVTopology.between(geometry(1, 4), geometry(1, 2))
    others = [
        TpKVTopology.between(ours, geometry(0, 8)),
        TpKVTopology.between(ours, geometry(0, 2, shardings=(TokenSharding(2, 16),))),
        TpKVTopology.between(geometry(2, 4), geometry(0, 2)),
        TpKVTopology.between(geometry(1, 4, (1, 8)), geometry(0, 2)),
        TpKVTopology.between(geometry(1, 4, pp_size=2), geometry(0, 2)),
    ]
    assert all(other != first for other in others)
    assert first.source_ranks() == (0,) and others[0].source_ranks() == (2, 3)
    assert others[-1].expected_consumers(1) == (2, 3, 6, 7)


def test_replicas_count_by_the_heads_of_the_layers_in_question() -> None:
    tp = topology(1, 4, 8, head_counts=(2, 8))
    assert not tp.is_kv_replicated("p") and tp.is_kv_replicated("p", 2)
    assert [read.p_rank for read in tp.sources(total_heads=2)] == [0, 2]
    assert tp.source_ranks() == (0, 1, 2, 3)


def test_a_question_without_an_engine_needs_a_single_remote_engine() -> None:
    several = TpKVTopology(0, {"d": 1, "p": 2, "q": 4}, False, 8, None, "d", {})
    assert several.source_ranks("q") == (0, 1, 2, 3) and several.expected_consumers(1, "p") == (0,)
    assert len(several.sources(4)) == 4
    for ask in (several.source_ranks, several.sources, several.release_map):
        with pytest.raises(GeometryError, match=r"^2 remote engines are known, expected one; name the engine"):
            ask()


@pytest.mark.parametrize(
    ("form", "blocks", "line"),
    [
        ((1, 2, 8), (48, 16), "reads from tp0, tp1 of 2 tensor-parallel ranks, tp_ratio -2, block_size_ratio 3"),
        ((2, 3, 6), (20, 48), "reads from tp0, tp1 of 3 tensor-parallel ranks, tp_ratio none (2 to 3), "
                              "block_size_ratio none (20 to 48)"),
        ((1, 4, 2), (16, 0), "reads from tp0, tp2 of 4 tensor-parallel ranks, tp_ratio -4, "
            "the prefill engine replicates KV heads"),
    ],
)  # fmt: skip
def test_the_log_line_names_ranks_and_ratios(form: tuple[int, int, int], blocks: tuple[int, int], line: str) -> None:
    assert topology(*form, blocks=blocks).describe(blocks[1]) == f"this rank {line}"
