"""How a step is held back for the loads that it computes with. Used by the engine's thread alone.

The device waits for the copies before it begins; in host memory the thread has waited until they ended, for such a copy
is under way once it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

from kvferry.connector.step_loads.step_loads import LOOK_SECONDS, StepOutcome
from kvferry.connector.wire.metrics import HandoverStats
from kvferry.transport.wake import RunningClock

logger = logging.getLogger("vllm.kvferry.worker")

BEGIN_SECONDS = 1e-3
"""How long the engine's thread leaves the interpreter to the transfer thread when it has posted loads that it can use
at once; their copies are under way after 0.3 to 0.6 ms. Running beside each other, both threads take longer."""
PATIENCE_SECONDS = 1.0
"""How long a step is held back at most until the copies of its loads are under way, 0.2 ms as a rule. A load that is
given up then is computed by the engine itself. Where it would fail its request instead, P may take
``ask_hold_seconds`` more to grant the lease."""


class StepHold:
    """The waits of one rank's steps."""

    def __init__(self, stats: HandoverStats, more_patience: float, cancel: Callable[[tuple[str, ...]], None]) -> None:
        """``more_patience``: seconds beside ``PATIENCE_SECONDS``. ``cancel``: called with the requests whose loads a
        step gives up."""
        self._stats, self._cancel = stats, cancel
        self.patience = PATIENCE_SECONDS + more_patience
        """How many seconds a step is held back at most."""
        self.outcome: StepOutcome | None = None
        """What becomes of the loads that the step under way computes with; ``None`` where there are none."""

    def wait_begun(self, outcome: StepOutcome) -> None:
        """Wait up to ``BEGIN_SECONDS`` until the copies of loads are under way. While this thread sleeps, the transfer
        thread has the interpreter to itself."""
        before = perf_counter()
        outcome.wait_begun(BEGIN_SECONDS)
        self._count_wait(before)

    def hold(self, outcome: StepOutcome) -> bool:
        """Block until the copies of these loads are under way. Those whose copies do not begin in time are given up.
        Must come before the device gets work that uses their blocks, and ``make_engine_wait`` after it. Returns whether
        none is given up."""
        clock, waited, before = RunningClock(), 0.0, perf_counter()
        clock.sleeps(LOOK_SECONDS)
        while not outcome.wait_begun(self.patience - waited) and waited < self.patience:
            waited = clock.turn()
            clock.sleeps(LOOK_SECONDS)
        self._count_wait(before)
        if late := outcome.give_up():
            text = "kvferry: a step has waited %.1f s for its loads and goes on: %s"
            logger.error(text, waited, outcome.story())
            self._cancel(late)
        return not late

    def _count_wait(self, before: float) -> None:
        self._stats.count("step_wait_seconds", by=round((perf_counter() - before) * 1e6))
