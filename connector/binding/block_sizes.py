"""Which kernel block size a manager block is split into. Pure.

A block id numbers a manager block; an attention kernel may see it as several kernel blocks of fewer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.connector.binding.kv_spec import is_attention, is_encoder_only
from kvferry.transport.errors import GeometryError


def select_common_block_size(
    kv_manager_block_size: int, backends: Sequence[Any], kv_cache_specs: Sequence[Any] | None = None
) -> int:
    """The greatest kernel block size that all backends take and that divides the manager block.

    Args:
        kv_manager_block_size: tokens of a manager block.
        backends: each with ``get_supported_kernel_block_sizes(spec)``: sizes in tokens, exact (an ``int``) or as a
            ``MultipleOf`` (anything with ``base``).
        kv_cache_specs: one per backend, handed on to it.

    Raises:
        GeometryError: no such size; says what each backend takes.
    """
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
    told = "; ".join(f"{_name(backend)} takes {list(s)}" for backend, s in zip(backends, sizes, strict=True))
    raise GeometryError(f"no kernel block size divides a manager block of {kv_manager_block_size} tokens: {told}")


def _takes(supported: Sequence[Any], size: int) -> bool:
    taken = False
    for one in supported:
        if isinstance(one, int):
            taken |= size == one
        elif hasattr(one, "base"):
            taken |= size % one.base == 0
        else:
            raise GeometryError(f"supported kernel block size {one!r} is neither a number of tokens nor a MultipleOf")
    return taken


def _name(backend: Any) -> str:
    ask = getattr(backend, "get_name", None)
    return str(ask()) if ask is not None else str(getattr(backend, "__name__", backend))


def prepare_kernel_block_sizes(kv_cache_config: Any, attn_groups: Sequence[Sequence[Any]]) -> list[int]:
    """Tokens of a kernel block, per KV cache group that has a cache.

    Attention groups are split to what their backends take, other caches (Mamba state) stay whole, and so do packed
    ones: between their blocks lie other layers' pages. Encoder-only groups have no cache and no entry.

    Args:
        kv_cache_config: with ``kv_cache_groups`` and ``kv_cache_tensors``.
        attn_groups: ``AttentionGroup`` objects, per KV cache group.

    Raises:
        GeometryError: a group whose backends have no size in common, or whose spec is of no known kind.
    """
    sizes: list[int] = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", None)
        if specs is not None:
            spec = next(iter(specs.values()))
        if is_encoder_only(spec):
            continue
        whole = int(group.kv_cache_spec.block_size)
        if not getattr(spec, "has_layer_views", True) or hasattr(spec, "shapes"):
            sizes.append(int(spec.block_size))
        elif not is_attention(spec):
            raise GeometryError(f"group {number}: a KV cache spec of type {type(spec).__name__} is of no known kind")
        elif _packed(kv_cache_config, group):
            sizes.append(whole)
        else:
            if number >= len(attn_groups):
                raise GeometryError(f"group {number} has no attention groups, {len(attn_groups)} were given")
            mine = attn_groups[number]
            sizes.append(select_common_block_size(whole, [g.backend for g in mine], [g.kv_cache_spec for g in mine]))
    return sizes


def _packed(kv_cache_config: Any, group: Any) -> bool:
    """Whether other layers' pages lie between the blocks of the group."""
    names = set(group.layer_names)
    return any(
        tensor.block_stride > tensor.layer_stride
        for tensor in kv_cache_config.kv_cache_tensors
        if not names.isdisjoint(tensor.layers)
    )
