"""``benchmarks/idle_step.py``: what it measures is a step of real parts, and its result has the form of the tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = pytest.mark.vllm


@pytest.fixture
def idle_step(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import idle_step

    return idle_step


def test_a_short_run(idle_step: Any, tmp_path: Path) -> None:
    """Each hook is called once in each step with the connector, and the committed result has the same form."""
    calls: dict[str, int] = {}
    result_of = idle_step.result_of

    def counted(rounds: Any, over_empty: Any, with_layers: Any, hooks: dict[str, list[float]], args: Any) -> Any:
        calls.update({name: len(seconds) for name, seconds in hooks.items() if seconds})
        return result_of(rounds, over_empty, with_layers, hooks, args)

    idle_step.result_of = counted
    try:
        found = idle_step.measure(argparse.Namespace(steps=20, rounds=2, requests=3, folder=tmp_path))
    finally:
        idle_step.result_of = result_of
    stored = json.loads((BENCHMARKS / "results" / "idle_step.json").read_text())
    assert found.keys() <= stored.keys() and found["figures"].keys() == stored["figures"].keys()
    ended = {"get_finished", "get_transfer_results"}  # 0.26 has the first, later releases the second
    assert found["hooks_us"].keys() - ended == stored["hooks_us"].keys() - ended
    assert {"build_connector_meta", "bind_connector_metadata", "build_connector_worker_meta"} <= calls.keys()
    assert min(calls.values()) >= 20, calls
    assert len(found["rows"]) == 2 and all(row["with_us"] > 0 < row["without_us"] for row in found["rows"])


def test_the_committed_figures_belong_together(idle_step: Any) -> None:
    """KVFerry's own part is within the limit, and its methods are a part of it."""
    figures = json.loads((BENCHMARKS / "results" / "idle_step.json").read_text())["figures"]
    own = figures["hooks_scheduler_us"] + figures["hooks_worker_us"]
    assert own <= figures["over_empty_us"] <= min(idle_step.LIMIT_US, figures["idle_step_us"])
    assert figures["idle_step_low_us"] <= figures["idle_step_us"] <= figures["idle_step_high_us"]
