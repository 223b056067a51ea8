"""The transfer thread: the thread of a rank that runs the protocol. The engine's thread posts work and takes results.

The engine's thread calls ``post`` and ``results.take_*``, which never block, and ``results.wait`` where it cannot go
on. While there is traffic, the transfer thread polls the control sockets and the data planes. While there is none, it
sleeps in one ``poll`` call, without the GIL.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest

import zmq

from kvferry.connector.protocol.step_plan import LeaseGrant, Load, PrefillStop, StepPlan
from kvferry.connector.transfer.computed_steps import ComputedStep
from kvferry.connector.transfer.consumer import Consumer
from kvferry.connector.transfer.copies import DeviceEvent
from kvferry.connector.transfer.load_reports import Check, StepLoadListener
from kvferry.connector.transfer.producer import Producer
from kvferry.connector.transfer.rank_context import RankContext
from kvferry.connector.transfer.rendezvous import PromptFinder
from kvferry.connector.transfer.results import Results
from kvferry.transport.channels import Copy
from kvferry.transport.control.listener import Listener
from kvferry.transport.errors import GeometryError
from kvferry.transport.plane import Plane
from kvferry.transport.wake import RunningClock, Waker, keep_time_exactly

logger = logging.getLogger("vllm.kvferry.transfer_thread")

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


Pollable = int | zmq.Socket[bytes]
_Command = tuple[
    StepPlan, DeviceEvent | None, Sequence[DeviceEvent | None], StepLoadListener | None, ComputedStep | None
]


class TransferThread:
    """One rank's transfer thread.

    Any thread may call ``post``. ``results``: what the engine takes.
    """

    def __init__(self, rank_context: RankContext, listener: Listener, clock: RunningClock | None = None) -> None:
        """``clock``: the time of this thread's deadlines, by default the time that it has run."""
        self._rank_context = rank_context
        self._log = rank_context.log
        self._listener = listener
        self._time = clock or RunningClock()
        self._waker = Waker()
        self._commands: deque[_Command] = deque()
        self._computing: list[tuple[LeaseGrant, DeviceEvent | None]] = []
        self.results = Results()
        self._work_posted = False  # any thread sets it, before it wakes this one
        self._yielding = False  # the engine's threads have more urgent work than this one
        self._wake_pending = False  # the waker has fired and is not drained yet
        self._ready_sockets: set[object] | None = None  # readable sockets, planes with events; None: any may have one
        self._unarmed: set[Plane] = set()  # planes that must be armed again before they can wake this thread
        self._warm = threading.Event()
        self._cold: Exception | None = None
        self._stopping = False
        self._closing = ""
        self._next_tick = self._next_look = 0.0
        self._consumer = Consumer(rank_context, self._report_begun, self._report_moved, self.results.finished)
        self._producer = Producer(rank_context, listener, self.results.freed)
        consumer = self._consumer
        self._finder = PromptFinder(
            rank_context, consumer.links_to, self.results.rendezvous_told, consumer.release_for_all, self.wake
        )
        self._steps = self._producer.computing.steps
        self._thread = threading.Thread(target=self._run, name="kvferry-transfer", daemon=True)
        rank_context.caches.copies.on_done = self._copy_done

    def start(self) -> None:
        """Start the thread, and return once its kernels are compiled. This call shortens the interpreter's switch
        interval to ``SWITCH_SECONDS``.

        Raises:
            GeometryError: kernels do not run on the device of the caches.
        """
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self._thread.start()
        self._warm.wait()
        if self._cold is not None:
            self.close()
            raise GeometryError(f"copies on {self._rank_context.caches.device} do not work: {self._cold!r}")

    def post(
        self,
        plan: StepPlan,
        event: DeviceEvent | None = None,
        computed: Sequence[DeviceEvent | None] = (),
        listener: StepLoadListener | None = None,
        step: ComputedStep | None = None,
    ) -> None:
        """Post the work of one step. Where it is not ``urgent``, the thread takes it at its next turn.

        ``event``: the device must have reached it before the blocks of loads ``behind`` are written. ``computed``: one
        event per lease; the device must have reached it before the blocks of the lease are read. ``listener``: takes
        the reports of the loads inside the step, from this thread. ``step``: where the step computes ``plan.chunks``.
        """
        self._producer.named.engine_steps += 1
        urgent = plan.urgent
        if urgent or plan.chunks:
            earlier = self.results.listeners  # before the thread can add this listener
            self._commands.append((plan, event, computed, listener, step))
            if not urgent:
                return
            self.wake()
            for other in earlier:
                other.interrupt()

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
        self._waker.wake()

    def step_advanced(self) -> None:
        """A step that computes prompts has advanced, see ``ComputedStep``. Any thread may call this. The transfer
        thread looks at such steps in each turn. It is woken only where a read waits for them, because while it runs it
        takes the interpreter from the engine's thread."""
        if self._producer.reads_wait:
            self.wake()

    def end_yield(self) -> None:
        """End the wait that ``StepLoadListener.yield_to_engine`` was given. Any thread may call this."""
        self._waker.wake()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        keep_time_exactly()
        try:
            self._rank_context.caches.warm_up(checksum=self._rank_context.settings.checksum)
        except Exception as error:
            self._cold = error
        self._warm.set()
        self._time.turn()  # the time of compilation does not count as a delay
        try:
            self._serve()
        finally:
            self._shut()

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
                self._rank_context.stats.failed("internal")
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
        if busy:
            self._next_look = min(self._next_look, now + BUSY_SECONDS)
        if self._time.late:
            self._rank_context.stats.total("thread_delay_us", round(self._time.late * 1e6))
            late = f"{self._time.late:.1f}"
            text = f"kvferry: the transfer thread was held up for {late} s; is the host overloaded, or paused?"
            self._log.warning("held up", "%s", text)
        return busy

    @property
    def sleep_seconds(self) -> float:
        """How long the thread may sleep if nothing happens."""
        live = self._consumer.live or self._producer.live or self._finder.live
        return COMPUTING_SECONDS if self._computing else TICK_SECONDS if live else IDLE_SECONDS

    def mark_ready(self, what: object) -> None:
        """A socket is readable, or a plane has an event: the next turn serves it."""
        if self._ready_sockets is not None:
            self._ready_sockets.add(what)

    def _turn(self, now: float) -> bool:
        """Look at all work. Returns whether there is more to do at once."""
        self._work_posted = busy = False  # before the first look, so that nothing is missed
        try:
            self._run_commands(now)
            if self._steps:
                self._producer.computing.look(now)
            if self._computing:
                self._grant(now)
        finally:
            if self._time.late:
                self._consumer.renew_now()
        # Messages that have arrived come first: after a delay of this thread they count before any deadline.
        ready, self._ready_sockets = self._ready_sockets, set()
        for plane in self._rank_context.planes:
            if ready is None or plane in ready or plane.active:
                busy |= self._progress(plane)
        if ready is None or self._producer.arrived or self._listener.socket in ready:
            busy |= self._producer.serve(now)
        busy |= self._consumer.serve(now, ready)
        if self._finder.open or self._finder.contacts:  # P may send over a contact that no request uses
            self._finder.serve(now)
        busy |= self._producer.reads.pump(now)
        # After the reads that wait are known to ``step_advanced``, so that nothing is missed that did not wake us.
        return busy or bool(self._commands) or (bool(self._steps) and self._producer.computing.has_news)

    def _progress(self, plane: Plane) -> bool:
        """Advance one plane. An error there must not stop the other planes, nor the control messages."""
        self._unarmed.add(plane)
        try:
            return plane.progress()
        except Exception as error:
            self._rank_context.stats.failed("internal")
            text = f"kvferry: unexpected error in data plane {plane.name}: {error!r}"
            self._log.warning(f"plane {plane.name}", "%s", text)
            time.sleep(TICK_SECONDS)  # the error may occur in every turn
            return False

    def _tick(self, now: float) -> None:
        self._consumer.tick(now)
        self._finder.tick(now)
        self._producer.tick(now)
        self._rank_context.stats.dropped_so_far("listener", self._listener.dropped)

    def _run_commands(self, now: float) -> None:
        for _ in range(len(self._commands)):
            plan, event, computed, listener, step = self._commands.popleft()
            if listener is not None:
                self.results.listen(listener)
            self._consumer.identify(plan.consumer)
            self._computing += zip_longest(plan.leases, computed)
            if plan.queued or plan.prefills or plan.stops:
                self._begin_and_stop(plan, now)
            if step is not None:
                self._try("the prompts of a step", partial(self._producer.computing.plan, plan.chunks, step, now))
            for request_id in plan.cancels:  # first: they are of earlier plans' loads, also where an id comes again
                self._try(request_id, partial(self._consumer.cancel, request_id, now))
            if self._finder.open:
                for keep in plan.keeps:
                    self._finder.taken(keep.request_id, now)
            for keep in plan.keeps:
                self._try(keep, partial(self._consumer.keep, keep, now))
            for request_id in plan.left:
                self._try(request_id, partial(self._finder.leave, request_id, now))
            for wanted in plan.rendezvous:
                self._try(wanted, partial(self._finder.begin, wanted, now))
            loads = plan.loads if self._copies_wait(event, plan.loads, now) else ()
            alone = len(loads) == 1 and not self._commands
            for load in loads:
                order = listener.layer_order if listener is not None and load.now else ()
                begin = partial(self._consumer.load, load, now, alone=alone, layer_order=order)
                self._try(load, begin, partial(self._consumer.fail, load, now))
            # Before all other work: the engine waits for these results.
            self._try("copies that have ended", partial(self._consumer.finished_writes, now))
            for release in plan.releases:
                self._try(release, partial(self._consumer.release, release, now))
            if listener is not None and not self._commands and not any(p.active for p in self._rank_context.planes):
                self._yield_to_engine(listener)

    def _begin_and_stop(self, plan: StepPlan, now: float) -> None:
        """P: queue, begin and stop the prompts of a plan. Those that end free their names for those that begin."""
        begun = {prefill.token for prefill in plan.prefills}
        for stop in plan.stops:
            if stop.token not in begun:
                self._try(stop, partial(self._producer.stop_prefill, stop, now))
        for prefill in plan.prefills:
            self._try(prefill, partial(self._producer.begin_prefill, prefill, now))
        for prompt in plan.queued:
            self._try(prompt, partial(self._producer.queue_prompt, prompt))
        for stop in plan.stops:
            if stop.token in begun:
                self._try(stop, partial(self._producer.stop_prefill, stop, now))

    def _yield_to_engine(self, listener: StepLoadListener) -> None:
        """Meanwhile no end of a copy wakes this thread. A control message does: a peer waits for its answer."""
        pollables = self._control_pollables()

        def wait(seconds: float) -> bool:
            ready = {pollable for pollable, _ in zmq.zmq_poll(pollables, math.ceil(seconds * 1e3))}
            if self._waker.fd in ready:
                self._waker.drain()
            for pollable in ready:
                self.mark_ready(pollable)
            return bool(ready - {self._waker.fd})

        self._yielding = True
        try:
            listener.yield_to_engine(wait)
        finally:
            self._yielding = False

    def _copy_done(self) -> None:
        """A copy on a GPU has ended. Any thread may call this."""
        if not self._yielding:  # else this thread looks at the copies right after the wait
            self.wake()

    def _copies_wait(self, event: DeviceEvent | None, loads: Sequence[Load], now: float) -> bool:
        """Have copies from now on wait for the engine's event, if one of ``loads`` must. Where the device refuses, the
        loads fail."""
        if event is None or not any(load.behind for load in loads):
            return True
        try:
            self._rank_context.caches.copies.wait_event(event)
        except Exception:
            logger.exception("kvferry: %d loads fail: their copies cannot wait for the engine", len(loads))
            for load in loads:
                self._try(load, partial(self._consumer.fail, load, now))
            return False
        return True

    def _grant(self, now: float) -> None:
        """Grant the leases whose blocks the device has filled. P holds an ask that arrives before the grant."""
        ready: list[LeaseGrant] = []
        left: list[tuple[LeaseGrant, DeviceEvent | None]] = []
        for grant, computed in self._computing:
            if computed is None or computed.query():
                ready.append(grant)
            else:
                left.append((grant, computed))
        self._computing = left
        for grant in ready:
            self._try(grant, partial(self._producer.grant, grant, now), partial(self._not_granted, grant, now))

    def _not_granted(self, grant: LeaseGrant, now: float) -> None:
        """A grant has raised an error: the engine gets its blocks back, and no D may wait for them."""
        self.results.freed(grant.request_id)
        self._producer.stop_prefill(PrefillStop(grant.token, ended=True), now)

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

    def _report_begun(self, load: Load, stands: Check | None, copies: Sequence[Copy]) -> None:
        for listener in self.results.listeners:
            listener.begun(load, stands, copies)

    def _report_moved(self) -> None:
        for listener in self.results.listeners:
            listener.moved()

    def _sleep(self) -> None:
        if self._wake_pending:  # drained only here, so that the turn after the wake-up starts without this delay
            self._wake_pending = False
            self._waker.drain()
        if self._work_posted:
            return
        awake = False
        for plane in list(self._unarmed):
            if plane.arm():
                self._unarmed.remove(plane)
            else:
                self.mark_ready(plane)
                awake = True
        pollables = self._control_pollables()
        planes: dict[Pollable, Plane] = {}
        for plane in self._rank_context.planes:
            for pollable, events in plane.pollables():
                pollables.append((pollable, events))
                planes[pollable] = plane
        seconds = 0.0 if awake else self.sleep_seconds
        self._time.sleeps(seconds)
        for pollable, _ in zmq.zmq_poll(pollables, int(seconds * 1e3)):
            self.mark_ready(planes.get(pollable, pollable))
            self._wake_pending |= pollable == self._waker.fd

    def _control_pollables(self) -> list[tuple[Pollable, int]]:
        """This thread's waker, and all sockets of control messages."""
        pollables: list[tuple[Pollable, int]] = [(self._waker.fd, zmq.POLLIN), (self._listener.socket, zmq.POLLIN)]
        for socket in self._rank_context.dialer.pollables:
            pollables.append((socket, zmq.POLLIN))
        return pollables

    def _shut(self) -> None:
        """Close everything. The engine reuses its blocks after this call, also after an error here, so posted grants
        are withdrawn first."""
        for act in (
            self._producer.withdraw,
            lambda: self._producer.say_closing(self._closing),
            self._rank_context.caches.copies.close,
            lambda: self._consumer.close(self._time.turn(), self._closing),
            self._finder.close,
            self._rank_context.dialer.close,
            self._producer.close,
            *(plane.close for plane in self._rank_context.planes),
            self._listener.close,
            self._waker.close,
        ):
            try:
                act()
            except Exception:
                logger.exception("kvferry: unexpected error while the transfer thread ends")
