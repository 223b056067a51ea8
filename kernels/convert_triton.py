"""The converting unpack of ``convert`` as one Triton kernel, in one pass. Axes ``[L, B, H, N, C]``.

The kernel decodes and rounds by integer arithmetic on the bits, so it needs no hardware conversion: fp8 e4m3 exists on
compute capability 8.9 and up only, and Triton's interpreter rounds bfloat16 and fp8 wrongly (seen in Triton 3.5 to
3.7). Tiles and programs are as in ``paged_copy_triton``. Triton compiles the kernel once per pair of dtypes, alignment
and tile shape.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.kernels.float_formats import FORMATS, Conversion, FloatFormat
from kvferry.kernels.launch import DeviceTable, variant_of
from kvferry.kernels.paged_copy import Pages, wire_pages
from kvferry.kernels.paged_copy_triton import (
    MAX_TILES,
    SCALAR_ARGS,
    alignment,
    launch_shape,
    num_programs,
    row_addresses,
    side_arguments,
    tile_shape,
)

_INTEGERS = {4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Type that holds the bits of an element, by its bytes."""


@triton.jit
def _decode(bits, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr, MAX_BITS: tl.constexpr,
            INFINITY: tl.constexpr):  # fmt: skip
    """float32 values of the numbers whose bits are ``bits``, int32."""
    magnitude = bits & ((1 << (8 * SIZE - 1)) - 1) if SIZE < 4 else bits & 0x7FFFFFFF
    # The exponent is 127 - BIAS too low. Multiplication by a power of two corrects it, for subnormal numbers as well.
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
    """Bits, int32, of the numbers of the format that are nearest to ``number``, ties to even. A number beyond the
    largest finite one becomes that one."""
    word = number.to(tl.int32, bitcast=True)
    magnitude = word & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = tl.minimum(magnitude, MAXIMUM)  # positive floats have the same order as their bits
    if MANTISSA < 23:
        SHIFT: tl.constexpr = 23 - MANTISSA
        odd = (magnitude >> SHIFT) & 1
        found = ((magnitude + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT) - ((127 - BIAS) << MANTISSA)
        if BIAS != 127:
            # Below the smallest normal number, the addition of this power of two rounds to the format's last bit.
            MAGIC: tl.constexpr = (127 + 1 - BIAS + SHIFT) << 23
            added = magnitude.to(tl.float32, bitcast=True) + 2.0 ** (1 - BIAS + SHIFT)
            found = tl.where(magnitude < (128 - BIAS) << 23, added.to(tl.int32, bitcast=True) - MAGIC, found)
    else:
        found = magnitude
    found = tl.where(is_nan, NAN_BITS, found)
    return found | (((word >> 31) & 1) << (8 * SIZE - 1))


@triton.jit(do_not_specialize=[*SCALAR_ARGS, "keys", "scales"])
def convert_kernel(
    table, heads: tl.int32, tokens: tl.int32, vectors: tl.int32, tiles: tl.int32,
    dst_base: tl.int64, dst_layer: tl.int64, dst_bases: tl.int32, dst_ids: tl.int32, dst_size: tl.int32,
    dst_block: tl.int64, dst_head: tl.int64, dst_token: tl.int64, dst_first: tl.int32,
    src_base: tl.int64, src_layer: tl.int64, src_bases: tl.int32, src_ids: tl.int32, src_size: tl.int32,
    src_block: tl.int64, src_head: tl.int64, src_token: tl.int64, src_first: tl.int32,
    keys: tl.int32, scales: tl.int32,
    SRC: tl.constexpr, SRC_MANTISSA: tl.constexpr, SRC_BIAS: tl.constexpr, SRC_SIZE: tl.constexpr,
    SRC_MAX_BITS: tl.constexpr, SRC_ALIGN: tl.constexpr, SRC_INFINITY: tl.constexpr,
    DST: tl.constexpr, DST_MANTISSA: tl.constexpr, DST_BIAS: tl.constexpr, DST_SIZE: tl.constexpr,
    DST_MAX_BITS: tl.constexpr, DST_ALIGN: tl.constexpr, DST_MAXIMUM: tl.constexpr, DST_NAN_BITS: tl.constexpr,
    CONTENT_ALIGN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Converts tiles ``program_id, program_id + num_programs, ...``. ``table`` and scalars are as in
    ``paged_copy_triton``. A row has ``vectors`` vectors of CONTENT_ALIGN elements; its first ``keys`` elements belong
    to K. At index ``scales`` of the table begin the float32 bits of the scales, four numbers per layer: of K and of V
    of the source, of K and of V of the destination."""
    content = vectors * CONTENT_ALIGN  # tells the compiler that CONTENT_ALIGN divides it: else accesses are narrow
    tiles_t, tiles_w = tl.cdiv(tokens, BLOCK_T), tl.cdiv(content, BLOCK_W)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        w = (tile % tiles_w) * BLOCK_W + tl.arange(0, BLOCK_W)
        rest = tile // tiles_w
        t = (rest % tiles_t) * BLOCK_T + tl.arange(0, BLOCK_T)
        rest = rest // tiles_t
        head, layer = rest % heads, rest // heads

        mask_t = t < tokens
        src_row = row_addresses(
            table, src_base, src_layer, src_bases, src_ids, src_size, src_block, src_head, src_token, src_first, layer,
            head, t, mask_t,
        )  # fmt: skip
        dst_row = row_addresses(
            table, dst_base, dst_layer, dst_bases, dst_ids, dst_size, dst_block, dst_head, dst_token, dst_first, layer,
            head, t, mask_t,
        )  # fmt: skip
        src_row = tl.multiple_of(tl.multiple_of(src_row, SRC_ALIGN).to(tl.pointer_type(SRC)), SRC_ALIGN)
        dst_row = tl.multiple_of(tl.multiple_of(dst_row, DST_ALIGN).to(tl.pointer_type(DST)), DST_ALIGN)
        mask = mask_t[:, None] & (w < content)[None, :]
        src_bits = tl.load(src_row[:, None] + w[None, :], mask=mask, other=0).to(tl.int32)
        number = _decode(src_bits, SRC_MANTISSA, SRC_BIAS, SRC_SIZE, SRC_MAX_BITS, SRC_INFINITY)

        of_layer = table + scales + 4 * layer
        src_k, src_v = _scale(of_layer), _scale(of_layer + 1)
        dst_k, dst_v = _scale(of_layer + 2), _scale(of_layer + 3)
        is_key = w < keys
        number *= tl.where(is_key, src_k, src_v)[None, :]
        number = tl.div_rn(number, tl.where(is_key, dst_k, dst_v)[None, :] + tl.zeros_like(number))
        dst_bits = _encode(number, DST_MANTISSA, DST_BIAS, DST_SIZE, DST_MAX_BITS, DST_MAXIMUM, DST_NAN_BITS)
        tl.store(dst_row[:, None] + w[None, :], dst_bits.to(DST), mask=mask)


@triton.jit
def _scale(entry):
    return tl.load(entry).to(tl.int32).to(tl.float32, bitcast=True)


def unpack_converted_triton(
    pages: Pages, address: int, conversion: Conversion, *, num_heads: int, num_tokens: int, device: torch.device,
    sms: int | None = None,
) -> None:  # fmt: skip
    """``unpack_converted`` on a GPU, enqueued on the current stream of ``device``. ``sms`` is as in
    ``copy_pages_triton``."""
    shape = launch_shape(sms)
    src, dst = FORMATS[conversion.src], FORMATS[conversion.dst]
    content = conversion.content
    wire = wire_pages(address, len(pages.bases), num_heads, num_tokens, content * src.itemsize)
    block_t, block_w = tile_shape(content, max(src.itemsize, dst.itemsize), shape)
    tiles = len(pages.bases) * num_heads * -(-num_tokens // block_t) * -(-content // block_w)
    assert tiles <= MAX_TILES and num_tokens + pages.block_size <= MAX_TILES
    arrays, scales_at, scalars = side_arguments(pages, wire, num_tokens)
    scales = np.concatenate([conversion.src_scales, conversion.dst_scales], axis=1, dtype=np.float32)
    table = DeviceTable(*arrays, scales.view(np.int32).reshape(-1).astype(np.int64))
    content_align = min(content & -content, 16)
    scalars = (num_heads, num_tokens, content // content_align, tiles, *scalars, conversion.keys, scales_at)
    programs = num_programs(tiles, device, sms)
    src_align = alignment(wire, num_heads, num_tokens, content * src.itemsize)
    dst_align = alignment(pages, num_heads, num_tokens, content * dst.itemsize)
    constants = *format_constants(src, src_align, dst, dst_align), content_align, block_t, block_w
    variant_of(convert_kernel, shape.num_warps, constants)(programs, table, device, scalars)


def format_constants(src: FloatFormat, src_align: int, dst: FloatFormat, dst_align: int) -> tuple[object, ...]:
    """The kernel's constants from SRC to DST_NAN_BITS, in its order."""
    of, to = (
        (_INTEGERS[form.itemsize], form.mantissa, form.bias, form.itemsize, form.max_bits, align)
        for form, align in ((src, src_align), (dst, dst_align))
    )
    return *of, src.has_infinity, *to, int(np.float32(dst.maximum).view(np.int32)), dst.nan_bits
