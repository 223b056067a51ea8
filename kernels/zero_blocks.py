"""Zero blocks of a KV cache: whole pages, in as many places of memory as a block has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Segments:
    """The S places where a block lies: bytes ``addresses[s] + b * strides[s]`` up to ``+ sizes[s]`` are block b's.

    All int64 [S]; absolute byte addresses, so that segments may live in several allocations.
    """

    addresses: npt.NDArray[np.int64]
    strides: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]


def zero_blocks(segments: Segments, block_ids: npt.NDArray[np.int64], *, device: torch.device) -> None:
    """Zero blocks ``block_ids`` (int64 [n]) in every segment.

    The caller guarantees that every address is mapped. On ``cpu`` it is done on return; on a GPU it is enqueued on the
    current stream of ``device``.
    """
    if not len(block_ids) or not len(segments.addresses):
        return
    if device.type == "cpu":
        from kvferry.kernels.zero_blocks_reference import zero_blocks_reference

        zero_blocks_reference(segments, block_ids)
    else:
        from kvferry.kernels.zero_blocks_triton import zero_blocks_triton

        zero_blocks_triton(segments, block_ids, device=device)
