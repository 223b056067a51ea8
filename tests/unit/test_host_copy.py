"""Blocks between two buffers: the named ones byte for byte, all others untouched, bad calls refused whole."""

from __future__ import annotations

import random

import pytest
import torch

from kvferry.connector.binding.host_copy import copy_kv_blocks
from kvferry.transport.errors import GeometryError

SHAPE = (9, 3, 16, 4)


def caches(dtype: torch.dtype, *, permuted: bool, value: int | None = None) -> dict[str, torch.Tensor]:
    made = {}
    for name in ("a", "b"):
        shape = (SHAPE[0], SHAPE[2], SHAPE[1], SHAPE[3]) if permuted else SHAPE
        raw = torch.empty(shape, dtype=dtype)
        raw.view(torch.uint8).random_(0, 256) if value is None else raw.view(torch.uint8).fill_(value)
        made[name] = raw.permute(0, 2, 1, 3) if permuted else raw
    return made


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float64, torch.int8])
def test_named_blocks_and_no_others(dtype: torch.dtype, direction: str) -> None:
    draw = random.Random(str(dtype))
    for permuted in (False, True):
        source, target = caches(dtype, permuted=permuted), caches(dtype, permuted=not permuted, value=7)
        theirs, ours = draw.sample(range(9), 4), draw.sample(range(9), 4)
        copy_kv_blocks(source, target, theirs, ours, direction)
        for name, cache in source.items():
            for one, other in zip(theirs, ours, strict=True):
                assert torch.equal(bits(target[name])[other], bits(cache)[one])
            assert bool((bits(target[name])[sorted({*range(9)} - {*ours})] == 7).all())


def test_nothing_to_copy() -> None:
    source, target = caches(torch.int8, permuted=False), caches(torch.int8, permuted=False, value=7)
    copy_kv_blocks(source, target, [], [], "h2d")
    copy_kv_blocks({}, target, [1], [1], "h2d")
    copy_kv_blocks(source, {}, [1], [1], "h2d")
    assert all(bool((cache == 7).all()) for cache in target.values())


@pytest.mark.parametrize(
    ("theirs", "ours", "direction", "message"),
    [
        ([1, 2], [3], "h2d", "2 source blocks for 1 destinations"),
        ([1, -1], [3, 4], "h2d", "block id -1 is outside 0..8"),
        ([1, 2], [3, 9], "d2h", "block id 9 is outside 0..8"),
        ([1, 2], [3, 3], "d2h", "destination block is named twice"),
        ([1], [3], "d2d", "direction 'd2d' is unknown"),
    ],
)
def test_bad_calls_copy_nothing(theirs: list[int], ours: list[int], direction: str, message: str) -> None:
    source, target = caches(torch.int8, permuted=False), caches(torch.int8, permuted=False, value=7)
    with pytest.raises(GeometryError, match=message):
        copy_kv_blocks(source, target, theirs, ours, direction)
    assert all(bool((cache == 7).all()) for cache in target.values())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "layer 'b' has no destination"),
        (
            {"b": torch.zeros(9, 3, 16, 5, dtype=torch.int8)},
            r"layer 'b': blocks of \[3, 16, 5\] torch.int8 cannot take",
        ),
        ({"b": torch.zeros(SHAPE, dtype=torch.uint8)}, "torch.uint8 cannot take"),
    ],
)
def test_layers_that_do_not_fit_copy_nothing(wrong: dict[str, torch.Tensor], message: str) -> None:
    source, target = caches(torch.int8, permuted=False), caches(torch.int8, permuted=False, value=7)
    with pytest.raises(GeometryError, match=message):
        copy_kv_blocks(source, {"a": target["a"], **wrong}, [1], [1], "h2d")
    assert bool((target["a"] == 7).all())
