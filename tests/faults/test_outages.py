"""Peers that die or are cut off, each while the other one's transfer thread reads nothing: nobody else ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import closing

import pytest

from tests.faults.outages import DistantPair

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
    with closing(DistantPair(plane)) as pair:
        pair.strike(event, still)
