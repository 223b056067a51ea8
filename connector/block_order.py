"""In which order a backend keeps the elements of a block, read off from what its own writer wrote.

Legend: N tokens in a kernel block, D channels of a key or value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys [N, 1, D] and values [N, 1, D] into the key half and the value half of one cache [1, 1, 2N, D], tokens
to slots [N]."""


def places(
    write: Write, tokens: int, channels: int, *, given: torch.dtype, stored: torch.dtype, held: torch.dtype
) -> NDArray[np.int64] | None:
    """Where ``write`` puts each element inside a (block, head): ``packing.split``.

    It writes a block in which every element carries its number, one digit to the base of 8 at a time, for those are
    exact in every dtype.

    Args:
        given: the dtype of keys and values.
        stored: that of the cache as a tensor; vLLM keeps fp8 as bytes.
        held: what the elements of the cache are.

    Returns:
        [2, N, D] for keys and values; None where the writer takes other arguments.
    """
    numbers = torch.arange(2 * tokens * channels).view(2, tokens, 1, channels)
    found = torch.zeros(2 * tokens * channels, dtype=torch.int64)
    scratch = torch.zeros(1, 1, 2 * tokens, channels, dtype=stored)
    keys, values = scratch.chunk(2, dim=2)
    slots = torch.arange(tokens)
    shift = 0
    while 8**shift < numbers.numel():
        digits = (numbers >> 3 * shift & 7).to(given)
        try:
            write(digits[0], digits[1], keys, values, slots)
        except (TypeError, RuntimeError):
            return None
        found |= scratch.flatten().view(held).to(torch.float32).to(torch.int64) << 3 * shift
        shift += 1
    order = torch.full_like(found, -1)
    order[found.clamp(0, len(found) - 1)] = torch.arange(len(found))
    return order.view(2, tokens, channels).numpy()
