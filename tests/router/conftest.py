"""P, D and a router before them, which asks both at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.stand_ins import Served


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Served]:
    with Served(**getattr(request, "param", {})).running() as served_pair:
        yield served_pair


@pytest.fixture
def at_once(pair: Served) -> Served:
    """It knows P, by its first request."""
    pair.learn()
    return pair
