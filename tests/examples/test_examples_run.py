"""The examples themselves, each with engines of its own: the demo's as a newcomer starts them, the others' fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import demo
from tests.support.engines import CPU_ENVIRONMENT
from tests.support.fork_server import fork_server
from tests.support.served import ForkedServerGroup

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def run(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script in a session of its own; on a timeout its guard processes end the engines."""
    command, variables = [sys.executable, str(EXAMPLES / script), *map(str, arguments)], os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=850, check=False, env=variables)


def test_demo_hands_over_and_reports(tmp_path: Path) -> None:
    done = run("demo.py", "--folder", tmp_path, "--lengths", 33, 300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] and not report["problems"] and [row["prompt_tokens"] for row in report["rows"]] == [33, 300]
    for row in report["rows"]:
        assert row["kv_equal"] and row["tokens_equal"] and row["loaded_tokens"] >= row["prompt_tokens"] - 1
        assert row["bytes"] >= row["prompt_tokens"] * 65536 - 65536 and row["handover_ms"] > 0 and row["ttft_ms"] > 0
    assert "every byte and every token equal" in done.stdout and "starting" in done.stdout


def test_demo_fails_on_planted_corruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "ServerGroup", ForkedServerGroup)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--folder", str(tmp_path), "--lengths", "100", "--plant-corruption"])
    assert demo.main() == 1
    said, report = capsys.readouterr(), json.loads((tmp_path / "report.json").read_text())
    assert not report["ok"] and not report["rows"][0]["kv_equal"]
    assert "KV bytes differ in 1 of 8 layers" in said.err and "DIFFER" in said.out


OFFLINE = """
import runpy, sys
from tests.support.engine_process import import_nothing
import_nothing()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_offline_example() -> None:
    server = fork_server("tests.support.preload_vllm", CPU_ENVIRONMENT)
    done = server.run("-c", OFFLINE, str(EXAMPLES / "offline_handover.py"), "--tokens", "200", timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "D loaded" in done.stdout and "the same tokens as without" in done.stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_two_hosts_in_network_namespaces(tmp_path: Path) -> None:
    def namespaces() -> set[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        return {line.split()[0] for line in listed.stdout.splitlines() if line.startswith("kvferry-")}

    before = namespaces()
    forking = f"{sys.executable} -m tests.support.forking_vllm"
    done = run("two_node/run_netns.py", "--folder", tmp_path, "--tokens", 300, VLLM=forking)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 loaded from 10.231.77.1" in done.stdout and "KV bytes on the decode host equal" in done.stdout
    assert namespaces() <= before
