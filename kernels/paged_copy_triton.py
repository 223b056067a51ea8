"""The copy of ``paged_copy`` as one Triton kernel: pack, unpack, page to page. Axes ``[L, B, H, N, C]``.

A tile is tokens by content words of one (layer, head). There is a program for each, or as many as the SMs that the
caller allows, and then each takes every n-th tile. Whatever depends on the peer or the request is a number that the
kernel is not specialised on, or lies in one int64 table in device memory (addresses, block ids), so no peer makes it
compile again; it is compiled per width of the word, alignment and tile shape. Each program begins by waiting for the
table, and many of them live for one tile: what is no array does not come with it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvferry.kernels.launch import Launcher, Table, Variant
from kvferry.kernels.paged_copy import Pages


class Form(NamedTuple):
    """How the work is laid out: bytes of a tile, most tokens in one, warps of a program."""

    tile_bytes: int
    tile_tokens: int
    num_warps: int


WIDE = Form(16 << 10, 128, 4)
"""All SMs: a tile is 128 bytes for each thread, 8 loads of 16 bytes in flight, and a program of its own
(``pack``, ``unpack`` of ``benchmarks/gpu_planes.py``)."""
FEW = Form(64 << 10, 256, 32)
"""A few SMs, each filled by one program: smaller ones would spread over as many SMs as there are of them, and keep the
engine's large blocks from all of these. On H200 20 of them read over NVLink within a hundredth of what 32 do, 16 within
a fortieth (``kernel_*sm`` of that benchmark)."""
LINK, LINK_PROGRAMS = Form(32 << 10, 256, 8), 128
"""Pages of a peer with no regard to the engine's kernels. On H200 it reads over NVLink as fast as ``FEW`` on 32 SMs
(``kernel`` of that benchmark)."""
_MAX_TILES = (1 << 31) - 1

_DTYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


NUMBERS = (
    "heads", "tokens", "vectors", "tiles",
    "dst_base", "dst_layer", "dst_bases", "dst_ids", "dst_size", "dst_block", "dst_head", "dst_token", "dst_first",
    "src_base", "src_layer", "src_bases", "src_ids", "src_size", "src_block", "src_head", "src_token", "src_first",
)  # fmt: skip
"""What a kernel over two sides is told besides its table: what it copies, then dst, then src. Of a side, ``base`` and
``layer`` times that of the layer are added in bytes to the address that the table has for it; ``bases`` and ``ids`` are
where in the table these and the block ids begin; ``first``: of the first of these blocks, the first token. The others
as in ``Pages``."""


@triton.jit
def _row_addresses(
    table, base, layer_stride, bases, block_ids, size, block_stride, head_stride, token_stride, first, layer, head, t,
    mask,
):  # fmt: skip
    """Byte addresses of tokens ``t`` of one (layer, head), int64 like ``t``."""
    token = first + t
    block = token // size
    within = (token - block * size).to(tl.int64)
    block_id = tl.load(table + block_ids + block, mask=mask, other=0)
    place = base + layer.to(tl.int64) * layer_stride + tl.load(table + bases + layer) + head.to(tl.int64) * head_stride
    return place + block_id * block_stride + within * token_stride


@triton.jit(do_not_specialize=NUMBERS)
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
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    WORDS_ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copies tiles ``program_id, program_id + num_programs, ...``.

    ``table``: addresses of layers, and block ids. Rows begin at multiples of ALIGN bytes and hold ``vectors`` of
    WORDS_ALIGN words.
    """
    words = vectors * WORDS_ALIGN  # so that the compiler knows
    tiles_t, tiles_w = tl.cdiv(tokens, BLOCK_T), tl.cdiv(words, BLOCK_W)
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
        # Numbers out of a table carry no alignment; without the hints loads and stores become scalar.
        src_row = tl.multiple_of(tl.multiple_of(src_row, ALIGN).to(tl.pointer_type(DTYPE)), ALIGN)
        dst_row = tl.multiple_of(tl.multiple_of(dst_row, ALIGN).to(tl.pointer_type(DTYPE)), ALIGN)
        mask = mask_t[:, None] & (w < words)[None, :]
        data = tl.load(src_row[:, None] + w[None, :], mask=mask)
        tl.store(dst_row[:, None] + w[None, :], data, mask=mask)


_kernel = Launcher(_copy_kernel)


def copy_pages_triton(
    dst: Pages,
    src: Pages,
    *,
    num_heads: int,
    num_tokens: int,
    content_bytes: int,
    device: torch.device,
    sms: int | None = None,
    over_link: bool = False,
) -> None:
    """``copy_pages`` on a GPU: enqueued on the current stream of ``device``.

    ``sms`` bounds the SMs that it may take; None takes all. Addresses have to be accessible from ``device``: its own, a
    peer's that is mapped, or pinned host memory.
    """
    align = min(
        alignment(dst, num_heads, num_tokens, content_bytes), alignment(src, num_heads, num_tokens, content_bytes)
    )
    arrays, _, numbers = sides(dst, src, num_tokens)
    sizes = len(dst.bases), num_heads, num_tokens, content_bytes
    _enqueue(Table(*arrays), numbers, sizes, align, device, sms, LINK if sms is None and over_link else form_for(sms))


class PagesThere:
    """Pages for many copies between parts of them and the wire, of which the arrays are uploaded once, or a few times
    where that takes long."""

    def __init__(self, pages: Pages, *, num_heads: int, num_tokens: int, content_bytes: int, device: torch.device):
        """``num_tokens``, from that of ``pages`` on: those of all parts together."""
        self.device, self._pages = device, pages
        self._heads, self._content = num_heads, content_bytes
        self._align = alignment(pages, num_heads, num_tokens, content_bytes)
        self._bases = len(pages.bases)
        self._head = pages.head * pages.head_stride
        last = (pages.token + num_tokens - 1) // pages.block_size + 1
        # The wire has one block, number 0, and its layers follow each other: it needs zeros.
        self._wire = self._bases + last
        self._table = Table(pages.bases, pages.block_ids[:last], np.zeros(self._bases, dtype=np.int64))

    def copy(
        self, address: int, *, to_wire: bool, layer: int, num_layers: int, token: int, num_tokens: int, sms: int | None
    ) -> None:
        """Copy ``num_layers`` from ``layer`` on and ``num_tokens`` from ``token`` on, both counted from the first ones
        of these pages, to or from the wire order at ``address``; enqueued as by ``copy_pages_triton``."""
        pages = self._pages
        block, first = divmod(pages.token + token, pages.block_size)
        head_stride = num_tokens * self._content
        layer_stride = self._heads * head_stride
        ours = (
            self._head, 0, layer, self._bases + block, pages.block_size, pages.block_stride, pages.head_stride,
            pages.token_stride, first,
        )  # fmt: skip
        wire = address, layer_stride, self._wire, self._wire, num_tokens, layer_stride, head_stride, self._content, 0
        sizes = num_layers, self._heads, num_tokens, self._content
        align = min(self._align, address & -address)
        numbers = (*wire, *ours) if to_wire else (*ours, *wire)
        _enqueue(self._table, numbers, sizes, align, self.device, sms, form_for(sms))


def _enqueue(
    table: Table,
    sides: tuple[int, ...],
    sizes: tuple[int, int, int, int],
    align: int,
    device: torch.device,
    sms: int | None,
    form: Form,
) -> None:
    """Launch the kernel. ``sides``: dst's numbers, then src's; ``sizes``: layers, heads, tokens, content bytes."""
    layers, heads, tokens, content = sizes
    variant, block_t, tiles_w = _variant(content, align, form)
    tiles = layers * heads * -(-tokens // block_t) * tiles_w
    assert tiles <= _MAX_TILES and tokens + sides[4] + sides[13] <= _MAX_TILES
    programs = min(tiles, LINK_PROGRAMS) if form is LINK else num_programs(tiles, device, sms)
    variant(programs, table, device, (heads, tokens, content // align, tiles, *sides))


@functools.lru_cache(maxsize=256)
def _variant(content: int, align: int, form: Form) -> tuple[Variant, int, int]:
    """The kernel for rows of so many bytes, tokens of a tile, and tiles of a row."""
    word = min(align, max(_DTYPES))
    words = content // word
    block_t, block_w = tile_shape(words, word, form)
    constants = _DTYPES[word], align, align // word, block_t, block_w
    return _kernel.variant(form.num_warps, constants), block_t, -(-words // block_w)


def form_for(sms: int | None) -> Form:
    """The form for so many SMs."""
    return WIDE if sms is None else FEW


def alignment(pages: Pages, num_heads: int, num_tokens: int, content_bytes: int) -> int:
    """The greatest power of two, 16 at most, that divides the address and the length of every row."""
    bits = _set_bits(pages.bases.tobytes()) | pages.block_stride | content_bytes | 16
    if num_heads > 1 or pages.head:
        bits |= pages.head_stride
    if num_tokens > 1 or pages.token:
        bits |= pages.token_stride
    return bits & -bits


@functools.lru_cache(maxsize=256)
def _set_bits(bases: bytes) -> int:
    """Bits that any of these has, int64 each; a process copies from and to the same ones all the time."""
    return int(np.bitwise_or.reduce(np.frombuffer(bases, dtype=np.int64)))


def tile_shape(words: int, word: int, form: Form) -> tuple[int, int]:
    """Tokens and words of a tile, powers of two that depend on the content alone.

    As wide as leaves at most an eighth of the lanes idle, from 16 words to 1 KiB, and no wider than the content:
    32 x 64 for 512 bytes of bf16 K and V in the wide form, 64 x 32 for the 1152 of an MLA token.
    """
    block_w = 1024 // word
    while block_w > 16 and (-(-words // block_w) * block_w - words) * 8 > words:
        block_w //= 2
    while block_w >= 2 * words:
        block_w //= 2
    return min(form.tile_bytes // (block_w * word), form.tile_tokens), block_w


def sides(dst: Pages, src: Pages, num_tokens: int) -> tuple[tuple[npt.NDArray[np.int64], ...], int, tuple[int, ...]]:
    """The arrays that a kernel over two sides finds one after the other, their length together, and the numbers of both
    sides in the order of ``NUMBERS``."""
    to, to_first = divmod(dst.token, dst.block_size)
    to_ids = dst.block_ids[to : (dst.token + num_tokens - 1) // dst.block_size + 1]
    of, of_first = divmod(src.token, src.block_size)
    of_ids = src.block_ids[of : (src.token + num_tokens - 1) // src.block_size + 1]
    of_at = len(dst.bases) + len(to_ids)
    numbers = (
        dst.head * dst.head_stride, 0, 0, len(dst.bases),
        dst.block_size, dst.block_stride, dst.head_stride, dst.token_stride, to_first,
        src.head * src.head_stride, 0, of_at, of_at + len(src.bases),
        src.block_size, src.block_stride, src.head_stride, src.token_stride, of_first,
    )  # fmt: skip
    return (dst.bases, to_ids, src.bases, of_ids), of_at + len(src.bases) + len(of_ids), numbers


def num_programs(tiles: int, device: torch.device, sms: int | None = None) -> int:
    """Programs of a launch over so many tiles that may take ``sms`` SMs of ``device``."""
    if device.type == "cpu":  # the interpreter
        return min(tiles, sms or 3)
    return tiles if sms is None else min(tiles, sms, _num_sms(device))


@functools.cache
def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
