"""Zero newly allocated blocks of a KV cache, so that no kernel reads what their last owner left. Axes ``[L,B,H,N,C]``.

Needed where a state is read before it is written whole, or where a block may be read under another dtype than it was
written in.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvferry.connector.binding.kv_spec import is_attention
from kvferry.kernels.zero_blocks import Segments, zero_blocks
from kvferry.transport.errors import GeometryError, did_you_mean


class KVBlockZeroer:
    """Where every block of the bound caches lies; made once, after the caches are bound.

    A block is several segments where an axis lies outside of B (the heads of LHBNC, the layers of layer-outermost
    layouts) and where it is split into kernel blocks. A segment spans all that lies between its block's first byte
    and its last: where layers are interleaved inside a head (BHLNC) that is other layers' content too, which is right,
    for the block is theirs no less.

    Args:
        device: caches on other devices are left alone.
        attn_groups_iter: ``AttentionGroup`` objects; those of no attention spec (Mamba) are left alone.
        kernel_block_sizes: tokens, per KV cache group; groups beyond its end are left alone.
        static_forward_context: the layers by name, with ``kv_cache`` bound.
        num_blocks: manager blocks, what ids of ``zero_block_ids`` number.
        runner_only_attn_layers: layers to leave alone; their cache is another layer's, or none.

    Raises:
        GeometryError: an unknown layer, or a cache whose blocks are no multiple of ``num_blocks``.
    """

    def __init__(
        self,
        device: torch.device,
        attn_groups_iter: Iterable[Any],
        kernel_block_sizes: Sequence[int],
        static_forward_context: Mapping[str, Any],
        num_blocks: int,
        runner_only_attn_layers: Container[str] | None = None,
    ) -> None:
        self.device = device
        self._num_blocks = num_blocks
        sizes: dict[tuple[int, int], int] = {}
        for name, group in _layers(attn_groups_iter, kernel_block_sizes, runner_only_attn_layers or ()):
            if name not in static_forward_context:
                raise GeometryError(f"no layer {name!r} to zero blocks of{did_you_mean(name, static_forward_context)}")
            cache = static_forward_context[name].kv_cache
            if not isinstance(cache, torch.Tensor):
                continue
            if group.kernel_block_stride:
                cache = group.map_kv_cache_to_manager_blocks(cache, num_blocks)
            if cache.device.type != device.type:
                continue
            for address, stride, size in _segments(name, cache, num_blocks):
                # Layers overlay each other in packed layouts: the widest page wins.
                sizes[address, stride] = max(size, sizes.get((address, stride), 0))
        self.segments = Segments(
            np.array([address for address, _ in sizes], dtype=np.int64),
            np.array([stride for _, stride in sizes], dtype=np.int64),
            np.array(list(sizes.values()), dtype=np.int64),
        )

    def zero_block_ids(self, block_ids: Sequence[int]) -> None:
        """Zero these manager blocks, in one kernel launch on the current stream.

        Raises:
            GeometryError: an id out of range; nothing is zeroed.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        bad = ids[(ids < 0) | (ids >= self._num_blocks)]
        if bad.size:
            raise GeometryError(f"block id {int(bad[0])} is outside 0..{self._num_blocks - 1} of this cache")
        zero_blocks(self.segments, ids, device=self.device)

    def warmup(self, num_kv_blocks: int) -> None:
        """Compile the kernel before the first request, on block 0, whose content is lost."""
        if num_kv_blocks > 0:
            self.zero_block_ids([0])


def _layers(
    groups: Iterable[Any], kernel_block_sizes: Sequence[int], left_alone: Container[str]
) -> Iterator[tuple[str, Any]]:
    for group in groups:
        if not is_attention(group.kv_cache_spec) or group.kv_cache_group_id >= len(kernel_block_sizes):
            continue
        kernel, whole = kernel_block_sizes[group.kv_cache_group_id], group.kv_cache_spec.block_size
        if whole % kernel:
            raise GeometryError(f"kernel blocks of {kernel} tokens do not divide a manager block of {whole}")
        yield from ((name, group) for name in group.layer_names if name not in left_alone)


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
