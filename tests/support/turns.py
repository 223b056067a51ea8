"""What a rank's transfer thread costs: work and processor time of its longest turn, memory of the process."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from tests.support.inside import ident_of, thread_of
from tests.support.ranks import Rank


class LineCount:
    """Counts the lines of Python in the functions that this thread calls meanwhile; with ``folders`` those of files
    below these."""

    def __init__(self, *folders: str) -> None:
        self.count, self._before = 0, sys.gettrace()
        self._folders = folders or ("",)

    def __enter__(self) -> LineCount:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._folders):
            return None
        self.count += event == "line"
        return self._trace


MOST_TURN_SECONDS = 0.05
"""A peer must not hold the thread of the others for longer, in time of the processor."""
MOST_TURN_LINES = 500_000
"""The same as work: a million lines take about a second."""
MOST_BYTES = 64 << 20


class TurnLines:
    """Counts the turns of a rank's transfer thread from now on. ``most``: lines of Python in one of them."""

    def __init__(self, rank: Any) -> None:
        thread: Any = thread_of(rank)
        real, self.count, self.most = thread.turn, 0, 0

        def turn(now: float) -> bool:
            with LineCount() as lines:
                moved = bool(real(now))
            self.count, self.most = self.count + 1, max(self.most, lines.count)
            return moved

        thread.turn = turn


class LongestTurn:
    """Measures the turns of a rank's transfer thread from now on. ``seconds``: of the longest one, without Python's
    search for garbage: it looks at all objects of this process, of which the tests have a million."""

    def __init__(self, rank: Rank) -> None:
        thread: Any = thread_of(rank)
        real = thread.turn
        self.seconds = self._garbage = self._collects_since = 0.0
        self._thread = ident_of(rank)

        def turn(now: float) -> bool:
            begun, garbage = time.thread_time(), self._garbage
            try:
                return bool(real(now))
            finally:
                seconds = time.thread_time() - begun - (self._garbage - garbage)
                self.seconds = max(self.seconds, seconds)

        gc.callbacks.append(self._collects)
        thread.turn = turn

    def _collects(self, phase: str, info: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._collects_since = time.thread_time()
        else:
            self._garbage += time.thread_time() - self._collects_since

    def close(self) -> None:
        """Measure no more garbage."""
        gc.callbacks.remove(self._collects)


class Usage(logging.Handler):
    """Looks at this process from now on: nothing that peers and clients do is an error of an engine."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(logging.ERROR)
        self._turn, self._errors = LongestTurn(rank), list[str]()
        logger = logging.getLogger("vllm.kvferry")
        logger.setLevel(logging.ERROR)  # the faults of a run cause thousands of warnings
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._errors.append(record.getMessage()[:300])

    def take(self) -> dict[str, Any]:
        """What the process holds; the longest turn and the errors that were logged since the last call."""
        longest, self._turn.seconds = self._turn.seconds, 0.0
        errors, self._errors = self._errors, []
        return {
            "descriptors": len(os.listdir("/proc/self/fd")) - 1,
            "threads": len(os.listdir("/proc/self/task")),
            "mappings": Path("/proc/self/maps").read_bytes().count(b"\n"),
            "rss_mib": resident_bytes() / 2**20,
            "turn_ms": 1e3 * longest,
            "errors": errors,
        }


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is in use, without pages of files: the kernel takes back those that are not used for a
    while, and gives them again."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
