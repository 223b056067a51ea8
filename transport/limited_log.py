"""Log lines that cannot flood the log, whatever a peer or a request does. They do no other I/O."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

FAILED_LINES = 10
"""Lines about requests that failed for one reason, in ten seconds at most."""


class LineLimit:
    """At most ``per_key`` lines per ``seconds`` and key. Thread-safe.

    Peers cause these lines, and may choose the keys: there are at most ``max_lines`` lines per ``seconds`` for all keys
    together, and beyond ``max_keys`` the key that was silent for the longest time is forgotten.
    """

    def __init__(
        self,
        seconds: float = 10.0,
        *,
        per_key: int = 1,
        max_keys: int = 256,
        max_lines: int = 100,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._max_keys, self._clock = seconds, max_keys, clock
        self._per_key, self._max_lines, self._lines, self._since = per_key, max_lines, 0, clock()
        self._lock = threading.Lock()
        self.keys: dict[str, tuple[float, int, int]] = {}  # since when, lines written and suppressed

    def suppressed(self, key: str) -> int | None:
        """How many lines of the key were suppressed before this one; None: this one is, too."""
        now = self._clock()
        with self._lock:
            if now - self._since >= self._seconds:
                self._since, self._lines = now, 0
            since, lines, suppressed = self.keys.pop(key, (now, 0, 0))  # to the end: the first was silent longest
            if now - since >= self._seconds:
                since, lines = now, 0
            writes = lines < self._per_key and self._lines < self._max_lines
            self.keys[key] = (since, lines + writes, 0 if writes else suppressed + 1)
            self._lines += writes
            while len(self.keys) > self._max_keys:
                del self.keys[next(iter(self.keys))]
        return suppressed if writes else None


class LimitedLines(logging.Filter):
    """Of a handler, for lines that requests cause: at most ``FAILED_LINES`` in ten seconds from one place in the code
    with one second argument, which names the engine or the reason. The next one says how many were suppressed."""

    def __init__(self, **limits: Any) -> None:
        super().__init__()
        self._limit = LineLimit(per_key=FAILED_LINES, **limits)

    def filter(self, record: logging.LogRecord) -> bool:
        second = record.args[1:2] if isinstance(record.args, tuple) else ()
        suppressed = self._limit.suppressed(f"{record.pathname}:{record.lineno} {second!r:.300}")
        if suppressed:
            record.msg, record.args = f"{record.getMessage()} (and {suppressed} more like this)", ()
        return suppressed is not None


class RateLimitedLog(LineLimit):
    """Writes lines within these limits, and says how many of the key it suppressed; where it writes several, these have
    the level DEBUG. A line has at most ``MAX_LINE`` characters, and names the place of the call. Each method returns
    whether the line was written."""

    MAX_LINE = 2000

    def __init__(self, logger: logging.Logger, seconds: float = 10.0, **limits: Any) -> None:
        super().__init__(seconds, **limits)
        self._logger = logger

    def info(self, key: str, message: str, *args: object) -> bool:
        return self._log(logging.INFO, key, message, args)

    def warning(self, key: str, message: str, *args: object) -> bool:
        return self._log(logging.WARNING, key, message, args)

    def error(self, key: str, message: str, *args: object) -> bool:
        return self._log(logging.ERROR, key, message, args)

    def exception(self, key: str, message: str, *args: object) -> bool:
        """At ERROR, with the traceback of the exception that is being handled."""
        return self._log(logging.ERROR, key, message, args, traceback=True)

    def _log(self, level: int, key: str, message: str, args: tuple[object, ...], *, traceback: bool = False) -> bool:
        suppressed = self.suppressed(key)
        writes = suppressed is not None
        if writes or self._per_key > 1:
            text = message % args if args else message
            if len(text) > self.MAX_LINE:
                text = f"{text[: self.MAX_LINE - 4]} ..."
            more = f" (and {suppressed} more like this)" if suppressed else ""
            how: dict[str, Any] = {"exc_info": traceback, "stacklevel": 3}
            self._logger.log(level if writes else logging.DEBUG, "%s%s", text, more, **how)
        return writes
