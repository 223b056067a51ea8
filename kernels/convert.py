"""The unpack that converts: from wire numbers of one dtype to pages of another dtype. Axes ``[L, B, H, N, C]``.

L layers, B blocks, H KV heads, N tokens in a block, C elements per (head, token), of which the first ``keys`` belong to
K and the rest to V. A stored element x stands for the number x times its layer's scale of K or of V. The kernel
computes ``x * src_scale / dst_scale`` in float32 and rounds it once to the nearest number of the new dtype, ties to
even.

vLLM does the same on a GPU (``scaled_convert``). As there, a number beyond the largest finite one becomes that one,
infinity too, and NaN stays NaN; float16 gets no infinity either. vLLM's cache write on a CPU (0.32) also saturates, but
it truncates instead of rounding, and turns NaN into the largest number.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from kvferry.kernels.float_formats import FORMATS, Conversion
from kvferry.kernels.paged_copy import Pages, copy_pages_host, wire_pages

SCRATCH_BYTES = 256 << 10
"""Bytes of float32 that are converted at a time on host memory. One head of one layer is the least."""


def unpack_converted(
    pages: Pages, address: int, conversion: Conversion, *, num_heads: int, num_tokens: int, device: torch.device,
    sms: int | None = None,
) -> None:  # fmt: skip
    """Convert contiguous wire elements ``[L, num_heads, num_tokens, C]`` at ``address`` into ``pages``, with L =
    ``len(pages.bases)``. The caller guarantees that all addresses are mapped and that wire and pages do not overlap, as
    for ``copy_pages``. On ``cpu`` the unpack is done on return. On a GPU it is enqueued on the current stream of
    ``device``, and takes at most ``sms`` of its SMs, or all if ``sms`` is None."""
    assert len(conversion.src_scales) == len(conversion.dst_scales) == len(pages.bases)
    if num_heads == 0 or num_tokens == 0 or len(pages.bases) == 0:
        return
    if device.type == "cpu":
        _on_host(pages, address, conversion, num_heads=num_heads, num_tokens=num_tokens)
    else:
        from kvferry.kernels.convert_triton import unpack_converted_triton

        unpack_converted_triton(
            pages, address, conversion, num_heads=num_heads, num_tokens=num_tokens, device=device, sms=sms
        )


def _on_host(pages: Pages, address: int, conversion: Conversion, *, num_heads: int, num_tokens: int) -> None:
    """Numbers are converted into a scratch buffer in wire order, some heads of one layer at a time, and copied from
    there to the pages. The buffer stays in the cache of the core, and each torch operation outweighs the time of the
    interpreter."""
    src, dst = FORMATS[conversion.src], FORMATS[conversion.dst]
    head_elements = num_tokens * conversion.content
    step = max(1, SCRATCH_BYTES // (4 * head_elements))
    for layer in range(len(pages.bases)):
        for head in range(0, num_heads, step):
            heads = min(step, num_heads - head)
            first = address + (layer * num_heads + head) * head_elements * src.itemsize
            nbytes = heads * head_elements * src.itemsize
            wire = torch.frombuffer((ctypes.c_char * nbytes).from_address(first), dtype=torch.uint8).view(
                getattr(torch, conversion.src)
            )
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
    return numbers.clamp_(-dst.maximum, dst.maximum).to(getattr(torch, conversion.dst))
