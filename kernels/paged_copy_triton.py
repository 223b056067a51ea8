"""The copy of ``paged_copy`` as one Triton kernel: pack, unpack, page to page. Axes ``[L, B, H, N, C]``.

A tile is tokens by content words of one (layer, head). There is a program for each, or as many as the SMs that the
caller allows, and then each takes every n-th tile. All that depends on the peer or the request (addresses, block ids,
strides, sizes) comes in one int64 table in device memory, so no peer makes the kernel compile again; it is compiled
per width of the word, alignment and tile shape.
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

from kvferry.kernels.launch import Launcher, upload
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
engine's large blocks from all of these. On H200 20 of them read over NVLink as fast as 32 do, 16 do not
(``kernel_*sm`` of that benchmark)."""
LINK, LINK_PROGRAMS = Form(32 << 10, 256, 8), 96
"""Pages of a peer with no regard to the engine's kernels. On H200 it reads 16 to 128 MiB over NVLink a twentieth faster
than ``FEW``, and 1 GiB as fast (``kernel`` of that benchmark)."""
_MAX_TILES = (1 << 31) - 1

_HEADER_INTS = 18
"""The table begins with heads, tokens, words, tiles; then for dst, and for src: where in the table its layers'
addresses and its block ids begin, block size, block, head and token stride in bytes, first token."""
_DTYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _row_addresses(table, bases, block_ids, size, block_stride, head_stride, token_stride, first, layer, head, t, mask):
    """Byte addresses of tokens ``t`` of one (layer, head), int64 like ``t``."""
    token = first + t
    block = token // size
    within = (token - block * size).to(tl.int64)
    block_id = tl.load(table + block_ids + block, mask=mask, other=0)
    base = tl.load(table + bases + layer) + head.to(tl.int64) * head_stride
    return base + block_id * block_stride + within * token_stride


@triton.jit
def _copy_kernel(
    table,
    DTYPE: tl.constexpr,
    ALIGN: tl.constexpr,
    WORDS_ALIGN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copies tiles ``program_id, program_id + num_programs, ...``.

    Rows begin at multiples of ALIGN bytes and hold a multiple of WORDS_ALIGN words.
    """
    heads = tl.load(table).to(tl.int32)
    tokens = tl.load(table + 1).to(tl.int32)
    words = tl.multiple_of(tl.load(table + 2).to(tl.int32), WORDS_ALIGN)
    tiles = tl.load(table + 3).to(tl.int32)
    dst_bases, dst_ids = tl.load(table + 4), tl.load(table + 5)
    dst_size, dst_first = tl.load(table + 6).to(tl.int32), tl.load(table + 10).to(tl.int32)
    dst_block, dst_head, dst_token = tl.load(table + 7), tl.load(table + 8), tl.load(table + 9)
    src_bases, src_ids = tl.load(table + 11), tl.load(table + 12)
    src_size, src_first = tl.load(table + 13).to(tl.int32), tl.load(table + 17).to(tl.int32)
    src_block, src_head, src_token = tl.load(table + 14), tl.load(table + 15), tl.load(table + 16)

    tiles_t, tiles_w = tl.cdiv(tokens, BLOCK_T), tl.cdiv(words, BLOCK_W)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        w = (tile % tiles_w) * BLOCK_W + tl.arange(0, BLOCK_W)
        rest = tile // tiles_w
        t = (rest % tiles_t) * BLOCK_T + tl.arange(0, BLOCK_T)
        rest = rest // tiles_t
        head, layer = rest % heads, rest // heads

        mask_t = t < tokens
        src_row = _row_addresses(
            table, src_bases, src_ids, src_size, src_block, src_head, src_token, src_first, layer, head, t, mask_t
        )
        dst_row = _row_addresses(
            table, dst_bases, dst_ids, dst_size, dst_block, dst_head, dst_token, dst_first, layer, head, t, mask_t
        )
        # Numbers out of a table carry no alignment; without the hints loads and stores become scalar.
        src_row = tl.multiple_of(tl.multiple_of(src_row, ALIGN).to(tl.pointer_type(DTYPE)), ALIGN)
        dst_row = tl.multiple_of(tl.multiple_of(dst_row, ALIGN).to(tl.pointer_type(DTYPE)), ALIGN)
        mask = mask_t[:, None] & (w < words)[None, :]
        data = tl.load(src_row[:, None] + w[None, :], mask=mask)
        tl.store(dst_row[:, None] + w[None, :], data, mask=mask)


_launch = Launcher(_copy_kernel)


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
    form = LINK if sms is None and over_link else form_for(sms)
    align = min(alignment(side, num_heads, num_tokens, content_bytes) for side in (dst, src))
    word = min(align, max(_DTYPES))
    words = content_bytes // word
    block_t, block_w = tile_shape(words, word, form)
    tiles = len(dst.bases) * num_heads * -(-num_tokens // block_t) * -(-words // block_w)
    assert tiles <= _MAX_TILES and num_tokens + dst.block_size + src.block_size <= _MAX_TILES
    host = table(dst, src, sizes=(num_heads, num_tokens, words, tiles))
    programs = min(tiles, LINK_PROGRAMS) if form is LINK else num_programs(tiles, device, sms)
    constants = (_DTYPES[word], align, align // word, block_t, block_w)
    if device.type == "cpu":  # the interpreter
        _copy_kernel[(programs,)](torch.from_numpy(host), *constants)
        return
    with torch.cuda.device(device):
        _launch(programs, upload(host, device), form.num_warps, *constants)


def form_for(sms: int | None) -> Form:
    """The form for so many SMs."""
    return WIDE if sms is None else FEW


def alignment(pages: Pages, num_heads: int, num_tokens: int, content_bytes: int) -> int:
    """The greatest power of two, 16 at most, that divides the address and the length of every row."""
    bits = int(np.bitwise_or.reduce(pages.bases)) | pages.block_stride | content_bytes | 16
    if num_heads > 1 or pages.head:
        bits |= pages.head_stride
    if num_tokens > 1 or pages.token:
        bits |= pages.token_stride
    return bits & -bits


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


def table(dst: Pages, src: Pages, *, sizes: tuple[int, int, int, int]) -> npt.NDArray[np.int64]:
    """All numbers that the kernel reads: heads, tokens, words and tiles, two headers, then the arrays."""
    tokens = sizes[1]
    numbers = list(sizes)
    arrays: list[npt.NDArray[np.int64]] = []
    at = _HEADER_INTS
    for pages in (dst, src):
        first, token = divmod(pages.token, pages.block_size)
        block_ids = pages.block_ids[first : (pages.token + tokens - 1) // pages.block_size + 1]
        arrays += [pages.bases + pages.head * pages.head_stride, block_ids]
        numbers += [at, at + len(pages.bases), pages.block_size]
        numbers += [pages.block_stride, pages.head_stride, pages.token_stride, token]
        at += len(pages.bases) + len(block_ids)
    return np.concatenate([np.array(numbers, dtype=np.int64), *arrays])


def num_programs(tiles: int, device: torch.device, sms: int | None = None) -> int:
    """Programs of a launch over so many tiles that may take ``sms`` SMs of ``device``."""
    if device.type == "cpu":  # the interpreter
        return min(tiles, sms or 3)
    return tiles if sms is None else min(tiles, sms, _num_sms(device))


@functools.cache
def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
