"""All loads of a rank of D: their begin, their attempts, their end; what the engine, the metrics and the log get."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from kvferry.connector.decode_side.fetch import ATTEMPTS_PER_PEER, Fetch, FetchState, ReadPhase
from kvferry.connector.decode_side.link import Reason
from kvferry.connector.decode_side.links import Links
from kvferry.connector.decode_side.read import Reads
from kvferry.connector.decode_side.renew import LeaseRenewals
from kvferry.connector.decode_side.report import Results
from kvferry.connector.geometry.compatibility import draft_layers
from kvferry.connector.geometry.read_plan import PlannedSpan, check_complete, plan_reads
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.step_loads.step_loads import StepLoad, StepLoadPhase
from kvferry.connector.wire.step_plan import LOST, Load, LoadEnd, PeerEngine, RemoteLease, unpack_ids
from kvferry.connector.wire.transfer_estimate import UNKNOWN, TransferEstimate
from kvferry.transport.errors import KVFerryError, TransportError
from kvferry.transport.limited_log import FAILED_LINES, RateLimitedLog

logger = logging.getLogger("vllm.kvferry.load")

SHORT_NAME = 8
"""Characters of an engine id by which log lines and metrics name the engine."""
CANCELLED = Reason("cancelled", "the engine gave the request up")
_CONNECTING, _READING, _COMMITTING, _DRAINING, _WAITING, _DONE = FetchState  # as in ``link``, and the next line
_NO_LINK, _PROVEN = ReadPhase.WAITING, ReadPhase.PROVEN


class Loads:
    """All loads of this rank that have begun, until they are recorded. Used by the transfer thread only."""

    def __init__(
        self,
        rank_context: RankContext,
        links: Links,
        reads: Reads,
        renewals: LeaseRenewals,
        results: Results,
        deadlines: Deadlines[Any],
    ) -> None:
        self._rank_context, self._log, self._settings = rank_context, rank_context.log, rank_context.settings
        self._links, self._reads, self._renewals = links, reads, renewals
        self._results, self._deadlines = results, deadlines
        self._drafts = any(region.draft for region in rank_context.caches.geometry.regions)
        self.running: dict[Fetch, None] = {}
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
        # A step waits for one attempt at most, and computes a prefix sooner than another attempt would bring it.
        once = load.now or bool(load.prefix)
        attempts = [0 if once else ATTEMPTS_PER_PEER] * (1 + len(load.alternatives))
        planes = 0 if once else len(self._rank_context.planes) - 1
        # A step that computes with the load begins once its copies are under way, so this thread waits for none.
        alone = alone and not load.now
        end = now + self._settings.handover_timeout_seconds
        fetch = Fetch(posted, load, started, ids, attempts, planes, end, alone)
        self.running[fetch] = None
        self._begin_attempt(fetch, now)

    def cancel(self, request_id: str, now: float) -> None:
        """Cancel the loads of a request. They are still reported, once nothing can write their blocks. One that was
        reported early goes on to its end, which is near: a step joins it, and others may have its blocks by then."""
        for fetch in [each for each in self.running if each.posted.request_id == request_id]:
            if fetch.posted.cancellable:
                self._cancel(fetch, CANCELLED, now)

    def fail(self, posted: StepLoad, now: float) -> None:
        """Fail a load whose start raised an error. Copies that have begun must end before it is reported."""
        for fetch in self.running:
            if fetch.posted is posted:
                self._cancel(fetch, CANCELLED, now)
                return
        self._results.finished(posted, LOST)
        self._release(posted.load, now)

    def cancel_all(self, reason: str, now: float) -> None:
        """Cancel every load; those that still run are reported as failed for ``reason``."""
        for fetch in list(self.running):
            self._cancel(fetch, Reason("cancelled", reason), now)

    def close(self, now: float) -> None:
        """Forget the loads that are reported, without a wait for the next tick."""
        for fetch in list(self.running):
            self.on_due(fetch, now)

    def _cancel(self, fetch: Fetch, reason: Reason, now: float) -> None:
        """No other attempt follows, whatever the failure before was."""
        if fetch.state is _DRAINING:
            fetch.reason = reason
        elif fetch.state is _WAITING:
            fetch.reason = reason
            self._end(fetch, now)
        elif fetch.state is not _DONE:
            self._stop(fetch, reason, now)

    # --- what happens -------------------------------------------------------------------------------------------

    def on_due(self, fetch: Fetch, now: float) -> None:
        """Act on the deadline of a load, if it has come."""
        if now < fetch.deadline:
            return
        if fetch.state is _DONE:
            self._forget(fetch, now)
        elif fetch.state is not _WAITING:
            self._stop(fetch, fetch.late(self._settings, now), now)
        elif now < fetch.end:
            self._begin_attempt(fetch, now)
        else:
            self._end(fetch, now)

    def go_on(self, fetch: Fetch, now: float) -> None:
        """Something has happened to a read: go on as far as all reads of the attempt have come."""
        if fetch.state is _DRAINING:
            if not fetch.writing:
                self._attempt_failed(fetch, now)
        elif fetch.state is not _DONE:
            failure = self._guarded(self._next_state, fetch, now)
            if failure is not None and fetch.state is not _DONE:  # an error after the report changes nothing
                self._stop(fetch, failure, now)

    def _next_state(self, fetch: Fetch, now: float) -> Reason | None:
        """Returns why the attempt fails, if it does."""
        if fetch.state is _CONNECTING and not fetch.reads and (failure := self._connect(fetch, now)) is not None:
            return failure
        for read in fetch.reads:
            if read.failure is not None:
                return read.failure
        if fetch.state is _CONNECTING:
            for read in fetch.reads:
                if read.phase is _NO_LINK:
                    return None
            self._enter(fetch, _READING, fetch.later(self._settings, now), now)
            return self._ask(fetch, now) or self._next_state(fetch, now)
        if fetch.state is _READING:
            fetch.deadline = fetch.later(self._settings, now)
            for read in fetch.reads:
                if not read.landed:
                    if fetch.posted.claimed or fetch.load.seconds < math.inf:
                        self._report_begun(fetch, now)
                    return None
            self._enter(fetch, _COMMITTING, fetch.deadline, now)
            for read in fetch.reads:
                self._reads.commit(read, now)
            return self._next_state(fetch, now)
        if fetch.state is _COMMITTING:
            for read in fetch.reads:
                if read.phase is not _PROVEN:
                    return None
            self._end(fetch, now)
        return None

    def _enter(self, fetch: Fetch, state: FetchState, deadline: float, now: float) -> None:
        if fetch.enter(state, deadline, now):
            self._deadlines.note(fetch, deadline)

    def _guarded(self, act: Callable[[Fetch, float], Reason | None], fetch: Fetch, now: float) -> Reason | None:
        """Act, and return why the attempt fails. Another act may follow an error: a load must be reported, and its
        lease released."""
        try:
            return act(fetch, now)
        except Exception as error:
            name = act.__name__.strip("_")
            self._log.exception(name, "kvferry: unexpected error in %s of %s", name, fetch.load.request_id)
            self._rank_context.stats.failed("internal")
            return Reason("internal", f"{name}: {error!r}")

    # --- attempts -----------------------------------------------------------------------------------------------

    def _begin_attempt(self, fetch: Fetch, now: float) -> None:
        """Begin the first attempt, or the next one: of the last one nothing writes D's pages any more."""
        fetch.begin_attempt(_at(fetch.posted.load, fetch.peer))
        self._enter(fetch, _CONNECTING, min(now + self._settings.handshake_timeout_seconds, fetch.end), now)
        self.go_on(fetch, now)

    def _connect(self, fetch: Fetch, now: float) -> Reason | None:
        """Begin a read from each rank of P that the attempt reads from."""
        load, again = fetch.load, fetch.number > 1
        try:
            if again:  # it may be that the lease could not be kept before
                self._renewals.keep(load.token, load.peer, load.request_id, now)
            addresses = self._links.source_addresses(load.peer)
            links = [self._links.get(address, now, redial=again) for address in addresses]
        except KVFerryError as error:
            return Reason("peer_lost" if isinstance(error, TransportError) else "incompatible", str(error))
        for link, address in zip(links, addresses, strict=True):
            self._reads.new(fetch, link, address, now)
            link.start_handshake(now)
        for read in fetch.reads:
            read.link_moved(now)
        return None

    def _ask(self, fetch: Fetch, now: float) -> Reason | None:
        ours, tokens = self._rank_context.caches.geometry, fetch.load.tokens
        try:
            planned = [plan_reads(ours, read.link.theirs, tokens) for read in fetch.reads]
            check_complete(ours, [span for spans in planned for span in spans], tokens)
        except KVFerryError as error:
            return Reason("incompatible", str(error))
        if self._drafts:
            self._clear_drafts(fetch, [span for spans in planned for span in spans])
        for read, spans in zip(fetch.reads, planned, strict=True):
            read.plan(spans, now)
            if spans:
                self._reads.ask(read, now)
            if read.failure is not None:
                return read.failure
        return None

    def _clear_drafts(self, fetch: Fetch, planned: Sequence[PlannedSpan]) -> None:
        """Zero the KV of layers that draft and that P lacks. Else what drafts would attend to the KV of other requests,
        or to bytes that are no numbers, with which a check of drafts by their probabilities may go wrong."""
        caches = self._rank_context.caches
        read = [(item.region, item.layer, item.span.num_layers) for item in planned]
        for region, layer in draft_layers(caches.geometry, read):
            caches.clear(region, layer, fetch.ids[region], *fetch.load.tokens[region])

    def _stop(self, fetch: Fetch, reason: Reason, now: float) -> None:
        """The attempt has failed, or the load was cancelled. D keeps the pages until nothing writes them."""
        fetch.reason = reason
        for read in fetch.reads:
            self._reads.stop(read, now)
        if fetch.writing:
            self._enter(fetch, _DRAINING, math.inf, now)
        else:
            self._attempt_failed(fetch, now)

    def _attempt_failed(self, fetch: Fetch, now: float) -> None:
        """Nothing of the attempt writes D's pages any more. Wait for the next one, or end the load."""
        reason = fetch.reason
        assert reason is not None
        if reason.kind == "timeout" and reason.blames == "plane":
            self._guarded(self._lose_planes, fetch, now)
        begin_at = fetch.next_attempt_at(reason, now)
        if begin_at >= fetch.end or not fetch.posted.retries():  # a step computes with it
            self._end(fetch, now)
        else:
            self._enter(fetch, _WAITING, begin_at, now)
            self._guarded(self._leave, fetch, now)

    def _lose_planes(self, fetch: Fetch, now: float) -> None:
        """End the links over which the reads moved no bytes in time: the next attempt, or the next load, takes another
        data plane. A link over which bytes of other reads still come is kept."""
        assert fetch.reason is not None
        for read in fetch.reads:
            if read.planned and not read.landed and not self._reads.others_move(read):
                read.link.lose_plane(fetch.reason.text)

    def _leave(self, fetch: Fetch, now: float) -> None:
        reason, load = fetch.reason, fetch.posted.load
        assert reason is not None
        for read in fetch.reads:
            self._reads.forget(read)
        fetch.reads = []
        self._rank_context.stats.retried(reason.kind, _short_name(fetch.load.peer))
        peer = _short_name(_at(load, fetch.peer).peer)
        text = "kvferry: hand-over of %s is tried again, attempt %d, at %s: %s"
        self._log.info("retry", text, load.request_id, fetch.number + 1, peer, reason)

    # --- the end ------------------------------------------------------------------------------------------------

    def _end(self, fetch: Fetch, now: float) -> None:
        """Report the load first: a request waits for that, and no request waits for P's blocks. Where a step computes
        with it, the engine's thread needs the interpreter now, and the rest follows at a tick."""
        later = fetch.reason is None and fetch.posted.claimed
        self._enter(fetch, _DONE, now if later else math.inf, now)
        self._guarded(self._report, fetch, now)
        if not later:
            self._forget(fetch, now)

    def _forget(self, fetch: Fetch, now: float) -> None:
        """Log and trace a load that is reported, and release its leases."""
        fetch.deadline = math.inf
        self._guarded(self._record, fetch, now)
        self._release(fetch.posted.load, now)

    def _report(self, fetch: Fetch, now: float) -> None:
        fetch.ended_at = self._rank_context.clock()
        try:
            if fetch.reason is None:
                self._report_succeeded(fetch)
                return
            try:
                if self._drafts:
                    self._rank_context.caches.copies.synchronize()  # zeros under way: others may get the blocks now
            finally:  # after an error the device does nothing more
                self._report_failed(fetch.posted, fetch.reason, fetch)
        finally:
            for read in fetch.reads:
                self._reads.forget(read)

    def _report_begun(self, fetch: Fetch, now: float) -> None:
        """Report, once, that all copies are under way: the engine can wait for them. Where P computes the prompt,
        report before when that should be."""
        posted = fetch.posted
        if posted.life.phase is not StepLoadPhase.POSTED:
            return
        load, here = posted.load, self._rank_context.clock()
        if not all(read.all_begun for read in fetch.reads):
            if load.step_tokens:
                before, left = posted.ends_at, max(read.seconds_left(now) for read in fetch.reads)
                posted.ends_at = here + left
                if posted.ends_at < before == math.inf:
                    self._results.ready.set()  # a thread that waits may have to wait for less
            return
        reads = [read for read in fetch.reads if read.planned]
        under_way = [write.copy for read in reads for write in read.writes]
        # Where P computes the prompt, nobody has foreseen the end of a pull.
        unknown = load.step_tokens and any(read.link.pulls for read in reads)

        def ended_well() -> bool | None:
            if not all(copy.done for copy in under_way):
                return None
            return not any(copy.error for copy in under_way) and all(read.grant_stands for read in reads)

        check = ended_well if all(read.note is not None for read in reads) else None
        posted.begun(check, under_way, math.inf if unknown else here + load.seconds)

    def _report_succeeded(self, fetch: Fetch) -> None:
        """The load has ended, and its tokens are in the blocks."""
        load, tokens, seconds = fetch.load, fetch.load.num_tokens, fetch.seconds
        posted = all([read.note is not None for read in fetch.reads if read.planned])
        waited = max(0.0, fetch.granted_at - fetch.started)
        first = fetch.number == 1
        estimate = TransferEstimate(seconds - waited, max(1, tokens)) if posted and first else UNKNOWN
        end = LoadEnd(plane=fetch.plane_names, milliseconds=seconds * 1e3, peer=_short_name(load.peer))
        try:
            # Before the report, so that the engine takes the counts with the load: an idle engine takes no later step.
            self._rank_context.stats.finished(
                nbytes=fetch.nbytes, milliseconds=end.milliseconds, plane=end.plane, tokens=tokens, peer=end.peer
            )
            self._count_streamed(fetch)
        finally:  # a request waits for the report, also after an error of the metrics
            self._results.finished(fetch.posted, end, estimate)

    def _report_failed(self, posted: StepLoad, reason: Reason, fetch: Fetch | None = None) -> None:
        """The load has ended, and its tokens are not in the blocks. ``fetch``: it, if an attempt has begun."""
        load = posted.load
        end = LoadEnd(reason.kind, peer=_short_name((fetch.load if fetch else load).peer))
        try:
            self._rank_context.stats.failed(reason.kind, end.peer)
            if fetch is not None:
                self._count_streamed(fetch)
            story = "" if fetch is None else f" [{fetch.story()}]"
            self._failed.warning(
                reason.kind, "kvferry: hand-over of %s failed, %d tokens not loaded: %s%s",
                load.request_id, load.num_tokens, reason, story,
            )  # fmt: skip
        finally:  # a request waits for the report; who has it finds the line
            self._results.finished(posted, end)

    def _count_streamed(self, fetch: Fetch) -> None:
        """What it costs D to take blocks for a prompt before P has computed it."""
        load = fetch.posted.load
        if load.found or load.step_tokens:
            blocks = max((len(packed) // 4 for packed in load.block_ids), default=0)
            milliseconds = (self._rank_context.clock() - fetch.started) * 1e3
            self._rank_context.stats.streamed(blocks=blocks, milliseconds=milliseconds)

    def _record(self, fetch: Fetch, now: float) -> None:
        reason = fetch.reason
        del self.running[fetch]
        try:
            if reason is None:
                load, number = fetch.load, fetch.number
                logger.debug(
                    "kvferry: hand-over of %s done: %d tokens, %d bytes in %.2f ms over %s from %s%s%s",
                    load.request_id, load.num_tokens, fetch.nbytes, fetch.seconds * 1e3,
                    fetch.plane_names, _short_name(load.peer),
                    ", inside the step" if load.now else ", joined by a step" if fetch.posted.claimed
                    else "" if number == 1 else f", attempt {number}",
                    ", from when the prefill engine computed it" if load.step_tokens else "",
                )  # fmt: skip
            error = "" if reason is None else str(reason)
            self._trace(fetch.load, fetch.started, fetch.ended_at, error, fetch)
        finally:
            fetch.reads = []

    def _trace(self, load: Load, begin: float, end: float, error: str, fetch: Fetch | None = None) -> None:
        """Make the span of a hand-over that has ended, where its request is traced."""
        if not load.traceparent:
            return
        attributes: dict[str, str | int] = {
            "kvferry.request_id": load.request_id,
            "kvferry.peer": load.peer.engine_id,
            "kvferry.tokens": max((stop - start for start, stop in load.tokens), default=0),
            "kvferry.inside_step": load.now,
            "kvferry.attempts": 0 if fetch is None else fetch.number,
        }
        if fetch is not None:
            attributes |= {"kvferry.plane": fetch.plane_names, "kvferry.bytes": fetch.nbytes}
        self._rank_context.record(load.traceparent, "kvferry.handover", begin, end, attributes, error)

    def _release(self, load: Load, now: float) -> None:
        """The request reads no more under any of its leases."""
        for lease in _leases(load):
            try:
                self._renewals.release(lease.token, load.request_id, now)
            except Exception:  # the others hold blocks of P, too
                self._log.exception("release", "kvferry: unexpected error in a release of %s", load.request_id)
                self._rank_context.stats.failed("internal")


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
