"""Targets and ratios of the engine benchmarks: the committed ones are those of the committed rows. The prefix cache of
simulated engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engines import busy_turns, streaming_pair
from benchmarks.router.simulated_engines import PrefixCache

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize(
    "name",
    ["streaming", "gpu_streaming", "gpu_streaming_later", "gpu_busy", "gpu_busy_long", "gpu_busy_one_gpu"],
)
def test_committed_figures_are_those_of_the_committed_rows(name: str) -> None:
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    if "targets" in stored:
        assert stored["targets"] == streaming_pair.targets(stored["rows"])
    else:
        assert (stored["ratios"], stored["figures"]) == busy_turns.summed_up(stored["rows"])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=60), st.integers(5, 12))
def test_leased_blocks_stay_and_the_bound_holds(work: list[tuple[int, int]], capacity: int) -> None:
    """Prompts of three trees take and return leases; a model of sets says what must be there."""
    cache = PrefixCache(capacity)
    leases: list[tuple[list[int], int]] = []
    for tree, length in work:
        blocks = [100 * (tree % 3) + n for n in range(length)]
        if tree > 3 and leases:
            cache.release(*leases.pop(0))
        elif cache.lease(blocks, tree % 2):
            leases.append((blocks, tree % 2))
        else:
            held = {block for others, _ in leases for block in others}
            assert len(held | set(blocks)) + sum(private for _, private in leases) + tree % 2 > capacity
        held = {block for others, _ in leases for block in others}
        assert cache.num_leased == len(held) + sum(private for _, private in leases) <= capacity
        assert all(cache.matched(others) == len(others) for others, _ in leases)
