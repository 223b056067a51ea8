"""``paged_decode`` on a GPU: one program per sequence and KV head goes through the tokens tile by tile."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16
"""Query heads of one KV head, filled up to what ``tl.dot`` takes."""
_TILE = 64


@triton.jit
def _decode_kernel(
    q, cache, tables, out, scale, num_tokens, q_heads,
    table_stride, block_stride, token_stride, head_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, d, n = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TILE)
    at = (sequence * q_heads + head * GROUP + row[:, None]) * DIM + d[None, :]
    mine = (row < GROUP)[:, None]
    queries = tl.load(q + at, mask=mine, other=0.0)
    highest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    sums = tl.zeros([ROWS, DIM], dtype=tl.float32)
    for first in range(0, num_tokens, TILE):
        token = first + n
        block = tl.load(tables + sequence * table_stride + token // BLOCK).to(tl.int64)
        page = cache + block * block_stride + (token % BLOCK) * token_stride + head * head_stride
        keys = tl.load(page[None, :] + d[:, None])
        scores = tl.dot(queries, keys) * scale
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        values = tl.load(page[:, None] + DIM + d[None, :])
        sums = sums * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
    tl.store(out + at, (sums / total[:, None]).to(out.dtype.element_ty), mask=mine)


def paged_decode_triton(q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """As ``paged_decode`` says."""
    sequences, q_heads, dim = q.shape
    _, block_size, heads, _ = cache.shape
    group = q_heads // heads
    assert group <= _ROWS and num_tokens % _TILE == 0 and cache.stride(3) == 1 and tables.stride(1) == 1
    q = q.contiguous()
    out = torch.empty_like(q)
    _decode_kernel[(sequences, heads)](
        q, cache, tables, out, dim**-0.5, num_tokens, q_heads,
        tables.stride(0), cache.stride(0), cache.stride(1), cache.stride(2),
        GROUP=group, DIM=dim, BLOCK=block_size, ROWS=_ROWS, TILE=_TILE, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out
