"""Staging memory: a bounded pool of slots of one size."""

from __future__ import annotations

import torch

from kvferry.transport import cuda
from kvferry.transport.channels import CPU, Slot


def empty_page_locked(nbytes: int) -> torch.Tensor:
    """Page-locked host memory, uint8 [nbytes], which kernels of a GPU use in place.

    PyTorch rounds the size of the allocation up to a power of two. Needs CUDA.
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class SlotPool:
    """Slots of ``slot_bytes`` out of at most ``limit_bytes`` of memory, allocated when first needed.

    A slot is free, in use, or retired: a retired one is in the hands of a request that can neither be cancelled nor
    waited for, so it is never handed out again until ``revive``, and stays accounted against the limit.

    They lie on ``device``; ``page_locked``: in host memory that kernels of a GPU can use.
    """

    def __init__(
        self, slot_bytes: int, limit_bytes: int, device: torch.device = CPU, *, page_locked: bool = False
    ) -> None:
        assert device == CPU or not page_locked
        self.slot_bytes = slot_bytes
        self.capacity = max(1, limit_bytes // slot_bytes)
        self._device = device
        self._page_locked = page_locked
        self._free: list[Slot] = []
        self._slab: torch.Tensor | None = None
        self._retired: set[int] = set()
        self._slots: list[Slot] = []

    @property
    def free(self) -> int:
        """Slots that ``take`` can still hand out."""
        return self.capacity - len(self._slots) + len(self._free)

    @property
    def retired(self) -> int:
        """Slots that are lost until the request that holds them ends."""
        return len(self._retired)

    @property
    def allocated_bytes(self) -> int:
        """Memory taken so far."""
        return (len(self._slots) if self._slab is None else self.capacity) * self.slot_bytes

    def take(self) -> Slot | None:
        """A slot, the most recently used one first (its bytes may still be in the cache); ``None`` if all are taken."""
        if self._free:
            return self._free.pop()
        if len(self._slots) >= self.capacity:
            return None
        slot = Slot(self._allocate(), len(self._slots))
        self._slots.append(slot)
        return slot

    def put(self, slot: Slot) -> None:
        """Return a slot that ``take`` gave."""
        assert slot is self._slots[slot.index] and slot not in self._free
        self._free.append(slot)

    def retire(self, slot: Slot) -> None:
        """Mark a taken slot as lost: something may still write to it."""
        assert slot is self._slots[slot.index] and slot not in self._free
        self._retired.add(slot.index)

    def revive(self, slot: Slot) -> None:
        """The request that held a retired slot has ended after all."""
        self._retired.remove(slot.index)
        self.put(slot)

    def _allocate(self) -> torch.Tensor:
        if self._page_locked:
            return empty_page_locked(self.slot_bytes)
        if self._device.type == "cuda":
            self.prepare()
            assert self._slab is not None
            return self._slab[len(self._slots) * self.slot_bytes :][: self.slot_bytes]
        return torch.empty(self.slot_bytes, dtype=torch.uint8)

    def prepare(self) -> None:
        """Allocate slots on a GPU, all in one piece: peers map it once, which takes them milliseconds."""
        if self._device.type == "cuda" and self._slab is None:
            self._slab = cuda.allocate(self.capacity * self.slot_bytes, self._device)
