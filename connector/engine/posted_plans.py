"""The step plans that the engine has posted: each is a list of commands for the two halves of the transfer thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest

import msgspec

from kvferry.connector.decode_side.consumer import Consumer
from kvferry.connector.decode_side.report import StepLoadListener
from kvferry.connector.engine.results import Results
from kvferry.connector.pages.computed_steps import ComputedStep
from kvferry.connector.pages.copies import DeviceEvent
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.prefill_side.serve import Producer
from kvferry.connector.wire.step_plan import LeaseGrant, Load, PrefillStop, StepPlan

logger = logging.getLogger("vllm.kvferry.transfer_thread")


class PostedPlan(msgspec.Struct, frozen=True):
    """The arguments of ``TransferThread.post``."""

    plan: StepPlan
    event: DeviceEvent | None = None
    computed: Sequence[DeviceEvent | None] = ()
    listener: StepLoadListener | None = None
    step: ComputedStep | None = None


class PostedPlans:
    """Runs the plans in the order in which they were posted. Any thread may append to ``posted``; all else is used by
    the transfer thread only.

    ``computing``: the leases of plans that have been run, until the device has filled their blocks.
    """

    def __init__(
        self,
        rank_context: RankContext,
        producer: Producer,
        consumer: Consumer,
        results: Results,
        yield_to_engine: Callable[[StepLoadListener], None],
    ) -> None:
        """``yield_to_engine``: leaves the interpreter to the engine's thread, whose step computes with loads."""
        self._rank_context = rank_context
        self._log = rank_context.log
        self._producer, self._consumer = producer, consumer
        self._results = results
        self._yield_to_engine = yield_to_engine
        self.posted: deque[PostedPlan] = deque()
        self.computing: list[tuple[LeaseGrant, DeviceEvent | None]] = []

    def run(self, now: float) -> None:
        """Run the commands of all plans that have been posted."""
        loads, leases, lookups = self._consumer.loads, self._consumer.leases, self._consumer.lookups
        for _ in range(len(self.posted)):
            posted = self.posted.popleft()
            plan, listener, step = posted.plan, posted.listener, posted.step
            if listener is not None:
                self._results.listen(listener)
            leases.consumer = plan.consumer
            self.computing += zip_longest(plan.leases, posted.computed)
            if plan.queued or plan.prefills or plan.stops:
                self._begin_and_stop(plan, now)
            if plan.ends_leases:
                self._end_leases(now)
            if step is not None:
                self._try("the prompts of a step", partial(self._producer.plan_step, plan.chunks, step, now))
            for request_id in plan.cancels:  # first: they are of earlier plans' loads, also where an id comes again
                self._try(request_id, partial(loads.cancel, request_id, now))
            if lookups.open:
                for keep in plan.keeps:
                    lookups.taken(keep.request_id, now)
            for keep in plan.keeps:
                begin = partial(leases.keep, keep.token, keep.peer, keep.request_id, now, siblings=keep.siblings)
                self._try(keep, begin)
            for left in plan.left:
                self._try(left, partial(lookups.leave, left, now))
            for wanted in plan.rendezvous:
                self._try(wanted, partial(lookups.begin, wanted, now))
            ready = plan.loads if self._copies_wait(posted.event, plan.loads, now) else ()
            alone = len(ready) == 1 and not self.posted
            for load in ready:
                order = listener.layer_order if listener is not None and load.now else ()
                begin = partial(loads.begin, load, now, alone=alone, layer_order=order)
                self._try(load, begin, partial(loads.fail, load, now))
            # Before all other work: the engine waits for these results.
            self._try("copies that have ended", partial(self._consumer.finished_writes, now))
            for release in plan.releases:
                self._try(release, partial(leases.release, release.token, release.request_id, now))
            if listener is not None and not self.posted and not any(p.active for p in self._rank_context.planes):
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
            self._try(prompt, partial(self._producer.named.queue, prompt))
        for stop in plan.stops:
            if stop.token in begun:
                self._try(stop, partial(self._producer.stop_prefill, stop, now))

    def _end_leases(self, now: float) -> None:
        """P: end all leases, also those that are not granted yet."""
        ended, self.computing = self.computing, []
        for grant, _ in ended:
            self._try(grant, partial(self._not_granted, grant, now))
        self._try("the end of all leases", partial(self._producer.end_leases, now))

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
                self._try(load, partial(self._consumer.loads.fail, load, now))
            return False
        return True

    def grant_computed(self, now: float) -> None:
        """Grant the leases whose blocks the device has filled. P holds an ask that arrives before the grant."""
        ready: list[LeaseGrant] = []
        left: list[tuple[LeaseGrant, DeviceEvent | None]] = []
        for grant, computed in self.computing:
            if computed is None or computed.query():
                ready.append(grant)
            else:
                left.append((grant, computed))
        self.computing = left
        for grant in ready:
            self._try(grant, partial(self._producer.grant, grant, now), partial(self._not_granted, grant, now))

    def _not_granted(self, grant: LeaseGrant, now: float) -> None:
        """A grant has raised an error, or must not follow any more: the engine gets its blocks back, and no D may wait
        for them. Where the lease stands all the same, D may read the blocks, and the end of the lease gives them back.
        """
        if self._producer.holds(grant.token):
            return
        self._producer.lose(grant.token)
        self._results.freed(grant.request_id)
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
