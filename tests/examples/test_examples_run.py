"""The examples themselves, as a newcomer starts them: each with engines of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The script in a session of its own; on a timeout its guard processes end the engines."""
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)


def test_demo_hands_over_and_reports(tmp_path: Path) -> None:
    done = run("demo.py", "--folder", tmp_path, "--lengths", 33, 300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] and not report["problems"] and [row["prompt_tokens"] for row in report["rows"]] == [33, 300]
    for row in report["rows"]:
        assert row["kv_equal"] and row["tokens_equal"] and row["loaded_tokens"] >= row["prompt_tokens"] - 1
        assert row["bytes"] >= row["prompt_tokens"] * 65536 - 65536 and row["handover_ms"] > 0 and row["ttft_ms"] > 0
    assert "every byte and every token equal" in done.stdout and "starting" in done.stdout


def test_demo_fails_on_planted_corruption(tmp_path: Path) -> None:
    done = run("demo.py", "--folder", tmp_path, "--lengths", 100, "--plant-corruption")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["ok"] and not report["rows"][0]["kv_equal"]
    assert "KV bytes differ in 1 of 8 layers" in done.stderr and "DIFFER" in done.stdout


def test_offline_example(tmp_path: Path) -> None:
    done = run("offline_handover.py", "--tokens", 200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "D loaded" in done.stdout and "the same tokens as without" in done.stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_two_hosts_in_network_namespaces(tmp_path: Path) -> None:
    def namespaces() -> set[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        return {line.split()[0] for line in listed.stdout.splitlines() if line.startswith("kvferry-")}

    before = namespaces()
    done = run("two_node/run_netns.py", "--folder", tmp_path, "--tokens", 300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 loaded from 10.231.77.1" in done.stdout and "KV bytes on the decode host equal" in done.stdout
    assert namespaces() <= before
