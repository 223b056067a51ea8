"""Which of many things are due, without a look at the others. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

SWEEP = 64
"""Entries beside twice the living ones that the heap may have. A deadline may be days away, and its thing gone."""


class Deadlines(Generic[K]):
    """The keys of things that wait for a time.

    A time may move to later without a call here, so that a renewal costs nothing: ``due`` finds that it has moved.

    Args:
        at: the time of a key; infinite where it waits for none, or is gone.
    """

    def __init__(self, at: Callable[[K], float]) -> None:
        self._at = at
        self._queued: dict[K, float] = {}  # when ``due`` looks at a key, which is not later than its time
        self._heap: list[tuple[float, int, K]] = []
        self._numbers = count()  # keys are not compared
        self._most = SWEEP

    def note(self, key: K, at: float) -> None:
        """A key is new, or its time has moved to earlier; it is ``at`` now."""
        if at < self._queued.get(key, math.inf):
            self._queued[key] = at
            heapq.heappush(self._heap, (at, next(self._numbers), key))
            if len(self._heap) > self._most:
                self._sweep()

    def due(self, now: float) -> list[K]:
        """The keys that are due, by their times. Each comes again at the next call until its time has moved, also where
        an error has kept the caller from it."""
        found: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            queued, _, key = heapq.heappop(self._heap)
            if self._queued.get(key) != queued:
                continue  # an entry with an earlier time came before
            del self._queued[key]
            if (at := self._at(key)) <= now:
                found.append(key)
            else:
                self.note(key, at)
        for key in found:
            self.note(key, self._at(key))
        return found

    def _sweep(self) -> None:
        """Forget the keys that are gone."""
        times = {key: at for key in self._queued if (at := self._at(key)) < math.inf}
        self._queued = times
        self._heap = [(at, next(self._numbers), key) for key, at in times.items()]
        heapq.heapify(self._heap)
        self._most = SWEEP + 2 * len(self._heap)
