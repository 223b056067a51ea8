"""The reads of D's hand-overs: asks, grants, and the effects of the table ``source_read``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kvferry.connector.decode_side.active_load import ActiveLoad, SourceRead
from kvferry.connector.decode_side.handover import HandoverEvent, Reason
from kvferry.connector.decode_side.lease_keeper import LeaseKeeper
from kvferry.connector.decode_side.link import Link
from kvferry.connector.decode_side.load_reports import grant_stands
from kvferry.connector.decode_side.receiver import Happening, Receiver
from kvferry.connector.decode_side.source_read import (
    CancelRead,
    CheckPostedGrant,
    CommitAnswered,
    FailLink,
    ForgetRead,
    ReadAsked,
    ReadEffect,
    ReadEvent,
    ReadFailed,
    ReadGranted,
    ReadPhase,
    SendCommit,
    StopRead,
)
from kvferry.connector.geometry.spans import check_spans
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import FailureKind
from kvferry.transport.errors import GeometryError, ProtocolError, shortened

logger = logging.getLogger("vllm.kvferry.source_reads")


_DENIED: dict[messages.DenyReason, FailureKind] = {
    "expired": "expired",
    "unknown": "expired",
    "bounds": "denied",
    "detached": "peer_lost",
    "failed": "data",
}


class SourceReads:
    """Gives the reads their events, and performs their effects. Used by the transfer thread only."""

    def __init__(
        self,
        rank_context: RankContext,
        receiver: Receiver,
        lease_keeper: LeaseKeeper,
        on_event: Callable[[ActiveLoad, HandoverEvent, float], None],
    ) -> None:
        """``on_event``: takes the effects of reads that are events of their hand-overs."""
        self._rank_context = rank_context
        self._log = rank_context.log
        self._receiver = receiver
        self._lease_keeper = lease_keeper
        self._on_event = on_event

    def step_all(self, happenings: Iterable[Happening], now: float) -> None:
        """Give reads their events."""
        for read, event in happenings:
            self.step(read, event, now)

    def step(self, read: SourceRead, event: ReadEvent, now: float) -> None:
        """Perform every effect of an event, also after an error in one."""
        effects = read.lifetime.step(event, now)
        if isinstance(event, StopRead):
            self._receiver.stopped(read)
        for effect in effects:
            try:
                self._perform_read_effect(read, effect, now)
            except Exception as error:
                name = type(effect).__name__
                self._log.exception(name, "kvferry: unexpected error in %s of read %d", name, read.number)
                self._rank_context.stats.failed("internal")
                if isinstance(effect, SendCommit | CheckPostedGrant):
                    self.step(read, ReadFailed(Reason("internal", repr(error))), now)

    def _perform_read_effect(self, read: SourceRead, effect: ReadEffect, now: float) -> None:
        match effect:
            case SendCommit():
                read.link.send(messages.Commit(read=read.number, token=read.active_load.load.token))
            case CheckPostedGrant():
                stands = grant_stands(read)
                if not stands:
                    self._rank_context.stats.total("stale_reads")
                self.step(read, CommitAnswered(stands), now)
            case CancelRead():
                self.step_all(self._receiver.cancel(read), now)
            case ForgetRead():
                self._receiver.forget(read)
            case FailLink():
                read.link.fail("timeout", f"no end of a stopped read in {read.state.timeout:g} s")
            case _:
                self._on_event(read.active_load, effect, now)

    def use_posted_grant(self, read: SourceRead, now: float, *, asked: bool = False) -> bool:
        """Whether P has posted the grant on its grant board. Then D sends no ask, and the read begins at once. Where
        D has ``asked`` before, it needs no commit of P."""
        board = read.link.board
        note = None if board is None else board.find(read.active_load.load.token)
        if note is None:
            return False
        try:
            grant = messages.decode_grant(note.text)
            check_spans([item.span for item in read.planned], read.link.theirs, grant.num_tokens)
        except (ProtocolError, GeometryError):
            return False  # P's answer to an ask will contain the reason
        if asked:
            read.active_load.granted_at = self._rank_context.clock()
        read.note = note
        self.step(read, ReadAsked(0, "posted"), now)
        self._take_grant(read, grant, now)
        return True

    def ask(self, read: SourceRead, now: float) -> None:
        """Ask P for the planned spans of a read."""
        load = read.active_load.load
        read.link.send(
            messages.Ask(
                read=read.number,
                token=load.token,
                consumer=self._lease_keeper.consumer,
                consumer_rank=self._lease_keeper.rank,
                expected=self._lease_keeper.expected(load.peer, read.address.tp_rank),
                spans=tuple(item.span for item in read.planned),
                chunk_bytes=read.chunk_bytes,
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
        self.step(read, ReadAsked(len(read.tags), "asked" if read.link.pulls else "pushed"), now)
        if failure is not None:
            self.step(read, ReadFailed(failure), now)

    def _take_grant(self, read: SourceRead, grant: messages.Grant, now: float) -> None:
        """Check a grant, and begin to read P's pages where D reads them by itself."""
        if not read.state.awaits_grant:
            if not read.link.pulls:
                self.step(read, ReadGranted(), now)  # a second grant, or the grant of a stopped read
            return
        wanted = read.active_load.load.prompt
        try:
            if wanted and grant.prompt != wanted:
                self._lease_keeper.disown(read.active_load.load.token, read.active_load.load.request_id)
                text = "P's lease is of another prompt than the request's parameters name"
                self.step(read, ReadFailed(Reason("denied", text)), now)
                return
            self._receiver.check_grant(read, grant)
            self.step(read, ReadGranted(), now)
            self.step_all(self._receiver.begin_pull(read, grant), now)
        except GeometryError as error:
            self.step(read, ReadFailed(Reason("data", str(error))), now)
        except Exception as error:  # an error of one copy fails one request
            logger.exception("kvferry: %s could not be read from P's pages", read.active_load.load.request_id)
            self.step(read, ReadFailed(Reason("internal", repr(error))), now)

    def reply(self, link: Link, reply: messages.Reply, now: float) -> None:
        """Handle a message of P."""
        if isinstance(reply, messages.HandshakeReply | messages.Closing | messages.Resolved | messages.Unresolved):
            return  # the link has handled it, or it concerns no read
        read = self._receiver.find(reply.read, link)
        if read is None:
            return  # a message for a read that has ended
        match reply:
            case messages.Grant():
                waits = read.link.pulls and read.state.awaits_grant
                if not (waits and self.use_posted_grant(read, now, asked=True)):  # posted since D has asked
                    self._take_grant(read, reply, now)
            case messages.Deny():
                detail = f": {shortened(reply.detail)!r}" if reply.detail else ""
                if reply.reason == "detached":  # P has ended its session with this D: the next load makes a new link
                    link.fail("peer_lost", f"P has no handshake of ours{detail}")
                self.step(
                    read, ReadFailed(Reason(_DENIED[reply.reason], f"P denied the read, {reply.reason}{detail}")), now
                )
            case messages.Committed():
                if not reply.ok and read.state.phase is ReadPhase.COMMITTING:  # P may say so again
                    self._rank_context.stats.total("stale_reads")
                self.step(read, CommitAnswered(reply.ok), now)
            case messages.Stopped():
                self.step_all(self._receiver.on_stopped(read, reply.sent), now)
