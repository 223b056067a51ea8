"""The processes of all pairings of a test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet import Fleet


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()
