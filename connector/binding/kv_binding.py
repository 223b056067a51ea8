"""Allocate a KV cache, view it layer by layer, share it between layers, bind it to them. Axes ``[L, B, H, N, C]``.

L layers, B blocks, H KV heads, N tokens in a block, C content of one (head, token). A layer's cache is a tensor
``[B, H, N, C]`` with C in elements of the layer's dtype, whatever the layout in memory. A layer takes it by
``bind_kv_cache(tensor)`` where it has that method, else as its attribute ``kv_cache``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kvferry.connector.binding.attention_group import AttentionGroup, get_shared_kv_cache_layers
from kvferry.connector.binding.kv_spec import kernel_shape, layer_spec, layout_strides, stride_order_of
from kvferry.transport.errors import GeometryError, did_you_mean


def allocate(kv_cache_config: Any, device: torch.device | str) -> torch.Tensor:
    """The zeroed allocation that all layers share, int8 ``[size]``. Raises GeometryError: several sizes are named."""
    sizes = {int(tensor.size) for tensor in kv_cache_config.kv_cache_tensors}
    if len(sizes) > 1:
        raise GeometryError(f"KV cache tensors name allocations of {sorted(sizes)} bytes, expected one size for all")
    return torch.zeros(sizes.pop() if sizes else 0, dtype=torch.int8, device=device)


def reshape(
    kv_cache_config: Any, raw: torch.Tensor, layout: Any, kernel_block_sizes: Sequence[int] | None = None
) -> dict[str, torch.Tensor]:
    """View an allocation as one ``[B, H, N, C]`` tensor per layer, of kernel blocks where a group has a size of them.
    ``layout``: see ``stride_order_of``; it must fit the places of the config. Raises GeometryError: a layer without a
    group, a view that would leave the allocation, blocks that cannot be split."""
    order = stride_order_of(layout)
    groups = {name: item for item in enumerate(kv_cache_config.kv_cache_groups) for name in item[1].layer_names}
    views: dict[str, torch.Tensor] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        name = tensor.layers[0]
        if name not in groups:
            raise GeometryError(f"layer {name!r} has a place in the allocation but is in no KV cache group")
        number, group = groups[name]
        spec = layer_spec(group.kv_cache_spec, name)
        if not getattr(spec, "has_layer_views", True):
            views.update(dict.fromkeys(tensor.layers, raw))
            continue
        if getattr(tensor, "host_resident", False):
            raise GeometryError(f"layer {name!r} lives in a host pool of its own, which is not carried")
        kernel = next(iter((kernel_block_sizes or ())[number : number + 1]), None)
        of_layers = _layer_views(raw, spec, kv_cache_config.num_blocks, order, tensor, kernel)
        views.update(zip(tensor.layers, of_layers, strict=True))
    return views


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
    layer_stride = int(tensor.layer_stride)
    strides = layout_strides(shape, order, page_bytes=padded, layer_stride=layer_stride, block_stride=block_stride)
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
    shared_kv_cache_layers: Mapping[str, str], kv_cache_groups: Sequence[Any],
    runner_only_attn_layers: set[str] | None = None,
) -> None:  # fmt: skip
    """Put layers that share a cache into the group of the layer that owns it, so that they get its block table, and
    into ``runner_only_attn_layers``. ``shared_kv_cache_layers``: a layer without a cache, and the layer whose cache it
    uses. Raises GeometryError: a target in no group; nothing is changed then."""
    groups = {name: group for group in kv_cache_groups for name in group.layer_names}
    for name, target in shared_kv_cache_layers.items():
        if target not in groups:
            close = did_you_mean(target, groups)
            raise GeometryError(f"layer {name!r} shares the KV cache of {target!r}, which is in no group{close}")
    for name, target in shared_kv_cache_layers.items():
        groups[target].layer_names.append(name)
        if runner_only_attn_layers is not None:
            runner_only_attn_layers.add(name)


def initialize_kv_cache_for_kv_sharing(
    shared_kv_cache_layers: Mapping[str, str], kv_cache_groups: Sequence[Any],
    kv_caches: MutableMapping[str, torch.Tensor], attn_groups: Sequence[Sequence[Any]] | None = None,
    runner_only_attn_layers: set[str] | None = None,
) -> None:  # fmt: skip
    """Let layers without a cache use another layer's ``[B, H, N, C]``: the same tensor, and membership in its groups,
    see ``add_kv_sharing_layers_to_kv_cache_groups``. Raises GeometryError: no cache or group; nothing is changed."""
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
        close = did_you_mean(target, kv_caches)
        raise GeometryError(f"layer {name!r} shares the KV cache of {target!r}, which has none{close}")


def extract_layer_index(layer_name: str, num_attn_module: int = 1) -> int:
    """The layer's number in its name, 7 of ``layers.7.attn``; with several attention modules to a decoder layer,
    ``layers.7.attn.1`` is ``7 * num_attn_module + 1``. Raises GeometryError: no number, or more than there may be."""
    numbers = [int(part) for part in layer_name.split(".") if part.isascii() and part.isdigit()]
    most, expected = (2, "one or two") if num_attn_module > 1 and "attn" in layer_name else (1, "one")
    if not 1 <= len(numbers) <= most:
        raise GeometryError(f"layer name {layer_name!r} holds {len(numbers)} numbers, expected {expected}")
    return numbers[0] * num_attn_module + numbers[1] if len(numbers) == 2 else numbers[0]


def bind_kv_cache(
    kv_caches: Mapping[str, torch.Tensor], forward_context: Mapping[str, Any], runner_kv_caches: list[torch.Tensor],
    num_attn_module: int = 1, *, layer_kv_caches: Mapping[str, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Give each layer its cache ``[B, H, N, C]``, and the runner all by ``extract_layer_index``, those of one number
    (self- and cross-attention) as ``kv_caches`` has them. ``layer_kv_caches``: what layers get instead, where kernels
    see other blocks. Raises GeometryError: a list with caches, an unknown layer, no number; nothing is bound."""
    if runner_kv_caches:
        raise GeometryError(f"runner_kv_caches holds {len(runner_kv_caches)} caches already, expected an empty list")
    indices = {name: extract_layer_index(name, num_attn_module) for name in kv_caches}
    _bind_to_layers(layer_kv_caches or kv_caches, forward_context)
    runner_kv_caches.extend(kv_caches[name] for name in sorted(indices, key=indices.__getitem__))


def _bind_to_layers(kv_caches: Mapping[str, torch.Tensor], forward_context: Mapping[str, Any]) -> None:
    for name in kv_caches:
        if name not in forward_context:
            raise GeometryError(f"no layer {name!r} to bind a KV cache to{did_you_mean(name, forward_context)}")
    for name, cache in kv_caches.items():
        if hasattr(forward_context[name], "bind_kv_cache"):
            forward_context[name].bind_kv_cache(cache)
        else:
            forward_context[name].kv_cache = cache


def init_kv_cache(
    forward_context: Mapping[str, Any], kv_cache_config: Any, device: torch.device | str,
    kernel_block_sizes: Sequence[int] | None, layout: Any,
    kv_cache_allocation_context: AbstractContextManager[object] | None = None, *,
    attn_groups: Iterable[AttentionGroup] = (),
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Allocate, reshape, share, and bind to the layers; the caches by layer name, ``[B, H, N, C]``. Those of layers
    outside of ``forward_context`` (another pipeline stage's) are not bound. ``kernel_block_sizes``: of
    ``prepare_kernel_block_sizes``; ``attn_groups`` with one of their own get a view in such blocks bound.
    ``kv_cache_allocation_context``: a memory pool. Raises GeometryError: see ``reshape``; a shared cache is missing."""
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
