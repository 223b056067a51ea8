"""Operations on whole blocks of bound KV caches ``[B, H, N, C]``: zero them, copy them between device and host.

Blocks that a request newly owns are zeroed where a state
is read before it is written whole, or where a block may be read under another dtype than the dtype it was written in.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from kvferry.connector.binding.kv_spec import is_attention
from kvferry.kernels.zero_blocks import Segments, zero_blocks
from kvferry.transport.errors import GeometryError, did_you_mean

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes are moved, not numbers: not every dtype (fp8) can be indexed on every device."""


class KVBlockZeroer:
    """Where every block of the bound caches lies; made once, after the caches are bound.

    A block is several segments where an axis lies outside of B and where it is split into kernel blocks. A segment
    spans all from its block's first byte to its last, also other layers' content where they are interleaved (BHLNC),
    for the block is theirs no less. Left alone: caches on other devices, groups of no attention (Mamba) or without
    tokens of a kernel block in ``kernel_block_sizes``, and ``runner_only_attn_layers``. ``num_blocks``: manager blocks.
    Raises GeometryError: an unknown layer, or a cache whose blocks are no multiple of ``num_blocks``.
    """

    def __init__(
        self, device: torch.device, attn_groups_iter: Iterable[Any], kernel_block_sizes: Sequence[int],
        static_forward_context: Mapping[str, Any], num_blocks: int,
        runner_only_attn_layers: Container[str] | None = None,
    ) -> None:  # fmt: skip
        self._device = device
        self._num_blocks = num_blocks
        sizes: dict[tuple[int, int], int] = {}
        for group in attn_groups_iter:
            if not is_attention(group.kv_cache_spec) or group.kv_cache_group_id >= len(kernel_block_sizes):
                continue
            kernel, whole = kernel_block_sizes[group.kv_cache_group_id], group.kv_cache_spec.block_size
            if whole % kernel:
                raise GeometryError(f"kernel blocks of {kernel} tokens do not divide a manager block of {whole}")
            for name in group.layer_names:
                if name in (runner_only_attn_layers or ()):
                    continue
                if name not in static_forward_context:
                    close = did_you_mean(name, static_forward_context)
                    raise GeometryError(f"no layer {name!r} to zero blocks of{close}")
                cache = static_forward_context[name].kv_cache
                if not isinstance(cache, torch.Tensor) or cache.device.type != device.type:
                    continue
                if group.kernel_block_stride:
                    cache = group.map_kv_cache_to_manager_blocks(cache, num_blocks)
                for address, stride, size in _segments(name, cache, num_blocks):
                    # Layers overlay each other in packed layouts: the widest page wins.
                    sizes[address, stride] = max(size, sizes.get((address, stride), 0))
        self.segments = Segments(
            np.array([address for address, _ in sizes], dtype=np.int64),
            np.array([stride for _, stride in sizes], dtype=np.int64),
            np.array(list(sizes.values()), dtype=np.int64),
        )
        """Of one block, in bytes."""

    def zero_block_ids(self, block_ids: Sequence[int]) -> None:
        """Zero manager blocks, in one launch on the current stream. Raises GeometryError, first: an id out of range."""
        ids = np.asarray(block_ids, dtype=np.int64)
        bad = ids[(ids < 0) | (ids >= self._num_blocks)]
        if bad.size:
            raise GeometryError(f"block id {int(bad[0])} is outside 0..{self._num_blocks - 1} of this cache")
        zero_blocks(self.segments, ids, device=self._device)

    def warmup(self, num_kv_blocks: int) -> None:
        """Compile the kernel before the first request, on block 0, whose content is lost."""
        if num_kv_blocks > 0:
            self.zero_block_ids([0])


def _segments(name: str, cache: torch.Tensor, num_blocks: int) -> Iterator[tuple[int, int, int]]:
    """(address, stride between manager blocks, size), in bytes, of one layer's cache ``[B, ..., C]``."""
    if num_blocks < 1 or cache.shape[0] % num_blocks:
        raise GeometryError(f"layer {name!r}: {cache.shape[0]} kernel blocks are no multiple of {num_blocks} blocks")
    item, ratio = cache.element_size(), cache.shape[0] // num_blocks
    block_stride = cache.stride(0) * item
    axes = [(int(size), int(stride) * item) for size, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True)]
    outside = [(size, stride) for size, stride in axes if stride > block_stride and size > 1]
    size = item + sum((size - 1) * stride for size, stride in axes if stride <= block_stride)
    for place in itertools.product(*(range(size) for size, _ in outside)):
        offset = sum(index * stride for index, (_, stride) in zip(place, outside, strict=True))
        for kernel in range(ratio):
            yield cache.data_ptr() + offset + kernel * block_stride, block_stride * ratio, size


def _make_src_and_dst_indices(
    src_block_ids: Sequence[int], dst_block_ids: Sequence[int], src_device: torch.device | str,
    dst_device: torch.device | str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Block ids as index tensors on the devices of their caches, int64 ``[blocks]`` each, complete on return."""
    return _indices(src_block_ids, src_device), _indices(dst_block_ids, dst_device)


def _indices(block_ids: Sequence[int], device: torch.device | str) -> torch.Tensor:
    try:
        numbers = [operator.index(block_id) for block_id in block_ids]
    except TypeError as error:
        raise GeometryError(f"a block id is no whole number: {error}") from None
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def copy_kv_blocks(
    src_kv_caches: Mapping[str, torch.Tensor], dst_kv_caches: Mapping[str, torch.Tensor], src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int], direction: Literal["h2d", "d2h"],
) -> None:  # fmt: skip
    """Copy block ``src_block_ids[i]`` of every layer ``[B, ...]`` to ``dst_block_ids[i]``: done on return for ``d2h``
    (device to host), ordered on the device's current stream for ``h2d``. The destination may have more layers and other
    strides. Raises GeometryError, before: unequal lists, a bad id, a missing layer, another dtype or block shape."""
    if direction not in ("h2d", "d2h"):
        raise GeometryError(f"direction {direction!r} is unknown{did_you_mean(str(direction), ('h2d', 'd2h'))}")
    if len(src_block_ids) != len(dst_block_ids):
        raise GeometryError(f"{len(src_block_ids)} source blocks for {len(dst_block_ids)} destinations")
    if not src_kv_caches or not dst_kv_caches or not src_block_ids:
        return
    if len(set(dst_block_ids)) != len(dst_block_ids):
        raise GeometryError("a destination block is named twice")
    for name, source in src_kv_caches.items():
        if name not in dst_kv_caches:
            raise GeometryError(f"layer {name!r} has no destination{did_you_mean(name, dst_kv_caches)}")
        target = dst_kv_caches[name]
        form, taken = (f"{list(cache.shape[1:])} {cache.dtype}" for cache in (source, target))
        if form != taken:
            raise GeometryError(f"layer {name!r}: blocks of {taken} cannot take {form}")
        _check_ids(name, src_block_ids, source.shape[0])
        _check_ids(name, dst_block_ids, target.shape[0])
    devices = (next(iter(caches.values())).device for caches in (src_kv_caches, dst_kv_caches))
    sources, targets = _make_src_and_dst_indices(src_block_ids, dst_block_ids, *devices)
    for name, source in src_kv_caches.items():
        target = dst_kv_caches[name]
        word = _WORDS[source.element_size()]
        blocks = source.view(word).index_select(0, sources.to(source.device)).to(target.device)
        target.view(word).index_copy_(0, targets.to(target.device), blocks)


def _check_ids(name: str, block_ids: Sequence[int], num_blocks: int) -> None:
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise GeometryError(f"layer {name!r}: block id {block_id} is outside 0..{num_blocks - 1}")
