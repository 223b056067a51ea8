"""Calls that block, such as those to a name server, on a few daemon threads of their own.

Not by ``concurrent.futures``: its threads are joined when the process ends, and a name server may be silent for long.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from kvferry.transport.errors import ProtocolError, quoted

T = TypeVar("T")


class BlockingCall(Generic[T]):
    """One call. ``done``: then either ``result`` is what it returned, or ``error`` says why there is nothing."""

    def __init__(self, work: Callable[[], T], on_done: Callable[[], None]) -> None:
        self.result: T | None = None
        self.error, self.done = "", False
        self._work, self._on_done = work, on_done

    def run(self) -> None:
        try:
            self.result = self._work()
        except (OSError, ProtocolError) as error:
            self.error = getattr(error, "strerror", None) or str(error)
        except Exception as error:  # whatever a peer makes a library raise: nobody must wait for ever
            self.error = f"it failed: {quoted(repr(error)[:200])}"
        finally:
            self.done = True
            self._on_done()


class BlockingCalls:
    """Calls of one kind.

    Args:
        name: of the threads.
        threads: how many calls run at once. A thread ends when no call waits.
        waiting: how many calls wait for a thread.
    """

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._name, self.most_threads, self.most_waiting = name, threads, waiting
        self._lock = threading.Lock()
        self._waiting: deque[BlockingCall[object]] = deque()
        self.running = 0

    def begin(self, work: Callable[[], T], on_done: Callable[[], None]) -> BlockingCall[T]:
        """Have a thread call ``work``, and then ``on_done``. Where too many calls wait, the call has failed at once."""
        call = BlockingCall(work, on_done)
        with self._lock:
            if len(self._waiting) >= self.most_waiting:
                call.error, call.done = f"{self.most_waiting} calls of {self._name} wait already", True
                return call
            self._waiting.append(call)  # type: ignore[arg-type]
            if self.running < self.most_threads:
                try:
                    threading.Thread(target=self._serve, name=self._name, daemon=True).start()
                    self.running += 1
                except RuntimeError as error:
                    if not self.running:
                        self._waiting.pop()
                        call.error, call.done = str(error), True
        return call

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self.running -= 1
                    return
                call = self._waiting.popleft()
            try:
                call.run()
            except BaseException:
                with self._lock:
                    self.running -= 1  # this thread ends, and another one may start
                raise
