"""The states of one rank as vLLM hands them out: raw pages, every element numbered. Imports nothing of what it judges.

A page is one layer's, as of Mamba2: the last inputs of a convolution over ``[x | B | C]``, then the recurrent state.
Heads of x and of the recurrent state are split between the ranks; of B and of C every rank has the only group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ranks.caches import GUARD, Caches, layer_name
from tests.ranks.pairing import INPUTS, STATE_SIZE, Pairing, Rank


@dataclass
class Part:
    """A part of every page: a view ``[L, B, H, C, R]``, content before rows."""

    kind: str
    layers: list[int]
    heads: range
    cache: torch.Tensor


class StateCaches(Caches):
    """Of layers with states."""

    def __init__(self, pairing: Pairing, side: str, rank: Rank, device: str = "cpu") -> None:
        super().__init__(pairing, side)
        ((self.block,),) = {tuple(ids) for ids in pairing.tables(side)}
        self._regions = pairing.groups(side, rank)
        _, self.layers, self._heads = self._regions[0]
        self.width = len(self._heads) * pairing.model.content + 2 * STATE_SIZE
        self.page = INPUTS * self.width + len(self._heads) * pairing.model.content * STATE_SIZE
        step = self.page + self.form.pad
        outer = [len(self.layers), pairing.pages(side)]
        steps = [outer[1] * step, step] if self.form.layout.index("L") < self.form.layout.index("B") else [
            step, outer[0] * step]  # fmt: skip
        self._placed = [*outer, self.page], [*steps, 1], GUARD
        self._fill(2 * GUARD + outer[0] * outer[1] * step, side, device)
        self.tables = self._parts(self.buffer)

    def _parts(self, buffer: torch.Tensor) -> list[Part]:
        pages, content, heads = buffer.as_strided(*self._placed), self.pairing.model.content, len(self._heads)
        conv, state = pages.split([INPUTS * self.width, self.page - INPUTS * self.width], -1)
        if self.pairing.dim_first:
            conv = conv.unflatten(-1, (self.width, INPUTS))
        else:
            conv = conv.unflatten(-1, (INPUTS, self.width)).transpose(-1, -2)
        x, b, c = conv.split([heads * content, STATE_SIZE, STATE_SIZE], 2)
        parts = x.unflatten(2, (heads, content)), b[:, :, None], c[:, :, None]
        found = *parts, state.unflatten(-1, (heads, content, STATE_SIZE)).transpose(-1, -2)
        return [Part(*region, view) for region, view in zip(self._regions, found, strict=True)]

    def registered(self) -> dict[str, torch.Tensor]:
        """By layer name, ``[B, 1, 1, bytes]``."""
        pages = self.memory.as_strided(*self._placed)[:, :, None, None].view(torch.int8)
        return {layer_name(layer): pages[place] for place, layer in enumerate(self.layers)}

    def _write(self, buffer: torch.Tensor, start: int, side: str) -> None:
        """Each element's part, global layer, head, channel and row as one number."""
        for number, part in enumerate(self._parts(buffer)):
            _, _, heads, content, rows = part.cache.shape
            layer = torch.tensor(part.layers)[:, None, None, None]
            head = torch.tensor(list(part.heads))[:, None, None]
            channel = torch.arange(content)[:, None] + content * (head + self.pairing.heads * (number + 4 * layer))
            part.cache[:, self.block] = (torch.arange(rows) + rows * channel).int()
            assert heads == len(part.heads)

    def _where(self, element: int) -> str:
        return f"in element {element - GUARD} of pages of {self.page}"

    @property
    def nbytes(self) -> int:
        """Bytes that a hand-over must bring here, each once."""
        return 4 * len(self.layers) * self.page
