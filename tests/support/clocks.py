"""The time of a rank's transfer thread, by which its deadlines go."""

from __future__ import annotations

import time
from typing import Any


class _Later:
    """A clock that is ahead of another."""

    def __init__(self, clock: Any, seconds: float) -> None:
        self._inner, self._seconds = clock, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def turn(self) -> float:
        return float(self._inner.turn()) + self._seconds


def _of(mover: Any) -> Any:
    return mover._time._inner if isinstance(mover._time, _Later) else mover._time


def put_forward(mover: Any, seconds: float) -> None:
    """It is ``seconds`` later for the mover than it would be; a lease ends at a chosen moment."""
    mover._time = _Later(_of(mover), seconds)
    mover._waker.wake()


def hold_up(mover: Any, seconds: float) -> None:
    """The host lets the mover's thread stand still for so long, as far as its clock says."""
    _of(mover)._clock = lambda: time.monotonic() + seconds
    mover._waker.wake()
