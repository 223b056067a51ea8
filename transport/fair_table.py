"""A table that peers fill, bounded over all peers together. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from itertools import takewhile
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Entry(NamedTuple, Generic[V]):
    owner: bytes
    cost: int
    value: V


class FairTable(Generic[K, V]):
    """Entries by key. Each entry has an owner, the peer that caused it, and a cost.

    Where the costs exceed ``limit``, entries of the owner with the largest sum of costs leave, its oldest entry first,
    or with ``largest`` the one of the highest cost, for an owner of few entries that are put again and again.
    So no owner displaces the entries of an owner that holds less than ``limit`` divided by the number of owners.

    Args:
        limit: bound on the sum of the costs of all entries.
    """

    def __init__(self, limit: int, *, largest: bool = False) -> None:
        self.limit, self._largest = limit, largest
        self._entries: dict[K, _Entry[V]] = {}
        self._owned: dict[bytes, dict[K, None]] = {}  # the keys of each owner, the oldest first
        self._sums: dict[bytes, int] = {}
        self.cost = 0
        """The sum of the costs of all entries."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._entries))

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.value

    def values(self) -> list[V]:
        return [entry.value for entry in self._entries.values()]

    def first(self, wanted: Callable[[V], bool]) -> list[V]:
        """The values up to the first one that is not ``wanted``, those that were put first before the others."""
        return list(takewhile(wanted, (entry.value for entry in self._entries.values())))

    def owners(self) -> list[bytes]:
        return list(self._owned)

    def owns(self, owner: bytes) -> bool:
        """Whether an owner has entries."""
        return owner in self._owned

    def oldest(self, owner: bytes) -> K | None:
        """The key of the oldest entry of an owner."""
        return next(iter(self._owned.get(owner, ())), None)

    def put(self, owner: bytes, key: K, value: V, cost: int = 1) -> list[V]:
        """Add an entry, or replace the entry of this key. Returns the values that left; one may be ``value``."""
        self.pop(key)
        self._entries[key] = _Entry(owner, cost, value)
        self._owned.setdefault(owner, {})[key] = None
        self._sums[owner] = self._sums.get(owner, 0) + cost
        self.cost += cost
        return self._displace() if self.cost > self.limit else []

    def pop(self, key: K) -> V | None:
        """Remove an entry. Returns its value."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        owned = self._owned[entry.owner]
        del owned[key]
        if owned:
            self._sums[entry.owner] -= entry.cost
        else:
            del self._owned[entry.owner], self._sums[entry.owner]
        self.cost -= entry.cost
        return entry.value

    def drop(self, owner: bytes) -> list[V]:
        """Remove all entries of an owner. Returns their values, the oldest first."""
        values = [self.pop(key) for key in list(self._owned.get(owner, ()))]
        return [value for value in values if value is not None]

    def _displace(self) -> list[V]:
        """Make some room at once: the search for the largest owner takes time in proportion to their number."""
        left: list[V] = []
        heap = [(-cost, owner) for owner, cost in self._sums.items()]
        heapq.heapify(heap)
        while self.cost > self.limit - self.limit // 16:
            _, owner = heapq.heappop(heap)
            keys = self._owned[owner]
            value = self.pop(max(keys, key=lambda key: self._entries[key].cost) if self._largest else next(iter(keys)))
            if value is not None:
                left.append(value)
            if owner in self._sums:
                heapq.heappush(heap, (-self._sums[owner], owner))
        return left
