"""The pages of one rank: real memory, the prompt that each block holds, and who reads and writes it at the moment.

Axes ``[L, B, H, N, C]``. An element is 8 bytes; the elements of a prompt are a pattern XOR the prompt's own number, so
that no two elements of all prompts are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.connector.config import Settings
from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.geometry.topology import TpKVTopology
from kvferry.connector.pages.caches import PageBox, RankCaches
from kvferry.connector.pages.copies import Copies, DeviceEvent, WaitPolicy
from kvferry.connector.worker.worker_setup import bind_caches
from kvferry.transport.channels import CPU, Copy
from tests.simulation.network import Timeline, Violation

BLOCK_TOKENS, CONTENT = 16, 16
"""Tokens in a block; elements of 8 bytes per head and token. A block of one head is just long enough to be sent in
place."""
LAYER = "model.layers.0.attn"
FREE = 0x5A5A5A5A5A5A5A5A
"""In each element of a block that the engine has not given away."""


@dataclass(frozen=True)
class Form:
    """The form of an engine and its number of blocks."""

    tp_size: int
    total_heads: int
    blocks: int


@dataclass(slots=True, eq=False)
class Use:
    """A copy that touches blocks of one rank at the moment."""

    copy: Copy | None
    blocks: frozenset[int]


@lru_cache(maxsize=512)
def wanted(first: int, heads: int, blocks: int, number: int) -> npt.NDArray[np.int64]:
    """[B, H, N, C] of the prompt ``number``: P writes it, and D compares it twice."""
    elements = pattern(first, heads, blocks * BLOCK_TOKENS) ^ (number << 24)
    elements.flags.writeable = False
    return elements


@cache
def pattern(first: int, heads: int, tokens: int) -> npt.NDArray[np.int64]:
    """[B, H, N, C] of the prompt with the number 0."""
    shape = (-(-tokens // BLOCK_TOKENS), heads, BLOCK_TOKENS, CONTENT)
    block, head, token, content = np.indices(shape, dtype=np.int64)
    return content + CONTENT * (block * BLOCK_TOKENS + token + 4096 * (head + first))


class Pages:
    """The KV cache of one rank."""

    def __init__(self, form: Form, tp_rank: int, info: RankInfo, copies: SimCopies) -> None:
        self.first, self.heads = TpKVTopology.head_interval(tp_rank, form.tp_size, form.total_heads)
        self.elements = np.full((form.blocks, self.heads, BLOCK_TOKENS, CONTENT), FREE, dtype=np.int64)
        self.page_bytes = self.elements[0].nbytes
        self.base = self.elements.ctypes.data
        tensor = torch.from_numpy(self.elements)
        group = LayerGroup("full", (LAYER,), BLOCK_TOKENS, form.total_heads)
        bound, _ = bind_caches(Settings(), info, [group], {LAYER: tensor}, None, None)
        self.reads: list[Use] = []  # by copies and channels of this rank, out of its own pages
        self.writes: list[Use] = []
        self.caches = SimCaches(bound.geometry, bound.views, copies, bound.keep, self)
        copies.pages = self

    def fill(self, blocks: Sequence[int], number: int) -> None:
        """The engine computes the prompt ``number`` in these blocks."""
        self.elements[blocks] = wanted(self.first, self.heads, len(blocks), number)

    def compute(self, blocks: Sequence[int], number: int, start: int, stop: int) -> None:
        """The engine computes tokens [start, stop) of the prompt ``number`` in these blocks."""
        elements = wanted(self.first, self.heads, len(blocks), number)
        tokens = np.arange(start, stop)
        places, offsets = np.array(blocks)[tokens // BLOCK_TOKENS], tokens % BLOCK_TOKENS
        self.elements[places, :, offsets] = elements[tokens // BLOCK_TOKENS, :, offsets]

    def holds(self, blocks: Sequence[int], number: int, start: int, stop: int) -> bool:
        """Whether tokens [start, stop) of the prompt ``number`` lie in these blocks."""
        elements = wanted(self.first, self.heads, len(blocks), number)
        equal: npt.NDArray[np.bool_] = self.elements[blocks] == elements
        if start == 0 and stop == len(blocks) * BLOCK_TOKENS:
            return bool(equal.all())
        by_token = equal.transpose(0, 2, 1, 3).reshape(len(blocks) * BLOCK_TOKENS, -1)
        return bool(by_token[start:stop].all())

    def free(self, blocks: Sequence[int]) -> None:
        """The engine takes blocks back."""
        self.check_unused(blocks)
        self.elements[blocks] = FREE

    def take_back(self, blocks: Sequence[int]) -> None:
        """The engine takes blocks back whose prompt it has not computed yet. Copies of this rank may read them: what
        they read counts for nothing."""
        self.reads = [use for use in self.reads if use.copy is None or use.blocks.isdisjoint(blocks)]
        self.free(blocks)

    def check_unused(self, blocks: Sequence[int]) -> None:
        """Nothing may read or write these blocks."""
        for what, uses in (("read", self.reads), ("written", self.writes)):
            if uses:
                uses[:] = [use for use in uses if use.copy is None or not use.copy.done]
                for use in uses:
                    if not use.blocks.isdisjoint(blocks):
                        raise Violation(f"blocks {sorted(use.blocks)} are being {what}, and {list(blocks)} are free")

    def untouched(self, blocks: Sequence[int]) -> bool:
        """Whether nothing has written blocks since they became free."""
        return bool((self.elements[blocks] == FREE).all())

    def at(self, addresses: Iterable[int]) -> frozenset[int]:
        """The blocks in which these addresses lie."""
        return frozenset((address - self.base) // self.page_bytes for address in addresses)


@dataclass(frozen=True)
class SimCaches(RankCaches):
    """The real caches of a rank, which also write down who uses them."""

    pages_of_rank: Pages = field(default=None)  # type: ignore[assignment]

    def pack(self, address: int, box: PageBox, staging: torch.device = CPU, *, alone: bool = False) -> Copy:
        copy = super().pack(address, box, staging, alone=alone)
        if not copy.done:
            self.pages_of_rank.reads.append(Use(copy, _blocks(box)))
        return copy

    def unpack(self, address: int, box: PageBox, staging: torch.device = CPU, *, alone: bool = False) -> Copy:
        copy = super().unpack(address, box, staging, alone=alone)
        if not copy.done:
            self.pages_of_rank.writes.append(Use(copy, _blocks(box)))
        return copy


def _blocks(box: PageBox) -> frozenset[int]:
    size = box.blocks.size
    return frozenset(box.blocks.ids[box.token // size : -(-(box.token + box.num_tokens) // size)].tolist())


class SimCopies(Copies):
    """Copies that touch memory only at their end, some time after they were started. ``slow``: seconds that one takes
    at most; 0: done on return. ``failing``: how likely one fails."""

    device = CPU

    def __init__(self, timeline: Timeline, slow: float = 0.0) -> None:
        super().__init__()
        self.timeline, self.slow, self.failing = timeline, slow, 0.0
        self.pages: Any = None
        self.alive = True
        self.under_way: dict[Copy, Callable[[], None]] = {}  # with what ends each at once

    def start(self, enqueue: Any, wait: WaitPolicy = WaitPolicy.NONE) -> Copy:
        rng = self.timeline.rng
        if not self.slow or rng.random() < 0.5:
            enqueue()
            return Copy(done=True, on_stream=True)
        copy = Copy(on_stream=True)
        error = "planted" if self.failing and rng.random() < self.failing else ""
        self.under_way[copy] = lambda: self._end(copy, enqueue, error)
        self.timeline.after(self.slow * rng.random(), self.under_way[copy])
        return copy

    def _end(self, copy: Copy, enqueue: Any, error: str) -> None:
        if self.alive and self.under_way.pop(copy, None) is not None:
            if not error:
                enqueue()
            copy.error = error
            copy.done = True
            self.on_done()

    def record_event(self) -> DeviceEvent | None:
        return None

    def after_engine(self, act: Callable[[], None]) -> None:
        act()

    def wait_event(self, event: DeviceEvent) -> None:
        raise Violation("there are no events")

    def make_engine_wait(self, event: object) -> None:
        """Nothing is launched behind a copy."""

    def synchronize(self) -> None:
        """The engine's copies are done at once."""

    def close(self) -> None:
        """As on a GPU: end what was started."""
        for end in list(self.under_way.values()):
            end()
