"""From the caches that an engine registers to regions: layers that lie in memory alike, under one block table.

A region is what plans, packing and the handshake deal with. A layer group gives one, or more where its layers differ in
form, and one for each section of a state. Beside a cache whose backend packs blocks in an order that can be divided
there are its keys and its values (``packing``). Layers that use another one's cache are left out: their bytes are that
layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvferry.connector.geometry.dtypes import canonical
from kvferry.connector.geometry.engine_types import CacheDtype, LayerGroup, RankInfo
from kvferry.connector.geometry.packing import PackedPart, split_packed
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.recurrent_state import Section
from kvferry.connector.geometry.topology import TpKVTopology
from kvferry.connector.geometry.view import CacheView, TensorLike, view_of
from kvferry.transport.errors import GeometryError

ElementOrder = Callable[[str], NDArray[np.int64] | None]
"""Gives the index of each element inside a (block, head) of a layer, as ``packing.split_packed`` takes it; None if the
backend's order is not known."""


@dataclass(frozen=True, slots=True)
class Region:
    """``table``: the number of the block table that maps its tokens."""

    table: int
    geometry: RegionGeometry
    view: CacheView


def regions(
    groups: Sequence[LayerGroup],
    kv_caches: Mapping[str, TensorLike],
    info: RankInfo,
    num_blocks: int | None = None,
    places: ElementOrder | None = None,
) -> list[Region]:
    """The regions of one rank, in order of ``groups``. A group of which a pipeline stage has no layers gives none.

    Args:
        groups: the engine's layer groups.
        kv_caches: by layer name, ``[B, H, N, C]`` or ``[B, N, C]``.
        info: the rank's place.
        num_blocks: manager blocks, where known.
        places: called for one layer of each packed group.

    Raises:
        GeometryError: a cache that is missing, or of a form that is not carried; names the layer.
    """
    found = []
    for group in groups:
        for tensors in _alike(group, kv_caches):
            view = view_of(tensors, group.block_size, num_blocks)
            for section in group.sections:
                part = _section_view(section, view)
                found.append(Region(group.table, _section_geometry(section, part, info), part))
            if not group.sections:
                for packed in _parts(group, view, places):
                    found.append(Region(group.table, _geometry(group, packed, info), packed.view))
    return found


def rank_geometry(info: RankInfo, groups: Sequence[LayerGroup], found: Sequence[Region]) -> RankGeometry:
    """The geometry that a rank sends to its peers. ``groups``: the layer groups of the whole engine."""
    return RankGeometry(
        tp_rank=info.tp_rank,
        tp_size=info.tp_size,
        pp_rank=info.pp_rank,
        pp_size=info.pp_size,
        head_counts=tuple(sorted({heads for group in groups for heads in group.head_counts})),
        shardings=tuple(sorted({group.sharding for group in groups})),
        regions=tuple(region.geometry for region in found),
    )


def _alike(group: LayerGroup, kv_caches: Mapping[str, TensorLike]) -> list[dict[str, TensorLike]]:
    """A group's caches by layer name, those of one form together; each place in memory once."""
    by_form: dict[object, dict[str, TensorLike]] = {}
    places: set[tuple[int, object]] = set()
    for name in group.layers:
        tensor = kv_caches.get(name)
        if tensor is None:
            raise GeometryError(f"layer {name!r}: the engine registered no cache for it")
        form = tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype), str(tensor.device)
        place = tensor.data_ptr(), form
        if place not in places:
            places.add(place)
            by_form.setdefault(form, {})[name] = tensor
    return list(by_form.values())


def _parts(group: LayerGroup, view: CacheView, places: ElementOrder | None) -> tuple[PackedPart, ...]:
    """Where the order of packed blocks is not known they stay whole, and pass to blocks of the same size only."""
    order = places(view.layers[0]) if group.packing and places is not None else None
    parts = () if order is None else split_packed(view, order)
    return parts or (PackedPart("", view, group.packing, view.block_size if group.packing else 1),)


def _geometry(group: LayerGroup, part: PackedPart, info: RankInfo) -> RegionGeometry:
    view, numbers = part.view, group.numbers or CacheDtype(part.view.dtype)
    start, count = _held(view, info, group.total_heads)
    return RegionGeometry(
        kind=group.kind,
        layers=view.layers,
        block_size=group.block_size,
        head_start=start,
        num_heads=count,
        total_heads=group.total_heads,
        content_bytes=view.content_bytes,
        dtype=canonical(numbers.dtype),
        keys=numbers.keys,
        scales=tuple(numbers.scales.get(layer, (1.0, 1.0)) for layer in view.layers) if numbers.scales else (),
        window=group.window,
        part=part.part,
        packing=part.packing,
        tile_tokens=part.tile_tokens,
        rows=view.rows,
        shard=group.sharding.shard(info.tp_rank),
    )


def _held(view: CacheView, info: RankInfo, total_heads: int) -> tuple[int, int]:
    start, count = TpKVTopology.head_interval(info.tp_rank, info.tp_size, total_heads)
    if view.num_heads != count:
        raise GeometryError(
            f"layer {view.layers[0]!r}: the cache holds {view.num_heads} heads, "
            f"rank {info.tp_rank} of {info.tp_size} has {count} of the model's {total_heads}"
        )
    return start, count


def _section_view(section: Section, pages: CacheView) -> CacheView:
    """A section of pages that are raw bytes, ``[B, 1, 1, C]``; its rows take the place of tokens."""
    if (pages.num_heads, pages.block_size) != (1, 1) or pages.content_bytes < section.end:
        raise GeometryError(
            f"layer {pages.layers[0]!r}: pages of [{pages.num_heads}, {pages.block_size}, {pages.content_bytes}], "
            f"its states need [1, 1, {section.end}] at least"
        )
    return replace(
        pages,
        bases=tuple(base + section.offset for base in pages.bases),
        num_heads=section.heads,
        block_size=section.rows,
        content_bytes=section.content_bytes,
        head_stride=section.head_stride,
        token_stride=section.row_stride,
        dtype=section.dtype,
    )


def _section_geometry(section: Section, view: CacheView, info: RankInfo) -> RegionGeometry:
    start, count = _held(view, info, section.total_heads)
    return RegionGeometry(
        kind="state",
        layers=view.layers,
        part=section.name,
        block_size=section.rows,
        head_start=start,
        num_heads=count,
        total_heads=section.total_heads,
        content_bytes=section.content_bytes,
        dtype=section.dtype,
        packing=section.packing,
        tile_tokens=section.rows,
    )
