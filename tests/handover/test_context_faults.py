"""Ranks that share tokens out, and what D was told of it is not so: a load fails, and never brings a part only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvferry.connector.config import Settings
from kvferry.connector.geometry.token_sharding import UNSHARDED, TokenSharding
from kvferry.connector.wire.step_plan import PeerEngine
from kvferry.transport.errors import GeometryError
from tests.handover.opening import OURS, THEIRS, TOKENS
from tests.support.ranks import Rank, grant, load_plan, peer, wait

TWO = TokenSharding(2, 16)


@pytest.fixture
def producers() -> Iterator[list[Rank]]:
    ranks = [
        Rank(engine_id="engine-p", tp_rank=n, tp_size=2, total_heads=1, sharding=TWO, settings=Settings(plane="shm"))
        for n in range(2)
    ]
    yield ranks
    for rank in ranks:
        rank.close()


def loads(name: str, d: Rank, p: list[Rank], engine: PeerEngine) -> bool:
    """Whether a load succeeds."""
    token = grant(p, f"{name}-p", THEIRS, TOKENS)
    d.worker.post(load_plan(name, token, engine, OURS, 0, TOKENS))
    assert wait(lambda: name in d.received, [d, *p], seconds=60)
    return name not in d.failed


def test_p_said_that_all_its_ranks_hold_all_tokens(producers: list[Rank]) -> None:
    d = Rank(engine_id="engine-d", total_heads=1, settings=Settings(plane="shm"))
    p_engine = msgspec.structs.replace(peer(producers), shardings=(TWO,))
    assert loads("told-right", d, producers, p_engine)
    assert not loads("told-wrong", d, producers, msgspec.structs.replace(p_engine, shardings=UNSHARDED))
    d.close()


def test_p_said_that_ranks_share_tokens_out_which_hold_other_heads() -> None:
    """A rank of D whose tokens then nobody has must not take that for nothing to load."""
    p = [Rank(engine_id="engine-p", tp_rank=n, tp_size=2, total_heads=2) for n in range(2)]
    d = Rank(engine_id="engine-d", tp_rank=1, tp_size=4, total_heads=2, sharding=TWO)
    p_engine = peer(p)
    assert loads("told-right", d, p, p_engine)
    assert not loads("told-wrong", d, p, msgspec.structs.replace(p_engine, shardings=(TWO,)))
    for rank in (*p, d):
        rank.close()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"packing": "cpu x86_64 vec"}, "packed, are not carried so"),
        ({"block_size": 24}, "does not divide a block of 24"),
        ({"total_heads": 2}, "of 2 tensor-parallel ranks, fewer hold each of 2 heads"),
    ],
)
def test_what_no_peer_would_accept_is_refused_at_start(form: dict[str, Any], text: str) -> None:
    with pytest.raises(GeometryError, match=text):
        Rank(**{"tp_size": 2, "total_heads": 1, "sharding": TWO, **form})
