"""The converting unpack of ``convert`` on host memory. Axes ``[L, B, H, N, C]``.

Numbers are converted into a scratch buffer in wire order, some heads of one layer at a time, and copied from there to
the pages. The scratch buffer stays in the cache of the core, and each torch operation is large enough to outweigh the
time of the interpreter.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from kvferry.kernels.convert import FORMATS, Conversion
from kvferry.kernels.paged_copy import Pages, wire_pages
from kvferry.kernels.paged_copy_host import copy_pages_host

SCRATCH_BYTES = 256 << 10
"""Bytes of float32 that are converted at a time. One head of one layer is the least."""


def unpack_converted_host(
    pages: Pages, address: int, conversion: Conversion, *, num_heads: int, num_tokens: int
) -> None:
    """``unpack_converted`` on host memory. Done on return."""
    src, dst = FORMATS[conversion.src], FORMATS[conversion.dst]
    head_elements = num_tokens * conversion.content
    step = max(1, SCRATCH_BYTES // (4 * head_elements))
    for layer in range(len(pages.bases)):
        for head in range(0, num_heads, step):
            heads = min(step, num_heads - head)
            first = address + (layer * num_heads + head) * head_elements * src.itemsize
            nbytes = heads * head_elements * src.itemsize
            wire = torch.frombuffer((ctypes.c_char * nbytes).from_address(first), dtype=torch.uint8).view(src.dtype)
            shape = (heads, num_tokens, conversion.content)
            converted = _convert(wire.view(shape), conversion, layer)
            scratch = wire_pages(converted.data_ptr(), 1, heads, num_tokens, conversion.content * dst.itemsize)
            target = replace(pages, bases=pages.bases[layer : layer + 1], head=pages.head + head)
            copy_pages_host(
                target, scratch, num_heads=heads, num_tokens=num_tokens, content_bytes=conversion.content * dst.itemsize
            )


def _convert(wire: torch.Tensor, conversion: Conversion, layer: int) -> torch.Tensor:
    """Convert numbers of one layer, ``[..., C]``, to the destination's dtype."""
    dst = FORMATS[conversion.dst]
    numbers = wire.to(torch.float32, copy=True)
    halves = (numbers[..., : conversion.keys], numbers[..., conversion.keys :])
    scales = zip(conversion.src_scales[layer], conversion.dst_scales[layer], strict=True)
    for half, (src_scale, dst_scale) in zip(halves, scales, strict=True):
        if half.numel() and (src_scale, dst_scale) != (1.0, 1.0):
            half.mul_(float(src_scale)).div_(float(dst_scale))
    return numbers.clamp_(-dst.maximum, dst.maximum).to(dst.dtype)
