"""Prompts, KV that says where it came from, and the model that reads it. Axes ``[L,H,T,C]``: layers, KV heads, tokens,
content."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

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


def labels(
    heads: Sequence[int], start: int, ids: Sequence[int], origin: int, layers: Sequence[int] = range(LAYERS)
) -> torch.Tensor:
    """[L,H,T,C] int32: labels of the tokens ``ids`` from position ``start`` on; the lowest bit is ``origin``."""
    tokens = torch.arange(start, start + len(ids)) * 521 + torch.tensor(list(ids), dtype=torch.int64)
    mixed = (_places(tuple(heads))[list(layers)] + tokens[:, None] * CONTENT) & 0x3FFFFFFF
    return (mixed * 2 + origin).to(torch.int32)


@cache
def _places(heads: tuple[int, ...]) -> torch.Tensor:
    """[L,H,1,C]: a number for each place of a token's KV."""
    layer, head = torch.arange(LAYERS)[:, None, None, None], torch.tensor(heads)[:, None, None]
    return (layer * 7 + head) * 4099 * 521 * CONTENT + torch.arange(CONTENT)
