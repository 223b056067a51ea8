"""Calls that block, such as those to a name server, on a few daemon threads of their own.

Not by ``concurrent.futures``: its threads are joined when the process ends, and a name server may be silent for long.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class BlockingCalls:
    """Calls of one kind.

    Args:
        name: of the threads.
        threads: how many calls run at once. A thread ends when no call waits.
        waiting: how many calls wait for a thread.
    """

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._name, self._most_threads, self._most_waiting = name, threads, waiting
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._threads = 0

    def start(self, call: Callable[[], None]) -> bool:
        """Have a thread make this call. Returns False where too many wait already."""
        with self._lock:
            if len(self._waiting) >= self._most_waiting:
                return False
            self._waiting.append(call)
            if self._threads < self._most_threads:
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
                self._threads += 1
        return True

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                call = self._waiting.popleft()
            try:
                call()
            except BaseException:  # this thread ends, and another one may start
                with self._lock:
                    self._threads -= 1
                raise
