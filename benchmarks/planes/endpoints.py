"""What the processes of ``planes.py`` share: caches, digests of their bytes, and an end. Axes [L, B, H, N, C]."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.planes.points import BULK, Config, Form, Ids, Point, Side, cache_bytes, num_blocks
from kvferry.kernels.paged_copy import Pages

_WORD = (1 << 64) - 1


class Cache:
    """A cache of one form: per layer uint8 ``[B * block bytes]``."""

    def __init__(self, form: Form, num_blocks: int, memory: Sequence[torch.Tensor]) -> None:
        self.form, self.num_blocks, self.memory = form, num_blocks, memory
        self.bases = np.array([layer.data_ptr() for layer in memory], dtype=np.int64)

    @classmethod
    def own(cls, form: Form, num_blocks: int, device: torch.device) -> Cache:
        """With one allocation per layer, as vLLM makes them."""
        size = num_blocks * form.block_bytes
        return cls(form, num_blocks, [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(form.layers)])

    @classmethod
    def carved(cls, form: Form, num_blocks: int, arena: torch.Tensor) -> Cache:
        """At the start of one allocation, layer after layer."""
        size = num_blocks * form.block_bytes
        return cls(form, num_blocks, arena[: form.layers * size].split(size))

    def stored(self, layer: int) -> torch.Tensor:
        """bfloat16 as it lies: ``[B, N, H, C]`` or ``[B, H, N, C]``."""
        form = self.form
        inner = (form.block, form.heads) if form.order == "NHD" else (form.heads, form.block)
        return self.memory[layer].view(torch.bfloat16).view(self.num_blocks, *inner, form.content // 2)

    def tensor(self, layer: int) -> torch.Tensor:
        """bfloat16 ``[B, H, N, C]``, strided, as engines register it."""
        stored = self.stored(layer)
        return stored.permute(0, 2, 1, 3) if self.form.order == "NHD" else stored

    def fill(self, generator: torch.Generator) -> None:
        for layer in self.memory:
            noise(layer, generator)

    def pages(self, block_ids: Ids, bases: Ids | None = None) -> Pages:
        """As one side of a copy; ``bases`` where the cache is another process's."""
        form = self.form
        row, column = form.block * form.content, form.content
        if form.order == "NHD":
            row, column = form.content, form.heads * form.content
        return Pages(
            bases=self.bases if bases is None else bases,
            block_ids=block_ids,
            block_size=form.block,
            block_stride=form.block_bytes,
            head_stride=row,
            token_stride=column,
        )

    def pieces(self, tables: Sequence[Ids], bases: Ids | None = None) -> Ids:
        """int64 [L * blocks], where each block of each layer lies."""
        of = self.bases if bases is None else bases
        return np.asarray(of[:, None] + np.concatenate(tables)[None, :] * self.form.block_bytes).reshape(-1)

    def digest(self, tables: Sequence[Ids], tokens: int) -> str:
        """Of the prompts in these blocks, ``[L][H][T][C]`` each, whatever the form."""
        found = Digest()
        for ids in tables:
            index = torch.from_numpy(ids).to(self.memory[0].device)
            for layer in range(self.form.layers):
                prompt = self.tensor(layer)[index].permute(1, 0, 2, 3).flatten(1, 2)[:, :tokens]
                found.add(prompt.contiguous().view(-1))
        return found.text


class Digest:
    """A sum of all words, each times an odd number that belongs to its place, modulo 2^64; runs on the device."""

    def __init__(self) -> None:
        self._sum = 0
        self._weights: torch.Tensor | None = None

    def add(self, data: torch.Tensor) -> None:
        words = data.view(torch.int64)
        if self._weights is None or len(self._weights) != len(words):
            mixed = torch.arange(1, len(words) + 1, device=words.device) * -7046029254386353131
            mixed ^= mixed >> 29
            self._weights = mixed * -4658895280553007687 | 1
        self._sum = (self._sum * 6364136223846793005 + int((words * self._weights).sum())) & _WORD

    @property
    def text(self) -> str:
        return f"{self._sum:016x}"


def digest(memory: torch.Tensor, step: int = 128 << 20) -> str:
    """Of contiguous bytes."""
    found = Digest()
    for part in memory.split(step):
        found.add(part)
    return found.text


def noise(memory: torch.Tensor, generator: torch.Generator) -> None:
    """Random bytes, all but the top bit of each word of 8."""
    memory.view(torch.int64).random_(generator=generator)


def told() -> bool:
    """Whether the orchestrator has something to say."""
    return bool(select.select([0], [], [], 0)[0])


class Endpoint:
    """One end of a contender, on its own GPU. What a command needs it gets by name; points are named."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = torch.device("cpu") if config.device == "cpu" else torch.device("cuda", 0)
        self.points = {point.name: point for point in config.points}
        self.generator = self._generator(self.device)
        self.side: Side = "p" if config.role == "source" else "d"

    def _generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(1 if self.config.role == "source" else 2)

    def exchange(self, blob: str | None, peer: str = "main") -> str | None:
        """Blobs go to and fro until one is None."""
        return None

    def scrub(self, point: str, way: str) -> None:
        """Write noise to where a move will write."""

    def digest(self, point: str, way: str, side: Side) -> str:
        """Of what was moved, as it lies on one side."""
        it = self.points[point]
        cache = self.cache_of(it, way, side)
        return cache.digest(it.tables(side, cache.form, cache.num_blocks), it.tokens)

    def cache_of(self, point: Point, way: str, side: Side) -> Cache:
        """Where that lies."""
        raise NotImplementedError

    def serve(self, point: str, way: str, repeats: int) -> Any:
        """The source is made ready; its answer goes to ``move`` as ``ticket``."""

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        """Seconds of each of ``repeats`` transfers."""
        raise NotImplementedError

    def synchronize(self) -> Any:
        """The source does its part, or waits until it is over."""

    def rest(self) -> None:
        """Its work is over."""

    def close(self) -> None:
        """Give up what a peer or a file system would keep."""


class ArenaEndpoint(Endpoint):
    """One allocation, in which the caches of all forms lie over each other."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.blocks: dict[Side, dict[Form, int]] = {side: num_blocks(config.points, side) for side in ("p", "d")}
        size = max(cache_bytes(blocks) for blocks in self.blocks.values())
        self.arena = torch.empty(size, dtype=torch.uint8, device=self.device)
        noise(self.arena, self.generator)

    def cache(self, form: Form, side: Side) -> Cache:
        return Cache.carved(form, self.blocks[side][form], self.arena)

    def table(self, point: Point, side: Side) -> Ids:
        """Block ids of P's blocks, or of those on D to which they go."""
        return np.concatenate(point.tables(side, point.p, self.blocks["p"][point.p]))

    def pieces(self, point: Point, side: Side, base: int) -> Ids:
        """Addresses of P's pieces in an arena that begins at ``base``."""
        cache = self.cache(point.p, "p")
        return cache.pieces([self.table(point, side)], cache.bases - self.arena.data_ptr() + base)

    def scrub(self, point: str, way: str) -> None:
        noise(self.arena, self.generator)

    def digest(self, point: str, way: str, side: Side) -> str:
        return digest(self.arena[: self.points[point].nbytes]) if way in BULK else super().digest(point, way, side)

    def cache_of(self, point: Point, way: str, side: Side) -> Cache:
        return self.cache(point.d, "d") if side == "d" and way == "kernel" else self.cache(point.p, "p")

    def _timed(self, go: Callable[[], object], repeats: int) -> list[float]:
        found = []
        for _ in range(repeats):
            started = time.perf_counter()
            go()
            found.append(time.perf_counter() - started)
        return found
