"""``sum64`` of ``checksum`` on a GPU: copies to and from the wire that add up the words in the same pass.

Axes ``[L, B, H, N, C]``. Two kernels for each message. The first one copies as ``paged_copy_triton`` does; each of its
programs adds the sum of its own words to one of ``_LANES`` numbers in device memory. The second one adds up these
numbers, sets them back to 0, and writes or compares the checksum behind the message. Kernels of a stream run one after
the other, so the numbers need no other order, and each program's addition may be relaxed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.kernels.checksum import WireCheck, seed
from kvferry.kernels.launch import DeviceTable, Launcher, Variant
from kvferry.kernels.paged_copy import wire_pages
from kvferry.kernels.paged_copy_triton import (
    _DTYPES,
    SCALAR_ARGS,
    LaunchShape,
    _row_addresses,
    alignment,
    launch_shape,
    num_programs,
    side_arguments,
    tile_shape,
)
from kvferry.transport import cuda

_LANES = 64
"""Numbers that the programs of a kernel add to. One number alone would be a queue for thousands of programs."""


@triton.jit
def _key(number):
    """Keys of the 32-bit words with these numbers, uint32 as uint64."""
    key = (number + 1).to(tl.uint32)
    key ^= key >> 16
    key *= 0x7FEB352D
    key ^= key >> 15
    key *= 0x846CA68B
    key ^= key >> 16
    return key.to(tl.uint64)


@triton.jit
def _products(data, at, WORD: tl.constexpr):
    """Products of words of WORD bytes with their keys, uint64. ``at``: the number of each word in its message."""
    if WORD == 8:
        bits = data.to(tl.uint64, bitcast=True)
        return (bits & 0xFFFFFFFF) * _key(2 * at) + (bits >> 32) * _key(2 * at + 1)
    elif WORD == 4:
        return data.to(tl.uint32, bitcast=True).to(tl.uint64) * _key(at)
    elif WORD == 2:
        return (data.to(tl.uint16, bitcast=True).to(tl.uint64) << (16 * (at & 1)).to(tl.uint64)) * _key(at >> 1)
    else:
        return (data.to(tl.uint8, bitcast=True).to(tl.uint64) << (8 * (at & 3)).to(tl.uint64)) * _key(at >> 2)


@triton.jit(do_not_specialize=[*SCALAR_ARGS, "lanes"])
def _copy_kernel(
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
    lanes: tl.int64,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    ALIGN: tl.constexpr,
    WORDS_ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    COPY: tl.constexpr,
    LANES: tl.constexpr,
):
    """The kernel of ``paged_copy_triton``, whose arguments it has, with sums. COPY False: it sums, and stores nothing.

    ``lanes``: address of LANES numbers, uint64. WORD: bytes of DTYPE.
    """
    words = vectors * WORDS_ALIGN  # tells the compiler that WORDS_ALIGN divides it
    tiles_t, tiles_w = tl.cdiv(tokens, BLOCK_T), tl.cdiv(words, BLOCK_W)
    products = tl.zeros([BLOCK_T, BLOCK_W], dtype=tl.uint64)
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
        # An address from a table carries no alignment. Without the hints, loads and stores become scalar.
        src_row = tl.multiple_of(tl.multiple_of(src_row, ALIGN).to(tl.pointer_type(DTYPE)), ALIGN)
        mask = mask_t[:, None] & (w < words)[None, :]
        data = tl.load(src_row[:, None] + w[None, :], mask=mask, other=0)
        if COPY:
            dst_row = _row_addresses(
                table, dst_base, dst_layer, dst_bases, dst_ids, dst_size, dst_block, dst_head, dst_token, dst_first,
                layer, head, t, mask_t,
            )  # fmt: skip
            dst_row = tl.multiple_of(tl.multiple_of(dst_row, ALIGN).to(tl.pointer_type(DTYPE)), ALIGN)
            tl.store(dst_row[:, None] + w[None, :], data, mask=mask)
        row = (layer * heads + head) * tokens + t
        products += _products(data, row[:, None] * words + w[None, :], WORD)
    lane = lanes.to(tl.pointer_type(tl.uint64)) + tl.program_id(0) % LANES
    tl.atomic_add(lane, tl.sum(tl.sum(products, 1), 0), sem="relaxed")


@triton.jit(do_not_specialize=["lanes", "start", "trailer", "verdict"])
def _finish_kernel(
    table, lanes: tl.int64, start: tl.int64, trailer: tl.int64, verdict: tl.int64, LANES: tl.constexpr
):  # fmt: skip
    """One program: the checksum from the sums, which become 0. It is written to address ``trailer``; or, where
    ``verdict`` is not 0, compared with the checksum there."""
    lane = lanes.to(tl.pointer_type(tl.uint64)) + tl.arange(0, LANES)
    sums = tl.load(lane)
    tl.store(lane, tl.zeros([LANES], dtype=tl.uint64))
    value = tl.sum(sums, 0) ^ start.to(tl.uint64, bitcast=True)
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD
    value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53
    value = value ^ (value >> 33)
    at = tl.arange(0, 8)  # a message of any length: its checksum need not lie at a multiple of 8
    ours = (tl.zeros([8], dtype=tl.uint64) + value) >> (8 * at).to(tl.uint64)
    place = trailer.to(tl.pointer_type(tl.uint8)) + at
    if verdict == 0:
        tl.store(place, ours.to(tl.uint8))
    else:
        differ = tl.sum((tl.load(place) != ours.to(tl.uint8)).to(tl.int32), 0)
        tl.store(verdict.to(tl.pointer_type(tl.int64)), (differ != 0).to(tl.int64))


_copy, _finish = Launcher(_copy_kernel), Launcher(_finish_kernel)
_of_thread = threading.local()


def enqueue(
    table: DeviceTable,
    scalars: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    align: int,
    device: torch.device,
    sms: int | None,
    wire: int,
    check: WireCheck,
    *,
    copy: bool = True,
) -> None:
    """Launch both kernels on the current stream of ``device``. The message lies at address ``wire``, and is one of the
    two sides. ``scalars``: of dst, then of src, in the order of ``SCALAR_ARGS``. ``sizes``: layers, heads, tokens,
    content bytes."""
    layers, heads, tokens, content = sizes
    shape = launch_shape(sms)
    variant, block_t, tiles_w = _variant(content, align, shape, copy=copy)
    tiles = layers * heads * -(-tokens // block_t) * tiles_w
    nbytes = layers * heads * tokens * content
    assert nbytes < 1 << 31 and tokens + scalars[4] + scalars[13] < 1 << 31
    lanes, signed = _lanes(device), int(np.uint64(seed(check.tag, nbytes)).astype(np.int64))
    try:
        programs = num_programs(tiles, device, sms)
        variant(programs, table, device, (heads, tokens, content // align, tiles, *scalars, lanes.data_ptr()))
        finish = lanes.data_ptr(), signed, wire + nbytes, check.verdict
        _finish.variant(1, (_LANES,))(1, table, device, finish)
    except BaseException:
        _of_thread.__dict__.clear()  # the numbers may have sums of a message that was given up
        raise


def check_wire(
    address: int, num_layers: int, num_heads: int, num_tokens: int, content_bytes: int, device: torch.device,
    sms: int | None, check: WireCheck,
) -> None:  # fmt: skip
    """The checksum of a message ``[num_layers, num_heads, num_tokens, content_bytes]`` at ``address``, without a
    copy."""
    wire = wire_pages(address, num_layers, num_heads, num_tokens, content_bytes)
    arrays, _, scalars = side_arguments(wire, wire, num_tokens)
    align = alignment(wire, num_heads, num_tokens, content_bytes)
    sizes = num_layers, num_heads, num_tokens, content_bytes
    enqueue(DeviceTable(*arrays), scalars, sizes, align, device, sms, address, check, copy=False)


@functools.lru_cache(maxsize=256)
def _variant(content: int, align: int, shape: LaunchShape, *, copy: bool) -> tuple[Variant, int, int]:
    """The kernel for rows of ``content`` bytes, the tokens of a tile, and the tiles of a row."""
    word = min(align, max(_DTYPES))
    words = content // word
    block_t, block_w = tile_shape(words, word, shape)
    constants = _DTYPES[word], word, align, align // word, block_t, block_w, copy, _LANES
    return _copy.variant(shape.num_warps, constants), block_t, -(-words // block_w)


def _lanes(device: torch.device) -> torch.Tensor:
    """The numbers of this thread for its current stream on ``device``, all of them 0 between two messages."""
    lanes_of: dict[Any, torch.Tensor] = _of_thread.__dict__
    key = device, cuda.current_stream(device) if device.type == "cuda" else 0
    if key not in lanes_of:
        lanes_of[key] = torch.zeros(_LANES, dtype=torch.int64, device=device)
    return lanes_of[key]
