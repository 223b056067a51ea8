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

from kvferry.kernels import cuda_calls

Int64s = npt.NDArray[np.int64]

_SLOTS = 32
_SIZES = (128, 512, 2048, 8192)
"""Numbers that a buffer takes; larger tables get buffers of their own."""


class _Ring:
    """Buffers of one size for one stream, used in turn: pinned ones to write into, and theirs on the device."""

    def __init__(self, size: int, device: torch.device, stream: int) -> None:
        # Pinned, so that the upload neither waits for the stream nor is read after it was written again.
        pinned = torch.empty((_SLOTS, size), dtype=torch.int64, pin_memory=True)
        there = torch.empty((_SLOTS, size), dtype=torch.int64, device=device)
        rows = zip(pinned.unbind(), there.unbind(), strict=True)
        self._slots = [(row.numpy(), row.data_ptr(), to, to.data_ptr()) for row, to in rows]
        self._stream = stream
        self._halves = (cuda_calls.Event(), cuda_calls.Event())  # the last upload from either half of them
        self._next = 0

    def upload(self, table: Int64s) -> torch.Tensor:
        """On its stream, on which all that reads it must run."""
        numbers, pinned, there, address = self._slots[self._next]
        half, place = divmod(self._next, _SLOTS // 2)
        if place == 0 and not self._halves[half].passed:  # at least 16 uploads ago
            self._halves[half].wait()
        numbers[: len(table)] = table
        cuda_calls.upload(address, pinned, table.nbytes, self._stream)
        if place == _SLOTS // 2 - 1:
            self._halves[half].record(self._stream)
        self._next = (self._next + 1) % _SLOTS
        return there


_rings = threading.local()


def upload(table: Int64s, device: torch.device) -> torch.Tensor:
    """The table in memory of ``device``, which is the current one, for kernels that are launched on its current stream
    before long: its place is used again."""
    size = next((size for size in _SIZES if len(table) <= size), None)
    if size is None:
        return upload_to_stay(table, device)
    stream = current_stream(device)
    key = size, device.index, stream
    rings: dict[Any, _Ring] = _rings.__dict__
    ring = rings.get(key)
    if ring is None:
        ring = rings[key] = _Ring(size, device, stream)
    return ring.upload(table)


def upload_to_stay(table: Int64s, device: torch.device) -> torch.Tensor:
    """The table in memory of its own on ``device``, for its current stream. On ``cpu``, the interpreter's."""
    if device.type == "cpu":
        return torch.from_numpy(table)
    pinned = torch.empty(len(table), dtype=torch.int64, pin_memory=True)
    pinned.numpy()[:] = table
    return pinned.to(device, non_blocking=True)


def current_stream(device: torch.device) -> int:
    """Its handle: where Triton launches on that device."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


class Launcher:
    """A kernel of one ``table``, of numbers whose types it declares and on which it is not specialised, and of
    constants."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        num_warps: int,
        table: Int64s | torch.Tensor,
        device: torch.device,
        numbers: tuple[int, ...],
        constants: tuple[object, ...],
    ) -> None:
        """Launch ``programs`` programs on the current stream of ``device``; on ``cpu``, in the interpreter. ``table``
        is uploaded, unless it lies there already."""
        if device.type == "cpu":
            there = table if isinstance(table, torch.Tensor) else torch.from_numpy(table)
            self._kernel[(programs,)](there, *numbers, *constants)
            return
        with torch.cuda.device(device):
            there = table if isinstance(table, torch.Tensor) else upload(table, device)
            key = (device.index, num_warps, constants)
            compiled = self._compiled.get(key)
            if compiled is None:
                launch = self._kernel[programs, 1, 1]
                self._compiled[key] = launch(there, *numbers, *constants, num_warps=num_warps)
            else:
                compiled[programs, 1, 1](there, *numbers, *constants, stream=current_stream(device))
