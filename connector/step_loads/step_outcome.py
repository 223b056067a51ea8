"""What becomes of the loads that one step computes with, on one rank. Three threads use it.

The transfer thread says what happens. The engine's thread waits until the forward may be launched. The thread that
takes the step's output away waits until every load is final.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.connector.wire.metrics import FailureKind, LoadFailure
from kvferry.connector.wire.states import Moves, Phases
from kvferry.connector.wire.step_plan import Load
from kvferry.transport.channels import Copy

Check = Callable[[], bool | None]
"""Whether a load stands; ``None`` while its copies are under way. Any thread may call it."""
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


class StepLoadPhase(enum.Enum):
    """Of a load inside a step, on one rank::

        POSTED ──▶ UNDER_WAY ──▶ STANDS
           │           └───────▶ FAILED
           └─▶ GIVEN_UP ───────────▲

    In UNDER_WAY all copies are under way, or have ended, and the device waits for them. The engine launches the forward
    once no load of the step is POSTED. A load that the engine has given up fails whatever its copies do. STANDS and
    FAILED are final, and in both nothing writes the load's blocks any more.
    """

    POSTED = "posted"
    UNDER_WAY = "under way"
    GIVEN_UP = "given up"
    STANDS = "stands"
    FAILED = "failed"


class StepLoadEvent(enum.Enum):
    BEGUN = "CopiesBegun"
    """All copies of the load are under way."""
    ARRIVED = "LoadArrived"
    """The load has ended well: its tokens are in the blocks."""
    FAILED = "LoadEnded"
    """The load has ended, and its tokens are not in the blocks."""
    GAVE_UP = "EngineGaveUp"
    """The engine launches the forward now, whether the copies are under way or not."""
    THREAD_ENDED = "ThreadEnded"
    """The transfer thread is gone, and has reported nothing of the load."""


FINAL = (StepLoadPhase.STANDS, StepLoadPhase.FAILED)
_P, _E = StepLoadPhase, StepLoadEvent
_UNTIL_ITS_END: dict[enum.Enum, StepLoadPhase] = {_E.FAILED: _P.FAILED, _E.THREAD_ENDED: _P.FAILED}
MOVES: Moves[StepLoadPhase] = {
    _P.POSTED: {**_UNTIL_ITS_END, _E.BEGUN: _P.UNDER_WAY, _E.ARRIVED: _P.STANDS, _E.GAVE_UP: _P.GIVEN_UP},
    _P.UNDER_WAY: {**_UNTIL_ITS_END, _E.ARRIVED: _P.STANDS},
    _P.GIVEN_UP: {**_UNTIL_ITS_END, _E.ARRIVED: _P.FAILED},  # copies that begin now, begin too late
}


@dataclass(slots=True)
class _StepLoad:
    load: Load
    life: Phases[StepLoadPhase]
    stands: Check | None = None
    copies: Sequence[Copy] = ()
    failed: LoadFailure = ""


class StepOutcome:
    """The loads of one step, each until it is final."""

    def __init__(
        self,
        loads: Sequence[Load],
        alive: Callable[[], bool],
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        changed: threading.Condition | None = None,
        joined: Sequence[StepOutcome] = (),
    ) -> None:
        """``loads``: as they are posted to the transfer thread. ``alive``: whether that runs. ``wake``: ends its
        ``wait`` of ``yield_to_engine``. ``clock``: seconds, for the histories. ``joined``: of loads that were begun
        beside the steps, and with which this step computes, too; all with the same ``changed``."""
        self._alive, self._wake, self._clock = alive, wake, clock
        self._changed = changed or threading.Condition()
        self._loads = [_StepLoad(load, Phases(MOVES, StepLoadPhase.POSTED, clock())) for load in loads]
        self._loads += [ours for outcome in joined for ours in outcome._loads]
        self._yielding = False
        self.due = math.inf
        """By ``clock``, when its load, whose copies are not all under way, may be reported early."""
        self._stand: bool | None = None  # whether the engine knows that its loads stand; False: ask the transfer thread

    # --- the transfer thread ------------------------------------------------------------------------------------

    def begun(self, load: Load, stands: Check | None = None, copies: Sequence[Copy] = ()) -> None:
        """All copies of a load are under way. A load of another step is ignored. ``stands``: whether the copies have
        ended, without an error, under a lease that stands. ``copies``: those that have not ended."""
        with self._changed:
            for ours in self._loads:
                if ours.load is load:
                    ours.stands, ours.copies = stands, copies
        self._step(load, StepLoadEvent.BEGUN)

    def foreseen(self, load: Load, seconds: float) -> bool:
        """A load may be reported early, from so many seconds on. Returns whether that is sooner than before."""
        before = self.due
        if self.concerns(load):
            self.due = self._clock() + seconds
        return self.due < before

    def ended(self, load: Load, failed: LoadFailure = "") -> None:
        """A load has ended, and nothing writes its blocks any more. A load of another step is ignored. ``failed``: as
        in ``LoadEnd``."""
        self._step(load, StepLoadEvent.FAILED if failed else StepLoadEvent.ARRIVED, failed)

    def _step(self, load: Load, event: StepLoadEvent, failed: LoadFailure = "") -> None:
        with self._changed:
            for ours in self._loads:
                if ours.load is load:  # by identity: two loads of different steps may belong to requests of the same id
                    ours.failed = failed or ours.failed
                    ours.life.step(event, self._clock())
                    self._changed.notify_all()

    def yield_to_engine(self, wait: Callable[[float], bool]) -> None:
        """Where the copies of all loads are under way, wait for ``YIELD_SECONDS``, or until there is new work.

        Meanwhile the engine's threads prepare the step, launch it and take its output. Threads run Python one at a
        time, and each change between them costs more than what this thread has to do next, which can wait. ``wait``:
        waits for so many seconds, or until ``wake`` is called; returns whether there is other work: a plan, or a
        control message.
        """
        if self.final:
            return
        self._yielding = True
        try:
            ends = self._wait_until(lambda: self._stand is not None or bool(self.waiting), YIELD_SECONDS, wait)
            if ends and self._stand:
                self._wait_until(lambda: False, ANSWERED_SECONDS, wait)
        finally:
            self._yielding = False

    def _wait_until(self, condition: Callable[[], bool], seconds: float, wait: Callable[[float], bool]) -> bool:
        """Whether the condition holds; if not, the time is over, or there is other work."""
        end = self._clock() + seconds
        while not condition():
            left = end - self._clock()
            if left <= 0 or wait(left):
                return False
        return True

    # --- the engine's thread ------------------------------------------------------------------------------------

    def wait_begun(self, seconds: float) -> bool:
        """Wait until no load is POSTED, or until the thread has ended; at most ``seconds``. Returns whether none is."""
        return self._wait_for(lambda: not self.waiting, seconds)

    def _wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            if not self._changed.wait_for(condition, min(seconds, LOOK_SECONDS)) and not self._alive():
                self._all(StepLoadEvent.THREAD_ENDED)
            return condition()

    def give_up(self) -> tuple[str, ...]:
        """The forward is launched now. Returns the requests whose copies are not all under way: these loads fail."""
        with self._changed:
            waiting = self.waiting
            self._all(StepLoadEvent.GAVE_UP)
            return waiting

    @property
    def waiting(self) -> tuple[str, ...]:
        """The requests whose loads are POSTED."""
        return self._in(StepLoadPhase.POSTED)

    @property
    def under_way(self) -> list[Copy]:
        """The copies of the loads that are UNDER_WAY. The engine must wait for them."""
        with self._changed:
            return [copy for ours in self._loads if ours.life.phase is StepLoadPhase.UNDER_WAY for copy in ours.copies]

    # --- the thread that takes the output away ------------------------------------------------------------------

    def standing(self) -> frozenset[str]:
        """Wait until every load is final. Returns the requests whose loads stand. The copies have ended when the step's
        tokens are there. So this call finds by itself that a load stands, and waits for the transfer thread only where
        it cannot."""
        with self._changed:
            self._check()
            end = self._clock() + YIELD_SECONDS
            while not self.final:
                polls = self._clock() < end and any(ours.stands for ours in self._loads)
                if not self._changed.wait(POLL_SECONDS if polls else LOOK_SECONDS) and not self._alive():
                    self._all(StepLoadEvent.THREAD_ENDED)
                self._check()
            self._answer(True)
            return frozenset(self._in(StepLoadPhase.STANDS))

    def _check(self) -> None:
        for ours in self._loads:
            if ours.stands is not None and ours.life.phase is StepLoadPhase.UNDER_WAY:
                answer = ours.stands()
                if answer:
                    ours.life.step(StepLoadEvent.ARRIVED, self._clock())
                elif answer is not None:  # the transfer thread must say so, at once
                    self._answer(False)

    def _answer(self, stand: bool) -> None:
        self._stand = stand
        if self._yielding:
            self._wake()

    def failures(self) -> dict[str, FailureKind]:
        """Why the loads do not stand that do not, once ``standing`` has returned. One that the engine did not wait for
        has the kind ``timeout``."""
        return {
            ours.load.request_id: ours.failed or ("timeout" if self._alive() else "internal")
            for ours in self._loads if ours.life.phase is StepLoadPhase.FAILED
        }  # fmt: skip

    # --- any thread ---------------------------------------------------------------------------------------------

    def concerns(self, load: Load) -> bool:
        """Whether a load is one of these."""
        return any(ours.load is load for ours in self._loads)

    @property
    def final(self) -> bool:
        return all(ours.life.phase in FINAL for ours in self._loads)

    def story(self) -> str:
        """The loads with their histories, for a log line."""
        return ", ".join(f"{ours.load.request_id} ({ours.life.story()})" for ours in self._loads)

    def _in(self, phase: StepLoadPhase) -> tuple[str, ...]:
        return tuple(ours.load.request_id for ours in self._loads if ours.life.phase is phase)

    def _all(self, event: StepLoadEvent) -> None:
        for ours in self._loads:
            ours.life.step(event, self._clock())
        self._changed.notify_all()
