"""Launching kernels that take all their numbers from one int64 table, with as few steps of Python as can be.

A hand-over of one block spends more on its launch than on its copy. So tables go through buffers that stay, and a
kernel that is compiled is launched as such, without Triton's look at its arguments (measured on an H200's host).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Int64s = npt.NDArray[np.int64]

_SLOTS = 32
_SIZES = (128, 512, 2048, 8192)
"""Numbers that a buffer takes; larger tables get buffers of their own."""


class _Ring:
    """Buffers of one size for one stream, used in turn: pinned ones to write into, and theirs on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        # Pinned, so that the upload neither waits for the stream nor is read after it was written again.
        pinned = torch.empty((_SLOTS, size), dtype=torch.int64, pin_memory=True)
        there = torch.empty((_SLOTS, size), dtype=torch.int64, device=device)
        self._slots = [(row.numpy(), row, to) for row, to in zip(pinned.unbind(), there.unbind(), strict=True)]
        self._halves = (torch.cuda.Event(), torch.cuda.Event())  # the last upload from either half of them
        self._next = 0

    def upload(self, table: Int64s) -> torch.Tensor:
        """On the current stream, on which all that reads it must run."""
        numbers, pinned, there = self._slots[self._next]
        half, place = divmod(self._next, _SLOTS // 2)
        if place == 0:
            self._halves[half].synchronize()  # at least 16 uploads ago, so this nearly always returns at once
        numbers[: len(table)] = table
        there.copy_(pinned, non_blocking=True)
        if place == _SLOTS // 2 - 1:
            self._halves[half].record()
        self._next = (self._next + 1) % _SLOTS
        return there


_rings = threading.local()


def upload(table: Int64s, device: torch.device) -> torch.Tensor:
    """The table in memory of ``device``, which is the current one, for kernels on its current stream."""
    size = next((size for size in _SIZES if len(table) <= size), None)
    if size is None:
        pinned = torch.empty(len(table), dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = table
        return pinned.to(device, non_blocking=True)
    key = size, device.index, torch._C._cuda_getCurrentRawStream(device.index)  # what Triton launches on
    rings: dict[Any, _Ring] = _rings.__dict__
    ring = rings.get(key)
    if ring is None:
        ring = rings[key] = _Ring(size, device)
    return ring.upload(table)


class Launcher:
    """A kernel of one ``table`` and constants."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, programs: int, table: torch.Tensor, num_warps: int, *constants: object) -> None:
        """Launch ``programs`` programs on the current device and stream. ``table`` begins at a multiple of 16 bytes."""
        key = (table.device.index, num_warps, *constants)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[programs, 1, 1](table, *constants, num_warps=num_warps)
        else:
            compiled[programs, 1, 1](table, *constants)
