"""What every end of a contender of ``host_planes.py`` has: its caches, and the orchestrator on stdin.

Axes [L, B, H, N, C].
"""

from __future__ import annotations

import select
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvferry.connector.geometry.byte_ranges import wire_ordered
from kvferry.connector.geometry.spans import Chunk, Span, chunks
from kvferry.kernels.paged_copy import Pages, copy_pages, wire_pages
from kvferry.transport.channels import CPU, Pieces

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class Config:
    """What all contenders move: ``mib`` of KV in scattered blocks, per block size in KiB."""

    mib: int
    kib: list[int]
    layers: int
    slot_bytes: int
    staging_bytes: int
    host: str = "127.0.0.1"
    """The address of this process."""
    peer: str = "127.0.0.1"
    """The address of the source, for the target."""
    encrypt: bool = False
    checksum: bool = False
    """Whether our push planes carry a checksum behind each message."""


class Cache:
    """A cache of twice the blocks that are moved, HND, each block one run of ``kib`` KiB, and the blocks' order."""

    def __init__(self, config: Config, kib: int, memory: torch.Tensor, seed: int) -> None:
        self.block_bytes = kib << 10
        self.num_blocks = (config.mib << 20) // config.layers // self.block_bytes
        self.num_tokens = self.num_blocks * BLOCK_TOKENS
        self.num_heads = max(1, kib // 8)
        self.content_bytes = self.block_bytes // self.num_heads // BLOCK_TOKENS
        self.nbytes = config.layers * self.num_blocks * self.block_bytes
        rng = np.random.default_rng(seed)
        self.memory = memory[: 2 * self.nbytes]
        self.layer_bytes = 2 * self.num_blocks * self.block_bytes
        self.bases = self.memory.data_ptr() + self.layer_bytes * np.arange(config.layers, dtype=np.int64)
        self.block_ids = rng.permutation(2 * self.num_blocks)[: self.num_blocks].astype(np.int64)
        self.span = Span(0, 0, config.layers, 0, self.num_heads, 0, self.num_tokens)

    def chunks(self, chunk_bytes: int) -> list[Chunk]:
        return chunks(self.span, self.content_bytes, chunk_bytes, BLOCK_TOKENS)

    def sides(self, chunk: Chunk, address: int) -> tuple[Pages, Pages]:
        """The chunk in the pages, and on the wire at ``address``."""
        head_bytes = BLOCK_TOKENS * self.content_bytes
        pages = Pages(
            bases=self.bases[chunk.layer : chunk.layer + chunk.num_layers],
            block_ids=self.block_ids,
            block_size=BLOCK_TOKENS,
            block_stride=self.block_bytes,
            head_stride=head_bytes,
            token_stride=self.content_bytes,
            token=chunk.token,
        )
        wire = wire_pages(address, chunk.num_layers, self.num_heads, chunk.num_tokens, self.content_bytes)
        return pages, wire

    def pieces(self, chunk: Chunk) -> Pieces:
        """Where the chunk lies in the pages, in wire order."""
        return wire_ordered(self.sides(chunk, 0)[0], self.num_heads, chunk.num_tokens, self.content_bytes)

    def copy(self, dst: Pages, src: Pages, chunk: Chunk) -> None:
        copy_pages(
            dst,
            src,
            num_heads=self.num_heads,
            num_tokens=chunk.num_tokens,
            content_bytes=self.content_bytes,
            device=CPU,
        )

    def chunk_bytes(self, chunk: Chunk) -> int:
        return chunk.num_layers * self.num_heads * chunk.num_tokens * self.content_bytes

    def addresses(self) -> np.ndarray:
        """int64 [L * blocks], where each block lies, in the order in which it is moved."""
        return (self.bases[:, None] + self.block_ids[None, :] * self.block_bytes).reshape(-1)

    def moved(self) -> torch.Tensor:
        """The bytes of the blocks in the order in which they are moved: uint8 [L, blocks, block bytes]."""
        view = self.memory.view(-1, 2 * self.num_blocks, self.block_bytes)
        return view[:, torch.from_numpy(self.block_ids)]


class Endpoint(Protocol):
    """``exchange`` passes blobs to and fro until one is None; ``move`` does one transfer."""

    def exchange(self, blob: bytes | None) -> bytes | None: ...
    def move(self, kib: int) -> float | None: ...


def stopped() -> bool:
    """Whether the orchestrator has something to say."""
    return bool(select.select([0], [], [], 0)[0])


class ReadSource:
    """A source from whose memory the target reads by itself."""

    def move(self, kib: int) -> float | None:
        select.select([0], [], [])  # until the orchestrator says that it is over
        return None
