"""``zero_blocks`` on host memory."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvferry.kernels.zero_blocks import Segments


def zero_blocks_host(segments: Segments, block_ids: npt.NDArray[np.int64]) -> None:
    """``zero_blocks`` on host memory, block by block and segment by segment. Done on return."""
    sizes = segments.sizes.tolist()
    for starts in (segments.addresses + block_ids[:, None] * segments.strides).tolist():
        for start, size in zip(starts, sizes, strict=True):
            ctypes.memset(start, 0, size)
