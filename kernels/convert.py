"""The unpack that converts: from wire numbers of one dtype to pages of another dtype. Axes ``[L, B, H, N, C]``.

L layers, B blocks, H KV heads, N tokens in a block, C elements per (head, token), of which the first ``keys`` belong to
K and the rest to V. A stored element x stands for the number x times its layer's scale of K or of V. The kernel
computes ``x * src_scale / dst_scale`` in float32 and rounds it once to the nearest number of the new dtype, ties to
even.

vLLM does the same on a GPU: its attention multiplies each element of an fp8 cache by the scale, and its cache write
divides by the scale and rounds (``scaled_convert``: ``__nv_cvt_float_to_fp8``, ``__NV_SATFINITE``). As in vLLM, a
number beyond the largest finite one becomes that one, infinity too, and NaN stays NaN; float16 gets no infinity either.
vLLM's cache write on a CPU (0.32) also saturates, but it truncates instead of rounding, and turns NaN into the largest
number.
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

    ``max_bits`` are the bits of the largest finite number. Above it lie infinity, if the format has one, and NaN.
    ``nan_bits`` are the bits of the NaN that the kernel writes.
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
"""The formats, by torch's names of the dtypes. Each is converted to each."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """How numbers on the wire (``src``) become numbers in the pages (``dst``).

    ``src`` and ``dst`` are names in ``FORMATS``. ``content`` is C and ``keys`` the elements of K in it, both in
    elements. The scales are float32 ``[L, 2]``: of K and of V of each layer of the copy, 1 where a dtype has none.
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
    """Convert contiguous wire elements ``[L, num_heads, num_tokens, C]`` at ``address`` into ``pages``, with L =
    ``len(pages.bases)``.

    The caller guarantees that all addresses are mapped and that wire and pages do not overlap, as for ``copy_pages``.
    On ``cpu`` the unpack is done on return. On a GPU it is enqueued on the current stream of ``device``, and takes at
    most ``sms`` of its SMs, or all if ``sms`` is None.
    """
    assert len(conversion.src_scales) == len(conversion.dst_scales) == len(pages.bases)
    if num_heads == 0 or num_tokens == 0 or len(pages.bases) == 0:
        return
    if device.type == "cpu":
        from kvferry.kernels.convert_host import unpack_converted_host

        unpack_converted_host(pages, address, conversion, num_heads=num_heads, num_tokens=num_tokens)
    else:
        from kvferry.kernels.convert_triton import unpack_converted_triton

        unpack_converted_triton(
            pages, address, conversion, num_heads=num_heads, num_tokens=num_tokens, device=device, sms=sms
        )
