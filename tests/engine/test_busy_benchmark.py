"""``benchmarks/gpu_busy.py`` on the CPU: every cell is measured, every hand-over checked by the benchmark itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines import ROOT, python_path
from tests.support.served import PATIENT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
STAGES = ["arrived", "planned", "allocated", "begun", "ended", "reported", "scheduled", "token"]


def run(tmp_path: Path, *options: str) -> dict:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_busy.py"), "--device", "cpu"]
    command += ["--folder", str(tmp_path), "--json", str(tmp_path / "busy.json"), *options]
    environment = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((tmp_path / "busy.json").read_text())


def test_every_cell_has_its_samples(tmp_path: Path) -> None:
    """Loads go inside the step under vLLM's default policy too, also beside sequences that D decodes: some, for a load
    that took long on a host that stood still is followed by one beside the steps."""
    options = ["--samples", "2", "--policy", "fail", "--orders", "scattered"]
    options += ["--kv-config", json.dumps(PATIENT | {"step_hold_seconds": 1})]
    result = run(tmp_path, *options, "--start-seconds", "400")
    rows = {(row["sequences"], row["tokens"]): row for row in result["rows"]}
    assert rows.keys() == {(sequences, tokens) for sequences in (0, 4) for tokens in (97, 385)}
    for (sequences, _), row in rows.items():
        assert row["samples"] == 2 and row["logged_ms"] > 0 and row["copy_ms"] > 0
        assert row["in_sequence"] < 0.5, "the blocks of a scattered table have few neighbours"
        assert (row["quiet_gaps"] > 0) == (row["gaps"] > 0) == (sequences > 0)
        assert row["ttft_ms"] > 0 and row["local_ttft_ms"] > 0
    for sequences in (0, 4):
        assert any("in the step" in rows[sequences, tokens]["ways"] for tokens in (97, 385)), rows
    for line in result["timelines"]:
        order = [stage for stage in STAGES if stage in line["marks"]]
        left_out = ("bound", "launched") if line["way"] == "beside the steps" else ("reported",)
        wanted = [stage for stage in STAGES if stage not in (*left_out, "gpu_begun", "gpu_ended")]
        assert order == wanted, line
        times = [line["marks"][stage] for stage in ("arrived", "planned", "allocated", "begun", "ended", "token")]
        assert times == sorted(times), line
