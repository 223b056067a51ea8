"""GPU memory that processes share: CUDA's driver calls for it, and nothing else. Addresses and sizes are in bytes."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

from kvferry.transport.errors import PlaneUnavailableError, TransportError

HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""


def load() -> tuple[Any, Any]:
    """The bindings that PyTorch's CUDA builds depend on, of the driver and of the runtime. The first call takes 0.1 s.

    Raises:
        PlaneUnavailableError: they are not installed.
    """
    try:
        from cuda.bindings import driver, runtime
    except ImportError as error:
        raise PlaneUnavailableError(f"{error}; pip install cuda-bindings") from None
    return driver, runtime


def _driver() -> Any:
    return load()[0]


def use(device: torch.device) -> None:
    """Make ``device`` and its context this thread's; PyTorch leaves that to the first call that needs them."""
    _done("cudaSetDevice", load()[1].cudaSetDevice(device.index))


def _done(what: str, answer: tuple[Any, ...]) -> Any:
    """The result of a driver call, without its status. Raises TransportError where that is not success."""
    status, *result = answer
    if int(status) != 0:
        raise TransportError(f"{what}: {getattr(status, 'name', status)}")
    return result[0] if len(result) == 1 else result


class _Allocation:
    """Memory of its own, not from PyTorch's pool: with expandable segments that has no IPC handles."""

    def __init__(self, nbytes: int) -> None:
        self._address = int(_done("cuMemAlloc", _driver().cuMemAlloc(nbytes)))
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (self._address, False), "version": 3,
        }  # fmt: skip

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            with contextlib.suppress(Exception):  # at the end of the interpreter the driver may be gone
                _driver().cuMemFree(self._address)


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] on ``device`` that other processes can map.

    Raises:
        TransportError: there is not so much memory.
    """
    use(device)
    return torch.as_tensor(_Allocation(nbytes), device=device)


def allocation_at(address: int) -> tuple[int, int]:
    """First address and size of the allocation that ``address`` lies in."""
    driver = _driver()
    base, size = _done("cuMemGetAddressRange", driver.cuMemGetAddressRange(address))
    return int(base), int(size)


def handle_of(base: int) -> bytes:
    """The IPC handle of an allocation, ``HANDLE_BYTES``.

    Raises:
        PlaneUnavailableError: it has none, and why.
    """
    driver = _driver()
    capable = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    if not _done("cuPointerGetAttribute", driver.cuPointerGetAttribute(capable, base)):
        raise PlaneUnavailableError(
            "the KV cache lies in virtual memory of CUDA (expandable_segments of PYTORCH_CUDA_ALLOC_CONF, or vLLM's "
            "sleep mode), which has no IPC handle; switch that off"
        )
    handle = _done("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(base))
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def open_handle(handle: bytes) -> int:
    """Map another process's allocation into this thread's context. Takes up to tens of milliseconds.

    Raises:
        TransportError: its GPU cannot be reached from ours, it is gone, or it is this very process's.
    """
    driver = _driver()
    ours = driver.CUipcMemHandle()
    ctypes.memmove(ours.getPtr(), handle, HANDLE_BYTES)
    lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
    return int(_done("cuIpcOpenMemHandle", driver.cuIpcOpenMemHandle(ours, lazily)))


def close_handle(address: int) -> None:
    """Unmap what ``open_handle`` mapped."""
    with contextlib.suppress(TransportError):  # the mapping went with its context
        _done("cuIpcCloseMemHandle", _driver().cuIpcCloseMemHandle(address))


def uuid_of(device: torch.device) -> str:
    """The GPU's, the same in all processes."""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_peer(device: torch.device, uuid: str) -> None:
    """That ``device`` can reach the GPU of that UUID, if this process sees it; else mapping its memory will tell.

    Raises:
        TransportError: it cannot.
    """
    for other in range(torch.cuda.device_count()):
        theirs = other != device.index and uuid_of(torch.device("cuda", other)) == uuid
        if theirs and not torch.cuda.can_device_access_peer(device.index, other):
            raise TransportError(f"GPU {device.index} has no peer access to GPU {other}")


def read(address: int, nbytes: int, device: torch.device) -> bytes:
    """Bytes at a mapped address, copied on a stream of their own."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        there = torch.as_tensor(_Place(address, nbytes), device=device)
        return bytes(there.cpu().numpy().tobytes())


class _Place:
    """Memory that somebody else keeps."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
