"""``wrong_tokens/run.py`` with few hand-overs: no wrong token beside planted failures, and wrong KV is seen; and
``wrong_tokens/both_legs.py``, where P's prompts leave while P computes them."""

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


def test_wrong_kv_of_a_broken_decoder_is_seen(tmp_path: Path) -> None:
    figures = run_benchmark(f"{FOLDER}/run.py", tmp_path, "--selftest", "--seed", "5")["figures"]
    assert figures["wrong_tokens"] > 0 and figures["wrong_kv"] >= figures["planted"] == 12


def test_no_token_is_wrong_where_both_legs_are_sent_at_once(tmp_path: Path) -> None:
    """The script fails where a token or the KV is wrong, a request hangs, or a block is held at the end."""
    figures = run_benchmark(f"{FOLDER}/both_legs.py", tmp_path, "--count", "60", "--seed", "21")["figures"]
    assert figures["handovers"] == 60 and figures["p_killed"] == 1
    assert figures["loaded"] > 20 and figures["loads_while_p_computes"] > 0
