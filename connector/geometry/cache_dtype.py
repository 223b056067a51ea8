"""The dtype, the end of K and the static fp8 scales of a cache, read from vLLM's attention layers. Without vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.connector.geometry.dtypes import SCALED, canonical
from kvferry.connector.geometry.engine_types import CacheDtype
from kvferry.transport.errors import ConfigError


def layer_cache_dtype(
    spec: Any, names: Sequence[str], layers: Mapping[str, Any], cache_dtype: str, *, fnuz: bool = False
) -> CacheDtype | None:
    """The cache dtype of the layers of one KV cache specification; ``None`` for states: their elements differ in kind.

    The dtype is read from the layers: the configuration's quantisation may exclude some layers, and checkpoints contain
    scales of their own. The scales exist once the model is loaded. The dtype of the tensors is no source, because vLLM
    allocates fp8 caches as bytes.

    Args:
        spec: vLLM's ``KVCacheSpec``.
        names: the names of the layers.
        layers: vLLM's attention layers, by name; a missing layer counts as a layer with ``cache_dtype`` and no scales.
        cache_dtype: ``--kv-cache-dtype``.
        fnuz: whether e4m3 is the fnuz variant of AMD's MI300.

    Raises:
        ConfigError: K or V of a layer has more than one scale.
    """
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
    scales = {name: _scales(name, layers.get(name), alone=not getattr(spec, "head_size_v", 1)) for name in names}
    return CacheDtype("float8_e4m3fnuz" if fnuz and dtype == "float8_e4m3fn" else dtype, keys, scales)


def _scales(name: str, layer: Any, alone: bool) -> tuple[float, float]:
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
