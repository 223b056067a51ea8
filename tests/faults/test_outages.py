"""Peers that die, stop, or are cut off, each while the other one's transfer thread reads nothing: nobody else ends.

``make faults`` runs hundreds of them, drawn by seed and longer.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.faults.outages import Outage, draw, run

pytestmark = pytest.mark.root


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this container may make no network namespace")


@pytest.mark.parametrize(
    ("plane", "event", "still"),
    [("tcp", "kill P", "D"), ("zmq", "kill D", "P"), ("tcp", "link", "D"), ("zmq", "link", "P")],
)
def test_an_outage_ends_no_other_process(plane: str, event: str, still: str) -> None:
    assert draw(7) == draw(7) != draw(8)
    run(Outage(0, plane, event, 1.0, still, 2.0, 0.2, short=True))
