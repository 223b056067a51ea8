"""Launching kernels that take all their numbers from one int64 table, with as few steps of Python as can be.

A hand-over of one block spends more on its launch than on its copy, and what has not run for milliseconds runs several
times slower, for other processes' data are in the processor's caches then. So tables go through buffers that stay, and
a kernel that is compiled is launched by the driver's call, without Triton's look at its arguments: before a copy of 4
GiB these steps took 0.3 ms of its 11.7 on an H200's host.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from bisect import bisect_left
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels import cuda_calls

Int64s = npt.NDArray[np.int64]

_SLOTS = 32
_SIZES = (128, 512, 2048, 8192)
"""Numbers that a buffer takes; larger tables get buffers of their own."""
_ARGUMENTS = 40
"""Of a kernel, at most."""
_NO_SCRATCH = (0, 0)
"""Arguments that Triton adds at the end of a kernel's: addresses of memory, null for kernels that need none."""
_AS_IT_IS = nullcontext()


class Table:
    """Arrays that kernels find one after the other. On a device they lie in a place that others get in their turn, and
    then they are uploaded again. They must not change. Of one thread."""

    __slots__ = ("_arrays", "_lane", "_number", "_place", "_size")

    def __init__(self, *arrays: Int64s) -> None:
        self._arrays = arrays
        self._size = sum(map(len, arrays))
        self._lane: _Lane | None = None
        self._place: tuple[torch.Tensor, int] | None = None
        self._number = 0

    def on_host(self) -> torch.Tensor:
        """All of them, for the interpreter."""
        return torch.from_numpy(np.concatenate(self._arrays))

    def on(self, lane: _Lane) -> tuple[torch.Tensor, int]:
        """Where they lie, and the address of that, for what is launched on ``lane`` next."""
        size = bisect_left(_SIZES, self._size)
        if size == len(_SIZES):
            if self._place is None or self._lane is not lane:
                self._place = lane.upload_to_stay(self._arrays)
        else:
            ring = lane.ring(_SIZES[size])
            if self._place is None or self._lane is not lane or ring.count - self._number >= _SLOTS:
                number = ring.count
                self._place = ring.upload(self._arrays, self._size)
                self._number = number
        self._lane = lane
        return self._place


class _Ring:
    """Buffers of one size for one stream, used in turn: pinned ones to write into, and theirs on the device.
    ``count``: uploads so far."""

    def __init__(self, size: int, device: torch.device, stream: int) -> None:
        # Pinned, so that the upload neither waits for the stream nor is read after it was written again.
        pinned = torch.empty((_SLOTS, size), dtype=torch.int64, pin_memory=True)
        there = torch.empty((_SLOTS, size), dtype=torch.int64, device=device)
        rows = zip(pinned.unbind(), there.unbind(), strict=True)
        self._slots = [(row.numpy(), row.data_ptr(), (to, to.data_ptr())) for row, to in rows]
        self._stream = stream
        self._halves = (cuda_calls.Event(), cuda_calls.Event())  # the last upload from either half of them
        self.count = 0

    def upload(self, arrays: tuple[Int64s, ...], size: int) -> tuple[torch.Tensor, int]:
        """On its stream, on which all that reads it must run."""
        slot = self.count % _SLOTS
        numbers, pinned, there = self._slots[slot]
        half, place = divmod(slot, _SLOTS // 2)
        if place == 0 and not self._halves[half].passed:  # at least 16 uploads ago
            self._halves[half].wait()
        np.concatenate(arrays, out=numbers[:size])
        cuda_calls.upload(there[1], pinned, 8 * size, self._stream)
        self.count += 1
        if place == _SLOTS // 2 - 1:
            self._halves[half].record(self._stream)
        return there


class _Lane:
    """What one thread launches on one stream: places for its tables, and for the arguments of a launch."""

    def __init__(self, device: torch.device, stream: int) -> None:
        self.device, self.stream = device, stream
        self._rings: dict[int, _Ring] = {}
        self._arguments = ctypes.create_string_buffer(8 * _ARGUMENTS)
        first = ctypes.addressof(self._arguments)
        self._pointers = (ctypes.c_void_p * _ARGUMENTS)(*range(first, first + 8 * _ARGUMENTS, 8))

    def ring(self, size: int) -> _Ring:
        ring = self._rings.get(size)
        if ring is None:
            ring = self._rings[size] = _Ring(size, self.device, self.stream)
        return ring

    def upload_to_stay(self, arrays: tuple[Int64s, ...]) -> tuple[torch.Tensor, int]:
        pinned = torch.empty(sum(map(len, arrays)), dtype=torch.int64, pin_memory=True)
        np.concatenate(arrays, out=pinned.numpy())
        there = pinned.to(self.device, non_blocking=True)
        return there, there.data_ptr()

    def launch(self, kernel: _Compiled, programs: int, table: int, numbers: tuple[int, ...]) -> None:
        # Each in 8 bytes, of which a kernel reads the lower 4 where it declares that.
        kernel.arguments.pack_into(self._arguments, 0, table, *numbers, *_NO_SCRATCH)
        cuda_calls.launch(kernel.function, programs, kernel.threads, kernel.shared, self.stream, self._pointers)


_lanes = threading.local()


def _lane(device: torch.device) -> _Lane:
    """That of this thread and its current stream on ``device``, which is the current one."""
    lanes: dict[Any, _Lane] = _lanes.__dict__
    stream = current_stream(device)
    lane = lanes.get((device.index, stream))
    if lane is None:
        lane = lanes[device.index, stream] = _Lane(device, stream)
    return lane


def prepare(device: torch.device) -> None:
    """Allocate what this thread's launches on its current stream need, which takes milliseconds."""
    if device.type == "cuda":
        lane = _lane(device)
        for size in _SIZES:
            lane.ring(size)


def using(device: torch.device) -> AbstractContextManager[object]:
    """This thread uses that GPU inside. Where it does anyway, to say so costs more than to ask, and lets the GIL go."""
    return _AS_IT_IS if torch._C._cuda_getDevice() == device.index else torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """Its handle: where Triton launches on that device."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


class _Compiled:
    """A kernel as it lies on a device. ``plain``: it takes nothing but its arguments, by all that this Triton says."""

    def __init__(self, kernel: Any, numbers: int) -> None:
        self.kernel, about = kernel, kernel.metadata
        extra = [getattr(about, name, True) for name in ("global_scratch_size", "profile_scratch_size")]
        extra += [getattr(about, name, 0) for name in ("launch_cooperative_grid", "launch_pdl", "instrumentation_mode")]
        arguments = 1 + numbers + len(_NO_SCRATCH)
        self.plain = arguments <= _ARGUMENTS and about.num_ctas == 1 and not any(extra)
        self.function, self.shared, self.threads = kernel.function, about.shared, 32 * about.num_warps
        self.arguments = struct.Struct(f"={arguments}q")


class Variant:
    """A kernel for some constants, compiled once per device."""

    def __init__(self, kernel: Any, num_warps: int, constants: tuple[object, ...]) -> None:
        self._kernel, self._num_warps, self._constants = kernel, num_warps, constants
        self._compiled: dict[int | None, _Compiled] = {}

    def __call__(self, programs: int, table: Table, device: torch.device, numbers: tuple[int, ...]) -> None:
        """Launch ``programs`` programs on the current stream of ``device``; on ``cpu``, in the interpreter."""
        if device.type == "cpu":
            self._kernel[(programs,)](table.on_host(), *numbers, *self._constants)
            return
        with using(device):
            self._launch(programs, table, device, numbers)

    def _launch(self, programs: int, table: Table, device: torch.device, numbers: tuple[int, ...]) -> None:
        lane = _lane(device)
        there, address = table.on(lane)
        compiled = self._compiled.get(device.index)
        if compiled is None:
            launch = self._kernel[programs, 1, 1]
            kernel = launch(there, *numbers, *self._constants, num_warps=self._num_warps)
            self._compiled[device.index] = _Compiled(kernel, len(numbers))
        elif compiled.plain:
            lane.launch(compiled, programs, address, numbers)
        else:
            compiled.kernel[programs, 1, 1](there, *numbers, *self._constants, stream=lane.stream)


class Launcher:
    """A kernel of one ``table``, of numbers whose types it declares and on which it is not specialised, and of
    constants."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._variants: dict[tuple[object, ...], Variant] = {}

    def variant(self, num_warps: int, constants: tuple[object, ...]) -> Variant:
        key = num_warps, constants
        variant = self._variants.get(key)
        if variant is None:
            variant = self._variants[key] = Variant(self._kernel, num_warps, constants)
        return variant
