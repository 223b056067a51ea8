"""The steps of one D engine with continuous batching: when each sequence gets its tokens. Pure.

A step gives one token to each sequence. It takes ``base + per_sequence x sequences`` seconds. Sequences join between
steps. So nothing need be computed at each step: until one joins or ends, all steps are equal.
"""

from __future__ import annotations

import heapq
from math import ceil, inf


class StepClock:
    """``base``, ``per_sequence``: seconds of a step, and seconds more for each sequence in it."""

    def __init__(self, base: float, per_sequence: float) -> None:
        self._base, self._per_sequence = base, per_sequence
        self._steps, self._since = 0, 0.0  # steps so far, and the end of the last of them
        self._ends: list[tuple[int, int]] = []  # (step, sequence)
        self._fresh: list[int] = []  # sequences whose first step begins at ``_since``
        self.first_tokens: dict[int, float] = {}
        """When a sequence got its first token."""

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def _step(self) -> float:
        return self._base + self._per_sequence * len(self._ends)

    @property
    def next_end(self) -> float:
        """When the next sequence ends, if none joins before."""
        return self._since + (self._ends[0][0] - self._steps) * self._step if self._ends else inf

    def join(self, sequence: int, tokens: int, now: float, stall: float = 0.0) -> None:
        """A sequence joins after the step that is under way, and gets ``tokens`` tokens. ``stall``: seconds of other
        work before the next step."""
        self._advance(now)
        self._since += stall
        heapq.heappush(self._ends, (self._steps + tokens, sequence))
        self._fresh.append(sequence)

    def ended(self, now: float) -> list[int]:
        """The sequences that end at ``now``, which is ``next_end``."""
        if self._ends:
            self._pass(self._ends[0][0] - self._steps, now)
        found = []
        while self._ends and self._ends[0][0] <= self._steps:
            found.append(heapq.heappop(self._ends)[1])
        return found

    def _advance(self, now: float) -> None:
        """To the end of the step that is under way at ``now``."""
        if not self._ends:
            self._since = max(self._since, now)
            return
        steps = min(max(0, ceil((now - self._since) / self._step)), self._ends[0][0] - self._steps)
        self._pass(steps, self._since + steps * self._step)

    def _pass(self, steps: int, end: float) -> None:
        if steps:
            self.first_tokens.update(dict.fromkeys(self._fresh, self._since + self._step))
            self._fresh.clear()
        self._steps += steps
        self._since = end
