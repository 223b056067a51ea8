"""Staging memory: a bounded pool of slots of one size."""

from __future__ import annotations

import contextlib

import torch

from kvferry.transport import cuda
from kvferry.transport.channels import CPU, Slot
from kvferry.transport.errors import TransportError


def empty_page_locked(nbytes: int) -> torch.Tensor:
    """Page-locked host memory, uint8 [nbytes], which kernels of a GPU use in place.

    PyTorch rounds the size of the allocation up to a power of two. Needs CUDA.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class SlotPool:
    """Slots of ``slot_bytes`` out of at most ``limit_bytes`` of memory, allocated when first needed.

    The slots lie on ``device``; ``page_locked``: in host memory that kernels of a GPU can use. ``in_one_piece``: all
    are allocated together, as they always are on a GPU. ``slab``: or they lie there, uint8 [limit_bytes].
    """

    def __init__(
        self,
        slot_bytes: int,
        limit_bytes: int,
        device: torch.device = CPU,
        *,
        page_locked: bool = False,
        in_one_piece: bool = False,
        slab: torch.Tensor | None = None,
    ) -> None:
        assert device == CPU or not page_locked
        self.slot_bytes, self.capacity = slot_bytes, max(1, limit_bytes // slot_bytes)
        self._device, self._page_locked = device, page_locked
        self._in_one_piece = in_one_piece or device.type == "cuda"
        self.slab = slab
        """The memory of all slots, uint8 [capacity * slot_bytes], where it was allocated in one piece."""
        self._free: list[Slot] = []
        self._slots: list[Slot] = []

    @property
    def free(self) -> int:
        """The number of slots that ``take`` can still return."""
        return self.capacity - len(self._slots) + len(self._free)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory allocated so far."""
        return (len(self._slots) if self.slab is None else self.capacity) * self.slot_bytes

    def take(self) -> Slot | None:
        """A slot, the most recently used one first (its bytes may still be in the cache); ``None`` if all are taken."""
        if (slot := self.reuse()) is not None or len(self._slots) >= self.capacity:
            return slot
        self.prepare()
        if self.slab is not None:
            tensor = self.slab[len(self._slots) * self.slot_bytes :][: self.slot_bytes]
        else:
            tensor = self._empty(self.slot_bytes)
        self._slots.append(Slot(tensor, len(self._slots)))
        return self._slots[-1]

    def reuse(self) -> Slot | None:
        """A slot that was used before, if any is free. By any thread."""
        with contextlib.suppress(IndexError):
            return self._free.pop()
        return None

    def put(self, slot: Slot) -> None:
        """Put a slot from ``take`` back."""
        assert slot is self._slots[slot.index] and slot not in self._free
        self._free.append(slot)

    def clear(self) -> None:
        """Forget the memory: it is freed once no slot that was taken is left."""
        self._free, self._slots, self.slab = [], [], None

    def prepare(self) -> None:
        """Allocate all slots that lie in one piece: peers map or register the piece once, which takes milliseconds."""
        if self._in_one_piece and self.slab is None:
            self.slab = self._empty(self.capacity * self.slot_bytes)

    def _empty(self, nbytes: int) -> torch.Tensor:
        if self._page_locked:
            try:
                return empty_page_locked(nbytes)
            except RuntimeError as error:
                raise TransportError(
                    f"no {nbytes >> 20} MiB of page-locked host memory for staging: {str(error).splitlines()[0]}; "
                    "lower staging_bytes"
                ) from None
        if self._device.type == "cuda":
            return cuda.allocate(nbytes, self._device)
        return torch.empty(nbytes, dtype=torch.uint8)
