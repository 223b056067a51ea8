"""How a step is held back for the loads that it computes with. Used by the engine's thread alone.

``outcome`` is set, then ``begin`` comes before the forward and ``finish_forward`` after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence
from functools import partial
from time import perf_counter

from kvferry.connector.pages.copies import Copies
from kvferry.connector.step_loads.layer_waits import LayerWaits
from kvferry.connector.step_loads.step_outcome import LOOK_SECONDS, StepOutcome
from kvferry.connector.wire.metrics import HandoverStats
from kvferry.transport.channels import Copy
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
        self.layer_waits: LayerWaits | None = None
        """How the forward under way waits for these loads."""
        self.layer_order: tuple[str, ...] = ()
        """The layers for which the last forward with loads has waited, in order."""
        self._waited = 0.0  # seconds that the step under way has waited for its loads

    def wait_begun(self) -> None:
        """Wait up to ``BEGIN_SECONDS`` until the copies are under way with which the step computes. While this thread
        sleeps, the transfer thread has the interpreter to itself."""
        if self.outcome is not None:
            before = perf_counter()
            self.outcome.wait_begun(BEGIN_SECONDS)
            self._count_wait(before)

    def begin(self, copies: Copies, *, by_layer: bool) -> None:
        """Block until the copies of the loads that this step computes with are under way, and make the device wait for
        them, or block until they have ended where a device cannot. A load whose copies do not begin in time, or do not
        end, is given up. Must come before the forward.

        Args:
            copies: of this rank.
            by_layer: as ``LayerWaits.begin`` takes it. The copies of some layers may then be left to ``layer_waits``,
                and ``finish_forward`` must come after the forward.
        """
        outcome = self.outcome
        if outcome is None:
            return
        self._waited = 0.0
        self._hold(outcome.wait_begun)
        self._go_on(outcome, outcome.give_up())
        self.layer_waits = LayerWaits(outcome, copies, partial(self._wait_moved, outcome))
        self.layer_waits.begin(by_layer=by_layer)

    def finish_forward(self, layers: Container[str]) -> None:
        """The forward has been launched. ``layers``: those with caches of their own."""
        waits, self.layer_waits = self.layer_waits, None
        if waits is not None:
            self.layer_order = tuple(layer for layer in waits.finish() if layer in layers)

    def _wait_moved(self, outcome: StepOutcome, portions: Sequence[tuple[Copy, int]]) -> None:
        if not self._hold(partial(outcome.wait_moved, portions)):
            self._go_on(outcome, outcome.spoil())

    def _hold(self, wait: Callable[[float], bool]) -> bool:
        """Call ``wait``, which takes the longest time to wait, until it returns true. Returns false once the step has
        waited too long."""
        clock, before, begun_at = RunningClock(), self._waited, perf_counter()
        clock.sleeps(LOOK_SECONDS)
        while not (ended := wait(self.patience - self._waited)) and self._waited < self.patience:
            self._waited = before + clock.turn()
            clock.sleeps(LOOK_SECONDS)
        self._count_wait(begun_at)
        return ended

    def _count_wait(self, before: float) -> None:
        """Count the time since ``before``, for which the engine's thread has waited for loads inside a step."""
        self._stats.total("step_wait_us", round((perf_counter() - before) * 1e6))

    def _go_on(self, outcome: StepOutcome, late: tuple[str, ...]) -> None:
        """Go on with a step without the loads of the requests ``late``, which fail."""
        if late:
            text = "kvferry: a step has waited %.1f s for its loads and goes on: %s"
            logger.error(text, self._waited, outcome.story())
            self._cancel(late)
