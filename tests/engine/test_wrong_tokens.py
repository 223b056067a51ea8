"""``wrong_tokens/run.py`` with few hand-overs: no wrong token beside planted failures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import run_benchmark

pytestmark = [pytest.mark.engines, pytest.mark.timeout(2700)]
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
