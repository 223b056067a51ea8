"""Ranks that are closed, and processes that are ended, whatever a test did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.handover.scenario import RankGroup


@pytest.fixture
def group() -> Iterator[RankGroup]:
    group = RankGroup()
    yield group
    group.close()
