"""Cases of the block zeroing, and an oracle that zeroes byte by byte; nothing of the code under test but its types."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.kernels.zero_blocks import Segments


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


class Arena:
    """Memory of ones with room after the last segment, and where it begins."""

    def __init__(self, case: Case) -> None:
        nbytes = max(offset + case.blocks * stride + size for offset, stride, size in case.segments) + 64
        self._raw = np.full(nbytes + 256, 255, dtype=np.uint8)
        start = -self._raw.ctypes.data % 64 + 64 + case.shift
        self.memory = self._raw
        self.start = start
        self.segments = Segments(
            np.array([self._raw.ctypes.data + start + offset for offset, _, _ in case.segments], dtype=np.int64),
            np.array([stride for _, stride, _ in case.segments], dtype=np.int64),
            np.array([size for _, _, size in case.segments], dtype=np.int64),
        )


def expected(case: Case, arena: Arena) -> np.ndarray:
    """The whole memory, guard bytes included, after the blocks were zeroed."""
    want = arena.memory.copy()
    for offset, stride, size in case.segments:
        for block in case.block_ids:
            for byte in range(size):
                want[arena.start + offset + block * stride + byte] = 0
    return want
