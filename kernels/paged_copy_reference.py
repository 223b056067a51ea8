"""The copy of ``paged_copy`` on host memory, and the reference of the Triton kernel. Axes ``[L, B, H, N, C]``.

Tokens are cut where either side changes block. Segments of equal length, S of them, move in one torch operation over
``[L, S, H, n, C]``: a thread that copies beside a busy interpreter waits for the GIL once per operation, so few and
large ones. A side whose segments lie at regular distances (the wire) is a strided view, the other one is indexed by
``[L, S]`` row addresses. Complex128 is the widest element torch moves, and moves at memcpy speed; int64 at 0.6 of it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvferry.kernels.paged_copy import Pages

Int64s = npt.NDArray[np.int64]

_FIRST = 64
_BOUNCE_BYTES = 512 << 10
"""Scratch of a copy with two indexed sides; it stays in the L2 cache."""
_MAX_NUMEL = 1 << 62
_ZERO = np.zeros(1, dtype=np.int64)

_space = (ctypes.c_char * ((1 << 56) - _FIRST)).from_address(_FIRST)
with torch.inference_mode(False):
    _memory = {
        word: torch.frombuffer(_space, dtype=dtype)
        for word, dtype in ((16, torch.complex128), (8, torch.int64), (4, torch.int32), (2, torch.int16))
    }
    _memory[1] = torch.frombuffer(_space, dtype=torch.uint8)
"""All of the address space as one tensor, by bytes per element; element 0 lies at address ``_FIRST``."""
_index_out = torch.ops.aten.index.Tensor_out


class _Side(NamedTuple):
    """Pages cut down to the box of the copy: its token t is token ``token + t`` of ``block_ids``.

    Layer l lies at ``low + layers[l]``, head included. ``layer_bits`` are all bits set in ``layers``, ``span`` the
    greatest of them. ``single`` says that all tokens lie in one block, or as if they did.
    """

    low: int
    layers: Int64s
    layer_bits: int
    span: int
    block_ids: Int64s
    block_size: int
    block_stride: int
    head_stride: int
    token_stride: int
    token: int
    single: bool

    def offsets(self, starts: Int64s) -> Int64s:
        """Bytes from a layer's address to each token of ``starts``, int64 [S]."""
        token = starts + self.token
        if self.single:
            return token * self.token_stride + int(self.block_ids[0]) * self.block_stride
        block, within = np.divmod(token, self.block_size)
        return np.asarray(self.block_ids[block] * self.block_stride + within * self.token_stride)

    def layer_step(self) -> int | None:
        """Bytes from layer to layer, None where they do not ascend in equal steps."""
        if len(self.layers) == 1:
            return 0
        step = int(self.layers[1])
        if self.layers[0] != 0 or self.span != step * (len(self.layers) - 1):
            return None
        regular = len(self.layers) == 2 or bool((self.layers[1:] - self.layers[:-1] == step).all())
        return step if regular else None


class _Tile(NamedTuple):
    """What one row index stands for, in words of ``word`` bytes: ``[H, n, C]``, joined where both sides are dense."""

    word: int
    shape: tuple[int, ...]
    dst_stride: tuple[int, ...]
    src_stride: tuple[int, ...]


def copy_pages_reference(dst: Pages, src: Pages, *, num_heads: int, num_tokens: int, content_bytes: int) -> None:
    """``copy_pages`` for host memory."""
    to, of = _side(dst, num_tokens), _side(src, num_tokens)
    for starts, tokens in _segments(to, of, num_tokens):
        shape = (num_heads, tokens, content_bytes)
        if _fits(to, shape) and _fits(of, shape):
            _copy(to, of, starts, shape)
        else:
            for layer in range(len(to.layers)):
                _copy(_one_layer(to, layer), _one_layer(of, layer), starts, shape)


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
        low=low + pages.head * pages.head_stride,
        layers=layers,
        layer_bits=int(np.bitwise_or.reduce(layers)),
        span=int(np.maximum.reduce(layers)),
        block_ids=block_ids,
        block_size=size,
        block_stride=pages.block_stride,
        head_stride=pages.head_stride,
        token_stride=pages.token_stride,
        token=token,
        single=single,
    )


def _one_layer(side: _Side, layer: int) -> _Side:
    return side._replace(low=side.low + int(side.layers[layer]), layers=_ZERO, layer_bits=0, span=0)


def _segments(to: _Side, of: _Side, num_tokens: int) -> Iterator[tuple[Int64s, int]]:
    """First tokens (int64 [S]) and length of the segments that leave no block, by length."""
    if to.single and of.single:
        yield _ZERO, num_tokens
    elif to.single or of.single:
        paged = of if to.single else to
        head = min(-paged.token % paged.block_size, num_tokens)
        body, tail = divmod(num_tokens - head, paged.block_size)
        if head:
            yield _ZERO, head
        if body:
            yield head + paged.block_size * np.arange(body), paged.block_size
        if tail:
            yield np.array([num_tokens - tail]), tail
    else:
        ends = [np.arange(-side.token % side.block_size, num_tokens, side.block_size) for side in (to, of)]
        cuts = np.unique(np.concatenate([[0, num_tokens], *ends]))
        lengths = np.diff(cuts)
        for length in np.unique(lengths):
            yield cuts[:-1][lengths == length], int(length)


def _fits(side: _Side, tile_bytes: tuple[int, int, int]) -> bool:
    """Whether overlapping tiles at every byte between the layers are a size that torch can count."""
    return side.span * math.prod(tile_bytes) < _MAX_NUMEL


def _copy(to: _Side, of: _Side, starts: Int64s, tile_bytes: tuple[int, int, int]) -> None:
    """Copy the segments at ``starts``, tiles of (heads, tokens, content bytes) each, in all layers."""
    to_offsets, of_offsets = to.offsets(starts), of.offsets(starts)
    bits = to.low | to.layer_bits | _bits(to_offsets) | of.low | of.layer_bits | _bits(of_offsets)
    tile = _tile(to, of, tile_bytes, bits)
    target = _strided(to, to_offsets, tile, tile.dst_stride)
    source = _strided(of, of_offsets, tile, tile.src_stride)
    if target is not None and source is not None:
        target.copy_(source)
    elif target is not None:
        rows, index = _indexed(of, of_offsets, tile, tile.src_stride)
        _index_out(rows, [index], out=target)
    elif source is not None:
        rows, index = _indexed(to, to_offsets, tile, tile.dst_stride)
        rows.index_put_((index,), source)
    else:
        into, to_index = _indexed(to, to_offsets, tile, tile.dst_stride)
        out_of, of_index = _indexed(of, of_offsets, tile, tile.src_stride)
        _bounce(into, to_index.reshape(-1), out_of, of_index.reshape(-1))


def _bits(values: Int64s) -> int:
    """All bits set in any value; the lowest is the greatest power of two that divides all of them."""
    return int(values[0]) if len(values) == 1 else int(np.bitwise_or.reduce(values))


def _tile(to: _Side, of: _Side, tile_bytes: tuple[int, int, int], bits: int) -> _Tile:
    heads, tokens, content = tile_bytes
    shape, dst_stride, src_stride = [content], [1], [1]
    for count, dst_step, src_step in (
        (tokens, to.token_stride, of.token_stride),
        (heads, to.head_stride, of.head_stride),
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
    """The segments as a view ``[L, S, *tile]``, or None where their addresses are not regular."""
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
    """Overlapping rows of tiles, and the index of (layer, segment) in them, int64 ``[L, S]``."""
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


def _bounce(into: torch.Tensor, to_index: torch.Tensor, out_of: torch.Tensor, of_index: torch.Tensor) -> None:
    """Copy rows ``of_index`` of one view to rows ``to_index`` of another, through a scratch buffer."""
    row_bytes = into[0].numel() * into.element_size()
    step = max(1, _BOUNCE_BYTES // row_bytes)
    scratch = torch.empty((min(step, len(of_index)), *into.shape[1:]), dtype=into.dtype, device="cpu")
    for first in range(0, len(of_index), step):
        part = of_index[first : first + step]
        rows = scratch[: len(part)]
        _index_out(out_of, [part], out=rows)
        into.index_put_((to_index[first : first + step],), rows)
