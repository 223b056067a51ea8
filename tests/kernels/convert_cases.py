"""Cases of the converting unpack, and an oracle that knows the dtypes by their definitions. Axes ``[L,B,H,N,C]``.

No conversion of torch's or NumPy's is used to judge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from kvferry.kernels.convert import unpack_converted
from kvferry.kernels.float_formats import Conversion
from tests.kernels.paged_copy_cases import Arena, Layout, positions

# Exponent bits, mantissa bits, bits of the largest finite number, whether infinity follows it. IEEE 754 for the wider
# ones, "FP8 Formats for Deep Learning" (arXiv 2209.05433) for fp8.
DEFINED = {
    "float32": (8, 23, 0x7F7FFFFF, True),
    "bfloat16": (8, 7, 0x7F7F, True),
    "float16": (5, 10, 0x7BFF, True),
    "float8_e4m3fn": (4, 3, 0x7E, False),
    "float8_e5m2": (5, 2, 0x7B, True),
}
NAMES = tuple(DEFINED)


def width(name: str) -> int:
    """Bits of a number."""
    exponent, mantissa = DEFINED[name][:2]
    return 1 + exponent + mantissa


def unsigned(name: str) -> np.dtype:
    return np.dtype(f"u{width(name) // 8}")


def decoded(name: str, bits: np.ndarray) -> np.ndarray:
    """What the bits mean, float64."""
    exponent_bits, mantissa_bits, largest, infinite = DEFINED[name]
    bits = bits.astype(np.int64)
    negative, magnitude = bits >> (width(name) - 1), bits & ((1 << (width(name) - 1)) - 1)
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    normal = (1.0 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias).astype(np.float64)
    subnormal = mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias)
    found = np.where(exponent > 0, normal, subnormal)
    found[magnitude > largest] = np.nan
    if infinite:
        found[magnitude == largest + 1] = np.inf
    return np.where(negative == 1, -found, found)


@cache
def _finite(name: str) -> np.ndarray:
    """All finite numbers from 0 up, float64; index and bits are the same. Not for float32, of which there are 2^31."""
    return decoded(name, np.arange(DEFINED[name][2] + 1))


def encoded(name: str, numbers: np.ndarray) -> np.ndarray:
    """Bits of the nearest finite numbers, ties to even, of float64; NaN is the dtype's own first."""
    if name == "float32":
        largest = decoded(name, np.array([DEFINED[name][2]]))[0]
        with np.errstate(invalid="ignore"):
            found = np.clip(numbers, -largest, largest).astype(np.float32).view(np.uint32).astype(np.int64)
        return np.where(np.isnan(numbers), 0x7FC00000, found)
    finite, size = _finite(name), np.abs(numbers)
    above = np.clip(np.searchsorted(finite, size), 1, len(finite) - 1)
    low, high = size - finite[above - 1], finite[above] - size
    nearest = np.where(low < high, above - 1, np.where(high < low, above, above - above % 2))
    nearest = np.where(np.signbit(numbers), nearest | 1 << (width(name) - 1), nearest)
    return np.where(np.isnan(numbers), DEFINED[name][2] + 1 + DEFINED[name][3], nearest)


def converted(conversion: Conversion, wire: np.ndarray) -> np.ndarray:
    """Bits of what wire bits ``[L, ..., C]`` become. Scales are applied in float32, one rounding each."""
    keys = np.arange(conversion.content) < conversion.keys
    shape = (len(wire), *(1,) * (wire.ndim - 2), conversion.content)
    of, to = (
        np.where(keys, scales[:, :1], scales[:, 1:]).reshape(shape).astype(np.float32)
        for scales in (conversion.src_scales, conversion.dst_scales)
    )
    with np.errstate(all="ignore"):
        numbers = decoded(conversion.src, wire).astype(np.float32) * of / to
    assert numbers.dtype == np.float32
    return encoded(conversion.dst, numbers.astype(np.float64)).astype(unsigned(conversion.dst))


def same(name: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Whether bits are the same number, elementwise; any NaN is as good as another."""
    both = np.isnan(decoded(name, left)) & np.isnan(decoded(name, right))
    return (left == right) | both


def telling(name: str) -> np.ndarray:
    """Bits of numbers of a dtype: all there are, or for float32 those that decide how others round."""
    if name != "float32":
        return np.arange(1 << width(name), dtype=unsigned(name))
    rng = np.random.default_rng(0)
    found = [rng.integers(0, 1 << 32, 20000, dtype=np.uint32), np.array([0, 0x7F800000, 0x7FC00000], dtype=np.uint32)]
    for other in NAMES[1:]:
        finite = _finite(other)
        finite = finite[:: max(1, len(finite) // 2000)]
        around = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, finite[-1:] * 1.01]).astype(np.float32)
        bits = around.view(np.uint32)
        found += [bits, bits + np.uint32(1), np.where(bits > 0, bits - np.uint32(1), bits)]
    both = np.concatenate(found)
    return np.concatenate([both, both ^ np.uint32(1 << 31)])


@dataclass(frozen=True)
class Case:
    """One unpack into pages that lie as ``layout`` says; ``scaled``: layers have scales of their own on both sides."""

    layout: Layout
    src: str = "bfloat16"
    dst: str = "float8_e4m3fn"
    layers: int = 2
    heads: int = 3
    tokens: int = 40
    content: int = 24
    keys: int = 12
    head: int = 0
    token: int = 0
    scaled: bool = True

    def conversion(self) -> Conversion:
        rng = np.random.default_rng(1)
        scales = [np.ones((self.layers, 2), dtype=np.float32) for _ in range(2)]
        if self.scaled:
            scales = [rng.uniform(0.01, 3.0, (self.layers, 2)).astype(np.float32) for _ in range(2)]
        return Conversion(self.src, self.dst, self.content, self.keys, *scales)

    def arena(self) -> Arena:
        """D's pages."""
        return Arena(
            self.layout, layers=self.layers, heads=self.heads + self.head, head=self.head, token=self.token,
            content=self.content * width(self.dst) // 8, tokens=self.tokens, rng=np.random.default_rng(2),
        )  # fmt: skip

    def wire(self) -> np.ndarray:
        """Bits ``[L, H, T, C]``, contiguous; every number of the source dtype has its turn."""
        bits = telling(self.src)
        shape = (self.layers, self.heads, self.tokens, self.content)
        return np.random.default_rng(3).choice(bits, shape)


def differing(case: Case, device: torch.device, unpack: Callable[..., None] = unpack_converted, **how: object) -> int:
    """Numbers that are not the oracle's after the unpack on a device, and bytes beside them that changed; guards and
    unused blocks included. Of NaN only that it is one. The wire does not change."""
    arena, wire = case.arena(), case.wire()
    content = case.content * width(case.dst) // 8
    places = positions(arena, heads=case.heads, tokens=case.tokens, content=content).reshape(-1)
    before, wanted = arena.memory.copy(), converted(case.conversion(), wire).reshape(-1)
    pages, memory = arena.on(device)
    sent = torch.from_numpy(wire.view(np.uint8)).to(device)
    size = {"num_heads": case.heads, "num_tokens": case.tokens}
    unpack(pages, sent.data_ptr(), case.conversion(), **size, device=device, **how)
    after = memory.cpu().numpy()
    wrong = ~same(case.dst, np.ascontiguousarray(after[places]).view(unsigned(case.dst)), wanted)
    changed = (after != before) & ~np.isin(np.arange(len(after)), places)
    return int(wrong.sum() + changed.sum() + (sent.cpu().numpy() != case.wire().view(np.uint8)).sum())


PAIRS = [(src, dst) for src in NAMES for dst in NAMES]
CASES = {
    **{
        f"{src}-{dst}": Case(Layout(("HND", "NHD")[n % 2]), src, dst, layers=1, heads=2, tokens=40, scaled=n % 3 > 0)
        for n, (src, dst) in enumerate(PAIRS)
    },
    "into-a-token-in-the-middle": Case(Layout(), token=7, tokens=50),
    "into-some-heads": Case(Layout("NHD"), head=2, heads=2),
    "into-padded-pages": Case(Layout(pad=(8, 16, 24)), dst="float16", src="float8_e5m2"),
    "into-interleaved-layers": Case(Layout("NHD", interleaved=True), layers=4),
    "into-layers-anywhere": Case(Layout(block_size=8, places=(0, 2, 1, 6)), layers=4),
    "odd-content-odd-address": Case(Layout(shift=3), content=13, keys=6),
    "keys-longer-than-values": Case(Layout(), content=24, keys=17),
    "keys-only": Case(Layout(consecutive=True), heads=1, content=18, keys=18, src="float16"),
    "values-only": Case(Layout(), keys=0, dst="bfloat16", src="float8_e4m3fn"),
    "one-token-one-head-one-layer": Case(Layout("NHD"), layers=1, heads=1, tokens=1, content=1, keys=1),
    "more-than-the-scratch-holds": Case(Layout(), heads=2, tokens=900, content=128, keys=64, layers=1),
}
