"""The transfer thread: the thread of a rank that runs the protocol. The engine's thread posts work and takes results.

The engine's thread calls ``post`` and ``results.take``, which never block, and ``results.wait`` where it cannot go
on. While there is traffic, the transfer thread polls the control sockets and the data planes. While there is none, it
sleeps in one ``poll`` call, without the GIL. ``PostedPlans`` runs what the engine has posted.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import TypeVar

import msgspec

from kvferry.connector.decode_side.consumer import Consumer
from kvferry.connector.decode_side.report import Results
from kvferry.connector.pages.computed_steps import ComputedStep
from kvferry.connector.pages.copies import DeviceEvent
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.prefill_side.serve import Producer
from kvferry.connector.step_loads.step_loads import StepLoad, StepOutcome
from kvferry.connector.wire.step_plan import LeaseGrant, StepPlan
from kvferry.transport.control.listener import Listener
from kvferry.transport.errors import GeometryError
from kvferry.transport.plane import Plane
from kvferry.transport.wake import RunningClock, ShortSwitchInterval, Waker, keep_time_exactly

logger = logging.getLogger("vllm.kvferry.loop")

TICK_SECONDS = 0.02
"""Seconds between two checks of the deadlines while any deadline is running."""
BUSY_SECONDS = 1e-3
"""Seconds between two looks at control messages while data traffic keeps the thread from calling the poller."""
COMPUTING_SECONDS = 1e-3
"""Seconds between two checks whether the device has filled the blocks of a lease. It nearly always has by then."""
IDLE_SECONDS = 1.0
QUIET_SECONDS = 5.0
"""Seconds without a log line after an unexpected error was logged. An error in every turn would fill the disk."""
SWITCH_SECONDS = 2e-5
"""The interpreter's switch interval: how long another thread that spins in Python may delay the transfer thread. vLLM's
worker spins so between steps. At Python's default of 5 ms a hand-over of 138 MB between two engines on two cores took
490 ms, at 0.1 ms 180 ms."""

T = TypeVar("T")


class TransferThread:
    """One rank's transfer thread. ``results``: what the engine takes. ``clock``: the time of this thread's deadlines,
    by default the time that it has run."""

    def __init__(self, rank_context: RankContext, listener: Listener, clock: RunningClock | None = None) -> None:
        self.rank_context = rank_context
        self._log = rank_context.log
        self._listener = listener
        self._time = clock or RunningClock()
        self.waker = Waker()
        self._switch = ShortSwitchInterval(SWITCH_SECONDS)
        self.results = Results()
        self._work_posted = False  # any thread sets it, before it wakes this one
        self._yielding = False  # the engine's threads have more urgent work than this one
        self._wake_pending = False  # the waker has fired and is not drained yet
        self._ready_sockets: set[object] | None = None  # readable sockets, planes with events; None: any may have one
        self._unarmed: set[Plane] = set()  # planes that must be armed again before they can wake this thread
        self._warm: Future[None] = Future()  # done once the kernels are compiled
        self._stopping = False
        self._new_model: Mapping[str, str] | None = None
        self._closing = ""
        self._next_tick = self._next_look = 0.0
        self._consumer = Consumer(rank_context, self.results)
        self._producer = Producer(rank_context, listener, self.results.freed)
        self._plans = PostedPlans(rank_context, self._producer, self._consumer, self._yield_to_engine)
        self._steps, self.prefixes = self._producer.steps, self._producer.prefixes
        self._thread = threading.Thread(target=self._run, name="kvferry-transfer", daemon=True)
        rank_context.caches.copies.on_done = self._copy_done

    def start(self) -> None:
        """Start the thread, and return once its kernels are compiled. While anything of a hand-over is under way, the
        thread keeps the interpreter's switch interval at ``SWITCH_SECONDS``.

        Raises:
            GeometryError: kernels do not run on the device of the caches.
        """
        self._thread.start()
        if (error := self._warm.exception()) is not None:
            self.close()
            raise GeometryError(f"copies on {self.rank_context.caches.device} do not work: {error!r}")

    def post(self, posted: PostedPlan) -> None:
        """Post the work of one step. Where it does not wake the thread, the thread takes it at its next turn."""
        self._producer.plans_seen += 1
        wakes = posted.plan.wakes_thread
        if wakes or posted.plan.prefill_chunks:
            self._plans.posted.append(posted)
            self._work_posted = True  # once the thread finds it, and before the interval is short, see ``_sleep``
            if not self._stopping:  # a thread that has ended would never restore it
                self._switch.shorten()
            if wakes:
                self.wake()

    def step_posted(self) -> None:
        """In place of ``post``, for a plan that is ``nothing``: most are."""
        self._producer.plans_seen += 1

    def change_model(self, model: Mapping[str, str]) -> None:
        """As ``WorkerHalf`` has it. The thread does so before it takes a plan that is posted later."""
        self._new_model = model
        self.wake()

    def _take_model(self, now: float) -> None:
        model, self._new_model = self._new_model, None
        assert model is not None
        self.rank_context.model = model
        self._log.info("model", "kvferry: this rank has other weights: leases end, and peers compare them anew")
        self._plans.end_leases(now)
        self._producer.end_sessions(now)
        self._consumer.links.fail_all("the weights of this engine have changed")

    def close(self, timeout: float = 5.0, reason: str = "the engine ends") -> None:
        """Stop the thread, close sockets, channels and staging. Idempotent. All loads that run are cancelled, all
        leases end, and every D is told ``reason``. Where the thread is not ``alive`` afterwards, it has left the pages
        of the caches alone; copies on a GPU may be under way until ``Copies.synchronize`` returns."""
        self._closing = self._closing or reason
        self._stopping = True
        self.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def wake(self) -> None:
        """Have the thread look at its work once more. Any thread may call this."""
        self._work_posted = True
        self.waker.wake()

    def step_advanced(self) -> None:
        """A step that computes prompts has advanced, see ``ComputedStep``. Any thread may call this. The transfer
        thread looks at such steps in each turn. It is woken only where a read waits for them, because while it runs it
        takes the interpreter from the engine's thread."""
        if self._producer.reads_wait:
            self.wake()

    def step_over(self) -> None:
        """The device has ended a step that computes prompts. Any thread may call this."""
        if self._producer.answers_wait:
            self.wake()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        keep_time_exactly()
        try:
            self.rank_context.caches.warm_up()
            self._warm.set_result(None)
        except Exception as error:
            self._warm.set_exception(error)
        self._time.turn()  # the time of compilation does not count as a delay
        try:
            self._serve()
        finally:
            self.shut()

    def _serve(self) -> None:
        quiet_until = 0.0
        while not self._stopping:
            now = self._time.turn()
            try:
                if not self.turn(now):
                    self._sleep()
            except Exception:  # an error in one turn must not end the thread
                if now >= quiet_until:
                    quiet_until = now + QUIET_SECONDS
                    logger.exception("kvferry: unexpected error in the transfer thread, going on")
                self.rank_context.stats.failed("internal")
                time.sleep(TICK_SECONDS)
                with suppress(Exception):  # deadlines must still be checked where every turn raises an error
                    self._tick(now)

    def turn(self, now: float) -> bool:
        """Do what is ready, and check the deadlines where that is due. Returns whether there is more to do at once;
        otherwise the next turn may come ``sleep_seconds`` later."""
        if now >= self._next_look:
            self._next_look = now + TICK_SECONDS
            self._ready_sockets = None
        busy = self._turn(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick(now)
        # Where this thread sleeps next, the poller names what is ready.
        calls_no_poller = busy or self._work_posted
        self._next_look = min(self._next_look, now + BUSY_SECONDS) if calls_no_poller else self._next_tick
        if self._time.late:
            self.rank_context.stats.count("thread_delay_seconds", by=round(self._time.late * 1e6))
            text = "kvferry: the transfer thread was held up for %.1f s; is the host overloaded, or paused?"
            self._log.warning("held up", text, self._time.late)
        return busy

    @property
    def sleep_seconds(self) -> float:
        """How long the thread may sleep if nothing happens."""
        live = self._consumer.live or self._producer.live
        return COMPUTING_SECONDS if self._plans.computing else TICK_SECONDS if live else IDLE_SECONDS

    def mark_ready(self, what: object) -> None:
        """A socket is readable, or a plane has an event: the next turn serves it."""
        if self._ready_sockets is not None:
            self._ready_sockets.add(what)

    def _turn(self, now: float) -> bool:
        """Look at all work. Returns whether there is more to do at once."""
        self._work_posted = busy = False  # before the first look, so that nothing is missed
        try:
            if self._new_model is not None:
                self._take_model(now)
            if self._plans.posted:
                self._plans.run(now)
            if self._steps.flights:
                self._producer.look(now)
            if self.prefixes.lost:
                self._producer.end_lost(now)
            if self._plans.computing:
                self._plans.grant_computed(now)
        finally:
            if self._time.late:
                self._consumer.renewals.renew_now()
        # Messages that have arrived come first: after a delay of this thread they count before any deadline.
        ready, self._ready_sockets = self._ready_sockets, set()
        for plane in self.rank_context.planes:
            if ready is None or plane in ready or plane.active:
                busy |= self._progress(plane)
        if ready is None or self._producer.arrived or self._listener.fd in ready:
            busy |= self._producer.serve(now)
        busy |= self._consumer.serve(now, ready)
        busy |= self._producer.pump(now)
        # After the reads that wait are known to ``step_advanced``, so that nothing is missed that did not wake us.
        return busy or bool(self._plans.posted) or (bool(self._steps.flights) and self._steps.has_news)

    def _progress(self, plane: Plane) -> bool:
        """Advance one plane. An error there must not stop the other planes, nor the control messages."""
        self._unarmed.add(plane)
        try:
            return plane.progress()
        except Exception as error:
            self.rank_context.stats.failed("internal")
            text = "kvferry: unexpected error in data plane %s: %r"
            self._log.warning(f"plane {plane.name}", text, plane.name, error)
            time.sleep(TICK_SECONDS)  # the error may occur in every turn
            return False

    def _tick(self, now: float) -> None:
        self._consumer.tick(now)
        self._producer.tick(now)
        self.rank_context.stats.dropped_so_far("listener", self._listener.dropped)

    def _yield_to_engine(self, outcome: StepOutcome) -> None:
        """Meanwhile no end of a copy wakes this thread. A control message does: a peer waits for its answer."""
        poll = self._control_poll()

        def wait(seconds: float) -> bool:
            ready = {fd for fd, _ in poll.poll(math.ceil(seconds * 1e3))}
            if self.waker.fd in ready:
                self.waker.drain()
            for fd in ready:
                self.mark_ready(fd)
            return bool(ready - {self.waker.fd} or self._plans.posted)

        self._yielding = True
        try:
            outcome.yield_to_engine(wait)
        finally:
            self._yielding = False

    def _copy_done(self) -> None:
        """A copy on a GPU has ended. Any thread may call this."""
        if not self._yielding:  # else this thread looks at the copies right after the wait
            self.wake()

    def _sleep(self) -> None:
        if self._wake_pending:  # drained only here, so that the turn after the wake-up starts without this delay
            self._wake_pending = False
            self.waker.drain()
        if self._work_posted:
            return
        awake = False
        for plane in list(self._unarmed):
            if plane.arm():
                self._unarmed.remove(plane)
            else:
                self.mark_ready(plane)
                awake = True
        poll = self._control_poll()
        planes: dict[int, Plane] = {}
        for plane in self.rank_context.planes:
            for fd, events in plane.pollables():
                poll.register(fd, events)
                planes[fd] = plane
        seconds = self.sleep_seconds
        if idle := seconds == IDLE_SECONDS and not self._producer.prompts.table:
            self._switch.restore()  # no hand-over is under way: the engine's threads get their interval back
        if not idle or self._work_posted:  # also where work was posted meanwhile
            self._switch.shorten()
        seconds = 0.0 if awake else seconds
        self._time.sleeps(seconds)
        for fd, _ in poll.poll(int(seconds * 1e3)):
            self.mark_ready(planes.get(fd, fd))
            self._wake_pending |= fd == self.waker.fd

    def _control_poll(self) -> select.poll:
        """A poll of this thread's waker, and of all control messages."""
        poll = select.poll()
        for fd in (self.waker.fd, self._listener.fd, self.rank_context.dialer.fd):
            poll.register(fd, select.POLLIN)
        return poll

    def shut(self) -> None:
        """Close everything. The engine reuses its blocks after this call, also after an error here, so posted grants
        are withdrawn first."""
        for act in (
            self._switch.restore,
            self._producer.withdraw,
            lambda: self._producer.say_closing(self._closing),
            self.rank_context.caches.copies.close,
            lambda: self._consumer.close(self._time.turn(), self._closing),
            self.rank_context.dialer.close,
            self._producer.close,
            *(plane.close for plane in self.rank_context.planes),
            self._listener.close,
            self.waker.close,
        ):
            try:
                act()
            except Exception:
                logger.exception("kvferry: unexpected error while the transfer thread ends")


class PostedPlan(msgspec.Struct):
    """The work of one step, as the engine's thread posts it."""

    plan: StepPlan
    loads: Sequence[StepLoad] = ()
    """Those of the plan, in its order."""
    event: DeviceEvent | None = None
    """The device must have reached it before the blocks of loads ``behind`` are written."""
    computed: Sequence[DeviceEvent | None] = ()
    """One event per lease; the device must have reached it before the blocks of the lease are read."""
    step: ComputedStep | None = None
    """Where the step computes ``plan.prefill_chunks``."""
    outcome: StepOutcome | None = None
    """Of the loads that the step computes with."""


class PostedPlans:
    """Runs the plans in the order in which they were posted. Any thread may append to ``posted``; all else is used by
    the transfer thread only.

    ``computing``: the leases of plans that have been run, until the device has filled their blocks.
    ``yield_to_engine``: leaves the interpreter to the engine's thread, whose step computes with loads.
    """

    def __init__(
        self,
        rank_context: RankContext,
        producer: Producer,
        consumer: Consumer,
        yield_to_engine: Callable[[StepOutcome], None],
    ) -> None:
        self._rank_context = rank_context
        self._log = rank_context.log
        self._producer, self._consumer = producer, consumer
        self._yield_to_engine = yield_to_engine
        self.posted: deque[PostedPlan] = deque()
        self.computing: list[tuple[LeaseGrant, DeviceEvent | None]] = []

    def run(self, now: float) -> None:
        """Run the commands of all plans that have been posted."""
        loads, renewals, lookups = self._consumer.loads, self._consumer.renewals, self._consumer.lookups
        for _ in range(len(self.posted)):
            posted = self.posted.popleft()
            plan, outcome, step = posted.plan, posted.outcome, posted.step
            renewals.decode_engine = plan.decode_engine
            self.computing += zip_longest(plan.leases, posted.computed)
            if plan.queued or plan.prefills or plan.stops:
                self._begin_and_stop(plan, now)
            if plan.ends_leases:
                self.end_leases(now)
            if step is not None:
                self._try("the prompts of a step", partial(self._producer.plan_step, plan.prefill_chunks, step, now))
            # A call of ``_each`` for each empty list would be felt by every load.
            for request_id in plan.cancels:  # first: they are of earlier plans' loads, also where an id comes again
                self._try(request_id, partial(loads.cancel, request_id, now))
            for keep in plan.keeps:
                lookups.taken(keep.request_id)
                renew = partial(renewals.keep, keep.token, keep.peer, keep.request_id, now, siblings=keep.siblings)
                self._try(keep, renew)
            if plan.left or plan.lookups:
                self._each(plan.left, lookups.leave, now)
                self._each(plan.lookups, lookups.begin, now)
            alone = len(posted.loads) == 1 and not self.posted
            for load in posted.loads:
                self._try(load, partial(self._begin, load, posted, now, alone=alone), partial(loads.fail, load, now))
            # Before all other work: the engine waits for these results.
            self._try("copies that have ended", partial(self._consumer.finished_writes, now))
            for release in plan.releases:
                self._try(release, partial(renewals.release, release.token, release.request_id, now))
            if outcome is not None and not self.posted and not any(p.active for p in self._rank_context.planes):
                self._yield_to_engine(outcome)

    def _begin_and_stop(self, plan: StepPlan, now: float) -> None:
        """P: queue, begin and stop the prompts of a plan. Those that end free their names for those that begin."""
        begun = {prefill.token for prefill in plan.prefills}
        self._each([stop for stop in plan.stops if stop.token not in begun], self._producer.stop_prefill, now)
        self._each(plan.prefills, self._producer.begin_prefill, now)
        for prompt in plan.queued:
            self._try(prompt, partial(self._producer.prompts.queue, prompt))
        self._each([stop for stop in plan.stops if stop.token in begun], self._producer.stop_prefill, now)

    def end_leases(self, now: float) -> None:
        """P: end all leases, also those that are not granted yet."""
        ended, self.computing = self.computing, []
        self._each([grant for grant, _ in ended], self._producer.refuse, now)
        self._try("the end of all leases", partial(self._producer.end_leases, now))

    def _begin(self, load: StepLoad, posted: PostedPlan, now: float, *, alone: bool) -> None:
        if posted.event is not None and load.load.behind:
            self._rank_context.caches.copies.wait_event(posted.event)
            posted.event = None  # all copies from now on wait for it
        self._consumer.loads.begin(load, now, alone=alone)

    def grant_computed(self, now: float) -> None:
        """Grant the leases whose blocks the device has filled. P holds an ask that arrives before the grant."""
        states = [(grant, event, event is None or event.query()) for grant, event in self.computing]
        self.computing = [(grant, event) for grant, event, done in states if not done]
        for grant in [grant for grant, _, done in states if done]:
            self._try(grant, partial(self._producer.grant, grant, now), partial(self._producer.refuse, grant, now))

    def _each(self, items: Iterable[T], act: Callable[[T, float], object], now: float) -> None:
        for item in items:
            self._try(item, partial(act, item, now))

    def _try(self, item: object, act: Callable[[], object], otherwise: Callable[[], None] | None = None) -> None:
        """Run one command, which is about ``item``. Its error must not stop the other commands. ``otherwise`` then
        reports it to the engine."""
        try:
            act()
        except Exception:
            # Not ``item`` itself: it contains the token of a lease.
            what = getattr(item, "request_id", item)
            self._log.exception("command", "kvferry: unexpected error with %s", what)
            self._rank_context.stats.failed("internal")
            if otherwise is not None:
                try:
                    otherwise()
                except Exception:
                    self._log.exception("otherwise", "kvferry: unexpected error after an error")
