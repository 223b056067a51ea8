"""Page-locked host memory, which a GPU's kernels read and write in place, at the addresses that the host uses."""

from __future__ import annotations

import contextlib
import logging

import torch

from kvferry.transport.errors import TransportError

logger = logging.getLogger("vllm.kvferry.pinned")

_READ_ONLY = 8
"""cudaHostRegisterReadOnly. A mapping without PROT_WRITE is refused without it."""


def empty(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of the host, page-locked; torch rounds up to a power of two. Needs CUDA."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def register(address: int, nbytes: int, device: torch.device, *, read_only: bool) -> None:
    """Page-lock a whole mapping (0.1 ms per MiB) and let kernels on ``device`` use it, until ``unregister``.

    ``read_only``: it is mapped without PROT_WRITE.

    Raises:
        TransportError: CUDA refused.
    """
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(address, nbytes, _READ_ONLY if read_only else 0))
    if status:
        _clear_sticky_error(device)
        raise TransportError(f"{nbytes} bytes of staging memory cannot be page-locked: CUDA error {status}")


def unregister(address: int, device: torch.device) -> None:
    """Undo ``register``, before the memory is unmapped and after the last kernel that uses it."""
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        status = int(runtime.cudaHostUnregister(address))
    if status:
        _clear_sticky_error(device)
        logger.warning("kvferry: staging memory stays page-locked: CUDA error %d", status)


def _clear_sticky_error(device: torch.device) -> None:
    """CUDA reports a failed call once more, to the next launch of this thread: make one that may fail."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
