"""Plans against an oracle that gives every (layer, head, token) element of a model a label of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.connector.agreement import check_geometry, compatible
from kvferry.connector.errors import GeometryError, IncompatiblePeerError
from kvferry.connector.geometry import GroupGeometry, RankGeometry
from kvferry.connector.plan import PlannedSpan, check_complete, plan_reads, plan_sources
from kvferry.connector.protocol import Span
from kvferry.connector.spans import MAX_CHUNKS, Chunk, check_span, check_spans, chunks
from kvferry.connector.topology import head_interval, sources

CONTENT = 8


@dataclass(frozen=True)
class Model:
    """Layers by kind; layer i is named ``layers.i``."""

    kinds: tuple[str, ...]
    heads: int
    is_mla: bool

    def label(self, layer: str, head: int, token: int | np.ndarray) -> int | np.ndarray:
        return (int(layer.split(".")[1]) * self.heads + head) * 1000 + token

    def stage(self, pp_rank: int, pp_size: int, shuffle: random.Random | None = None) -> dict[str, list[str]]:
        """Layers of a pipeline stage by kind."""
        total = len(self.kinds)
        groups: dict[str, list[str]] = {}
        for layer in range(pp_rank * total // pp_size, (pp_rank + 1) * total // pp_size):
            groups.setdefault(self.kinds[layer], []).append(f"layers.{layer}")
        if shuffle:
            for layers in groups.values():
                shuffle.shuffle(layers)
            groups = dict(shuffle.sample(sorted(groups.items()), len(groups)))
        return groups

    def rank(self, tp: tuple[int, int], pp: tuple[int, int], block: int, shuffle: random.Random | None = None):
        groups = []
        for kind, layers in self.stage(*pp, shuffle).items():
            total = 1 if self.is_mla or kind == "mla" else self.heads
            start, count = head_interval(*tp, total)
            groups.append(
                GroupGeometry(
                    kind=kind,
                    layers=tuple(layers),
                    block_size=block,
                    head_start=start,
                    num_heads=count,
                    total_heads=total,
                    content_bytes=CONTENT,
                    dtype="bfloat16",
                    window=64 if kind == "sliding_window" else 0,
                )
            )
        return RankGeometry(
            tp_rank=tp[0], tp_size=tp[1], pp_rank=pp[0], pp_size=pp[1],
            head_counts=tuple(sorted({1, self.heads})), groups=tuple(groups),
        )  # fmt: skip

    def cache(self, geometry: RankGeometry, tokens: int) -> list[np.ndarray]:
        """Labels that a rank holds, ``[L, H, T]`` per group."""
        caches = []
        for group in geometry.groups:
            cache = np.empty((len(group.layers), group.num_heads, tokens), dtype=np.int64)
            for place, layer in enumerate(group.layers):
                for head in range(group.num_heads):
                    cache[place, head] = self.label(layer, group.head_start + head, np.arange(tokens))
            caches.append(cache)
        return caches


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
            box = theirs[s.group][there]
            assert box.shape == (c.num_layers, s.num_heads, c.num_tokens)
            ours[item.group][here] = box
            arrivals[item.group][here] += 1


@st.composite
def models(draw: st.DrawFn) -> Model:
    is_mla = draw(st.booleans())
    kinds = ["mla"] if is_mla else ["full", "sliding_window", "mla"]
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
    wanted = [tokens[i % len(tokens)] for i in range(len(local.groups))]
    for remote in remotes.values():
        compatible(local, remote)
        compatible(remote, local, consumer=False)
    plans = plan_sources(local, remotes, wanted)
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
    assert item == PlannedSpan(Span(0, 0, 40, 0, 2, 32, 68), group=0, layer=40, head=2)


def test_groups_without_tokens_need_no_source() -> None:
    model = Model(("full", "sliding_window"), 2, False)
    local = model.rank((0, 1), (0, 1), 16)
    remotes = {(0, 0): model.rank((0, 1), (0, 1), 16)}
    assert plan_sources(local, remotes, [(5, 5), (0, 0)]) == {}
    assert [item.group for item in plan_sources(local, remotes, [(5, 5), (1, 2)])[0, 0]] == [1]


def test_one_mla_replica_is_read_in_a_model_that_also_has_heads() -> None:
    model = Model(("mla", "full"), 4, False)
    local = model.rank((0, 1), (0, 1), 16)
    remotes = {(0, r): model.rank((r, 4), (0, 1), 16) for r in range(4)}
    plans = plan_sources(local, remotes, [(0, 4), (0, 4)])
    assert {place: [item.group for item in spans] for place, spans in plans.items()} == {
        (0, 0): [0, 1], (0, 1): [1], (0, 2): [1], (0, 3): [1],
    }  # fmt: skip


def edit(geometry: RankGeometry, group: int | None = None, **changes: object) -> RankGeometry:
    if group is None:
        return msgspec.structs.replace(geometry, **changes)
    groups = list(geometry.groups)
    groups[group] = msgspec.structs.replace(groups[group], **changes)
    return msgspec.structs.replace(geometry, groups=tuple(groups))


MODEL = Model(("full", "sliding_window", "full"), 8, False)
OURS = MODEL.rank((0, 2), (0, 1), 16)


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (Model(MODEL.kinds, 4, False).rank((0, 2), (0, 1), 16), "total_heads of layer .* differs, ours is 8, .* is 4"),
        (Model(MODEL.kinds, 8, True).rank((0, 2), (0, 1), 16), "total_heads of layer .* differs, ours is 8, .* is 1"),
        (edit(OURS, 0, content_bytes=16), r"content_bytes of layer 'layers\.0' differs, ours is 8, the peer's is 16"),
        (edit(OURS, 0, dtype="float8_e4m3fn"), "dtype of layer .* ours is bfloat16, the peer's is float8_e4m3fn"),
        (edit(OURS, 1, window=128), r"window of layer 'layers\.1' differs, ours is 64, the peer's is 128"),
        (edit(OURS, 1, kind="state"), "kind of layer .* ours is sliding_window, the peer's is state"),
        (edit(OURS, 0, kind="mla"), "kind of layer .* ours is full, the peer's is mla"),
        (edit(OURS, 0, rows=2), r"rows of layer 'layers\.0' differs, ours is 1, the peer's is 2"),
        (
            edit(OURS, 0, part="k", packing="pairs"),
            r"packing of layer 'layers\.0' differs, ours is whole \(not packed\), the peer's is k \(pairs\)",
        ),
        (edit(OURS, 0, layers=("layers.0", "other")), r"layers differs, ours is 'layers\.2' needed"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_by_name(theirs: RankGeometry, message: str) -> None:
    with pytest.raises((IncompatiblePeerError, GeometryError), match=rf"^[^\n]*({message})[^\n]*$"):
        compatible(OURS, theirs)


def test_p_states_a_mismatch_from_its_own_side() -> None:
    with pytest.raises(IncompatiblePeerError, match="ours is 8, the peer's is 16"):
        compatible(OURS, edit(OURS, 0, content_bytes=16), consumer=False)
    few = edit(OURS, 0, layers=("layers.0",))
    compatible(OURS, few, consumer=False)  # D needs fewer layers than P has
    with pytest.raises(IncompatiblePeerError, match=r"the peer's is 'layers\.2' needed"):
        compatible(few, OURS, consumer=False)


def test_layers_and_block_sizes_may_be_arranged_otherwise() -> None:
    compatible(OURS, MODEL.rank((2, 3), (1, 3), 48, random.Random(1)))


def test_one_side_may_keep_what_has_left_the_window() -> None:
    compatible(OURS, edit(OURS, 1, kind="full", window=0))
    compatible(edit(OURS, 1, kind="full", window=0), OURS)


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (edit(OURS, tp_rank=2), "tp_rank 2 of tp_size 2"),
        (edit(OURS, 0, block_size=1 << 30), "blocks of 1073741824 tokens, limit 1048576"),
        (edit(OURS, pp_rank=1), "pp_rank 1 of pp_size 1"),
        (edit(OURS, tp_size=1 << 31), "tp_rank 0 of tp_size"),
        (edit(OURS, 0, head_start=4), r"holds heads 4\.\.8, expected 0\.\.4 of 8"),
        (edit(OURS, 0, num_heads=8), r"holds heads 0\.\.8"),
        (edit(OURS, 0, layers=("layers.0", "layers.1")), r"layer 'layers\.1' is listed twice"),
        (
            edit(OURS, head_counts=(1, 4)),
            r"layer 'layers\.0': 8 heads in all, which is not one of the head counts 1, 4",
        ),
        (edit(edit(OURS, 0, total_heads=1 << 31), head_counts=(1 << 31,)), "total_num_kv_heads"),
    ],
)
def test_a_geometry_that_contradicts_itself_is_refused(geometry: RankGeometry, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        check_geometry(geometry)


def test_a_missing_stage_or_rank_is_named() -> None:
    model = Model(("full",) * 4, 4, False)
    local = model.rank((0, 1), (0, 1), 16)
    remotes = {(s, r): model.rank((r, 2), (s, 2), 16) for s in range(2) for r in range(2)}
    with pytest.raises(GeometryError, match=r"\(pp 1, tp 0\) is not known"):
        plan_sources(local, {place: remotes[place] for place in ((0, 0), (0, 1), (1, 1))}, [(0, 4)])
    with pytest.raises(GeometryError, match="no P rank is known"):
        plan_sources(local, {}, [(0, 4)])
    for place in ((1, 0), (1, 1)):
        remotes[place] = edit(remotes[place], 0, layers=("layers.2", "elsewhere"))
    with pytest.raises(IncompatiblePeerError, match=r"layers differs, ours is 'layers\.3' needed"):
        plan_sources(local, remotes, [(0, 4)])
    for place in ((1, 0), (1, 1)):
        remotes[place] = edit(remotes[place], 0, layers=("layers.1", "layers.2", "layers.3"))
    with pytest.raises(IncompatiblePeerError, match="more than one stage"):
        plan_sources(local, remotes, [(0, 4)])


def test_heads_that_a_peer_does_not_hold_are_refused() -> None:
    remote = edit(MODEL.rank((1, 2), (0, 1), 16), tp_rank=0)
    with pytest.raises(
        IncompatiblePeerError, match=r"heads of tp_rank 0 differs, ours is 0\.\.4, the peer's is 4\.\.8"
    ):
        plan_reads(OURS, remote, [(0, 4), (0, 4)])


GOOD = Span(0, 0, 2, 0, 4, 10, 90)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 2}, "span of group 2, there are 2"),
        ({"layer": 1}, r"layers 1\.\.3 is outside 0\.\.2"),
        ({"num_layers": 1 << 31}, "layers"),
        ({"head": 1}, r"heads 1\.\.5 is outside 0\.\.4"),
        ({"token": 11}, r"tokens 11\.\.101 is outside 0\.\.100"),
        ({"num_tokens": 0}, "tokens"),
        ({"layer": -1}, r"layers -1\.\.1"),
    ],
)
def test_a_span_out_of_bounds_is_refused(changes: dict[str, int], message: str) -> None:
    check_span(GOOD, OURS, 100)
    with pytest.raises(GeometryError, match=message):
        check_span(msgspec.structs.replace(GOOD, **changes), OURS, 100)


def test_asking_for_the_same_box_again_and_again_is_refused() -> None:
    check_spans([GOOD, Span(0, 0, 2, 0, 4, 0, 10)], OURS, 100)
    with pytest.raises(GeometryError, match=r"ask for 1440 .* of 800"):
        check_spans([GOOD, GOOD], OURS, 100)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 5), st.integers(0, 70), st.integers(1, 200),
    st.integers(1, 40), st.integers(1, 6000), st.integers(1, 48),
)  # fmt: skip
def test_chunks_partition_a_span(layers, heads, token, tokens, content, room, align) -> None:
    span = Span(0, 3, layers, 1, heads, token, tokens)
    room = max(room, heads * content)
    parts = chunks(span, content, room, align)
    seen = np.zeros((layers, tokens), dtype=int)
    for part in parts:
        assert part.num_layers >= 1 and part.num_tokens >= 1
        assert part.num_layers == 1 or part.num_tokens == tokens
        assert part.num_layers * span.num_heads * part.num_tokens * content <= room
        seen[part.layer : part.layer + part.num_layers, part.token : part.token + part.num_tokens] += 1
        end = token + part.token + part.num_tokens
        if part.token + part.num_tokens < tokens and end % align:  # only where no aligned cut was within reach
            assert end - part.num_tokens >= end // align * align
    assert (seen == 1).all()
    assert parts == sorted(parts)
    whole = room // (heads * content * tokens)
    assert (
        len(parts) == -(-layers // whole)
        if whole
        else len(parts) <= layers * (2 * tokens * heads * content // room + 2)
    )


def test_chunks_are_as_large_as_fit() -> None:
    span = Span(0, 0, 10, 0, 2, 8, 64)
    assert chunks(span, 8, 4 * 1024) == [Chunk(0, 4, 0, 64), Chunk(4, 4, 0, 64), Chunk(8, 2, 0, 64)]
    assert chunks(span, 8, 512, 16)[:4] == [
        Chunk(0, 1, 0, 24),
        Chunk(0, 1, 24, 32),
        Chunk(0, 1, 56, 8),
        Chunk(1, 1, 0, 24),
    ]


def test_chunks_that_cannot_be_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"2 heads x 8 bytes .* of 15 bytes; raise slot_bytes to 16"):
        chunks(Span(0, 0, 1, 0, 2, 0, 4), 8, 15)
    with pytest.raises(GeometryError, match=f"more than {MAX_CHUNKS} messages"):
        chunks(Span(0, 0, 1000, 0, 1, 0, 1 << 30), 1, 64)
    with pytest.raises(GeometryError, match=f"more than {MAX_CHUNKS} messages"):
        chunks(Span(0, 0, 1 << 30, 0, 1, 0, 1), 1, 1)


def test_a_plan_that_misses_or_repeats_something_is_caught() -> None:
    model = Model(("full",) * 3 + ("mla",), 4, False)
    local = model.rank((0, 1), (0, 1), 16)
    remotes = {(0, r): model.rank((r, 2), (0, 1), 16) for r in range(2)}
    spans = [item for spans in plan_sources(local, remotes, [(0, 4)] * 2).values() for item in spans]
    check_complete(local, spans, [(0, 4)] * 2)
    for left_out in spans:
        with pytest.raises(
            IncompatiblePeerError, match=r"layers\.\d' (and 2 more )?needed, the peer's is \d layers without"
        ):
            check_complete(local, [item for item in spans if item is not left_out], [(0, 4)] * 2)
    with pytest.raises(IncompatiblePeerError, match=r"'layers\.3' on more than one stage"):
        check_complete(local, [*spans, next(item for item in spans if item.group == 1)], [(0, 4)] * 2)


def test_sources_and_plans_agree() -> None:
    model = Model(("full",) * 3, 6, False)
    for rank in range(4):
        local = model.rank((rank, 4), (0, 1), 16)
        remotes = {(0, r): model.rank((r, 9), (0, 1), 16) for r in range(9)}
        assert {place[1] for place in plan_sources(local, remotes, [(0, 1)])} == {
            read.p_rank for read in sources(rank, 4, 9, 6)
        }
