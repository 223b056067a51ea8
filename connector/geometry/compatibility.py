"""Whether KV can pass between two ranks, by the geometries that they send in the handshake. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.connector.geometry.dtypes import check_elements, check_same_elements, common_layers
from kvferry.connector.geometry.packing import excluded_regions
from kvferry.connector.geometry.rank_geometry import MAX_REGION_LAYERS, RankGeometry, RegionGeometry
from kvferry.connector.geometry.topology import MAX_RANKS, TpKVTopology
from kvferry.transport.errors import GeometryError, IncompatiblePeerError

MAX_BLOCK_TOKENS = 1 << 20  # Bound on a block; a peer names its own, and kernel blocks of one are counted out
MAX_LAYERS = 8192  # Bound on the layers of a rank, over all regions
LayerIndex = dict[tuple[str, str, str], tuple[int, int]]  # (region, place in it) by part, model that drafts, layer name


def compatible(local: RankGeometry, remote: RankGeometry, *, consumer: bool = True, convert: bool = False) -> None:
    """Check that KV can pass between two ranks; layouts, block sizes and parallel sizes may differ. ``consumer``: we
    are D. Raises IncompatiblePeerError: names the field and both values; GeometryError: a geometry that cannot be."""
    for geometry in (local, remote):
        check_geometry(geometry)
    needs, has = (local, remote) if consumer else (remote, local)
    held = layer_index(has)
    known = {(draft, layer) for _, draft, layer in held}
    missing = []
    over = excluded_regions(needs, has)
    for number, region in enumerate(needs.regions):
        if number in over:
            continue
        checked: set[int] = set()
        for layer in region.layers:
            where = held.get((region.part, region.draft, layer))
            if where is None:
                if (region.draft, layer) in known:
                    _refuse_parts(layer, *((needs, has) if consumer else (has, needs)))
                if not region.draft:
                    missing.append(layer)
            elif where[0] not in checked:
                checked.add(where[0])
                theirs = has.regions[where[0]]
                _same_form(layer, *((region, theirs) if consumer else (theirs, region)), convert)
    if has.pp_size == 1 and missing:
        refuse_missing(missing, len(known), consumer)


def check_geometry(geometry: RankGeometry) -> None:
    """Check that a rank can have this geometry. Raises GeometryError: too many layers, ranks outside sizes, heads other
    than the rank's interval, a token shard of another rank, a layer listed twice, or scales that are none."""
    counts = [len(region.layers) for region in geometry.regions]
    if sum(counts) > MAX_LAYERS:
        raise GeometryError(f"{sum(counts)} layers in {len(counts)} regions, limit {MAX_LAYERS}")
    if max(counts, default=0) > MAX_REGION_LAYERS:
        raise GeometryError(f"{max(counts)} layers of one form in one block table, limit {MAX_REGION_LAYERS}")
    for axis in ("tp", "pp"):
        rank, size = getattr(geometry, f"{axis}_rank"), getattr(geometry, f"{axis}_size")
        if size > MAX_RANKS or rank >= size:
            raise GeometryError(
                f"{axis}_rank {rank} of {axis}_size {size}, expected a rank below the size, at most {MAX_RANKS}"
            )
    for region in geometry.regions:
        heads = region.total_heads
        if heads not in geometry.head_counts:
            raise GeometryError(
                f"layer {region.layers[0]!r}: {heads} heads in all, which is not one of the head counts "
                f"{', '.join(map(str, geometry.head_counts))}"
            )
        expected = TpKVTopology.head_interval(geometry.tp_rank, geometry.tp_size, heads)
        if (region.head_start, region.num_heads) != expected:
            raise GeometryError(
                f"layer {region.layers[0]!r}: tp_rank {geometry.tp_rank} of {geometry.tp_size} holds heads "
                f"{region.head_start}..{region.head_start + region.num_heads}, "
                f"expected {expected[0]}..{sum(expected)} of {heads}"
            )
        if region.block_size > MAX_BLOCK_TOKENS:
            raise GeometryError(
                f"layer {region.layers[0]!r}: blocks of {region.block_size} tokens, limit {MAX_BLOCK_TOKENS}"
            )
        _check_shard(region, geometry)
        check_elements(region)
    layer_index(geometry)


def _check_shard(region: RegionGeometry, geometry: RankGeometry) -> None:
    shard = region.shard
    who = (
        f"layer {region.layers[0]!r}: rank {shard.rank} of {shard.size} that share tokens out, {shard.interleave} each"
    )
    if shard.sharding not in geometry.shardings or shard != shard.sharding.shard(geometry.tp_rank):
        raise GeometryError(f"{who}, is not tp_rank {geometry.tp_rank} of an engine with {geometry.shardings}")
    if shard.whole:
        return
    if region.kind not in ("full", "mla") or region.packing:
        raise GeometryError(f"{who}: caches of kind {region.kind}{region.packing and ', packed,'} are not carried so")
    if region.block_size % shard.interleave:
        raise GeometryError(f"{who}: that does not divide a block of {region.block_size}")
    if geometry.tp_size // region.total_heads < shard.size:
        raise GeometryError(
            f"{who}: of {geometry.tp_size} tensor-parallel ranks, fewer hold each of {region.total_heads} heads"
        )


def draft_layers(local: RankGeometry, planned: Iterable[tuple[int, int, int]] = ()) -> list[tuple[int, int]]:
    """The layers of D's model that drafts, as (region, place in it), but for those in ``planned``: (region, first
    place, number of places)."""
    read = {layer for number, first, n in planned for layer in local.regions[number].layers[first : first + n]}
    return [
        (number, place)
        for number, region in enumerate(local.regions)
        if region.draft and not region.part  # a cache whose parts are regions, too, is a region as a whole
        for place, layer in enumerate(region.layers)
        if layer not in read
    ]


def layer_index(geometry: RankGeometry) -> LayerIndex:
    """Where each layer is. Raises GeometryError: a layer listed twice."""
    index: LayerIndex = {}
    for g, region in enumerate(geometry.regions):
        for i, layer in enumerate(region.layers):
            if (region.part, region.draft, layer) in index:
                raise GeometryError(f"layer {layer!r} is listed twice")
            index[region.part, region.draft, layer] = g, i
    return index


def _same_form(layer: str, ours: RegionGeometry, theirs: RegionGeometry, convert: bool) -> None:
    """Blocks outside a window may be kept by one side and not by the other; what a block holds is the same."""
    name = f"layer {layer!r}" + (f" ({ours.part})" if ours.part else "")
    if ours.kind != theirs.kind and {ours.kind, theirs.kind} & {"mla", "state"}:
        raise IncompatiblePeerError(f"kind of {name}", ours.kind, theirs.kind)
    # What an operator sets comes before the sizes that follow from it.
    fields = ["total_heads", "packing", "tile_tokens", "rows"]
    if ours.kind == theirs.kind:
        fields.append("window")
    for field in fields:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            raise IncompatiblePeerError(f"{field} of {name}", mine, other)
    check_same_elements(name, ours, theirs, common_layers(ours, theirs), convert=convert)


def _refuse_parts(layer: str, ours: RankGeometry, theirs: RankGeometry) -> None:
    """One side's packed blocks are divided into parts and the other's are not, or are otherwise."""
    mine, other = (
        ", ".join(f"{r.part or 'whole'} ({r.packing or 'not packed'})" for r in side.regions if layer in r.layers)
        for side in (ours, theirs)
    )
    raise IncompatiblePeerError(f"packing of layer {layer!r}", mine, other)


def refuse_missing(missing: Sequence[str], held: int, consumer: bool) -> None:
    """Raises IncompatiblePeerError: the first of the layers that D needs and P, with ``held`` others, lacks."""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    needed, lacking = f"{missing[0]!r}{more} needed", f"{held} layers without it"
    raise IncompatiblePeerError("layers", *((needed, lacking) if consumer else (lacking, needed)))
