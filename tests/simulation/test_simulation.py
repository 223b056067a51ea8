"""A slice of the simulation of a fleet: nothing lost, left, late or reported twice; a seed gives the same run again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import run
from tests.support.streaming_faults import FAULTS

SEED = 20261123


def test_a_fleet_under_faults() -> None:
    result = run.simulate(SEED, 1500, 20)
    assert not result["violation"], result["violation"]
    assert result["handovers"] == 1500
    assert result["outcomes"]["loaded"] > 1100, "most hand-overs meet no fault"
    assert {"expired", "cancelled", "timeout"} <= set(result["failures"])
    assert {"released", "expired"} <= set(result["leases"])
    faults = {"packet lost", "packet doubled", "packet late", "packet overtaken", "link cut", "process stopped"}
    assert faults | {"data plane broken"} <= set(result["faults"])
    assert {"peer_lost", "timeout"} <= set(result["retries"])
    assert result["cases"]["while P computed"] > 100 and result["cases"]["prompts preempted"] > 50


def test_a_seed_gives_the_same_run_again() -> None:
    """Also in another process, where addresses and the hashes of strings are other ones."""
    script = "import json, sys; from tests.simulation import run; print(json.dumps(run.simulate(7, 150, 4)))"
    path = str(Path(run.__file__).resolve().parents[2] / ".typing")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {script}"]
    there = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout)
    here = run.simulate(7, 150, 4)
    for result in (here, there):
        del result["cpu_seconds"]
    assert json.loads(json.dumps(here)) == there


def test_the_program(tmp_path: Path) -> None:
    command = [sys.executable, run.__file__, "--count", "100", "--seed", "3", "--engines", "3"]
    command += ["--processes", "2", "--json", str(tmp_path / "result.json")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    assert "requests of D:" in printed and "100 hand-overs" in printed
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["handovers"] == 100 and result["figures"]["violations"] == 0 and "python" in result["versions"]


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "any prompt"])
def test_a_fault_planted_into_streamed_prompts_is_seen(fault: str) -> None:
    with FAULTS[fault]():
        result = run.simulate(3, 1500, 20)
    assert "other bytes in" in result["violation"]
