"""``benchmarks/wrong_tokens.py`` with few hand-overs: no wrong token beside planted failures, and wrong KV is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import ROOT, python_path

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks" / "wrong_tokens.py"), *options]
    command += ["--folder", str(tmp_path), "--json", str(tmp_path / "result.json")]
    environment = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return result


def test_no_token_is_wrong_where_hand_overs_fail(tmp_path: Path) -> None:
    result = run(tmp_path, "--count", "60", "--seed", "11", "--share", "0.3", "--kills", "1")
    figures, rows = result["figures"], {row["planted"]: row for row in result["rows"]}
    assert figures["handovers"] == 60 and figures["planted"] == 18 and figures["p_killed"] == 1
    assert figures["wrong_tokens"] == figures["wrong_kv"] == figures["hung"] == figures["held_at_the_end"] == 0
    assert figures["failed_inside_step"] >= 3 and figures["loaded_inside_step"] >= 3, rows
    for kind in ("lease ended during the copy", "P's pages reused during the copy"):
        assert rows[kind]["failed"] == rows[kind]["handovers"] - rows[kind]["nothing_to_load"] > 0, rows[kind]
    # Each of these errors happened. After it, a load inside its step failed, and one beside the steps was tried again.
    error = rows["copy error"]
    assert error["fired"] == error["handovers"] - error["nothing_to_load"] > 0, error
    assert error["failed"] + error["loaded_beside"] == error["fired"] and not error["loaded_inside_step"], error


def test_wrong_kv_of_a_broken_decoder_is_seen(tmp_path: Path) -> None:
    figures = run(tmp_path, "--selftest", "--seed", "5")["figures"]
    assert figures["wrong_tokens"] > 0 and figures["wrong_kv"] >= figures["planted"] == 12
