"""Parts of scattered pages, copied by ``DevicePages`` and by the host implementation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvferry.kernels.paged_copy import Pages, copy_pages_host, wire_pages
from kvferry.kernels.paged_copy_triton import DevicePages

LAYERS, BLOCKS, HEADS, OF_HEADS = 5, 12, 3, 4


def differing(number: int, device: torch.device) -> tuple[int, int]:
    """Bytes that differ after random parts were packed, and after others were unpacked."""
    random = np.random.default_rng(number)
    size, content = ((16, 32), (8, 20), (16, 64), (4, 2))[number]
    first, tokens = ((0, 70), (5, 61), (16, 48), (3, 37))[number]
    token_stride, head_stride = content * (OF_HEADS if number % 2 else 1), content * (1 if number % 2 else size)
    block = size * OF_HEADS * content
    pages = torch.from_numpy(random.integers(0, 256, LAYERS * BLOCKS * block, dtype=np.uint8))
    ids = random.permutation(BLOCKS)[: -(-(first + tokens) // size)].astype(np.int64)
    there = pages.clone().to(device)
    packed = torch.zeros(len(pages) + 64, dtype=torch.uint8, device=device)

    def side(memory: torch.Tensor) -> Pages:
        bases = memory.data_ptr() + np.arange(LAYERS, dtype=np.int64) * BLOCKS * block
        return Pages(bases, ids, size, block, head_stride, token_stride, head=1, token=first)

    ours = DevicePages(side(there), num_heads=HEADS, num_tokens=tokens, content_bytes=content, device=device)
    found = [0, 0]
    for turn in range(4):
        layer, token = int(random.integers(LAYERS)), int(random.integers(tokens))
        layers, count = int(random.integers(1, LAYERS - layer + 1)), int(random.integers(1, tokens - token + 1))
        to_wire = turn % 2 == 0
        packed.copy_(torch.from_numpy(random.integers(0, 256, len(packed), dtype=np.uint8)))
        wire, at = packed.cpu().clone(), 4 * turn  # slots are aligned, but a part need not begin where one does
        ours.copy(
            packed.data_ptr() + at, to_wire=to_wire, layer=layer, num_layers=layers, token=token, num_tokens=count,
            sms=(None, 2)[turn % 3 == 0],
        )  # fmt: skip
        wanted = side(pages)
        part = replace(wanted, bases=wanted.bases[layer : layer + layers], token=first + token)
        sides = wire_pages(wire.data_ptr() + at, layers, HEADS, count, content), part
        copy_pages_host(*(sides if to_wire else sides[::-1]), num_heads=HEADS, num_tokens=count, content_bytes=content)
        found[turn % 2] += int((packed.cpu() != wire).sum()) + int((there.cpu() != pages).sum())
    return found[0], found[1]
