"""Small tools of a thread that polls: a way to wake it, its time, and warnings that cannot flood the log."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable

_PR_SET_TIMERSLACK = 29
HELD_UP_SECONDS = 1.0
"""A turn takes milliseconds; one that takes this long was held up. A paused host, or one on which others spin on all
cores, has been seen to take ten seconds from a thread."""


def keep_time_exactly() -> None:
    """Have Linux end this thread's waits when they are over, not up to 50 us later as it may (prctl(2)).

    A thread that waits for the GIL waits in steps of ``sys.getswitchinterval()``, each of which the slack lengthens.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class Waker:
    """Lets any thread wake a poller. Register ``fd`` for reading; call :meth:`drain` when it is readable."""

    def __init__(self) -> None:
        self.fd: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def wake(self) -> None:
        """Make ``fd`` readable. Thread-safe, a few microseconds, never blocks, harmless after :meth:`close`."""
        with self._lock:  # without it a wake() beside close() could write to whatever file got the number next
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # the counter is full: the poller is awake already
                    os.eventfd_write(self.fd, 1)

    def drain(self) -> bool:
        """Make ``fd`` unreadable again; True if somebody had woken us. Look at the work only after this call."""
        if self._closed:
            return False
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class RunningClock:
    """Seconds as the deadlines of a thread count them, from 0, turn by turn. Those for which it was held up do not
    count: in them it heard nobody. Of each turn ``HELD_UP_SECONDS`` and what it meant to sleep do, so a deadline passes
    in the end.

    Attributes:
        late: seconds that the last turn took beyond its sleep, 0 where it was not held up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._now = self._asleep = 0.0
        self.late = 0.0

    def turn(self) -> float:
        """Begin a turn: what time it is, never earlier than before."""
        here = self._clock()
        took, counted = here - self._began, self._asleep + HELD_UP_SECONDS
        self.late = took - self._asleep if took > counted else 0.0
        self._now += min(took, counted)
        self._began, self._asleep = here, 0.0
        return self._now

    def sleeps(self, seconds: float) -> None:
        """The turn is about to sleep for so long, or less."""
        self._asleep += seconds


class RateLimitedLog:
    """Warns at most once per ``seconds`` and key, and says how many like it were suppressed. Thread-safe.

    The number of keys is bounded, so a key may come from a peer: beyond ``max_keys`` the longest silent is forgotten.
    """

    def __init__(
        self,
        logger: logging.Logger,
        seconds: float = 10.0,
        *,
        max_keys: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger, self._seconds, self._max_keys, self._clock = logger, seconds, max_keys, clock
        self._lock = threading.Lock()
        self._keys: dict[str, tuple[float, int]] = {}  # last warned at, suppressed since

    def warning(self, key: str, message: str, *args: object) -> bool:
        """``logger.warning(message, *args)``, or count it as suppressed; True where it was written."""
        return self._log(logging.WARNING, key, message, args)

    def error(self, key: str, message: str, *args: object) -> bool:
        """The same at ERROR."""
        return self._log(logging.ERROR, key, message, args)

    def _log(self, level: int, key: str, message: str, args: tuple[object, ...]) -> bool:
        now = self._clock()
        with self._lock:
            known = self._keys.get(key)
            if known is not None and now - known[0] < self._seconds:
                self._keys[key] = (known[0], known[1] + 1)
                return False
            suppressed = 0 if known is None else known[1]
            self._keys.pop(key, None)  # to the end, so that the first is the longest silent
            self._keys[key] = (now, 0)
            while len(self._keys) > self._max_keys:
                del self._keys[next(iter(self._keys))]
        if suppressed:
            self._logger.log(level, message + " (and %d more like this)", *args, suppressed)
        else:
            self._logger.log(level, message, *args)
        return True
