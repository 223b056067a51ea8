"""The regions of a rank, from the caches that its engine registers.

A region has layers of one form, with one block table. A layer group has one region for each form of its caches, a
group of states one for each section and form, a group of rings one for each head and form. Where packed blocks can be
divided, the keys and the values are regions beside the whole cache (``packing``). A layer that uses the cache of
another layer is in no region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.connector.geometry.dtypes import canonical
from kvferry.connector.geometry.engine_types import CacheDtype, LayerGroup, RankInfo
from kvferry.connector.geometry.packing import PackedPart, split_packed
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.connector.geometry.recurrent_state import Section
from kvferry.connector.geometry.topology import TpKVTopology
from kvferry.connector.geometry.view import CacheView, view_of
from kvferry.transport.errors import GeometryError

if TYPE_CHECKING:
    import torch

ElementOrder = Callable[[str], NDArray[np.int64] | None]
"""By layer name, the index of each element inside a (block, head), ``[2, N, D]`` as ``packing.split_packed`` takes it;
``None`` if the backend's order is not known."""

NO_DRAFTS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Region:
    """A region and its block table."""

    table: int  # The number of the block table that maps its tokens to blocks
    geometry: RegionGeometry  # As its peers see it
    view: CacheView  # Where it lies in memory


def regions(
    groups: Sequence[LayerGroup], kv_caches: Mapping[str, torch.Tensor], info: RankInfo, num_blocks: int | None = None,
    places: ElementOrder | None = None, drafts: Mapping[str, str] = NO_DRAFTS,
) -> list[Region]:  # fmt: skip
    """The regions of one rank, in the order of ``groups``. ``kv_caches``: by layer name, ``[B, H, N, C]`` or
    ``[B, N, C]``. ``num_blocks``: manager blocks. ``places``: called for one layer of each packed group. ``drafts``:
    layers of a model that drafts, and its name; states and rings count as the model's own. Raises GeometryError: a
    cache is missing, is not carried in this form, or has other heads than the rank should hold; names the layer."""
    found = []
    for group in groups:
        for tensors in _alike(group, kv_caches, drafts):
            view = _by_token(view_of(tensors, group.block_size // group.entry_tokens, num_blocks), group.entry_tokens)
            for section in group.sections:
                part = _section_view(section, view)
                heads = _held(part, info, section.total_heads)
                found.append(Region(group.table, section.region(part.layers, *heads), part))
            if group.kind == "state" and not group.sections:
                found += [Region(group.table, ring.region(part.layers, 0, 1), part) for ring, part in _rings(view)]
            elif not group.sections:
                for packed in _parts(group, view, places):
                    geometry = _geometry(group, packed, info, drafts.get(view.layers[0], ""))
                    found.append(Region(group.table, geometry, packed.view))
    return found


def rank_geometry(info: RankInfo, groups: Sequence[LayerGroup], found: Sequence[Region]) -> RankGeometry:
    """The geometry that a rank sends to its peers. ``groups``: the layer groups of the whole engine."""
    return RankGeometry(
        tp_rank=info.tp_rank, tp_size=info.tp_size, pp_rank=info.pp_rank, pp_size=info.pp_size,
        head_counts=tuple(sorted({heads for group in groups for heads in group.head_counts})),
        shardings=tuple(sorted({group.sharding for group in groups})),
        regions=tuple(region.geometry for region in found),
    )  # fmt: skip


def _alike(
    group: LayerGroup, kv_caches: Mapping[str, torch.Tensor], drafts: Mapping[str, str]
) -> list[dict[str, torch.Tensor]]:
    """The caches of a group by layer name, one mapping for each form and model; of layers that share a cache only the
    first, which is never one that drafts beside one of the model itself."""
    by_form: dict[object, dict[str, torch.Tensor]] = {}
    places: set[tuple[int, object]] = set()
    for name in sorted(group.layers, key=drafts.__contains__):
        tensor = kv_caches.get(name)
        if tensor is None:
            raise GeometryError(f"layer {name!r}: the engine registered no cache for it")
        form = tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype), str(tensor.device)
        place = tensor.data_ptr(), form
        if place not in places:
            places.add(place)
            by_form.setdefault((form, drafts.get(name)), {})[name] = tensor
    return list(by_form.values())


def _parts(group: LayerGroup, view: CacheView, places: ElementOrder | None) -> tuple[PackedPart, ...]:
    """The whole cache and, where the order of its packed blocks is known, its keys and its values. Packed blocks whose
    order is not known stay whole: the tile is the kernel block, so a peer must have the same block size."""
    order = places(view.layers[0]) if group.packing and places is not None else None
    parts = () if order is None else split_packed(view, order)
    entries = f"{group.entry_tokens} tokens in an entry" if group.entry_tokens > 1 else ""
    packing, tile = ", ".join(filter(None, (group.packing, entries))), view.block_size if group.packing else 1
    return parts or (PackedPart("", view, packing, max(tile, group.entry_tokens)),)


def _geometry(group: LayerGroup, part: PackedPart, info: RankInfo, draft: str) -> RegionGeometry:
    view, cache_dtype = part.view, group.cache_dtype or CacheDtype(part.view.dtype)
    start, count = _held(view, info, group.total_heads)
    scales = cache_dtype.scales
    return RegionGeometry(
        kind=group.kind, layers=view.layers, block_size=group.block_size, head_start=start, num_heads=count,
        total_heads=group.total_heads, content_bytes=view.content_bytes, dtype=canonical(cache_dtype.dtype),
        keys=cache_dtype.keys, scales=tuple(scales.get(layer, (1.0, 1.0)) for layer in view.layers) if scales else (),
        window=group.window, part=part.part, packing=part.packing, tile_tokens=part.tile_tokens, rows=view.rows,
        shard=group.sharding.shard(info.tp_rank), draft=draft,
    )  # fmt: skip


def _held(view: CacheView, info: RankInfo, total_heads: int) -> tuple[int, int]:
    """The global KV heads of the rank as ``(start, count)``. Raises GeometryError: the cache has another number."""
    start, count = TpKVTopology.head_interval(info.tp_rank, info.tp_size, total_heads)
    if view.num_heads != count:
        raise GeometryError(
            f"layer {view.layers[0]!r}: the cache holds {view.num_heads} heads, "
            f"rank {info.tp_rank} of {info.tp_size} has {count} of the model's {total_heads}"
        )
    return start, count


def _by_token(view: CacheView, tokens: int) -> CacheView:
    """The view of a cache whose entries stand for ``tokens`` tokens each, as if every token had its part of the bytes.
    Only whole entries move, as tiles of ``tokens`` tokens. Raises GeometryError: their bytes do not divide so."""
    if tokens == 1:
        return view
    content, rest = divmod(view.content_bytes, tokens)
    if rest or view.token_stride != view.content_bytes:
        raise GeometryError(
            f"layer {view.layers[0]!r}: entries of {view.content_bytes} bytes for {tokens} tokens, {view.token_stride} "
            f"bytes apart, are not carried; expected a multiple of {tokens}, one entry behind another"
        )
    return replace(view, block_size=view.block_size * tokens, content_bytes=content, token_stride=content)


def _rings(view: CacheView) -> Iterator[tuple[Section, CacheView]]:
    """The rings of a request, a block each. All ranks hold the same, so each head is a section with one head in all.
    Where a token lies depends on the number of rows, so P and D must have as many."""
    rows, content = view.page_tokens, view.content_bytes
    if view.blocks_per_page > 1:
        raise GeometryError(
            f"layer {view.layers[0]!r}: rings of {rows} rows in blocks of {view.block_size}, expected one"
        )
    for head in range(view.num_heads):
        offset = head * view.head_stride
        ring = Section(
            f"ring {head}", 1, 1, rows, content, offset, rows * view.token_stride, view.token_stride, view.dtype,
            f"ring of {rows} rows",
        )  # fmt: skip
        bases = tuple(base + offset for base in view.bases)
        yield ring, replace(view, bases=bases, num_heads=1, head_stride=ring.head_stride)


def _section_view(section: Section, pages: CacheView) -> CacheView:
    """The view of a section, ``[B, heads, rows, content_bytes]``. ``pages``: the view of the pages as raw bytes,
    ``[B, 1, 1, C]``. Raises GeometryError: the pages have another form, or fewer bytes than the section needs."""
    if (pages.num_heads, pages.block_size) != (1, 1) or pages.content_bytes < section.end:
        raise GeometryError(
            f"layer {pages.layers[0]!r}: pages of [{pages.num_heads}, {pages.block_size}, {pages.content_bytes}], "
            f"its states need [1, 1, {section.end}] at least"
        )
    return replace(
        pages, bases=tuple(base + section.offset for base in pages.bases), num_heads=section.heads,
        block_size=section.rows, content_bytes=section.content_bytes, head_stride=section.head_stride,
        token_stride=section.row_stride, dtype=section.dtype,
    )  # fmt: skip
