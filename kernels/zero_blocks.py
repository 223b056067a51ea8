"""Zeroing of blocks of a KV cache. A block lies in several segments of memory, which are zeroed whole."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Segments:
    """The S segments of each block: segment s of block b begins at address ``addresses[s] + b * strides[s]`` and has
    ``sizes[s]`` bytes. All arrays are int64 [S], in bytes. Addresses are absolute, so segments may lie in several
    allocations."""

    addresses: npt.NDArray[np.int64]
    strides: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


def zero_blocks(segments: Segments, block_ids: npt.NDArray[np.int64], *, device: torch.device) -> None:
    """Zero all segments of the blocks ``block_ids`` (int64 [n]). The caller guarantees that every address is mapped. On
    ``cpu`` the work is done on return. On a GPU it is enqueued on the current stream of ``device``."""
    if not len(block_ids) or not len(segments.addresses):
        return
    if device.type == "cpu":
        sizes = segments.sizes.tolist()
        for starts in (segments.addresses + block_ids[:, None] * segments.strides).tolist():
            for start, size in zip(starts, sizes, strict=True):
                ctypes.memset(start, 0, size)
    else:
        from kvferry.kernels.zero_blocks_triton import zero_blocks_triton

        zero_blocks_triton(segments, block_ids, device=device)
