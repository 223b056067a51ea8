"""The exchange of ``kv_postprocess`` as Triton kernels, in place. Axes ``[B, H, N, C]``.

Why it is safe in place: an exchange permutes the units of one matrix among themselves, and the same in every slice of
them (``Exchange``). A *cell* is one slice of all units of one matrix, so no byte of it goes to, or comes from, another
cell. One program takes a whole cell: it reads all of it, waits at a barrier until all of its threads have, and only
then writes. Programs need no order among each other, and no cycle of the permutation is ever followed.

Two kernels differ in where they hold a cell between reading and writing: in registers, where two vectors of every unit
fit; or in scratch memory, with one slab per program, where all slabs together stay in the L2 cache. Triton compiles
each kernel once per width and alignment of a vector, which depend on the local cache.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvferry.kernels.kv_postprocess import Exchange
from kvferry.kernels.paged_copy_triton import num_sms

TILE = 4096
"""Most vectors of a cell in registers: 8 for each of 512 threads. A vector has 16 bytes where the alignment allows."""
NUM_WARPS = 16
"""On an H200, half the tile with half the warps is 5% slower for 128 units, and 33% slower for 512 units."""
SLAB_TILE, SLAB_WARPS = 2048, 8
SLAB_BYTES = 256 << 10
SCRATCH_BYTES = 16 << 20
"""Bytes of all slabs together. One slab is larger only where one vector of every unit is larger."""
_PROGRAMS_PER_SM = 4
_MAX = (1 << 31) - 2 * TILE
"""Limit of every number that the kernels count in 32 bits."""
WORDS = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}
"""Type and number of the words of a vector, by its bytes."""
_SCALAR_ARGS = (
    "base", "block_stride", "outer_stride", "inner_stride", "row_stride", "cells", "outer", "inner", "outer_per_block",
    "rows", "vectors", "width",
)  # fmt: skip
"""Scalar arguments of both kernels, in their order: the address of the cache; strides as in ``Exchange``; cells of the
whole exchange; units of a matrix along its two axes; units of the outer axis that lie in one block; rows of a unit;
vectors of a row; vectors of a slice of a row, of which the last one may be narrower."""


@triton.jit
def _addresses(base, indices, block_stride, outer_stride, inner_stride, outer_per_block, o, i, mask):
    """Byte addresses, int64, of units (o, i). ``o`` counts the units of the outer axis through all matrices."""
    slot = o // outer_per_block
    block = tl.load(indices + slot, mask=mask, other=0).to(tl.int64)
    return base + block * block_stride + (o - slot * outer_per_block).to(tl.int64) * outer_stride + i * inner_stride


@triton.jit
def _vectors(address, DTYPE: tl.constexpr, LANES: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers ``[len(address), LANES]``. A computed address carries no alignment. Without the hint, accesses become
    scalar."""
    start = tl.multiple_of(tl.multiple_of(address, ALIGN).to(tl.pointer_type(DTYPE)), ALIGN)
    return start[:, None] + tl.arange(0, LANES)[None, :]


@triton.jit(do_not_specialize=_SCALAR_ARGS)
def exchange_kernel(
    indices, base: tl.int64, block_stride: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64,
    row_stride: tl.int64, cells: tl.int32, outer: tl.int32, inner: tl.int32, outer_per_block: tl.int32, rows: tl.int32,
    vectors: tl.int32, width: tl.int32,
    DTYPE: tl.constexpr, LANES: tl.constexpr, ALIGN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Exchanges cells that fit a tile. Each program takes every n-th cell, n being the number of programs."""
    # Offsets from the first block of a matrix are the same in every cell, so all divisions are done here, once.
    e = tl.arange(0, TILE)
    unit = e // width
    column = e - unit * width
    p_outer, d_inner = unit // inner, unit // outer
    p_inner, d_outer = unit - p_outer * inner, unit - d_inner * outer
    p_block, d_block = p_outer // outer_per_block, d_outer // outer_per_block
    source = (p_outer - p_block * outer_per_block).to(tl.int64) * outer_stride + p_inner * inner_stride
    target = (d_outer - d_block * outer_per_block).to(tl.int64) * outer_stride + d_inner * inner_stride
    in_cell = e < outer * inner * width
    slices = tl.cdiv(vectors, width)
    for cell in range(tl.program_id(0), cells, tl.num_programs(0)):
        part = cell // slices
        vector = (cell - part * slices) * width + column
        matrix = part // rows
        slot = matrix * outer // outer_per_block
        start = base + (part - matrix * rows) * row_stride + (matrix * outer - slot * outer_per_block) * outer_stride
        mask = in_cell & (vector < vectors)
        p_id = tl.load(indices + slot + p_block, mask=mask, other=0).to(tl.int64)
        d_id = tl.load(indices + slot + d_block, mask=mask, other=0).to(tl.int64)
        row = start + vector.to(tl.int64) * ALIGN
        data = tl.load(_vectors(row + p_id * block_stride + source, DTYPE, LANES, ALIGN), mask=mask[:, None])
        tl.debug_barrier()  # all threads have read before any of them writes
        tl.store(_vectors(row + d_id * block_stride + target, DTYPE, LANES, ALIGN), data, mask=mask[:, None])


@triton.jit(do_not_specialize=(*_SCALAR_ARGS, "scratch", "slab_bytes"))
def exchange_through_scratch_kernel(
    indices, base: tl.int64, block_stride: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64,
    row_stride: tl.int64, cells: tl.int32, outer: tl.int32, inner: tl.int32, outer_per_block: tl.int32, rows: tl.int32,
    vectors: tl.int32, width: tl.int32,
    scratch: tl.int64, slab_bytes: tl.int64, DTYPE: tl.constexpr, LANES: tl.constexpr, ALIGN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Exchanges cells of any size. Each program has a slab of ``slab_bytes`` bytes at ``scratch``."""
    slab = scratch + tl.program_id(0).to(tl.int64) * slab_bytes
    size = outer * inner * width
    slices = tl.cdiv(vectors, width)
    for cell in range(tl.program_id(0), cells, tl.num_programs(0)):
        part = cell // slices
        matrix = part // rows
        start = base + (part - matrix * rows) * row_stride
        begin = (cell - part * slices) * width
        first = matrix * outer
        for at in range(0, size, TILE):
            e = at + tl.arange(0, TILE)
            unit = e // width
            vector = begin + e - unit * width
            mask = (e < size) & (vector < vectors)
            address = start + vector.to(tl.int64) * ALIGN
            o, i = first + unit // inner, unit % inner
            page = _addresses(address, indices, block_stride, outer_stride, inner_stride, outer_per_block, o, i, mask)
            data = tl.load(_vectors(page, DTYPE, LANES, ALIGN), mask=mask[:, None])
            tl.store(_vectors(slab + e.to(tl.int64) * ALIGN, DTYPE, LANES, ALIGN), data, mask=mask[:, None])
        tl.debug_barrier()  # the slab is full, and the cell read, before any thread writes to the pages
        for at in range(0, size, TILE):
            e = at + tl.arange(0, TILE)
            unit = e // width
            column = e - unit * width
            mask = (e < size) & (begin + column < vectors)
            address = start + (begin + column).to(tl.int64) * ALIGN
            o, i = unit // inner, unit % inner
            page = _addresses(
                address, indices, block_stride, outer_stride, inner_stride, outer_per_block, first + o, i, mask
            )
            received = ((i * outer + o) * width + column).to(tl.int64) * ALIGN
            data = tl.load(_vectors(slab + received, DTYPE, LANES, ALIGN), mask=mask[:, None])
            tl.store(_vectors(page, DTYPE, LANES, ALIGN), data, mask=mask[:, None])
        tl.debug_barrier()  # the slab has been read before the next cell fills it


def exchange_triton(
    cache: torch.Tensor, indices: torch.Tensor, exchange: Exchange, *, num_programs: int | None = None
) -> None:
    """Perform ``exchange`` on the GPU of ``cache``, enqueued on its current stream. ``num_programs`` limits the
    programs, which have 8 or 16 warps each. The default is four per SM."""
    bytes_of_vector = alignment(cache, exchange)
    dtype, lanes = WORDS[bytes_of_vector]
    vectors = exchange.content // bytes_of_vector
    units = exchange.outer * exchange.inner
    # A slice of one vector of 16 bytes uses half of every 32-byte sector, which is slower than scratch memory.
    in_registers = units * 2 <= TILE
    width = slice_width(vectors, TILE // units if in_registers else SLAB_BYTES // (units * bytes_of_vector))
    matrices = len(indices) // exchange.group * exchange.parts
    cells = matrices * exchange.rows * -(-vectors // width)
    assert max(cells, units * width, matrices * exchange.outer) <= _MAX, (cells, matrices, exchange)
    scalars = (
        cache.data_ptr(), exchange.block_stride, exchange.outer_stride, exchange.inner_stride, exchange.row_stride,
        cells, exchange.outer, exchange.inner, exchange.outer_per_block, exchange.rows, vectors, width,
    )  # fmt: skip
    constants = {"DTYPE": dtype, "LANES": lanes, "ALIGN": bytes_of_vector}
    indices = indices.contiguous()
    programs = num_programs or (3 if cache.device.type == "cpu" else _PROGRAMS_PER_SM * num_sms(cache.device))
    if in_registers:
        with torch.cuda.device_of(cache):
            exchange_kernel[(min(cells, programs),)](indices, *scalars, **constants, TILE=TILE, num_warps=NUM_WARPS)
        return
    slab_bytes = -(-units * width * bytes_of_vector // 16) * 16
    programs = max(1, min(cells, programs, SCRATCH_BYTES // slab_bytes))
    with torch.cuda.device_of(cache):
        # torch's allocator gives this memory to the next call on this stream at once, and to no other stream while a
        # kernel may still use it. So it is not kept.
        scratch = torch.empty(programs * slab_bytes, dtype=torch.uint8, device=cache.device)
        exchange_through_scratch_kernel[(programs,)](
            indices, *scalars, scratch.data_ptr(), slab_bytes, **constants, TILE=SLAB_TILE, num_warps=SLAB_WARPS
        )


def alignment(cache: torch.Tensor, exchange: Exchange) -> int:
    """The greatest power of two, 16 at most, that divides address and length in bytes of every row of every unit."""
    bits = cache.data_ptr() | exchange.content | exchange.outer_stride | exchange.inner_stride | 16
    if len(cache) > 1:
        bits |= exchange.block_stride
    if exchange.rows > 1:
        bits |= exchange.row_stride
    return bits & -bits


def slice_width(vectors: int, at_most: int) -> int:
    """Vectors of a slice of a row of ``vectors`` vectors. A row has as few slices as ``at_most`` vectors per slice
    allow. All are of equal width except the last."""
    return -(-vectors // -(-vectors // max(1, min(at_most, vectors))))
