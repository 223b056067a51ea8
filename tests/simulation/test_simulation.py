"""A slice of the simulation of a fleet: nothing lost, left, late or reported twice; a seed gives the same run again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.connector.decode_side.report import Results
from kvferry.connector.wire.step_plan import LookupResult
from tests.simulation import run
from tests.support.streaming_faults import FAULTS

SEED = 20261138
FLEETS = range(SEED, SEED + 12)
"""Each meets most cases. Which ones changes with the order of events, so with any code."""
BY_NAME = ("found by name", "found while P computed", "found when P had computed", "another prompt under the name")
CASES = {
    "failures": ("expired", "cancelled", "timeout"),
    "leases": ("released", "expired"),
    "faults": ("packet lost", "packet doubled", "packet late", "packet overtaken", "link cut", "process stopped",
               "data plane broken"),
    "retries": ("peer_lost", "timeout"),
    "cases": (*BY_NAME, "while P computed", "prompts preempted"),
    "outcomes": ("aborted before P told of the prompt",),
}  # fmt: skip


def test_a_fleet_under_faults() -> None:
    missing = {(kind, name) for kind, names in CASES.items() for name in names}
    for seed in FLEETS:
        result = run.simulate(seed, 600, 12)
        assert not result["violation"], result["violation"]
        assert result["handovers"] == 600 and result["outcomes"]["loaded"] > 400, "most hand-overs meet no fault"
        missing -= {(kind, name) for kind, name in missing if result[kind].get(name)}
        if not missing and seed > SEED:
            return
    raise AssertionError(f"no fleet met {missing}")


def test_the_program_gives_the_same_run_again(tmp_path: Path) -> None:
    """In another process, where addresses and the hashes of strings are other ones."""
    command = [sys.executable, run.__file__, "--count", "150", "--seed", "7", "--engines", "4", "--processes", "1"]
    command += ["--json", str(tmp_path / "result.json")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800).stdout
    assert "requests of D:" in printed and "150 hand-overs" in printed
    there = json.loads((tmp_path / "result.json").read_text())
    assert there["figures"]["violations"] == 0 and "python" in there["versions"]
    here = run.simulate(7, 150, 4)
    assert there["digests"] == [here["digest"]]
    assert {name: there[name] for name in ("packets", *run.COLUMNS)} == {
        name: here[name] for name in ("packets", *run.COLUMNS)
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_into_streamed_prompts_is_seen(fault: str) -> None:
    with FAULTS[fault]():
        assert any("other bytes in" in run.simulate(seed, 600, 12)["violation"] for seed in range(4, 14))


def test_a_lookup_that_is_reported_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = Results.looked_up

    def twice(results: Results, request_id: str, result: LookupResult) -> None:
        looked_up(results, request_id, result)
        if result.params:
            looked_up(results, request_id, result)

    monkeypatch.setattr(Results, "looked_up", twice)
    assert "once more" in run.simulate(3, 200, 4)["violation"]
