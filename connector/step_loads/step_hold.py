"""How a step is held back for the loads that it computes with. Used by the engine's thread alone.

``StepHold.outcome`` is set, then ``begin`` comes before the forward. The device waits for the copies before it begins;
in host memory the thread has waited until they ended, for such a copy is under way once it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter

from kvferry.connector.pages.copies import Copies
from kvferry.connector.step_loads.step_outcome import LOOK_SECONDS, StepOutcome
from kvferry.connector.wire.metrics import HandoverStats
from kvferry.transport.wake import RunningClock

logger = logging.getLogger("vllm.kvferry.worker")

BEGIN_SECONDS = 1e-3
"""How long the engine's thread leaves the interpreter to the transfer thread when it has posted loads inside a step;
their copies are under way after 0.3 to 0.6 ms. Running beside each other, both threads take longer."""
PATIENCE_SECONDS = 1.0
"""How long a step is held back at most until the copies of its loads are under way, 0.2 ms as a rule. A load that is
given up then is computed by the engine itself. Where it would fail its request instead, P may take
``ask_hold_seconds`` more to grant the lease."""


class StepHold:
    """The waits of one rank's steps. ``patience``: how many seconds a step is held back at most, ``more_patience`` of
    them beside ``PATIENCE_SECONDS``. ``cancel``: called with the requests whose loads a step gives up."""

    def __init__(self, stats: HandoverStats, more_patience: float, cancel: Callable[[tuple[str, ...]], None]) -> None:
        self._stats, self._cancel = stats, cancel
        self.patience = PATIENCE_SECONDS + more_patience
        self.outcome: StepOutcome | None = None
        """What becomes of the loads that the step under way computes with; ``None`` where there are none."""
        self._waited = 0.0  # seconds that the step under way has waited for its loads

    def wait_begun(self, outcome: StepOutcome) -> None:
        """Wait up to ``BEGIN_SECONDS`` until the copies of loads are under way. While this thread sleeps, the transfer
        thread has the interpreter to itself."""
        before = perf_counter()
        outcome.wait_begun(BEGIN_SECONDS)
        self._count_wait(before)

    def begin(self, copies: Copies) -> None:
        """Block until the copies of the loads that this step computes with are under way, and make the device wait for
        them. A load whose copies do not begin in time is given up. Must come before the forward."""
        outcome = self.outcome
        if outcome is None:
            return
        self._waited = 0.0
        self._hold(outcome)
        self._go_on(outcome, outcome.give_up())
        make_engine_wait(outcome, copies)

    def join(self, outcomes: Sequence[StepOutcome], copies: Copies, *, whole: bool) -> None:
        """As ``begin``, for loads that were reported early. Whatever the device gets from now on waits for their
        copies. ``whole``: block until these are under way, or nothing writes the blocks any more; else ``begin`` blocks
        for it, before the forward."""
        self._waited = 0.0
        for outcome in outcomes:
            if whole:
                self._hold(outcome)
                if late := outcome.give_up():
                    self._go_on(outcome, late)
                    outcome.standing()
            make_engine_wait(outcome, copies)

    def _hold(self, outcome: StepOutcome) -> None:
        """Wait until no load is POSTED, or the step has waited for ``self.patience`` seconds."""
        clock, before, begun_at = RunningClock(), self._waited, perf_counter()
        clock.sleeps(LOOK_SECONDS)
        while not outcome.wait_begun(self.patience - self._waited) and self._waited < self.patience:
            self._waited = before + clock.turn()
            clock.sleeps(LOOK_SECONDS)
        self._count_wait(begun_at)

    def _count_wait(self, before: float) -> None:
        """Count the time since ``before``, for which the engine's thread has waited for loads inside a step."""
        self._stats.count("step_wait_seconds", by=round((perf_counter() - before) * 1e6))

    def _go_on(self, outcome: StepOutcome, late: tuple[str, ...]) -> None:
        """Go on with a step without the loads of the requests ``late``, which fail."""
        if late:
            text = "kvferry: a step has waited %.1f s for its loads and goes on: %s"
            logger.error(text, self._waited, outcome.story())
            self._cancel(late)


def make_engine_wait(outcome: StepOutcome, copies: Copies) -> None:
    """What the engine's thread launches from now on waits for the copies of these loads."""
    for copy in outcome.under_way:
        if not copy.done:  # else its event may be another copy's by now
            assert copy.event is not None, "only copies on a stream are waited for"
            copies.make_engine_wait(copy.event)
