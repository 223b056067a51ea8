"""Scripts that compare each answer: of the official clients, beside planted failures, of the benchmarks."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

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
    assert figures["handovers_at_once"] > 30 and figures["handovers_serial"] > 30, "most of them took both legs"
    assert figures["tokens_from_p"] > 60 * 30 and not figures["leases_at_the_end"] and not figures["failed_loads"]
    assert figures["messages"] >= 30 and figures["messages_from_p"] > 20 * 30, "Anthropic's, too, with P's KV cache"


SEEDS = (11, 12, 13)
FOLDER = "tests/engine/wrong_tokens"
ENDED, REUSED, ERROR = "lease ended during the copy", "P's pages reused during the copy", "copy error"
ENOUGH = {"failed_inside_step": 3, "loaded_inside_step": 3, ENDED: 1, REUSED: 1, ERROR: 1}


def test_no_token_is_wrong_where_hand_overs_fail(tmp_path: Path) -> None:
    """Speed decides how many loads go inside a step, and whether a prompt is in D's prefix cache by the time of its
    load. So there are as many runs as it takes until enough loads went on under each fault."""
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        options = "--count", "60", "--seed", str(seed), "--share", "0.3", "--kills", "1"
        seen += counts_of(run_benchmark(f"{FOLDER}/run.py", tmp_path / str(seed), *options))
        if all(seen[what] >= count for what, count in ENOUGH.items()):
            return
    pytest.fail(f"in {len(SEEDS)} runs: {seen}, expected at least {ENOUGH}")


def counts_of(result: dict[str, Any]) -> Counter[str]:
    """Check a run. Returns how often happened what must happen at all."""
    figures, rows = result["figures"], {row["planted"]: row for row in result["rows"]}
    assert figures["handovers"] == 60 and figures["planted"] == 18 and figures["p_killed"] == 1
    assert figures["wrong_tokens"] == figures["wrong_kv"] == figures["hung"] == figures["held_at_the_end"] == 0
    loads = {kind: rows[kind]["handovers"] - rows[kind]["nothing_to_load"] for kind in (ENDED, REUSED, ERROR)}
    for kind in (ENDED, REUSED):
        assert rows[kind]["failed"] == loads[kind], rows[kind]
    # After such an error, a load inside its step failed, and one beside the steps was tried again. A load that failed
    # before, as on a host that stands still, has begun no copy.
    error = rows[ERROR]
    assert error["failed"] + error["loaded_beside"] == loads[ERROR] and not error["loaded_inside_step"], error
    loads[ERROR] = error["fired"]
    return Counter(loads) + Counter({what: figures[what] for what in ("failed_inside_step", "loaded_inside_step")})


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
