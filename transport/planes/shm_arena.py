"""Shared staging memory: a sealed memfd that one process writes and another maps read-only."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from typing import Any

import numpy as np
import torch

from kvferry.transport import cuda
from kvferry.transport.channels import CPU
from kvferry.transport.errors import ProtocolError, TransportError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """``num_slots`` slots of ``slot_bytes``, mapped. ``close``, or the end of the last tensor on it, unmaps the arena.

    For caches of a GPU ``device`` its memory is page-locked from the mapping to just before the unmapping.
    """

    def __init__(
        self, mapping: mmap.mmap, slot_bytes: int, num_slots: int, device: torch.device, *, read_only: bool
    ) -> None:
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self._mapping: mmap.mmap | None = mapping
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] | None = np.frombuffer(mapping, dtype=np.uint8)
        self._address: int = self._bytes.ctypes.data
        if device.type == "cuda":
            cuda.register_host(self._address, len(mapping), device, read_only=read_only)
            # Every tensor on the memory holds this array, and the array holds the mapping. A weak reference to the
            # mapping itself would end only after the unmapping.
            weakref.finalize(self._bytes, cuda.unregister_host, self._address, device).atexit = False

    @classmethod
    def create(cls, slot_bytes: int, num_slots: int, device: torch.device = CPU) -> tuple[Arena, int]:
        """A new arena and its file descriptor, which the caller closes.

        Raises:
            TransportError: there is no memory or no descriptor for it, or it cannot be page-locked.
        """
        fd = -1
        try:
            fd = os.memfd_create("kvferry", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, slot_bytes * num_slots)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(fd, slot_bytes * num_slots)
            return cls(mapping, slot_bytes, num_slots, device, read_only=False), fd
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, OSError):
                raise TransportError(f"shm: no shared memory can be had: {error.strerror}") from None
            raise

    @classmethod
    def attach(cls, fd: int, slot_bytes: int, num_slots: int, device: torch.device = CPU) -> Arena:
        """The arena behind a peer's descriptor, read-only. Takes over ``fd``.

        Raises:
            ProtocolError: the file is not as the peer described it, or could shrink while it is mapped (SIGBUS).
            TransportError: it cannot be mapped, or not page-locked.
        """
        try:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                raise ProtocolError("shm: the peer's descriptor is no memfd") from None
            size = os.fstat(fd).st_size
            if not seals & fcntl.F_SEAL_SHRINK or size != slot_bytes * num_slots:
                raise ProtocolError(
                    f"shm: the peer's memory is {size} bytes with seals {seals:#x}, "
                    f"expected {num_slots} sealed slots of {slot_bytes}"
                )
            try:
                mapping = mmap.mmap(fd, size, prot=mmap.PROT_READ)
            except OSError as error:
                raise TransportError(f"shm: the peer's memory cannot be mapped: {error.strerror}") from None
            return cls(mapping, slot_bytes, num_slots, device, read_only=True)
        finally:
            os.close(fd)

    def address(self, index: int) -> int:
        """Address of a slot's first byte."""
        return self._address + index * self.slot_bytes

    def tensor(self, index: int) -> torch.Tensor:
        """uint8 [slot_bytes] of an arena that was created here; keeps the mapping alive."""
        assert self._bytes is not None
        return torch.from_numpy(self._bytes[index * self.slot_bytes : (index + 1) * self.slot_bytes])

    def close(self) -> None:
        """Unmap the arena, at once or as soon as the last tensor on it is gone. Idempotent."""
        self._bytes = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a slot's tensor is alive: the mapping ends with it
                mapping.close()
