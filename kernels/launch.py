"""Launches of kernels whose scalars are not specialised on and whose arrays lie in one int64 table in device memory.

A hand-over of one block takes longer to launch than to copy. So a launch takes few steps of Python: tables go through
buffers that are allocated once, and a kernel that Triton has compiled is launched by ``cuLaunchKernel`` directly.

The direct launch depends on how a Triton release passes arguments. It is used only where the metadata of a compiled
kernel name nothing but the kernel's own arguments. The environment variable ``KVFERRY_TRITON_LAUNCHER=1`` makes every
launch of the process go through Triton's own launcher. It is read once, at the import of this module; by default, also
for an empty value, it is 0.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.transport import cuda

Int64s = npt.NDArray[np.int64]

_RING_SLOTS = 32
_RING_SIZES = (128, 512, 2048, 8192)
"""Numbers that a slot of each ring takes. A larger table gets a buffer of its own."""
_MAX_ARGUMENTS = 40
"""Of a kernel that is launched directly."""
_NO_SCRATCH = (0, 0)
"""Triton appends the addresses of global and profile scratch memory to a kernel's arguments. They are null for a kernel
that needs none."""

_triton_launcher_only = os.environ.get("KVFERRY_TRITON_LAUNCHER", "") not in ("", "0")


class DeviceTable:
    """int64 arrays that a kernel reads one after the other from device memory. The arrays must not change. On a device
    they lie in a slot of a ring, which later tables take over; a launch after that uploads them again. One thread uses
    a table."""

    __slots__ = ("_arrays", "_buffers", "_number", "_place", "_size")

    def __init__(self, *arrays: Int64s) -> None:
        self._arrays = arrays
        self._size = sum(map(len, arrays))
        self._buffers: StreamBuffers | None = None
        self._place: tuple[torch.Tensor, int] | None = None
        self._number = 0

    def on_host(self) -> torch.Tensor:
        """All arrays in host memory, for Triton's interpreter: int64 [sum of their lengths]."""
        return torch.from_numpy(np.concatenate(self._arrays))

    def on_device(self, buffers: StreamBuffers) -> tuple[torch.Tensor, int]:
        """The tensor that holds the arrays, and its address, valid for the next launch on the stream of ``buffers``.
        The tensor may be longer than the arrays."""
        size = bisect_left(_RING_SIZES, self._size)
        if size == len(_RING_SIZES):
            if self._place is None or self._buffers is not buffers:
                self._place = buffers.upload_alone(self._arrays)
        else:
            ring = buffers.ring(_RING_SIZES[size])
            if self._place is None or self._buffers is not buffers or ring.count - self._number >= _RING_SLOTS:
                number = ring.count
                self._place = ring.upload(self._arrays, self._size)
                self._number = number
        self._buffers = buffers
        return self._place


class _UploadRing:
    """Slots of one size for the tables of one stream, used in turn: a page-locked buffer to write into, and one on the
    device. ``count`` is the number of uploads so far."""

    def __init__(self, size: int, device: torch.device, stream: int) -> None:
        # From page-locked memory the upload does not wait for the stream. It reads the memory later, so a slot is
        # written again only after the event of its half has completed.
        on_host = torch.empty((_RING_SLOTS, size), dtype=torch.int64, pin_memory=True)
        on_device = torch.empty((_RING_SLOTS, size), dtype=torch.int64, device=device)
        rows = zip(on_host.unbind(), on_device.unbind(), strict=True)
        self._slots = [(row.numpy(), row.data_ptr(), (to, to.data_ptr())) for row, to in rows]
        self._stream = stream
        self._halves = (cuda.Event(), cuda.Event())  # the last upload from the slots of each half
        self.count = 0

    def upload(self, arrays: tuple[Int64s, ...], size: int) -> tuple[torch.Tensor, int]:
        """Enqueue an upload into the next slot. Kernels that read it must run on the same stream."""
        slot = self.count % _RING_SLOTS
        numbers, host_address, place = self._slots[slot]
        half, index = divmod(slot, _RING_SLOTS // 2)
        if index == 0 and not self._halves[half].query():  # at least 16 uploads ago
            self._halves[half].synchronize()
        np.concatenate(arrays, out=numbers[:size])
        cuda.upload(place[1], host_address, 8 * size, self._stream)
        self.count += 1
        if index == _RING_SLOTS // 2 - 1:
            self._halves[half].record(self._stream)
        return place


class StreamBuffers:
    """The memory that one thread needs for its launches on one stream: slots for tables, and the kernel arguments."""

    def __init__(self, device: torch.device, stream: int) -> None:
        self.device, self.stream = device, stream
        self._rings: dict[int, _UploadRing] = {}
        self._arguments = ctypes.create_string_buffer(8 * _MAX_ARGUMENTS)
        first = ctypes.addressof(self._arguments)
        self._pointers = (ctypes.c_void_p * _MAX_ARGUMENTS)(*range(first, first + 8 * _MAX_ARGUMENTS, 8))

    def ring(self, size: int) -> _UploadRing:
        """The slots for tables of at most ``size`` numbers, allocated at the first call."""
        if size not in self._rings:
            self._rings[size] = _UploadRing(size, self.device, self.stream)
        return self._rings[size]

    def upload_alone(self, arrays: tuple[Int64s, ...]) -> tuple[torch.Tensor, int]:
        """Upload a table into a tensor of its own. Returns the tensor and its address."""
        on_host = torch.empty(sum(map(len, arrays)), dtype=torch.int64, pin_memory=True)
        np.concatenate(arrays, out=on_host.numpy())
        on_device = on_host.to(self.device, non_blocking=True)
        return on_device, on_device.data_ptr()

    def launch(self, kernel: CompiledKernel, num_programs: int, table: int, scalars: tuple[int, ...]) -> None:
        """Launch a kernel whose table lies at address ``table``, without Triton."""
        # Each argument takes 8 bytes. A kernel that declares int32 reads the lower 4 of them.
        kernel.arguments.pack_into(self._arguments, 0, table, *scalars, *_NO_SCRATCH)
        cuda.launch_kernel(
            kernel.function, num_programs, kernel.num_threads, kernel.shared_bytes, self.stream, self._pointers
        )


_of_thread = threading.local()


def stream_buffers(device: torch.device) -> StreamBuffers:
    """The buffers of this thread for its current stream on ``device``, which must be the current device."""
    buffers_of: dict[Any, StreamBuffers] = _of_thread.__dict__
    stream = cuda.current_stream(device)
    key = device.index, stream
    if key not in buffers_of:
        buffers_of[key] = StreamBuffers(device, stream)
    return buffers_of[key]


def prepare(device: torch.device) -> None:
    """Allocate what this thread's launches on its current stream need, which takes milliseconds. On ``cpu`` nothing."""
    if device.type == "cuda":
        buffers = stream_buffers(device)
        for size in _RING_SIZES:
            buffers.ring(size)


class CompiledKernel:
    """A kernel that Triton has compiled and loaded on one device. ``is_plain``: by the metadata of this Triton release
    the kernel takes its own arguments and ``_NO_SCRATCH``, and its launch needs no attributes. Metadata that are
    missing count as a need for scratch memory."""

    def __init__(self, kernel: Any, num_scalars: int) -> None:
        about = kernel.metadata
        extra = [getattr(about, name, True) for name in ("global_scratch_size", "profile_scratch_size")]
        extra += [getattr(about, name, 0) for name in ("launch_cooperative_grid", "launch_pdl", "instrumentation_mode")]
        num_arguments = 1 + num_scalars + len(_NO_SCRATCH)
        self.is_plain = num_arguments <= _MAX_ARGUMENTS and about.num_ctas == 1 and not any(extra)
        self.function, self.shared_bytes, self.num_threads = kernel.function, about.shared, 32 * about.num_warps
        self.arguments = struct.Struct(f"={num_arguments}q")
        self._keep_loaded = kernel


class Variant:
    """A kernel for ``num_warps`` warps per program, compiled once per device. Its parameters are one ``table``, scalars
    of declared types that it is not specialised on, and ``constants``, in this order."""

    def __init__(self, kernel: Any, num_warps: int, constants: tuple[object, ...]) -> None:
        self._kernel, self._num_warps, self._constants = kernel, num_warps, constants
        self._compiled: dict[int | None, CompiledKernel] = {}

    def __call__(self, num_programs: int, table: DeviceTable, device: torch.device, scalars: tuple[int, ...]) -> None:
        """Launch ``num_programs`` programs on the current stream of ``device``. On ``cpu``, run them in Triton's
        interpreter."""
        if device.type == "cpu":
            self._kernel[(num_programs,)](table.on_host(), *scalars, *self._constants)
            return
        with cuda.device_guard(device):
            self._launch(num_programs, table, device, scalars)

    def _launch(self, num_programs: int, table: DeviceTable, device: torch.device, scalars: tuple[int, ...]) -> None:
        buffers = stream_buffers(device)
        tensor, address = table.on_device(buffers)
        compiled = self._compiled.get(device.index)
        if compiled is not None and compiled.is_plain and not _triton_launcher_only:
            buffers.launch(compiled, num_programs, address, scalars)
            return
        kernel = self._kernel[num_programs, 1, 1](tensor, *scalars, *self._constants, num_warps=self._num_warps)
        if compiled is None:
            self._compiled[device.index] = CompiledKernel(kernel, len(scalars))


variant_of = functools.cache(Variant)
"""The one ``Variant`` of a kernel with these constants."""
