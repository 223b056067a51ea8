"""The processes of all pairings of a test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.rank_host import RankProcesses


@pytest.fixture(scope="session")
def processes() -> Iterator[RankProcesses]:
    processes = RankProcesses()
    yield processes
    processes.close()
