"""Reads of planned deployments: complete for any sizes, and those of ranks that really hand over."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.cli.plan.handover import Deployment, Pair, plan_handover
from kvferry.cli.plan.model import KvLayers, ModelShape, model_shape, uniform_shape
from kvferry.connector.config import Settings
from kvferry.connector.prefill_side.send import Sends
from kvferry.transport.errors import ConfigError, GeometryError
from tests.handover.scenario import RankGroup
from tests.planning.test_model_shape import GEMMA2
from tests.support.ranks import grant, load_plan, peer, wait

SLOT = 100_000
"""No multiple of a block's bytes, so that messages end before their slot is full."""
FULL = uniform_shape(4, 8, 8, 64, "bfloat16")


@pytest.mark.parametrize(
    ("kind", "window", "tokens", "read"),
    [("sliding_window", 64, 40, 40), ("sliding_window", 64, 200, 72), ("sliding_window", 64, 207, 63),
    ],
)  # fmt: skip
def test_of_a_window_the_blocks_move_that_the_next_token_reads(kind: Any, window: int, tokens: int, read: int) -> None:
    forms = KvLayers(kind, (0, 2), 4, 64, "bfloat16", window), KvLayers("full", (1,), 4, 64, "bfloat16")
    shape = ModelShape(3, 8, forms)
    reads = plan_handover(Pair(shape, Deployment(), Deployment(), SLOT), tokens)
    found = {one.cache: one.num_tokens for one in reads}
    assert found == {"full": tokens} | ({kind: read} if read else {})


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
    shape = uniform_shape(4, 8, 4, 64, "int32")
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
        (Deployment(pp_size=5), "P: PP 5 is outside 1..4"),
    ],
)
def test_impossible_engines(deployment: Deployment, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_handover(Pair(FULL, deployment, Deployment(), None), 16)


def test_a_token_that_no_message_holds() -> None:
    with pytest.raises(GeometryError, match="does not fit into a message"):
        plan_handover(Pair(FULL, Deployment(), Deployment(), 100), 16)


def test_gemma_has_windows_and_full_attention_on_four_ranks() -> None:
    reads = plan_handover(Pair(model_shape(GEMMA2), Deployment(2), Deployment(4), SLOT), 8192)
    heads = {(one.cache, one.d[1], one.p[1]): (one.first_head, one.num_heads, one.num_tokens) for one in reads}
    assert {key: value for key, value in heads.items() if key[1] == 3} == {
        ("sliding_window", 3, 1): (6, 2, 4096), ("full", 3, 1): (6, 2, 8192),
    }  # fmt: skip
