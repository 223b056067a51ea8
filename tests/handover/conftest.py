"""Ranks that are closed, and processes that are ended, whatever a test did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.connector.step_loads import step_hold
from tests.handover.rank_group import RankGroup


@pytest.fixture
def group() -> Iterator[RankGroup]:
    group = RankGroup()
    yield group
    group.close()


@pytest.fixture(autouse=True)
def patient_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for its loads however slow the host is; a test of the end of its patience sets its own."""
    monkeypatch.setattr(step_hold, "PATIENCE_SECONDS", 60.0)
