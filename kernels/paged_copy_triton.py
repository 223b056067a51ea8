"""The copy of ``paged_copy`` as one Triton kernel: pack, unpack, page to page. Axes ``[L, B, H, N, C]``.

A tile is tokens by content words of one (layer, head). Where the copy may take all SMs, each tile has a program of its
own. Where the caller allows fewer SMs, there are as many programs as SMs, and each takes every n-th tile.

Whatever depends on the peer or the request is a scalar that the kernel is not specialised on (``SCALAR_ARGS``), or lies
in one int64 table in device memory (addresses, block ids). So no peer makes Triton compile again; it compiles once per
width of a word, alignment and tile shape. Each program begins by waiting for the table, and many programs live for one
tile only: so the table holds arrays alone, and scalars are arguments.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.kernels.launch import DeviceTable, Variant, variant_of
from kvferry.kernels.paged_copy import Int64s, Pages


class LaunchShape(NamedTuple):
    """How a copy is divided among programs."""

    tile_bytes: int
    tile_tokens: int
    """At most."""
    num_warps: int
    """Of a program."""


ALL_SMS = LaunchShape(16 << 10, 128, 4)
"""The copy may take all SMs. Each tile has a program of its own. A tile has 128 bytes per thread, which are 8 loads of
16 bytes in flight (``pack``, ``unpack`` of ``benchmarks/planes/kernels.py``)."""
CAPPED = LaunchShape(64 << 10, 256, 32)
"""The copy may take a given number of SMs. One program fills an SM: smaller programs would spread over as many SMs as
there are programs, and keep the engine's large thread blocks from all of these. On an H200, 20 SMs read over NVLink
within 1% of the speed of 32, and 16 SMs within 2.5% (``kernel_*sm`` of that benchmark)."""
NVLINK, NVLINK_PROGRAMS = LaunchShape(32 << 10, 256, 8), 128
"""The copy reads pages of another GPU while no kernel of the engine runs. On an H200 it reads over NVLink as fast as
``CAPPED`` on 32 SMs (``kernel`` of that benchmark)."""
MAX_TILES = (1 << 31) - 1

DTYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
"""Type of a word, by its bytes."""

SCALAR_ARGS = (
    "heads", "tokens", "vectors", "tiles",
    "dst_base", "dst_layer", "dst_bases", "dst_ids", "dst_size", "dst_block", "dst_head", "dst_token", "dst_first",
    "src_base", "src_layer", "src_bases", "src_ids", "src_size", "src_block", "src_head", "src_token", "src_first",
)  # fmt: skip
"""Scalar arguments of a kernel that copies between two sides, in the kernel's order. ``heads`` and ``tokens`` to copy,
``vectors`` of a row (layer, head, token): the kernel's constants give their words or elements; ``tiles`` of the whole
copy. Of each side, ``dst_`` and ``src_``, with strides in bytes:

base   bytes added to the address of every layer
layer  bytes added l times to the address of the l-th layer of the copy
bases  numbers from the start of the table to the address of the copy's first layer
ids    numbers from the start of the table to the id of the block that holds the copy's first token
first  tokens of the first block that lie before the copy's first token
size, block, head, token  as in ``Pages``: ``block_size``, ``block_stride``, ``head_stride``, ``token_stride``
"""


@triton.jit
def row_addresses(
    table, base, layer_stride, bases, block_ids, size, block_stride, head_stride, token_stride, first, layer, head, t,
    mask,
):  # fmt: skip
    """Byte addresses of tokens ``t`` of one (layer, head): int64, of the shape of ``t``."""
    token = first + t
    block = token // size
    within = (token - block * size).to(tl.int64)
    block_id = tl.load(table + block_ids + block, mask=mask, other=0)
    start = base + layer.to(tl.int64) * layer_stride + tl.load(table + bases + layer) + head.to(tl.int64) * head_stride
    return start + block_id * block_stride + within * token_stride


@triton.jit(do_not_specialize=SCALAR_ARGS)
def copy_kernel(
    table, heads: tl.int32, tokens: tl.int32, vectors: tl.int32, tiles: tl.int32,
    dst_base: tl.int64, dst_layer: tl.int64, dst_bases: tl.int32, dst_ids: tl.int32, dst_size: tl.int32,
    dst_block: tl.int64, dst_head: tl.int64, dst_token: tl.int64, dst_first: tl.int32,
    src_base: tl.int64, src_layer: tl.int64, src_bases: tl.int32, src_ids: tl.int32, src_size: tl.int32,
    src_block: tl.int64, src_head: tl.int64, src_token: tl.int64, src_first: tl.int32,
    DTYPE: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Copies tiles ``program_id, program_id + num_programs, ...``. ``table`` holds addresses of layers, and block ids.
    Rows begin at multiples of ALIGN bytes. A row has ``vectors`` vectors of ALIGN bytes, in words of type DTYPE and
    WORD bytes. A tile has BLOCK_T tokens and BLOCK_W words."""
    words = vectors * (ALIGN // WORD)  # tells the compiler that ALIGN // WORD divides it
    tiles_t, tiles_w = tl.cdiv(tokens, BLOCK_T), tl.cdiv(words, BLOCK_W)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        w = (tile % tiles_w) * BLOCK_W + tl.arange(0, BLOCK_W)
        rest = tile // tiles_w
        t = (rest % tiles_t) * BLOCK_T + tl.arange(0, BLOCK_T)
        rest = rest // tiles_t
        head, layer = rest % heads, rest // heads

        mask_t = t < tokens
        mask = mask_t[:, None] & (w < words)[None, :]
        src_row = row_addresses(
            table, src_base, src_layer, src_bases, src_ids, src_size, src_block, src_head, src_token, src_first, layer,
            head, t, mask_t,
        )  # fmt: skip
        # An address from a table carries no alignment. Without the hints, loads and stores become scalar.
        src_row = tl.multiple_of(tl.multiple_of(src_row, ALIGN).to(tl.pointer_type(DTYPE)), ALIGN)
        dst_row = row_addresses(
            table, dst_base, dst_layer, dst_bases, dst_ids, dst_size, dst_block, dst_head, dst_token, dst_first, layer,
            head, t, mask_t,
        )  # fmt: skip
        dst_row = tl.multiple_of(tl.multiple_of(dst_row, ALIGN).to(tl.pointer_type(DTYPE)), ALIGN)
        data = tl.load(src_row[:, None] + w[None, :], mask=mask)
        tl.store(dst_row[:, None] + w[None, :], data, mask=mask)


def copy_pages_triton(
    dst: Pages, src: Pages, *, num_heads: int, num_tokens: int, content_bytes: int, device: torch.device,
    sms: int | None = None, over_link: bool = False,
) -> None:  # fmt: skip
    """``copy_pages`` on a GPU. ``device`` must be able to access all addresses: they are its own, mapped ones of
    another GPU, or page-locked host memory."""
    sizes = len(dst.bases), num_heads, num_tokens, content_bytes
    align = min(alignment(dst, *sizes[1:]), alignment(src, *sizes[1:]))
    arrays, _, scalars = side_arguments(dst, src, sizes[2])
    shape = NVLINK if sms is None and over_link else launch_shape(sms)
    _enqueue(DeviceTable(*arrays), scalars, sizes, align, device, sms, shape)


class DevicePages:
    """Pages of which parts are copied to or from the wire, many times. One table serves all copies, so it is uploaded
    once, or again after other tables took over its place."""

    def __init__(self, pages: Pages, *, num_heads: int, num_tokens: int, content_bytes: int, device: torch.device):
        """``num_tokens``: tokens of all parts together, from the first token of ``pages`` on."""
        self.device, self._pages = device, pages
        self._heads, self._content = num_heads, content_bytes
        self._align = alignment(pages, num_heads, num_tokens, content_bytes)
        self._num_layers = len(pages.bases)
        self._first_head = pages.head * pages.head_stride
        num_blocks = (pages.token + num_tokens - 1) // pages.block_size + 1
        # The wire has one block with id 0, and its layers lie at equal distances: in the table it needs zeros alone,
        # for the addresses of its layers and for that id.
        self._zeros = self._num_layers + num_blocks
        zeros = np.zeros(self._num_layers, dtype=np.int64)
        self._table = DeviceTable(pages.bases, pages.block_ids[:num_blocks], zeros)

    def copy(
        self, address: int, *, to_wire: bool, layer: int, num_layers: int, token: int, num_tokens: int, sms: int | None
    ) -> None:
        """Copy ``num_layers`` layers from ``layer`` on and ``num_tokens`` tokens from ``token`` on to or from the wire
        order at ``address``. ``layer`` and ``token`` count from the first ones of these pages. The copy is enqueued as
        by ``copy_pages_triton``."""
        pages = self._pages
        block, first = divmod(pages.token + token, pages.block_size)
        head_stride = num_tokens * self._content
        layer_stride = self._heads * head_stride
        ours = (
            self._first_head, 0, layer, self._num_layers + block, pages.block_size, pages.block_stride,
            pages.head_stride, pages.token_stride, first,
        )  # fmt: skip
        wire = address, layer_stride, self._zeros, self._zeros, num_tokens, layer_stride, head_stride, self._content, 0
        sizes = num_layers, self._heads, num_tokens, self._content
        align = min(self._align, address & -address)
        scalars = (*wire, *ours) if to_wire else (*ours, *wire)
        _enqueue(self._table, scalars, sizes, align, self.device, sms, launch_shape(sms))


def _enqueue(
    table: DeviceTable, scalars: tuple[int, ...], sizes: tuple[int, int, int, int], align: int, device: torch.device,
    sms: int | None, shape: LaunchShape,
) -> None:  # fmt: skip
    """Launch the copy. ``scalars``: of dst, then of src, in the order of ``SCALAR_ARGS``."""
    layers, heads, tokens, content = sizes
    variant, block_t, tiles_w = _variant(content, align, shape)
    tiles = layers * heads * -(-tokens // block_t) * tiles_w
    dst_size, src_size = scalars[4], scalars[13]
    assert tiles <= MAX_TILES and tokens + dst_size + src_size <= MAX_TILES
    programs = min(tiles, NVLINK_PROGRAMS) if shape is NVLINK else num_programs(tiles, device, sms)
    variant(programs, table, device, (heads, tokens, content // align, tiles, *scalars))


@functools.lru_cache(maxsize=256)
def _variant(content: int, align: int, shape: LaunchShape) -> tuple[Variant, int, int]:
    """The kernel for rows of ``content`` bytes, the tokens of a tile, and the tiles of a row."""
    word = min(align, max(DTYPES))
    words = content // word
    block_t, block_w = tile_shape(words, word, shape)
    constants = DTYPES[word], word, align, block_t, block_w
    return variant_of(copy_kernel, shape.num_warps, constants), block_t, -(-words // block_w)


def launch_shape(sms: int | None) -> LaunchShape:
    return ALL_SMS if sms is None else CAPPED


def alignment(pages: Pages, num_heads: int, num_tokens: int, content_bytes: int) -> int:
    """The greatest power of two, 16 at most, that divides the address and the length in bytes of every row."""
    bits = _set_bits(pages.bases.tobytes()) | pages.block_stride | content_bytes | 16
    if num_heads > 1 or pages.head:
        bits |= pages.head_stride
    if num_tokens > 1 or pages.token:
        bits |= pages.token_stride
    return bits & -bits


@functools.lru_cache(maxsize=256)
def _set_bits(bases: bytes) -> int:
    """All bits that are set in any of the int64 numbers in ``bases``. Cached: a process copies to and from the same
    layers all the time."""
    return int(np.bitwise_or.reduce(np.frombuffer(bases, dtype=np.int64)))


def tile_shape(words: int, word: int, shape: LaunchShape) -> tuple[int, int]:
    """Tokens and words of a tile for rows of ``words`` words of ``word`` bytes. Both are powers of two that depend on
    the content alone. A tile is as wide as leaves at most an eighth of its lanes idle, from 16 words to 1 KiB, and not
    wider than the content: for ``ALL_SMS`` 32 x 64 for 512 bytes of bf16 K and V, and 64 x 32 for the 1152 bytes of an
    MLA token."""
    block_w = 1024 // word
    while block_w > 16 and (-(-words // block_w) * block_w - words) * 8 > words:
        block_w //= 2
    while block_w >= 2 * words:
        block_w //= 2
    return min(shape.tile_bytes // (block_w * word), shape.tile_tokens), block_w


def side_arguments(dst: Pages, src: Pages, num_tokens: int) -> tuple[tuple[Int64s, ...], int, tuple[int, ...]]:
    """What a kernel that copies between two sides takes: the arrays of its table, their length together, and the
    scalars of both sides in the order of ``SCALAR_ARGS``."""
    dst_block, dst_first = divmod(dst.token, dst.block_size)
    dst_ids = dst.block_ids[dst_block : (dst.token + num_tokens - 1) // dst.block_size + 1]
    src_block, src_first = divmod(src.token, src.block_size)
    src_ids = src.block_ids[src_block : (src.token + num_tokens - 1) // src.block_size + 1]
    src_bases_at = len(dst.bases) + len(dst_ids)
    src_ids_at = src_bases_at + len(src.bases)
    scalars = (
        dst.head * dst.head_stride, 0, 0, len(dst.bases),
        dst.block_size, dst.block_stride, dst.head_stride, dst.token_stride, dst_first,
        src.head * src.head_stride, 0, src_bases_at, src_ids_at,
        src.block_size, src.block_stride, src.head_stride, src.token_stride, src_first,
    )  # fmt: skip
    return (dst.bases, dst_ids, src.bases, src_ids), src_ids_at + len(src_ids), scalars


def num_programs(tiles: int, device: torch.device, sms: int | None = None) -> int:
    """Programs of a launch over ``tiles`` tiles that may take ``sms`` SMs of ``device``, or all if ``sms`` is None."""
    if device.type == "cpu":  # the interpreter
        return min(tiles, sms or 3)
    return tiles if sms is None else min(tiles, sms, num_sms(device))


@functools.cache
def num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
