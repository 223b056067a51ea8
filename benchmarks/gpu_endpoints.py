"""What every end of a contender of ``gpu_planes.py`` has: its GPU, its points, its memory. Axes [L, B, H, N, C]."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_caches import Cache, digest, noise
from gpu_cases import Config, Form, Ids, Point, Side, cache_bytes, num_blocks

BULK = ("nixl_best", "peer_copy", "peer_copy_in_a_row", "ucxx_raw")
"""Ways that move contiguous bytes, from the start of one arena to that of the other."""


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
        raise NotImplementedError

    def serve(self, point: str, way: str, repeats: int) -> Any:
        """The source is made ready; its answer goes to ``move`` as ``ticket``."""

    def move(self, point: str, way: str, repeats: int, ticket: Any = None, peer: str = "main") -> list[float]:
        """Seconds of each of ``repeats`` transfers; when each ended, where the way is one that begins on P."""
        raise NotImplementedError

    def synchronize(self) -> Any:
        """The source does its part, or waits until it is over."""

    def close(self) -> None:
        """Give up what a peer or a file system would keep."""


class ArenaEndpoint(Endpoint):
    """One allocation, in which the caches of all forms lie over each other."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.blocks = {side: num_blocks(config.points, side) for side in ("p", "d")}
        size = max(cache_bytes(blocks) for blocks in self.blocks.values())
        self.arena = torch.empty(size, dtype=torch.uint8, device=self.device)
        noise(self.arena, self.generator)

    def cache(self, form: Form, side: Side) -> Cache:
        return Cache.carved(form, self.blocks[side][form], self.arena)

    def pieces(self, point: Point, side: Side, base: int) -> Ids:
        """Addresses of P's pieces in an arena that begins at ``base``."""
        cache = self.cache(point.p, "p")
        tables = point.tables(side, point.p, cache.num_blocks)
        return cache.pieces(tables, cache.bases - self.arena.data_ptr() + base)

    def scrub(self, point: str, way: str) -> None:
        noise(self.arena, self.generator)

    def digest(self, point: str, way: str, side: Side) -> str:
        it = self.points[point]
        if way in BULK:
            return digest(self.arena[: it.nbytes])
        form, blocks = (it.d, "d") if side == "d" and way.startswith("kernel") else (it.p, "p")
        cache = self.cache(form, blocks)  # type: ignore[arg-type]
        return cache.digest(it.tables(side, form, cache.num_blocks), it.tokens)

    def _timed(self, go: Callable[[], object], repeats: int) -> list[float]:
        found = []
        for _ in range(repeats):
            started = time.perf_counter()
            go()
            found.append(time.perf_counter() - started)
        return found
