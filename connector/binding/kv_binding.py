"""Allocate a KV cache, view it layer by layer, share it between layers, bind it to them. Axes ``[L, B, H, N, C]``.

L layers, B blocks, H KV heads, N tokens in a block, C content of one (head, token). A layer's cache is a tensor
``[B, H, N, C]`` with C in elements of the layer's dtype, whatever the layout in memory.

For engines other than vLLM, and held equal to vLLM's utilities of the same names. Duck-typed: a layer takes its cache
by ``bind_kv_cache(tensor)`` where it has that method, else as its attribute ``kv_cache``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvferry.connector.binding.attention_group import AttentionGroup, get_shared_kv_cache_layers
from kvferry.connector.binding.kv_spec import kernel_shape, layer_spec, layout_strides, stride_order_of
from kvferry.transport.errors import GeometryError, did_you_mean


def allocate(kv_cache_config: Any, device: torch.device | str) -> torch.Tensor:
    """The zeroed allocation that all layers share, int8 ``[size]``; empty where no layer has a cache. Raises
    GeometryError: tensors of the config name different sizes."""
    sizes = {int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors}
    if len(sizes) > 1:
        raise GeometryError(f"KV cache tensors name allocations of {sorted(sizes)} bytes, expected one size for all")
    return torch.zeros(sizes.pop() if sizes else 0, dtype=torch.int8, device=device)


def reshape(
    kv_cache_config: Any, raw: torch.Tensor, layout: Any, kernel_block_sizes: Sequence[int] | None = None
) -> dict[str, torch.Tensor]:
    """View an allocation as one ``[B, H, N, C]`` tensor per layer. Raises GeometryError: a layer without a group, a
    view that would leave the allocation, blocks that cannot be split. ``layout``: see ``stride_order_of``; it must fit
    the places of the config. ``kernel_block_sizes``: tokens of a kernel block per group; B and N are then those of
    kernel blocks."""
    order = stride_order_of(layout)
    views: dict[str, torch.Tensor] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        number, group = _group_of(kv_cache_config, tensor.layers[0])
        spec = layer_spec(group.kv_cache_spec, tensor.layers[0])
        if not getattr(spec, "has_layer_views", True):
            views.update((name, raw) for name in tensor.layers)
            continue
        if getattr(tensor, "host_resident", False):
            raise GeometryError(f"layer {tensor.layers[0]!r} lives in a host pool of its own, which is not carried")
        kernel = next(iter((kernel_block_sizes or ())[number : number + 1]), None)
        views.update(
            zip(tensor.layers, _layer_views(raw, spec, kv_cache_config.num_blocks, order, tensor, kernel), strict=True)
        )
    return views


def _group_of(kv_cache_config: Any, layer_name: str) -> tuple[int, Any]:
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if layer_name in group.layer_names:
            return number, group
    raise GeometryError(f"layer {layer_name!r} has a place in the allocation but is in no KV cache group")


def _layer_views(
    raw: torch.Tensor, spec: Any, num_blocks: int, order: Sequence[int], tensor: Any, kernel_block_size: int | None
) -> list[torch.Tensor]:
    name = tensor.layers[0]
    shape = kernel_shape(spec, num_blocks, len(tensor.layers), kernel_block_size)
    ratio = shape[1] // num_blocks
    block_stride = int(tensor.block_stride)
    if ratio > 1:
        dense = ratio * shape[2] * shape[3] * shape[4]
        if block_stride != dense or dense % ratio:
            raise GeometryError(
                f"layer {name!r}: blocks lie {block_stride} bytes apart, so they do not split into {ratio} kernel "
                f"blocks of {kernel_block_size} tokens each, expected {dense} bytes (pages without padding, not "
                "interleaved with other layers'); take blocks of that size or stride order LBNHC"
            )
        block_stride //= ratio
    padded = getattr(spec, "page_size_padded", None)
    if padded is not None and ratio > 1:
        raise GeometryError(f"layer {name!r}: a page padded to {padded} bytes does not split into kernel blocks")
    strides = layout_strides(
        shape, order, page_bytes=padded, layer_stride=int(tensor.layer_stride), block_stride=block_stride
    )
    reach = tensor.offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if tensor.offset < 0 or reach > raw.numel():
        raise GeometryError(
            f"layer {name!r}: its view reaches byte {reach} of an allocation of {raw.numel()}; "
            "the layout and the config's strides do not belong together"
        )
    whole = torch.as_strided(raw, shape, strides, raw.storage_offset() + tensor.offset)
    dtype = getattr(spec, "dtype", None)
    try:
        return [layer if dtype is None else layer.view(dtype) for layer in whole]
    except RuntimeError as error:
        raise GeometryError(f"layer {name!r}: no view of its bytes as {dtype}: {str(error).splitlines()[0]}") from None


def add_kv_sharing_layers_to_kv_cache_groups(
    shared_kv_cache_layers: Mapping[str, str],
    kv_cache_groups: Sequence[Any],
    runner_only_attn_layers: set[str] | None = None,
) -> None:
    """Put layers that share a cache into the group of the layer that owns it, so that they get its block table. Raises
    GeometryError: a target in no group; nothing is changed then. ``shared_kv_cache_layers``: a layer without a cache,
    and the layer whose cache it uses. ``kv_cache_groups``: changed in place. ``runner_only_attn_layers``: the sharing
    layers are added here, where given."""
    groups = {name: group for group in kv_cache_groups for name in group.layer_names}
    for name, target in shared_kv_cache_layers.items():
        if target not in groups:
            raise GeometryError(
                f"layer {name!r} shares the KV cache of {target!r}, which is in no group{did_you_mean(target, groups)}"
            )
    for name, target in shared_kv_cache_layers.items():
        groups[target].layer_names.append(name)
        if runner_only_attn_layers is not None:
            runner_only_attn_layers.add(name)


def initialize_kv_cache_for_kv_sharing(
    shared_kv_cache_layers: Mapping[str, str],
    kv_cache_groups: Sequence[Any],
    kv_caches: MutableMapping[str, torch.Tensor],
    attn_groups: Sequence[Sequence[Any]] | None = None,
    runner_only_attn_layers: set[str] | None = None,
) -> None:
    """Let layers without a cache use another layer's: the same tensor, and membership in its groups. Raises
    GeometryError: a target without a cache or a group; nothing is changed then. ``kv_caches``: ``[B, H, N, C]``, by
    layer name; the sharing layers are added. ``attn_groups``: where given, a sharing layer joins its target's attention
    group. The others as in ``add_kv_sharing_layers_to_kv_cache_groups``."""
    homes = {name: group for groups in attn_groups or () for group in groups for name in group.layer_names}
    for name, target in shared_kv_cache_layers.items():
        _check_target(name, target, kv_caches)
        if attn_groups is not None and target not in homes:
            raise GeometryError(f"layer {name!r} shares the KV cache of {target!r}, which is in no attention group")
    add_kv_sharing_layers_to_kv_cache_groups(shared_kv_cache_layers, kv_cache_groups, runner_only_attn_layers)
    for name, target in shared_kv_cache_layers.items():
        kv_caches[name] = kv_caches[target]
        if attn_groups is not None:
            homes[target].layer_names.append(name)


def _check_target(name: str, target: str, kv_caches: Mapping[str, torch.Tensor]) -> None:
    if target not in kv_caches:
        raise GeometryError(
            f"layer {name!r} shares the KV cache of {target!r}, which has none{did_you_mean(target, kv_caches)}"
        )


def extract_layer_index(layer_name: str, num_attn_module: int = 1) -> int:
    """The layer's number in its name: ``model.layers.7.self_attn.attn`` is 7. With several attention modules to a
    decoder layer, ``layers.7.self_attn.1`` is ``7 * num_attn_module + 1``. Raises GeometryError: no number in the name,
    or more than there may be."""
    numbers = [int(part) for part in layer_name.split(".") if part.isascii() and part.isdigit()]
    modules = num_attn_module > 1 and "attn" in layer_name
    if not 1 <= len(numbers) <= (2 if modules else 1):
        raise GeometryError(
            f"layer name {layer_name!r} holds {len(numbers)} numbers, expected {'one or two' if modules else 'one'}"
        )
    return numbers[0] * num_attn_module + numbers[1] if len(numbers) == 2 else numbers[0]


def bind_kv_cache(
    kv_caches: Mapping[str, torch.Tensor],
    forward_context: Mapping[str, Any],
    runner_kv_caches: list[torch.Tensor],
    num_attn_module: int = 1,
    *,
    layer_kv_caches: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Give each layer its cache, and the runner all of them in the order of layer numbers. Layers of one number (self-
    and cross-attention of a decoder layer) follow each other as ``kv_caches`` has them. Raises GeometryError: the
    runner's list is not empty, a layer is unknown, or its name has no number; nothing is bound. ``kv_caches``:
    ``[B, H, N, C]`` by layer name, as ``forward_context``. ``num_attn_module``: see ``extract_layer_index``.
    ``layer_kv_caches``: what the layers get instead, where kernels see other blocks than block ids number."""
    if runner_kv_caches:
        raise GeometryError(f"runner_kv_caches holds {len(runner_kv_caches)} caches already, expected an empty list")
    by_index: defaultdict[int, list[str]] = defaultdict(list)
    for name in kv_caches:
        by_index[extract_layer_index(name, num_attn_module)].append(name)
    _bind_to_layers(layer_kv_caches or kv_caches, forward_context)
    runner_kv_caches.extend(kv_caches[name] for index in sorted(by_index) for name in by_index[index])


def _bind_to_layers(kv_caches: Mapping[str, torch.Tensor], forward_context: Mapping[str, Any]) -> None:
    for name in kv_caches:
        if name not in forward_context:
            raise GeometryError(f"no layer {name!r} to bind a KV cache to{did_you_mean(name, forward_context)}")
    for name, cache in kv_caches.items():
        layer = forward_context[name]
        bind = getattr(layer, "bind_kv_cache", None)
        if bind is None:
            layer.kv_cache = cache
        else:
            bind(cache)


def init_kv_cache(
    forward_context: Mapping[str, Any],
    kv_cache_config: Any,
    device: torch.device | str,
    kernel_block_sizes: Sequence[int] | None,
    layout: Any,
    kv_cache_allocation_context: AbstractContextManager[object] | None = None,
    *,
    attn_groups: Iterable[AttentionGroup] = (),
) -> dict[str, torch.Tensor]:
    """Allocate, reshape, share, and bind to the layers; the caches by layer name, ``[B, H, N, C]``. Raises
    GeometryError: see ``reshape``; a layer shares the cache of one that has none.

    Args:
        forward_context: the layers by name. Caches of others (another pipeline stage's) are made and not bound.
        kernel_block_sizes: of ``prepare_kernel_block_sizes``.
        layout: the stride order, see ``stride_order_of``.
        kv_cache_allocation_context: entered for the allocation (a memory pool).
        attn_groups: those with a kernel block size of their own get a view in kernel blocks bound.
    """
    with kv_cache_allocation_context or nullcontext():
        kv_caches = reshape(kv_cache_config, allocate(kv_cache_config, device), layout, kernel_block_sizes)
    for name, target in get_shared_kv_cache_layers(forward_context).items():
        _check_target(name, target, kv_caches)
        kv_caches[name] = kv_caches[target]
    bound = {name: cache for name, cache in kv_caches.items() if name in forward_context}
    for group in attn_groups:
        for name in group.layer_names:
            if group.kernel_block_size is not None and name in bound:
                bound[name] = group.map_kv_cache_to_kernel_blocks(bound[name])
    _bind_to_layers(bound, forward_context)
    return kv_caches
