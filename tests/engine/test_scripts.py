"""Scripts that compare each answer: of the official clients, of the benchmarks."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from tests.engine.conftest import run_benchmark
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
