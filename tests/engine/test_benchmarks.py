"""The benchmarks with engines, in small on the CPU: every cell is measured; they check every hand-over themselves."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from tests.engine.conftest import run_benchmark
from tests.support.served import PATIENT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
HOW = ("--device", "cpu", "--start-seconds", "400")


def test_every_cell_of_busy_has_its_samples(tmp_path: Path) -> None:
    """Loads go inside the step under vLLM's default policy too, also beside sequences that D decodes: some, for a load
    that took long on a host that stood still is followed by one beside the steps."""
    options = ["--samples", "2", "--policy", "fail", "--orders", "scattered"]
    options += ["--kv-config", json.dumps(PATIENT), "--vary", "hold=0", "hold=1"]
    result = run_benchmark("benchmarks/engines/busy.py", tmp_path, *HOW, *options)
    rows = {(row["variant"], row["sequences"], row["tokens"]): row for row in result["rows"]}
    assert rows.keys() == set(product(("hold=0", "hold=1"), (0, 4), (97, 385))) and result["left_out"] == {}
    for (_, sequences, _), row in rows.items():
        assert row["samples"] == 2 and row["copy_ms"] > 0
        assert row["in_sequence"] < 0.5, "the blocks of a scattered table have few neighbours"
        assert (row["quiet_gaps"] > 0) == (row["gaps"] > 0) == (sequences > 0)
        assert row["ttft_ms"] > 0 and row["local_ttft_ms"] > 0
    for sequences in (0, 4):
        assert any("in the step" in rows["hold=1", sequences, tokens]["ways"] for tokens in (97, 385)), rows
        assert all(rows["hold=0", sequences, tokens]["ways"] == {"beside the steps": 2} for tokens in (97, 385)), rows
