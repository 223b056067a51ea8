"""Which copies the transfer thread itself waits for: those during which nothing else could go on."""

from __future__ import annotations

import pytest

from kvferry.connector.pages import caches
from kvferry.connector.pages.copies import WaitPolicy
from tests.handover.rank_group import RankGroup
from tests.handover.slow_copies import install


@pytest.mark.parametrize(
    ("alone", "brief", "idle", "wait"),
    [
        (False, True, True, WaitPolicy.NONE),
        (True, True, False, WaitPolicy.UNTIL_DONE),
        (True, True, True, WaitPolicy.UNTIL_DONE),
        (True, False, True, WaitPolicy.BOUNDED),
        (True, False, False, WaitPolicy.NONE),
    ],
)
def test_a_copy_of_a_peers_pages(
    group: RankGroup, monkeypatch: pytest.MonkeyPatch, alone: bool, brief: bool, idle: bool, wait: WaitPolicy
) -> None:
    made = install(monkeypatch)
    d = group.rank()
    assert d.worker.rank_context is not None
    made[0].idle = idle
    if not brief:
        monkeypatch.setattr(caches, "BRIEF_BYTES", -1)
    d.worker.rank_context.caches.fetch([[]], alone=alone)
    assert made[0].waits == [wait]
