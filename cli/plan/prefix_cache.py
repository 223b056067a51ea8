"""The prefix caches of all P engines: which blocks of prompts each one holds, and which it may reuse. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """By the hash of a block, the P engines that hold it, one bit each."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def add(self, block: int, engine: int) -> None:
        self._holders[block] = self._holders.get(block, 0) | 1 << engine

    def remove(self, block: int, engine: int) -> None:
        left = self._holders[block] & ~(1 << engine)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]

    def prefixes(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """The longest prefixes of a prompt: (number of blocks, engines that hold just so many or more), longest first.
        Only numbers at which the set of engines changes are there."""
        found: list[tuple[int, int]] = []
        engines = -1
        for length, block in enumerate(blocks, 1):
            left = self._holders.get(block, 0) & engines
            if not left:
                break
            if left == engines:
                found[-1] = length, left
            else:
                found.append((length, left))
            engines = left
        return found[::-1]


class PrefixCache:
    """The blocks of one P engine, of which the least recently used leave first. Blocks under a lease stay.

    ``capacity``: blocks in all; ``None``: no bound.
    """

    def __init__(self, engine: int, capacity: int | None, index: PrefixIndex) -> None:
        self._engine, self._capacity, self._index = engine, capacity, index
        self._leased: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._private = 0

    @property
    def num_leased(self) -> int:
        """Blocks that may not leave."""
        return len(self._leased) + self._private

    def matched(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks of a prompt are here."""
        for length, block in enumerate(blocks):
            if block not in self._leased and block not in self._unused:
                return length
        return len(blocks)

    def lease(self, blocks: Sequence[int], private: int) -> bool:
        """Hold the blocks of a prompt, and ``private`` blocks that no other prompt can share.

        Returns:
            ``False``, and nothing has changed, if so many blocks are leased that these find no room.
        """
        new = sum(1 for block in blocks if block not in self._leased)
        if self._capacity is not None and self.num_leased + new + private > self._capacity:
            return False
        for block in blocks:
            if block in self._leased:
                self._leased[block] += 1
                continue
            if block in self._unused:
                del self._unused[block]
            else:
                self._index.add(block, self._engine)
            self._leased[block] = 1
        self._private += private
        while self._capacity is not None and self.num_leased + len(self._unused) > self._capacity:
            block, _ = self._unused.popitem(last=False)
            self._index.remove(block, self._engine)
        return True

    def release(self, blocks: Sequence[int], private: int) -> None:
        """End a lease. The blocks stay until others need the room; the end of a prompt leaves first."""
        for block in reversed(blocks):
            self._leased[block] -= 1
            if not self._leased[block]:
                del self._leased[block]
                self._unused[block] = None
        self._private -= private
