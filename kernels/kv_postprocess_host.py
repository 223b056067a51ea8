"""The exchange of ``kv_postprocess`` on host memory. Axes ``[B, H, N, C]``.

Whole groups of blocks go through one buffer that stays in the cache of the core: as many groups as fit are read before
any of them is written. Complex128 is the widest element of torch, see ``paged_copy_host``.
"""

from __future__ import annotations

import torch

from kvferry.kernels.kv_postprocess import Exchange

_BOUNCE_BYTES = 512 << 10
"""Size of the buffer, or of one group where that is larger. The buffer stays in the L2 cache."""
_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_index_out = torch.ops.aten.index.Tensor_out


def exchange_host(cache: torch.Tensor, indices: torch.Tensor, exchange: Exchange) -> None:
    """Perform ``exchange`` on host memory. The caller has checked ``indices``."""
    pages = _pages(cache, exchange)
    groups = indices.to(torch.int64).reshape(-1, exchange.group)
    _, parts, outer, inner, rows, words = pages.shape
    block_bytes = pages[0].numel() * pages.element_size()
    step = max(1, _BOUNCE_BYTES // (exchange.group * block_bytes))
    blocks = min(step, len(groups)) * exchange.group
    bounce = torch.empty((blocks, *pages.shape[1:]), dtype=pages.dtype, device="cpu")
    for first in range(0, len(groups), step):
        ids = groups[first : first + step]
        received = bounce[: ids.numel()]
        _index_out(pages, [ids.reshape(-1)], out=received)
        by_p = received.view(len(ids), parts, inner, exchange.group, outer, rows, words)
        pages.index_put_((ids,), by_p.permute(0, 3, 1, 4, 2, 5, 6))


def _pages(cache: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """The cache as ``[B, parts, outer, inner, rows, words]``; ``outer`` counts the units of one block and part."""
    outer = exchange.outer // exchange.group
    strides = (
        exchange.block_stride,
        outer * exchange.outer_stride,
        exchange.outer_stride,
        exchange.inner_stride,
        exchange.row_stride,
    )
    start = int(cache.storage_offset()) * cache.element_size()
    bits = cache.data_ptr() | start | exchange.content | 16
    for stride in strides:
        bits |= stride
    word = bits & -bits
    # A new tensor on the same storage: one made under inference mode cannot be written outside of it.
    memory = torch.empty(0, dtype=_WORDS[word], device="cpu").set_(cache.untyped_storage())
    return memory.as_strided(
        (len(cache), exchange.parts, outer, exchange.inner, exchange.rows, exchange.content // word),
        (*(stride // word for stride in strides), 1),
        start // word,
    )
