"""Virtual time: what happens next, in the order of time, and what must not happen."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable
from random import Random


class Violation(AssertionError):
    """A promise was broken."""


class Timeline:
    """Events in the order of their time, and of their making where times are equal. ``now``: seconds from 0."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = Random(seed)
        self.happened: deque[tuple[float, str, str]] = deque(maxlen=400)
        """The last notes, for the message of a violation."""
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._made = 0

    def clock(self) -> float:
        """The time, for those that take a clock."""
        return self.now

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        """Let ``act`` happen in ``seconds``."""
        self._made += 1
        heapq.heappush(self._events, (self.now + seconds, self._made, act))

    def at(self, when: float, act: Callable[[], object]) -> None:
        """Let ``act`` happen at a time."""
        self._made += 1
        heapq.heappush(self._events, (when, self._made, act))

    def run(self, seconds: float) -> None:
        """Let ``seconds`` pass, with all that happens in them."""
        end, events = self.now + seconds, self._events
        while events and events[0][0] <= end:
            self.now, _, act = heapq.heappop(events)
            act()
        self.now = end

    def note(self, kind: str, what: str = "") -> None:
        """Remember what happened."""
        self.happened.append((self.now, kind, what))

    def story(self) -> str:
        """The last notes, the latest at the end."""
        return "\n".join(f"{at:12.6f}  {kind}{what and ': '}{what}" for at, kind, what in self.happened)


class ErrorLog(logging.Handler):
    """Notices each line at ERROR: the product logs there only what must not happen."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
