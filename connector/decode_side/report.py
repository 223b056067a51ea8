"""What the transfer thread reports to its engine."""

from __future__ import annotations

import threading
from collections import deque
from typing import TypeVar

from kvferry.connector.step_loads.step_loads import StepLoad
from kvferry.connector.wire.step_plan import LoadEnd, LookupResult
from kvferry.connector.wire.transfer_estimate import UNKNOWN, TransferEstimate

T = TypeVar("T")


class Results:
    """What the transfer thread has for its engine. It adds results; one other thread waits for them and takes them,
    each once."""

    def __init__(self) -> None:
        self.loads: deque[StepLoad] = deque()
        """That have ended."""
        self.leases: deque[str] = deque()
        """The requests whose leased blocks nothing reads any more."""
        self.lookups: deque[tuple[str, LookupResult]] = deque()
        """Of requests to which P has told its lease, or that its engine has the prompt; or which must prefill."""
        self.ready = threading.Event()

    # --- the transfer thread ------------------------------------------------------------------------------------

    def finished(self, load: StepLoad, end: LoadEnd, estimate: TransferEstimate = UNKNOWN) -> None:
        """A load has ended."""
        load.ended(end, estimate)
        self._add(self.loads, load)

    def freed(self, request_id: str) -> None:
        self._add(self.leases, request_id)

    def looked_up(self, request_id: str, result: LookupResult) -> None:
        self._add(self.lookups, (request_id, result))

    def _add(self, results: deque[T], result: T) -> None:
        """``wait`` clears the event before it looks, so it misses no result."""
        results.append(result)
        if not self.ready.is_set():
            self.ready.set()

    # --- the engine's thread ------------------------------------------------------------------------------------

    @property
    def any(self) -> bool:
        """Whether there is a result to take."""
        return bool(self.loads or self.leases or self.lookups)

    def wait(self, timeout: float) -> None:
        """Block for up to ``timeout`` seconds. Returns early if there is a result to take."""
        self.ready.clear()
        if not self.any:  # after the clear: nothing is missed
            self.ready.wait(timeout)

    @staticmethod
    def take(results: deque[T]) -> list[T]:
        """All results of one kind, the oldest first."""
        return [results.popleft() for _ in range(len(results))]
