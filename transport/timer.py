"""A timer that a poll loop waits for."""

from __future__ import annotations

import ctypes
import os
import time

_LIBC = ctypes.CDLL(None, use_errno=True)
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC


class _Spec(ctypes.Structure):
    """``struct itimerspec``: the interval, and the time until the timer expires."""

    _fields_ = [(name, ctypes.c_long) for name in ("interval", "interval_ns", "seconds", "ns")]


class Timer:
    """``fd`` becomes readable once the time of the last ``set`` has passed, see timerfd_create(2).

    Raises:
        OSError: no descriptor is left.
    """

    def __init__(self) -> None:
        self.fd: int = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def set(self, seconds: float) -> None:
        """Expire after ``seconds``; 0: never. ``fd`` is not readable until then."""
        whole, part = divmod(round(seconds * 1e9), 10**9)
        spec = _Spec(0, 0, whole, part)
        _LIBC.timerfd_settime(self.fd, 0, ctypes.byref(spec), None)

    def close(self) -> None:
        """Close ``fd``. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
