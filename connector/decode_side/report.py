"""What a rank of D reports of its loads to the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvferry.connector.wire.metrics import LoadFailure
from kvferry.connector.wire.step_plan import Load, LoadEnd, LookupResult
from kvferry.connector.wire.transfer_estimate import UNKNOWN, TransferEstimate
from kvferry.transport.channels import Copy

Check = Callable[[], bool | None]
"""Whether a load stands; ``None`` while its copies are under way. Any thread may call it."""


class FinishedLoad(msgspec.Struct, frozen=True):
    """The result of one load, reported once. ``load``: as the engine gave it. Its request id may name two loads,
    of which the first was cancelled and still drains."""

    load: Load
    end: LoadEnd
    estimate: TransferEstimate = UNKNOWN

    @property
    def ok(self) -> bool:
        """Whether the load's tokens are in the blocks."""
        return not self.end.failed


class StepLoadListener(Protocol):
    """Takes what happens to the loads inside one step. The transfer thread calls it. ``layer_order``: as ``ActiveLoad``
    takes it."""

    layer_order: Sequence[str]

    def begun(self, load: Load, stands: Check | None = None, copies: Sequence[Copy] = ()) -> None:
        """All copies of a load are under way. A load of another step is ignored. ``stands``: whether the copies have
        ended, without an error, under a lease that stands; any thread may call it. ``copies``: those that have not
        ended."""

    def moved(self) -> None:
        """A copy that is under way has moved bytes."""

    def ended(self, load: Load, failed: LoadFailure = "") -> None:
        """A load has ended, and nothing writes its blocks any more. A load of another step is ignored. ``failed``: as
        in ``LoadEnd``."""

    def yield_to_engine(self, wait: Callable[[float], bool]) -> None:
        """Wait while the engine's threads have more urgent work, for some milliseconds at most. ``wait``: waits for so
        many seconds, or until ``wake`` is called; returns whether there is a plan to run, or a control message."""

    @property
    def final(self) -> bool:
        """Whether all loads have ended."""


class EngineResults(Protocol):
    """Takes what the engine must know. The transfer thread calls it."""

    def begun(self, load: Load, stands: Check | None, copies: Sequence[Copy]) -> None:
        """As ``StepLoadListener.begun``; for any load inside a step, unless its copies have ended."""

    def moved(self) -> None:
        """A copy has moved bytes that was given to ``begun``."""

    def finished(self, finished: FinishedLoad) -> None:
        """A load has ended."""

    def looked_up(self, request_id: str, result: LookupResult) -> None:
        """P has told its lease to a request, or that its engine has the prompt; or the request must prefill."""
