"""The calls of CUDA's driver that every hand-over makes, none of which lets the GIL go but ``Event.wait``.

PyTorch's own give it up for microseconds each, and beside a thread that computes in Python it takes tens of
microseconds to have it back (``gil_ms`` of ``benchmarks/gpu_planes.py``). Streams are raw handles. The device is the
current one of the calling thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import time
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

_NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""
_DISABLE_TIMING = 2
"""CU_EVENT_DISABLE_TIMING."""


@functools.cache
def _library(*, keeps_gil: bool) -> Any:
    cuda = (ctypes.PyDLL if keeps_gil else ctypes.CDLL)("libcuda.so.1")
    for name, arguments in (
        ("cuEventCreate", (c_void_p, c_uint)),
        ("cuEventDestroy_v2", (c_void_p,)),
        ("cuEventQuery", (c_void_p,)),
        ("cuEventRecord", (c_void_p, c_void_p)),
        ("cuEventSynchronize", (c_void_p,)),
        ("cuGetErrorName", (c_int, c_void_p)),
        ("cuLaunchKernel", (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p)),
        ("cuMemcpyHtoDAsync_v2", (c_uint64, c_void_p, c_size_t, c_void_p)),
        ("cuStreamWaitEvent", (c_void_p, c_void_p, c_uint)),
    ):
        getattr(cuda, name).argtypes = arguments
    return cuda


def _done(what: str, status: int) -> None:
    """Raises RuntimeError where a call was no success."""
    if status:
        name = c_char_p()
        _library(keeps_gil=True).cuGetErrorName(status, byref(name))
        raise RuntimeError(f"{what}: {(name.value or b'unknown').decode()} ({status})")


class Event:
    """A place in a stream, recorded any number of times; before that, it has passed."""

    __slots__ = ("_calls", "_handle")

    def __init__(self) -> None:
        self._calls, self._handle = _library(keeps_gil=True), c_void_p()
        _done("cuEventCreate", self._calls.cuEventCreate(byref(self._handle), _DISABLE_TIMING))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter the driver may be gone
            self._calls.cuEventDestroy_v2(self._handle)

    def record(self, stream: int) -> None:
        """Here, after all that was given to ``stream`` so far."""
        _done("cuEventRecord", self._calls.cuEventRecord(self._handle, stream))

    def hold(self, stream: int) -> None:
        """What is given to ``stream`` from now on waits for it."""
        _done("cuStreamWaitEvent", self._calls.cuStreamWaitEvent(stream, self._handle, 0))

    @property
    def passed(self) -> bool:
        """Whether the device has done all before it. Raises RuntimeError where the device failed."""
        status = self._calls.cuEventQuery(self._handle)
        if status != _NOT_READY:
            _done("cuEventQuery", status)
        return bool(status == 0)

    def wait(self, seconds: float = math.inf) -> bool:
        """Until it has passed, at most so long; whether it has. Spins without the GIL. Raises RuntimeError where the
        device failed."""
        calls = _library(keeps_gil=False)
        if seconds == math.inf:
            _done("cuEventSynchronize", calls.cuEventSynchronize(self._handle))
            return True
        deadline = time.monotonic() + seconds
        while (status := calls.cuEventQuery(self._handle)) == _NOT_READY and time.monotonic() < deadline:
            pass
        if status != _NOT_READY:
            _done("cuEventQuery", status)
        return bool(status == 0)


def upload(to: int, of: int, nbytes: int, stream: int) -> None:
    """Copy from page-locked host memory, which must stay as it is until ``stream`` comes to it."""
    _done("cuMemcpyHtoDAsync", _library(keeps_gil=True).cuMemcpyHtoDAsync_v2(to, of, nbytes, stream))


def launch(function: int, programs: int, threads: int, shared: int, stream: int, arguments: Any) -> None:
    """Run a kernel in ``programs`` blocks of so many threads, with ``shared`` bytes of shared memory. ``arguments``:
    an array of pointers to them, which are read before the call returns. Some 1000 may wait on a stream; the next one
    blocks."""
    call = _library(keeps_gil=True).cuLaunchKernel
    _done("cuLaunchKernel", call(function, programs, 1, 1, threads, 1, 1, shared, stream, arguments, None))
