"""The converting unpack of ``convert`` as one Triton kernel, in one pass. Axes ``[L, B, H, N, C]``.

Decoding and rounding are integer arithmetic on the bits. So the kernel needs no hardware conversion: fp8 e4m3 exists on
compute capability 8.9 and up only, and the interpreter rounds bfloat16 and fp8 wrongly (seen in Triton 3.5 to 3.7).
Tiles and programs are those of ``paged_copy_triton``; it is compiled per pair of dtypes and content alignment.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.kernels.convert import FORMATS, Conversion, FloatFormat
from kvferry.kernels.launch import Launcher, Table
from kvferry.kernels.paged_copy import Pages, wire_pages
from kvferry.kernels.paged_copy_triton import (
    NUMBERS,
    _row_addresses,
    alignment,
    form_for,
    num_programs,
    sides,
    tile_shape,
)

_INTEGERS = {4: tl.int32, 2: tl.int16, 1: tl.int8}
_MAX_TILES = (1 << 31) - 1


@triton.jit
def _decode(bits, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr, MAX_BITS: tl.constexpr,
            INFINITY: tl.constexpr):  # fmt: skip
    """float32 of the numbers whose bits are given, int32."""
    magnitude = bits & ((1 << (8 * SIZE - 1)) - 1) if SIZE < 4 else bits & 0x7FFFFFFF
    # The exponent lands 127 - BIAS too low, and a power of two makes up for it, for subnormal numbers as well.
    number = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    if BIAS != 127:
        number *= 2.0 ** (127 - BIAS)
        number = tl.where(magnitude > MAX_BITS, float("nan"), number)
        if INFINITY:
            number = tl.where(magnitude == MAX_BITS + 1, float("inf"), number)
    negative = (bits >> (8 * SIZE - 1)) & 1
    return (number.to(tl.int32, bitcast=True) | (negative << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _encode(number, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr, MAX_BITS: tl.constexpr,
            MAXIMUM: tl.constexpr, NAN_BITS: tl.constexpr):  # fmt: skip
    """Bits, int32, of the numbers nearest to the given ones, ties to even; at most the largest finite one."""
    word = number.to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, MAXIMUM)  # bits of floats of one sign are ordered as the floats are
    if MANTISSA < 23:
        SHIFT: tl.constexpr = 23 - MANTISSA
        odd = (magnitude >> SHIFT) & 1
        found = ((magnitude + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT) - ((127 - BIAS) << MANTISSA)
        if BIAS != 127:
            # Below the smallest normal number the addition of this power of two rounds to the last bit there is.
            MAGIC: tl.constexpr = (127 + 1 - BIAS + SHIFT) << 23
            added = magnitude.to(tl.float32, bitcast=True) + 2.0 ** (1 - BIAS + SHIFT)
            found = tl.where(magnitude < (128 - BIAS) << 23, added.to(tl.int32, bitcast=True) - MAGIC, found)
    else:
        found = magnitude
    found = tl.where(is_nan, NAN_BITS, found)
    return found | (((word >> 31) & 1) << (8 * SIZE - 1))


@triton.jit(do_not_specialize=[*NUMBERS, "keys", "scales"])
def _convert_kernel(
    table,
    heads: tl.int32,
    tokens: tl.int32,
    vectors: tl.int32,
    tiles: tl.int32,
    dst_base: tl.int64,
    dst_layer: tl.int64,
    dst_bases: tl.int32,
    dst_ids: tl.int32,
    dst_size: tl.int32,
    dst_block: tl.int64,
    dst_head: tl.int64,
    dst_token: tl.int64,
    dst_first: tl.int32,
    src_base: tl.int64,
    src_layer: tl.int64,
    src_bases: tl.int32,
    src_ids: tl.int32,
    src_size: tl.int32,
    src_block: tl.int64,
    src_head: tl.int64,
    src_token: tl.int64,
    src_first: tl.int32,
    keys: tl.int32,
    scales: tl.int32,
    SRC: tl.constexpr,
    SRC_MANTISSA: tl.constexpr,
    SRC_BIAS: tl.constexpr,
    SRC_SIZE: tl.constexpr,
    SRC_MAX_BITS: tl.constexpr,
    SRC_ALIGN: tl.constexpr,
    SRC_INFINITY: tl.constexpr,
    DST: tl.constexpr,
    DST_MANTISSA: tl.constexpr,
    DST_BIAS: tl.constexpr,
    DST_SIZE: tl.constexpr,
    DST_MAX_BITS: tl.constexpr,
    DST_ALIGN: tl.constexpr,
    DST_MAXIMUM: tl.constexpr,
    DST_NAN_BITS: tl.constexpr,
    CONTENT_ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """``table`` and numbers as in ``paged_copy_triton``, a row is ``vectors`` of CONTENT_ALIGN elements, the first
    ``keys`` of them of keys. From ``scales`` on the table goes on with the float32 bits of the scales of K and V by
    layer, source then destination."""
    content = vectors * CONTENT_ALIGN  # or the mask would make words narrow
    tiles_t, tiles_w = tl.cdiv(tokens, BLOCK_T), tl.cdiv(content, BLOCK_W)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        w = (tile % tiles_w) * BLOCK_W + tl.arange(0, BLOCK_W)
        rest = tile // tiles_w
        t = (rest % tiles_t) * BLOCK_T + tl.arange(0, BLOCK_T)
        rest = rest // tiles_t
        head, layer = rest % heads, rest // heads

        mask_t = t < tokens
        src_row = _row_addresses(
            table, src_base, src_layer, src_bases, src_ids, src_size, src_block, src_head, src_token, src_first, layer,
            head, t, mask_t,
        )  # fmt: skip
        dst_row = _row_addresses(
            table, dst_base, dst_layer, dst_bases, dst_ids, dst_size, dst_block, dst_head, dst_token, dst_first, layer,
            head, t, mask_t,
        )  # fmt: skip
        src_row = tl.multiple_of(tl.multiple_of(src_row, SRC_ALIGN).to(tl.pointer_type(SRC)), SRC_ALIGN)
        dst_row = tl.multiple_of(tl.multiple_of(dst_row, DST_ALIGN).to(tl.pointer_type(DST)), DST_ALIGN)
        mask = mask_t[:, None] & (w < content)[None, :]
        bits = tl.load(src_row[:, None] + w[None, :], mask=mask, other=0).to(tl.int32)
        number = _decode(bits, SRC_MANTISSA, SRC_BIAS, SRC_SIZE, SRC_MAX_BITS, SRC_INFINITY)

        four = table + scales + 4 * layer
        k_of, v_of = _scale(four), _scale(four + 1)
        k_to, v_to = _scale(four + 2), _scale(four + 3)
        is_key = w < keys
        number *= tl.where(is_key, k_of, v_of)[None, :]
        number = tl.div_rn(number, tl.where(is_key, k_to, v_to)[None, :] + tl.zeros_like(number))
        found = _encode(number, DST_MANTISSA, DST_BIAS, DST_SIZE, DST_MAX_BITS, DST_MAXIMUM, DST_NAN_BITS)
        tl.store(dst_row[:, None] + w[None, :], found.to(DST), mask=mask)


@triton.jit
def _scale(entry):
    return tl.load(entry).to(tl.int32).to(tl.float32, bitcast=True)


_kernel = Launcher(_convert_kernel)


def unpack_converted_triton(
    pages: Pages,
    address: int,
    conversion: Conversion,
    *,
    num_heads: int,
    num_tokens: int,
    device: torch.device,
    sms: int | None = None,
) -> None:
    """``unpack_converted`` on a GPU: enqueued on the current stream of ``device``. ``sms`` as in
    ``copy_pages_triton``."""
    form = form_for(sms)
    of, to = FORMATS[conversion.src], FORMATS[conversion.dst]
    content = conversion.content
    wire = wire_pages(address, len(pages.bases), num_heads, num_tokens, content * of.itemsize)
    block_t, block_w = tile_shape(content, max(of.itemsize, to.itemsize), form)
    tiles = len(pages.bases) * num_heads * -(-num_tokens // block_t) * -(-content // block_w)
    assert tiles <= _MAX_TILES and num_tokens + pages.block_size <= _MAX_TILES
    arrays, length, places = sides(pages, wire, num_tokens)
    scales = np.concatenate([conversion.src_scales, conversion.dst_scales], axis=1, dtype=np.float32)
    table = Table(*arrays, scales.view(np.int32).reshape(-1).astype(np.int64))
    content_align = min(content & -content, 16)
    numbers = (num_heads, num_tokens, content // content_align, tiles, *places, conversion.keys, length)
    programs = num_programs(tiles, device, sms)
    constants = (
        *_source(of, alignment(wire, num_heads, num_tokens, content * of.itemsize)),
        *_destination(to, alignment(pages, num_heads, num_tokens, content * to.itemsize)),
        content_align,
        block_t,
        block_w,
    )
    _kernel.variant(form.num_warps, constants)(programs, table, device, numbers)


def _source(form: FloatFormat, align: int) -> tuple[object, ...]:
    """What the kernel is compiled for, of the side that it reads, in its order."""
    return (*_both(form, align), form.has_infinity)


def _destination(form: FloatFormat, align: int) -> tuple[object, ...]:
    """Of the side that it writes."""
    return (*_both(form, align), int(np.float32(form.maximum).view(np.int32)), form.nan_bits)


def _both(form: FloatFormat, align: int) -> tuple[object, ...]:
    return _INTEGERS[form.itemsize], form.mantissa, form.bias, form.itemsize, form.max_bits, align
