"""What becomes of the loads that one step computes with, on one rank. Three threads use it.

The transfer thread says what happens. The engine's thread waits until the forward may be launched. The thread that
takes the step's output away waits until every load is final. ``step_load.STEP_LOAD`` decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from kvferry.connector.step_loads import step_load
from kvferry.connector.step_loads.step_load import FINAL, StepLoad, StepLoadEvent, StepLoadPhase
from kvferry.connector.wire.states import Lifetime
from kvferry.connector.wire.step_plan import Load
from kvferry.transport.channels import Copy

Check = Callable[[], bool | None]
LOOK_SECONDS = 0.2
"""How often a thread that waits checks that the transfer thread is alive."""

POLL_SECONDS = 2e-4
"""How often the thread that takes the output away looks whether copies have ended. They have as a rule. After
``YIELD_SECONDS`` it waits for the transfer thread, which looks at the copies itself by then."""
YIELD_SECONDS = 0.01
"""The longest time for which the transfer thread leaves the interpreter to the engine's threads: to prepare a step with
a new request in it takes 2 to 3 ms, and its forward as long as a step of the engine."""

ANSWERED_SECONDS = 1e-3
"""How long the transfer thread leaves the interpreter to the engine's threads once they know that the loads stand: they
are about to deliver a token."""


class StepOutcome:
    """The loads of one step, each until it is final."""

    def __init__(
        self,
        loads: Sequence[Load],
        alive: Callable[[], bool],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        layer_order: Sequence[str] = (),
    ) -> None:
        """
        Args:
            loads: as they are posted to the transfer thread.
            alive: whether the transfer thread runs.
            wake: ends the transfer thread's ``wait`` of ``yield_to_engine``.
            clock: seconds, for the histories.
            layer_order: the layers in the order in which the forward is expected to wait for them, one by one; empty
                where it is not.
        """
        self.layer_order = layer_order
        self._alive, self._wake, self._clock = alive, wake, clock
        self._changed = threading.Condition()
        self._loads = loads
        self._lifetimes = [Lifetime(step_load.STEP_LOAD, StepLoad(), clock()) for _ in loads]
        self._checks: dict[int, Check] = {}  # by the place of a load
        self._copies: dict[int, Sequence[Copy]] = {}  # by the place of a load
        self._answered = self._interrupted = self._yielding = self._spoilt = False

    # --- the transfer thread ------------------------------------------------------------------------------------

    def begun(self, load: Load, stands: Check | None = None, copies: Sequence[Copy] = ()) -> None:
        """All copies of a load are under way. A load of another step is ignored. ``stands``: whether the copies have
        ended without an error, under a lease that stands; without it only ``ended`` tells. ``copies``: those that have
        not ended."""
        with self._changed:
            for place, ours in enumerate(self._loads):
                if ours is load:
                    self._copies[place] = copies
                    if stands is not None:
                        self._checks[place] = stands
        self._step(load, step_load.CopiesBegun())

    def moved(self) -> None:
        """A copy that is under way has moved bytes."""
        with self._changed:
            self._changed.notify_all()

    def ended(self, load: Load, ok: bool) -> None:
        """A load has ended, and nothing writes its blocks any more. A load of another step is ignored."""
        self._step(load, step_load.LoadEnded(ok))

    def yield_to_engine(self, wait: Callable[[float], bool]) -> None:
        """Where the copies of all loads are under way, wait for ``YIELD_SECONDS``, or until there is new work.

        Meanwhile the engine's threads prepare the step, launch it and take its output. Threads run Python one at a
        time, and each change between them costs more than what this thread has to do next, which can wait.

        Args:
            wait: waits for so many seconds, or until ``wake`` is called; returns whether a control message has arrived.
        """
        if self.final:
            return
        self._yielding = True
        try:
            ready = self._wait_until(
                lambda: self._answered or self._interrupted or bool(self.waiting), YIELD_SECONDS, wait
            )
            if ready and self._answered:
                self._wait_until(lambda: self._interrupted, ANSWERED_SECONDS, wait)
        finally:
            self._yielding = False

    def _wait_until(self, condition: Callable[[], bool], seconds: float, wait: Callable[[float], bool]) -> bool:
        """Whether the condition holds; if not, the time is over, or a control message has arrived."""
        end = self._clock() + seconds
        while not condition():
            left = end - self._clock()
            if left <= 0 or wait(left):
                return False
        return True

    def _step(self, load: Load, event: StepLoadEvent) -> None:
        with self._changed:
            for ours, lifetime in zip(self._loads, self._lifetimes, strict=True):
                if ours is load:  # by identity: two loads of different steps may belong to requests of the same id
                    lifetime.step(event, self._clock())
                    self._changed.notify_all()

    # --- the engine's thread ------------------------------------------------------------------------------------

    def wait_begun(self, seconds: float) -> bool:
        """Wait until no load is POSTED, or until the thread has ended; at most ``seconds``. Returns whether none is."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self.waiting, min(seconds, LOOK_SECONDS)) and not self._alive():
                self._all(step_load.ThreadEnded())
            return not self.waiting

    def give_up(self) -> tuple[str, ...]:
        """The forward is launched now. Returns the requests whose copies are not all under way: these loads fail."""
        with self._changed:
            waiting = self.waiting
            self._all(step_load.EngineGaveUp(), StepLoadPhase.POSTED)
            return waiting

    def wait_moved(self, portions: Sequence[tuple[Copy, int]], seconds: float) -> bool:
        """Wait until each of ``portions``, a copy and the number of its portion, has ended, or no load is UNDER_WAY; at
        most ``seconds``. Returns whether that is so."""

        def ended() -> bool:
            return all(copy.has_ended(portion) for copy, portion in portions) or not self._in(StepLoadPhase.UNDER_WAY)

        with self._changed:
            if not self._changed.wait_for(ended, min(seconds, LOOK_SECONDS)) and not self._alive():
                self._all(step_load.ThreadEnded())
            return ended()

    def spoil(self) -> tuple[str, ...]:
        """The forward has computed with a layer before its copies ended: all loads fail, whatever their copies do.
        Returns, at the first call, the requests whose loads have not ended."""
        with self._changed:
            late = () if self._spoilt else self._in(StepLoadPhase.UNDER_WAY)
            self._spoilt = True
            return late

    def interrupt(self) -> None:
        """The transfer thread has new work. Any thread may call this."""
        self._interrupted = True
        self._end_yield()

    def _end_yield(self) -> None:
        if self._yielding:
            self._wake()

    @property
    def waiting(self) -> tuple[str, ...]:
        """The requests whose loads are POSTED."""
        return self._in(StepLoadPhase.POSTED)

    @property
    def under_way(self) -> list[Copy]:
        """The copies of the loads that are UNDER_WAY. The engine must wait for them."""
        with self._changed:
            phases = [lifetime.state.phase for lifetime in self._lifetimes]
            return [
                copy for place, phase in enumerate(phases) if phase is StepLoadPhase.UNDER_WAY
                for copy in self._copies.get(place, ())
            ]  # fmt: skip

    # --- the thread that takes the output away ------------------------------------------------------------------

    def standing(self) -> frozenset[str]:
        """Wait until every load is final. Returns the requests whose loads stand. The copies have ended when the step's
        tokens are there. So this call finds by itself that a load stands, and waits for the transfer thread only where
        it cannot."""
        with self._changed:
            self._check()
            end = self._clock() + YIELD_SECONDS
            while not self.final:
                polls = self._checks and self._clock() < end
                if not self._changed.wait(POLL_SECONDS if polls else LOOK_SECONDS) and not self._alive():
                    self._all(step_load.ThreadEnded())
                self._check()
            self._answered = True
            self._end_yield()
            return frozenset() if self._spoilt else frozenset(self._in(StepLoadPhase.STANDS))

    def _check(self) -> None:
        for place, stands in self._checks.items():
            lifetime = self._lifetimes[place]
            if lifetime.state.phase is not StepLoadPhase.UNDER_WAY:
                continue
            answer = stands()
            if answer:
                lifetime.step(step_load.LoadEnded(True), self._clock())
            elif answer is not None:  # the transfer thread must say so, at once
                self.interrupt()

    @property
    def final(self) -> bool:
        return all(lifetime.state.phase in FINAL for lifetime in self._lifetimes)

    def story(self) -> str:
        """The loads with their histories, for a log line."""
        pairs = zip(self._loads, self._lifetimes, strict=True)
        return ", ".join(f"{load.request_id} ({lifetime.story()})" for load, lifetime in pairs)

    # --- parts --------------------------------------------------------------------------------------------------

    def _in(self, phase: StepLoadPhase) -> tuple[str, ...]:
        pairs = zip(self._loads, self._lifetimes, strict=True)
        return tuple(load.request_id for load, lifetime in pairs if lifetime.state.phase is phase)

    def _all(self, event: StepLoadEvent, phase: StepLoadPhase | None = None) -> None:
        for lifetime in self._lifetimes:
            if phase is None or lifetime.state.phase is phase:
                lifetime.step(event, self._clock())
        self._changed.notify_all()
