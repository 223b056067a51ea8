"""A lifetime whose state is its phase alone, and the line that a log has of its phases."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

MAX_HISTORY = 12
"""Phases that a lifetime remembers."""

P = TypeVar("P", bound=enum.Enum)
Moves = Mapping[P, Mapping[enum.Enum, P]]
"""By phase and event, the next phase. An event that is not listed changes nothing."""


def story(history: Iterable[tuple[float, enum.Enum]]) -> str:
    """The phases of a life in one line, each with its seconds after the first."""
    (begun, first), *later = history
    return ", ".join([str(first.value), *(f"{phase.value} +{at - begun:.3f} s" for at, phase in later)])


class Phases(Generic[P]):
    """A phase, and the last changes of it. Its owner performs what follows."""

    __slots__ = ("_history", "_moves", "phase")

    def __init__(self, moves: Moves[P], first: P, now: float) -> None:
        """``now``: in seconds of the owner's clock."""
        self._moves, self.phase = moves, first
        self._history = deque[tuple[float, enum.Enum]]([(now, first)], MAX_HISTORY)

    def step(self, event: enum.Enum, now: float) -> P:
        """Take one event. Returns the phase before it."""
        before = self.phase
        self.phase = self._moves.get(before, {}).get(event, before)
        if self.phase is not before:
            self._history.append((now, self.phase))
        return before

    def story(self) -> str:
        return story(self._history)
