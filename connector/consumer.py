"""D's half of the mover: hand-overs, the links they go over, and the claims that keep P's leases alive.

Decisions are ``handover.step``'s; this file performs its effects and feeds it what happens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator

import msgspec

from kvferry.connector import handover, protocol
from kvferry.connector.claims import Claims
from kvferry.connector.errors import GeometryError, KVFerryError, ProtocolError
from kvferry.connector.handover import Reason
from kvferry.connector.link import Link, LinkState
from kvferry.connector.metrics import FailureKind
from kvferry.connector.pace import NEVER, Pace
from kvferry.connector.plan import check_complete, plan_reads
from kvferry.connector.reads import Job, Read, Reads
from kvferry.connector.site import Site
from kvferry.connector.spans import check_spans
from kvferry.connector.stepplan import Load, PeerEngine, RankAddress, Watch, unpack_ids
from kvferry.connector.topology import readers
from kvferry.transport.plane import MappedChannel, ReadChannel

logger = logging.getLogger("vllm.kvferry.consumer")

FAILED_LINK_SECONDS = 1.0
"""A failed link answers for that long, so that a burst of requests for a dead peer fails fast."""
IDLE_LINK_SECONDS = 120.0
"""A link that nothing used for that long is closed, so that its staging memory serves other peers."""


class Finished(msgspec.Struct, frozen=True):
    """What the engine is told of a load from the engine ``engine_id``, once."""

    request_id: str
    ok: bool
    engine_id: str
    pace: Pace = NEVER


class Consumer:
    """All hand-overs into this rank. Called from the mover's thread only."""

    def __init__(
        self,
        site: Site,
        begun: Callable[[Load], None],
        finished: Callable[[Finished], None],
    ) -> None:
        """``begun`` is told of each load that a step computes with, once all its copies are under way, unless they have
        ended. ``finished`` is told of each load that ended, as soon as it has. ``now`` of all methods is what deadlines
        go by, see ``RunningClock``."""
        self._site = site
        self._tell_begun, self._tell = begun, finished
        self._timeouts = handover.Timeouts(
            site.settings.handshake_timeout_seconds, site.settings.transfer_timeout_seconds
        )
        self._links: dict[RankAddress, Link] = {}
        self._jobs: dict[str, Job] = {}
        self._reads = Reads(site.caches)
        self._claims = Claims(site.caches.geometry, self._link)

    # --- commands from the engine -------------------------------------------------------------------------------

    def identify(self, consumer: bytes) -> None:
        """Which life of which engine this rank belongs to; the same on all ranks."""
        self._claims.consumer = consumer

    def watch(self, watch: Watch, now: float) -> None:
        """Keep a lease alive until its request is loaded or dropped."""
        self._claims.open(watch.token, watch.peer, watch.request_id, now, siblings=watch.siblings)

    def drop(self, request_id: str, now: float) -> None:
        """The request will load nothing."""
        self._claims.close(request_id, now)

    def cancel(self, request_id: str, now: float) -> bool:
        """Give a load up; it still reports, once nothing can write its blocks. ``False``: it has reported before."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._step(job, handover.Cancel(), now)
        return job is not None

    def load(self, load: Load, now: float, *, alone: bool = False) -> None:
        """Start a hand-over. ``alone``: no other one is about to begin."""
        try:
            self._claims.open(load.token, load.peer, load.request_id, now)
            ids = [self._site.caches.kernel_ids(g, unpack_ids(ids)) for g, ids in enumerate(load.block_ids)]
            for region, (start, stop) in enumerate(load.tokens):
                if stop > start:
                    self._site.caches.check_held(region, ids[region], start, stop)
            addresses = list(self._addresses(load.peer))
        except KVFerryError as error:
            self._report(load, Reason("incompatible", str(error)))
            self._claims.close(load.request_id, now)
            return
        state, effects = handover.begin(len(addresses), self._timeouts, now)
        job = Job(load, state, time.monotonic(), ids, alone)
        self._jobs[load.request_id] = job
        for number, address in enumerate(addresses):
            link = self._link(load.peer, address)
            self._reads.new(job, number, link)
            link.greet(now)
        self._perform(job, effects, now)
        for read in job.reads:
            self._follow(read, now)

    # --- the loop's calls ---------------------------------------------------------------------------------------

    def written(self, now: float) -> None:
        """See to copies into our pages that have ended: those that were waited for while they were begun."""
        for read, event in self._reads.written():
            self._step(read.job, event, now)

    def serve(self, now: float, heard: Collection[object] | None = None) -> bool:
        """Handle what arrived; whether there is more to do at once. ``heard``: the sockets at which something has
        arrived; ``None`` is any, and then deadlines are looked at too."""
        for link in list(self._links.values()):
            try:
                for reply in link.serve(now) if heard is None or link.stirred(heard) else ():
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
        for job in list(self._jobs.values()):
            self._step(job, handover.Tick(), now)
        self._claims.tick(now)
        for address, link in list(self._links.items()):
            if link.used or self._reads.through(link):
                link.used, link.used_at = False, now
            failed = link.seen is LinkState.FAILED and now >= link.failed_at + FAILED_LINK_SECONDS
            if failed or now >= link.used_at + IDLE_LINK_SECONDS:
                link.close()
                del self._links[address]

    def hurry(self) -> None:
        """We were held up while P's deadlines went on: renew at the next tick."""
        self._claims.hurry()

    @property
    def live(self) -> bool:
        """Whether any deadline is running."""
        return bool(self._jobs or self._claims or any(x.state is LinkState.FAILED for x in self._links.values()))

    @property
    def links(self) -> list[Link]:
        return [link for link in self._links.values() if link.state is not LinkState.FAILED]

    def close(self, now: float) -> None:
        """Give every claim up and close the links; loads that still run are reported as failed."""
        for job in list(self._jobs.values()):
            self._step(job, handover.Cancel(Reason("cancelled", "the engine is shutting down")), now)
        self._collect(now)  # of copies that have just ended
        self._claims.close_all()
        for link in self._links.values():
            link.close()
        self._links.clear()

    # --- links --------------------------------------------------------------------------------------------------

    def _addresses(self, peer: PeerEngine) -> Iterator[RankAddress]:
        ours = self._site.caches.geometry
        p_ranks = readers(ours.tp_rank, ours.tp_size, peer.tp_size, ours.head_counts, ours.splits, peer.splits)
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
            link = self._links[address] = Link(self._site, peer, address)
        return link

    def _link_changed(self, link: Link, now: float) -> None:
        for read in self._reads.through(link):
            self._follow(read, now)
        if link.state is LinkState.FAILED:
            link.failed_at = now
            for read in self._reads.through(link):
                self._reads.forget(read)
            link.detach()

    def _follow(self, read: Read, now: float) -> None:
        """Tell the hand-over what became of a read's link."""
        if read.stopped:
            return
        if read.link.state is LinkState.ATTACHED:
            self._step(read.job, handover.PeerReady(read.source), now)
        elif read.link.state is LinkState.FAILED:
            self._step(read.job, handover.Failed(read.source, read.link.why), now)

    # --- effects ------------------------------------------------------------------------------------------------

    def _step(self, job: Job, event: handover.Event, now: float) -> None:
        job.state, effects = handover.step(job.state, event, now)
        self._perform(job, effects, now)
        if job.load.now:
            self._look_whether_begun(job)

    def _look_whether_begun(self, job: Job) -> None:
        """The device of the step that waits for it can wait for the copies themselves, once there are no more to
        come."""
        moving = job.state.phase is handover.Phase.MOVING
        if moving and not job.begun and all(read.begun for read in job.reads):
            job.begun = True
            self._tell_begun(job.load)

    def _perform(self, job: Job, effects: tuple[handover.Effect, ...], now: float) -> None:
        for effect in effects:
            match effect:
                case handover.Ask():
                    self._plan_and_ask(job, now)
                case handover.Commit():
                    for read in job.reads:
                        self._commit(read, now)
                case handover.Stop():
                    self._stop(job, now)
                case handover.Release():
                    self._claims.close(job.load.request_id, now)
                case handover.Report(reason):
                    self._jobs.pop(job.load.request_id, None)
                    for read in job.reads:
                        if read.moved or not read.tags:
                            self._reads.forget(read)  # the others wait for P's Stopped
                    self._report(job.load, reason, job)

    def _plan_and_ask(self, job: Job, now: float) -> None:
        ours, tokens = self._site.caches.geometry, job.load.tokens
        try:
            planned = [plan_reads(ours, read.link.theirs, tokens) for read in job.reads]
            check_complete(ours, [span for spans in planned for span in spans], tokens)
            for read, spans in zip(job.reads, planned, strict=True):
                read.planned = spans
        except KVFerryError as error:
            self._step(job, handover.Failed(0, Reason("incompatible", str(error))), now)
            return
        for read, spans in zip(job.reads, planned, strict=True):
            if read.stopped:  # another one has failed
                break
            if spans:
                if not self._find_posted(read, now):
                    self._ask(read, now)
            else:  # a stage that holds none of our layers
                self._all_moved(read, now)

    def _find_posted(self, read: Read, now: float) -> bool:
        """Whether P has posted the grant, so that nothing need be asked; reading then begins at once."""
        board = read.link.board
        note = None if board is None else board.find(read.job.load.token)
        if note is None:
            return False
        try:
            grant = protocol.decode_grant(note.text)
            check_spans([item.span for item in read.planned], read.link.theirs, grant.num_tokens)
        except (ProtocolError, GeometryError):
            return False  # P says what is wrong
        read.note = note
        self._grant(read, grant, now)
        return True

    def _ask(self, read: Read, now: float) -> None:
        load = read.job.load
        read.link.send(
            protocol.Ask(
                read=read.number,
                token=load.token,
                consumer=self._claims.consumer,
                consumer_rank=self._claims.rank,
                expected=self._claims.expected(load.peer, read.link.address.tp_rank),
                spans=tuple(item.span for item in read.planned),
                chunk_bytes=read.link.slot_bytes,
            )
        )
        try:
            self._reads.expect(read)
        except GeometryError as error:
            self._step(read.job, handover.Failed(read.source, Reason("incompatible", str(error))), now)

    def _commit(self, read: Read, now: float) -> None:
        """See that what was read is what the lease is of. What P has pushed it has read itself, and it sends nothing of
        a lease that has ended; of which prompt it is, the grant says, which may come after the last chunk."""
        if read.note is not None:
            expired = Reason("expired", "the lease ended before the read was committed")
            stands = read.note.stands and read.link.state is not LinkState.FAILED
            source = read.source
            self._step(read.job, handover.Committed(source) if stands else handover.Failed(source, expired), now)
        elif isinstance(read.link.channel, ReadChannel | MappedChannel) and read.planned:
            read.link.send(protocol.Commit(read=read.number, token=read.job.load.token))
        elif read.granted or not read.planned:
            self._step(read.job, handover.Committed(read.source), now)

    def _stop(self, job: Job, now: float) -> None:
        for read in job.reads:
            self._reads.stop(read)
        if job.state.phase is handover.Phase.DRAINING:
            for read in job.reads:
                if not read.writing:  # of the others the end of the last copy tells
                    self._step(job, handover.Drained(read.source), now)

    def _report(self, load: Load, reason: Reason | None, job: Job | None = None) -> None:
        """Count it, tell the engine, and only then write it down: its request waits."""
        tokens = max((stop - start for start, stop in load.tokens), default=0)
        if job is not None and reason is None:
            seconds = time.monotonic() - job.started
            milliseconds = seconds * 1e3
            planes = sorted({read.link.plane.name for read in job.reads if read.link.plane is not None})
            plane = "+".join(planes) or "none"
            self._site.stats.finished(nbytes=job.nbytes, milliseconds=milliseconds, plane=plane, tokens=tokens)
            by_us = all(read.note is not None for read in job.reads if read.planned)
            pace = Pace(seconds, max(1, tokens)) if by_us else NEVER
            self._tell(Finished(load.request_id, True, load.peer.engine_id, pace))
            logger.info(
                "kvferry: hand-over of %s done: %d tokens, %d bytes in %.2f ms over %s from %s%s",
                load.request_id, tokens, job.nbytes, milliseconds, plane, load.peer.engine_id[:8],
                ", inside the step" if load.now else "",
            )  # fmt: skip
            return
        if reason is not None:
            self._site.stats.failed(reason.kind)
        self._tell(Finished(load.request_id, reason is None, load.peer.engine_id))
        if reason is not None:
            logger.warning("kvferry: hand-over of %s failed, %d tokens not loaded: %s", load.request_id, tokens, reason)

    # --- replies and data ---------------------------------------------------------------------------------------

    def _reply(self, link: Link, reply: protocol.Reply, now: float) -> None:
        if isinstance(reply, protocol.Welcome | protocol.Refused | protocol.Attached):
            return
        read = self._reads.find(reply.read, link)
        if read is None:
            return  # of a read that has ended
        match reply:
            case protocol.Grant():
                self._grant(read, reply, now)
            case protocol.Deny():
                kind: FailureKind = "expired" if reply.reason in ("expired", "unknown") else "denied"
                reason = Reason(
                    kind, f"P denied the read, {reply.reason}" + (f": {reply.detail}" if reply.detail else "")
                )
                if reply.reason == "detached":  # P has forgotten us: the next hand-over makes a new link
                    link.fail("peer_lost", f"P has no handshake of ours: {reply.detail}")
                self._step(read.job, handover.Failed(read.source, reason), now)
            case protocol.Committed():
                event = (
                    handover.Committed(read.source)
                    if reply.ok
                    else handover.Failed(
                        read.source, Reason("expired", "the lease ended before the read was committed")
                    )
                )
                self._step(read.job, event, now)
            case protocol.Stopped():
                self._reads.stopped(read, reply.sent)

    def _grant(self, read: Read, grant: protocol.Grant, now: float) -> None:
        if read.stopped or read.granted:
            return
        wanted = read.job.load.prompt
        if wanted and grant.prompt != wanted:
            reason = Reason("denied", "P's lease is of another prompt than the request's parameters say")
            self._step(read.job, handover.Failed(read.source, reason), now)
            return
        try:
            self._reads.granted(read, grant)
        except GeometryError as error:
            self._step(read.job, handover.Failed(read.source, Reason("data", str(error))), now)
        except Exception as error:  # an error of the copy is this request's, not everybody's
            logger.exception("kvferry: %s could not be read from P's pages", read.job.load.request_id)
            self._step(read.job, handover.Failed(read.source, Reason("internal", repr(error))), now)
        else:
            read.granted = True
            self._step(read.job, handover.Granted(read.source), now)
            if read.moved:  # its chunks were here before
                self._commit(read, now)

    def _collect(self, now: float) -> bool:
        for read, event in self._reads.collect(list(self._links.values())):
            self._step(read.job, event, now)
        return self._reads.backlog

    def _all_moved(self, read: Read, now: float) -> None:
        read.moved = True
        self._step(read.job, handover.Moved(read.source), now)
