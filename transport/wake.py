"""Small tools of a thread that polls: ways to wake it, and its time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import ClassVar

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_TIMERSLACK = 29
HELD_UP_SECONDS = 1.0
"""A turn takes milliseconds; a turn that takes this long was held up. Threads have been seen to lose ten seconds on a
paused host, and on a host where other threads spin on all cores."""


def keep_time_exactly() -> None:
    """Let Linux end this thread's waits on time. By default a wait may end 50 us late, the timer slack (prctl(2)).

    A thread that waits for the GIL waits in steps of ``sys.getswitchinterval()``, and the slack lengthens each step.
    """
    with contextlib.suppress(OSError, AttributeError):
        _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class ShortSwitchInterval:
    """The interpreter's switch interval (``sys.setswitchinterval``, 5 ms by default), short while any object of this
    class wants it so: a thread has the GIL after this time at the latest. Each change of threads costs the engine's, so
    nobody keeps it for longer than needed. Thread-safe; calls that change nothing take no lock."""

    _lock = threading.Lock()
    wanted: ClassVar[list[float]] = []
    _before = 0.0

    def __init__(self, seconds: float) -> None:
        self._seconds, self.short = seconds, False

    def shorten(self) -> None:
        """Have it no longer than so many seconds. Idempotent."""
        self._change(True)

    def restore(self) -> None:
        """Leave it as it was before the first object shortened it, once no other wants it short. Idempotent."""
        self._change(False)

    def _change(self, short: bool) -> None:
        cls = ShortSwitchInterval
        if self.short is short:
            return
        with cls._lock:
            if self.short is short:
                return
            self.short = short
            if not cls.wanted:
                cls._before = sys.getswitchinterval()
            if short:
                cls.wanted.append(self._seconds)
            else:
                cls.wanted.remove(self._seconds)
            sys.setswitchinterval(min([cls._before, *cls.wanted]))


class Waker:
    """Lets any thread wake a poller. Register ``fd`` for reading; call :meth:`drain` when it is readable."""

    def __init__(self) -> None:
        self.fd: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self.fd

    def wake(self) -> None:
        """Make ``fd`` readable. Thread-safe, a few microseconds, never blocks, harmless after :meth:`close`."""
        with self._lock:  # without it a wake() beside close() could write to another file that got the same number
            if not self._closed:
                with contextlib.suppress(BlockingIOError):  # the counter is full: the poller is awake already
                    os.eventfd_write(self.fd, 1)

    def drain(self) -> bool:
        """Make ``fd`` unreadable again; True if ``wake`` was called before. Look at the work only after this call."""
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


class _Spec(ctypes.Structure):
    """``struct itimerspec``: the interval, and the time until the timer expires."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval", "interval_ns", "seconds", "ns")]


class Timer:
    """``fd`` becomes readable once the time of the last ``set`` has passed, see timerfd_create(2).

    Raises:
        OSError: no descriptor is left.
    """

    def __init__(self) -> None:
        self.fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def set(self, seconds: float) -> None:
        """Expire after ``seconds``; 0: never. ``fd`` is not readable until then."""
        whole, part = divmod(round(seconds * 1e9), 10**9)
        spec = _Spec(0, 0, whole, part)
        _libc.timerfd_settime(self.fd, 0, ctypes.byref(spec), None)

    def close(self) -> None:
        """Close ``fd``. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class RunningClock:
    """The time for the deadlines of a thread, in seconds from 0. It advances at each turn of the thread.

    A turn counts at most ``HELD_UP_SECONDS`` plus its announced sleep: beyond that the thread was held up, and received
    no message. Every turn counts for something, so a deadline passes in the end. ``late``: seconds that the last turn
    took beyond its sleep; 0 where it was not held up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._began = clock()
        self.now = self.asleep = self.late = 0.0

    def turn(self) -> float:
        """Begin a turn, and return the time, which is never earlier than before."""
        here = self.clock()
        took, counted = here - self._began, self.asleep + HELD_UP_SECONDS
        self.late = took - self.asleep if took > counted else 0.0
        self.now += min(took, counted)
        self._began, self.asleep = here, 0.0
        return self.now

    def sleeps(self, seconds: float) -> None:
        """Announce that the turn will sleep for ``seconds`` or less."""
        self.asleep += seconds
