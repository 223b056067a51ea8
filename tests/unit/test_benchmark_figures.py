"""What the engine benchmarks make of their samples: targets and ratios, also the committed ones; disturbed turns."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import busy_figures, streaming_figures
from benchmarks.engines import busy_turns as turns
from tests.support.server import EngineError

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
CELL = turns.Cell("fresh", 4)


@pytest.mark.parametrize("name", ["streaming", "gpu_streaming", "gpu_busy", "gpu_busy_one_gpu"])
def test_committed_figures_are_those_of_the_committed_rows(name: str) -> None:
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    if "targets" in stored:
        assert stored["targets"] == streaming_figures.targets(stored["rows"])
    else:
        assert (stored["ratios"], stored["figures"]) == busy_figures.summed_up(stored["rows"])


def test_a_disturbed_turn_is_measured_again_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = turns.BusyPair("KVFerryConnector", None, None, random.Random(1), 1000)  # type: ignore[arg-type]
    sample: Any = "a sample"
    disturbed: list[Any] = [turns.DisturbedTurnError("planted")] * 2

    def measure_turn(cell: Any, pace: Any) -> Any:
        if disturbed:
            raise disturbed.pop()
        return [sample], [5.0]

    monkeypatch.setattr(measured, "measure_turn", measure_turn)
    measured.turn(CELL, turns.Pace(1, 0.1))
    assert (measured.measured, measured.quiet) == ([sample], {CELL: [5.0]})
    assert measured.repeated == ["planted"] * 2
    disturbed += [turns.DisturbedTurnError("planted")] * turns.ATTEMPTS
    with pytest.raises(EngineError, match="planted"):
        measured.turn(CELL, turns.Pace(1, 0.1))
