"""Reads of planned deployments: complete for any sizes, and those of ranks that really hand over."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli.plan.handover import Deployment, Pair, plan_handover, rank_geometries
from kvferry.cli.plan.model import ModelShape, RecurrentState
from kvferry.connector.config import Settings
from kvferry.connector.prefill_side.send import Sends
from kvferry.transport.errors import ConfigError, GeometryError
from tests.handover.scenario import RankGroup
from tests.support.ranks import grant, load_plan, peer, wait

SLOT = 100_000
"""No multiple of a block's bytes, so that messages end before their slot is full."""
FULL = ModelShape(("full",) * 4, 8, 8, 64, "bfloat16")
SIZES = st.sampled_from([1, 2, 3, 4, 6, 12])


@given(
    p_tp=SIZES, d_tp=SIZES, p_pp=st.integers(1, 5), d_pp=st.integers(1, 5), heads=st.sampled_from([1, 2, 3, 4, 12]),
    mla=st.booleans(), tokens=st.integers(1, 500),
    blocks=st.tuples(st.sampled_from([8, 16, 48]), st.sampled_from([16, 32])),
)  # fmt: skip
def test_each_rank_of_d_reads_its_part_once(
    p_tp: int, d_tp: int, p_pp: int, d_pp: int, heads: int, mla: bool, tokens: int, blocks: tuple[int, int]
) -> None:
    shape = ModelShape(("mla" if mla else "full",) * 7, 12, 1 if mla else heads, 32, "bfloat16")
    p, d = Deployment(p_tp, p_pp, blocks[0]), Deployment(d_tp, d_pp, blocks[1], "HND")
    reads = plan_handover(Pair(shape, p, d, SLOT), tokens)
    read: Counter[tuple[tuple[int, int], int, int]] = Counter()
    for one in reads:
        assert one.nbytes == one.num_layers * one.num_heads * one.num_tokens * 32 and one.messages > 0
        assert one.num_tokens == tokens and 0 < one.piece_bytes <= one.nbytes * 500
        for layer in range(one.first_layer, one.first_layer + one.num_layers):
            for head in range(one.first_head, one.first_head + one.num_heads):
                read[one.d, layer, head] += 1
    held = Counter(
        ((rank.pp_rank, rank.tp_rank), int(name.split(".")[2]), head)
        for rank in rank_geometries(shape, d, "D")
        for region in rank.regions
        for name in region.layers
        for head in range(region.head_start, region.head_start + region.num_heads)
    )
    assert read == held


@pytest.mark.parametrize(("p", "d"), [((1, 1), (1, 1)), ((2, 1), (1, 4)), ((1, 2), (2, 1)), ((4, 1), (2, 2))])
def test_states_and_layers_without_kv(p: tuple[int, int], d: tuple[int, int]) -> None:
    """Layer 1 of 4 has KV, the others states. With four stages, stages of D read no KV."""
    state = RecurrentState((0, 2, 3), "GDN_ATTN", 3, 2 * 4 * 16 + 8 * 16, 0, (8, 16, 16), "bfloat16", "float32")
    shape = ModelShape((None, "full", None, None), 8, 4, 64, "bfloat16", state=state)
    assert (shape.token_bytes, shape.state_bytes) == (4 * 64, 3 * (3 * 256 * 2 + 8 * 16 * 16 * 4))
    reads = plan_handover(Pair(shape, Deployment(*p), Deployment(*d), SLOT), 100)
    assert sum(one.nbytes for one in reads) == 100 * shape.token_bytes + shape.state_bytes
    assert {one.cache for one in reads} == {"full", "conv.q", "conv.k", "conv.v", "ssm"}
    assert {(one.first_layer, one.last_layer) for one in reads if one.cache == "full"} == {(1, 1)}
    layers = {layer for one in reads if one.cache == "ssm" for layer in (one.first_layer, one.last_layer)}
    assert layers == {0, 3} if d[1] == 1 == p[1] else {0, 2, 3}


@pytest.mark.parametrize(
    ("kind", "window", "tokens", "read"),
    [("sliding_window", 64, 40, 40), ("sliding_window", 64, 200, 72), ("sliding_window", 64, 207, 63),
     ("chunked_local", 64, 200, 8), ("chunked_local", 64, 192, 0)],
)  # fmt: skip
def test_of_a_window_the_blocks_move_that_the_next_token_reads(kind: Any, window: int, tokens: int, read: int) -> None:
    shape = ModelShape((kind, "full", kind), 8, 4, 64, "bfloat16", window)
    reads = plan_handover(Pair(shape, Deployment(), Deployment(), SLOT), tokens)
    found = {one.cache: one.num_tokens for one in reads}
    assert found == {"full": tokens} | ({kind: read} if read else {})


@pytest.mark.parametrize("tp_size", [1, 4, 8])
def test_geometries_are_those_that_ranks_send(group: RankGroup, tp_size: int) -> None:
    shape = ModelShape(("full",) * 4, 8, 4, 64, "int32")
    for tp_rank, expected in enumerate(rank_geometries(shape, Deployment(tp_size, block_size=32), "P")):
        rank = group.rank(tp_rank=tp_rank, tp_size=tp_size, block_size=32, total_heads=4, content=16)
        assert rank.worker.rank_context is not None
        sent = rank.worker.rank_context.caches.geometry
        region, wanted = sent.regions[0], expected.regions[0]
        assert region.layers == tuple(name.replace(".self_attn", "") for name in wanted.layers)
        for field in (
            "kind",
            "block_size",
            "head_start",
            "num_heads",
            "total_heads",
            "content_bytes",
            "dtype",
            "shard",
        ):
            assert getattr(region, field) == getattr(wanted, field), field
        for field in ("tp_rank", "tp_size", "pp_rank", "pp_size", "head_counts", "shardings"):
            assert getattr(sent, field) == getattr(expected, field), field


@pytest.mark.parametrize(("p_tp", "d_tp", "d_block"), [(1, 1, 16), (2, 1, 32), (1, 2, 16), (4, 2, 16)])
def test_bytes_and_messages_are_those_of_a_hand_over(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, p_tp: int, d_tp: int, d_block: int
) -> None:
    counted: list[int] = []
    count = Sends.num_chunks

    def counting(self: Sends, ask: object, slot_bytes: int) -> int:
        counted.append(count(self, ask, slot_bytes))  # type: ignore[arg-type]
        return counted[-1]

    monkeypatch.setattr(Sends, "num_chunks", counting)
    settings, tokens = Settings(plane="shm", slot_bytes=SLOT, staging_bytes=1 << 20), 780
    ps = [group.rank(tp_rank=r, tp_size=p_tp, settings=settings, blocks=64) for r in range(p_tp)]
    ds = [
        group.rank(tp_rank=r, tp_size=d_tp, settings=settings, engine_id="engine-d", block_size=d_block, blocks=64)
        for r in range(d_tp)
    ]
    token = grant(ps, "req-p", range(49), tokens)
    for d in ds:
        d.worker.post(load_plan("req-d", token, peer(ps), range(49), 0, tokens))
    assert wait(lambda: all(d.received for d in ds), [*ps, *ds])
    assert not any(d.failed for d in ds)
    moved: list[int] = []
    for d in ds:
        (samples,) = d.figures()["finished"].values()
        moved += samples["nbytes"]
    shape = ModelShape(("full",) * 4, 8, 4, 64, "int32")
    pair = Pair(shape, Deployment(p_tp, layout="HND"), Deployment(d_tp, 1, d_block, "HND"), SLOT)
    reads = plan_handover(pair, tokens)
    assert sorted(moved) == sorted(sum(read.nbytes for read in reads if read.d == (0, r)) for r in range(d_tp))
    assert sorted(counted) == sorted(read.messages for read in reads)


PIECES = [
    (Deployment(), Deployment(), 8 * 16 * 64),  # whole blocks
    (Deployment(layout="HND"), Deployment(), 64),  # one token of one head
    (Deployment(block_size=16), Deployment(block_size=64), 8 * 16 * 64),
    (Deployment(block_size=16, layout="HND"), Deployment(block_size=64, layout="HND"), 16 * 64),
    (Deployment(block_size=48, layout="HND"), Deployment(block_size=32, layout="HND"), 24 * 64),
    (Deployment(2, layout="HND"), Deployment(layout="HND"), 4 * 16 * 64),
    (Deployment(2), Deployment(), 4 * 64),
    (Deployment(8, layout="HND"), Deployment(8), 16 * 64),
]


@pytest.mark.parametrize(("p", "d", "piece"), PIECES)
def test_pieces(p: Deployment, d: Deployment, piece: int) -> None:
    assert {read.piece_bytes for read in plan_handover(Pair(FULL, p, d, None), 96)} == {piece}


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        (Deployment(tp_size=5), "P: TP 5 does not divide the 8 attention heads"),
        (Deployment(tp_size=0), "P: TP is 0, expected 1 or more"),
        (Deployment(pp_size=5), "P: PP 5 is outside 1..4"),
        (Deployment(block_size=0), "P: block size 0"),
        (Deployment(layout="NDH"), "P: layout 'NDH'"),  # type: ignore[arg-type]
    ],
)
def test_impossible_engines(deployment: Deployment, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_handover(Pair(FULL, deployment, Deployment(), None), 16)


def test_a_token_that_no_message_holds_and_a_state_that_ranks_cannot_share() -> None:
    with pytest.raises(GeometryError, match="does not fit into a message"):
        plan_handover(Pair(FULL, Deployment(), Deployment(), 100), 16)
    state = RecurrentState((0,), "LINEAR", 0, 0, 0, (4, 16, 16), "bfloat16", "bfloat16")
    shape = ModelShape((None, "full"), 8, 8, 64, "bfloat16", state=state)
    with pytest.raises(ConfigError, match="TP 8 does not divide the state"):
        plan_handover(Pair(shape, Deployment(8), Deployment(), SLOT), 16)
