"""Targets and ratios of the engine benchmarks: the committed ones are those of the committed rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engines import busy_turns, streaming_pair

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("name", ["streaming", "gpu_streaming", "gpu_busy", "gpu_busy_one_gpu"])
def test_committed_figures_are_those_of_the_committed_rows(name: str) -> None:
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    if "targets" in stored:
        assert stored["targets"] == streaming_pair.targets(stored["rows"])
    else:
        assert (stored["ratios"], stored["figures"]) == busy_turns.summed_up(stored["rows"])
