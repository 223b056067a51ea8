"""Plans against an oracle that gives every (layer, head, token) element of a model a label of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.connector.geometry.compatibility import compatible
from kvferry.connector.geometry.rank_geometry import CacheKind
from kvferry.connector.geometry.read_plan import PlannedSpan, check_complete, plan_reads
from kvferry.connector.geometry.spans import Span, check_spans, chunks
from kvferry.connector.geometry.topology import TpKVTopology
from kvferry.transport.errors import IncompatiblePeerError
from tests.unit.labelled_model import CONTENT, MODEL, OURS, Model, edit
from tests.unit.whole_plan import plan_all


def carry(
    spans: Sequence[PlannedSpan],
    theirs: Sequence[np.ndarray],
    ours: Sequence[np.ndarray],
    arrivals: Sequence[np.ndarray],
    cut: tuple[int, int],
) -> None:
    """Moves spans chunk by chunk, as the two sides would."""
    for item in spans:
        s = item.span
        for c in chunks(s, CONTENT, *cut):
            assert c.num_layers * s.num_heads * c.num_tokens * CONTENT <= cut[0]
            here = (
                slice(item.layer + c.layer, item.layer + c.layer + c.num_layers),
                slice(item.head, item.head + s.num_heads),
                slice(s.token + c.token, s.token + c.token + c.num_tokens),
            )
            there = (
                slice(s.layer + c.layer, s.layer + c.layer + c.num_layers),
                slice(s.head, s.head + s.num_heads),
                here[2],
            )
            box = theirs[s.region][there]
            assert box.shape == (c.num_layers, s.num_heads, c.num_tokens)
            ours[item.region][here] = box
            arrivals[item.region][here] += 1


@st.composite
def models(draw: st.DrawFn) -> Model:
    is_mla = draw(st.booleans())
    kinds: list[CacheKind] = ["mla"] if is_mla else ["full", "sliding_window", "mla"]
    pattern = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12))
    return Model(tuple(pattern), draw(st.integers(1, 12)), is_mla)


def check_pair(model: Model, d_tp, d_pp, p_tp, p_pp, tokens, cut, seed) -> None:
    shuffle = random.Random(seed) if seed else None
    local = model.rank(d_tp, d_pp, 16, shuffle)
    remotes = {
        (stage, rank): model.rank((rank, p_tp), (stage, p_pp), 32, shuffle)
        for stage in range(p_pp)
        for rank in range(p_tp)
    }
    longest = max(stop for _, stop in tokens)
    wanted = [tokens[i % len(tokens)] for i in range(len(local.regions))]
    for remote in remotes.values():
        compatible(local, remote)
        compatible(remote, local, consumer=False)
    plans = plan_all(local, remotes, wanted)
    ours = [np.full_like(cache, -1) for cache in model.cache(local, longest)]
    arrivals = [np.zeros_like(cache) for cache in ours]
    for place, spans in plans.items():
        assert spans
        check_spans([item.span for item in spans], remotes[place], longest)
        carry(spans, model.cache(remotes[place], longest), ours, arrivals, cut)
    for oracle, mine, times, (start, stop) in zip(model.cache(local, longest), ours, arrivals, wanted, strict=True):
        assert (times[:, :, start:stop] == 1).all()
        assert (mine[:, :, start:stop] == oracle[:, :, start:stop]).all()
        assert not times[:, :, :start].any() and not times[:, :, stop:].any()


@settings(max_examples=250, deadline=None)
@given(models(), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.data())
@example(Model(("full",) * 6, 6, False), 2, 1, 3, 2, None)
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


def test_the_oracle_catches_a_misplaced_span() -> None:
    model = Model(("full",) * 4, 4, False)
    local, remote = model.rank((1, 2), (0, 1), 16), model.rank((0, 1), (0, 1), 16)
    (item,) = plan_reads(local, remote, [(0, 8)])
    shifted = item._replace(span=msgspec.structs.replace(item.span, head=1))
    for planned, right in ((item, True), (shifted, False)):
        ours = [np.full_like(cache, -1) for cache in model.cache(local, 8)]
        carry([planned], model.cache(remote, 8), ours, [np.zeros_like(ours[0])], (4096, 1))
        assert (ours[0] == model.cache(local, 8)[0]).all() == right


def test_consecutive_layers_are_one_span() -> None:
    model = Model(("full",) * 80, 8, False)
    local, remote = model.rank((1, 2), (0, 1), 16), model.rank((3, 4), (1, 2), 64)
    (item,) = plan_reads(local, remote, [(32, 100)])
    assert item == PlannedSpan(Span(0, 0, 40, 0, 2, 32, 68), region=0, layer=40, head=2)


def test_groups_without_tokens_need_no_source() -> None:
    model = Model(("full", "sliding_window"), 2, False)
    local = model.rank((0, 1), (0, 1), 16)
    remotes = {(0, 0): model.rank((0, 1), (0, 1), 16)}
    assert plan_all(local, remotes, [(5, 5), (0, 0)]) == {}
    assert [item.region for item in plan_all(local, remotes, [(5, 5), (1, 2)])[0, 0]] == [1]


def test_one_mla_replica_is_read_in_a_model_that_also_has_heads() -> None:
    model = Model(("mla", "full"), 4, False)
    local = model.rank((0, 1), (0, 1), 16)
    remotes = {(0, r): model.rank((r, 4), (0, 1), 16) for r in range(4)}
    plans = plan_all(local, remotes, [(0, 4), (0, 4)])
    assert {place: [item.region for item in spans] for place, spans in plans.items()} == {
        (0, 0): [0, 1], (0, 1): [1], (0, 2): [1], (0, 3): [1],
    }  # fmt: skip


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
    with pytest.raises(
        IncompatiblePeerError, match=r"heads of tp_rank 0 differs, ours is 0\.\.4, the peer's is 4\.\.8"
    ):
        plan_reads(OURS, remote, [(0, 4), (0, 4)])


def test_a_plan_that_misses_or_repeats_something_is_caught() -> None:
    model = Model(("full",) * 3 + ("mla",), 4, False)
    local = model.rank((0, 1), (0, 1), 16)
    remotes = {(0, r): model.rank((r, 2), (0, 1), 16) for r in range(2)}
    spans = [item for spans in plan_all(local, remotes, [(0, 4)] * 2).values() for item in spans]
    check_complete(local, spans, [(0, 4)] * 2)
    for left_out in spans:
        with pytest.raises(
            IncompatiblePeerError, match=r"layers\.\d' (and 2 more )?needed, the peer's is \d layers without"
        ):
            check_complete(local, [item for item in spans if item is not left_out], [(0, 4)] * 2)
    with pytest.raises(IncompatiblePeerError, match=r"'layers\.3' on more than one stage"):
        check_complete(local, [*spans, next(item for item in spans if item.region == 1)], [(0, 4)] * 2)


def test_sources_and_plans_agree() -> None:
    model = Model(("full",) * 3, 6, False)
    for rank in range(4):
        local = model.rank((rank, 4), (0, 1), 16)
        remotes = {(0, r): model.rank((r, 9), (0, 1), 16) for r in range(9)}
        assert {place[1] for place in plan_all(local, remotes, [(0, 1)])} == {
            read.p_rank for read in TpKVTopology.between(local, remotes[0, 0]).sources(total_heads=6)
        }
