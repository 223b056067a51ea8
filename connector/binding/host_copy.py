"""Copy blocks of a KV cache between a device and a host buffer. Axes ``[B, H, N, C]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from kvferry.transport.errors import GeometryError, did_you_mean

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes are moved, not numbers: not every dtype (fp8) can be indexed on every device."""


def copy_kv_blocks(
    src_kv_caches: Mapping[str, torch.Tensor],
    dst_kv_caches: Mapping[str, torch.Tensor],
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    direction: Literal["h2d", "d2h"],
) -> None:
    """Copy block ``src_block_ids[i]`` of every layer to ``dst_block_ids[i]``. Done on return for ``d2h``; for ``h2d``
    it is ordered on the current stream of the device.

    Strides may differ, shape of a block and dtype may not. No layers or no blocks: nothing to do.

    Args:
        src_kv_caches: by layer name, ``[B, ...]``.
        dst_kv_caches: with the same layers; may have more.
        src_block_ids: as many as ``dst_block_ids``, in the same order.
        dst_block_ids: each at most once.
        direction: ``h2d`` from host to device, ``d2h`` from device to host.

    Raises:
        GeometryError: lists of unequal length, an id out of range or named twice as a destination, a layer that is
            missing or of another form; nothing is copied.
    """
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
        if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
            raise GeometryError(
                f"layer {name!r}: blocks of {list(target.shape[1:])} {target.dtype} cannot take "
                f"{list(source.shape[1:])} {source.dtype}"
            )
        _check_ids(name, src_block_ids, source.shape[0])
        _check_ids(name, dst_block_ids, target.shape[0])
    sources, targets = torch.tensor(src_block_ids, dtype=torch.int64), torch.tensor(dst_block_ids, dtype=torch.int64)
    for name, source in src_kv_caches.items():
        target = dst_kv_caches[name]
        word = _WORDS[source.element_size()]
        blocks = source.view(word).index_select(0, sources.to(source.device)).to(target.device)
        target.view(word).index_copy_(0, targets.to(target.device), blocks)


def _check_ids(name: str, block_ids: Sequence[int], num_blocks: int) -> None:
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise GeometryError(f"layer {name!r}: block id {block_id} is outside 0..{num_blocks - 1}")
