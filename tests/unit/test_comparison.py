"""The rule by which the end-to-end benchmarks compare connectors, and that committed results follow it."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OURS, THEIRS = "KVFerryConnector", "NixlConnector"


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import comparison

    return comparison


def test_slow_local_hits_change_no_figure_but_their_own(comparison: Any) -> None:
    """A connector whose own prefix hits are slow gains nothing by them."""
    found = comparison.comparison([54, 55, 56], [53, 54, 55], [52, 53, 54], [45, 46, 47])
    assert found["local_ttft_ms"] == {OURS: 53, THEIRS: 46} and found["ttft_ms"] == {OURS: 55, THEIRS: 54}
    assert found["ratio"] == 1.0185 and found["ttft_difference_ms"] == 1
    fast = comparison.comparison([54, 55, 56], [53, 54, 55], [1, 2, 3], [45, 46, 47])
    assert found | {"local_ttft_ms": None} == fast | {"local_ttft_ms": None}
    assert comparison.compared_cells(found, 0) == ["55", "54", "+1 (-1 to +3)", "53", "46"]
    swapped = comparison.comparison([53, 54, 55], [54, 55, 56], [45, 46, 47], [52, 53, 54])
    assert swapped["ttft_difference_ms"] == -1
    low, high = found["ttft_difference_95_ms"]
    assert swapped["ttft_difference_95_ms"] == [-high, -low]


def test_the_interval_holds_the_true_difference_about_as_often_as_it_says(comparison: Any) -> None:
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(60):
        ours, theirs = rng.lognormal(3, 0.3, 25), rng.lognormal(3, 0.3, 25) + 10
        low, high = comparison.difference_interval(ours, theirs)
        assert low < high and (low, high) == comparison.difference_interval(ours, theirs)
        held += low <= -10 <= high
    assert 51 <= held <= 60


@pytest.mark.parametrize("name", ["e2e_vs_nixl", "gpu_e2e"])
def test_committed_results_are_their_samples_compared_by_this_rule(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = __import__(name)
    path = BENCHMARKS / "results" / f"{name}.json"
    stored = json.loads(path.read_text())
    again = benchmark.again(path)
    assert again == stored
    changed = copy.deepcopy(stored)  # the check sees a figure that was typed
    changed["comparisons"][0]["ttft_ms"][OURS] -= 1
    assert again != changed
    for found in stored["comparisons"]:
        times = found["ttft_ms"]
        assert math.isclose(found["ttft_difference_ms"], times[OURS] - times[THEIRS], abs_tol=0.011)


def test_rows_of_new_results_have_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_e2e
    from engine_pair import Sample

    rows = []
    for connector, loaded, local in ((OURS, 40.0, 35.0), (THEIRS, 50.0, 30.0)):
        pair = type("Pair", (), {"connector": connector, "samples": {}})()
        pair.samples["fresh", 97] = [Sample(20.0, loaded + n, local + n) for n in range(5)]
        rows.append(gpu_e2e.row_of(pair, "fresh", 97, gpu_e2e.CPU.spec))
    (found,) = gpu_e2e.compared(rows)["comparisons"]
    assert found["ttft_difference_ms"] == -10 and found["ttft_difference_95_ms"][1] < 0


@pytest.mark.parametrize("name", ["gpu_busy", "gpu_busy_one_gpu", "streaming", "gpu_streaming"])
def test_figures_of_committed_results_are_those_of_their_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import busy_figures
    import streaming_figures

    stored = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    if "targets" in stored:
        assert stored["targets"] == streaming_figures.targets(stored["rows"])
    else:
        assert (stored["ratios"], stored["figures"]) == busy_figures.summed_up(stored["rows"])


@pytest.mark.parametrize(
    "name", ["e2e_vs_nixl", "gpu_e2e", "gpu_busy", "gpu_busy_one_gpu", "streaming", "gpu_streaming"]
)
def test_no_committed_figure_of_engines_is_a_difference_to_an_own_baseline(name: str) -> None:
    stored = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    named = [*stored.get("ratios", ()), *stored.get("figures", ()), *(key for row in stored["rows"] for key in row)]
    assert not [key for key in named if "handover" in key or "over_alone" in key]
