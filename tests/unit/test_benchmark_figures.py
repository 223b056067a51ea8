"""What the engine benchmarks make of their samples: targets and ratios, also the committed ones; disturbed turns."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import busy_figures, streaming_figures
from benchmarks.engines import busy_turns as turns
from benchmarks.engines import streaming_pair as pair
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


def streamed(way: str, first: float, prefill: float = 1.0, curve: Any = ()) -> Any:
    """P begins 0.1 s after the request, and computes in two steps; D's one step takes 0.01 s."""
    middle = 0.1 + prefill / 2
    steps = [
        {"begin": begin, "end": end, "tokens": 500, "core": prefill / 2, "queued": 0.0}
        for begin, end in ((0.1, middle), (middle, 0.1 + prefill))
    ]
    decoding = [{"begin": 2.0, "end": 2.01, "tokens": 1, "core": 0.01, "queued": 0.0}]
    arrived = [first + 0.1 * n for n in range(6)]
    return pair.Sample(way, arrived, steps, decoding, [(at, mib << 20) for at, mib in curve], {"P": 0, "D": 10})


@pytest.mark.parametrize(
    ("first", "prefill", "curve", "met"),
    [
        (1.12, 1.0, ((0.2, 0), (1.05, 96), (1.2, 100)), True),
        (1.13, 1.02, ((0.2, 0), (1.2, 94), (1.3, 100)), False),
    ],
)
def test_targets_of_a_prefill_that_outlasts_the_transfer(first: float, prefill: float, curve: Any, met: bool) -> None:
    turn = {
        pair.ALONE: streamed(pair.ALONE, 1.11),
        pair.SERIAL: streamed(pair.SERIAL, 1.4, curve=((1.1, 0), (1.15, 50), (1.3, 100))),
        pair.AT_ONCE: streamed(pair.AT_ONCE, first, prefill, curve),
    }
    rows = streaming_figures.rows_of([turn], name=pair.OURS_NAME, tokens=1000, gb_per_s=1.25)
    assert [one["met"] for one in streaming_figures.targets(rows)] == [met] * 3


def test_ratios_of_both_connectors_with_a_busy_d() -> None:
    """First tokens after so many milliseconds, in a D whose steps take 5."""
    rows = []
    for connector, loaded, local in (("KVFerryConnector", 7, 6), ("NixlConnector", 14, 4)):
        marks: list[dict[str, Any]] = [
            {"name": "fg-1", "way": "in the step", "arrived": 1.0, "planned": 1.001, "token": 1 + ms / 1e3}
            for ms in (loaded, local)
        ]
        marks[0] |= {"begun": 1.002, "ended": 1.004}
        steps = [(0.9 + 0.005 * n, 32) for n in range(100)]
        sample = turns.sample_of(turns.Cell("fresh", 32), 8001, (marks[0], marks[1]), steps, 0.1)
        rows.append(busy_figures.row_of(connector, [sample] * 3, [5.0, 5.0]))
    assert busy_figures.result_of(rows)["ratios"] == {
        "busy_ttft_vs_nixl_8k": 0.5, "busy_local_ttft_vs_nixl_8k": 1.5,
        "gap_p99_vs_nixl_8k": pytest.approx(1, abs=0.01),
    }  # fmt: skip
    assert rows[0]["copy_ms"] == 2 and rows[0]["ways"] == {"in the step": 3}


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


def test_what_is_steady() -> None:
    """Steps every 10 ms from 1 s to 2 s; the first 0.3 s are quiet, the last token comes after 0.9 s."""
    steps = [(1 + n / 100, 4) for n in range(101)]
    assert turns.unsteady(4, steps, 1.3, 1.9) is None
    assert turns.unsteady(4, [(at, 3 if at > 1.95 else 4) for at, _ in steps], 1.3, 1.9) is None
    for load, why in (
        ([(at, 3 if at < 1.1 else 4) for at, _ in steps], "{3, 4}"),
        ([step for step in steps if step[0] < 1.5], "ended"),
        ([], "ended"),
        ([step for step in steps if step[0] > 1.4], "no two steps"),
    ):
        assert why in str(turns.unsteady(4, load, 1.3, 1.9))
