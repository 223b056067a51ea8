"""Unpacking that converts: wire numbers of one dtype to pages of another. Axes ``[L, B, H, N, C]``.

L layers, B blocks, H KV heads, N tokens in a block, C elements per (head, token), of which the first ``keys`` belong to
K and the rest to V. An element that is stored as x means x times its layer's scale of K or of V. What is written is
``x * src_scale / dst_scale`` in float32, rounded once to the nearest number of the new dtype, ties to even.

These are the steps of vLLM on a GPU: its attention multiplies what it loads from an fp8 cache by the scale, its cache
write divides by it and rounds (``scaled_convert``: ``__nv_cvt_float_to_fp8``, ``__NV_SATFINITE``). As there, what is
too large becomes the largest finite number, infinity too, and NaN stays NaN; no inf in float16 either. vLLM's cache
write on a CPU (0.32) also saturates, but cuts numbers off instead of rounding them, and makes NaN the largest number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.paged_copy import Pages

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A floating-point dtype by its bits: sign, exponent, ``mantissa`` bits, from the top.

    ``max_bits`` is the largest finite number; above it lie infinity, where there is one, and NaN. ``nan_bits`` is the
    NaN that is written.
    """

    dtype: torch.dtype
    mantissa: int
    bias: int
    max_bits: int
    nan_bits: int
    has_infinity: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def maximum(self) -> float:
        """The largest finite number."""
        return torch.finfo(self.dtype).max


FORMATS = {
    "float32": FloatFormat(torch.float32, 23, 127, 0x7F7FFFFF, 0x7FC00000),
    "bfloat16": FloatFormat(torch.bfloat16, 7, 127, 0x7F7F, 0x7FC0),
    "float16": FloatFormat(torch.float16, 10, 15, 0x7BFF, 0x7E00),
    "float8_e4m3fn": FloatFormat(torch.float8_e4m3fn, 3, 7, 0x7E, 0x7F, has_infinity=False),
    "float8_e5m2": FloatFormat(torch.float8_e5m2, 2, 15, 0x7B, 0x7F),
}
"""Between these anything is converted; the names are torch's."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """From the numbers on the wire to those of the pages.

    ``src`` and ``dst`` are names in ``FORMATS``; ``content`` is C, in elements; the scales are float32 ``[L, 2]``, of K
    and of V of each layer of the copy, 1 where a dtype has none.
    """

    src: str
    dst: str
    content: int
    keys: int
    src_scales: Float32s
    dst_scales: Float32s


def unpack_converted(
    pages: Pages,
    address: int,
    conversion: Conversion,
    *,
    num_heads: int,
    num_tokens: int,
    device: torch.device,
    sms: int | None = None,
) -> None:
    """Convert contiguous wire elements ``[L, num_heads, num_tokens, C]`` at ``address`` into ``pages``, L =
    ``len(pages.bases)``.

    The caller guarantees what it guarantees for ``copy_pages``. On ``cpu`` it is done on return; on a GPU it is
    enqueued on the current stream of ``device``, and takes ``sms`` of its SMs at most, or all.
    """
    assert len(conversion.src_scales) == len(conversion.dst_scales) == len(pages.bases)
    if num_heads == 0 or num_tokens == 0 or len(pages.bases) == 0:
        return
    if device.type == "cpu":
        from kvferry.kernels.convert_reference import unpack_converted_reference

        unpack_converted_reference(pages, address, conversion, num_heads=num_heads, num_tokens=num_tokens)
    else:
        from kvferry.kernels.convert_triton import unpack_converted_triton

        unpack_converted_triton(
            pages, address, conversion, num_heads=num_heads, num_tokens=num_tokens, device=device, sms=sms
        )
