"""D's hand-overs: their begin, their attempts, and the effects of the tables ``handover`` and ``load_attempts``.

``source_reads`` does so for the reads of a hand-over.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from kvferry.connector.decode_side import handover, load_attempts
from kvferry.connector.decode_side.active_load import ActiveLoad, SourceRead
from kvferry.connector.decode_side.handover import Reason
from kvferry.connector.decode_side.lease_keeper import LeaseKeeper
from kvferry.connector.decode_side.link import Link
from kvferry.connector.decode_side.link_state import LinkPhase
from kvferry.connector.decode_side.links import Links
from kvferry.connector.decode_side.load_attempts import LoadAttemptsEvent
from kvferry.connector.decode_side.load_reports import LoadReports, short_name
from kvferry.connector.decode_side.receiver import Receiver
from kvferry.connector.decode_side.source_read import CommitWanted, HandoverEnded, NothingToRead, ReadFailed, StopRead
from kvferry.connector.decode_side.source_reads import SourceReads
from kvferry.connector.decode_side.traces import attempt_span, handover_span
from kvferry.connector.geometry.read_plan import check_complete, plan_reads
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.pages.traces import record
from kvferry.connector.wire.states import Lifetime, Tick
from kvferry.connector.wire.step_plan import (
    Load,
    RankAddress,
    unpack_ids,
)
from kvferry.transport.errors import KVFerryError, TransportError

Effect = handover.HandoverEffect | load_attempts.LoadAttemptsEffect
Source = tuple[Link, RankAddress] | Reason
"""A rank of P and the link to it, or why there is none."""


class ActiveLoads:
    """All hand-overs into this rank that have begun and are not reported. Used by the transfer thread only.

    ``running``: two of them may have one request id, see ``FinishedLoad``. ``reads``: their reads. ``later``: what
    follows the reports of loads inside a step; it waits for the next tick.
    """

    def __init__(
        self,
        rank_context: RankContext,
        links: Links,
        receiver: Receiver,
        lease_keeper: LeaseKeeper,
        reports: LoadReports,
    ) -> None:
        self._rank_context = rank_context
        self._log = rank_context.log
        self._links, self._receiver, self._lease_keeper, self._reports = links, receiver, lease_keeper, reports
        settings = rank_context.settings
        self._timeouts = handover.Timeouts(
            settings.handshake_timeout_seconds, settings.transfer_timeout_seconds, settings.handover_timeout_seconds
        )
        self.running: dict[ActiveLoad, None] = {}
        self._deadlines = Deadlines(self._due)
        self.reads = SourceReads(rank_context, receiver, lease_keeper, self._step)
        self.later: deque[Callable[[], None]] = deque()

    # --- begin and end ------------------------------------------------------------------------------------------

    def cancel(self, request_id: str, now: float) -> None:
        """Cancel the loads of a request. They are still reported, once nothing can write their blocks."""
        for active_load in [each for each in self.running if each.load.request_id == request_id]:
            self._give(active_load, handover.CancelLoad(), now)

    def fail(self, load: Load, now: float) -> None:
        """Fail a load whose start raised an error. Copies that have begun must end before it is reported."""
        for active_load in self.running:
            if active_load.posted is load:
                self._give(active_load, handover.CancelLoad(), now)
                return
        self._reports.not_started(load)
        self._release(load, now)

    def begin(self, load: Load, now: float, *, alone: bool = False, layer_order: Sequence[str] = ()) -> None:
        """Start a hand-over. ``alone``: no other hand-over is about to begin. ``layer_order``: see ``ActiveLoad``."""
        with suppress(KVFerryError):  # an attempt at this P finds the same
            self._lease_keeper.keep(load.token, load.peer, load.request_id, now)
        for lease in load.alternatives:
            with suppress(KVFerryError):
                self._lease_keeper.keep(lease.token, lease.peer, load.request_id, now)
        try:
            ids = [self._rank_context.caches.kernel_ids(g, unpack_ids(ids)) for g, ids in enumerate(load.block_ids)]
            for region, (start, stop) in enumerate(load.tokens):
                if stop > start:
                    self._rank_context.caches.check_held(region, ids[region], start, stop)
        except KVFerryError as error:
            self._reports.failed(load, Reason("incompatible", str(error)))
            self._release(load, now)
            span = partial(handover_span, load, [], str(error), self._rank_context.clock())
            record(self._rank_context, load.traceparent, span)
            return
        sources = self._sources(load, now)
        state, effects = handover.begin(len(sources), self._timeouts, now)
        lifetime = Lifetime(handover.HANDOVER, state, now)
        # A step that computes with the load begins once its copies are under way, so this thread waits for none.
        started, alone = self._rank_context.clock(), alone and not load.now
        active_load = ActiveLoad(load, load, lifetime, started, ids, alone, layer_order=layer_order)
        if load.traceparent:
            active_load.phases.append((started, state.phase.value))
        self.running[active_load] = None
        self._deadlines.note(active_load, state.deadline)
        self._begin_attempt(active_load, sources, effects, now)

    def _due(self, active_load: ActiveLoad) -> float:
        if active_load not in self.running:
            return math.inf
        attempts = math.inf if active_load.attempts is None else active_load.attempts.state.due
        return min(active_load.lifetime.state.due, attempts)

    def _sources(self, load: Load, now: float, *, redial: bool = False) -> list[Source]:
        """The ranks of P that an attempt reads from. Where it cannot begin, the reason takes the place of all."""
        try:
            if redial:  # it may be that the lease could not be kept before
                self._lease_keeper.keep(load.token, load.peer, load.request_id, now)
            addresses = self._links.source_addresses(load.peer)
            return [(self._links.get(address, now, redial=redial), address) for address in addresses]
        except KVFerryError as error:
            return [Reason("peer_lost" if isinstance(error, TransportError) else "incompatible", str(error))]

    def _begin_attempt(
        self,
        active_load: ActiveLoad,
        sources: list[Source],
        effects: tuple[handover.HandoverEffect, ...],
        now: float,
    ) -> None:
        """Begin an attempt to read from ``sources``."""
        for number, source in enumerate(sources):
            if isinstance(source, Reason):
                self._step(active_load, handover.SourceFailed(number, source), now)
                return
            link, address = source
            self._receiver.new(active_load, number, link, address, now, self._timeouts.transfer)
            link.start_handshake(now)
        self._perform(active_load, effects, now)
        for read in active_load.reads:
            self.apply_link_phase(read, now)

    def _release(self, load: Load, now: float) -> None:
        """The request reads no more under any of its leases."""
        for token in (load.token, *(lease.token for lease in load.alternatives)):
            try:
                self._lease_keeper.release(token, load.request_id, now)
            except Exception:  # the others hold blocks of P, too
                self._log.exception("release", "kvferry: unexpected error in a release of %s", load.request_id)
                self._rank_context.stats.failed("internal")

    # --- events -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Check the deadlines of the hand-overs, after what was left for this tick."""
        self.catch_up()
        for active_load in self._deadlines.due(now):
            self._give(active_load, Tick(), now)

    def cancel_all(self, reason: str, now: float) -> None:
        """Cancel every load; those that still run are reported as failed for ``reason``."""
        for active_load in list(self.running):
            self._give(active_load, handover.CancelLoad(Reason("cancelled", reason)), now)

    def apply_link_phase(self, read: SourceRead, now: float) -> None:
        """Give a read, or its hand-over, the event of the phase that its link is in."""
        state = read.lifetime.state
        if state.stopped:
            return
        if read.link.phase is LinkPhase.ATTACHED:
            if (misfit := read.misfit()) is not None:
                self.reads.step(read, ReadFailed(misfit), now)
            else:
                self._step(read.active_load, handover.SourceReady(state.source), now)
        elif read.link.phase is LinkPhase.FAILED:
            self.reads.step(read, ReadFailed(read.link.failure), now)

    def _step(self, active_load: ActiveLoad, event: handover.HandoverEvent, now: float) -> None:
        before = active_load.lifetime.state.deadline
        effects = active_load.lifetime.step(event, now)
        if (deadline := active_load.lifetime.state.deadline) < before:
            self._deadlines.note(active_load, deadline)
        if active_load.phases and (phase := active_load.lifetime.state.phase.value) != active_load.phases[-1][1]:
            active_load.phases.append((self._rank_context.clock(), phase))
        if effects:
            self._perform(active_load, effects, now)
        if active_load.load.now:
            self._reports.begun(active_load, self._receiver.copies_of)

    def _give(self, active_load: ActiveLoad, event: handover.CancelLoad | Tick, now: float) -> None:
        """Give a load an event that also concerns it while it waits for its next attempt."""
        attempts = active_load.attempts
        # Before the event: an attempt that fails now is followed a turn later, when the links that it lost have failed.
        waits = attempts is not None and attempts.state.phase is load_attempts.LoadPhase.WAITING
        self._step(active_load, event, now)
        if waits:
            self._step_load(active_load, event, now)

    def _perform(self, active_load: ActiveLoad, effects: tuple[Effect, ...], now: float) -> None:
        """Perform every effect, also after an error in one: a load must be reported, and its lease released."""
        for effect in effects:
            try:
                self._perform_one(active_load, effect, now)
            except Exception as error:
                name = type(effect).__name__
                self._log.exception(name, "kvferry: unexpected error in %s of %s", name, active_load.load.request_id)
                self._rank_context.stats.failed("internal")
                reason = Reason("internal", f"{name}: {error!r}")
                if isinstance(effect, handover.AskSources | handover.CommitSources):
                    self._step(active_load, handover.SourceFailed(0, reason), now)
                elif isinstance(effect, load_attempts.BeginAttempt):
                    self._step_load(active_load, handover.AttemptFailed(reason), now)

    def _perform_one(self, active_load: ActiveLoad, effect: Effect, now: float) -> None:
        match effect:
            case handover.AskSources():
                self._plan_and_ask(active_load, now)
            case handover.CommitSources():
                self._commit(active_load, now)
            case handover.StopSources():
                for read in active_load.reads:
                    self.reads.step(read, StopRead(), now)
            case handover.ReleaseLease():
                self._after_report(active_load, partial(self._release, active_load.posted, now))
            case handover.ReportLoad(reason):
                del self.running[active_load]
                try:
                    if reason is None:
                        self._after_report(active_load, self._reports.succeeded(active_load))
                    else:
                        self._reports.failed(active_load.posted, reason, active_load)
                finally:
                    if active_load.posted.traceparent:
                        self._trace(active_load, reason)
                    for read in active_load.reads:
                        self.reads.step(read, HandoverEnded(), now)
                    # Else the load and its reads refer to each other until Python looks for such garbage, which an
                    # engine may do seldom or never, and keep the board of a P that is long gone.
                    active_load.reads = []
            case handover.AttemptFailed():
                self._step_load(active_load, effect, now)
            case load_attempts.BeginAttempt(source):
                self._begin_again(active_load, source, now)

    # --- attempts -----------------------------------------------------------------------------------------------

    def _step_load(self, active_load: ActiveLoad, event: LoadAttemptsEvent, now: float) -> None:
        """Give a load whose attempt has failed an event. A load that never fails has no such lifetime."""
        load, reads = active_load.posted, active_load.reads
        attempts = active_load.attempts
        if attempts is None:
            peers, planes = 1 + len(load.alternatives), len(self._rank_context.planes)
            end = active_load.lifetime.state.end
            state = load_attempts.first_attempt(peers, planes, end, again=not load.now)
            attempts = active_load.attempts = Lifetime(load_attempts.LOAD_ATTEMPTS, state, now)
        if load.traceparent and isinstance(event, handover.AttemptFailed):
            active_load.ended.append(attempt_span(active_load, str(event.reason), self._rank_context.clock()))
        effects = attempts.step(event, now)
        self._deadlines.note(active_load, attempts.state.due)
        self._perform(active_load, effects, now)
        if not isinstance(event, handover.AttemptFailed):
            return
        self._leave_planes(reads, event.reason)
        if attempts.state.phase is load_attempts.LoadPhase.WAITING:
            for read in reads:
                self.reads.step(read, HandoverEnded(), now)
            self._rank_context.stats.retried(event.reason.kind, short_name(active_load.load.peer))
            number, peer = attempts.state.number, short_name(_at(load, attempts.state.source).peer)
            text = "kvferry: hand-over of %s is tried again, attempt %d, at %s: %s"
            self._log.info("retry", text, load.request_id, number, peer, event.reason)

    def _leave_planes(self, reads: list[SourceRead], reason: Reason) -> None:
        """End the links over which the reads of an attempt moved no bytes in time: the next attempt, or the next load,
        takes another data plane. A link over which bytes of other reads still come is kept."""
        if reason.kind != "timeout" or reason.blames != "plane":
            return
        for read in reads:
            if read.planned and not read.state.landed and not self._receiver.others_move(read):
                read.link.lose_plane(reason.text)

    def _begin_again(self, active_load: ActiveLoad, source: int, now: float) -> None:
        """Begin the next attempt in the place of the last one, of which nothing writes D's pages any more."""
        posted, attempts = active_load.posted, active_load.attempts
        assert attempts is not None
        load = _at(posted, source)
        sources = self._sources(load, now, redial=True)
        state, effects = handover.begin(len(sources), self._timeouts, now, attempts.state.end)
        lifetime = Lifetime(handover.HANDOVER, state, now)
        again = ActiveLoad(
            load, posted, lifetime, active_load.started, active_load.ids, attempts=attempts, ended=active_load.ended
        )
        if load.traceparent:
            again.phases.append((self._rank_context.clock(), state.phase.value))
        del self.running[active_load]
        self.running[again] = None
        self._deadlines.note(again, state.deadline)
        active_load.reads = []  # as after a report
        try:
            self._begin_attempt(again, sources, effects, now)
        except Exception as error:
            self._log.exception(
                "attempt", "kvferry: unexpected error at the start of an attempt of %s", load.request_id
            )
            self._step(again, handover.CancelLoad(Reason("internal", repr(error))), now)

    # --- the effects of hand-overs ------------------------------------------------------------------------------

    def _after_report(self, active_load: ActiveLoad, act: Callable[[], None]) -> None:
        """Do now what no request waits for. Of a load inside a step that stands, do it at the next tick: the engine's
        thread is at work on the step, and needs the interpreter."""
        if active_load.load.now and active_load.lifetime.state.phase is handover.HandoverPhase.DONE:
            self.later.append(act)
        else:
            act()

    def _trace(self, active_load: ActiveLoad, reason: Reason | None) -> None:
        """Record the spans of a load that has ended."""
        if reason is None:
            active_load.ended.append(attempt_span(active_load, "", self._rank_context.clock()))
        load, error, end = active_load.posted, "" if reason is None else str(reason), self._rank_context.clock()
        span = partial(handover_span, load, active_load.ended, error, end)
        self._after_report(active_load, partial(record, self._rank_context, load.traceparent, span))

    def catch_up(self) -> None:
        """Do what was left for the next tick."""
        while self.later:
            try:
                self.later.popleft()()
            except Exception:
                self._log.exception("later", "kvferry: unexpected error after a load was reported")
                self._rank_context.stats.failed("internal")

    def _plan_and_ask(self, active_load: ActiveLoad, now: float) -> None:
        ours, tokens = self._rank_context.caches.geometry, active_load.load.tokens
        try:
            planned = [plan_reads(ours, read.link.theirs, tokens) for read in active_load.reads]
            check_complete(ours, [span for spans in planned for span in spans], tokens)
        except KVFerryError as error:
            self._step(active_load, handover.SourceFailed(0, Reason("incompatible", str(error))), now)
            return
        for read, spans in zip(active_load.reads, planned, strict=True):
            read.plan(spans)
            if read.state.stopped:  # another read has failed
                break
            if not spans:  # this pipeline stage of P holds none of D's layers
                self.reads.step(read, NothingToRead(), now)
            elif not self.reads.use_posted_grant(read, now):
                self.reads.ask(read, now)

    def _commit(self, active_load: ActiveLoad, now: float) -> None:
        for read in active_load.reads:
            self.reads.step(read, CommitWanted(), now)


def _at(load: Load, source: int) -> Load:
    """The load from the P engine with this number among those that it names."""
    if source == 0:
        return load
    lease = load.alternatives[source - 1]
    return replace(load, token=lease.token, peer=lease.peer)
