"""All loads of a rank of D: their begin, their attempts, and what the table ``load_state.LOAD`` decides."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from kvferry.connector.decode_side.link import Link, Reason
from kvferry.connector.decode_side.links import Links
from kvferry.connector.decode_side.load_state import (
    CANCELLED,
    LOAD,
    TICK,
    LoadEffect,
    LoadEvent,
    LoadEventKind,
    LoadPhase,
    first_attempt,
    next_attempt,
)
from kvferry.connector.decode_side.read import ActiveLoad, Reads
from kvferry.connector.decode_side.renew import LeaseRenewals
from kvferry.connector.decode_side.report import Results
from kvferry.connector.geometry.compatibility import draft_layers
from kvferry.connector.geometry.read_plan import PlannedSpan, check_complete, plan_reads
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.step_loads.step_loads import StepLoad, StepLoadPhase
from kvferry.connector.wire.states import Lifetime
from kvferry.connector.wire.step_plan import LOST, Load, LoadEnd, PeerEngine, RankAddress, RemoteLease, unpack_ids
from kvferry.connector.wire.transfer_estimate import UNKNOWN, TransferEstimate
from kvferry.transport.errors import KVFerryError, TransportError
from kvferry.transport.wake import FAILED_LINES, RateLimitedLog

logger = logging.getLogger("vllm.kvferry.load")

SHORT_NAME = 8
"""Characters of an engine id by which log lines and metrics name the engine."""
MAX_STORIES = 4
"""Reads whose phases are in the log line of a failed hand-over."""

Sources = list[tuple[Link, RankAddress]]


class Loads:
    """All hand-overs into this rank that have begun and are not reported. Used by the transfer thread only."""

    def __init__(
        self,
        rank_context: RankContext,
        links: Links,
        reads: Reads,
        renewals: LeaseRenewals,
        results: Results,
        deadlines: Deadlines[Any],
    ) -> None:
        self._rank_context, self._log = rank_context, rank_context.log
        self._links, self._reads, self._renewals = links, reads, renewals
        self._results, self._deadlines = results, deadlines
        self._drafts = any(region.draft for region in rank_context.caches.geometry.regions)
        self.running: dict[ActiveLoad, None] = {}
        self._failed = RateLimitedLog(logger, per_key=FAILED_LINES)

    # --- commands from the engine -------------------------------------------------------------------------------

    def begin(self, posted: StepLoad, now: float, *, alone: bool = False) -> None:
        """Start a hand-over. ``alone``: no other hand-over is about to begin."""
        load = posted.load
        for lease in _leases(load):
            with suppress(KVFerryError):  # an attempt at this P finds the same
                self._renewals.keep(lease.token, lease.peer, load.request_id, now)
        caches, started = self._rank_context.caches, self._rank_context.clock()
        try:
            ids = [caches.kernel_ids(g, unpack_ids(ids)) for g, ids in enumerate(load.block_ids)]
            for region, (start, stop) in enumerate(load.tokens):
                if stop > start:
                    caches.check_held(region, ids[region], start, stop)
        except KVFerryError as error:
            self._report_failed(posted, Reason("incompatible", str(error)))
            self._release(load, now)
            self._trace(load, started, self._rank_context.clock(), str(error))
            return
        sources = self._sources(load, now)
        peers, planes = 1 + len(load.alternatives), len(self._rank_context.planes)
        count = len(sources) if isinstance(sources, list) else 1
        once = bool(load.prefix)  # the engine computes it sooner than another attempt would bring it
        state = first_attempt(count, peers, planes, self._rank_context.settings, now, inside=load.now, once=once)
        # A step that computes with the load begins once its copies are under way, so this thread waits for none.
        alone = alone and not load.now
        active_load = ActiveLoad(load, posted, Lifetime(LOAD, state, now), started, ids, alone)
        self.running[active_load] = None
        self._deadlines.note(active_load, state.deadline)
        self.give(active_load, self._begin_attempt(active_load, sources, now), now)

    def cancel(self, request_id: str, now: float) -> None:
        """Cancel the loads of a request. They are still reported, once nothing can write their blocks. One that was
        reported early goes on to its end, which is near: a step joins it, and others may have its blocks by then."""
        for active_load in [each for each in self.running if each.posted.request_id == request_id]:
            if active_load.posted.cancellable:
                self.give(active_load, (CANCELLED,), now)

    def fail(self, posted: StepLoad, now: float) -> None:
        """Fail a load whose start raised an error. Copies that have begun must end before it is reported."""
        for active_load in self.running:
            if active_load.posted is posted:
                self.give(active_load, (CANCELLED,), now)
                return
        self._results.finished(posted, LOST)
        self._release(posted.load, now)

    def cancel_all(self, reason: str, now: float) -> None:
        """Cancel every load; those that still run are reported as failed for ``reason``."""
        for active_load in list(self.running):
            self.give(active_load, (replace(CANCELLED, reason=Reason("cancelled", reason)),), now)

    def close(self, now: float) -> None:
        """Forget the loads that are reported, without a wait for the next tick."""
        for active_load in list(self.running):
            self.give(active_load, (TICK,), now)

    # --- the machine --------------------------------------------------------------------------------------------

    def give(self, active_load: ActiveLoad, events: Iterable[LoadEvent], now: float) -> None:
        """Give a load events. What it decides is performed, and may be followed by other events."""
        queue, state = deque(events), active_load.lifetime.state
        if active_load.posted.claimed and not state.inside:
            active_load.lifetime.state = replace(state, inside=True)
        while queue:
            before = active_load.lifetime.state
            effects = active_load.lifetime.step(queue.popleft(), now)
            state = active_load.lifetime.state
            if state.deadline < before.deadline:
                self._deadlines.note(active_load, state.deadline)
            for effect in effects:
                self._perform(active_load, effect, queue, now)
        if active_load.posted.claimed or active_load.load.seconds < math.inf:
            self._report_begun(active_load, now)

    def _perform(self, active_load: ActiveLoad, effect: LoadEffect, queue: deque[LoadEvent], now: float) -> None:
        """Perform an effect, and add the events that follow. After an error in one effect the others are performed all
        the same: a load must be reported, and its lease released."""
        try:
            match effect:
                case LoadEffect.ASK:  # the events before an error count, here and below
                    queue.extend(self._ask(active_load, now))
                case LoadEffect.COMMIT:
                    for read in active_load.reads:
                        if (committed := self._reads.commit(read, now)) is not None:
                            queue.append(committed)
                case LoadEffect.STOP:
                    queue.extend(filter(None, (self._reads.stop(read, now) for read in active_load.reads)))
                case LoadEffect.REPORT:
                    self._report(active_load)
                case LoadEffect.RECORD:
                    self._record(active_load)
                case LoadEffect.RELEASE:
                    self._release(active_load.posted.load, now)
                case LoadEffect.LEAVE:
                    queue.extend(self._leave_attempt(active_load))
                case LoadEffect.BEGIN:
                    queue.extend(self._begin_again(active_load, now))
        except Exception as error:
            name = effect.value
            self._log.exception(name, "kvferry: unexpected error in %s of %s", name, active_load.load.request_id)
            self._rank_context.stats.failed("internal")
            if effect in (LoadEffect.ASK, LoadEffect.COMMIT, LoadEffect.BEGIN):
                queue.append(_failed(Reason("internal", f"{name}: {error!r}")))

    # --- attempts -----------------------------------------------------------------------------------------------

    def _sources(self, load: Load, now: float, *, redial: bool = False) -> Sources | Reason:
        """The ranks of P that an attempt reads from, or why it cannot begin."""
        try:
            if redial:  # it may be that the lease could not be kept before
                self._renewals.keep(load.token, load.peer, load.request_id, now)
            addresses = self._links.source_addresses(load.peer)
            return [(self._links.get(address, now, redial=redial), address) for address in addresses]
        except KVFerryError as error:
            return Reason("peer_lost" if isinstance(error, TransportError) else "incompatible", str(error))

    def _begin_attempt(self, active_load: ActiveLoad, sources: Sources | Reason, now: float) -> list[LoadEvent]:
        if isinstance(sources, Reason):
            return [_failed(sources)]
        for link, address in sources:
            self._reads.new(active_load, link, address, now)
            link.start_handshake(now)
        return [event for read in active_load.reads if (event := read.link_moved()) is not None]

    def _ask(self, active_load: ActiveLoad, now: float) -> Iterator[LoadEvent]:
        ours, tokens = self._rank_context.caches.geometry, active_load.load.tokens
        try:
            planned = [plan_reads(ours, read.link.theirs, tokens) for read in active_load.reads]
            check_complete(ours, [span for spans in planned for span in spans], tokens)
        except KVFerryError as error:
            yield _failed(Reason("incompatible", str(error)))
            return
        if self._drafts:
            self._clear_drafts(active_load, [span for spans in planned for span in spans])
        for read, spans in zip(active_load.reads, planned, strict=True):
            moved = read.plan(spans, now)
            event = moved or self._reads.ask(read, now)
            if event is not None:
                yield event
                if event.kind is LoadEventKind.FAILED:
                    return

    def _clear_drafts(self, active_load: ActiveLoad, planned: Sequence[PlannedSpan]) -> None:
        """Zero the KV of layers that draft and that P lacks. Else what drafts would attend to the KV of other requests,
        or to bytes that are no numbers, with which a check of drafts by their probabilities may go wrong."""
        caches = self._rank_context.caches
        read = [(item.region, item.layer, item.span.num_layers) for item in planned]
        for region, layer in draft_layers(caches.geometry, read):
            caches.clear(region, layer, active_load.ids[region], *active_load.load.tokens[region])

    def _leave_attempt(self, active_load: ActiveLoad) -> Iterator[LoadEvent]:
        state = active_load.lifetime.state
        reason = state.reason
        assert reason is not None
        if reason.kind == "timeout" and reason.blames == "plane":
            # End the links over which the reads moved no bytes in time: the next attempt, or the next load, takes
            # another data plane. A link over which bytes of other reads still come is kept.
            for read in active_load.reads:
                if read.planned and not read.landed and not self._reads.others_move(read):
                    read.link.lose_plane(reason.text)
        if state.phase is LoadPhase.WAITING and not active_load.posted.retries():  # a step computes with it
            yield replace(CANCELLED, reason=reason)
        elif state.phase is LoadPhase.WAITING:
            for read in active_load.reads:
                self._reads.end(read)
            active_load.reads = []
            self._rank_context.stats.retried(reason.kind, _short_name(active_load.load.peer))
            load = active_load.posted.load
            peer = _short_name(_at(load, state.peer).peer)
            text = "kvferry: hand-over of %s is tried again, attempt %d, at %s: %s"
            self._log.info("retry", text, load.request_id, state.number + 1, peer, reason)

    def _begin_again(self, active_load: ActiveLoad, now: float) -> list[LoadEvent]:
        """Begin the next attempt. Of the last one nothing writes D's pages any more."""
        before = active_load.lifetime.state
        active_load.load = _at(active_load.posted.load, before.peer)
        sources = self._sources(active_load.load, now, redial=True)
        state = next_attempt(before, len(sources) if isinstance(sources, list) else 1, now)
        active_load.lifetime = Lifetime(LOAD, state, now)
        active_load.alone = False
        active_load.nbytes, active_load.copied_at, active_load.granted_at = 0, 0.0, 0.0
        self._deadlines.note(active_load, state.deadline)
        return self._begin_attempt(active_load, sources, now)

    # --- the end ------------------------------------------------------------------------------------------------

    def _report(self, active_load: ActiveLoad) -> None:
        active_load.ended_at = self._rank_context.clock()
        try:
            if (reason := active_load.lifetime.state.reason) is None:
                self._report_succeeded(active_load)
            else:
                if self._drafts:
                    self._rank_context.caches.copies.synchronize()  # zeros under way: others may get the blocks now
                self._report_failed(active_load.posted, reason, active_load)
        finally:
            for read in active_load.reads:
                self._reads.end(read)

    def _report_begun(self, active_load: ActiveLoad, now: float) -> None:
        """Report, once, that all copies are under way: the engine can wait for them. Where P computes the prompt,
        report before when that should be."""
        posted, state = active_load.posted, active_load.lifetime.state
        if state.phase is not LoadPhase.MOVING or posted.life.phase is not StepLoadPhase.POSTED:
            return
        load, here = posted.load, self._rank_context.clock()
        if not all(read.all_begun for read in active_load.reads):
            if load.step_tokens:
                before, left = posted.ends_at, max(read.seconds_left(now) for read in active_load.reads)
                posted.ends_at = here + left
                if posted.ends_at < before == math.inf:
                    self._results.ready.set()  # a thread that waits may have to wait for less
            return
        reads = [read for read in active_load.reads if read.planned]
        under_way = [write.copy for read in reads for write in read.writes]
        # Where P computes the prompt, nobody has foreseen the end of a pull.
        unknown = load.step_tokens and any(read.link.pulls for read in reads)

        def ended_well() -> bool | None:
            if not all(copy.done for copy in under_way):
                return None
            return not any(copy.error for copy in under_way) and all(read.grant_stands for read in reads)

        check = ended_well if all(read.fence == "posted" for read in reads) else None
        posted.begun(check, under_way, math.inf if unknown else here + load.seconds)

    def _report_succeeded(self, active_load: ActiveLoad) -> None:
        """The load has ended, and its tokens are in the blocks."""
        load, tokens, seconds = active_load.load, active_load.load.num_tokens, active_load.seconds
        posted = all([read.fence == "posted" for read in active_load.reads if read.planned])
        waited = max(0.0, active_load.granted_at - active_load.started)
        first = active_load.number == 1
        estimate = TransferEstimate(seconds - waited, max(1, tokens)) if posted and first else UNKNOWN
        end = LoadEnd(plane=active_load.planes, milliseconds=seconds * 1e3, peer=_short_name(load.peer))
        try:
            # Before the report, so that the engine takes the counts with the load: an idle engine takes no later step.
            self._rank_context.stats.finished(
                nbytes=active_load.nbytes, milliseconds=end.milliseconds, plane=end.plane, tokens=tokens, peer=end.peer
            )
            self._count_streamed(active_load)
        finally:  # a request waits for the report, also after an error of the metrics
            self._results.finished(active_load.posted, end, estimate)

    def _report_failed(self, posted: StepLoad, reason: Reason, active_load: ActiveLoad | None = None) -> None:
        """The load has ended, and its tokens are not in the blocks. ``active_load``: it, if an attempt has begun."""
        load = posted.load
        end = LoadEnd(reason.kind, peer=_short_name((active_load.load if active_load else load).peer))
        try:
            self._rank_context.stats.failed(reason.kind, end.peer)
            if active_load is not None:
                self._count_streamed(active_load)
            stories = "" if active_load is None else f" [{_stories(active_load)}]"
            self._failed.warning(
                reason.kind, "kvferry: hand-over of %s failed, %d tokens not loaded: %s%s",
                load.request_id, load.num_tokens, reason, stories,
            )  # fmt: skip
        finally:  # a request waits for the report; who has it finds the line
            self._results.finished(posted, end)

    def _count_streamed(self, active_load: ActiveLoad) -> None:
        """What it costs D to take blocks for a prompt before P has computed it."""
        load = active_load.posted.load
        if load.found or load.step_tokens:
            blocks = max((len(packed) // 4 for packed in load.block_ids), default=0)
            milliseconds = (self._rank_context.clock() - active_load.started) * 1e3
            self._rank_context.stats.streamed(blocks=blocks, milliseconds=milliseconds)

    def _record(self, active_load: ActiveLoad) -> None:
        reason = active_load.lifetime.state.reason
        del self.running[active_load]
        try:
            if reason is None:
                load, number = active_load.load, active_load.number
                logger.debug(
                    "kvferry: hand-over of %s done: %d tokens, %d bytes in %.2f ms over %s from %s%s%s",
                    load.request_id, load.num_tokens, active_load.nbytes, active_load.seconds * 1e3,
                    active_load.planes, _short_name(load.peer),
                    ", inside the step" if load.now else ", joined by a step" if active_load.posted.claimed
                    else "" if number == 1 else f", attempt {number}",
                    ", from when the prefill engine computed it" if load.step_tokens else "",
                )  # fmt: skip
            error = "" if reason is None else str(reason)
            self._trace(active_load.load, active_load.started, active_load.ended_at, error, active_load)
        finally:
            active_load.reads = []

    def _trace(self, load: Load, begin: float, end: float, error: str, active_load: ActiveLoad | None = None) -> None:
        """Make the span of a hand-over that has ended, where its request is traced."""
        if not load.traceparent:
            return
        attributes: dict[str, str | int] = {
            "kvferry.request_id": load.request_id,
            "kvferry.peer": load.peer.engine_id,
            "kvferry.tokens": max((stop - start for start, stop in load.tokens), default=0),
            "kvferry.inside_step": load.now,
            "kvferry.attempts": 0 if active_load is None else active_load.number,
        }
        if active_load is not None:
            attributes |= {"kvferry.plane": active_load.planes, "kvferry.bytes": active_load.nbytes}
        self._rank_context.record(load.traceparent, "kvferry.handover", begin, end, attributes, error)

    def _release(self, load: Load, now: float) -> None:
        """The request reads no more under any of its leases."""
        for lease in _leases(load):
            try:
                self._renewals.release(lease.token, load.request_id, now)
            except Exception:  # the others hold blocks of P, too
                self._log.exception("release", "kvferry: unexpected error in a release of %s", load.request_id)
                self._rank_context.stats.failed("internal")


def _failed(reason: Reason) -> LoadEvent:
    return LoadEvent(LoadEventKind.FAILED, reason=reason)


def _leases(load: Load) -> tuple[RemoteLease, ...]:
    return RemoteLease(load.token, load.peer), *load.alternatives


def _at(load: Load, peer: int) -> Load:
    """The load from the P engine with this number among those that it names."""
    if peer == 0:
        return load
    lease = load.alternatives[peer - 1]
    return replace(load, token=lease.token, peer=lease.peer)


def _short_name(peer: PeerEngine) -> str:
    return peer.engine_id[:SHORT_NAME]


def _stories(active_load: ActiveLoad) -> str:
    """The phases of the hand-over and of each of its reads, with their times."""
    reads = [f"{read.link.name}: {read.story()}" for read in active_load.reads]
    number = [f"attempt {active_load.number}"] if active_load.number > 1 else []
    return "; ".join([*number, active_load.lifetime.story(), *reads[:MAX_STORIES]])
