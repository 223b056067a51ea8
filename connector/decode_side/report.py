"""What the transfer thread reports to its engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from kvferry.connector.step_loads.step_outcome import Check, StepOutcome
from kvferry.connector.wire.step_plan import Load, LoadEnd, LookupResult
from kvferry.connector.wire.transfer_estimate import UNKNOWN, TransferEstimate
from kvferry.transport.channels import Copy

T = TypeVar("T")


class FinishedLoad(msgspec.Struct, frozen=True):
    """The result of one load, reported once. ``load``: as the engine gave it. Its request id may name two loads,
    of which the first was cancelled and still drains."""

    load: Load
    end: LoadEnd
    estimate: TransferEstimate = UNKNOWN


class Results:
    """What the transfer thread has for its engine. It adds results; one other thread waits for them and takes them,
    each once."""

    def __init__(self) -> None:
        self.loads: deque[FinishedLoad] = deque()
        """That have ended."""
        self.leases: deque[str] = deque()
        """The requests whose leased blocks nothing reads any more."""
        self.lookups: deque[tuple[str, LookupResult]] = deque()
        """Of requests to which P has told its lease, or that its engine has the prompt; or which must prefill."""
        self.ready = threading.Event()
        self.outcomes: list[StepOutcome] = []
        """Of the steps with loads inside that are not final. Used by the transfer thread only."""

    # --- the transfer thread ------------------------------------------------------------------------------------

    def watch(self, outcome: StepOutcome) -> None:
        """Tell an outcome of its loads from now on."""
        if outcome not in self.outcomes:
            self.outcomes.append(outcome)

    def begun(self, load: Load, stands: Check | None, copies: Sequence[Copy]) -> None:
        """All copies of a load are under way: tell the outcome of its step."""
        for outcome in self.outcomes:
            outcome.begun(load, stands, copies)

    def foreseen(self, load: Load, seconds: float) -> None:
        """Tell an outcome when its load may be reported early, from now on."""
        if any([outcome.foreseen(load, seconds) for outcome in self.outcomes]):
            self.ready.set()  # a thread that waits may have to wait for less

    def finished(self, finished: FinishedLoad) -> None:
        """A load has ended. The outcome of its step takes that too."""
        self._add(self.loads, finished)
        if self.outcomes:
            for outcome in self.outcomes:
                outcome.ended(finished.load, finished.end.failed)
            self.outcomes = [outcome for outcome in self.outcomes if not outcome.final]

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
