"""Prompts, KV that says where it came from, and the model that reads it. Axes ``[L,H,T,C]``: layers, KV heads, tokens,
content."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LAYERS, HEADS, HEAD_SIZE, BLOCK = 3, 2, 8, 16
CONTENT = 2 * HEAD_SIZE


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(2, 290, (tokens,), generator=generator).tolist()


def next_token(ids: Sequence[int]) -> int:
    """What the made-up model says after these tokens; never 1."""
    return (ids[-1] * 31 + len(ids)) % 280 + 2


def labels(heads: Sequence[int], start: int, ids: Sequence[int], origin: int) -> torch.Tensor:
    """[L,H,T,C] int32: labels of the tokens ``ids`` from position ``start`` on; the lowest bit is ``origin``."""
    layer = torch.arange(LAYERS)[:, None, None, None]
    head = torch.tensor(list(heads))[None, :, None, None]
    position = torch.arange(start, start + len(ids))[None, None, :, None]
    token = torch.tensor(list(ids), dtype=torch.int64)[None, None, :, None]
    element = torch.arange(CONTENT)[None, None, None, :]
    mixed = ((((layer * 7 + head) * 4099 + position) * 521 + token) * CONTENT + element) & 0x3FFFFFFF
    return (mixed * 2 + origin).to(torch.int32)
