"""Ranks that are closed, and processes that are ended, whatever a test did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from stage import Stage


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()
