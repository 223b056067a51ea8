"""Targets and ratios of the engine benchmarks: the committed ones are those of the committed rows. The prefix cache of
simulated engines."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.engines import busy, busy_turns, streaming_pair
from benchmarks.harness.streaming_picture import streaming_picture
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


def test_the_picture_has_the_panels_that_the_result_has_data_for() -> None:
    """A bar for each way of the longest prompt, a curve for each that is known, none else."""
    rows = [
        {"name": name, "way": way, "tokens": tokens, "first_ms": 5.0}
        for name in ("KVFerry, tcp", "NIXL, pull")
        for way in ("P alone", "serial")
        for tokens in (128, 8000)
    ]
    curve = {"name": "KVFerry, tcp", "way": "serial", "prefill_end_ms": 3.0, "points": [[4.0, 1.0], [6.0, 2.0]]}
    result = {"rows": rows, "versions": {"gpus": "2 x GPU"}}
    alone, both = (
        ET.fromstring(streaming_picture(result | {"curves": found}))
        for found in ([], [curve, curve | {"way": "at once"}])
    )
    name = "{http://www.w3.org/2000/svg}"
    for picture, lines in ((alone, 0), (both, 4)):  # each with its line in the legend
        assert len(picture.findall(f"{name}rect")) == 1 + 4
        assert len(picture.findall(f"{name}polyline")) == lines


@pytest.mark.parametrize("kv_gib", [32, 62])  # two engines on one GPU of 80 GB, or of 141 GB
def test_p_holds_a_prompt_of_each_length_in_its_kv(kv_gib: int) -> None:
    plan = busy.PLANS["cuda"]
    counts = busy.prompts_of(Namespace(**plan, kv_gib=kv_gib))
    assert set(counts) == set(plan["tokens"]) and min(counts.values()) >= 1
    held = sum(tokens * count for tokens, count in counts.items()) + 2 * 8001  # whose bytes are compared
    assert held * plan["setup"].spec.kv_bytes_per_token < kv_gib << 30
    assert counts[2001] == plan["pairs"]


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


def test_a_block_that_is_leased_again_takes_no_second_place() -> None:
    cache = PrefixCache(2)
    for block in (5, 1):
        assert cache.lease([block], 0)
        cache.release([block], 0)
    assert cache.lease([1], 0) and cache.matched([5]) == 1
