"""The loads of one rank, each until its engine knows its end. Three threads use them, under one lock.

The transfer thread says what happens. The engine's thread reports loads, and waits until the forward may be launched of
a step that computes with some. The thread that takes the step's output away waits until these are final.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.connector.pages.copies import Copies
from kvferry.connector.wire.states import Moves, Phases
from kvferry.connector.wire.step_plan import ALONE_SECONDS, LOST, LeaseGrant, Load, LoadEnd, StepResults
from kvferry.connector.wire.transfer_estimate import UNKNOWN, TransferEstimate
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
    """Of a load on one rank::

        POSTED ◀──▶ UNDER_WAY ──▶ STANDS
           │            └───────▶ FAILED
           └─▶ GIVEN_UP ────────────▲

    A POSTED load may also end at once, as where P sends. In UNDER_WAY all copies are under way, or have ended, and the
    device can wait for them. The engine launches the forward once no load of the step is POSTED. A load that the engine
    has given up fails whatever its copies do. In STANDS and FAILED, both final, nothing writes its blocks any more.
    """

    POSTED = "posted"
    UNDER_WAY = "under way"
    GIVEN_UP = "given up"
    STANDS = "stands"
    FAILED = "failed"


class StepLoadEvent(enum.Enum):
    BEGUN = "CopiesBegun"  # all of them are under way
    RETRIED = "AttemptFailed"  # another one follows, with other copies
    ARRIVED = "LoadArrived"  # it has ended well: its tokens are in the blocks
    FAILED = "LoadEnded"  # it has ended, and its tokens are not in the blocks
    GAVE_UP = "EngineGaveUp"  # the forward is launched now, whether the copies are under way or not
    THREAD_ENDED = "ThreadEnded"  # the transfer thread is gone, and has reported nothing of the load


FINAL = (StepLoadPhase.STANDS, StepLoadPhase.FAILED)
_P, _E = StepLoadPhase, StepLoadEvent
_UNTIL_ITS_END: dict[enum.Enum, StepLoadPhase] = {_E.FAILED: _P.FAILED, _E.THREAD_ENDED: _P.FAILED}
MOVES: Moves[StepLoadPhase] = {
    _P.POSTED: {**_UNTIL_ITS_END, _E.BEGUN: _P.UNDER_WAY, _E.ARRIVED: _P.STANDS, _E.GAVE_UP: _P.GIVEN_UP},
    _P.UNDER_WAY: {**_UNTIL_ITS_END, _E.ARRIVED: _P.STANDS, _E.RETRIED: _P.POSTED},
    _P.GIVEN_UP: {**_UNTIL_ITS_END, _E.ARRIVED: _P.FAILED},  # copies that begin now, begin too late
}


@dataclass(slots=True, eq=False)
class StepLoad:
    """One load on one rank. Two may have the id of one request, the first of which was cancelled and still drains."""

    load: Load
    """As the engine gave it."""
    changed: threading.Condition
    """One for all loads of a rank."""
    claimed: bool = False
    """A step computes with it, or will: no other attempt begins, and only that step cancels it, by giving it up."""
    life: Phases[StepLoadPhase] = field(default_factory=lambda: Phases(MOVES, _P.POSTED, time.monotonic()))
    ends_at: float = math.inf
    """By ``time.monotonic``: when its copies should have ended; infinite where nobody knows. Before they are under way
    it is known only where P computes the prompt."""
    stands: Check | None = None
    copies: Sequence[Copy] = ()
    """That were under way once all of them were."""
    end: LoadEnd | None = None
    estimate: TransferEstimate = UNKNOWN
    """Of later loads from this P, by this one."""

    @property
    def request_id(self) -> str:
        return self.load.request_id

    @property
    def under_way(self) -> bool:
        return self.life.phase is _P.UNDER_WAY

    @property
    def final(self) -> bool:
        return self.life.phase in FINAL

    @property
    def cancellable(self) -> bool:
        """Whether its request, or its step, can do without it."""
        return not self.claimed or self.life.phase is _P.GIVEN_UP

    def step(self, event: StepLoadEvent) -> None:
        """Take an event, under the lock."""
        self.life.step(event, time.monotonic())
        self.changed.notify_all()

    # --- the transfer thread ------------------------------------------------------------------------------------

    def begun(self, stands: Check | None = None, copies: Sequence[Copy] = (), ends_at: float = math.inf) -> None:
        """All copies are under way. ``stands``: whether they have ended, without an error, under a lease that stands.
        ``copies``: those that have not ended."""
        with self.changed:
            self.stands, self.copies, self.ends_at = stands, copies, ends_at
            self.step(_E.BEGUN)

    def begins_again(self, now: float) -> None:
        """The copies of another load, before its own, have ended only now."""
        if self.under_way and self.ends_at < math.inf:
            self.ends_at = now + self.load.seconds

    def retries(self) -> bool:
        """Whether another attempt may begin. If so, no step waits for the copies of the last one."""
        with self.changed:
            if not self.claimed:
                self.stands, self.copies, self.ends_at = None, (), math.inf
                self.step(_E.RETRIED)
            return not self.claimed

    def ended(self, end: LoadEnd, estimate: TransferEstimate = UNKNOWN) -> None:
        """It has ended, and nothing writes its blocks any more."""
        with self.changed:
            self.end, self.estimate = end, estimate
            self.step(_E.FAILED if end.failed else _E.ARRIVED)


class StepLoads:
    """What one rank owes its engine: the report of each load and of the end of each lease. The engine's thread uses it.

    vLLM's scheduler asserts on an id that it does not know, and dies. So one report leaves for each id, whatever the
    transfer thread does. What is not here is ignored: it was not posted here, or was reported before. Where a load is
    posted under the id of one that was not reported, only the new one is.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.by_request: dict[str, StepLoad] = {}  # those that are claimed are reported, and a step joins them
        self._leases: set[str] = set()  # requests whose lease has not ended
        self._results = StepResults()

    def post(self, loads: Iterable[Load], leases: Iterable[LeaseGrant] = ()) -> list[StepLoad]:
        """These loads and leases are about to be posted."""
        posted = []
        for load in loads:
            posted.append(StepLoad(load, self.changed, load.now))
            if not load.now:
                self.by_request[load.request_id] = posted[-1]
        for lease in leases:
            self._leases.add(lease.request_id)
        return posted

    def join(self, loads: Iterable[Load]) -> list[StepLoad]:
        """A step computes with these loads, which some rank has reported before their end."""
        joined = []
        for load in loads:
            if (one := self.by_request.pop(load.request_id, None)) is None:  # it has ended here, as was reported
                one = StepLoad(load, self.changed, claimed=True)
                one.ended(LoadEnd())
            joined.append(one)
        return joined

    def load_ended(self, ended: StepLoad) -> None:
        """The transfer thread has reported the end of a load. One that is claimed is reported already."""
        if self.by_request.get(ended.load.request_id) is ended and not ended.claimed:
            self._end(ended, ended.end or LOST)

    def lease_freed(self, request_id: str) -> None:
        """The transfer thread has freed a lease."""
        if request_id in self._leases:
            self._leases.remove(request_id)
            self._results.sent.add(request_id)

    def report_early(self, lead: float, *, foresees: bool) -> None:
        """Report the loads that should end in ``lead`` seconds. ``foresees``: also those that P still sends, unless
        they should have ended long ago."""
        now = time.monotonic()
        with self.changed:
            for name, load in self.by_request.items():
                rest = load.ends_at - now
                known = load.under_way or (foresees and rest > lead - ALONE_SECONDS)
                if rest <= lead and known and not (load.claimed or load.final):
                    load.claimed = True
                    self._results.received.add(name)

    def due(self, lead: float, *, foresees: bool) -> float:
        """By ``time.monotonic``: when ``report_early`` may report the next load; infinite where none is."""
        past, loads = time.monotonic() - ALONE_SECONDS, self.by_request.values()
        waits = [load.ends_at - lead for load in loads if not load.claimed and (foresees or load.under_way)]
        return min([due for due in waits if due > past], default=math.inf)

    def end_all(self, end: LoadEnd) -> int:
        """The transfer thread is gone: every load that was not reported ends so, and every lease ends. Returns how many
        there are. Of a load that is reported nothing follows, also where another thread runs when a step joins it."""
        with self.changed:
            for load in self.by_request.values():
                load.step(_E.THREAD_ENDED)
        lost = [load for load in self.by_request.values() if not load.claimed]
        for load in lost:
            self._end(load, end)
        self._results.sent |= self._leases
        leases, self._leases = self._leases, set()
        return len(lost) + len(leases)

    def _end(self, load: StepLoad, end: LoadEnd) -> None:
        name = load.load.request_id
        del self.by_request[name]
        self._results.received.add(name)
        self._results.ends[name] = end
        if end.failed:
            self._results.failed.add(name)

    @property
    def awaits_load(self) -> bool:
        """Whether a load was not reported."""
        return any(not load.claimed for load in self.by_request.values())

    def take_results(self) -> StepResults:
        """The loads and the leases that are to be reported, each once."""
        results, self._results = self._results, StepResults()
        return results


class StepOutcome:
    """What becomes of the loads that one step computes with, on one rank."""

    def __init__(self, loads: Sequence[StepLoad], alive: Callable[[], bool], wake: Callable[[], None]) -> None:
        """``loads``: of one rank, at least one. ``alive``: whether its transfer thread runs. ``wake``: ends the
        thread's ``wait`` of ``yield_to_engine``."""
        self._loads, self._alive, self._wake = loads, alive, wake
        self._changed = loads[0].changed
        self._yielding = False
        self._stand: bool | None = None  # whether the engine knows that its loads stand; False: ask the transfer thread

    # --- the transfer thread ------------------------------------------------------------------------------------

    def yield_to_engine(self, wait: Callable[[float], bool]) -> None:
        """Where the copies of all loads are under way, wait for ``YIELD_SECONDS``, or until there is new work.

        Meanwhile the engine's threads prepare the step, launch it and take its output. Threads run Python one at a
        time, and each change between them costs more than what this thread has to do next, which can wait. ``wait``:
        waits for so many seconds, or until ``wake`` is called; returns whether there is other work: a plan, or a
        control message.
        """
        if self.final:
            return
        self._yielding, answered, end = True, False, time.monotonic() + YIELD_SECONDS
        while not self.waiting and self._stand is not False:
            if self._stand and not answered:
                answered, end = True, time.monotonic() + ANSWERED_SECONDS
            left = end - time.monotonic()
            if left <= 0 or wait(left):
                break
        self._yielding = False

    # --- the engine's thread ------------------------------------------------------------------------------------

    def wait_begun(self, seconds: float) -> bool:
        """Wait until no load is POSTED, or until the thread has ended; at most ``seconds``. Returns whether none is."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self.waiting, min(seconds, LOOK_SECONDS)) and not self._alive():
                self._all(_E.THREAD_ENDED)
            return not self.waiting

    def give_up(self) -> tuple[str, ...]:
        """The forward is launched now. Returns the requests whose copies are not all under way: these loads fail."""
        with self._changed:
            waiting = self.waiting
            self._all(_E.GAVE_UP)
            return waiting

    @property
    def waiting(self) -> tuple[str, ...]:
        """The requests whose loads are POSTED."""
        return tuple(load.request_id for load in self._loads if load.life.phase is _P.POSTED)

    def make_engine_wait(self, copies: Copies) -> None:
        """What this thread launches from now on waits for the copies of the loads that are UNDER_WAY."""
        with self._changed:
            for copy in [copy for load in self._loads if load.under_way for copy in load.copies]:
                if not copy.done:  # else its event may be another copy's by now
                    assert copy.event is not None, "only copies on a stream are waited for"
                    copies.make_engine_wait(copy.event)

    # --- the thread that takes the output away ------------------------------------------------------------------

    def ends(self) -> dict[str, LoadEnd]:
        """Wait until every load is final. Returns how they have ended, by request; one that the engine did not wait for
        has the kind ``timeout``. The copies have ended when the step's tokens are there. So this call finds by itself
        that a load stands, and waits for the transfer thread only where it cannot."""
        with self._changed:
            self._check()
            end = time.monotonic() + YIELD_SECONDS
            while not self.final:
                polls = time.monotonic() < end and any(load.stands for load in self._loads)
                if not self._changed.wait(POLL_SECONDS if polls else LOOK_SECONDS) and not self._alive():
                    self._all(_E.THREAD_ENDED)
                self._check()
            self._answer(True)
            return {load.request_id: self._end(load) for load in self._loads}

    def _end(self, load: StepLoad) -> LoadEnd:
        if load.life.phase is _P.STANDS or (load.end is not None and load.end.failed):
            return load.end or LoadEnd()
        return LoadEnd("timeout") if self._alive() else LOST

    def _check(self) -> None:
        for load in self._loads:
            if load.stands is not None and load.under_way:
                answer = load.stands()
                if answer:
                    load.step(_E.ARRIVED)
                elif answer is not None:  # the transfer thread must say so, at once
                    self._answer(False)

    def _answer(self, stand: bool) -> None:
        self._stand = stand
        if self._yielding:
            self._wake()

    # --- any thread ---------------------------------------------------------------------------------------------

    @property
    def final(self) -> bool:
        return all(load.final for load in self._loads)

    def story(self) -> str:
        """The loads with their histories, for a log line."""
        return ", ".join(f"{load.request_id} ({load.life.story()})" for load in self._loads)

    def _all(self, event: StepLoadEvent) -> None:
        for load in self._loads:
            load.step(event)
