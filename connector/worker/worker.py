"""The worker half: one rank's caches, its transfer thread, and the results of each step. No vLLM.

The engine's thread calls in here. These calls may block: ``register`` at start-up, ``unregister`` and ``restore``
around the engine's sleep, ``close`` at the end, ``post`` for ``BEGIN_SECONDS``, ``join`` and ``begin_step`` until the
copies are under way with which the step computes (in host memory until they have ended), and ``take_results`` and
``look_up`` for a moment, in an engine that computes nothing.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from kvferry.connector.config import Settings, load_keys
from kvferry.connector.geometry.engine_types import LayerGroup, RankInfo
from kvferry.connector.geometry.regions import NO_DRAFTS, ElementOrder
from kvferry.connector.pages.copies import Copies, DeviceEvent
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.step_loads.step_hold import StepHold
from kvferry.connector.step_loads.step_loads import StepLoad, StepLoads, StepOutcome
from kvferry.connector.wire.messages import MAX_REQUEST_BYTES
from kvferry.connector.wire.metrics import Figures, rank_stats
from kvferry.connector.wire.step_plan import (
    LOST,
    LoadEnd,
    LookupResult,
    PromptLookup,
    RankAddress,
    StepPlan,
    StepResults,
    by_region,
)
from kvferry.connector.wire.transfer_estimate import UNKNOWN, EstimateKey, TransferEstimate
from kvferry.connector.worker.loop import PostedPlan, TransferThread
from kvferry.connector.worker.prefill_events import PrefillEvents
from kvferry.connector.worker.worker_setup import bind_caches, make_planes
from kvferry.transport.control.listener import Listener
from kvferry.transport.errors import TransportError
from kvferry.transport.host import AllowedPeers, raise_file_limit
from kvferry.transport.tracing import Tracer

logger = logging.getLogger("vllm.kvferry.worker")

MAX_EVENTS = 64
"""Events that are kept. A lease lags behind the step that computed it by one step for each pipeline stage, and by one
more with asynchronous scheduling."""
IDLE_WAIT_SECONDS = 5e-3
"""How long a step that computes nothing waits for a load to end, or for P's answer; 1 GiB takes less. Without the wait
the engine's thread would spin in Python, and take the interpreter and a core from the transfer thread. A new request
may wait as long; twice as long where a load is to be reported by then."""
UNREGISTER_SECONDS = 30.0
"""How long ``unregister`` waits for the end of the transfer thread. It takes milliseconds; a data plane
with messages in flight to a peer that does not read takes some seconds."""
ASLEEP = "its KV caches are unmapped, the engine sleeps"


_Registered = tuple[Mapping[str, torch.Tensor], int | None, ElementOrder | None, Mapping[str, str]]
"""The arguments of ``register``."""


class WorkerHalf:
    """One rank. ``register`` starts it, ``close`` ends it. Between ``unregister`` and ``restore`` it touches no page of
    the caches: what it is asked for fails, and is reported."""

    def __init__(
        self,
        settings: Settings,
        info: RankInfo,
        groups: Sequence[LayerGroup],
        *,
        loads_fail_requests: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        """``info``: this rank. ``groups``: the layers whose caches are handed over. ``loads_fail_requests``: a load
        that fails ends its request, so a step gives up no load that may succeed. ``tracer``: takes the spans of this
        rank; ``close`` closes it."""
        self._settings, self._info, self._groups, self._tracer = settings, info, tuple(groups), tracer
        self._allowed_peers = AllowedPeers(settings.allowed_peers)
        self._tables: tuple[int, ...] = ()  # the block table of each region
        self._registered: _Registered | None = None
        self._asleep = False
        self._transfer_thread: TransferThread | None = None
        self._copies: Copies  # of the caches that are registered
        self._address: RankAddress | None = None
        self._decode_engine = bytes(16)
        self._loads = StepLoads()
        self._joined: tuple[int, list[StepLoad]] = (0, [])  # by the last step that has joined loads
        self._lead = -math.inf  # of the last plan
        self._estimates: dict[EstimateKey, TransferEstimate] = {}
        self._events: deque[tuple[int, DeviceEvent]] = deque(maxlen=MAX_EVENTS)
        self._idle = self._waited = False
        self._awaited: set[str] = set()  # requests whose P this rank asks for their lease
        self._prefix_step = -1  # the last step whose plan has changed which prefixes D may read
        self.prefills: PrefillEvents | None = None
        """What the engine says about prompts that it computes; ``None`` before ``register``."""
        self.stats = rank_stats(f"pp{info.pp_rank} tp{info.tp_rank}")
        """Of all lives of this rank."""
        self._foresees = not loads_fail_requests
        more_patience = settings.ask_hold_seconds if loads_fail_requests else 0.0
        self.step_hold = StepHold(self.stats, more_patience, self._cancel_late)
        """The wait of a step for the loads that it computes with."""

    # --- start and end ------------------------------------------------------------------------------------------

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int | None = None, places: ElementOrder | None = None,
        drafts: Mapping[str, str] = NO_DRAFTS,
    ) -> None:  # fmt: skip
        """Take the caches that the engine allocated, and start to serve. ``kv_caches``: by layer name,
        ``[B, H, N, C]`` or ``[B, N, C]``. ``num_blocks``: manager blocks, where known. ``places`` and ``drafts``: the
        order inside packed blocks, and the layers of a model that drafts, as ``regions`` takes them.

        Raises:
            GeometryError: caches of a form that is not carried, or on a device on which kernels do not run.
            ConfigError: the control port cannot be bound, or the data plane that the settings name cannot be used.
            PlaneUnavailableError: the rank can have no data plane.
        """
        self.unregister()  # where caches were registered before
        self._registered = kv_caches, num_blocks, places, drafts
        self._start(*self._registered)
        self._asleep = False

    def _start(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int | None, places: ElementOrder | None,
        drafts: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Begin a life of this rank: a new incarnation, at a port that may be another one."""
        settings, info = self._settings, self._info
        caches, self._tables = bind_caches(settings, info, self._groups, kv_caches, num_blocks, places, drafts)
        self._copies = caches.copies
        raise_file_limit()
        keys = load_keys(settings)
        port = settings.side_channel_port and settings.side_channel_port + info.port_offset
        with ExitStack() as undo:  # an open socket would keep the process from ending
            undo.callback(caches.copies.close)
            listener = Listener(settings.side_channel_host, port, keys=keys, max_message_bytes=MAX_REQUEST_BYTES)
            undo.callback(listener.close)
            rank_context = RankContext(settings, info.engine_id, secrets.token_bytes(16), info.model, caches, keys)
            undo.callback(rank_context.dialer.close)
            rank_context.allowed_peers = self._allowed_peers
            rank_context.stats, rank_context.tracer = self.stats, self._tracer
            self.stats.new_life()
            rank_context.planes, rank_context.missing_planes = make_planes(settings, caches)
            thread = self._transfer_thread = TransferThread(rank_context, listener)
            undo.pop_all()
        self._address = RankAddress(
            info.pp_rank, info.tp_rank, settings.advertised_host, listener.port, rank_context.incarnation,
            keys.fingerprint,
        )  # fmt: skip
        self.prefills = PrefillEvents(caches.copies, caches.geometry, thread.step_advanced, thread.step_over)
        thread.start()
        logger.info(
            "kvferry: rank pp%d tp%d serves %d cache region(s) at %s, key %s, data planes %s%s",
            info.pp_rank, info.tp_rank, len(caches.views), listener.endpoint, keys.fingerprint,
            ", ".join(plane.name for plane in rank_context.planes),
            "".join(f"; no {name}: {why}" for name, why in rank_context.missing_planes.items())
            + "".join(f"; {p.name} only as decode: {p.cannot_serve}" for p in rank_context.planes if p.cannot_serve),
        )  # fmt: skip

    def unregister(self) -> None:
        """End every use of the caches' pages; the engine unmaps them after this call. Idempotent.

        First all posted grants are withdrawn, so that no D accepts what it reads from now on. Then all loads are
        cancelled, all leases end, the copies under way end, and every D is told that this life of the rank is over.
        Loads that have not been reported fail, also those that have ended: their blocks are lost.

        Raises:
            TransportError: something may still use the pages; the engine must not unmap them.
        """
        thread = self._transfer_thread
        if thread is None or self._asleep:
            return
        thread.close(UNREGISTER_SECONDS, "the engine goes to sleep")
        if thread.alive:
            raise TransportError(
                f"the transfer thread has not ended after {UNREGISTER_SECONDS:g} s, and may use the KV caches' pages: "
                "they must stay mapped"
            )
        self._copies.synchronize()
        self._asleep, self._address = True, None
        self._loads.end_all(LoadEnd("cancelled"))
        logger.info("kvferry: rank pp%d tp%d sleeps: nothing is handed over", self._info.pp_rank, self._info.tp_rank)

    def restore(self, kv_caches: Mapping[str, torch.Tensor] | None = None) -> None:
        """Serve again, after ``unregister``. Peers know nothing of this life of the rank: the scheduler half must get
        the new ``address``. ``kv_caches``: ``[B, H, N, C]`` or ``[B, N, C]``, where they are not the tensors that
        ``register`` got. Raises as ``register``. Idempotent."""
        if not self._asleep:
            return
        assert self._registered is not None
        if kv_caches is not None:
            self._registered = kv_caches, *self._registered[1:]
        self._start(*self._registered)
        self._asleep = False

    def change_model(self, model: Mapping[str, str]) -> None:
        """The engine has other weights: from now on peers compare ``model``. All leases end, and what is being loaded
        fails: no KV of the former weights is handed over or loaded. The engine gives up by itself what it has cached,
        and what it was offered: ``SchedulerHalf.reset_caches``. It computes nothing meanwhile."""
        self._info = replace(self._info, model=model)
        if self._transfer_thread is not None and not self._asleep:
            self._transfer_thread.change_model(model)

    @property
    def address(self) -> RankAddress | None:
        """Where peers reach this rank; ``None`` before ``register``, and between ``unregister`` and ``restore``."""
        return self._address

    @property
    def rank_context(self) -> RankContext | None:
        """What the parts of this rank share; ``None`` before ``register``."""
        return None if self._transfer_thread is None else self._transfer_thread.rank_context

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._transfer_thread is not None:
            self._transfer_thread.close()
        if self._tracer is not None:
            self._tracer.close()

    # --- every step ---------------------------------------------------------------------------------------------

    def take_stats(self) -> Figures | None:
        """The metrics of this rank since the last call; ``None`` where there are none."""
        return self.stats.take()

    def post(self, plan: StepPlan) -> None:
        """Start a step's work; must come before the engine runs it. ``begin_step`` and ``take_outcome`` follow. Waits
        up to ``BEGIN_SECONDS`` until the copies are under way with which the step computes."""
        thread = self._transfer_thread
        assert thread is not None and self.prefills is not None, "caches are registered before the first step"
        self._decode_engine, self._idle, self._waited = plan.decode_engine, plan.idle, self._waited and plan.idle
        self._copies.idle, self._lead = plan.idle, plan.lead
        if plan.nothing and not self.prefills.busy:
            self.step_hold.outcome = None
            thread.step_posted()
            return
        if plan.offers or plan.reused:
            self._update_prefixes(plan)
        ours, hold = by_region(plan, self._tables), self.step_hold
        joined = self.join(plan) if plan.joins else []
        loads = self._loads.post(ours.loads, plan.leases)
        inside = [load for load in loads if load.claimed] if loads else []
        hold.outcome = outcome = self._outcome([*inside, *joined]) if inside or joined else None
        if (plan.lookups or plan.left) and self._info.tp_rank == self._info.pp_rank == 0:
            self._awaited.difference_update(left.request_id for left in plan.left)
            self._awaited.update(wanted.request_id for wanted in plan.lookups if wanted.ended is None)
        event = self._record_event(plan)
        computed = [self._computed(lease.step) for lease in plan.leases] if plan.leases else ()
        step = self.prefills.begin_step(ours) if ours.prefill_chunks or self.prefills.busy else None
        thread.post(PostedPlan(ours, loads, event, computed, step, outcome))
        if plan.lead > 0:  # they can be reported with this step, if their copies are under way by then
            inside += [one for one in loads if one.load.seconds <= plan.lead and not one.load.step_tokens]
        if inside:
            hold.wait_begun(self._outcome(inside))

    def _outcome(self, loads: Sequence[StepLoad]) -> StepOutcome:
        thread = self._transfer_thread
        assert thread is not None
        return StepOutcome(loads, lambda: thread.alive, thread.waker.wake)

    def join(self, plan: StepPlan, *, others: bool = True) -> list[StepLoad]:
        """Have all work that the device gets from now on wait for the loads of ``plan.joins``; before it gets work on
        new blocks, of which some may have been theirs. ``others``: the step computes for other requests than theirs, or
        not for all of these: one may have left, and others have its blocks. Then block until their copies are under
        way, or nothing writes the blocks any more; else ``begin_step`` blocks for it. Once for each plan."""
        if plan.step != self._joined[0]:
            joined = self._loads.join(plan.joins)
            self._joined = plan.step, joined
            outcome = self._outcome(joined)
            if others and not self.step_hold.hold(outcome):
                outcome.ends()
            outcome.make_engine_wait(self._copies)
        return self._joined[1]

    def take_back(self, plan: StepPlan) -> None:
        """The engine takes blocks back, of prompts that it computes (``plan.stops``) and of prefixes that D may read
        (``plan.reused``). Must come before the device gets work on these blocks; ``post`` may come too late for that.
        """
        if self.prefills is not None:
            self.prefills.take_back(plan)
        if plan.reused:
            self._update_prefixes(plan)

    def _update_prefixes(self, plan: StepPlan) -> None:
        """Once for each plan."""
        thread = self._transfer_thread
        if plan.step != self._prefix_step and thread is not None:
            self._prefix_step = plan.step
            if thread.prefixes.update(plan):
                thread.wake()

    def _record_event(self, plan: StepPlan) -> DeviceEvent | None:
        """The work that the device was given before this step, where a load of the plan waits for it, or a lease of
        this plan or of a later one. With steps in flight a lease comes two steps after its prompt was computed. By an
        event of its own plan it would wait for the step between too, so the event is recorded before that step."""
        if not (plan.after_prefill or plan.leases or any([load.behind for load in plan.loads])):
            return None
        event = self._copies.record_event()
        if event is not None:
            self._events.append((plan.step, event))
        return event

    def _computed(self, step: int) -> DeviceEvent | None:
        """The first event that was recorded after a step was given to the device, so that it passes after the step.
        One was recorded for the lease's own plan at the latest."""
        return next((event for number, event in self._events if number > step), None)

    def _cancel_late(self, late: tuple[str, ...]) -> None:
        assert self._transfer_thread is not None
        self._transfer_thread.post(PostedPlan(StepPlan(decode_engine=self._decode_engine, cancels=late)))

    def begin_step(self) -> None:
        """Hold the step back until its forward may begin."""
        if (outcome := self.step_hold.outcome) is not None:
            self.step_hold.hold(outcome)
            outcome.make_engine_wait(self._copies)

    def take_outcome(self) -> StepOutcome | None:
        """What becomes of the loads that this step computes with; ``None`` where there are none. Must be final before
        the engine uses what the step has computed."""
        outcome, self.step_hold.outcome = self.step_hold.outcome, None
        return outcome

    @property
    def has_news(self) -> bool:
        """Whether ``take_estimates``, ``take_outcome`` or ``take_lookups`` has something to return."""
        thread, posted = self._transfer_thread, self.step_hold.outcome is not None
        return posted or bool(self._estimates) or (thread is not None and bool(thread.results.lookups))

    def take_estimates(self) -> dict[EstimateKey, TransferEstimate]:
        """How long hand-overs took whose results were taken since the last call, the last one from each engine."""
        estimates, self._estimates = self._estimates, {}
        return estimates

    def take_lookups(self) -> dict[str, LookupResult]:
        """The last word of P since the last call on each lookup. Only the first rank of an engine has any."""
        if self._transfer_thread is None:
            return {}
        results = self._transfer_thread.results
        told = dict(results.take(results.lookups))
        self._awaited.difference_update([name for name, result in told.items() if not result.known])
        return told

    def look_up(self, wanted: PromptLookup | None) -> dict[str, LookupResult] | None:
        """Ask at once, where something is ``wanted`` that was not asked for, and wait for an answer as a step does that
        computes nothing, which need not wait then. Returns what ``take_lookups`` does; ``None``: there is nobody who
        asks."""
        thread = self._transfer_thread
        if thread is None or not thread.alive:
            return None
        if wanted is not None:
            self._awaited.add(wanted.request_id)
            thread.post(PostedPlan(StepPlan(decode_engine=self._decode_engine, lookups=(wanted,))))
        thread.results.wait(IDLE_WAIT_SECONDS)
        self._waited = True
        return self.take_lookups()

    def take_results(self) -> StepResults:
        """What ended since the last call, and the loads whose end is near. In a step that computes nothing, wait for a
        moment until a load ends or should, or P answers; not where ``look_up`` has just waited."""
        thread = self._transfer_thread
        if thread is None:
            return StepResults()
        if self._idle:
            waited, self._waited = self._waited, False
            if not waited and (self._loads.awaits_load or self._awaited):
                due = self._loads.due(self._lead, foresees=self._foresees) - time.monotonic()
                thread.results.wait(max(0.0, min(IDLE_WAIT_SECONDS, due)))
        results = thread.results
        alive = thread.alive  # before its reports are taken, so that none is lost
        if results.any:
            for request_id in results.take(results.leases):
                self._loads.lease_freed(request_id)
            for load in results.take(results.loads):
                self._loads.load_ended(load)
                source = load.load.peer.engine_id, self._info.tp_rank
                if self._estimates.get(source) != UNKNOWN:  # a fast hand-over does not outweigh a failed one
                    self._estimates[source] = load.estimate
        if alive and self._loads.by_request:
            self._loads.report_early(self._lead, foresees=self._idle and self._foresees)
        elif not alive and (lost := self._loads.end_all(LOST)):
            level, why = (logging.WARNING, ASLEEP) if self._asleep else (logging.ERROR, "the transfer thread has ended")
            logger.log(level, "kvferry: %s; loads that fail and leases that end: %d", why, lost)
        return self._loads.take_results()
