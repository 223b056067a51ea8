"""A link of a chosen rate between two network namespaces, and what has come over it by when: for ``streaming.py``."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

from examples.two_node.run_netns import two_hosts
from tests.support.server import EngineError

DEVICE = "kvf0"
"""What ``two_hosts`` calls both ends of its link."""
BURST_SECONDS = 0.002
SAMPLE_SECONDS = 0.002


def why_not() -> str | None:
    """Why no such link can be made here; None where it can."""
    if os.geteuid():
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs the commands ip and tc (iproute2)"
    try:
        with two_hosts() as (name, *_):
            shape(name, 0.125)
    except EngineError as error:
        return f"cannot make and shape a link here: {error}"
    return None


def shape(namespace: str, gigabytes_per_second: float) -> None:
    """Let the namespace's end of the link send at most so much (tc's token bucket filter)."""
    rate = int(gigabytes_per_second * 8e9)
    burst = max(1 << 20, int(gigabytes_per_second * 1e9 * BURST_SECONDS))
    options = ["rate", f"{rate}bit", "burst", str(burst), "latency", "100ms"]
    command = ["tc", "-n", namespace, "qdisc", "replace", "dev", DEVICE, "root", "tbf", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"{' '.join(command)}: {done.stderr.strip()}")


def received_bytes() -> int:
    """What has come over the link into the namespace that this process is in."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == DEVICE:
            return int(counters.split()[0])
    raise EngineError(f"no {DEVICE} in this network namespace")


class LinkBytes:
    """Notes what has come over the link, from ``__enter__`` to ``__exit__``; times are those of time.monotonic."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._note, daemon=True)

    def __enter__(self) -> LinkBytes:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _note(self) -> None:
        while not self._stop.is_set():
            self._sample()
            self._stop.wait(SAMPLE_SECONDS)

    def _sample(self) -> None:
        self._samples.append((time.monotonic(), received_bytes()))

    @property
    def curve(self) -> list[tuple[float, int]]:
        """(time, bytes since the begin)."""
        return [(at, count - self._samples[0][1]) for at, count in self._samples]
