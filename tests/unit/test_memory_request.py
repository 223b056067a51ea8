"""An engine's share of a device, against exact fractions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connector.binding.memory_request import request_memory
from kvferry.transport.errors import ConfigError

GIB = 1 << 30


def snapshot(total: int, free: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(total_memory=total, free_memory=free, **more)


def config(fraction: float) -> SimpleNamespace:
    return SimpleNamespace(gpu_memory_utilization=fraction)


def test_a_part_of_a_byte_is_a_byte() -> None:
    assert request_memory(snapshot(3, 3), config(0.5)) == 2
    assert request_memory(snapshot(1 << 40, 1 << 40), config(1)) == 1 << 40
    assert request_memory(snapshot(101, 51), config(0.5)) == 51


def test_external_weights_count_towards_the_share() -> None:
    device = snapshot(80 * GIB, 30 * GIB)
    assert request_memory(device, config(0.5), 10 * GIB) == 30 * GIB
    with pytest.raises(ConfigError, match=r"30.00 GiB of 80.00 GiB are free, expected 31.00 GiB"):
        request_memory(device, config(0.5), 9 * GIB)
    for size in (40, 41):
        with pytest.raises(ConfigError, match=rf"other processes take {size}.00 GiB of the 40.00 GiB that .* allows"):
            request_memory(device, config(0.5), size * GIB)


def test_too_little_is_free() -> None:
    with pytest.raises(
        ConfigError, match=r"device cuda:1: 1.00 GiB of 2.00 GiB are free, expected 1.50 GiB by"
    ) as raised:
        request_memory(snapshot(2 * GIB, GIB, device_="cuda:1"), config(0.75))
    assert "\n" not in str(raised.value)
    with pytest.raises(ConfigError, match="device xpu:0: "):
        request_memory(snapshot(2 * GIB, GIB, device="xpu:0"), config(0.75))
    with pytest.raises(ConfigError, match="device of the engine: "):
        request_memory(snapshot(2 * GIB, GIB), config(0.75))


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, float("nan"), float("inf")])
def test_fractions_out_of_range(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization is .*, expected more than 0 and at most 1"):
        request_memory(snapshot(8, 8), config(fraction))


def test_external_weights_below_nothing() -> None:
    with pytest.raises(ConfigError, match="external_weight_memory is -1 bytes"):
        request_memory(snapshot(8, 8), config(0.5), -1)
