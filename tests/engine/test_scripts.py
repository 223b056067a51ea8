"""Scripts that compare each answer: of the official clients, of the benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.engines import busy
from tests.support.served import PATIENT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]


def test_each_answer_is_that_of_d_alone(tmp_path: Path) -> None:
    from tests.engine import odd_requests  # it needs the official client

    result = odd_requests.measure(tmp_path, once=True)
    different = odd_requests.bad(result["rows"])
    assert not different, "\n".join(map(odd_requests.line_of, different))
    figures = result["figures"]
    assert figures["requests"] == len(odd_requests.TABLE) == len({odd.name for odd in odd_requests.TABLE}) >= 60
    assert figures["handovers_at_once"] > 20 and figures["handovers_serial"] > 20, "most of them took both legs"
    assert figures["tokens_from_p"] > 40 * 30 and not figures["leases_at_the_end"] and not figures["failed_loads"]
    assert figures["messages"] >= 20 and figures["messages_from_p"] > 10 * 30, "Anthropic's, too, with P's KV cache"


def test_every_cell_of_busy_has_its_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a load goes inside the step depends on how fast the one before it was, so on the host."""
    file, folder = tmp_path / "result.json", tmp_path / "engines"
    command = ["busy.py", "--device", "cpu", "--start-seconds", "400", "--folder", str(folder), "--json", str(file)]
    command += ["--samples", "2", "--policy", "fail", "--orders", "scattered", "--tokens", "97"]
    command += ["--kv-config", json.dumps(PATIENT | {"step_hold_seconds": 0})]
    monkeypatch.setattr(sys, "argv", command)
    assert busy.main() == 0
    result = json.loads(file.read_text())
    rows = {row["sequences"]: row for row in result["rows"]}
    assert rows.keys() == {0, 4} and result["left_out"] == {}
    for sequences, row in rows.items():
        assert row["samples"] == 2 and row["copy_ms"] > 0
        assert row["in_sequence"] < 0.5, "the blocks of a scattered table have few neighbours"
        assert (row["quiet_gaps"] > 0) == (row["gaps"] > 0) == (sequences > 0)
        assert row["ttft_ms"] > 0 and row["local_ttft_ms"] > 0
        assert row["ways"] == {"beside the steps": 2}
