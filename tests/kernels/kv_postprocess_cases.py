"""Cases of the fix-ups, and an oracle that numbers every (token, head) by hand. Axes ``[B, H, N, C]``.

Shared by the tests of the host implementation and of the Triton kernels.
The oracle uses nothing of the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.kernels import kv_postprocess

GUARD = 64
SPARE = 3
"""Blocks of a cache that a fix-up has to leave alone."""


@dataclass(frozen=True)
class Case:
    """One fix-up of ``remote`` of P's blocks. ``pad`` bytes after every inner axis, outer axis and block.

    ``ratio`` as in ``TpKVTopology``; ``kind`` is the name of the function without its affixes.
    """

    kind: str
    layout: str = "HND"
    heads: int = 3
    tokens: int = 8
    content: int = 8
    dtype: torch.dtype = torch.bfloat16
    ratio: int = 1
    groups: int = 2
    pad: tuple[int, int, int] = (0, 0, 0)
    shift: int = 0
    ids: torch.dtype = torch.int64
    mla: bool = False

    @property
    def group(self) -> int:
        """Local blocks that exchange bytes."""
        return max(1, -self.ratio)

    @property
    def nothing_moves(self) -> bool:
        """P's order is D's: by reasoning, not by the code."""
        remote_tokens = self.group * self.tokens // max(1, self.ratio)
        if self.kind == "blksize":
            return self.layout == "NHD" or self.heads == 1 or self.ratio == 1
        return self.heads == 1 or (self.tokens if self.layout == "HND" else remote_tokens) == 1


class Arena:
    """A cache in memory full of random bytes, with guards around it."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        item = case.dtype.itemsize
        inner_pad, outer_pad, block_pad = (pad * item for pad in case.pad)
        inner_count, outer_count = (case.tokens, case.heads) if case.layout == "HND" else (case.heads, case.tokens)
        inner = case.content * item + inner_pad
        outer = inner_count * inner + outer_pad
        self.block = outer_count * outer + block_pad
        self.head, self.token = (outer, inner) if case.layout == "HND" else (inner, outer)
        used = case.groups * case.group
        size = GUARD + case.shift * item + (used + SPARE) * self.block + GUARD
        self.memory = rng.integers(0, 256, size, dtype=np.uint8)
        self.start = GUARD + case.shift * item
        self.ids = rng.permutation(used + SPARE)[:used]
        self.case = case

    def cache(self, memory: torch.Tensor | None = None) -> torch.Tensor:
        """The logical view on ``memory``, by default this arena's own."""
        case, item = self.case, self.case.dtype.itemsize
        memory = torch.from_numpy(self.memory) if memory is None else memory
        padded = memory[: len(memory) // item * item].view(case.dtype)
        shape = [case.groups * case.group + SPARE, case.heads, case.tokens, case.content]
        strides = [self.block // item, self.head // item, self.token // item, 1]
        if case.mla:
            del shape[1], strides[1]
        return padded.as_strided(shape, strides, self.start // item)

    def indices(self) -> torch.Tensor:
        return torch.from_numpy(self.ids.copy()).to(self.case.ids)

    def expected(self) -> np.ndarray:
        """All of the memory, guards included, after the fix-up."""
        case, result = self.case, self.memory.copy()
        content = case.content * case.dtype.itemsize
        for group in self.ids.reshape(case.groups, case.group):
            for (token, head), received in zip(_sent(case), self._places(group), strict=True):
                block, within = divmod(token, case.tokens)
                wanted = self._address(int(group[block]), head, within)
                result[wanted : wanted + content] = self.memory[received : received + content]
        return result

    def _address(self, block: int, head: int, token: int) -> int:
        return self.start + block * self.block + head * self.head + token * self.token

    def _places(self, group: np.ndarray) -> Iterator[int]:
        """Where the rows of a group lie, in the order of memory."""
        for block in group:
            for head, token in _both(self.case.layout, self.case.heads, self.case.tokens):
                yield self._address(int(block), head, token)


def _both(layout: str, heads: int, tokens: int) -> Iterator[tuple[int, int]]:
    if layout == "HND":
        yield from ((head, token) for head in range(heads) for token in range(tokens))
    else:
        yield from ((head, token) for token in range(tokens) for head in range(heads))


def _sent(case: Case) -> Iterator[tuple[int, int]]:
    """(token of the group, head) of the rows that P sent for a group, in P's order."""
    other = {"HND": "NHD", "NHD": "HND"}[case.layout]
    layout = case.layout if case.kind == "blksize" else other
    tokens = case.group * case.tokens
    size = tokens if case.ratio < 0 else case.tokens // case.ratio
    for first in range(0, tokens, size):
        for head, token in _both(layout, case.heads, size):
            yield first + token, head


def fix_up(case: Case, cache: torch.Tensor, indices: torch.Tensor) -> None:
    """The public function that the case names."""
    function = getattr(kv_postprocess, f"kv_postprocess_{case.kind}_on_receive")
    function(cache, indices, *(() if case.kind == "layout" else (case.ratio,)))


BOTH = "blksize_and_layout"
CASES = {
    "small-to-large": Case("blksize", ratio=2),
    "small-to-large-by-4": Case("blksize", tokens=16, ratio=4, heads=2),
    "small-to-large-of-one-token": Case("blksize", ratio=8),
    "small-to-large-48-by-3": Case("blksize", tokens=48, ratio=3, groups=3),
    "small-to-large-48-by-16": Case("blksize", tokens=48, ratio=16, groups=1),
    "small-to-large-padded-blocks": Case("blksize", ratio=4, pad=(0, 0, 24)),
    "small-to-large-padded-rows": Case("blksize", ratio=2, pad=(4, 8, 12)),
    "small-to-large-nhd-is-in-place": Case("blksize", "NHD", ratio=4),
    "large-to-small": Case("blksize", ratio=-2),
    "large-to-small-by-3": Case("blksize", ratio=-3, tokens=5, heads=4),
    "large-to-small-of-one-token": Case("blksize", ratio=-4, tokens=1),
    "large-to-small-padded-rows": Case("blksize", ratio=-2, pad=(1, 2, 3)),
    "large-to-small-nhd-is-in-place": Case("blksize", "NHD", ratio=-2),
    "hnd-to-nhd": Case("layout", "NHD"),
    "hnd-to-nhd-48-odd": Case("layout", "NHD", tokens=48, heads=5, content=13, groups=1),
    "hnd-to-nhd-bytes": Case("layout", "NHD", tokens=7, content=5, dtype=torch.int8, shift=1),
    "hnd-to-nhd-padded": Case("layout", "NHD", pad=(8, 0, 16)),
    "hnd-to-nhd-fp32": Case("layout", "NHD", dtype=torch.float32, content=3, shift=1),
    "hnd-to-nhd-many-units": Case("layout", "NHD", tokens=45, heads=50, content=2, groups=1),
    "nhd-to-hnd": Case("layout", "HND"),
    "nhd-to-hnd-odd": Case("layout", "HND", tokens=11, heads=7, content=9, pad=(1, 0, 3), groups=3),
    "nhd-to-hnd-fp8": Case("layout", "HND", dtype=torch.float8_e4m3fn, content=20, ids=torch.int32),
    "hnd-to-nhd-small-to-large": Case(BOTH, "NHD", ratio=2),
    "hnd-to-nhd-small-to-large-48-by-3": Case(BOTH, "NHD", tokens=48, ratio=3, content=6),
    "hnd-to-nhd-small-to-large-padded": Case(BOTH, "NHD", ratio=4, pad=(2, 4, 6)),
    "hnd-to-nhd-ratio-1": Case(BOTH, "NHD"),
    "hnd-to-nhd-large-to-small": Case(BOTH, "NHD", ratio=-2, groups=3),
    "hnd-to-nhd-large-to-small-many-units": Case(BOTH, "NHD", ratio=-4, tokens=48, heads=11, content=2, groups=1),
    "nhd-to-hnd-small-to-large": Case(BOTH, "HND", ratio=4),
    "nhd-to-hnd-large-to-small": Case(BOTH, "HND", ratio=-2, ids=torch.int32),
    "wide-rows-of-fp16": Case("layout", "NHD", content=256, dtype=torch.float16, heads=2),
    "wide-rows-of-48-tokens": Case("blksize", tokens=48, ratio=3, content=128, heads=4),
    "one-head": Case(BOTH, "NHD", heads=1, ratio=2),
    "one-token": Case("layout", "NHD", tokens=1),
    "mla": Case(BOTH, heads=1, ratio=2, mla=True),
    "mla-large-to-small": Case("blksize", heads=1, ratio=-2, content=9, pad=(0, 0, 5), mla=True),
    "one-group": Case("blksize", ratio=2, groups=1),
}
