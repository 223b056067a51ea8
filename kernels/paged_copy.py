"""One copy for pack, unpack and page to page, and its form for host memory. Axes ``[L, B, H, N, C]``.

L layers, B blocks, H KV heads, N tokens in a block, C content bytes per (head, token). Base addresses and strides
describe each side of a copy. The contiguous wire is a side like any other, so N layouts need no N x N converters.

On host memory, tokens are cut into segments where either side changes block. One torch operation copies all S segments
of equal length n, over ``[L, S, H, n, C]``. A thread that copies beside a busy interpreter waits for the GIL once per
operation, so operations are few and large. A side whose segments lie at regular distances (the wire) is a strided view;
the other side is indexed by ``[L, S]`` row addresses.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pages:
    """One side of a copy: L layers of blocks, strides in bytes. Token n = ``token`` + t lies at place
    ``n % block_size`` of block ``block_ids[n // block_size]``; byte (l, h, t, c) at ``bases[l]`` + block *
    ``block_stride`` + (``head`` + h) * ``head_stride`` + place * ``token_stride`` + c."""

    bases: Int64s
    """Byte addresses, ``[L]``."""
    block_ids: Int64s
    """Of all tokens from the first of block 0 to the last of the copy."""
    block_size: int
    """N, in tokens."""
    block_stride: int
    head_stride: int
    token_stride: int
    head: int = 0
    token: int = 0


_ZERO = np.zeros(1, dtype=np.int64)


def wire_pages(address: int, num_layers: int, num_heads: int, num_tokens: int, content_bytes: int) -> Pages:
    """The wire order, contiguous ``[L, H, T, C]`` at ``address``, as a side of a copy: one block of T tokens."""
    head_stride = num_tokens * content_bytes
    layer_stride = num_heads * head_stride
    return Pages(
        bases=address + layer_stride * np.arange(num_layers, dtype=np.int64),
        block_ids=_ZERO,
        block_size=num_tokens,
        block_stride=layer_stride,
        head_stride=head_stride,
        token_stride=content_bytes,
    )


def copy_pages(
    dst: Pages, src: Pages, *, num_heads: int, num_tokens: int, content_bytes: int, device: torch.device,
    sms: int | None = None, over_link: bool = False,
) -> None:  # fmt: skip
    """Copy ``[L, num_heads, num_tokens, content_bytes]`` from ``src`` to ``dst``, L = ``len(bases)`` of both. pack is
    ``copy_pages(wire, pages)``, unpack ``copy_pages(pages, wire)``. The caller guarantees that every address that the
    arguments span is mapped, and that the two sides do not overlap. On ``cpu`` the copy is done on return; on a GPU it
    is enqueued on the current stream of ``device``, and takes at most ``sms`` of its SMs, or all if ``sms`` is None.
    ``over_link``: one side lies on another GPU, and the link between them limits how many programs are of use."""
    assert len(dst.bases) == len(src.bases), (len(dst.bases), len(src.bases))
    if num_heads == 0 or num_tokens == 0 or len(src.bases) == 0:
        return
    if device.type == "cpu":
        copy_pages_host(dst, src, num_heads=num_heads, num_tokens=num_tokens, content_bytes=content_bytes)
    else:
        from kvferry.kernels.paged_copy_triton import copy_pages_triton

        copy_pages_triton(
            dst, src, num_heads=num_heads, num_tokens=num_tokens, content_bytes=content_bytes, device=device, sms=sms,
            over_link=over_link,
        )  # fmt: skip


_FIRST = 64
BOUNCE_BYTES = 512 << 10
"""Size of the buffer between two indexed sides. It stays in the L2 cache."""
MAX_NUMEL = 1 << 62
_space = (ctypes.c_char * ((1 << 56) - _FIRST)).from_address(_FIRST)
with torch.inference_mode(False):
    _memory = {
        word: torch.frombuffer(_space, dtype=dtype)
        for word, dtype in ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16))
    }
    _memory[1] = torch.frombuffer(_space, dtype=torch.uint8)
"""The whole address space as one tensor, by bytes per element. Element 0 lies at address ``_FIRST``. Complex128 is the
widest element of torch and is copied at the speed of memcpy, int64 at 0.6 of it."""
_index_out = torch.ops.aten.index.Tensor_out


class _Side(NamedTuple):
    """Pages cut down to the box of the copy. Token t of the copy is token ``token + t`` of ``block_ids``."""

    low: int
    layers: Int64s
    """The first head of layer l lies at address ``low + layers[l]``."""
    layer_bits: int
    """All bits that are set in any of ``layers``."""
    span: int
    """The maximum of ``layers``."""
    block_ids: Int64s
    block_size: int
    block_stride: int
    head_stride: int
    token_stride: int
    token: int
    single: bool
    """All tokens lie in one block, or in consecutive blocks without gaps, which count as one."""

    def offsets(self, starts: Int64s) -> Int64s:
        """Bytes from a layer's address to each token in ``starts``, int64 [S]."""
        token = starts + self.token
        if self.single:
            return token * self.token_stride + int(self.block_ids[0]) * self.block_stride
        block, within = np.divmod(token, self.block_size)
        return np.asarray(self.block_ids[block] * self.block_stride + within * self.token_stride)

    def layer_step(self) -> int | None:
        """Bytes from layer to layer, or None where the layers do not ascend in equal steps."""
        if len(self.layers) == 1:
            return 0
        step = int(self.layers[1])
        if self.layers[0] != 0 or self.span != step * (len(self.layers) - 1):
            return None
        regular = len(self.layers) == 2 or bool((self.layers[1:] - self.layers[:-1] == step).all())
        return step if regular else None


class _Tile(NamedTuple):
    """The elements that one row index selects, ``[H, n, C]`` in words of ``word`` bytes. Axes are joined where both
    sides are dense."""

    word: int
    shape: tuple[int, ...]
    dst_stride: tuple[int, ...]
    src_stride: tuple[int, ...]


def copy_pages_host(dst: Pages, src: Pages, *, num_heads: int, num_tokens: int, content_bytes: int) -> None:
    """``copy_pages`` on host memory. Done on return."""
    dst_side, src_side = _side(dst, num_tokens), _side(src, num_tokens)
    for starts, tokens in _segments(dst_side, src_side, num_tokens):
        shape = (num_heads, tokens, content_bytes)
        if _fits(dst_side, shape) and _fits(src_side, shape):
            _copy(dst_side, src_side, starts, shape)
        else:
            for layer in range(len(dst_side.layers)):
                _copy(_one_layer(dst_side, layer), _one_layer(src_side, layer), starts, shape)


def _side(pages: Pages, num_tokens: int) -> _Side:
    size = pages.block_size
    first, token = divmod(pages.token, size)
    block_ids = pages.block_ids[first : (pages.token + num_tokens - 1) // size + 1]
    single = len(block_ids) == 1
    if not single and pages.block_stride == size * pages.token_stride:
        # Consecutive blocks without gaps between their tokens are one long block.
        single = bool((block_ids[1:] - block_ids[:-1] == 1).all())
    low = int(np.minimum.reduce(pages.bases))
    layers = pages.bases - low
    return _Side(
        low=low + pages.head * pages.head_stride, layers=layers, layer_bits=int(np.bitwise_or.reduce(layers)),
        span=int(np.maximum.reduce(layers)), block_ids=block_ids, block_size=size, block_stride=pages.block_stride,
        head_stride=pages.head_stride, token_stride=pages.token_stride, token=token, single=single,
    )  # fmt: skip


def _one_layer(side: _Side, layer: int) -> _Side:
    return side._replace(low=side.low + int(side.layers[layer]), layers=_ZERO, layer_bits=0, span=0)


def _segments(dst: _Side, src: _Side, num_tokens: int) -> Iterator[tuple[Int64s, int]]:
    """The segments of tokens that lie in one block on both sides, by length: first tokens (int64 [S]), and length."""
    if dst.single and src.single:
        yield _ZERO, num_tokens
    elif dst.single or src.single:
        paged = src if dst.single else dst
        head = min(-paged.token % paged.block_size, num_tokens)
        body, tail = divmod(num_tokens - head, paged.block_size)
        if head:
            yield _ZERO, head
        if body:
            yield head + paged.block_size * np.arange(body), paged.block_size
        if tail:
            yield np.array([num_tokens - tail]), tail
    else:
        ends = [np.arange(-side.token % side.block_size, num_tokens, side.block_size) for side in (dst, src)]
        cuts = np.unique(np.concatenate([[0, num_tokens], *ends]))
        lengths = np.diff(cuts)
        for length in np.unique(lengths):
            yield cuts[:-1][lengths == length], int(length)


def _fits(side: _Side, tile_bytes: tuple[int, int, int]) -> bool:
    """Whether torch can count the elements of a view with an overlapping tile at every byte between the layers."""
    return side.span * math.prod(tile_bytes) < MAX_NUMEL


def _copy(dst: _Side, src: _Side, starts: Int64s, tile_bytes: tuple[int, int, int]) -> None:
    """Copy the segments at ``starts`` in all layers. Each is a tile of (heads, tokens, content bytes)."""
    dst_offsets, src_offsets = dst.offsets(starts), src.offsets(starts)
    bits = dst.low | dst.layer_bits | _bits(dst_offsets) | src.low | src.layer_bits | _bits(src_offsets)
    tile = _tile(dst, src, tile_bytes, bits)
    target = _strided(dst, dst_offsets, tile, tile.dst_stride)
    source = _strided(src, src_offsets, tile, tile.src_stride)
    if target is not None and source is not None:
        target.copy_(source)
    elif target is not None:
        rows, index = _indexed(src, src_offsets, tile, tile.src_stride)
        _index_out(rows, [index], out=target)
    elif source is not None:
        rows, index = _indexed(dst, dst_offsets, tile, tile.dst_stride)
        rows.index_put_((index,), source)
    else:
        dst_rows, dst_index = _indexed(dst, dst_offsets, tile, tile.dst_stride)
        src_rows, src_index = _indexed(src, src_offsets, tile, tile.src_stride)
        _bounce(dst_rows, dst_index.reshape(-1), src_rows, src_index.reshape(-1))


def _bits(values: Int64s) -> int:
    """All bits that are set in any value. The lowest of them is the greatest power of two that divides all values."""
    return int(values[0]) if len(values) == 1 else int(np.bitwise_or.reduce(values))


def _tile(dst: _Side, src: _Side, tile_bytes: tuple[int, int, int], bits: int) -> _Tile:
    heads, tokens, content = tile_bytes
    shape, dst_stride, src_stride = [content], [1], [1]
    for count, dst_step, src_step in (
        (tokens, dst.token_stride, src.token_stride),
        (heads, dst.head_stride, src.head_stride),
    ):
        if count == 1:
            continue
        if len(shape) == 1 and dst_step == src_step == shape[0]:
            shape[0] *= count
        else:
            shape.insert(0, count)
            dst_stride.insert(0, dst_step)
            src_stride.insert(0, src_step)
            bits |= dst_step | src_step
    bits |= shape[-1]
    word = min(bits & -bits, 16)
    return _Tile(
        word,
        (*shape[:-1], shape[-1] // word),
        (*(step // word for step in dst_stride[:-1]), 1),
        (*(step // word for step in src_stride[:-1]), 1),
    )


def _strided(side: _Side, offsets: Int64s, tile: _Tile, tile_stride: tuple[int, ...]) -> torch.Tensor | None:
    """The segments as a view ``[L, S, *tile]``, or None where they do not lie at regular distances."""
    if len(offsets) > 1 and not side.single:
        return None
    layer_step = side.layer_step()
    if layer_step is None:
        return None
    segment_step = int(offsets[1]) - int(offsets[0]) if len(offsets) > 1 else 0
    word = tile.word
    return _memory[word].as_strided(
        (len(side.layers), len(offsets), *tile.shape),
        (layer_step // word, segment_step // word, *tile_stride),
        (side.low + int(offsets[0]) - _FIRST) // word,
    )


def _indexed(
    side: _Side, offsets: Int64s, tile: _Tile, tile_stride: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A view whose rows are tiles, which overlap, and the row of each (layer, segment), int64 ``[L, S]``."""
    low = int(np.minimum.reduce(offsets))
    offsets = offsets - low
    bits = side.layer_bits | _bits(offsets)
    unit = (bits & -bits) or tile.word
    shift = unit.bit_length() - 1
    index = (side.layers >> shift)[:, None] + (offsets >> shift)
    rows = _memory[tile.word].as_strided(
        ((side.span + int(np.maximum.reduce(offsets))) // unit + 1, *tile.shape),
        (unit // tile.word, *tile_stride),
        (side.low + low - _FIRST) // tile.word,
    )
    return rows, torch.from_numpy(index)


def _bounce(dst_rows: torch.Tensor, dst_index: torch.Tensor, src_rows: torch.Tensor, src_index: torch.Tensor) -> None:
    """Copy rows ``src_index`` of ``src_rows`` to rows ``dst_index`` of ``dst_rows``, through a buffer."""
    row_bytes = dst_rows[0].numel() * dst_rows.element_size()
    step = max(1, BOUNCE_BYTES // row_bytes)
    scratch = torch.empty((min(step, len(src_index)), *dst_rows.shape[1:]), dtype=dst_rows.dtype, device="cpu")
    for first in range(0, len(src_index), step):
        part = src_index[first : first + step]
        rows = scratch[: len(part)]
        _index_out(src_rows, [part], out=rows)
        dst_rows.index_put_((dst_index[first : first + step],), rows)
