"""Plans against an oracle that gives every (layer, head, token) element of a model a label of its own; also between
ranks that share tokens out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry.compatibility import check_geometry, compatible
from kvferry.connector.geometry.rank_geometry import CacheKind, RankGeometry
from kvferry.connector.geometry.read_plan import PlannedSpan, check_complete, plan_reads
from kvferry.connector.geometry.spans import Span, check_spans, cut_span
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenShard, TokenSharding, common_tokens
from kvferry.connector.geometry.topology import TpKVTopology
from kvferry.transport.errors import GeometryError, IncompatiblePeerError
from tests.unit.labelled_model import CONTENT, LABEL_TOKENS, MODEL, OURS, Model, edit
from tests.unit.whole_plan import plan_all

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
