"""The hand-over's own choice of ranks and heads is the topology's: real ranks of unequal tensor-parallel sizes."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import pytest
import torch

from kvferry.connector.geometry import read_plan
from kvferry.connector.geometry.topology import TpKVTopology
from tests.handover.rank_group import RankGroup
from tests.support.ranks import SOON, grant, load_plan, peer, wait

QUESTIONS = ("source_ranks", "sources", "release_ranks", "expected_consumers")
BLOCKS = [3, 1, 4]


@pytest.mark.parametrize(("p_size", "d_size"), [(2, 1), (1, 2), (3, 2)])
def test_each_choice_of_a_hand_over_is_asked_of_one_topology(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, p_size: int, d_size: int
) -> None:
    read_plan.routes.cache_clear()  # another test may have planned the same pair of ranks
    asked: dict[str, dict[int, set[int]]] = {name: defaultdict(set) for name in QUESTIONS}
    for name in QUESTIONS:
        answer = getattr(TpKVTopology, name)

        def spy(topology: TpKVTopology, *args: Any, name: str = name, answer: Any = answer, **more: Any) -> Any:
            asked[name][topology.tp_rank].add(id(topology))
            return answer(topology, *args, **more)

        monkeypatch.setattr(TpKVTopology, name, spy)
    with caplog.at_level(logging.INFO, "vllm.kvferry"):
        ps = [group.rank(tp_rank=r, tp_size=p_size, total_heads=6) for r in range(p_size)]
        ds = [group.rank(tp_rank=r, tp_size=d_size, total_heads=6, engine_id="engine-d") for r in range(d_size)]
        for p in ps:
            p.fill(BLOCKS, 40)
        token = grant(ps, "req-p", BLOCKS, 40)
        for d in ds:
            d.worker.post(load_plan("req-d", token, peer(ps), BLOCKS, 0, 40))
        all_sent = wait(lambda: all(p.sent for p in ps), [*ps, *ds], SOON)  # released: an expiry takes longer
        assert all_sent and all(d.received for d in ds)
    for d in ds:
        assert not d.failed and torch.equal(d.read(BLOCKS, 40), d.wanted(40))
    for name, objects in asked.items():
        assert set(objects) == set(range(d_size)), f"{name} was asked by D's ranks {sorted(objects)}"
    for rank in range(d_size):
        assert len(set().union(*(objects[rank] for objects in asked.values()))) == 1
    ratio = {(2, 1): "-2", (1, 2): "2", (3, 2): "none (2 to 3)"}[p_size, d_size]
    assert f"of {p_size} tensor-parallel ranks, tp_ratio {ratio}, block_size_ratio 1" in caplog.text


def test_another_choice_of_ranks_changes_the_hand_over(group: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of its two source ranks left out, the load fails: nothing beside the topology chooses ranks."""
    ps = [group.rank(tp_rank=r, tp_size=2) for r in range(2)]
    d = group.rank(engine_id="engine-d")
    monkeypatch.setattr(TpKVTopology, "source_ranks", lambda self, peer=None: (0,))
    token = grant(ps, "req-p", BLOCKS, 40)
    d.worker.post(load_plan("req-d", token, peer(ps), BLOCKS, 0, 40))
    assert wait(lambda: d.received == {"req-d"}, [*ps, d])
    assert d.failed == {"req-d"}
