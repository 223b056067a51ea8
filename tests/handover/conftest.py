from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.connector.step_loads import step_hold
from tests.handover.scenario import Pair, RankGroup
from tests.support.ranks import Rank


@pytest.fixture
def group() -> Iterator[RankGroup]:
    group = RankGroup()
    yield group
    group.close()


@pytest.fixture
def pair(group: RankGroup) -> Pair:
    """P, which has computed the prompt, and D. Files have their own."""
    return group.pair()


@pytest.fixture
def p(pair: Pair) -> Rank:
    return pair[0]


@pytest.fixture
def d(pair: Pair) -> Rank:
    return pair[1]


@pytest.fixture(autouse=True)
def patient_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for its loads however slow the host is; a test of the end of its patience sets its own."""
    monkeypatch.setattr(step_hold, "PATIENCE_SECONDS", 60.0)
