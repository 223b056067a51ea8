"""The project's one binding to CUDA: calls of NVIDIA's driver library, ``libcuda.so.1``, through ``ctypes``.

With ``ctypes`` each call can hold or release the GIL. A call that releases it, as all of cuda-bindings do, waits tens
of microseconds for it beside a thread that computes in Python (``gil_ms`` of ``benchmarks/planes/planes.py``). The
calls in ``HOLDS_GIL`` return within microseconds; those in ``RELEASES_GIL`` may wait for a GPU, another process or the
kernel. The library is opened at the first call, so this module can be imported without CUDA.

Streams, events and addresses are integers, sizes are in bytes, a ``device`` is a torch device with its index. A call
acts on the CUDA context that is current in the calling thread, except where a function takes a ``device``. Every call
that fails raises ``TransportError``, with the name of the call and CUDA's name of the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

import torch

from kvferry.transport.errors import PlaneUnavailableError, TransportError

logger = logging.getLogger("vllm.kvferry.cuda")

HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""
LIBRARY = "libcuda.so.1"
_NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""
_EVENT_BLOCKING_SYNC, _EVENT_DISABLE_TIMING = 1, 2
_HOST_PORTABLE, _HOST_DEVICEMAP, _HOST_READ_ONLY = 1, 2, 8
_IPC_LAZY_ENABLE_PEER_ACCESS = 1
_POINTER_IS_LEGACY_CUDA_IPC_CAPABLE = 10
_STREAM_NON_BLOCKING = 1


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which ``cuIpcOpenMemHandle`` takes by value."""

    _fields_ = [("reserved", c_ubyte * HANDLE_BYTES)]


_DEVICE, _DEVICE_POINTER, _HANDLE = c_int, c_uint64, c_void_p
"""A handle is that of a context, a stream, an event or a kernel."""
_Signatures = Mapping[str, tuple[Any, ...]]

HOLDS_GIL: _Signatures = {
    "cuCtxPopCurrent_v2": (POINTER(_HANDLE),),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuDeviceGet": (POINTER(_DEVICE), c_int),
    "cuEventCreate": (POINTER(_HANDLE), c_uint),
    "cuEventDestroy_v2": (_HANDLE,),
    "cuEventQuery": (_HANDLE,),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuLaunchKernel": (_HANDLE, *(c_uint,) * 7, _HANDLE, c_void_p, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _DEVICE_POINTER, c_size_t, _HANDLE),
    "cuMemcpyHtoDAsync_v2": (_DEVICE_POINTER, c_void_p, c_size_t, _HANDLE),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, c_uint),
}
RELEASES_GIL: _Signatures = {
    "cuDevicePrimaryCtxRetain": (POINTER(_HANDLE), _DEVICE),
    "cuEventQuery": (_HANDLE,),
    "cuEventSynchronize": (_HANDLE,),
    "cuInit": (c_uint,),
    "cuIpcCloseMemHandle": (_DEVICE_POINTER,),
    "cuIpcGetMemHandle": (POINTER(_IpcHandle), _DEVICE_POINTER),
    "cuIpcOpenMemHandle_v2": (POINTER(_DEVICE_POINTER), _IpcHandle, c_uint),
    "cuMemAlloc_v2": (POINTER(_DEVICE_POINTER), c_size_t),
    "cuMemFree_v2": (_DEVICE_POINTER,),
    "cuMemGetAddressRange_v2": (POINTER(_DEVICE_POINTER), POINTER(c_size_t), _DEVICE_POINTER),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _DEVICE_POINTER, c_size_t, _HANDLE),
    "cuPointerGetAttribute": (c_void_p, c_int, _DEVICE_POINTER),
    "cuStreamCreate": (POINTER(_HANDLE), c_uint),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
}


UNCHECKED = ("cuGetErrorName", "cuInit", "cuIpcCloseMemHandle", "cuStreamDestroy_v2")


class _Driver:
    """The library, opened twice: calls of ``held`` hold the GIL, calls of ``released`` release it. All but those in
    ``UNCHECKED`` raise TransportError where they fail."""

    def __init__(self) -> None:
        self.held = self._declared(ctypes.PyDLL(LIBRARY), HOLDS_GIL)
        self.released = self._declared(ctypes.CDLL(LIBRARY), RELEASES_GIL)

    def _declared(self, library: Any, signatures: _Signatures) -> Any:
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
            if name not in UNCHECKED:
                function.errcheck = self._check
        return library

    def _check(self, status: int, function: Any, arguments: object) -> int:
        """What ctypes calls with the CUresult of each call."""
        if status and not (status == _NOT_READY and function.__name__ == "cuEventQuery"):
            raise TransportError(self.failure(function.__name__.removesuffix("_v2"), status))
        return status

    def failure(self, call: str, status: int) -> str:
        name = c_char_p()
        self.held.cuGetErrorName(status, byref(name))
        return f"{call}: {name.value.decode() if name.value else f'CUDA error {status}'}"


@functools.cache
def _driver() -> _Driver:
    try:
        driver = _Driver()
    except (OSError, AttributeError) as error:  # no such library, or one without a function that is needed
        raise PlaneUnavailableError(f"{error}; NVIDIA's driver is not installed, or too old") from None
    if status := driver.released.cuInit(0):
        raise PlaneUnavailableError(driver.failure("cuInit", status))
    return driver


def load() -> None:
    """Open the driver library now. Other functions do so at their first call.

    Raises:
        PlaneUnavailableError: there is no driver, or no GPU.
    """
    _driver()


# Devices and contexts. The context of a device is its primary one, which PyTorch uses, too, and retains until the
# process ends.


@functools.cache
def _primary_context(index: int) -> int:
    context, device = _HANDLE(), _DEVICE()
    _driver().held.cuDeviceGet(byref(device), index)
    _driver().released.cuDevicePrimaryCtxRetain(byref(context), device)
    assert context.value is not None
    return context.value


def bind_context(device: torch.device) -> None:
    """Make the primary context of ``device`` current in this thread, for as long as the thread lives.

    ``torch.cuda.set_device`` may leave this to PyTorch's next call, and calls of this module may come earlier.
    """
    _driver().held.cuCtxSetCurrent(_primary_context(device.index))


@contextlib.contextmanager
def _context_of(device: torch.device) -> Iterator[None]:
    """Make the primary context of ``device`` current inside, and the previous one after it."""
    calls = _driver().held
    calls.cuCtxPushCurrent_v2(_primary_context(device.index))
    try:
        yield
    finally:
        calls.cuCtxPopCurrent_v2(byref(_HANDLE()))


_NO_CHANGE = nullcontext()


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current CUDA device of this thread inside the ``with`` block, and the previous one after it.
    Where it is current already, nothing is done: ``torch.cuda.device`` takes longer, and releases the GIL."""
    return _NO_CHANGE if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """The handle of this thread's current stream on ``device``, on which Triton launches.

    PyTorch's public ``current_stream`` makes an object for the handle, which takes microseconds. So this function uses
    the call that Triton uses, and the public one where a release of PyTorch does not have that call.
    """
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw_stream is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(raw_stream(device.index))


def device_uuid(device: torch.device) -> str:
    """The UUID of a GPU, which is the same in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_peer_access(device: torch.device, peer_uuid: str) -> None:
    """Raise TransportError where ``device`` cannot access the memory of the GPU with that UUID. Where this process does
    not see that GPU, nothing is checked, and ``open_handle`` fails if there is no access."""
    for index in range(torch.cuda.device_count()):
        if index == device.index or device_uuid(torch.device("cuda", index)) != peer_uuid:
            continue
        if not torch.cuda.can_device_access_peer(device, index):
            raise TransportError(f"GPU {device.index} has no peer access to GPU {index}")


# Events, uploads, launches: every hand-over uses them.


class Event:
    """A CUDA event without timing, which can be recorded any number of times. An event that was never recorded counts
    as completed. ``blocking``: ``synchronize`` without an end sleeps instead of spinning, and returns some later."""

    __slots__ = ("_calls", "_handle")

    def __init__(self, *, blocking: bool = False) -> None:
        self._calls, self._handle = _driver().held, _HANDLE()
        flags = _EVENT_DISABLE_TIMING | (_EVENT_BLOCKING_SYNC if blocking else 0)
        self._calls.cuEventCreate(byref(self._handle), flags)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the interpreter the driver may be gone
            self._calls.cuEventDestroy_v2(self._handle)

    def record(self, stream: int) -> None:
        """Record the event behind all work that was enqueued on ``stream`` so far."""
        self._calls.cuEventRecord(self._handle, stream)

    def make_stream_wait(self, stream: int) -> None:
        """Let all work that is enqueued on ``stream`` from now on wait for the event."""
        self._calls.cuStreamWaitEvent(stream, self._handle, 0)

    def query(self) -> bool:
        """Whether the device has completed all work before the event.

        Raises:
            TransportError: the device failed.
        """
        return bool(self._calls.cuEventQuery(self._handle) != _NOT_READY)

    def synchronize(self, seconds: float = math.inf) -> bool:
        """Wait until the event has completed, at most ``seconds``. Returns whether it has. Spins, without the GIL.

        Raises:
            TransportError: the device failed.
        """
        calls = _driver().released
        if seconds == math.inf:
            calls.cuEventSynchronize(self._handle)
            return True
        deadline = time.monotonic() + seconds
        while (status := calls.cuEventQuery(self._handle)) == _NOT_READY and time.monotonic() < deadline:
            pass
        return bool(status != _NOT_READY)


def upload(dst: int, src: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy from page-locked host memory, which must not change before ``stream`` has reached the copy, to
    device memory."""
    _driver().held.cuMemcpyHtoDAsync_v2(dst, src, nbytes, stream)


def download(dst: int, src: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy from device memory to page-locked host memory."""
    _driver().held.cuMemcpyDtoHAsync_v2(dst, src, nbytes, stream)


def launch_kernel(
    function: int, num_programs: int, num_threads: int, shared_bytes: int, stream: int, arguments: Any
) -> None:
    """Enqueue a kernel on ``stream``: ``num_programs`` thread blocks of ``num_threads`` threads, with ``shared_bytes``
    of dynamic shared memory each. ``arguments`` is an array of pointers to the kernel's arguments, which the call
    copies. A stream holds some 1000 launches; the next one waits, with the GIL."""
    call = _driver().held.cuLaunchKernel
    call(function, num_programs, 1, 1, num_threads, 1, 1, shared_bytes, stream, arguments, None)


# Memory.


class Allocation:
    """An allocation outside of PyTorch's pool, which has no IPC handles where its segments are expandable."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        address = _DEVICE_POINTER()
        _driver().released.cuMemAlloc_v2(byref(address), nbytes)
        self._address, self._device = address.value, device
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (self._address, False), "version": 3,
        }  # fmt: skip

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            with contextlib.suppress(Exception), _context_of(self._device):  # at the end the driver may be gone
                _driver().released.cuMemFree_v2(self._address)


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate memory on ``device`` that other processes can map, uint8 [nbytes].

    Raises:
        TransportError: there is not enough memory.
    """
    bind_context(device)
    return torch.as_tensor(Allocation(nbytes, device), device=device)


def address_range(address: int) -> tuple[int, int]:
    """First address and size of the allocation that contains ``address``."""
    base, size = _DEVICE_POINTER(), c_size_t()
    _driver().released.cuMemGetAddressRange_v2(byref(base), byref(size), address)
    return base.value, size.value


def ipc_handle(base: int) -> bytes:
    """The IPC handle of the allocation that begins at ``base``, ``HANDLE_BYTES`` long.

    Raises:
        PlaneUnavailableError: the allocation has no handle; the message gives the reason.
    """
    calls = _driver().released
    capable = c_uint64()  # CUDA writes a boolean of a width that its reference does not give
    calls.cuPointerGetAttribute(byref(capable), _POINTER_IS_LEGACY_CUDA_IPC_CAPABLE, base)
    if not capable.value:
        raise PlaneUnavailableError(
            "the KV cache lies in virtual memory of CUDA (expandable_segments of PYTORCH_CUDA_ALLOC_CONF, or vLLM's "
            "sleep mode), which has no IPC handle; switch that off"
        )
    handle = _IpcHandle()
    calls.cuIpcGetMemHandle(byref(handle), base)
    return bytes(handle.reserved)


def open_handle(handle: bytes) -> int:
    """Map another process's allocation into the context of this thread; its address here. Takes up to tens of
    milliseconds.

    Raises:
        TransportError: its GPU cannot be reached from this GPU, the allocation is gone, or it belongs to this process.
    """
    address = _DEVICE_POINTER()
    call = _driver().released.cuIpcOpenMemHandle_v2
    call(byref(address), _IpcHandle.from_buffer_copy(handle), _IPC_LAZY_ENABLE_PEER_ACCESS)
    return address.value


def close_handle(address: int) -> None:
    """Undo ``open_handle``. An error is ignored: the mapping ends with its context."""
    _driver().released.cuIpcCloseMemHandle(address)


def read_bytes(address: int, nbytes: int, device: torch.device) -> bytes:
    """Copy ``nbytes`` at a mapped address to the host. The copy waits for no other work of ``device``."""
    calls = _driver().released
    found, stream = ctypes.create_string_buffer(nbytes), _HANDLE()
    with _context_of(device):
        calls.cuStreamCreate(byref(stream), _STREAM_NON_BLOCKING)
        try:
            calls.cuMemcpyDtoHAsync_v2(found, address, nbytes, stream)
            calls.cuStreamSynchronize(stream)
        finally:
            calls.cuStreamDestroy_v2(stream)
    return found.raw


def register_host(address: int, nbytes: int, device: torch.device, *, read_only: bool) -> None:
    """Page-lock a whole mapping of host memory until ``unregister_host``. Kernels of ``device`` then use it at the
    addresses that the host uses. Takes 0.1 ms per MiB. ``read_only``: it is mapped without PROT_WRITE.

    Raises:
        TransportError: CUDA refused.
    """
    # The runtime's cudaHostRegister always makes memory portable and mapped; the driver does so only with these flags.
    flags = _HOST_PORTABLE | _HOST_DEVICEMAP | (_HOST_READ_ONLY if read_only else 0)
    try:
        with _context_of(device):
            _driver().released.cuMemHostRegister_v2(address, nbytes, flags)
    except TransportError as error:
        raise TransportError(f"{nbytes} bytes of staging memory cannot be page-locked: {error}") from None


def unregister_host(address: int, device: torch.device) -> None:
    """Undo ``register_host``, between the last kernel that uses the memory and its unmapping. An error is logged."""
    try:
        with _context_of(device):
            _driver().released.cuMemHostUnregister(address)
    except TransportError as error:
        logger.warning("kvferry: staging memory stays page-locked: %s", error)
