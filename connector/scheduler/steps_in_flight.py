"""The steps that were scheduled and whose output has not been seen. Pure: no I/O, no clock of its own.

With asynchronous scheduling an engine schedules a step while its device runs the one before. Two questions follow from
the steps in flight: which blocks they may still use, and how long the device is busy with them, or the scheduler with
the next one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

REMEMBERED_STEPS = 8
"""Steps of which the shortest counts as the time of the next."""
REMEMBERED_ADMISSIONS = 3
"""Of each length, to the next power of two. The shortest counts."""


class StepsInFlight:
    """Counts steps, and keeps the blocks that were freed while a step was in flight that may use them."""

    def __init__(self) -> None:
        self._scheduled = self._processed = self._loaded = 0
        self._freed: deque[tuple[int, frozenset[int] | None]] = deque()  # last step that may use them; None: any block
        self._seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._admissions: dict[int, deque[tuple[int, float]]] = {}
        self._processed_at: float | None = None
        self.seen_at_once = False
        """What a rank has to report is seen right before the output of any step is."""

    # --- what happens -------------------------------------------------------------------------------------------

    def scheduled(self, *, loads: bool = False) -> None:
        """A step was scheduled. ``loads``: it computes with the tokens of a load inside it."""
        self._scheduled += 1
        if loads:
            self._loaded = self._scheduled

    def processed(self, now: float, *, computed: bool = True) -> None:
        """The output of the oldest step in flight has been seen at ``now`` seconds, so its device work has ended.
        ``computed``: it computed tokens."""
        busy = self._scheduled > self._processed + 1  # the device has gone on at once
        self._processed = min(self._processed + 1, self._scheduled)
        if self._processed_at is not None and computed:
            self._seconds.append(now - self._processed_at)
        self._processed_at = now if busy else None
        while self._freed and self._freed[0][0] <= self._processed:
            self._freed.popleft()

    def freed(self, block_ids: Iterable[int] | None) -> None:
        """A request no longer holds these blocks; ``None``: it is not known which. Steps in flight may use them."""
        if self._scheduled > self._processed:
            self._freed.append((self._scheduled, None if block_ids is None else frozenset(block_ids)))

    # --- what follows -------------------------------------------------------------------------------------------

    def may_use(self, block_ids: Iterable[int]) -> bool:
        """Whether a step in flight may still read or write one of these blocks, which the engine has freed."""
        if not self._freed:
            return False
        wanted = set(block_ids)
        return any(freed is None or not wanted.isdisjoint(freed) for _, freed in self._freed)

    @property
    def count(self) -> int:
        """How many steps are in flight."""
        return self._scheduled - self._processed

    @property
    def loads_inside(self) -> bool:
        """Whether a step in flight computes with the tokens of a load inside it, which may fail yet."""
        return self._loaded > self._processed

    @property
    def unknown_freed(self) -> bool:
        """Whether blocks were freed of which it is not known which, and steps in flight may use them."""
        return any(freed is None for _, freed in self._freed)

    def seconds_left(self, now: float) -> float:
        """How long the device is busy at least with the steps in flight: for the step that is scheduled now, the time
        from its launch until its kernels can begin. 0 where no step is in flight or no time is known."""
        ahead = self.count
        if not ahead or not self._seconds or self._processed_at is None:
            return 0.0
        return max(0.0, ahead * min(self._seconds) - (now - self._processed_at))

    @property
    def step_seconds(self) -> float:
        """The median of the last steps: outputs are seen late and then one after the other, so that the shortest may
        be far too short. Infinite where none is known."""
        return sorted(self._seconds)[len(self._seconds) // 2] if self._seconds else math.inf

    def seconds_until_seen(self, now: float) -> float:
        """How long the device is busy at least, from a rank's report on, before it comes to the step that can compute
        with it: the first one that is scheduled once the output has been seen of the step that is scheduled now, with
        whose launch ranks report. This one comes before it, and as many more as are in flight now. Where a report is
        ``seen_at_once``, the output of the oldest step has been seen by then, and the others come before it."""
        if self.seen_at_once:
            return self.count * self.step_seconds if self._seconds else 0.0
        more = (1 + self.count) * self.step_seconds if self._seconds else 0.0
        return self.seconds_left(now) + more

    def admitted(self, tokens: int, seconds: float) -> None:
        """A load of so many tokens took the scheduler so long, from its report to the plan of the step that joins it: a
        long prompt has thousands of blocks."""
        self._admissions.setdefault(tokens.bit_length(), deque(maxlen=REMEMBERED_ADMISSIONS)).append((tokens, seconds))

    def admission_seconds(self, tokens: int) -> float:
        """The least that a load of so many tokens should take so; 0 where less than two of about this length are
        known: one may have been held up."""
        seen = self._admissions.get(tokens.bit_length(), ())
        return min(seconds * min(1.0, tokens / others) for others, seconds in seen) if len(seen) > 1 else 0.0
