"""The meaning of a KV cache's elements, whether it agrees on two ranks, and the error of a conversion. Pure.

An element that is stored as x means x times the scale of K or V of its layer; only fp8 has scales other than 1. If
dtype and scales agree, bytes are copied. If they differ, a D with ``convert_dtype`` on converts the arriving elements
(``kernels.convert``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.connector.geometry.engine_types import CacheDtype
from kvferry.connector.geometry.rank_geometry import RankGeometry, RegionGeometry
from kvferry.kernels.float_formats import FORMATS, Conversion
from kvferry.transport.errors import ConfigError, GeometryError, IncompatiblePeerError

ALIASES = {
    "float": "float32",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_inc": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""vLLM's names of a ``--kv-cache-dtype``, and torch's name where it differs."""
CONVERTIBLE = FORMATS  # Dtypes that can be converted
SCALED = ("float8_e4m3fn", "float8_e5m2")


def canonical(dtype: str) -> str:
    """torch's name of a dtype, from any name: ``torch.float16``, ``half``, ``fp8``. An unknown name does not change."""
    name = dtype.removeprefix("torch.")
    return ALIASES.get(name, name)


def scales(region: RegionGeometry, place: int) -> tuple[float, float]:
    """The scales of K and V of the layer at index ``place``."""
    return region.scales[place] if region.scales else (1.0, 1.0)


def check_elements(region: RegionGeometry) -> None:
    """Check the dtype and the scales that a peer sent. Raises GeometryError: invalid scales, or not one pair of scales
    for each layer; names the layer."""
    name = region.layers[0]
    if len(region.scales) not in (0, len(region.layers)):
        raise GeometryError(f"layer {name!r}: {len(region.scales)} pairs of scales for {len(region.layers)} layers")
    for layer, pair in zip(region.layers, region.scales, strict=False):
        if not all(math.isfinite(scale) and scale > 0 for scale in pair):
            raise GeometryError(f"layer {layer!r}: scales {pair[0]:g} and {pair[1]:g}, expected positive numbers")
    known = CONVERTIBLE.get(region.dtype)
    if known is not None and region.content_bytes % known.itemsize:
        raise GeometryError(f"layer {name!r}: {region.content_bytes} bytes of content are no number of {region.dtype}")


def check_same_elements(
    name: str, ours: RegionGeometry, theirs: RegionGeometry, places: list[tuple[int, int]], *, convert: bool
) -> None:
    """Check that the elements of two regions mean the same, or can be converted if ``convert``. Raises
    IncompatiblePeerError: names the field and both values. ``name``: of the regions. ``places``: ``common_layers``."""
    if ours.dtype == theirs.dtype:
        if ours.content_bytes != theirs.content_bytes:
            raise IncompatiblePeerError(f"content_bytes of {name}", ours.content_bytes, theirs.content_bytes)
        differing = [(i, j) for i, j in places if scales(ours, i) != scales(theirs, j)]
        if not differing:
            return
        i, j = differing[0]
        what = f"scales of K and V of layer {ours.layers[i]!r}"
        values = [" and ".join(f"{scale:.9g}" for scale in scales(*side)) for side in ((ours, i), (theirs, j))]
    else:
        what, values = f"dtype of {name}", [ours.dtype, theirs.dtype]
    why = _not_converted(ours, theirs, places) if convert else "convert_dtype is off"
    if why:
        raise IncompatiblePeerError(f"{what} ({why})", *values)
    sizes = [region.content_bytes // CONVERTIBLE[region.dtype].itemsize for region in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise IncompatiblePeerError(f"elements per head and token of {name}", *sizes)
    if _scaled(ours, theirs, places) and ours.keys != theirs.keys:
        values = ["unknown" if keys is None else str(keys) for keys in (ours.keys, theirs.keys)]
        raise IncompatiblePeerError(f"elements of K in {name}", *values)


def _not_converted(ours: RegionGeometry, theirs: RegionGeometry, places: list[tuple[int, int]]) -> str:
    """Why the elements of these regions cannot be converted; empty if they can."""
    for region in (ours, theirs):
        if region.kind == "state":
            return "states are not converted"
        if region.packing or region.part:
            return "blocks whose tokens are packed are not converted"
        if region.dtype not in CONVERTIBLE:
            return f"{region.dtype} is not converted"
    if _scaled(ours, theirs, places) and ours.keys is None and theirs.keys is None:
        return "where K ends is not known"
    return ""


def _scaled(ours: RegionGeometry, theirs: RegionGeometry, places: list[tuple[int, int]]) -> bool:
    return any({*scales(ours, i), *scales(theirs, j)} != {1.0} for i, j in places)


def converted_pairs(local: RankGeometry, remote: RankGeometry) -> frozenset[tuple[int, int]]:
    """The index pairs of the regions of D and P between which elements are converted."""
    return frozenset(
        (i, j)
        for i, ours in enumerate(local.regions)
        for j, theirs in enumerate(remote.regions)
        if (ours.part, ours.draft) == (theirs.part, theirs.draft) and (places := common_layers(ours, theirs))
        if ours.dtype != theirs.dtype or any(scales(ours, a) != scales(theirs, b) for a, b in places)
    )


def common_layers(ours: RegionGeometry, theirs: RegionGeometry) -> list[tuple[int, int]]:
    """The indices of the layers that both regions have, in ours and in theirs."""
    there = {layer: place for place, layer in enumerate(theirs.layers)}
    return [(place, there[layer]) for place, layer in enumerate(ours.layers) if layer in there]


@dataclass(frozen=True, slots=True)
class WireElements:
    """Elements on the wire."""

    region: RegionGeometry  # P's
    layer: int  # The index of the first layer in it

    def conversion(self, ours: RegionGeometry, layer: int, num_layers: int) -> Conversion:
        """The conversion to ``num_layers`` layers of ``ours``, from index ``layer`` on."""
        content = ours.content_bytes // CONVERTIBLE[ours.dtype].itemsize
        sides = ((self.region, self.layer), (ours, layer))
        of, to = (
            np.array([scales(region, first + n) for n in range(num_layers)], dtype=np.float32)
            for region, first in sides
        )
        # With scales of 1 the end of K does not matter; otherwise it is known (``check_same_elements``).
        return Conversion(self.region.dtype, ours.dtype, content, ours.keys or 0, of, to)


def layer_cache_dtype(
    spec: Any, names: Sequence[str], layers: Mapping[str, Any], cache_dtype: str, *, fnuz: bool = False
) -> CacheDtype | None:
    """The cache dtype of the layers ``names`` of one of vLLM's specs; ``None`` for states: their elements differ in
    kind. ``layers``: once the model is loaded, for quantisation may exclude some, checkpoints have scales, and vLLM
    allocates fp8 caches as bytes; a missing one has ``cache_dtype`` and no scales. ``fnuz``: whether e4m3 is the
    variant of AMD's MI300. Raises ConfigError: K or V of a layer has more than one scale."""
    if not hasattr(spec, "head_size"):
        return None
    names_of = {str(getattr(layers.get(name), "kv_cache_dtype", cache_dtype)) for name in names} or {cache_dtype}
    dtypes = sorted({canonical(str(spec.dtype) if name == "auto" else name) for name in names_of})
    if len(dtypes) > 1:
        raise ConfigError(f"layers {names[0]!r} and others of its group have KV caches of dtypes {', '.join(dtypes)}")
    dtype = dtypes[0]
    packed = getattr(spec, "state_content_bytes", None) or getattr(spec, "num_head_slots", None)
    keys = None if packed else int(spec.head_size)
    if dtype not in SCALED:
        return CacheDtype(dtype, keys)
    alone = not getattr(spec, "head_size_v", 1)
    of_layers = {name: _layer_scales(name, layers.get(name), alone) for name in names}
    return CacheDtype("float8_e4m3fnuz" if fnuz and dtype == "float8_e4m3fn" else dtype, keys, of_layers)


def _layer_scales(name: str, layer: Any, alone: bool) -> tuple[float, float]:
    """The scales of K and V. ``alone``: MLA, which stores one vector and writes it with the scale of K."""
    for half in ("_k_scale", "_v_scale"):
        tensor = getattr(layer, half, None)
        if tensor is not None and tensor.numel() > 1:
            raise ConfigError(
                f"layer {name!r}: an fp8 KV cache with {tensor.numel()} scales, one per head, is not carried; "
                "use a checkpoint with one scale per layer"
            )
    k, v = (float(getattr(layer, half, 1.0)) for half in ("_k_scale_float", "_v_scale_float"))
    return (k, k) if alone else (k, v)
