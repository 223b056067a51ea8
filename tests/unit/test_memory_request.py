"""An engine's share of a device, against exact fractions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connector.binding.memory_request import request_memory
from kvferry.transport.errors import ConfigError

GIB = 1 << 30


def request(total: int, free: int, fraction: float, external: int = 0, **more: Any) -> int:
    snapshot = SimpleNamespace(total_memory=total, free_memory=free, **more)
    return request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=fraction), external)


def test_a_part_of_a_byte_is_a_byte_and_external_weights_count() -> None:
    assert request(3, 3, 0.5) == 2 and request(1 << 40, 1 << 40, 1) == 1 << 40 and request(101, 51, 0.5) == 51
    assert request(80 * GIB, 30 * GIB, 0.5, 10 * GIB) == 30 * GIB


@pytest.mark.parametrize(
    ("arguments", "more", "text"),
    [
        ((80 * GIB, 30 * GIB, 0.5, 9 * GIB), {}, "30.00 GiB of 80.00 GiB are free, expected 31.00 GiB"),
        ((80 * GIB, 30 * GIB, 0.5, 40 * GIB), {}, "other processes take 40.00 GiB of the 40.00 GiB that .* allows"),
        (
            (2 * GIB, GIB, 0.75),
            {"device_": "cuda:1"},
            "device cuda:1: 1.00 GiB of 2.00 GiB are free, expected 1.50 GiB",
        ),
        ((2 * GIB, GIB, 0.75), {}, "device of the engine: "),
        ((8, 8, 0.5, -1), {}, "external_weight_memory is -1 bytes"),
        *(((8, 8, f), {}, "_utilization is .*, expected more than 0 and at most 1") for f in (0, -0.5, 1.01)),
        *(((8, 8, float(f)), {}, "_utilization is .*, expected more than 0 and at most 1") for f in ("nan", "inf")),
    ],
)
def test_what_cannot_be_is_one_line(arguments: tuple[Any, ...], more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        request(*arguments, **more)
    assert "\n" not in str(raised.value)
