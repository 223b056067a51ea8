"""Attention layers by what they need: their specs, their backends, and groups that agree in both.

Axes ``[L, B, H, N, C]``. Duck-typed: a layer is anything with ``get_kv_cache_spec(config)`` and
``get_attn_backend()``; one with ``kv_sharing_target_layer_name`` keeps no cache and uses that layer's. A block id
numbers a manager block, which an attention kernel may address as several kernel blocks of fewer tokens each.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvferry.connector.binding.kv_spec import is_attention, is_encoder_only, layer_spec
from kvferry.transport.errors import GeometryError, did_you_mean


def layers_of(source: Any, layer_names: Iterable[str] | None = None) -> dict[str, Any]:
    """The attention layers by name, of these names. ``source``: a mapping of layers, or a config as vLLM's."""
    context = source if isinstance(source, Mapping) else source.compilation_config.static_forward_context
    names = context.keys() if layer_names is None else layer_names
    return {name: context[name] for name in names if hasattr(context.get(name), "get_kv_cache_spec")}


def get_kv_cache_spec(source: Any, config: Any = None) -> dict[str, Any]:
    """The spec of every layer that keeps a cache of its own, by name, as its backend adjusts it. ``source``: see
    ``layers_of``. ``config``: the argument for the layers; ``source`` itself where it is a config."""
    config = source if config is None and not isinstance(source, Mapping) else config
    specs: dict[str, Any] = {}
    for name, layer in layers_of(source).items():
        shares = getattr(layer, "kv_sharing_target_layer_name", None)
        spec = None if shares else layer.get_kv_cache_spec(config)
        if spec is not None:
            specs[name] = _customized(layer.get_attn_backend(), spec) if is_attention(spec) else spec
    return specs


def _customized(backend: Any, spec: Any) -> Any:
    """Aligns blocks to whole kernel blocks where the backend takes exact sizes only and sets no other alignment."""
    customize = getattr(backend, "customize_spec", None)
    spec = spec if customize is None else customize(spec)
    if getattr(spec, "block_stride_alignment", 0) is not None:
        return spec
    sizes = list(backend.get_supported_kernel_block_sizes(spec))
    if not sizes or not all(isinstance(size, int) for size in sizes):
        return spec
    kernel = math.gcd(max(sizes), spec.block_size)
    whole = kernel == spec.block_size
    return replace(spec, block_stride_alignment=1 if whole else spec.copy_with_new_block_size(kernel).page_size_bytes)


def get_shared_kv_cache_layers(source: Any) -> dict[str, str]:
    """Layers that use another layer's cache, and that layer's name."""
    layers = layers_of(source).items()
    return {name: target for name, layer in layers if (target := getattr(layer, "kv_sharing_target_layer_name", None))}


def get_current_attn_backend(source: Any, layer_names: Iterable[str] | None = None) -> type:
    """The backend of the first of these layers (of all where ``None``). Raises GeometryError: there is none."""
    backends: list[type] = [layer.get_attn_backend() for layer in layers_of(source, layer_names).values()]
    if not backends:
        wanted = "any" if layer_names is None else ", ".join(map(repr, layer_names))
        raise GeometryError(f"no attention layer among {wanted} layers, expected at least one")
    # An engine may make the same class once per layer: the last one is taken, as in vLLM.
    return next(each for each in reversed(backends) if _class_name(each) == _class_name(backends[0]))


def _class_name(backend: Any) -> tuple[str, str]:
    ask = getattr(backend, "full_cls_name", None)
    return tuple(ask()) if ask is not None else (backend.__module__, backend.__qualname__)


def get_kv_connector_cache_layout(connector: Any = None, config: Any = None) -> str | None:
    """The name of the KV cache layout that a connector's class asks for; ``None`` for any, or for no connector."""
    ask = getattr(connector, "get_required_kvcache_layout", None)
    layout = None if ask is None else ask(config)
    return None if layout is None else str(layout)


def select_common_block_size(
    kv_manager_block_size: int, backends: Sequence[Any], kv_cache_specs: Sequence[Any] | None = None
) -> int:
    """The greatest kernel block size, in tokens, that divides the manager block and that all backends take: each size
    of ``get_supported_kernel_block_sizes(spec)`` is exact (``int``) or a ``MultipleOf``. Raises GeometryError: none."""
    if kv_manager_block_size < 1:
        raise GeometryError(f"manager block of {kv_manager_block_size} tokens, expected at least 1")
    specs = list(kv_cache_specs or [None] * len(backends))
    if len(specs) != len(backends):
        raise GeometryError(f"{len(specs)} KV cache specs for {len(backends)} backends, expected one for each")
    sizes = [backend.get_supported_kernel_block_sizes(spec) for backend, spec in zip(backends, specs, strict=True)]
    if all(_takes(supported, kv_manager_block_size) for supported in sizes):
        return kv_manager_block_size
    # A backend that takes multiples and takes a divisor takes the manager block too, so only exact sizes are left.
    exact = {size for supported in sizes for size in supported if isinstance(size, int) and size > 0}
    for size in sorted(exact, reverse=True):
        if kv_manager_block_size % size == 0 and all(_takes(supported, size) for supported in sizes):
            return size
    supported = "; ".join(f"{_name(backend)} takes {list(s)}" for backend, s in zip(backends, sizes, strict=True))
    raise GeometryError(f"no kernel block size divides a manager block of {kv_manager_block_size} tokens: {supported}")


def _takes(supported: Sequence[Any], size: int) -> bool:
    for one in supported:
        if not isinstance(one, int) and not hasattr(one, "base"):
            raise GeometryError(f"supported kernel block size {one!r} is neither a number of tokens nor a MultipleOf")
    return any(size == one if isinstance(one, int) else size % one.base == 0 for one in supported)


def _name(backend: Any) -> str:
    ask = getattr(backend, "get_name", None)
    return str(ask()) if ask is not None else str(getattr(backend, "__name__", backend))


def prepare_kernel_block_sizes(kv_cache_config: Any, attn_groups: Sequence[Sequence[Any]]) -> list[int]:
    """Tokens of a kernel block, per KV cache group that has a cache: blocks of attention groups are split to sizes that
    their backends take, others (Mamba state) stay whole. ``attn_groups``: ``AttentionGroup``s, per KV cache group.
    Raises GeometryError: backends that have no size in common, a spec of no known kind."""
    places = kv_cache_config.kv_cache_tensors
    # Other layers' pages lie between the blocks of these.
    packed = {name for place in places if place.block_stride > place.layer_stride for name in place.layers}
    sizes: list[int] = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        spec = group.kv_cache_spec if specs is None else next(iter(specs.values()))
        if is_encoder_only(spec):
            continue
        whole = int(group.kv_cache_spec.block_size)
        if not getattr(spec, "has_layer_views", True) or hasattr(spec, "shapes"):
            sizes.append(int(spec.block_size))
        elif not is_attention(spec):
            raise GeometryError(f"group {number}: a KV cache spec of type {type(spec).__name__} is of no known kind")
        elif not packed.isdisjoint(group.layer_names):
            sizes.append(whole)
        elif number >= len(attn_groups):
            raise GeometryError(f"group {number} has no attention groups, {len(attn_groups)} were given")
        else:
            mine = attn_groups[number]
            sizes.append(select_common_block_size(whole, [g.backend for g in mine], [g.kv_cache_spec for g in mine]))
    return sizes


@dataclass(eq=False)
class AttentionGroup:
    """Layers of one KV cache group that agree in backend and spec."""

    backend: Any  # The class of their attention backend
    layer_names: list[str]  # Changed where a layer joins
    kv_cache_spec: Any  # ``AttentionSpec``, or the engine's own
    kv_cache_group_id: int  # The number of the KV cache group
    kernel_block_size: int | None = None  # Tokens, where the backend needs smaller blocks than the group is split into
    kernel_block_stride: int = 0
    """Kernel block j of manager block b is ``b * stride + j``. 0 until a packed cache is bound: as many as b has."""
    metadata_builders: list[Any] = field(default_factory=list)  # One for each micro-batch

    def create_metadata_builders(
        self, config: Any, device: torch.device, kernel_block_size: int | None = None, num_metadata_builders: int = 1
    ) -> None:
        """Make the backend's builders, one per micro-batch, with the spec of a kernel block."""
        spec = self.kv_cache_spec
        if kernel_block_size is not None:
            if is_attention(spec):
                kernel_block_size = select_common_block_size(kernel_block_size, [self.backend], [spec])
                if kernel_block_size != spec.block_size:
                    self.kernel_block_size = kernel_block_size
            spec = spec.copy_with_new_block_size(kernel_block_size)
        make = self.backend.get_builder_cls()
        self.metadata_builders = [make(spec, self.layer_names, config, device) for _ in range(num_metadata_builders)]

    def get_metadata_builder(self, ubatch_id: int = 0) -> Any:
        """The builder of a micro-batch. Raises GeometryError: there are fewer."""
        if not 0 <= ubatch_id < len(self.metadata_builders):
            raise GeometryError(f"metadata builder {ubatch_id} of {len(self.metadata_builders)}, create them first")
        return self.metadata_builders[ubatch_id]

    def map_to_kernel_block_table(self, block_table: torch.Tensor) -> torch.Tensor:
        """A table of manager block ids ``[rows, columns]`` as one of kernel block ids, in token order."""
        if self.kernel_block_size is None:
            return block_table
        count = int(self.kv_cache_spec.block_size) // self.kernel_block_size
        within = torch.arange(count, dtype=block_table.dtype, device=block_table.device)
        return (block_table.unsqueeze(-1) * (self.kernel_block_stride or count) + within).flatten(1)

    def map_kv_cache_to_kernel_blocks(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """A packed compressed cache ``[B, 1, N, C]`` of manager blocks as kernel blocks and what lies between
        them; sets the stride. Raises GeometryError: a state for each token, or blocks not whole kernel blocks apart."""
        if self.kernel_block_size is None:
            return kv_cache
        spec = self.kv_cache_spec
        rows = int(spec.get_num_kernel_states(self.kernel_block_size))
        if kv_cache.shape[-2] == rows:
            return kv_cache
        page_stride = rows * kv_cache.stride(-2)
        if spec.tokens_per_state <= 1 or kv_cache.shape[1] != 1 or kv_cache.stride(0) % page_stride:
            raise GeometryError(
                f"blocks of {spec.block_size} tokens that lie beside other layers' cannot be split into kernel blocks "
                f"of {self.kernel_block_size}; take blocks of that size, or a layout with L outermost"
            )
        self.kernel_block_stride = kv_cache.stride(0) // page_stride
        blocks = (kv_cache.shape[0] - 1) * self.kernel_block_stride + kv_cache.shape[-2] // rows
        shape = (blocks, *kv_cache.shape[1:-2], rows, kv_cache.shape[-1])
        return kv_cache.as_strided(shape, (page_stride, *kv_cache.stride()[1:]))

    def map_kv_cache_to_manager_blocks(self, kv_cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """The inverse, ``[B, 1, N, C]`` of ``num_blocks`` manager blocks. Raises GeometryError: there is no stride."""
        if not self.kernel_block_stride:
            raise GeometryError("the cache was not mapped to kernel blocks, there is nothing to undo")
        rows = int(self.kv_cache_spec.get_num_kernel_states(self.kv_cache_spec.block_size))
        shape = (num_blocks, *kv_cache.shape[1:-2], rows, kv_cache.shape[-1])
        return kv_cache.as_strided(shape, (kv_cache.stride(0) * self.kernel_block_stride, *kv_cache.stride()[1:]))


def attention_groups(
    kv_cache_config: Any, source: Any, active_layer_names: Container[str] | None = None,
    backends: Mapping[str, Any] | None = None,
) -> list[list[AttentionGroup]]:  # fmt: skip
    """The attention groups of each KV cache group: layers that agree in backend, spec and query heads. ``source``: see
    ``layers_of``. ``backends``: by layer name, in place of the layer's own. Raises GeometryError: an unknown layer."""
    context = layers_of(source)
    every: list[list[AttentionGroup]] = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        found: dict[tuple[tuple[str, str], Any, int], AttentionGroup] = {}
        for name in group.layer_names if getattr(group.kv_cache_spec, "has_layer_views", True) else ():
            if active_layer_names is not None and name not in active_layer_names:
                continue
            if name not in context:
                meant = did_you_mean(name, context)
                raise GeometryError(f"layer {name!r} of group {number} is no attention layer{meant}")
            backend = (backends or {}).get(name) or context[name].get_attn_backend()
            home = getattr(context[name], "kv_sharing_target_layer_name", None) or name
            own = name in getattr(group.kv_cache_spec, "kv_cache_specs", {})
            spec = layer_spec(group.kv_cache_spec, name if own else home)
            key = (_class_name(backend), spec, int(getattr(context[name], "num_heads", 0)))
            found.setdefault(key, AttentionGroup(backend, [], spec, number)).layer_names.append(name)
        every.append(list(found.values()))
    return every
