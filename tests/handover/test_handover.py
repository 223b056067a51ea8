"""Hand-overs between ranks without a model, over every data plane: all bytes arrive, leases end, nothing is told twice."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from kvferry.connector.config import Settings
from ranks import Rank, grant, load_plan, peer, wait

PLANES = ["shm", "zmq", pytest.param("ucx", marks=pytest.mark.ucx)]


@pytest.fixture
def started() -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("tokens", [1, 16, 77, 200])
def test_all_bytes_arrive_and_the_lease_ends(started: list[Rank], plane: str, tokens: int) -> None:
    settings = Settings(plane=plane, slot_bytes=64 << 10, staging_bytes=1 << 20)
    p = Rank(settings=settings)
    d = Rank(settings=settings, engine_id="engine-d")
    started += [p, d]
    blocks = random.Random(tokens).sample(range(32), -(-tokens // 16))
    ours = random.Random(tokens + 1).sample(range(32), -(-tokens // 16))
    p.fill(blocks, tokens)
    token = grant([p], "req-p", blocks, tokens)
    d.worker.post(load_plan("req-d", token, peer([p]), ours, 0, tokens))
    assert wait(lambda: d.received == {"req-d"} and p.sent == {"req-p"}, [p, d])
    assert not d.failed
    assert torch.equal(d.read(ours, tokens), d.wanted(tokens))
    untouched = sorted(set(range(32)) - set(ours))
    assert all((d.caches[name][untouched] == -1).all() for name in d.layers)
