"""``stale_reads.py``: P reuses blocks while D reads them, and no stale read is taken for good."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.stale_reads import FENCES, race


@pytest.mark.parametrize("fence", FENCES)
def test_races_over_cma(fence: str) -> None:
    """Forty and more, until some were lost and some were won. With the fence switched off, some loads are stale."""
    row: dict[str, Any] = {}
    for seed in range(1, 25):
        row = race(fence, 40, seed, "cpu")
        assert (row["stale"] == 0) or fence == "off", row
        if row["done"] and row["failed"] and row["overlapped"] and (row["stale"] or fence != "off"):
            return
    raise AssertionError(row)
