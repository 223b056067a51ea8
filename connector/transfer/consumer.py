"""D's half of the mover: hand-overs, the links they go over, and the claims that keep P's leases alive.

Decisions are ``handover.step``'s; this file performs its effects and feeds it what happens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator

import msgspec

from kvferry.connector.geometry.read_plan import check_complete, plan_reads
from kvferry.connector.geometry.spans import check_spans
from kvferry.connector.protocol import handover, messages
from kvferry.connector.protocol.handover import Reason
from kvferry.connector.protocol.metrics import FailureKind
from kvferry.connector.protocol.step_plan import KeepLease, Load, PeerEngine, RankAddress, unpack_ids
from kvferry.connector.protocol.transfer_estimate import UNKNOWN, TransferEstimate
from kvferry.connector.transfer.lease_keeper import LeaseKeeper
from kvferry.connector.transfer.link import Link, LinkState
from kvferry.connector.transfer.rank_context import RankContext
from kvferry.connector.transfer.receiver import ActiveLoad, Receiver, SourceRead
from kvferry.transport.errors import GeometryError, KVFerryError, ProtocolError

logger = logging.getLogger("vllm.kvferry.consumer")

FAILED_LINK_SECONDS = 1.0
"""A failed link answers for that long, so that a burst of requests for a dead peer fails fast."""
IDLE_LINK_SECONDS = 120.0
"""A link that nothing used for that long is closed, so that its staging memory serves other peers."""


class FinishedLoad(msgspec.Struct, frozen=True):
    """What the engine is told of a load from the engine ``engine_id``, once."""

    request_id: str
    ok: bool
    engine_id: str
    estimate: TransferEstimate = UNKNOWN


class Consumer:
    """All hand-overs into this rank. Called from the mover's thread only."""

    def __init__(
        self,
        rank_context: RankContext,
        begun: Callable[[Load], None],
        finished: Callable[[FinishedLoad], None],
    ) -> None:
        """``begun`` is told of each load that a step computes with, once all its copies are under way, unless they have
        ended. ``finished`` is told of each load that ended, as soon as it has. ``now`` of all methods is what deadlines
        go by, see ``RunningClock``."""
        self._rank_context = rank_context
        self._on_begun, self._on_finished = begun, finished
        self._timeouts = handover.Timeouts(
            rank_context.settings.handshake_timeout_seconds, rank_context.settings.transfer_timeout_seconds
        )
        self._links: dict[RankAddress, Link] = {}
        self._active_loads: dict[str, ActiveLoad] = {}
        self._receiver = Receiver(rank_context.caches)
        self._lease_keeper = LeaseKeeper(rank_context, self._link)

    # --- commands from the engine -------------------------------------------------------------------------------

    def identify(self, consumer: bytes) -> None:
        """Which life of which engine this rank belongs to; the same on all ranks."""
        self._lease_keeper.consumer = consumer

    def keep(self, keep: KeepLease, now: float) -> None:
        """Keep a lease alive until its request is loaded or dropped."""
        self._lease_keeper.keep(keep.token, keep.peer, keep.request_id, now, siblings=keep.siblings)

    def release(self, request_id: str, now: float) -> None:
        """The request will load nothing."""
        self._lease_keeper.release(request_id, now)

    def cancel(self, request_id: str, now: float) -> bool:
        """Give a load up; it still reports, once nothing can write its blocks. ``False``: it has reported before."""
        active_load = self._active_loads.get(request_id)
        if active_load is not None:
            self._step(active_load, handover.CancelLoad(), now)
        return active_load is not None

    def load(self, load: Load, now: float, *, alone: bool = False) -> None:
        """Start a hand-over. ``alone``: no other one is about to begin."""
        try:
            self._lease_keeper.keep(load.token, load.peer, load.request_id, now)
            ids = [self._rank_context.caches.kernel_ids(g, unpack_ids(ids)) for g, ids in enumerate(load.block_ids)]
            for region, (start, stop) in enumerate(load.tokens):
                if stop > start:
                    self._rank_context.caches.check_held(region, ids[region], start, stop)
            addresses = list(self._addresses(load.peer))
        except KVFerryError as error:
            self._report(load, Reason("incompatible", str(error)))
            self._lease_keeper.release(load.request_id, now)
            return
        state, effects = handover.begin(len(addresses), self._timeouts, now)
        active_load = ActiveLoad(load, state, time.monotonic(), ids, alone)
        self._active_loads[load.request_id] = active_load
        for number, address in enumerate(addresses):
            link = self._link(load.peer, address)
            self._receiver.new(active_load, number, link)
            link.start_handshake(now)
        self._perform(active_load, effects, now)
        for read in active_load.reads:
            self._apply_link_state(read, now)

    # --- the loop's calls ---------------------------------------------------------------------------------------

    def finished_writes(self, now: float) -> None:
        """See to copies into our pages that have ended: those that were waited for while they were begun."""
        for read, event in self._receiver.finished_writes():
            self._step(read.active_load, event, now)

    def serve(self, now: float, ready: Collection[object] | None = None) -> bool:
        """Handle what arrived; whether there is more to do at once. ``ready``: the sockets at which something has
        arrived; ``None`` is any, and then deadlines are looked at too."""
        for link in list(self._links.values()):
            try:
                for reply in link.serve(now) if ready is None or link.has_events(ready) else ():
                    self._reply(link, reply, now)
            except Exception as error:  # whatever one peer brings about must not reach the others
                logger.exception("kvferry: unexpected error with %s", link.name)
                link.fail("internal", repr(error))
            if link.state is not link.seen:
                link.seen = link.state
                self._link_changed(link, now)
        return self._collect(now)

    def tick(self, now: float) -> None:
        """Deadlines, renewals, and links that have failed long enough or that nobody uses."""
        for active_load in list(self._active_loads.values()):
            self._step(active_load, handover.HandoverTick(), now)
        self._lease_keeper.tick(now)
        for address, link in list(self._links.items()):
            if link.used or self._receiver.through(link):
                link.used, link.used_at = False, now
            failed = link.seen is LinkState.FAILED and now >= link.failed_at + FAILED_LINK_SECONDS
            if failed or now >= link.used_at + IDLE_LINK_SECONDS:
                link.close()
                del self._links[address]

    def renew_now(self) -> None:
        """We were held up while P's deadlines went on: renew at the next tick."""
        self._lease_keeper.renew_now()

    @property
    def live(self) -> bool:
        """Whether any deadline is running."""
        return bool(
            self._active_loads or self._lease_keeper or any(x.state is LinkState.FAILED for x in self._links.values())
        )

    @property
    def links(self) -> list[Link]:
        return [link for link in self._links.values() if link.state is not LinkState.FAILED]

    def close(self, now: float) -> None:
        """Give every claim up and close the links; loads that still run are reported as failed."""
        for active_load in list(self._active_loads.values()):
            self._step(active_load, handover.CancelLoad(Reason("cancelled", "the engine is shutting down")), now)
        self._collect(now)  # of copies that have just ended
        self._lease_keeper.close_all()
        for link in self._links.values():
            link.close()
        self._links.clear()

    # --- links --------------------------------------------------------------------------------------------------

    def _addresses(self, peer: PeerEngine) -> Iterator[RankAddress]:
        p_ranks = self._rank_context.topology(peer).source_ranks()
        if not p_ranks:
            raise KVFerryError(f"none of P's {peer.tp_size} tensor-parallel ranks holds tokens of ours")
        by_rank = {(rank.pp_rank, rank.tp_rank): rank for rank in peer.ranks}
        for pp_rank in range(peer.pp_size):
            for p_rank in p_ranks:
                address = by_rank.get((pp_rank, p_rank))
                if address is None:
                    raise KVFerryError(f"P named no address for its rank pp{pp_rank} tp{p_rank}")
                yield address

    def _link(self, peer: PeerEngine, address: RankAddress) -> Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link(self._rank_context, peer, address)
        return link

    def _link_changed(self, link: Link, now: float) -> None:
        for read in self._receiver.through(link):
            self._apply_link_state(read, now)
        if link.state is LinkState.FAILED:
            link.failed_at = now
            for read in self._receiver.through(link):
                self._receiver.forget(read)
            link.detach()

    def _apply_link_state(self, read: SourceRead, now: float) -> None:
        """Tell the hand-over what became of a read's link."""
        if read.stopped:
            return
        if read.link.state is LinkState.ATTACHED:
            self._step(read.active_load, handover.SourceReady(read.source), now)
        elif read.link.state is LinkState.FAILED:
            self._step(read.active_load, handover.SourceFailed(read.source, read.link.why), now)

    # --- effects ------------------------------------------------------------------------------------------------

    def _step(self, active_load: ActiveLoad, event: handover.HandoverEvent, now: float) -> None:
        active_load.state, effects = handover.step(active_load.state, event, now)
        self._perform(active_load, effects, now)
        if active_load.load.now:
            self._note_if_begun(active_load)

    def _note_if_begun(self, active_load: ActiveLoad) -> None:
        """The device of the step that waits for it can wait for the copies themselves, once there are no more to
        come."""
        moving = active_load.state.phase is handover.HandoverPhase.MOVING
        if moving and not active_load.begun and all(read.begun for read in active_load.reads):
            active_load.begun = True
            self._on_begun(active_load.load)

    def _perform(self, active_load: ActiveLoad, effects: tuple[handover.HandoverEffect, ...], now: float) -> None:
        for effect in effects:
            match effect:
                case handover.AskSources():
                    self._plan_and_ask(active_load, now)
                case handover.CommitSources():
                    for read in active_load.reads:
                        self._commit(read, now)
                case handover.StopSources():
                    self._stop(active_load, now)
                case handover.ReleaseLease():
                    self._lease_keeper.release(active_load.load.request_id, now)
                case handover.ReportLoad(reason):
                    self._active_loads.pop(active_load.load.request_id, None)
                    for read in active_load.reads:
                        if read.moved or not read.tags:
                            self._receiver.forget(read)  # the others wait for P's Stopped
                    self._report(active_load.load, reason, active_load)

    def _plan_and_ask(self, active_load: ActiveLoad, now: float) -> None:
        ours, tokens = self._rank_context.caches.geometry, active_load.load.tokens
        try:
            planned = [plan_reads(ours, read.link.theirs, tokens) for read in active_load.reads]
            check_complete(ours, [span for spans in planned for span in spans], tokens)
            for read, spans in zip(active_load.reads, planned, strict=True):
                read.planned = spans
        except KVFerryError as error:
            self._step(active_load, handover.SourceFailed(0, Reason("incompatible", str(error))), now)
            return
        for read, spans in zip(active_load.reads, planned, strict=True):
            if read.stopped:  # another one has failed
                break
            if spans:
                if not self._use_posted_grant(read, now):
                    self._ask(read, now)
            else:  # a stage that holds none of our layers
                self._all_moved(read, now)

    def _use_posted_grant(self, read: SourceRead, now: float) -> bool:
        """Whether P has posted the grant, so that nothing need be asked; reading then begins at once."""
        board = read.link.board
        note = None if board is None else board.find(read.active_load.load.token)
        if note is None:
            return False
        try:
            grant = messages.decode_grant(note.text)
            check_spans([item.span for item in read.planned], read.link.theirs, grant.num_tokens)
        except (ProtocolError, GeometryError):
            return False  # P says what is wrong
        read.note = note
        self._grant(read, grant, now)
        return True

    def _ask(self, read: SourceRead, now: float) -> None:
        load = read.active_load.load
        read.link.send(
            messages.Ask(
                read=read.number,
                token=load.token,
                consumer=self._lease_keeper.consumer,
                consumer_rank=self._lease_keeper.rank,
                expected=self._lease_keeper.expected(load.peer, read.link.address.tp_rank),
                spans=tuple(item.span for item in read.planned),
                chunk_bytes=read.link.slot_bytes,
            )
        )
        try:
            self._receiver.expect(read)
        except GeometryError as error:
            self._step(read.active_load, handover.SourceFailed(read.source, Reason("incompatible", str(error))), now)

    def _commit(self, read: SourceRead, now: float) -> None:
        """See that what was read is what the lease is of. What P has pushed it has read itself, and it sends nothing of
        a lease that has ended; of which prompt it is, the grant says, which may come after the last chunk."""
        if read.note is not None:
            expired = Reason("expired", "the lease ended before the read was committed")
            is_current = read.note.is_current and read.link.state is not LinkState.FAILED
            source = read.source
            self._step(
                read.active_load,
                handover.SourceCommitted(source) if is_current else handover.SourceFailed(source, expired),
                now,
            )
        elif read.link.pulls and read.planned:
            read.link.send(messages.Commit(read=read.number, token=read.active_load.load.token))
        elif read.granted or not read.planned:
            self._step(read.active_load, handover.SourceCommitted(read.source), now)

    def _stop(self, active_load: ActiveLoad, now: float) -> None:
        for read in active_load.reads:
            self._receiver.stop(read)
        if active_load.state.phase is handover.HandoverPhase.DRAINING:
            for read in active_load.reads:
                if not read.writing:  # of the others the end of the last copy tells
                    self._step(active_load, handover.SourceDrained(read.source), now)

    def _report(self, load: Load, reason: Reason | None, active_load: ActiveLoad | None = None) -> None:
        """Count it, tell the engine, and only then write it down: its request waits."""
        tokens = max((stop - start for start, stop in load.tokens), default=0)
        if active_load is not None and reason is None:
            seconds = time.monotonic() - active_load.started
            milliseconds = seconds * 1e3
            planes = sorted({read.link.plane.name for read in active_load.reads if read.link.plane is not None})
            plane = "+".join(planes) or "none"
            self._rank_context.stats.finished(
                nbytes=active_load.nbytes, milliseconds=milliseconds, plane=plane, tokens=tokens
            )
            by_us = all(read.note is not None for read in active_load.reads if read.planned)
            estimate = TransferEstimate(seconds, max(1, tokens)) if by_us else UNKNOWN
            self._on_finished(FinishedLoad(load.request_id, True, load.peer.engine_id, estimate))
            logger.info(
                "kvferry: hand-over of %s done: %d tokens, %d bytes in %.2f ms over %s from %s%s",
                load.request_id, tokens, active_load.nbytes, milliseconds, plane, load.peer.engine_id[:8],
                ", inside the step" if load.now else "",
            )  # fmt: skip
            return
        if reason is not None:
            self._rank_context.stats.failed(reason.kind)
        self._on_finished(FinishedLoad(load.request_id, reason is None, load.peer.engine_id))
        if reason is not None:
            logger.warning("kvferry: hand-over of %s failed, %d tokens not loaded: %s", load.request_id, tokens, reason)

    # --- replies and data ---------------------------------------------------------------------------------------

    def _reply(self, link: Link, reply: messages.Reply, now: float) -> None:
        if isinstance(reply, messages.Welcome | messages.Refused | messages.Attached):
            return
        read = self._receiver.find(reply.read, link)
        if read is None:
            return  # of a read that has ended
        match reply:
            case messages.Grant():
                self._grant(read, reply, now)
            case messages.Deny():
                kind: FailureKind = "expired" if reply.reason in ("expired", "unknown") else "denied"
                reason = Reason(
                    kind, f"P denied the read, {reply.reason}" + (f": {reply.detail}" if reply.detail else "")
                )
                if reply.reason == "detached":  # P has forgotten us: the next hand-over makes a new link
                    link.fail("peer_lost", f"P has no handshake of ours: {reply.detail}")
                self._step(read.active_load, handover.SourceFailed(read.source, reason), now)
            case messages.Committed():
                event = (
                    handover.SourceCommitted(read.source)
                    if reply.ok
                    else handover.SourceFailed(
                        read.source, Reason("expired", "the lease ended before the read was committed")
                    )
                )
                self._step(read.active_load, event, now)
            case messages.Stopped():
                self._receiver.stopped(read, reply.sent)

    def _grant(self, read: SourceRead, grant: messages.Grant, now: float) -> None:
        if read.stopped or read.granted:
            return
        wanted = read.active_load.load.prompt
        if wanted and grant.prompt != wanted:
            reason = Reason("denied", "P's lease is of another prompt than the request's parameters say")
            self._step(read.active_load, handover.SourceFailed(read.source, reason), now)
            return
        try:
            self._receiver.granted(read, grant)
        except GeometryError as error:
            self._step(read.active_load, handover.SourceFailed(read.source, Reason("data", str(error))), now)
        except Exception as error:  # an error of the copy is this request's, not everybody's
            logger.exception("kvferry: %s could not be read from P's pages", read.active_load.load.request_id)
            self._step(read.active_load, handover.SourceFailed(read.source, Reason("internal", repr(error))), now)
        else:
            read.granted = True
            self._step(read.active_load, handover.SourceGranted(read.source), now)
            if read.moved:  # its chunks were here before
                self._commit(read, now)

    def _collect(self, now: float) -> bool:
        for read, event in self._receiver.collect(list(self._links.values())):
            self._step(read.active_load, event, now)
        return self._receiver.backlog

    def _all_moved(self, read: SourceRead, now: float) -> None:
        read.moved = True
        self._step(read.active_load, handover.SourceMoved(read.source), now)
