"""What a host has: its name and its RDMA devices."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.transport.host import is_ours
from tests.support.engines import free_port
from tests.support.ranks import LANES

ELSEWHERE = "198.51.100.7"  # for documentation (RFC 5737): no host has it


def test_our_addresses_and_others() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))  # sends nothing, but takes the address that leads there
            ours = {"127.0.0.1", probe.getsockname()[0]}
        except OSError:  # a host without a network
            ours = {"127.0.0.1"}
    assert all(is_ours(address) for address in [*ours, "127.0.0.2", "::1"])
    assert not is_ours(ELSEWHERE) and not is_ours("2001:db8::7")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a network of its own")
def test_where_any_address_can_be_bound_only_those_of_the_host_are_ours() -> None:
    """As with a load balancer that takes addresses over. Its engines are on one host all the same."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip(8)")
    addresses = [ELSEWHERE, "10.9.8.7", "10.9.8.8", "127.0.0.1"]
    program = f"from kvferry.transport.host import is_ours; print(*map(is_ours, {addresses!r}))"
    ours = "ip link set lo up && ip address add 10.9.8.7/32 dev lo"
    allow = f'{ours} && echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind && exec "$0" -c "$1"'
    found = subprocess.run(
        ["unshare", "-n", "sh", "-c", allow, sys.executable, program], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["False", "True", "False", "True"]


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
