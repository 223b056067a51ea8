"""The KV cache of a rank of a pair, and the pattern in it. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
import torch
from msgspec import Meta

ELEMENT_BYTES = 4
"""The elements are int32 whatever the model's dtype is: a hand-over moves bytes."""

Count = Annotated[int, Meta(ge=1, le=1 << 24)]


class CacheForm(msgspec.Struct, frozen=True):
    """The caches of one rank. ``content``: int32 elements of one (head, token) of a layer, K and V together.
    ``layout``: the order of heads (H) and tokens (N) in a page. ``tokens``: of the longest prompt."""

    layers: Count = 8
    heads: Count = 8
    content: Count = 64
    tokens: Count = 4096
    block_tokens: Count = 16
    layout: Literal["HND", "NHD"] = "HND"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the layers."""
        return tuple(f"layer {number}" for number in range(self.layers))

    @property
    def blocks(self) -> int:
        return -(-self.tokens // self.block_tokens)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.layers * self.heads * self.content * ELEMENT_BYTES

    def caches(self, device: str) -> dict[str, torch.Tensor]:
        """[B, H, N, C] int32 of zeros for each layer, in the order of ``layout`` in memory."""
        if self.layout == "HND":
            shape, axes = (self.blocks, self.heads, self.block_tokens, self.content), (0, 1, 2, 3)
        else:
            shape, axes = (self.blocks, self.block_tokens, self.heads, self.content), (0, 2, 1, 3)
        return {name: torch.zeros(shape, dtype=torch.int32, device=device).permute(axes) for name in self.names}

    def pattern(self, layer: int, salt: int) -> torch.Tensor:
        """The elements of a layer in the order of the prompt's tokens, int32 [T, H, C]: the same for each block size
        and layout. Each element is another, and each hand-over has its own ``salt``."""
        count = self.blocks * self.block_tokens
        numbers = torch.arange(count * self.heads * self.content, dtype=torch.int32)
        mixed = (
            numbers * -1640531527 + (layer * 65536 + salt) * 40503
        )  # a multiplication by an odd number is one to one
        return mixed.reshape(count, self.heads, self.content)

    def block_ids(self, seed: int) -> list[int]:
        """The blocks of the prompt in an order that has no runs."""
        return [int(block) for block in np.random.default_rng(seed).permutation(self.blocks)]
