"""Targets and ratios of the engine benchmarks: the committed ones are those of the committed rows."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.engines import busy, busy_turns, streaming_pair
from benchmarks.harness.streaming_picture import streaming_picture

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
