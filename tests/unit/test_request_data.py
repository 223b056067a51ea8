"""What a step says of its requests' blocks, in order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.connector.engine.aggregator import yield_req_data
from kvferry.transport.errors import ProtocolError


def step(req_ids: list[str], blocks: list, resumed: set[str]) -> SimpleNamespace:
    new = [SimpleNamespace(req_id="new", block_ids=([1, 2], [3]))]
    cached = SimpleNamespace(req_ids=req_ids, new_block_ids=blocks, resumed_req_ids=resumed)
    return SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached)


def test_new_running_and_resumed_requests() -> None:
    assert list(yield_req_data(step(["a", "b", "c"], [([4], []), None, ([5, 6], [7])], {"c"}))) == [
        ("new", ([1, 2], [3]), True),
        ("a", ([4], []), False),
        ("b", None, False),
        ("c", ([5, 6], [7]), True),
    ]


def test_lists_that_differ_yield_nothing() -> None:
    with pytest.raises(ProtocolError, match="2 running requests with 1 lists of blocks"):
        next(yield_req_data(step(["a", "b"], [None], set())))
