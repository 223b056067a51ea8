"""D holds nothing of a P that is gone, also where Python never looks for garbage: engines switch that search off."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from typing import Any

import pytest

from kvferry.connector.decode_side import load_state
from kvferry.transport.errors import GeometryError
from tests.handover.scenario import OURS, THEIRS, TOKENS, RankGroup
from tests.support.rank_process import remote_peer
from tests.support.ranks import load_plan, wait


def boards() -> set[int]:
    """The inodes of grant boards with open descriptors; a mapping has one too."""
    found = set[int]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "kvferry-board" in os.readlink(place := f"/proc/self/fd/{number}"):
                found.add(os.stat(place).st_ino)
    return found


@pytest.mark.parametrize("again", [False, True], ids=["at once", "at the second attempt"])
def test_the_boards_of_dead_producers_are_unmapped(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr(load_state, "SAME_PEER_SECONDS", 0.0)
    d = group.rank(engine_id="engine-d", plane="cma")
    links, reads = d.consumer.links, d.consumer.reads
    check = reads.check_grant

    def damaged_once(read: Any, given: Any) -> None:
        if again and read.active_load.number == 1:
            raise GeometryError("planted")
        check(read, given)

    monkeypatch.setattr(reads, "check_grant", damaged_once)
    gc.collect()
    gc.disable()
    try:
        before = boards()
        for number in range(2):
            p = group.process(engine_id="engine-p", plane="cma")
            p.fill(THEIRS, TOKENS)
            token = p.grant("req-p", THEIRS, TOKENS)
            d.worker.post(load_plan(f"req-{number}", token, remote_peer([p]), OURS, 0, TOKENS))
            assert wait(lambda number=number: f"req-{number}" in d.received, [d])
            assert not d.failed and boards() - before
            p.kill()
            assert wait(lambda: not len(links), [d])
        assert wait(lambda: not boards() - before, [d])
        assert d.figures()["retried"] == ({"data": 2} if again else {})
    finally:
        gc.enable()
