"""How much device memory an engine may use."""

from __future__ import annotations

import math
from typing import Any

from kvferry.transport.errors import ConfigError


def request_memory(init_snapshot: Any, cache_config: Any, external_weight_memory: int = 0) -> int:
    """The bytes that an engine may allocate: ``total_memory * gpu_memory_utilization`` of the device, rounded up, less
    the bytes of weights that another process holds on it for this engine. ``init_snapshot``: before the engine
    allocated. Raises ConfigError: a value out of range, weights as large as the share, or less memory free."""
    total, free = int(init_snapshot.total_memory), int(init_snapshot.free_memory)
    fraction = float(cache_config.gpu_memory_utilization)
    if not 0 < fraction <= 1:
        raise ConfigError(f"gpu_memory_utilization is {fraction}, expected more than 0 and at most 1")
    if external_weight_memory < 0:
        raise ConfigError(f"external_weight_memory is {external_weight_memory} bytes, expected at least 0")
    shard = math.ceil(total * fraction)
    requested = shard - external_weight_memory
    device = getattr(init_snapshot, "device_", None) or getattr(init_snapshot, "device", None) or "of the engine"
    if external_weight_memory and requested <= 0:
        raise ConfigError(
            f"device {device}: weights in other processes take {_gib(external_weight_memory)} of the {_gib(shard)} "
            f"that gpu_memory_utilization {fraction} allows of {_gib(total)}; raise gpu_memory_utilization"
        )
    if free < requested:
        raise ConfigError(
            f"device {device}: {_gib(free)} of {_gib(total)} are free, expected {_gib(requested)} by "
            f"gpu_memory_utilization {fraction}; lower gpu_memory_utilization, or end other processes on the device"
        )
    return requested


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
