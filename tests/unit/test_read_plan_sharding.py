"""Plans between ranks that share tokens out, against an oracle that gives every element a label of its own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry.compatibility import check_geometry, compatible
from kvferry.connector.geometry.rank_geometry import CacheKind, RankGeometry, RegionGeometry
from kvferry.connector.geometry.read_plan import PlannedSpan, check_complete, plan_reads
from kvferry.connector.geometry.spans import check_spans, chunks
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenShard, TokenSharding, common_tokens
from kvferry.connector.geometry.topology import TpKVTopology
from kvferry.transport.errors import GeometryError, IncompatiblePeerError
from tests.unit.whole_plan import plan_all

CONTENT = 8
PLAIN = UNSHARDED[0]
Form = tuple[int, TokenSharding, TokenSharding]
"""Tensor-parallel size, how tokens of the layers with heads are shared out, and how those of MLA layers are."""


def rank(form: Form, tp_rank: int, heads: int) -> RankGeometry:
    """Two layers with heads, and one of MLA beside them."""
    tp_size, *shardings = form
    regions = []
    kinds: list[tuple[CacheKind, tuple[str, ...], int, TokenSharding]] = [
        ("full", ("layers.0", "layers.2"), heads, shardings[0]),
        ("mla", ("layers.1",), 1, shardings[1]),
    ]
    for kind, layers, total, sharding in kinds:
        start, count = TpKVTopology.head_interval(tp_rank, tp_size, total)
        regions.append(
            RegionGeometry(
                kind=kind,
                layers=layers,
                block_size=16,
                head_start=start,
                num_heads=count,
                total_heads=total,
                content_bytes=CONTENT,
                dtype="bfloat16",
                shard=sharding.shard(tp_rank),
            )
        )
    return RankGeometry(
        tp_rank=tp_rank, tp_size=tp_size, pp_rank=0, pp_size=1, head_counts=tuple(sorted({1, heads})),
        shardings=tuple(sorted(set(shardings))), regions=tuple(regions),
    )  # fmt: skip


def held(geometry: RankGeometry, tokens: int) -> list[np.ndarray]:
    """Labels of all elements of a rank, ``[L, H, T]`` per region, T in the rank's own numbering."""
    found = []
    for region in geometry.regions:
        shard = region.shard
        own = np.array([t for t in range(tokens) if t // shard.interleave % shard.size == shard.rank], dtype=np.int64)
        layers = np.array([int(name.split(".")[1]) for name in region.layers])
        heads = region.head_start + np.arange(region.num_heads)
        found.append(((layers[:, None] * 100 + heads) * 10000)[:, :, None] + own)
    return found


def carry(items: Sequence[PlannedSpan], p: RankGeometry, d: RankGeometry, tokens: int, into, times, room: int) -> None:
    """Chunk by chunk, as the two sides would."""
    theirs = held(p, tokens)
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
        for c in chunks(s, CONTENT, room, 16, p_share):
            assert c.num_layers * s.num_heads * c.num_tokens * CONTENT <= room
            there, here = (side[c.token : c.token + c.num_tokens] for side in at)
            assert len(there) == len(here) == c.num_tokens
            box = theirs[s.region][s.layer + c.layer :][: c.num_layers, s.head : s.head + s.num_heads][:, :, there]
            place = (
                slice(item.layer + c.layer, item.layer + c.layer + c.num_layers),
                slice(item.head, item.head + s.num_heads),
                here,
            )
            into[item.region][place] = box
            times[item.region][place] += 1


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


def check(heads: int, p: Form, d: Form, start: int, stop: int, room: int) -> None:
    remotes = {(0, r): rank(p, r, heads) for r in range(p[0])}
    for d_rank in range(d[0]):
        local = rank(d, d_rank, heads)
        check_geometry(local)
        plans = plan_all(local, remotes, [(start, stop)] * 2)
        mine = held(local, stop)
        into, times = [np.full_like(m, -1) for m in mine], [np.zeros_like(m) for m in mine]
        for place, items in plans.items():
            remote = remotes[place]
            compatible(local, remote)
            compatible(remote, local, consumer=False)
            check_spans([item.span for item in items], remote, stop)
            carry(items, remote, local, stop, into, times, room)
        for oracle, got, count in zip(mine, into, times, strict=True):
            wanted = oracle % 10000 >= start
            assert (count == wanted).all()
            assert (got[wanted] == oracle[wanted]).all()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([1, 2, 3, 4]), st.data())
def test_every_token_arrives_once(heads: int, data: st.DataObject) -> None:
    p, d = data.draw(forms(heads)), data.draw(forms(heads))
    start = data.draw(st.integers(0, 60))
    check(heads, p, d, start, start + data.draw(st.integers(1, 80)), data.draw(st.integers(heads * CONTENT, 2000)))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    ("p", "d"),
    [
        ((4, TokenSharding(2, 16), TokenSharding(2, 16)), (1, PLAIN, PLAIN)),
        ((1, PLAIN, PLAIN), (4, TokenSharding(2, 16), TokenSharding(2, 16))),
        ((4, TokenSharding(2, 16), TokenSharding(4, 16)), (8, TokenSharding(4, 16), TokenSharding(8, 16))),
        ((4, TokenSharding(2, 1), TokenSharding(2, 1)), (4, TokenSharding(2, 16), TokenSharding(4, 2))),
        ((4, PLAIN, TokenSharding(2, 16)), (4, TokenSharding(2, 16), PLAIN)),
    ],
)
def test_pairs_that_users_run(heads: int, p: Form, d: Form) -> None:
    check(heads, p, d, 0, 100, 512)
    check(heads, p, d, 33, 70, 4096)
    check(heads, p, d, 0, 3, 4096)


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
        start = [
            r
            for r in range(p_size)
            if TpKVTopology.head_interval(r, p_size, heads)[0] == head and r % p_sharding.size == shard
        ]
        counts = [read_at.count(r) for r in start]
        assert sum(counts) == len(read_at) and max(counts) - min(counts) <= 1
    for p_rank, ranks in enumerate(topologies[0].release_map()):
        reading = {d for d, topology in enumerate(topologies) if p_rank in topology.source_ranks()}
        assert set(ranks) == reading or (not reading and len(ranks) == 1)


def test_a_share_that_does_not_come_is_named() -> None:
    local = rank((1, PLAIN, PLAIN), 0, 1)
    plans = [
        plan_reads(local, rank((2, TokenSharding(2, 16), TokenSharding(2, 16)), r, 1), [(0, 40)] * 2) for r in range(2)
    ]
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
    ("region", "shard", "message"),
    [
        (0, TokenShard(2, 0, 16), "rank 0 of 2 .* is not tp_rank 3"),
        (0, TokenShard(2, 1, 8), "is not tp_rank 3 of an engine with"),
        (0, TokenShard(4, 3, 16), r"4 tensor-parallel ranks, fewer hold each of 2 heads"),
        (1, TokenShard(2, 3, 16), "rank 3 of 2"),
    ],
)
def test_a_share_that_the_rank_cannot_have_is_refused(region: int, shard: TokenShard, message: str) -> None:
    check_geometry(GOOD)
    regions = list(GOOD.regions)
    regions[region] = msgspec.structs.replace(regions[region], shard=shard)
    with pytest.raises(GeometryError, match=message):
        check_geometry(msgspec.structs.replace(GOOD, regions=tuple(regions)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sliding_window", "window": 64}, "caches of kind sliding_window are not carried so"),
        ({"packing": "cpu x86_64 vec"}, "packed, are not carried so"),
        ({"block_size": 24}, "does not divide a block of 24"),
    ],
)
def test_caches_that_cannot_be_shared_out_are_refused(changes: dict[str, object], message: str) -> None:
    regions = (msgspec.structs.replace(GOOD.regions[0], **changes), GOOD.regions[1])
    with pytest.raises(GeometryError, match=message):
        check_geometry(msgspec.structs.replace(GOOD, regions=regions))


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
