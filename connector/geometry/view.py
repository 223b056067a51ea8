"""A KV cache as base addresses and strides. Axes ``[L, B, H, N, C]``; every stride is in bytes.

L layers, B kernel blocks, H KV heads, N tokens in a kernel block, C content bytes per (head, token), K and V together.
Block ids number manager blocks (pages). Attention kernels may see a manager block split into several kernel blocks.
A view comes from the shape, the strides and the address of each tensor. Bases and strides express padding, several
layers in one allocation, and layers interleaved inside a block. This module imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.errors import GeometryError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class CacheView:
    """Where one region lies in the memory of its rank: layers with the same strides and a base address each. Byte c of
    (layer, block, head, token) lies at
    ``bases[layer] + block * block_stride + head * head_stride + token * token_stride + c``. The content of a (head,
    token) may lie in ``rows`` pieces of ``row_bytes`` bytes each, ``row_stride`` bytes apart. Then byte c is byte
    ``c % row_bytes`` of row ``c // row_bytes``."""

    layers: tuple[str, ...]
    bases: tuple[int, ...]  # Byte address of block 0, per layer
    num_blocks: int  # Kernel blocks
    num_heads: int
    block_size: int  # Tokens per kernel block
    content_bytes: int
    block_stride: int
    head_stride: int
    token_stride: int
    blocks_per_page: int  # Kernel blocks per manager block
    dtype: str
    device: str
    rows: int = 1
    row_stride: int = 0

    @property
    def row_bytes(self) -> int:
        """Contiguous bytes of a (head, token)."""
        return self.content_bytes // self.rows

    @property
    def layout(self) -> str:
        """``HND``: the tokens of a head lie together. ``NHD``: the heads of a token lie together. ``HND/NHD``: there is
        one head or one token, so both hold."""
        if self.num_heads == 1 or self.block_size == 1:
            return "HND/NHD"
        return "HND" if self.head_stride > self.token_stride else "NHD"

    @property
    def page_tokens(self) -> int:
        """Tokens per manager block."""
        return self.block_size * self.blocks_per_page

    @property
    def num_pages(self) -> int:
        """Manager blocks."""
        return self.num_blocks // self.blocks_per_page

    @property
    def nbytes(self) -> int:
        """Content bytes of all layers, padding not counted."""
        return len(self.layers) * self.num_blocks * self.num_heads * self.block_size * self.content_bytes


def view_of(tensors: Mapping[str, torch.Tensor], page_tokens: int, num_pages: int | None = None) -> CacheView:
    """The view of layers of one form: ``[B, H, N, C]`` or, for MLA, ``[B, N, C]``, C contiguous, other strides free.
    ``page_tokens``: of a manager block; a multiple of N. ``num_pages``: manager blocks, which tell a split manager
    block from a state of several tokens: the shapes are the same. Raises GeometryError: no layer; another form, or one
    that overlaps or differs from the first; a block count or ``page_tokens`` that does not fit. Names the layer."""
    if not tensors:
        raise GeometryError("a layer group has no layers, expected at least one")
    names = tuple(tensors)
    first = _form(names[0], tensors[names[0]])
    for name in names[1:]:
        form = _form(name, tensors[name])
        for field, ours, theirs in zip(_FORM, first, form, strict=True):
            if ours != theirs:
                raise GeometryError(
                    f"layer {name!r}: {field} {theirs} differs from {ours} of layer {names[0]!r} in the same group; "
                    "layers of one group share one shape, strides and dtype"
                )
    (blocks, heads, tokens, content), strides, dtype, device = first
    if page_tokens < 1 or page_tokens % tokens:
        raise GeometryError(
            f"layer {names[0]!r}: a manager block of {page_tokens} tokens does not split into blocks of {tokens}, "
            "the tensor's tokens per block; expected a multiple"
        )
    per_page = page_tokens // tokens
    if blocks % per_page or (num_pages is not None and blocks != num_pages * per_page):
        expected = f"a multiple of {per_page}" if num_pages is None else f"{num_pages} x {per_page}"
        raise GeometryError(
            f"layer {names[0]!r}: {blocks} kernel blocks of {tokens} tokens, expected {expected} "
            f"for manager blocks of {page_tokens} tokens"
        )
    return CacheView(
        layers=names, bases=tuple(int(tensors[name].data_ptr()) for name in names), num_blocks=blocks, num_heads=heads,
        block_size=tokens, content_bytes=content, block_stride=strides[0], head_stride=strides[1],
        token_stride=strides[2], blocks_per_page=per_page, dtype=dtype, device=device,
    )  # fmt: skip


def first_outside(ids: NDArray[np.int64], bound: int) -> int | None:
    """The first of ``ids`` outside ``0..bound - 1``, if there is one."""
    unsigned = ids.view(np.uint64)  # negative ids become larger than any bound
    if not len(ids) or int(np.maximum.reduce(unsigned)) < bound:
        return None
    return int(ids[unsigned >= bound][0])


def split_pages(ids: NDArray[np.int64], blocks_per_page: int) -> NDArray[np.int64]:
    """The kernel block ids of manager blocks, in the order of the tokens: ``[len(ids) * blocks_per_page]``."""
    if blocks_per_page == 1:
        return ids
    return (ids[:, None] * blocks_per_page + np.arange(blocks_per_page)).reshape(-1)


def kernel_block_ids(view: CacheView, block_ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """``split_pages`` of ids from an engine. Raises GeometryError: they are no flat list, or one is out of range."""
    ids = np.asarray(block_ids, dtype=np.int64)
    if ids.ndim != 1:
        raise GeometryError(f"block ids have {ids.ndim} dimensions, expected a flat list")
    bad = first_outside(ids, view.num_pages)
    if bad is not None:
        raise GeometryError(f"block id {bad} is outside 0..{view.num_pages - 1} of this cache")
    return split_pages(ids, view.blocks_per_page)


@lru_cache(maxsize=256)
def row_bases(bases: tuple[int, ...], rows: int, row_stride: int) -> NDArray[np.int64]:
    """The address of every row of every layer, ``[len(bases) * rows]``, the rows of a layer together. The array is
    read-only, because all hand-overs of these layers share it."""
    first = np.asarray(bases, dtype=np.int64)
    found = first if rows == 1 else (first[:, None] + row_stride * np.arange(rows, dtype=np.int64)).reshape(-1)
    found.setflags(write=False)
    return found


_FORM = ("shape", "strides", "dtype", "device")
"""What all tensors of a view share: the shape ``[B, H, N, C]`` and the strides of B, H and N, both in bytes."""


def _form(name: str, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], str, str]:
    """The form of a tensor, with one head where it has no axis H. Raises GeometryError: see ``view_of``."""
    shape, stride, item = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.element_size())
    if len(shape) == 3:
        shape, stride = (shape[0], 1, *shape[1:]), (stride[0], 0, *stride[1:])
    if len(shape) != 4:
        raise GeometryError(
            f"layer {name!r}: cache tensor of shape {list(shape)}, expected [blocks, heads, tokens, content] "
            "or [blocks, tokens, content]"
        )
    if min(shape) < 1:
        raise GeometryError(f"layer {name!r}: cache tensor of shape {list(shape)} is empty")
    if stride[3] != 1 and shape[3] != 1:
        raise GeometryError(
            f"layer {name!r}: content has a stride of {stride[3]} elements, expected 1 (the last dimension contiguous)"
        )
    blocks, heads, tokens, content = (int(size) for size in shape)
    content *= item
    # No address depends on the stride of an axis of length 1, and engines leave any value there.
    token_stride = int(stride[2]) * item if tokens > 1 else content
    head_stride = int(stride[1]) * item if heads > 1 else token_stride * tokens
    block_stride = int(stride[0]) * item if blocks > 1 else max(head_stride * heads, token_stride * tokens)
    _check_distinct(name, ((tokens, token_stride), (heads, head_stride), (blocks, block_stride)), content)
    strides = (block_stride, head_stride, token_stride)
    return (blocks, heads, tokens, content), strides, str(tensor.dtype).removeprefix("torch."), str(tensor.device)


def _check_distinct(name: str, dims: Sequence[tuple[int, int]], content: int) -> None:
    """Check that no two (block, head, token) share a byte: each stride must be at least as long as all that the axes of
    smaller strides cover together. ``dims``: length and stride of each axis; ``content``: C, in bytes."""
    reach = content
    for size, stride in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if stride < reach:
            raise GeometryError(
                f"layer {name!r}: elements overlap, a stride of {stride} bytes steps into {reach} bytes of content"
            )
        reach += (size - 1) * stride
