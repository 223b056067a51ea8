"""The reads that this rank of P sends: their begin, their turns, and the effects of the table ``outgoing_read``.

``sender`` packs and sends the chunks.
"""

from __future__ import annotations

from itertools import chain

from kvferry.connector.pages.caches import Ids
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.prefill_side import lease, outgoing_read
from kvferry.connector.prefill_side.computing_prompts import ComputingPrompt
from kvferry.connector.prefill_side.early_requests import HeldAsk
from kvferry.connector.prefill_side.held_lease import granted
from kvferry.connector.prefill_side.lease_table import LeaseTable
from kvferry.connector.prefill_side.replies import Replies
from kvferry.connector.prefill_side.sender import OutgoingRead, Sender
from kvferry.connector.prefill_side.sessions import Session, Sessions
from kvferry.connector.prefill_side.traces import MAX_READS, sending_span
from kvferry.connector.wire import messages

PACKS_PER_TURN = 2
"""Chunks that the thread packs before it looks at control messages again."""
SIGN_SECONDS = 2.0
"""How often P repeats the grants of reads that wait for its engine: D's deadlines begin anew with each."""
READ_FAILED = "read failed"
"""The log lines of failed reads share one limited rate under this key."""


class OutgoingReads:
    """Gives the reads their events, and performs their effects. Used by the transfer thread only."""

    def __init__(self, rank_context: RankContext, leases: LeaseTable, sessions: Sessions, replies: Replies) -> None:
        self._rank_context = rank_context
        self._log = rank_context.log
        self._leases, self._sessions, self._replies = leases, sessions, replies
        self.sender = Sender(rank_context.caches)
        self._next_sign = 0.0

    def begin(
        self, session: Session, ask: messages.Ask, source: list[Ids] | ComputingPrompt, chunks: int, now: float
    ) -> None:
        """Begin a read that was granted, of ``chunks`` chunks. ``source``: as ``Sender.new`` takes it."""
        outgoing, displaced = self.sender.new(session, ask, source, chunks, now)
        self._leases.step(ask.token, lease.ReadStarted(outgoing.key), now)
        outgoing.begun_at = self._rank_context.clock()
        self.sender.start(outgoing)
        self._rank_context.stats.levels["sending"] += 1
        for other in displaced:
            self._step(other, outgoing_read.SendFailed("P sends too many reads to this D"), now)

    def pump(self, now: float) -> bool:
        """Pack and send chunks of the reads in turn. Returns whether more can be packed or sent at once."""
        if self.sender.idle:
            return False
        for outgoing in self.sender.drained():
            self._step(outgoing, outgoing_read.CopiesEnded(), now)
        packed = idle = 0
        while packed < PACKS_PER_TURN and idle < len(self.sender):  # all reads have had a turn since the last chunk
            outgoing, sent, event = self.sender.turn(now)
            idle = 0 if sent else idle + 1
            if sent:
                packed += 1
                self._leases.step(outgoing.token, lease.Renewed(), now)
            if event is not None:
                self._step(outgoing, event, now)
        return packed == PACKS_PER_TURN

    def repeat_grants(self, now: float) -> None:
        """Tell each D whose read waits for P's engine that the read goes on."""
        if now < self._next_sign or not self.sender.waiting:
            return
        self._next_sign = now + SIGN_SECONDS
        for outgoing in chain.from_iterable(self.sender.waiting.values()):
            assert outgoing.prompt is not None
            grant = granted(outgoing.prompt.grant, outgoing.number, outgoing.lifetime.state.chunks)
            self._replies.send(outgoing.session.identity, grant)

    def cancel(self, session: Session, cancel: messages.Cancel, now: float) -> int:
        """Stop the read that D cancels. Returns for how many of its chunks D may wait."""
        outgoing = self.sender.find(session, cancel.read)
        if outgoing is not None:
            self._step(outgoing, outgoing_read.SendStopped(), now)
        return self.sender.flush(session, cancel)

    def refuse(self, token: bytes, now: float, why: str = "") -> None:
        """Send no more of the reads under a token."""
        for outgoing in self.sender.of(lambda outgoing: outgoing.token == token):
            self.deny(outgoing.session, outgoing.number, "expired", why)
            self._step(outgoing, outgoing_read.SendStopped(), now)

    def deny(self, to: Session | HeldAsk, read: int, reason: messages.DenyReason, detail: str = "") -> None:
        """Refuse a read, or what is left of it."""
        session = self._sessions.peek(to.identity)
        if session is not None:
            self.sender.refused(session, read)
        self._replies.send(to.identity, messages.Deny(read=read, reason=reason, detail=detail[:1024]))

    def end_session(self, session: Session, now: float) -> None:
        """Stop the reads of a session that ends, and forget them."""
        for outgoing in self.sender.of(lambda outgoing: outgoing.session is session):
            self._step(outgoing, outgoing_read.SendStopped(), now)
        self.sender.forget_session(session)

    def _step(self, outgoing: OutgoingRead, event: outgoing_read.OutgoingReadEvent, now: float) -> None:
        """Perform every effect of an event, whatever an earlier one raises: a read that never ends keeps its lease."""
        for effect in outgoing.lifetime.step(event, now):
            try:
                self._perform(outgoing, effect, now)
            except Exception:
                name = type(effect).__name__
                self._log.exception(name, "kvferry: unexpected error in %s of a read", name)
                self._rank_context.stats.failed("internal")

    def _perform(self, outgoing: OutgoingRead, effect: outgoing_read.OutgoingReadEffect, now: float) -> None:
        match effect:
            case outgoing_read.DenyRead(why):
                self._failed(outgoing, why)
            case outgoing_read.StopSending():
                if self.sender.stop(outgoing):
                    self._step(outgoing, outgoing_read.CopiesEnded(), now)
            case outgoing_read.EndRead():
                self.sender.forget(outgoing)
                self._rank_context.stats.levels["sending"] -= 1
                self._rank_context.stats.sent(outgoing.early, outgoing.nbytes - outgoing.early)
                held = self._leases.held.get(outgoing.token)
                if held is not None and held.grant.traceparent and len(held.sent) < MAX_READS:
                    held.sent.append(sending_span(outgoing, self._rank_context.clock()))
                self._leases.step(outgoing.token, lease.ReadEnded(outgoing.key), now)

    def _failed(self, outgoing: OutgoingRead, why: str) -> None:
        session, text = outgoing.session, f"{why}; the read at P: {outgoing.lifetime.story()}"
        self._log.warning(READ_FAILED, "kvferry: a read of D %s failed: %s", session.engine_id[:8], text)
        if session.attached:
            self.deny(session, outgoing.number, "failed", text)
