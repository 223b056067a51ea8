"""What ``benchmarks/gpu_busy.py`` makes of its marks: TTFT, gaps, ratios, and results of several runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("busy_figures", "busy_turns", "engine_pair"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import busy_figures
    import busy_turns

    return busy_figures, busy_turns


def sample(
    turns: Any, loaded: float, local: float, sequences: int = 32, tokens: int = 8001, way: str = "in the step"
) -> Any:
    """First tokens after so many milliseconds, in a D whose steps take 5."""
    marks = [
        {"name": "fg-1", "way": way, "arrived": 1.0, "planned": 1.001, "token": 1 + ms / 1e3} for ms in (loaded, local)
    ]
    marks[0] |= {"begun": 1.002, "ended": 1.004}
    steps = [(0.9 + 0.005 * n, sequences) for n in range(100)]
    return turns.sample_of(turns.Cell("fresh", sequences), tokens, tuple(marks), steps, 0.1)


def test_gaps_are_those_of_one_period(modules: tuple[Any, Any]) -> None:
    found = sample(modules[1], 12, 4)
    assert found.ttft("loaded") == pytest.approx(12) and found.ttft("local") == pytest.approx(4)
    assert len(found.gaps) == pytest.approx(20, abs=1) and found.gaps == pytest.approx([5] * len(found.gaps))
    assert min(found.steps) > 0.97 and max(found.steps) < 1.04


def test_a_row_has_the_medians_and_the_copy(modules: tuple[Any, Any]) -> None:
    figures, turns = modules
    row = figures.row_of("KVFerryConnector", [sample(turns, ms, 4) for ms in (5, 6, 14)], [5.0, 5.0, 6.0])
    assert row["ttft_ms"] == 6 and row["local_ttft_ms"] == 4 and row["copy_ms"] == 2
    assert row["all_ttft_ms"] == [5, 6, 14]
    assert row["ways"] == {"in the step": 3} and row["quiet_max_ms"] == 6


def test_the_gpu_counts_where_it_told_its_times(modules: tuple[Any, Any]) -> None:
    assert modules[0].copy_ms({"begun": 1.0, "ended": 2.0, "on_gpu": [1.0, 1.001]}) == pytest.approx(1)
    assert modules[0].copy_ms({}) is None


def test_ratios_of_runs_that_had_one_connector_each(modules: tuple[Any, Any], tmp_path: Path) -> None:
    figures, turns = modules
    paths = []
    for connector, ms, local in (("KVFerryConnector", 7, 6), ("NixlConnector", 14, 4)):
        rows = [figures.row_of(connector, [sample(turns, ms, local) for _ in range(3)], [5.0, 5.0])]
        paths.append(tmp_path / f"{connector}.json")
        paths[-1].write_text(json.dumps(figures.result_of(rows, []) | {"policy": "recompute"}))
    result = figures.merged(paths)
    assert result["ratios"] == {
        "busy_ttft_vs_nixl_8k": 0.5,
        "busy_local_ttft_vs_nixl_8k": 1.5,
        "gap_p99_vs_nixl_8k": pytest.approx(1, abs=0.01),
    }
    assert result["figures"]["busy_ttft_ms_8k"] == 7 and result["figures"]["busy_local_ttft_ms_8k"] == 6
    assert [run["policy"] for run in result["runs"]] == ["recompute"] * 2
