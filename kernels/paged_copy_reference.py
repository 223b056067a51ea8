"""The copy of ``paged_copy`` on host memory, and the reference of the Triton kernel. Axes ``[L, B, H, N, C]``."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.paged_copy import Pages

_FIRST = 64
_memory = torch.frombuffer((ctypes.c_char * ((1 << 56) - _FIRST)).from_address(_FIRST), dtype=torch.uint8)
"""All of the address space as one tensor; element i is the byte at address ``_FIRST + i``."""


def _addresses(pages: Pages, num_heads: int, num_tokens: int) -> npt.NDArray[np.int64]:
    """Address of (l, h, t, 0), int64 ``[L, H, T]``."""
    token = pages.token + np.arange(num_tokens)
    of_token = pages.block_ids[token // pages.block_size] * pages.block_stride
    of_token += token % pages.block_size * pages.token_stride
    of_head = (pages.head + np.arange(num_heads)) * pages.head_stride
    return np.asarray(pages.bases[:, None, None] + of_head[:, None] + of_token)


def copy_pages_reference(dst: Pages, src: Pages, *, num_heads: int, num_tokens: int, content_bytes: int) -> None:
    """``copy_pages`` for host memory."""
    to = _addresses(dst, num_heads, num_tokens).reshape(-1)
    of = _addresses(src, num_heads, num_tokens).reshape(-1)
    to0, of0 = int(to.min()), int(of.min())
    shape = (content_bytes,)
    target = _memory.as_strided((int(to.max()) - to0 + 1, *shape), (1, 1), to0 - _FIRST)
    source = _memory.as_strided((int(of.max()) - of0 + 1, *shape), (1, 1), of0 - _FIRST)
    target.index_copy_(0, torch.from_numpy(to - to0), source.index_select(0, torch.from_numpy(of - of0)))
