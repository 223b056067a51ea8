"""Heads, sources, spans and windows of a read, against oracles that label every element of a model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry import read_plan
from kvferry.connector.geometry.compatibility import check_geometry, compatible
from kvferry.connector.geometry.rank_geometry import CacheKind, RankGeometry
from kvferry.connector.geometry.read_plan import (
    STREAM_PARTS,
    PlannedSpan,
    check_complete,
    in_windows,
    part_bytes,
    plan_reads,
)
from kvferry.connector.geometry.spans import MAX_RANGES, MAX_SPANS, Span, check_spans, cut_span
from kvferry.connector.geometry.token_sharding import (
    UNSHARDED,
    TokenShard,
    TokenSharding,
    common_tokens,
    num_common_tokens,
)
from kvferry.connector.geometry.topology import MAX_HEADS, MAX_RANKS, TpKVTopology
from kvferry.transport.errors import GeometryError, IncompatiblePeerError, RatioError
from tests.support.turns import LineCount
from tests.unit.labelled_model import CONTENT, LABEL_TOKENS, MODEL, OURS, Model, edit, plan_all

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


PLAIN = UNSHARDED[0]
Form = tuple[int, TokenSharding, TokenSharding]
"""Tensor-parallel size, how tokens of the layers with heads are shared out, and how those of MLA layers are."""
Remotes = Mapping[tuple[int, int], RankGeometry]


def rank(form: Form, tp_rank: int, heads: int) -> RankGeometry:
    """Two layers with heads, and one of MLA beside them."""
    return shared(heads).rank((tp_rank, form[0]), (0, 1), 16, None, form[1:])


def shared(heads: int) -> Model:
    return Model(("full", "mla", "full"), heads, False)


def carry(
    items: Sequence[PlannedSpan], theirs: Sequence[np.ndarray], p: RankGeometry, d: RankGeometry,
    into: Sequence[np.ndarray], times: Sequence[np.ndarray], cut: tuple[int, int],
) -> None:  # fmt: skip
    """Chunk by chunk, as the two sides would. ``cut``: bytes of a message, and tokens at whose multiples it ends."""
    for item in items:
        s, stop = item.span, item.span.token + item.span.num_tokens
        p_share, d_share = p.regions[s.region].shard, d.regions[item.region].shard
        assert item.shard == p_share and s.shard == d_share
        at = [
            np.concatenate([np.arange(a, b) for a, b in zip(places.starts, places.stops, strict=True)])
            for places in (
                common_tokens(p_share, s.shard, s.token, stop),
                common_tokens(d_share, item.shard, s.token, stop),
            )
        ]
        for c in cut_span(s, CONTENT, *cut, p_share):
            assert c.num_layers * s.num_heads * c.num_tokens * CONTENT <= cut[0]
            there, here = (side[c.token : c.token + c.num_tokens] for side in at)
            assert len(there) == len(here) == c.num_tokens
            box = theirs[s.region][s.layer + c.layer :][: c.num_layers, s.head : s.head + s.num_heads][:, :, there]
            assert box.shape == (c.num_layers, s.num_heads, c.num_tokens)
            layers = slice(item.layer + c.layer, item.layer + c.layer + c.num_layers)
            into[item.region][layers, item.head : item.head + s.num_heads, here] = box
            times[item.region][layers, item.head : item.head + s.num_heads, here] += 1


def check(
    model: Model, local: RankGeometry, remotes: Remotes, tokens: Sequence[tuple[int, int]], cut: tuple[int, int]
) -> None:
    """Every element of ``tokens``, in turn for each region, arrives once, and no other."""
    longest = max(stop for _, stop in tokens)
    wanted = [tokens[i % len(tokens)] for i in range(len(local.regions))]
    check_geometry(local)
    for remote in remotes.values():
        compatible(local, remote)
        compatible(remote, local, consumer=False)
    oracle = model.cache(local, longest)
    into, times = [np.full_like(cache, -1) for cache in oracle], [np.zeros_like(cache) for cache in oracle]
    for place, items in plan_all(local, remotes, wanted).items():
        check_spans([item.span for item in items], remotes[place], longest)
        carry(items, model.cache(remotes[place], longest), remotes[place], local, into, times, cut)
    for right, got, count, (start, stop) in zip(oracle, into, times, wanted, strict=True):
        inside = (right % LABEL_TOKENS >= start) & (right % LABEL_TOKENS < stop)
        assert (count == inside).all()
        assert (got[inside] == right[inside]).all()


@st.composite
def models(draw: st.DrawFn) -> Model:
    is_mla = draw(st.booleans())
    kinds: list[CacheKind] = ["mla"] if is_mla else ["full", "sliding_window", "mla"]
    pattern = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12))
    return Model(tuple(pattern), draw(st.integers(1, 12)), is_mla)


def check_pair(model: Model, d_tp, d_pp, p_tp, p_pp, tokens, cut, seed) -> None:
    shuffle = random.Random(seed) if seed else None
    places = [(stage, rank) for stage in range(p_pp) for rank in range(p_tp)]
    remotes = {(s, r): model.rank((r, p_tp), (s, p_pp), 32, shuffle) for s, r in places}
    check(model, model.rank(d_tp, d_pp, 16, shuffle), remotes, tokens, cut)


@settings(max_examples=120, deadline=None)
@given(models(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.data())
@example(Model(("full",) * 6, 6, False), 3, 1, 2, 2, None)
@example(Model(("full",) * 6, 12, False), 6, 2, 4, 3, None)
@example(Model(("full",) * 4, 2, False), 8, 1, 4, 1, None)
@example(Model(("full", "mla") * 4, 2, False), 1, 2, 8, 1, None)
def test_every_element_arrives_once_from_a_rank_that_holds_it(model, d_tp, d_pp, p_tp, p_pp, data) -> None:
    d_pp, p_pp = min(d_pp, len(model.kinds)), min(p_pp, len(model.kinds))
    if data is None:
        for rank in range(d_tp):
            for stage in range(d_pp):
                check_pair(model, (rank, d_tp), (stage, d_pp), p_tp, p_pp, [(3, 20)], (4096, 4), 0)
        return
    rank, stage = data.draw(st.integers(0, d_tp - 1)), data.draw(st.integers(0, d_pp - 1))
    span = st.tuples(st.integers(0, 15), st.integers(0, 24)).map(lambda t: (t[0], t[0] + t[1]))
    tokens = data.draw(st.lists(span, min_size=1, max_size=3).filter(lambda spans: max(s[1] for s in spans) > 0))
    cut = data.draw(st.integers(model.heads * CONTENT, 4096)), data.draw(st.sampled_from([1, 4, 16, 48]))
    check_pair(model, (rank, d_tp), (stage, d_pp), p_tp, p_pp, tokens, cut, data.draw(st.integers(0, 3)))


def test_consecutive_layers_are_one_span() -> None:
    model = Model(("full",) * 80, 8, False)
    local, remote = model.rank((1, 2), (0, 1), 16), model.rank((3, 4), (1, 2), 64)
    (item,) = plan_reads(local, remote, [(32, 100)])
    assert item == PlannedSpan(Span(0, 0, 40, 0, 2, 32, 68), region=0, layer=40, head=2)


def test_a_layer_that_no_stage_or_two_stages_hold_is_named() -> None:
    model = Model(("full",) * 4, 4, False)
    local = model.rank((0, 1), (0, 1), 16)
    remotes = {(s, r): model.rank((r, 2), (s, 2), 16) for s in range(2) for r in range(2)}
    for place in ((1, 0), (1, 1)):
        remotes[place] = edit(remotes[place], 0, layers=("layers.2", "elsewhere"))
    with pytest.raises(IncompatiblePeerError, match=r"layers differs, ours is 'layers\.3' needed"):
        plan_all(local, remotes, [(0, 4)])
    for place in ((1, 0), (1, 1)):
        remotes[place] = edit(remotes[place], 0, layers=("layers.1", "layers.2", "layers.3"))
    with pytest.raises(IncompatiblePeerError, match="more than one stage"):
        plan_all(local, remotes, [(0, 4)])


def test_heads_that_a_peer_does_not_hold_are_refused() -> None:
    remote = edit(MODEL.rank((1, 2), (0, 1), 16), tp_rank=0)
    message = r"heads of tp_rank 0 differs, ours is 0\.\.4, the peer's is 4\.\.8"
    with pytest.raises(IncompatiblePeerError, match=message):
        plan_reads(OURS, remote, [(0, 4), (0, 4)])


def test_a_plan_that_misses_or_repeats_something_is_caught() -> None:
    model = Model(("full",) * 3 + ("mla",), 4, False)
    local = model.rank((0, 1), (0, 1), 16)
    remotes = {(0, r): model.rank((r, 2), (0, 1), 16) for r in range(2)}
    spans = [item for spans in plan_all(local, remotes, [(0, 4)] * 2).values() for item in spans]
    check_complete(local, spans, [(0, 4)] * 2)
    lacking = r"layers\.\d' (and 2 more )?needed, the peer's is \d layers without"
    for left_out in spans:
        with pytest.raises(IncompatiblePeerError, match=lacking):
            check_complete(local, [item for item in spans if item is not left_out], [(0, 4)] * 2)
    with pytest.raises(IncompatiblePeerError, match=r"'layers\.3' on more than one stage"):
        check_complete(local, [*spans, next(item for item in spans if item.region == 1)], [(0, 4)] * 2)


# Ranks that share tokens out
@st.composite
def forms(draw: st.DrawFn, heads: int) -> Form:
    """As vLLM would have it: as many shares of a head as ranks hold it at most, a divisor of the ranks."""
    tp_size = draw(st.integers(1, 12))
    shardings = []
    for total in (heads, 1):
        sizes = [size for size in range(1, tp_size // total + 1) if tp_size % size == 0] or [1]
        size = draw(st.sampled_from(sizes))
        shardings.append(TokenSharding(size, draw(st.sampled_from([1, 2, 4, 8, 16])) if size > 1 else 1))
    with_heads, mla = shardings
    return tp_size, with_heads, mla


def check_forms(heads: int, p: Form, d: Form, start: int, stop: int, room: int) -> None:
    remotes = {(0, r): rank(p, r, heads) for r in range(p[0])}
    for d_rank in range(d[0]):
        check(shared(heads), rank(d, d_rank, heads), remotes, [(start, stop)], (room, 16))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.data())
def test_every_token_arrives_once(heads: int, data: st.DataObject) -> None:
    p, d = data.draw(forms(heads)), data.draw(forms(heads))
    start = data.draw(st.integers(0, 60))
    stop, room = start + data.draw(st.integers(1, 80)), data.draw(st.integers(heads * CONTENT, 2000))
    check_forms(heads, p, d, start, stop, room)


sharding = st.builds(TokenSharding, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 4, 16]))


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 3]), sharding, sharding)
@example(1, 2, 1, TokenSharding(4, 1), TokenSharding(4, 16))
def test_readers_of_a_share_spread_and_all_release(
    d_times: int, p_times: int, heads: int, d_sharding: TokenSharding, p_sharding: TokenSharding
) -> None:
    d_size, p_size = d_times * d_sharding.size * heads, p_times * p_sharding.size * heads
    topologies = [
        TpKVTopology(
            d, {"d": d_size, "p": p_size}, False, heads, None, "d", {},
            shardings=(d_sharding,), remote_shardings={"p": (p_sharding,)},
        )
        for d in range(d_size)
    ]  # fmt: skip
    load: dict[tuple[int, int], list[int]] = {}
    for d_rank, topology in enumerate(topologies):
        for read in topology.sources(None, heads, d_sharding, p_sharding):
            assert d_sharding.shard(d_rank).meets(p_sharding.shard(read.p_rank))
            load.setdefault((read.first_head, read.p_rank % p_sharding.size), []).append(read.p_rank)
    for (head, shard), read_at in load.items():
        holders = [r for r in range(p_size) if TpKVTopology.head_interval(r, p_size, heads)[0] == head]
        counts = [read_at.count(r) for r in holders if r % p_sharding.size == shard]
        assert sum(counts) == len(read_at) and max(counts) - min(counts) <= 1
    for p_rank, ranks in enumerate(topologies[0].release_map()):
        reading = {d for d, topology in enumerate(topologies) if p_rank in topology.source_ranks()}
        assert set(ranks) == reading or (not reading and len(ranks) == 1)


def test_a_share_that_does_not_come_is_named() -> None:
    local = rank((1, PLAIN, PLAIN), 0, 1)
    form = 2, TokenSharding(2, 16), TokenSharding(2, 16)
    plans = [plan_reads(local, rank(form, r, 1), [(0, 40)] * 2) for r in range(2)]
    items = [item for spans in plans for item in spans]
    check_complete(local, items, [(0, 40)] * 2)
    for left_out in items:
        with pytest.raises(IncompatiblePeerError, match=r"tokens of layer 'layers\.\d' differs"):
            check_complete(local, [item for item in items if item is not left_out], [(0, 40)] * 2)
    with pytest.raises(IncompatiblePeerError, match="on more than one stage"):
        check_complete(local, items * 2, [(0, 40)] * 2)
    with pytest.raises(IncompatiblePeerError, match=r"'layers\.0' and 1 more needed"):
        check_complete(local, [item for item in items if item.region], [(0, 40)] * 2)
    check_complete(local, plans[0], [(0, 16)] * 2), "all of so short a prompt is in the first share"


GOOD = rank((4, TokenSharding(2, 16), TokenSharding(4, 16)), 3, 2)


@pytest.mark.parametrize(
    ("region", "changes", "message"),
    [
        (0, {"shard": TokenShard(2, 0, 16)}, "rank 0 of 2 .* is not tp_rank 3"),
        (0, {"shard": TokenShard(2, 1, 8)}, "is not tp_rank 3 of an engine with"),
        (0, {"shard": TokenShard(4, 3, 16)}, r"4 tensor-parallel ranks, fewer hold each of 2 heads"),
        (1, {"shard": TokenShard(2, 3, 16)}, "rank 3 of 2"),
        (0, {"kind": "sliding_window", "window": 64}, "caches of kind sliding_window are not carried so"),
        (0, {"packing": "cpu x86_64 vec"}, "packed, are not carried so"),
        (0, {"block_size": 24}, "does not divide a block of 24"),
    ],
)
def test_a_share_that_the_rank_cannot_have_is_refused(region: int, changes: dict[str, object], message: str) -> None:
    check_geometry(GOOD)
    with pytest.raises(GeometryError, match=message):
        check_geometry(edit(GOOD, region, **changes))


def test_asking_for_what_the_rank_does_not_hold_is_refused() -> None:
    remote = rank((2, TokenSharding(2, 16), TokenSharding(2, 16)), 1, 1)
    (span, *_) = [item.span for item in plan_reads(rank((1, PLAIN, PLAIN), 0, 1), remote, [(0, 64)] * 2)]
    check_spans([span], remote, 64)
    for changes, message in (
        ({"num_tokens": 16}, "of which we hold none"),
        ({"shard": TokenShard(2, 0, 16)}, "of which we hold none"),
        ({"shard": TokenShard(2, 2, 16)}, "rank 2 of 2"),
        ({"num_tokens": 65}, r"tokens 0\.\.65 is outside 0\.\.64"),
    ):
        with pytest.raises(GeometryError, match=message):
            check_spans([msgspec.structs.replace(span, **changes)], remote, 64)
    with pytest.raises(GeometryError, match=r"ask for 128 .* of 64"):
        check_spans([span, span], remote, 64)


def test_a_layer_that_drafts_is_read_from_a_p_with_the_same_model_or_not_at_all() -> None:
    """All heads of it, or none: a layer with the KV of some heads would be one of no model."""

    def ranks(draft: str) -> list[RankGeometry]:
        found = []
        for number in range(2):
            rank = MODEL.rank((number, 2), (0, 1), 16)
            head = msgspec.structs.replace(rank.regions[0], layers=("layers.3",), draft=draft)
            found.append(msgspec.structs.replace(rank, regions=(*rank.regions, head)))
        return found

    d = MODEL.rank((0, 1), (0, 1), 16)
    head = msgspec.structs.replace(d.regions[0], layers=("layers.3",), draft="eagle 1")
    d = msgspec.structs.replace(d, regions=(*d.regions, head))
    tokens = [(0, 40)] * 3
    others = [MODEL.rank((number, 2), (0, 1), 16) for number in range(2)]
    for p, regions in ((others, {0, 1}), (ranks("eagle 2"), {0, 1}), (ranks("eagle 1"), {0, 1, 2})):
        planned = [span for rank in p for span in plan_reads(d, rank, tokens)]
        check_complete(d, planned, tokens)
        assert {span.region for span in planned} == regions
    with pytest.raises(IncompatiblePeerError, match=r"'layers\.3' needed"):
        check_complete(d, planned[:-1], tokens)
    with pytest.raises(IncompatiblePeerError, match=r"'layers\.3' needed once"):
        check_complete(d, [*planned, planned[-1]], tokens)
    with pytest.raises(IncompatiblePeerError, match=r"'layers\.0' and 1 more needed"):
        check_complete(d, [span for span in planned if span.region], tokens)


Element = tuple[int, int, int, int, int, int]


def elements(planned: Sequence[PlannedSpan]) -> list[Element]:
    """(P's region, D's region, P's layer, P's head, offset to D's layer, token) of all of them, sorted."""
    found = []
    for item in planned:
        span = item.span
        for layer in range(span.layer, span.layer + span.num_layers):
            for head in range(span.head, span.head + span.num_heads):
                for token in range(span.token, span.token + span.num_tokens):
                    if num_common_tokens(item.shard, span.shard, token, token + 1):
                        found.append((span.region, item.region, layer, head, item.layer - span.layer, token))
    return sorted(found)


def check_windows(planned: Sequence[PlannedSpan], remote: RankGeometry, found: int, step: int, stop: int) -> None:
    ordered = in_windows(planned, remote, found, step)
    spans = [item.span for item in ordered]
    check_spans(spans, remote, stop)  # none without tokens of this rank, none through a tile, not too many ranges
    assert elements(ordered) == elements(planned)
    assert len(ordered) <= MAX_SPANS
    starts = [span.token for span in spans]
    assert starts == sorted(starts), "P has computed all of the earlier windows when it computes the next one"
    cuts = {token for token in starts if token > found} - {item.span.token for item in planned}
    assert all((cut - found) % step == 0 for cut in cuts)


@settings(max_examples=60, deadline=None)
@given(st.one_of(models(), st.sampled_from([1, 2, 3])), st.integers(0, 40), st.integers(1, 30), st.data())
def test_a_plan_keeps_its_elements(model: Model | int, found: int, step: int, data: st.DataObject) -> None:
    """Also where ranks share out the tokens: then ``model`` is the number of heads."""
    if isinstance(model, Model):
        d_tp, p_tp = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
        local = model.rank((data.draw(st.integers(0, d_tp - 1)), d_tp), (0, 1), 16)
        remotes = {(0, r): model.rank((r, p_tp), (0, 1), 32) for r in range(p_tp)}
    else:
        p, d = data.draw(forms(model)), data.draw(forms(model))
        local, remotes = rank(d, 0, model), {(0, r): rank(p, r, model) for r in range(p[0])}
    start = data.draw(st.integers(0, 30))
    stop = start + data.draw(st.integers(1, 60))
    for place, planned in plan_all(local, remotes, [(start, stop)] * len(local.regions)).items():
        check_windows(planned, remotes[place], found, step, stop)


ONE = Model(("full",) * 4, 2, False)


def windows_of(tokens: int, found: int, step: int, remote: RankGeometry | None = None) -> list[tuple[int, int]]:
    remote = remote or ONE.rank((0, 1), (0, 1), 16)
    ((_, planned),) = plan_all(remote, {(0, 0): remote}, [(0, tokens)]).items()
    return [(item.span.token, item.span.num_tokens) for item in in_windows(planned, remote, found, step)]


def test_windows_end_where_the_steps_of_p_do() -> None:
    assert windows_of(100, 0, 32) == [(0, 32), (32, 32), (64, 32), (96, 4)]
    assert windows_of(100, 48, 32) == [(0, 48), (48, 32), (80, 20)]
    assert windows_of(100, 100, 32) == windows_of(100, 200, 32) == windows_of(100, 0, 100) == [(0, 100)]


def test_a_region_is_cut_between_tiles() -> None:
    remote = ONE.rank((0, 1), (0, 1), 16)
    (region,) = remote.regions
    packed = msgspec.structs.replace(region, packing="amx", tile_tokens=8)
    remote = msgspec.structs.replace(remote, regions=(packed,))
    assert windows_of(40, 5, 14, remote) == [(0, 16), (16, 16), (32, 8)]


@pytest.mark.parametrize(("name", "bound"), [("MAX_SPANS", 12), ("MAX_RANGES", 12), ("MAX_WINDOWS", 12)])
def test_a_long_prompt_has_longer_windows(monkeypatch: pytest.MonkeyPatch, name: str, bound: int) -> None:
    monkeypatch.setattr(read_plan, name, bound)
    windows = windows_of(10_000, 100, 10)
    assert 2 < len(windows) <= bound and {length % 10 for _, length in windows} == {0}
    monkeypatch.setattr(read_plan, name, 1)
    assert windows_of(10_000, 100, 10) == [(0, 10_000)]


def test_the_bounds_hold_for_the_longest_prompts() -> None:
    assert len(windows_of(1 << 20, 0, 1)) <= min(MAX_RANGES, MAX_SPANS)


def test_the_layers_of_a_window_are_several_messages() -> None:
    model = Model(("full",) * 32, 2, False)
    remote = model.rank((0, 1), (0, 1), 16)
    ((_, planned),) = plan_all(remote, {(0, 0): remote}, [(0, 64)]).items()
    room = part_bytes(in_windows(planned, remote, 0, 32), remote)
    assert len(cut_span(in_windows(planned, remote, 0, 32)[0].span, CONTENT, room)) == STREAM_PARTS
