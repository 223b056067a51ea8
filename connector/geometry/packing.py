"""Caches whose backend has its own order of the tokens in a block, divided into parts that can be moved. Pure.

vLLM's attention on the CPU stores the KV of one (kernel block, head) as its kernels read it, by instruction set and
dtype: all keys, then all values, keys transposed or both in pairs. But a *tile* is a run of a few tokens. If all tiles
have the same form in memory, a tile can move to a block of another size. Keys and values are then each a strided view
like any cache: part ``k`` and part ``v``. The whole cache stays available too: between blocks of one size its bytes are
contiguous, while the bytes of a part may lie in thousands of short rows.

The order is derived from the position at which the backend's own writer puts each element (``places``). Two ranks can
exchange tiles of the same order, even if different code wrote them.

Legend: N tokens in a kernel block, D channels of a key or value; elements, not bytes, unless a name says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.view import CacheView

if TYPE_CHECKING:  # `kvferry plan` needs no PyTorch
    import torch

PARTS = ("k", "v")


@dataclass(frozen=True, slots=True)
class PackedPart:
    """The keys or the values of a packed cache, or all of it; the fields of ``RegionGeometry``."""

    part: str
    view: CacheView
    packing: str
    tile_tokens: int


def split_packed(view: CacheView, places: NDArray[np.int64]) -> tuple[PackedPart, ...]:
    """A cache with packed blocks as a whole, ``k`` and ``v``, these in the smallest tiles of the order; empty if the
    order cannot be divided so. A part whose tokens have bytes of their own, with channels in order, is not packed:
    ``packing`` is empty, though a token's bytes may lie in rows. ``view``: the cache, keys and values together.
    ``places``: [2, N, D], where channel d of the key (0) or value (1) of token t lies in its (block, head)."""
    kinds, tokens, channels = places.shape
    half = tokens * channels
    item_bytes, rest = divmod(view.content_bytes, kinds * channels)
    if kinds != len(PARTS) or rest or tokens != view.block_size or view.token_stride != view.content_bytes:
        return ()
    name = f"blocks of {tokens} tokens x {channels} channels, order {_digest(places)}"
    parts = [PackedPart("", view, name, tokens)]
    for kind, part in enumerate(PARTS):
        own = places[kind] - kind * half
        if not np.array_equal(np.sort(own, axis=None), np.arange(half)):
            return ()
        sizes = (size for size in range(1, tokens + 1) if tokens % size == 0)
        order = next(order for size in sizes if (order := _order_in_tiles(own, size)))
        of_part = replace(
            view, bases=tuple(base + kind * half * item_bytes for base in view.bases),
            content_bytes=channels * item_bytes, token_stride=order.token_stride * item_bytes, rows=order.rows,
            row_stride=order.row_stride * item_bytes,
        )  # fmt: skip
        parts.append(PackedPart(part, of_part, order.name, order.tile_tokens))
    return tuple(parts)


class _Order(NamedTuple):
    """The order of the keys or the values of a block: per row, one tile after the other."""

    tile_tokens: int
    token_stride: int
    rows: int
    row_stride: int
    name: str


def _order_in_tiles(places: NDArray[np.int64], tile_tokens: int) -> _Order | None:
    """The order in tiles of ``tile_tokens`` tokens, if the tiles have one form, equal distances, and equal rows.
    ``places`` [N, D] holds each of 0..N*D once, so a tile of N tokens always is one."""
    channels = places.shape[1]
    tiles = places.reshape(-1, tile_tokens, channels)
    first, starts = tiles[0], tiles[:, 0, 0] - tiles[0, 0, 0]
    step = int(starts[1]) if len(starts) > 1 else tile_tokens * channels
    if not np.array_equal(tiles, first + step * np.arange(len(tiles))[:, None, None]):
        return None
    taken = np.sort(first, axis=None)
    edges = np.flatnonzero(np.diff(taken, prepend=taken[0] - 2) != 1)  # where a row begins
    rows, row_strides = len(edges), np.diff(taken[edges])
    width = len(taken) // rows
    if (np.diff(edges) != width).any() or len(taken) % rows or (row_strides != row_strides[:1]).any():
        return None
    if taken[0] or width % tile_tokens:
        return None
    assert step == width, "equal tiles that fill a block, the first one first, follow each other in every row"
    order = np.searchsorted(taken, first)  # [tile_tokens, D], the position in a contiguous tile
    in_order = tile_tokens == 1 and np.array_equal(order[0], np.arange(channels))
    name = "" if in_order else f"tiles of {tile_tokens} tokens x {channels} channels, order {_digest(order)}"
    return _Order(tile_tokens, width // tile_tokens, rows, int(row_strides[0]) if rows > 1 else 0, name)


def _digest(order: NDArray[np.int64]) -> str:
    return hashlib.sha256(order.astype("<i4").tobytes()).hexdigest()[:16]


def alternatives(geometry: RankGeometry) -> dict[int, list[int]]:
    """The index of each whole cache that also has parts as regions, and the indices of its parts."""
    parts: dict[tuple[str, ...], list[int]] = {}
    for number, region in enumerate(geometry.regions):
        if region.part:
            parts.setdefault(region.layers, []).append(number)
    return {
        number: parts[region.layers]
        for number, region in enumerate(geometry.regions)
        if not region.part and region.layers in parts
    }


def excluded_regions(needs: RankGeometry, has: RankGeometry) -> set[int]:
    """D's regions that are not read from a P rank: the parts if P's blocks can be read whole, else the whole cache.
    ``needs``: D's rank. ``has``: P's rank."""
    over: set[int] = set()
    for whole, parts in alternatives(needs).items():
        layers = set(needs.regions[whole].layers)
        theirs = [region for region in has.regions if not layers.isdisjoint(region.layers)]
        over.update(parts if _as_a_whole(needs.regions[whole], theirs) else [whole])
    return over


def _as_a_whole(ours: RegionGeometry, theirs: Sequence[RegionGeometry]) -> bool:
    """True also if the peer has only whole caches: the error then names the difference."""
    wholes = [region for region in theirs if not region.part]
    alike = all((region.packing, region.tile_tokens) == (ours.packing, ours.tile_tokens) for region in wholes)
    return (bool(wholes) and alike) or not any(region.part for region in theirs)


Write = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"], None]
"""Writes keys [N, 1, D] and values [N, 1, D] into the key half and the value half of one cache [1, 1, 2N, D], tokens
to slots [N]."""


def element_order(
    write: Write, tokens: int, channels: int, *, given: torch.dtype, stored: torch.dtype, held: torch.dtype
) -> NDArray[np.int64] | None:
    """Where ``write`` puts each element inside a (block, head), [2, N, D] for ``split_packed``; ``None`` where the
    writer takes other arguments. It writes a block in which every element carries its number, one base-8 digit at a
    time, because these digits are exact in every dtype. Dtypes: ``given``, of keys and values; ``stored``, of the cache
    as a tensor (vLLM keeps fp8 as bytes); ``held``, of the elements of the cache."""
    import torch

    numbers = torch.arange(2 * tokens * channels).view(2, tokens, 1, channels)
    found = torch.zeros(2 * tokens * channels, dtype=torch.int64)
    scratch = torch.zeros(1, 1, 2 * tokens, channels, dtype=stored)
    keys, values = scratch.chunk(2, dim=2)
    slots = torch.arange(tokens)
    shift = 0
    while 8**shift < numbers.numel():
        digits = (numbers >> 3 * shift & 7).to(given)
        try:
            write(digits[0], digits[1], keys, values, slots)
        except (TypeError, RuntimeError):
            return None
        found |= scratch.flatten().view(held).to(torch.float32).to(torch.int64) << 3 * shift
        shift += 1
    order = torch.full_like(found, -1)
    order[found.clamp(0, len(found) - 1)] = torch.arange(len(found))
    return order.view(2, tokens, channels).numpy()
