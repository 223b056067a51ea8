"""The dtypes that ``convert`` converts, by their bits, and a conversion. Imports no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A floating-point dtype by its bits: sign, exponent, mantissa, from the top."""

    mantissa: int
    """Explicit bits."""
    bias: int
    max_bits: int
    """The largest finite number. Above it lie infinity, if the format has one, and NaN."""
    nan_bits: int
    """The NaN that the kernel writes."""
    has_infinity: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return (self.max_bits.bit_length() + 1) // 8

    @property
    def maximum(self) -> float:
        """The largest finite number."""
        exponent, rest = divmod(self.max_bits, 1 << self.mantissa)
        return float((1 + rest / (1 << self.mantissa)) * 2.0 ** (exponent - self.bias))

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number of full precision."""
        return 2.0 ** (1 - self.bias)

    @property
    def relative_error(self) -> float:
        """Bound on the relative error of rounding a number between the smallest normal and the largest one."""
        return 2.0 ** -(self.mantissa + 1)

    @property
    def absolute_error(self) -> float:
        """Bound on the error of rounding a number below the smallest normal one: half the smallest number."""
        return self.smallest_normal * self.relative_error


FORMATS = {
    "float32": FloatFormat(23, 127, 0x7F7FFFFF, 0x7FC00000),
    "bfloat16": FloatFormat(7, 127, 0x7F7F, 0x7FC0),
    "float16": FloatFormat(10, 15, 0x7BFF, 0x7E00),
    "float8_e4m3fn": FloatFormat(3, 7, 0x7E, 0x7F, has_infinity=False),
    "float8_e5m2": FloatFormat(2, 15, 0x7B, 0x7F),
}
"""The formats, by torch's names of the dtypes. Each is converted to each."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """How numbers on the wire (``src``) become numbers in the pages (``dst``)."""

    src: str
    """A name in ``FORMATS``, as ``dst``."""
    dst: str
    content: int
    """C, in elements."""
    keys: int
    """Elements of K in it."""
    src_scales: Float32s
    """``[L, 2]``: of K and of V of each layer of the copy, 1 where a dtype has none."""
    dst_scales: Float32s
