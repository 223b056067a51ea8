"""Seconds of one move, on the host or on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

HEAD_START_CYCLES = 2_000_000
"""About a millisecond."""


def timed(go: Callable[[], object], device: torch.device, *, head_start: bool = False) -> float:
    """Seconds from the call to the end of what it enqueued; on a GPU by events on the current stream. ``head_start``:
    the GPU begins about a millisecond later, so that the host's steps before what it enqueues do not count."""
    if device.type == "cpu":
        started = time.perf_counter()
        go()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    if head_start:
        torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    go()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def name_of(device: torch.device) -> str:
    """What a table calls it."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
