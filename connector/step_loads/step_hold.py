"""How a step is held back for the loads that it computes with, and how its forward waits for them. Used by the engine's
thread alone.

``StepHold.outcome`` is set, then ``begin`` comes before the forward and ``finish_forward`` after it. Where the engine
calls ``LayerWaits.layer`` before it uses the cache of a layer, the forward waits for the portion of each copy with this
layer: a device waits for an event of the copy, the thread in host memory for its bytes. Else it waits for all copies
before it begins. A copy is cut only if the last forward with loads has called ``layer``; for which layers, and in which
order, is the *layer order* of the next one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Sequence
from functools import partial
from time import perf_counter

from kvferry.connector.geometry.portions import num_layers_of, portion_of
from kvferry.connector.pages.copies import Copies
from kvferry.connector.step_loads.step_load_rule import ALONE_SECONDS
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
``ask_hold_seconds`` more to grant the lease. For loads whose end was foreseen, it is ``ALONE_SECONDS``."""


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

    def wait_begun(self, outcome: StepOutcome) -> None:
        """Wait up to ``BEGIN_SECONDS`` until the copies of loads are under way. While this thread sleeps, the transfer
        thread has the interpreter to itself."""
        before = perf_counter()
        outcome.wait_begun(BEGIN_SECONDS)
        self._count_wait(before)

    def begin(self, copies: Copies, *, by_layer: bool) -> None:
        """Block until the copies of the loads that this step computes with are under way, and make the device wait for
        them, or block until they have ended where a device cannot. A load whose copies do not begin in time, or do not
        end, is given up. Must come before the forward. ``by_layer``: as ``LayerWaits.begin`` takes it. The copies of
        some layers may then be left to ``layer_waits``, and ``finish_forward`` must come after the forward."""
        outcome = self.outcome
        if outcome is None:
            return
        self._waited = 0.0
        self._hold(outcome.wait_begun, self.patience if outcome.inside else ALONE_SECONDS)
        self._go_on(outcome, outcome.give_up())
        self.layer_waits = LayerWaits(outcome, copies, partial(self._wait_moved, outcome))
        self.layer_waits.begin(by_layer=by_layer)

    def join(self, outcomes: Sequence[StepOutcome], copies: Copies, *, whole: bool) -> None:
        """As ``begin``, for loads that were reported early. Whatever the device gets from now on waits for their
        copies. ``whole``: block until these are under way, or nothing writes the blocks any more; else ``begin`` blocks
        for it, before the forward."""
        self._waited = 0.0
        for outcome in outcomes:
            if whole:
                self._hold(outcome.wait_begun, ALONE_SECONDS)
                if late := outcome.give_up():
                    self._go_on(outcome, late)
                    outcome.standing()
            LayerWaits(outcome, copies, partial(self._wait_moved, outcome)).begin(by_layer=False)

    def finish_forward(self, layers: Container[str]) -> None:
        """The forward has been launched. ``layers``: those with caches of their own."""
        waits, self.layer_waits = self.layer_waits, None
        if waits is not None:
            self.layer_order = tuple(layer for layer in waits.finish() if layer in layers)

    def _wait_moved(self, outcome: StepOutcome, portions: Sequence[tuple[Copy, int]]) -> None:
        if not self._hold(partial(outcome.wait_moved, portions), self.patience):
            self._go_on(outcome, outcome.spoil())

    def _hold(self, wait: Callable[[float], bool], patience: float) -> bool:
        """Call ``wait``, which takes the longest time to wait, until it returns true. Returns false once the step has
        waited for ``patience`` seconds."""
        clock, before, begun_at = RunningClock(), self._waited, perf_counter()
        clock.sleeps(LOOK_SECONDS)
        while not (ended := wait(patience - self._waited)) and self._waited < patience:
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


class LayerWaits:
    """The waits of one step. ``begin``, then ``layer`` for each layer if the engine calls it, then ``finish``."""

    def __init__(
        self, outcome: StepOutcome, copies: Copies, block: Callable[[Sequence[tuple[Copy, int]]], object]
    ) -> None:
        """``block``: block until portions of copies, each with its number, have ended; used for copies that are not on
        the stream of ``copies``."""
        self._outcome, self._copies, self._block = outcome, copies, block
        self._order = {layer: place for place, layer in enumerate(outcome.layer_order)}
        self.called: dict[str, None] = {}
        self._under_way: list[Copy] = []
        # How many layers of the order each of the engine's streams has waited for. A stream that another one starts has
        # waited for what that one had waited for, which is at least what the forward began with.
        self._covered: dict[int, float] = {}
        self._at_first = math.inf

    def begin(self, *, by_layer: bool) -> None:
        """Wait for what the forward needs at its beginning. ``by_layer``: the engine calls ``layer`` before it uses the
        cache of a layer, for each layer for which it has done so before."""
        self._under_way = self._outcome.under_way
        if self._under_way:
            self._at_first = self._wait(0 if by_layer else len(self._order))

    def layer(self, name: str) -> None:
        """The forward comes to a layer. A layer that the order does not name may share the cache of any other one."""
        self.called[name] = None
        place = self._order.get(name, len(self._order))
        if place >= self._covered.get(self._copies.engine_stream, self._at_first):
            self._wait(place)

    def finish(self) -> tuple[str, ...]:
        """The forward has been launched, in host memory it has ended. Later work on the device waits for all copies.
        Returns the layers for which ``layer`` was called, in order."""
        skipped = [name for name, place in self._order.items() if place >= self._at_first and name not in self.called]
        if skipped:
            logger.error(
                "kvferry: the loads of a step fail: its forward has not waited for %s, as the last one has",
                ", ".join(skipped[:4]),
            )
            self._outcome.spoil()
        if self._at_first != math.inf and any(copy.on_stream for copy in self._under_way):
            self._copies.make_engine_wait()
        return tuple(self.called)

    def _wait(self, place: int) -> float:
        """Wait for the layers up to ``place`` of the order, or for all. Returns how many layers are waited for now."""
        covered, whole = math.inf, False
        blocking: list[tuple[Copy, int]] = []
        for copy in self._under_way:
            if copy.done and copy.portions == 1:  # its event may be another copy's by now
                continue
            count, layers = copy.portions, len(self._order)
            portion = portion_of(place, layers, count) if place < layers else count - 1
            if portion < count - 1:
                covered = min(covered, num_layers_of(portion + 1, layers, count))
            if not copy.on_stream:
                blocking.append((copy, portion))
            elif copy.events:
                self._copies.make_engine_wait(copy.events[portion])
            else:
                whole = True
        if whole:
            self._copies.make_engine_wait()
        if blocking:
            self._block(blocking)
        self._covered[self._copies.engine_stream] = covered
        return covered
