"""KV caches of the ranks of the matrix, paged and of states: their values, and how they are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tests.ranks.pairing import INPUTS, ITEM_SIZES, MAX_TOKENS, STATE_SIZE, Form, Pairing, Rank

P_FILL, D_FILL = -2, -1
"""What elements hold that belong to no prompt."""
GUARD = 64
"""Elements before, between and after the block tables' regions."""


def numbers(layers: list[int], heads: range, tokens: list[int], pairing: Pairing) -> torch.Tensor:
    """[T, L, H, C] int32: each element's global (layer, head, token, channel) as one number."""
    content = pairing.model.content
    layer = torch.tensor(layers)[None, :, None, None]
    head = torch.tensor(list(heads))[None, None, :, None]
    token = torch.tensor(tokens)[:, None, None, None]
    channel = torch.arange(content)
    found = channel + content * (token + MAX_TOKENS * (head + pairing.heads * layer))
    assert int(found.max()) < 1 << 31
    return found.to(torch.int32)


def stored(found: torch.Tensor, table: Table, pairing: Pairing, side: str) -> torch.Tensor:
    """``numbers`` as the elements of a side's caches.

    Integers stand for themselves. A float stands for a number drawn by its element's number, few of them too large for
    most dtypes. P's is that over P's scale, rounded; D's is what P's means, over D's scale, rounded again.
    """
    if pairing.p.dtype == "int32":
        return found
    drawn = (found.to(torch.int64) * 2654435761 % (1 << 32)).double() / (1 << 29) - 4
    drawn[found % 97 == 0] *= 1e6
    of, to = (_scales(table, pairing, pairing.form(which)) for which in ("p", "d"))
    at_p = _rounded(drawn.float() / of, pairing.p.dtype)
    return at_p if side == "p" or not pairing.converts else _rounded(at_p.float() * of / to, pairing.d.dtype)


def _scales(table: Table, pairing: Pairing, form: Form) -> torch.Tensor:
    """[1, L, 1, C] float32."""
    is_key = torch.arange(pairing.model.content) < pairing.keys(table.kind)
    pairs = torch.tensor([form.scales(layer) for layer in table.layers], dtype=torch.float32).reshape(-1, 2)
    return torch.where(is_key, pairs[:, :1], pairs[:, 1:])[None, :, None, :]


def _rounded(found: torch.Tensor, dtype: str) -> torch.Tensor:
    """To the nearest number, the largest one at most."""
    largest = torch.finfo(getattr(torch, dtype)).max
    return found.clamp(-largest, largest).to(getattr(torch, dtype))


def strides(form: Form, sizes: dict[str, int]) -> dict[str, int]:
    """Of each axis, in elements. Padding follows each page where pages lie apart (vLLM's ``page_size_padded``), else
    each step of the outermost axis (blocks that other groups share, regions that are rounded up)."""
    padded = form.layout[1] if set(form.layout[:2]) == {"L", "B"} else form.layout[0]
    found, step = {}, 1
    for axis in reversed(form.layout):
        step += form.pad if axis == padded else 0
        found[axis] = step
        step *= sizes[axis]
    return found


@dataclass
class Table:
    """What one block table maps: a view ``[L, B, H, N, C]`` of kernel blocks."""

    kind: str
    layers: list[int]
    heads: range
    cache: torch.Tensor


class Caches:
    """All caches of one rank, in one buffer. ``memory``: what the engine and its peers see of it."""

    buffer: torch.Tensor
    memory: torch.Tensor

    def __init__(self, pairing: Pairing, side: str) -> None:
        self.pairing, self.form = pairing, pairing.form(side)

    def _fill(self, elements: int, side: str, device: str) -> None:
        """Make the buffer, of elements that belong to no prompt."""
        fill = {"p": P_FILL, "d": D_FILL}[side]
        self.buffer = torch.full((elements,), fill, dtype=getattr(torch, self.form.dtype))
        self.memory = self.buffer.to(device, copy=True)

    def _write(self, buffer: torch.Tensor, start: int, side: str) -> None:
        """The prompt's numbers from token ``start`` on."""
        raise NotImplementedError

    def _where(self, element: int) -> str:
        raise NotImplementedError

    def fill(self) -> None:
        """P: the prompt's numbers into its blocks."""
        self._write(self.buffer, 0, "p")

    def upload(self) -> None:
        """What was changed on the host, to the device."""
        self.memory.copy_(self.buffer)

    def download(self) -> None:
        """What was changed on the device, to the host."""
        self.buffer.copy_(self.memory)

    def wrong(self) -> str:
        """D: how the whole buffer differs from what a hand-over must have made of it; empty where it does not."""
        expected = torch.full_like(self.buffer, D_FILL)
        self._write(expected, self.pairing.start, "d")
        size = ITEM_SIZES[self.form.dtype]
        bits = [buffer.view(torch.uint8).reshape(-1, size) for buffer in (self.buffer, expected)]
        differs = (bits[0] != bits[1]).any(1).nonzero().reshape(-1)
        if not len(differs):
            return ""
        first = int(differs[0])
        return (
            f"{len(differs)} of {len(expected)} elements differ, the first {self._where(first)}: "
            f"{self.buffer[first].item()}, expected {expected[first].item()}"
        )


class RankCaches(Caches):
    """Of attention layers."""

    def __init__(self, pairing: Pairing, side: str, rank: Rank, device: str = "cpu") -> None:
        super().__init__(pairing, side)
        self.held = self.form.held(rank[1], pairing.tokens)
        self.blocks = [torch.tensor(ids) for ids in pairing.tables(side)]
        groups = pairing.groups(side, rank)
        placed, end = [], GUARD
        for _, layers, heads in groups:
            ratio = self.form.block // self.form.kernel
            sizes = {"L": len(layers), "B": pairing.pages(side) * ratio, "H": len(heads), "N": self.form.kernel}
            sizes["C"] = pairing.model.content
            steps = strides(self.form, sizes)
            placed.append(([sizes[a] for a in "LBHNC"], [steps[a] for a in "LBHNC"], end))
            outermost = self.form.layout[0]
            end += sizes[outermost] * steps[outermost] + GUARD
        self._fill(end, side, device)
        self._placed = placed
        self.tables = [Table(*group, self._view(self.buffer, n)) for n, group in enumerate(groups)]

    def _view(self, buffer: torch.Tensor, table: int) -> torch.Tensor:
        sizes, steps, offset = self._placed[table]
        return buffer.as_strided(sizes, steps, offset)

    def registered(self) -> dict[str, torch.Tensor]:
        """By layer name, ``[B, H, N, C]``; MLA by turns also ``[B, N, C]``, which older releases hand out."""
        named = {}
        for number, table in enumerate(self.tables):
            flat = table.kind == "mla" and self.pairing.seed % 2
            there = self._view(self.memory, number)
            for place, layer in enumerate(table.layers):
                cache = there[place]
                fp8 = self.form.dtype.startswith("float8")  # which vLLM hands out as bytes
                named[layer_name(layer)] = (cache[:, 0] if flat else cache).view(torch.uint8 if fp8 else cache.dtype)
        return named

    def _write(self, buffer: torch.Tensor, start: int, side: str) -> None:
        """The prompt's numbers from token ``start`` on, of the rank's own tokens, one after the other in its blocks."""
        tokens = [token for token in self.held if token >= start]
        if not tokens:
            return
        at = torch.arange(len(self.held) - len(tokens), len(self.held))
        for number, table in enumerate(self.tables):
            if not table.layers:
                continue
            page = self.blocks[number][at // self.form.block]
            block = page * (self.form.block // self.form.kernel) + at % self.form.block // self.form.kernel
            values = stored(numbers(table.layers, table.heads, tokens, self.pairing), table, self.pairing, side)
            self._view(buffer, number)[:, block, :, at % self.form.kernel] = values

    def _where(self, element: int) -> str:
        places = torch.arange(len(self.buffer), dtype=torch.int32)
        for number, table in enumerate(self.tables):
            found = (self._view(places, number) == element).nonzero()
            if len(found):
                layer, block, head, token, channel = found[0].tolist()
                return (
                    f"in {table.kind} layer {table.layers[layer]} head {table.heads[head]}, kernel block {block} "
                    f"token {token} channel {channel} (tables {[ids.tolist() for ids in self.blocks]})"
                )
        return f"in the padding at element {element}"

    @property
    def nbytes(self) -> int:
        """Bytes that a hand-over must bring here, each once, as P has them."""
        tokens, size = sum(token >= self.pairing.start for token in self.held), ITEM_SIZES[self.pairing.p.dtype]
        return sum(size * tokens * math.prod((len(t.layers), len(t.heads), t.cache.shape[-1])) for t in self.tables)


def layer_name(layer: int) -> str:
    return f"model.layers.{layer}.attn"


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
