"""Attention of one new token per sequence over a paged cache: a stand-in for an engine's decode kernel.

Axes: S sequences, Q query heads, H KV heads, B blocks, N tokens in a block, D head dimension. A cache is
[B, N, H, 2 D], K before V.
"""

from __future__ import annotations

import torch


def paged_decode(q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[S, Q, D] of queries [S, Q, D] over the first ``num_tokens`` of each sequence's blocks, int32 [S, >= T / N].

    On a GPU enqueued on the current stream; there ``num_tokens`` is a multiple of 64, Q / H at most 16, and D a power
    of two from 16 on.
    """
    if q.device.type == "cpu":
        return paged_decode_reference(q, cache, tables, num_tokens)
    from paged_decode_triton import paged_decode_triton

    return paged_decode_triton(q, cache, tables, num_tokens)


def paged_decode_reference(q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The same over pages that are gathered first, in float32."""
    sequences, _, dim = q.shape
    heads = cache.shape[2]
    pages = cache[tables.long()].reshape(sequences, -1, heads, 2 * dim)[:, :num_tokens].float()
    keys, values = pages[..., :dim], pages[..., dim:]
    queries = q.float().reshape(sequences, heads, -1, dim)  # [S, H, Q / H, D]
    weights = (torch.einsum("shgd,sthd->shgt", queries, keys) * dim**-0.5).softmax(-1)
    return torch.einsum("shgt,sthd->shgd", weights, values).reshape(q.shape).to(q.dtype)
