"""Cases of the block zeroing, and an oracle that zeroes byte by byte; nothing of the code under test but its types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.kernels.zero_blocks import Segments, zero_blocks


@dataclass(frozen=True)
class Case:
    """Segments ``(offset, stride, size)`` in bytes from the arena's start, ``shift`` after a 64-byte boundary."""

    segments: tuple[tuple[int, int, int], ...]
    block_ids: tuple[int, ...]
    blocks: int = 6
    shift: int = 0


CASES = {
    "one": Case(((0, 64, 64),), (3,)),
    "gaps": Case(((0, 96, 32), (48, 96, 16)), (0, 5, 2)),
    "two-regions": Case(((0, 256, 256), (6 * 256, 256, 256)), (4, 1)),
    "sizes-differ": Case(((0, 80, 16), (1000, 48, 48), (2000, 8, 8)), (5, 0)),
    "several-tiles": Case(((0, 40_000, 39_992), (6 * 40_000, 16_400, 16_392)), (2, 5)),
    "words-of-four": Case(((4, 36, 20),), (1, 2)),
    "words-of-two": Case(((0, 34, 34), (6 * 34, 14, 14)), (0, 4)),
    "bytes": Case(((1, 33, 21), (6 * 33 + 5, 11, 11)), (5, 3, 1)),
    "odd-start": Case(((0, 64, 64),), (1,), shift=3),
    "one-byte": Case(((0, 2, 1),), (5,)),
}


def differing(case: Case, device: torch.device, zero: Callable[..., None] = zero_blocks) -> int:
    """Bytes that are not the oracle's after the blocks of a memory of ones were zeroed on a device, guards included."""
    nbytes = max(offset + case.blocks * stride + size for offset, stride, size in case.segments)
    memory = torch.full((nbytes + 256,), 255, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % 64 + 64 + case.shift
    want = np.full(len(memory), 255, dtype=np.uint8)
    for offset, stride, size in case.segments:
        for block in case.block_ids:
            want[start + offset + block * stride :][:size] = 0
    offsets, strides, sizes = np.array(case.segments, dtype=np.int64).T
    segments = Segments(memory.data_ptr() + start + offsets, strides, sizes)
    zero(segments, np.array(case.block_ids, dtype=np.int64), device=device)
    assert 0 in want
    return int(np.count_nonzero(memory.cpu().numpy() != want))
