"""``zero_blocks`` as one Triton kernel over absolute addresses.

A tile is up to 16 KiB of one (block, segment). All arrays lie in one int64 table in device memory, so Triton compiles
the kernel once per width of a word and tile width.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvferry.kernels.launch import DeviceTable, variant_of
from kvferry.kernels.paged_copy_triton import DTYPES, MAX_TILES
from kvferry.kernels.zero_blocks import Segments

TILE_BYTES = 16 << 10
NUM_WARPS = 8


@triton.jit(do_not_specialize=["segments", "tiles"])
def zero_kernel(
    table, segments: tl.int32, tiles: tl.int32, DTYPE: tl.constexpr, ALIGN: tl.constexpr, WORDS_ALIGN: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Zeroes one tile. ``table`` holds the addresses of all segments, then their strides in bytes, then their sizes in
    words, then the block ids. ``segments`` counts the segments, ``tiles`` the tiles of the largest segment. Every
    segment begins at a multiple of ALIGN bytes and has a multiple of WORDS_ALIGN words of type DTYPE."""
    tile = tl.program_id(0) % tiles
    rest = tl.program_id(0) // tiles
    segment, block = rest % segments, rest // segments
    words = tl.multiple_of(tl.load(table + 2 * segments + segment).to(tl.int32), WORDS_ALIGN)
    w = tile * BLOCK_W + tl.arange(0, BLOCK_W)
    block_id = tl.load(table + 3 * segments + block)
    row = tl.load(table + segment) + block_id * tl.load(table + segments + segment)
    # An address from a table carries no alignment. Without the hints, stores become scalar.
    row = tl.multiple_of(tl.multiple_of(row, ALIGN).to(tl.pointer_type(DTYPE)), ALIGN)
    tl.store(row + w, tl.zeros([BLOCK_W], dtype=DTYPE), mask=w < words)


def zero_blocks_triton(segments: Segments, block_ids: npt.NDArray[np.int64], *, device: torch.device) -> None:
    """``zero_blocks`` on a GPU, enqueued on the current stream of ``device``. On ``cpu`` it needs Triton's interpreter.
    Addresses and sizes may be any. The kernel is the faster, the greater the power of two that divides all of them."""
    align = alignment(segments)
    word = min(align, max(DTYPES))
    block_w = tile_words(int(segments.sizes.max()), word)
    tiles = -(-int(segments.sizes.max()) // (block_w * word))
    programs = tiles * len(segments.addresses) * len(block_ids)
    assert programs <= MAX_TILES and tiles * block_w <= MAX_TILES
    table = DeviceTable(segments.addresses, segments.strides, segments.sizes // word, block_ids)
    variant = variant_of(zero_kernel, NUM_WARPS, (DTYPES[word], align, align // word, block_w))
    variant(programs, table, device, (len(segments.addresses), tiles))


def alignment(segments: Segments) -> int:
    """The greatest power of two, 16 at most, that divides every address, stride and size."""
    numbers = np.concatenate([segments.addresses, segments.strides, segments.sizes])
    bits = int(np.bitwise_or.reduce(numbers)) | 16
    return bits & -bits


def tile_words(nbytes: int, word: int) -> int:
    """Words of a tile, a power of two: enough for the largest segment, which has ``nbytes``, and at most ``TILE_BYTES``
    in bytes."""
    return min(TILE_BYTES // word, 1 << max(0, (-(-nbytes // word) - 1).bit_length()))
