"""A router's process, as its machine sees it: memory, descriptors, and what it says of itself."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.served import descendants
from tests.support.server import PATIENCE_SECONDS, Server
from tests.support.turns import resident_bytes

USUAL_DESCRIPTORS = 1024
"""The soft limit of a process on most systems; the hard limit is higher."""

SPARE = 16
"""Descriptors: connections that a router keeps to its engines."""
GROWTH_MIB = 32
"""Bound on the growth of a router's memory by a thousand bad clients: 32 KiB for each. A body that is kept has more."""


def grown_mib(resident: Sequence[float]) -> float:
    """By how much the least of the second half is above the most of the first half. What is kept raises all values;
    what the allocator has not given back yet, some of them, by tens of MiB."""
    half = len(resident) // 2
    return min(resident[half:]) - max(resident[:half])


def under_the_usual_limit(command: Sequence[str]) -> list[str]:
    """The command under a soft limit of ``USUAL_DESCRIPTORS``."""
    return ["sh", "-c", f'ulimit -Sn {USUAL_DESCRIPTORS} && exec "$@"', "sh", *command]


@dataclass(frozen=True)
class Process:
    """``server``: the router's guard process runs it."""

    server: Server
    pid: int

    def resident_mib(self) -> float:
        return resident_bytes(self.pid) / 2**20

    def peak_mib(self) -> float:
        return self._status_line("VmHWM") / 1024

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def most_descriptors(self) -> int:
        """The soft limit."""
        lines = Path(f"/proc/{self.pid}/limits").read_text().splitlines()
        return next(int(line.split()[3]) for line in lines if line.startswith("Max open files"))

    def status(self) -> dict[str, Any]:
        """``/router/status``."""
        with urllib.request.urlopen(f"{self.server.url}/router/status", timeout=PATIENCE_SECONDS) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def _status_line(self, name: str) -> int:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def router_of(server: Server) -> Process:
    """The router's process, below its guard."""
    return Process(server, descendants(server.process.pid)[0])
