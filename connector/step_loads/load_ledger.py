"""What one rank owes its engine: the end of every load beside the steps and of every lease, each reported once."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.connector.wire.step_plan import LOST, Load, LoadEnd, StepResults

MAX_NAMES = 8
"""Loads that stand in one log line."""


class LoadLedger:
    """The loads that have been posted and not ended, by request id, with the reports that the engine has not taken.

    vLLM's scheduler asserts on an id that it does not know, and dies. So one report leaves for each id, whatever the
    transfer thread does. An id that is not in the ledger is ignored: its load or lease was not posted here, or was
    reported before. Where a load is posted under the id of one that has not ended, only the end of the new one is
    reported: the engine cannot tell their reports apart.
    """

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._leases: set[str] = set()
        self._results = StepResults()

    def post(self, loads: Iterable[Load], leases: Iterable[str]) -> None:
        """These loads beside the steps, and the leases of these requests, are about to be posted."""
        self._loads.update((load.request_id, load) for load in loads)
        self._leases.update(leases)

    def load_ended(self, load: Load, end: LoadEnd) -> None:
        """The transfer thread has reported a load. Loads inside a step are not in the ledger."""
        if self._loads.get(load.request_id) is load:  # else an earlier load of a request with the same id
            self._end(load.request_id, end)

    def load(self, request_id: str) -> Load | None:
        """The load of a request that has not ended; ``None``: it has, or was reported early."""
        return self._loads.get(request_id)

    def report_early(self, request_id: str) -> None:
        """Report a load now. Its end is not reported."""
        del self._loads[request_id]
        self._results.received.add(request_id)

    def lease_freed(self, request_id: str) -> None:
        """The transfer thread has freed a lease."""
        if request_id in self._leases:
            self._leases.remove(request_id)
            self._results.sent.add(request_id)

    def thread_ended(self) -> None:
        """The transfer thread is gone: every load that has not ended fails, and every lease ends."""
        for request_id in list(self._loads):
            self._end(request_id, LOST)
        self._results.sent |= self._leases
        self._leases.clear()

    def pages_gone(self) -> None:
        """The transfer thread is gone, and the caches' pages go too: also the loads that have ended fail, unless the
        engine has taken their reports."""
        self.thread_ended()
        self._results.failed |= self._results.received
        self._results.ends = dict.fromkeys(self._results.received, LoadEnd("cancelled"))

    def _end(self, request_id: str, end: LoadEnd) -> None:
        del self._loads[request_id]
        self._results.received.add(request_id)
        self._results.ends[request_id] = end
        if end.failed:
            self._results.failed.add(request_id)

    @property
    def awaits_load(self) -> bool:
        """Whether a load has not ended, and no load has that the engine has not taken."""
        return bool(self._loads) and not self._results.received

    @property
    def owes(self) -> bool:
        """Whether a load or a lease has not ended."""
        return bool(self._loads or self._leases)

    def names(self) -> str:
        """The loads that have not ended, for a log line."""
        names = list(self._loads)
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        return ", ".join(names[:MAX_NAMES]) + more

    def take_results(self) -> StepResults:
        """The loads beside the steps and the leases that have ended, each returned once."""
        results, self._results = self._results, StepResults()
        return results
