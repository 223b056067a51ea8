"""What the engine hears of a load is what all of its ranks have reported: real ranks, the aggregator over them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvferry.connector.config import Settings
from kvferry.connector.engine.aggregator import ConnectorOutput, KVOutputAggregator
from tests.handover.rank_group import RankGroup
from tests.support.ranks import grant, load_plan, peer

BLOCKS = [3, 1, 4]


class Output:
    """One rank's output of one step."""

    def __init__(self, report: Any) -> None:
        self.kv_connector_output = report


@pytest.mark.parametrize("granted", [True, False])
def test_a_load_ends_when_its_last_rank_reports_and_fails_if_any_rank_failed(group: RankGroup, granted: bool) -> None:
    """Without a lease on P's second rank, D's second rank fails late: once P no longer waits for the lease."""
    settings = Settings(ask_hold_seconds=0.5)
    ps = [group.rank(tp_rank=r, tp_size=2, settings=settings) for r in range(2)]
    ds = [group.rank(tp_rank=r, tp_size=2, engine_id="engine-d") for r in range(2)]
    for p in ps:
        p.fill(BLOCKS, 40)
    token = grant(ps if granted else ps[:1], "req-p", BLOCKS, 40)
    for d in ds:
        d.worker.post(load_plan("req-d", token, peer(ps), BLOCKS, 0, 40))
    aggregator, reported, ends = KVOutputAggregator(2), set[int](), time.monotonic() + 60
    while True:
        results = [d.worker.take_results() for d in ds]
        reported |= {rank for rank, each in enumerate(results) if each.received}
        output = aggregator.aggregate([Output(each) for each in results])
        assert output is not None
        report: ConnectorOutput = output.kv_connector_output
        assert (report.finished_recving == {"req-d"}) == (reported == {0, 1})
        if report.finished_recving:
            break
        assert aggregator.pending() == ({"req-d": tuple(reported)} if reported else {})
        assert time.monotonic() < ends, f"ranks that reported: {reported}"
        time.sleep(0.001)
    assert report.failed_recving == (set() if granted else {"req-d"})
