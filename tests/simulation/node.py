"""One life of one rank: its real transfer thread, which is not started but called in virtual time."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast
from unittest.mock import patch

from kvferry.connector.config import Settings
from kvferry.connector.decode_side.fetch import FetchState
from kvferry.connector.geometry.engine_types import RankInfo
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.step_loads.step_loads import Check, StepLoad, StepOutcome
from kvferry.connector.wire.step_plan import LOST, Load, LookupResult, RankAddress, StepPlan
from kvferry.connector.worker.loop import TICK_SECONDS, PostedPlan, TransferThread
from kvferry.connector.worker.prefill_events import PrefillEvents
from kvferry.transport.channels import Copy
from kvferry.transport.control.keys import Keys, new_secret
from kvferry.transport.limited_log import RateLimitedLog
from kvferry.transport.wake import RunningClock, Waker
from tests.simulation.memory import Form, Pages, SimCopies
from tests.simulation.network import WAKER_FD, Network, SimDialer, SimListener, Violation
from tests.simulation.planes import PlacePlane, PullPlane, PushPlane, SimPlane
from tests.support.inside import (
    board_of,
    consumer_of,
    leases_of,
    plans_of,
    producer_of,
    prompts_of,
    sends_of,
    sessions_of,
)

TURN_SECONDS = 30e-6
MAX_BUSY_TURNS = 10_000
MODEL = {"architectures": "Simulated"}
KEYS = Keys(new_secret())
PLANES: dict[str, type[SimPlane]] = {plane.name: plane for plane in (PullPlane, PlacePlane, PushPlane)}


class NotedLoad(StepLoad):
    """A load that says when its copies are under way."""

    on_begun: Callable[[Check | None], None]

    def begun(self, stands: Check | None = None, copies: Sequence[Copy] = (), ends_at: float = math.inf) -> None:
        super().begun(stands, copies, ends_at)
        self.claimed |= ends_at < math.inf  # as the engine does with one that ends soon
        self.on_begun(stands)


class NoWaker(Waker):
    """Wakes nobody: no thread sleeps here. It makes no call of the system."""

    def __init__(self) -> None:
        self.fd = WAKER_FD

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Node:
    """One process: one rank of one engine, from its start to its end.

    ``finished``, ``freed``, ``told``: called with what the rank reports. ``begun``: called when the copies of a load
    inside a step are under way.
    """

    def __init__(
        self,
        network: Network,
        settings: Settings,
        form: Form,
        engine_id: str,
        tp_rank: int,
        address: tuple[str, int],
        planes: Sequence[str],
        slow: float,
    ) -> None:
        self.network, self.timeline, self.tp_rank = network, network.timeline, tp_rank
        self.number = network.new_number()
        self.name = f"{engine_id}.{tp_rank}"
        self.alive, self._stands_still_until = True, 0.0
        self._changed = threading.Condition()
        self.finished: Callable[[Node, Load, bool], None]
        self.freed: Callable[[Node, str], None]
        self.begun: Callable[[Node, Load, Check | None], None]
        self.told: Callable[[Node, str, LookupResult], None]
        info = RankInfo(engine_id=engine_id, tp_rank=tp_rank, tp_size=form.tp_size, pp_rank=0, pp_size=1, model=MODEL)
        self.copies = SimCopies(self.timeline, slow)
        self.pages = Pages(form, tp_rank, info, self.copies)
        incarnation = self.timeline.rng.randbytes(16)
        context = RankContext(
            settings,
            engine_id,
            incarnation,
            MODEL,
            self.pages.caches,
            KEYS,
            log=RateLimitedLog(logging.getLogger("vllm.kvferry.peer"), 0.0, max_lines=1 << 62),
            clock=self.timeline.clock,
        )
        context.dialer.close()
        dialer: Any = SimDialer(network, self)
        context.dialer = dialer
        context.planes = [PLANES[name](self) for name in planes]
        self.context = context
        self.address = RankAddress(0, tp_rank, *address, incarnation)
        self.listener = cast(Any, SimListener(network, self, address))
        self._clock = RunningClock(self.timeline.clock)
        self.thread = TransferThread(context, self.listener, self._clock)
        self.thread.waker.close()
        self.thread.waker = NoWaker()
        self.copies.on_done = self.wake
        self.prefills = PrefillEvents(
            self.copies,
            self.pages.caches.geometry,
            lambda: self.wake() if producer_of(self).reads_wait else None,
            lambda: self.wake() if producer_of(self).answers_wait else None,
            self.timeline.clock,
        )
        self._turn_at = float("inf")
        self._events: list[float] = []  # when the timeline calls ``_look``, the next time at the end
        self._busy_turns = 0
        network.hosts[self.number] = self
        self._turn_in(0.5 * TICK_SECONDS * self.timeline.rng.random())

    def post(self, plan: StepPlan) -> None:
        """The engine posts the work of a step."""
        if self.alive:
            loads = [NotedLoad(load, self._changed, load.now) for load in plan.loads]
            for load in loads:
                load.on_begun = partial(self.begun, self, load.load)
            for active in consumer_of(self).loads.running if plan.cancels else ():
                if active.load.now and active.load.request_id in plan.cancels:  # else nobody cancels it
                    StepOutcome([active.posted], lambda: True, lambda: None).give_up()
            self.prefills.take_back(plan)
            # Plans come at any time here. Those without chunks begin no step while one is computed.
            begins = bool(plan.prefill_chunks) or not self.prefills.under_way
            step = self.prefills.begin_step(plan) if begins else None
            self.thread.post(PostedPlan(plan, loads, step=step))
            if plan.wakes_thread:
                self.wake()

    # --- turns ----------------------------------------------------------------------------------------------------

    def mark(self, what: object) -> None:
        """A socket is readable, or a plane has an event."""
        if self.alive:
            self.thread.mark_ready(what)
            self._turn_in(TURN_SECONDS)

    def wake(self) -> None:
        if self.alive:
            self._turn_in(TURN_SECONDS)

    def stand_still(self, seconds: float) -> None:
        """The process gets no time of its host's cores."""
        self._stands_still_until = self.timeline.now + seconds

    def break_plane(self, which: float) -> bool:
        """One channel of this process breaks; the control connections stand. Whether there was one."""
        ends = [end for plane in self.context.planes for end in getattr(plane, "ends", ())]
        if not self.alive or not ends:
            return False
        end = ends[int(which * len(ends))]
        self.network.fault("data plane broken", f"{end.plane.name} of {self.name}")
        end.broke("planted")
        return True

    def _turn_in(self, seconds: float) -> None:
        at = self.timeline.now + seconds
        if at < self._turn_at:
            self._turn_at = at
            self._look_by(at)

    def _look_by(self, at: float) -> None:
        """Most turns come before the end of a sleep, so an event that is to come serves the next sleep too."""
        if not self._events or at < self._events[-1]:
            self._events.append(at)
            self.timeline.at(at, self._look)

    def _look(self) -> None:
        self._events.pop()
        if not self.alive:
            return
        if self.timeline.now < self._turn_at:
            self._look_by(self._turn_at)
        else:
            self._turn()

    def _turn(self) -> None:
        self._turn_at = float("inf")
        if self.timeline.now < self._stands_still_until:
            self._turn_in(self._stands_still_until - self.timeline.now + TURN_SECONDS)
            return
        busy = self.thread.turn(self._clock.turn())
        self._take()
        if busy:
            self._busy_turns += 1
            if self._busy_turns > MAX_BUSY_TURNS:
                raise Violation(f"{self.name} is busy for {MAX_BUSY_TURNS} turns and does not sleep")
            self._turn_in(TURN_SECONDS)
        else:
            self._busy_turns = 0
            seconds = self.thread.sleep_seconds
            self._clock.sleeps(seconds)
            self._turn_in(seconds)

    def _take(self) -> None:
        results = self.thread.results
        if not results.ready.is_set():
            return
        results.ready.clear()
        for finished in results.take(results.loads):
            self.finished(self, finished.load, finished.end is not None and not finished.end.failed)
        for request_id in results.take(results.leases):
            self.freed(self, request_id)
        for request_id, result in results.take(results.lookups):
            self.told(self, request_id, result)

    # --- the end --------------------------------------------------------------------------------------------------

    def kill(self, *, silently: bool = False) -> None:
        """The process ends at once, without a word. ``silently``: its host does."""
        if not self.alive:
            return
        self.timeline.note(f"{self.name} is killed{' with its host' if silently else ''}")
        self._end()
        board = board_of(self.thread)  # no other process opens a dead process's descriptor
        os.close(board.fd)
        board.fd = -1
        for link in consumer_of(self).links:  # the system unmaps what a dead process has mapped
            link.board = None
        self.network.ended(self, silently=silently)

    def close(self) -> None:
        """The engine shuts down in order."""
        if not self.alive:
            return
        self.timeline.note(f"{self.name} closes")
        with patch("kvferry.connector.prefill_side.serve.CLOSING_SECONDS", 0.0):
            self.thread.shut()
        for posted in plans_of(self).posted:  # that have not begun: the worker half reports their loads as failed
            for load in posted.loads:
                self.thread.results.finished(load, LOST)
        self._take()
        self._end()
        self.network.ended(self, silently=False)

    def _end(self) -> None:
        self.alive = self.copies.alive = False
        self.thread.waker.close()
        self.network.hosts.pop(self.number, None)
        address = self.listener.address
        if self.network.listeners.get(address) is self.listener:
            del self.network.listeners[address]

    # --- tables ---------------------------------------------------------------------------------------------------

    def overdue(self) -> Iterator[str]:
        """What should have ended by its deadline."""
        if self.timeline.now < self._stands_still_until + 1.0:
            return
        late = self._clock.now - 5 * TICK_SECONDS
        consumer, producer = consumer_of(self), producer_of(self)
        for load in consumer.loads.running:
            if load.state is not FetchState.DRAINING and min(load.deadline, load.end) < late:
                yield f"load {load.load.request_id}, {load.state.value}, by {late - load.deadline:.3f} s"
        for link in consumer.links:
            if link.deadline < late:
                yield f"link to {link.name}, {link.phase.value}"
        for lookup in (*consumer.lookups.open.values(), *consumer.lookups.left):
            if lookup.due < late:
                yield f"question of {lookup.wanted.request_id}, {lookup.phase.value}, by {late - lookup.due:.3f} s"
        waiting = [(f"renewal of {each.token.hex()[:8]}", each.renew_at) for each in consumer.renewals.kept.values()]
        waiting += [(f"lease {each.request_id}", each.deadline) for each in leases_of(producer).values()]
        waiting += [(f"held {type(each.request).__name__}", each.deadline) for each in producer.waiting.values()]
        yield from (what for what, deadline in waiting if deadline < late)

    def left(self) -> Iterator[str]:
        """What is still in a table."""
        consumer, producer = consumer_of(self), producer_of(self)
        reads, lookups, sends = consumer.reads, consumer.lookups, sends_of(producer)
        tables: dict[str, Any] = {
            "loads": [f"{each.load.request_id} {each.story()}" for each in consumer.loads.running],
            "reads": [f"{r.number} {r.story()} {sorted(r.tags)}" for r in reads.by_number.values()],
            "writes": reads.writes,
            "messages": reads.arrived,
            "kept leases": consumer.renewals.kept,
            "renewals": consumer.renewals.to_renew,
            "links": [f"{link.name} {link.story()}" for link in consumer.links],
            "leases": [f"{held.request_id} {held.state.value}" for held in leases_of(producer).values()],
            "prompts that are computed": prompts_of(producer),
            "steps that compute them": producer.steps.flights,
            "reads that wait for them": sends.waiting,
            "names": producer.prompts.by_name,
            "lookups": [each.phase.value for each in (*lookups.open.values(), *lookups.left)],
            "early requests": producer.waiting.values(),
            "messages that have arrived": producer.arrived,
            "outgoing reads": sends.turns,
            "live reads": sends.live.values(),
            "draining reads": sends.draining,
            "posted grants": board_of(producer).posted,
            "sessions": [session.engine_id for session in sessions_of(producer).values()],
            "commands": plans_of(self).posted,
            "leases that are computed": plans_of(self).computing,
            "peers": self.listener.peers,
            "reads of pages": [use for use in self.pages.reads if use.copy is None or not use.copy.done],
            "writes of pages": [use for use in self.pages.writes if use.copy is None or not use.copy.done],
        }
        for plane in self.context.planes:
            tables[f"channels of {plane.name}"] = getattr(plane, "ends", ())
            for name in ("send_pool", "recv_pool"):
                pool = getattr(plane, name, None)
                tables[f"slots of {plane.name}, {name}"] = () if pool is None else range(pool.capacity - pool.free)
        for name, table in tables.items():
            if table:
                yield f"{len(table)} {name}: {', '.join(map(str, list(table)[:3]))}"
