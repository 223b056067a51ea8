"""D's half of the transfer thread: hand-overs and their reads.

The tables ``handover`` and ``source_read`` decide. This file performs their effects and gives them events.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Set
from functools import partial

from kvferry.connector.geometry.read_plan import check_complete, plan_reads
from kvferry.connector.geometry.spans import check_spans
from kvferry.connector.protocol import handover, messages
from kvferry.connector.protocol.handover import Reason
from kvferry.connector.protocol.link_state import LinkPhase
from kvferry.connector.protocol.metrics import FailureKind
from kvferry.connector.protocol.source_read import (
    CancelRead,
    CheckPostedGrant,
    CommitAnswered,
    CommitWanted,
    FailLink,
    ForgetRead,
    HandoverEnded,
    NothingToRead,
    ReadAsked,
    ReadEffect,
    ReadEvent,
    ReadFailed,
    ReadGranted,
    SendCommit,
    StopRead,
)
from kvferry.connector.protocol.state_machine import Lifetime, Tick
from kvferry.connector.protocol.step_plan import KeepLease, Load, UnneededLease, unpack_ids
from kvferry.connector.transfer.lease_keeper import LeaseKeeper
from kvferry.connector.transfer.link import Link
from kvferry.connector.transfer.links import Links
from kvferry.connector.transfer.load_reports import FinishedLoad, LoadReports, OnBegun, grant_stands
from kvferry.connector.transfer.rank_context import RankContext
from kvferry.connector.transfer.receiver import ActiveLoad, Happening, Receiver, SourceRead
from kvferry.transport.errors import GeometryError, KVFerryError, ProtocolError, TransportError, shortened

logger = logging.getLogger("vllm.kvferry.consumer")


class Consumer:
    """All hand-overs into this rank. Used by the transfer thread only."""

    def __init__(
        self,
        rank_context: RankContext,
        begun: OnBegun,
        finished: Callable[[FinishedLoad], None],
    ) -> None:
        """
        Args:
            rank_context: this rank.
            begun, finished: as ``LoadReports`` takes them.

        ``now`` of all methods is in seconds of a ``RunningClock``.
        """
        self._rank_context = rank_context
        self._log = rank_context.log
        self._reports = LoadReports(rank_context.stats, begun, finished, rank_context.clock)
        self._timeouts = handover.Timeouts(
            rank_context.settings.handshake_timeout_seconds, rank_context.settings.transfer_timeout_seconds
        )
        self._active_loads: list[ActiveLoad] = []  # two of them may have one request id, see ``FinishedLoad``
        self._receiver = Receiver(rank_context.caches)
        self._links = Links(rank_context, self._receiver.through)
        self._lease_keeper = LeaseKeeper(rank_context, self._links.get)
        self._later: deque[Callable[[], None]] = deque()  # what follows reports, until the next tick

    # --- commands from the engine -------------------------------------------------------------------------------

    def identify(self, consumer: bytes) -> None:
        """``consumer`` names this life of this engine, the same on all of its ranks."""
        self._lease_keeper.consumer = consumer

    def keep(self, keep: KeepLease, now: float) -> None:
        """Keep a lease alive until its request is loaded or released."""
        self._lease_keeper.keep(keep.token, keep.peer, keep.request_id, now, siblings=keep.siblings)

    def release(self, release: UnneededLease, now: float) -> None:
        """The request loads nothing under this lease."""
        self._lease_keeper.release(release.token, release.request_id, now)

    def cancel(self, request_id: str, now: float) -> None:
        """Cancel the loads of a request. They are still reported, once nothing can write their blocks."""
        for active_load in [each for each in self._active_loads if each.load.request_id == request_id]:
            self._step(active_load, handover.CancelLoad(), now)

    def fail(self, load: Load, now: float) -> None:
        """Fail a load whose start raised an error. Copies that have begun must end before it is reported."""
        for active_load in self._active_loads:
            if active_load.load is load:
                self._step(active_load, handover.CancelLoad(), now)
                return
        self._reports.not_started(load)
        self._lease_keeper.release(load.token, load.request_id, now)

    def load(self, load: Load, now: float, *, alone: bool = False) -> None:
        """Start a hand-over. ``alone``: no other hand-over is about to begin."""
        try:
            self._lease_keeper.keep(load.token, load.peer, load.request_id, now)
            ids = [self._rank_context.caches.kernel_ids(g, unpack_ids(ids)) for g, ids in enumerate(load.block_ids)]
            for region, (start, stop) in enumerate(load.tokens):
                if stop > start:
                    self._rank_context.caches.check_held(region, ids[region], start, stop)
            sources = [(self._links.get(address), address) for address in self._links.source_addresses(load.peer)]
        except KVFerryError as error:
            lost = isinstance(error, TransportError)
            self._reports.failed(load, Reason("peer_lost" if lost else "incompatible", str(error)))
            self._lease_keeper.release(load.token, load.request_id, now)
            return
        state, effects = handover.begin(len(sources), self._timeouts, now)
        lifetime = Lifetime(handover.HANDOVER, state, now)
        # A step that computes with the load begins once its copies are under way, so this thread waits for none.
        active_load = ActiveLoad(load, lifetime, self._rank_context.clock(), ids, alone and not load.now)
        self._active_loads.append(active_load)
        for number, (link, address) in enumerate(sources):
            self._receiver.new(active_load, number, link, address, now, self._timeouts.transfer)
            link.start_handshake(now)
        self._perform(active_load, effects, now)
        for read in active_load.reads:
            self._apply_link_phase(read, now)

    # --- the loop's calls ---------------------------------------------------------------------------------------

    def finished_writes(self, now: float) -> None:
        """Handle the copies into D's pages whose end this thread awaited when they began."""
        self._step_reads(self._receiver.finished_writes(), now)

    def serve(self, now: float, ready: Set[object] | None = None) -> bool:
        """Handle the messages that have arrived. Returns whether there is more to do at once. ``ready``: the readable
        sockets; ``None`` is any, and then deadlines are checked too."""
        dialer = self._rank_context.dialer
        if ready is None or not ready.isdisjoint(dialer.pollables):
            dialer.progress()
        for link in self._links:
            try:
                for reply in link.serve(now) if ready is None or link.has_events else ():
                    self._reply(link, reply, now)
            except Exception as error:  # an error with one peer must not reach the others
                self._log.exception("link", "kvferry: unexpected error with %s", link.name)
                link.fail("internal", repr(error))
            if link.phase is not link.handled_phase:
                link.handled_phase = link.phase
                self._link_changed(link, now)
        return self._collect(now)

    def tick(self, now: float) -> None:
        """Check deadlines, renew leases, close links that have failed long enough or that are not used."""
        self._catch_up()
        for active_load in list(self._active_loads):
            self._step(active_load, Tick(), now)
        for read in self._receiver.stopped:
            self._step_read(read, Tick(), now)
        self._lease_keeper.tick(now)
        self._links.close_unused(now)

    def renew_now(self) -> None:
        """Renew at the next tick: this thread was delayed while P's deadlines went on."""
        self._lease_keeper.renew_now()

    @property
    def live(self) -> bool:
        """Whether a deadline is running, or something is left for the next tick."""
        return bool(self._later or self._active_loads or self._lease_keeper or self._receiver or self._links.any_failed)

    def close(self, now: float, reason: str) -> None:
        """Release every lease and close the links; loads that still run are reported as failed for ``reason``."""
        for active_load in list(self._active_loads):
            self._step(active_load, handover.CancelLoad(Reason("cancelled", reason)), now)
        self._collect(now)  # handle the copies that have just ended
        self._catch_up()
        self._lease_keeper.close_all(now)
        self._links.close()

    # --- hand-overs ---------------------------------------------------------------------------------------------

    def _link_changed(self, link: Link, now: float) -> None:
        for read in self._receiver.through(link):
            self._apply_link_phase(read, now)
        if link.phase is LinkPhase.FAILED:
            link.failed_at = now
            for read in self._receiver.through(link):
                self._receiver.forget(read)
            link.detach()

    def _apply_link_phase(self, read: SourceRead, now: float) -> None:
        if read.state.stopped:
            return
        if read.link.phase is LinkPhase.ATTACHED:
            if (misfit := read.misfit()) is not None:
                self._step_read(read, ReadFailed(misfit), now)
            else:
                self._step(read.active_load, handover.SourceReady(read.state.source), now)
        elif read.link.phase is LinkPhase.FAILED:
            self._step_read(read, ReadFailed(read.link.failure), now)

    def _step(self, active_load: ActiveLoad, event: handover.HandoverEvent, now: float) -> None:
        effects = active_load.lifetime.step(event, now)
        if effects:
            self._perform(active_load, effects, now)
        if active_load.load.now:
            self._reports.begun(active_load, self._receiver.copies_of)

    def _perform(self, active_load: ActiveLoad, effects: tuple[handover.HandoverEffect, ...], now: float) -> None:
        """Perform every effect, also after an error in one: a load must be reported, and its lease released."""
        for effect in effects:
            try:
                self._perform_one(active_load, effect, now)
            except Exception as error:
                name = type(effect).__name__
                self._log.exception(name, "kvferry: unexpected error in %s of %s", name, active_load.load.request_id)
                self._rank_context.stats.failed("internal")
                if isinstance(effect, handover.AskSources | handover.CommitSources):
                    failed = handover.SourceFailed(0, Reason("internal", f"{name}: {error!r}"))
                    self._step(active_load, failed, now)

    def _perform_one(self, active_load: ActiveLoad, effect: handover.HandoverEffect, now: float) -> None:
        match effect:
            case handover.AskSources():
                self._plan_and_ask(active_load, now)
            case handover.CommitSources():
                self._commit(active_load, now)
            case handover.StopSources():
                for read in active_load.reads:
                    self._step_read(read, StopRead(), now)
            case handover.ReleaseLease():
                load = active_load.load
                release = partial(self._lease_keeper.release, load.token, load.request_id, now)
                self._after_report(active_load, release)
            case handover.ReportLoad(reason):
                self._active_loads.remove(active_load)
                try:
                    if reason is None:
                        self._after_report(active_load, self._reports.succeeded(active_load))
                    else:
                        self._reports.failed(active_load.load, reason, active_load)
                finally:
                    for read in active_load.reads:
                        self._step_read(read, HandoverEnded(), now)
                    # Else the load and its reads refer to each other until Python looks for such garbage, which an
                    # engine may do seldom or never, and keep the board of a P that is long gone.
                    active_load.reads = []

    def _after_report(self, active_load: ActiveLoad, act: Callable[[], None]) -> None:
        """Do now what no request waits for. Of a load inside a step that stands, do it at the next tick: the engine's
        thread is at work on the step, and needs the interpreter."""
        if active_load.load.now and active_load.lifetime.state.phase is handover.HandoverPhase.DONE:
            self._later.append(act)
        else:
            act()

    def _catch_up(self) -> None:
        while self._later:
            try:
                self._later.popleft()()
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
            read.planned = spans
            if read.state.stopped:  # another read has failed
                break
            if not spans:  # this pipeline stage of P holds none of D's layers
                self._step_read(read, NothingToRead(), now)
            elif not self._use_posted_grant(read, now):
                self._ask(read, now)

    def _commit(self, active_load: ActiveLoad, now: float) -> None:
        for read in active_load.reads:
            self._step_read(read, CommitWanted(), now)

    # --- reads --------------------------------------------------------------------------------------------------

    def _step_reads(self, happenings: Iterable[Happening], now: float) -> None:
        for read, event in happenings:
            self._step_read(read, event, now)

    def _step_read(self, read: SourceRead, event: ReadEvent, now: float) -> None:
        """Perform every effect of an event, also after an error in one."""
        for effect in read.lifetime.step(event, now):
            try:
                self._perform_read_effect(read, effect, now)
            except Exception as error:
                name = type(effect).__name__
                self._log.exception(name, "kvferry: unexpected error in %s of read %d", name, read.number)
                self._rank_context.stats.failed("internal")
                if isinstance(effect, SendCommit | CheckPostedGrant):
                    self._step_read(read, ReadFailed(Reason("internal", repr(error))), now)

    def _perform_read_effect(self, read: SourceRead, effect: ReadEffect, now: float) -> None:
        match effect:
            case SendCommit():
                read.link.send(messages.Commit(read=read.number, token=read.active_load.load.token))
            case CheckPostedGrant():
                self._step_read(read, CommitAnswered(grant_stands(read)), now)
            case CancelRead():
                self._step_reads(self._receiver.cancel(read), now)
            case ForgetRead():
                self._receiver.forget(read)
            case FailLink():
                read.link.fail("timeout", f"no end of a stopped read in {read.state.timeout:g} s")
            case _:
                self._step(read.active_load, effect, now)

    def _use_posted_grant(self, read: SourceRead, now: float) -> bool:
        """Whether P has posted the grant on its grant board. Then D sends no ask, and the read begins at once."""
        board = read.link.board
        note = None if board is None else board.find(read.active_load.load.token)
        if note is None:
            return False
        try:
            grant = messages.decode_grant(note.text)
            check_spans([item.span for item in read.planned], read.link.theirs, grant.num_tokens)
        except (ProtocolError, GeometryError):
            return False  # P's answer to an ask will contain the reason
        read.note = note
        self._step_read(read, ReadAsked(0, "posted"), now)
        self._take_grant(read, grant, now)
        return True

    def _ask(self, read: SourceRead, now: float) -> None:
        load = read.active_load.load
        read.link.send(
            messages.Ask(
                read=read.number,
                token=load.token,
                consumer=self._lease_keeper.consumer,
                consumer_rank=self._lease_keeper.rank,
                expected=self._lease_keeper.expected(load.peer, read.address.tp_rank),
                spans=tuple(item.span for item in read.planned),
                chunk_bytes=read.link.slot_bytes,
            )
        )
        failure = None
        try:
            self._receiver.expect(read)
        except GeometryError as error:
            failure = Reason("incompatible", str(error))
        except Exception as error:  # some chunks may be announced: the read must be cancelled, not forgotten
            logger.exception("kvferry: chunks of %s could not be announced", load.request_id)
            failure = Reason("internal", repr(error))
        self._step_read(read, ReadAsked(len(read.tags), "asked" if read.link.pulls else "pushed"), now)
        if failure is not None:
            self._step_read(read, ReadFailed(failure), now)

    def _take_grant(self, read: SourceRead, grant: messages.Grant, now: float) -> None:
        """Check a grant, and begin to read P's pages where D reads them by itself."""
        if not read.state.awaits_grant:
            return  # a second grant, or the grant of a stopped read
        wanted = read.active_load.load.prompt
        try:
            if wanted and grant.prompt != wanted:
                text = "P's lease is of another prompt than the request's parameters name"
                self._step_read(read, ReadFailed(Reason("denied", text)), now)
                return
            self._receiver.check_grant(read, grant)
            self._step_read(read, ReadGranted(), now)
            self._step_reads(self._receiver.begin_pull(read, grant), now)
        except GeometryError as error:
            self._step_read(read, ReadFailed(Reason("data", str(error))), now)
        except Exception as error:  # an error of one copy fails one request
            logger.exception("kvferry: %s could not be read from P's pages", read.active_load.load.request_id)
            self._step_read(read, ReadFailed(Reason("internal", repr(error))), now)

    def _reply(self, link: Link, reply: messages.Reply, now: float) -> None:
        if isinstance(reply, messages.HandshakeReply | messages.Closing):
            return  # the link has handled it
        read = self._receiver.find(reply.read, link)
        if read is None:
            return  # a message for a read that has ended
        match reply:
            case messages.Grant():
                self._take_grant(read, reply, now)
            case messages.Deny():
                kind: FailureKind = "expired" if reply.reason in ("expired", "unknown") else "denied"
                detail = f": {shortened(reply.detail)!r}" if reply.detail else ""
                if reply.reason == "detached":  # P has ended its session with this D: the next load makes a new link
                    link.fail("peer_lost", f"P has no handshake of ours{detail}")
                self._step_read(read, ReadFailed(Reason(kind, f"P denied the read, {reply.reason}{detail}")), now)
            case messages.Committed():
                self._step_read(read, CommitAnswered(reply.ok), now)
            case messages.Stopped():
                self._step_reads(self._receiver.on_stopped(read, reply.sent), now)

    def _collect(self, now: float) -> bool:
        self._step_reads(self._receiver.collect(self._links), now)
        return self._receiver.backlog
