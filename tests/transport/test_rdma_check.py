"""``rdma_check.py``, both commands on this machine: over TCP lanes it measures all, and is not fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engines import free_port
from tests.support.lanes import LANES

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "planes" / "rdma_check.py"
HOST = "127.0.0.1"


@pytest.mark.engines  # takes half a minute of a core, as a benchmark
@pytest.mark.nixl
def test_serve_and_check(tmp_path: Path) -> None:
    environ, port, result = os.environ | {"UCX_TLS": LANES}, str(free_port()), tmp_path / "rdma.json"
    serving = subprocess.Popen(
        [sys.executable, str(SCRIPT), "serve", HOST, port], env=environ, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert serving.stdout is not None and f"lanes: UCX_TLS={LANES}" in serving.stdout.readline()
        command = [sys.executable, str(SCRIPT), "check", HOST, HOST, port, "--mib", "8", "--rounds", "1"]
        done = subprocess.run(
            [*command, "--json", str(result)], env=environ, capture_output=True, text=True, timeout=800, check=False
        )
        assert done.returncode == 1 and f"not fit: no RDMA: the lanes are UCX_TLS={LANES}" in done.stdout, done.stderr
        found = json.loads(result.read_text())
        assert found["wrong"] == [] and len(found["gb_per_s"]) == 6 and min(found["gb_per_s"].values()) > 0
    finally:
        os.killpg(serving.pid, signal.SIGKILL)
        serving.wait()
