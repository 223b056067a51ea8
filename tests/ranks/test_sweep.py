"""A short slice of ``sweep.py``, and that names repeat what they name."""

from __future__ import annotations

import pytest

from tests.ranks.compare import check
from tests.ranks.matrix import PLANES
from tests.ranks.pairing import Pairing, parse
from tests.ranks.rank_processes import RankProcesses
from tests.ranks.sweep import drawn

SEED, COUNT = 14, 25


@pytest.mark.parametrize("pairing", drawn(SEED, COUNT, PLANES), ids=str)
def test_pairing(processes: RankProcesses, pairing: Pairing) -> None:
    check(processes, pairing)


def test_a_name_says_all() -> None:
    for pairing in drawn(1, 300, PLANES):
        assert parse(str(pairing)) == pairing
    assert drawn(3, 5, PLANES) == drawn(3, 9, PLANES)[:5] != drawn(4, 5, PLANES)
