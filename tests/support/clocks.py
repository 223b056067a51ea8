"""The time of a rank's transfer thread, by which its deadlines go."""

from __future__ import annotations

import time
from typing import Any

from tests.support.inside import clock_of, set_clock


class _Later:
    """A clock that is ahead of another."""

    def __init__(self, clock: Any, seconds: float) -> None:
        self.inner, self._seconds = clock, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def turn(self) -> float:
        return float(self.inner.turn()) + self._seconds


def _of(transfer_thread: Any) -> Any:
    clock: Any = clock_of(transfer_thread)
    return clock.inner if isinstance(clock, _Later) else clock


def put_forward(transfer_thread: Any, seconds: float) -> None:
    """It is ``seconds`` later for the transfer thread than it would be; a lease ends at a chosen moment."""
    set_clock(transfer_thread, _Later(_of(transfer_thread), seconds))


def hold_up(transfer_thread: Any, seconds: float) -> None:
    """The host lets the transfer thread's thread stand still for so long, as far as its clock says."""
    _of(transfer_thread).clock = lambda: time.monotonic() + seconds
    transfer_thread.wake()
