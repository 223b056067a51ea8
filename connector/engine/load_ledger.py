"""What one rank owes its engine: the end of every load and of every lease, each reported exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvferry.connector.protocol import worker_load
from kvferry.connector.protocol.state_machine import Lifetime
from kvferry.connector.protocol.step_plan import Load, StepResults
from kvferry.connector.protocol.worker_load import CopiesBegun, LoadEnded, ThreadEnded, WorkerLoadEvent, WorkerLoadPhase

MAX_STORIES = 8
"""Loads whose history stands in one log line."""


class LoadLedger:
    """The loads that have been posted and not ended, by request id, with the reports that the engine has not taken.

    ``worker_load.WORKER_LOAD`` decides what is reported. A request id that is not in the ledger is ignored: its load or
    lease was not posted here, or was reported before. Of a lease the ledger only keeps that it is not reported;
    ``lease.LEASE`` is its table. ``clock``: seconds, for the histories.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: dict[str, Lifetime[worker_load.WorkerLoad, WorkerLoadEvent, worker_load.WorkerLoadEffect]] = {}
        self._in_step: set[str] = set()  # the loads in STEP_NEEDS, so that no step looks at all loads
        self._failed_in_step: set[str] = set()
        self._leases: set[str] = set()
        self._results = StepResults()

    # --- what happens -------------------------------------------------------------------------------------------

    def post(self, loads: Iterable[Load], leases: Iterable[str]) -> None:
        """These loads, and the leases of these requests, are about to be posted to the transfer thread."""
        for load in loads:
            self._loads[load.request_id] = Lifetime(worker_load.WORKER_LOAD, worker_load.post_load(load), self._clock())
            (self._in_step.add if load.now else self._in_step.discard)(load.request_id)
        self._leases.update(leases)

    def copies_begun(self, load: Load) -> bool:
        """All copies of a load are under way; whether the engine's device must be made to wait for them."""
        return self._step(load.request_id, CopiesBegun(load))

    def load_ended(self, request_id: str, *, ok: bool) -> None:
        """The transfer thread has reported a load."""
        self._step(request_id, LoadEnded(ok))

    def lease_freed(self, request_id: str) -> None:
        """The transfer thread has freed a lease."""
        if request_id in self._leases:
            self._leases.remove(request_id)
            self._results.sent.add(request_id)

    def thread_ended(self) -> None:
        """The transfer thread is gone: every load that has not ended fails, and every lease ends."""
        for request_id in list(self._loads):
            self._step(request_id, ThreadEnded())
        self._results.sent |= self._leases
        self._leases.clear()

    def _step(self, request_id: str, event: WorkerLoadEvent) -> bool:
        lifetime = self._loads.get(request_id)
        hold = False
        for effect in lifetime.step(event, self._clock()) if lifetime is not None else ():
            match effect:
                case worker_load.HoldDevice():
                    hold = True
                case worker_load.ReportBeside(ok):
                    del self._loads[request_id]
                    self._results.received.add(request_id)
                    if not ok:
                        self._results.failed.add(request_id)
                case worker_load.ReportInStep(ok):
                    del self._loads[request_id]
                    self._in_step.discard(request_id)
                    if not ok:
                        self._failed_in_step.add(request_id)
        return hold

    # --- queries of the worker half ------------------------------------------------------------------------------

    @property
    def in_step(self) -> tuple[str, ...]:
        """The requests that the step under way computes with and whose loads have not ended."""
        return tuple(self._in_step)

    @property
    def step_may_begin(self) -> bool:
        """Whether every load of the step under way has ended, or the device waits for it."""
        return all(self._loads[name].state.phase is WorkerLoadPhase.DEVICE_WAITS for name in self._in_step)

    @property
    def awaits_load(self) -> bool:
        """Whether a load has not ended, and no load has that the engine has not taken."""
        return bool(self._loads) and not self._results.received

    @property
    def owes(self) -> bool:
        """Whether a load or a lease has not ended."""
        return bool(self._loads or self._leases)

    def stories(self) -> str:
        """The loads that have not ended, with their histories, for a log line."""
        names = list(self._loads)
        shown = [f"{name} ({self._loads[name].story()})" for name in names[:MAX_STORIES]]
        return ", ".join(shown) + (f" and {len(names) - MAX_STORIES} more" if len(names) > MAX_STORIES else "")

    # --- what the engine takes ----------------------------------------------------------------------------------

    def take_failed_in_step(self) -> set[str]:
        """The loads of the step under way that have failed, each returned once."""
        failed, self._failed_in_step = self._failed_in_step, set()
        return failed

    def take_results(self) -> StepResults:
        """The loads beside the steps and the leases that have ended, each returned once."""
        results, self._results = self._results, StepResults()
        return results
