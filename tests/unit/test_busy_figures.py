"""What ``benchmarks/engines/busy.py`` makes of its marks: TTFT, gaps and ratios."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import busy_figures as figures
from benchmarks.engines import busy_turns as turns

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def sample(loaded: float, local: float, sequences: int = 32, tokens: int = 8001, way: str = "in the step") -> Any:
    """First tokens after so many milliseconds, in a D whose steps take 5."""
    marks: list[dict[str, Any]] = [
        {"name": "fg-1", "way": way, "arrived": 1.0, "planned": 1.001, "token": 1 + ms / 1e3} for ms in (loaded, local)
    ]
    marks[0] |= {"begun": 1.002, "ended": 1.004}
    steps = [(0.9 + 0.005 * n, sequences) for n in range(100)]
    return turns.sample_of(turns.Cell("fresh", sequences), tokens, (marks[0], marks[1]), steps, 0.1)


def test_gaps_are_those_of_one_period() -> None:
    found = sample(12, 4)
    assert found.ttft("loaded") == pytest.approx(12) and found.ttft("local") == pytest.approx(4)
    assert len(found.gaps) == pytest.approx(20, abs=1) and found.gaps == pytest.approx([5] * len(found.gaps))


def test_a_row_has_the_medians_and_the_copy() -> None:
    row = figures.row_of("KVFerryConnector", [sample(ms, 4) for ms in (5, 6, 14)], [5.0, 5.0, 6.0])
    assert row["ttft_ms"] == 6 and row["local_ttft_ms"] == 4 and row["copy_ms"] == 2
    assert row["all_ttft_ms"] == [5, 6, 14]
    assert row["ways"] == {"in the step": 3} and row["quiet_max_ms"] == 6


def test_the_gpu_counts_where_it_told_its_times() -> None:
    assert figures.copy_ms({"begun": 1.0, "ended": 2.0, "on_gpu": [1.0, 1.001]}) == pytest.approx(1)
    assert figures.copy_ms({}) is None


def test_ratios_of_both_connectors() -> None:
    rows = [
        figures.row_of(connector, [sample(ms, local) for _ in range(3)], [5.0, 5.0])
        for connector, ms, local in (("KVFerryConnector", 7, 6), ("NixlConnector", 14, 4))
    ]
    result = figures.result_of(rows)
    assert result["ratios"] == {
        "busy_ttft_vs_nixl_8k": 0.5,
        "busy_local_ttft_vs_nixl_8k": 1.5,
        "gap_p99_vs_nixl_8k": pytest.approx(1, abs=0.01),
    }
    assert result["figures"]["busy_ttft_ms_8k"] == 7 and result["figures"]["busy_local_ttft_ms_8k"] == 6


@pytest.mark.parametrize("name", ["gpu_busy", "gpu_busy_one_gpu"])
def test_committed_figures_are_those_of_the_committed_rows(name: str) -> None:
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    assert (stored["ratios"], stored["figures"]) == figures.summed_up(stored["rows"])
