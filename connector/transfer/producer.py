"""P's half of the transfer thread: the leases of this rank, and the replies to the ranks of D.

The tables ``lease`` and ``outgoing_read`` decide. This file performs their effects and gives them events.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from itertools import chain

from kvferry.connector.protocol import lease, messages, outgoing_read
from kvferry.connector.protocol.computing_prompt import ABANDONED
from kvferry.connector.protocol.state_machine import Lifetime, Tick
from kvferry.connector.protocol.step_plan import LeaseGrant, Prefill, PrefillStop, QueuedPrompt, unpack_ids
from kvferry.connector.transfer.caches import Ids
from kvferry.connector.transfer.computing_prompts import ComputingPrompt, ComputingPrompts
from kvferry.connector.transfer.early_requests import EarlyRequests, HeldAsk
from kvferry.connector.transfer.handover_trace import MAX_READS, lease_span, record, sending_span
from kvferry.connector.transfer.held_lease import HeldLease, granted
from kvferry.connector.transfer.named_prompts import Answer, NamedPrompts
from kvferry.connector.transfer.rank_context import RankContext
from kvferry.connector.transfer.replies import Replies
from kvferry.connector.transfer.sender import OutgoingRead, Sender
from kvferry.connector.transfer.sessions import Session, Sessions, refusal
from kvferry.transport.control.listener import Listener
from kvferry.transport.errors import GeometryError, KVFerryError, ProtocolError
from kvferry.transport.grant_board import GrantBoard

logger = logging.getLogger("vllm.kvferry.producer")

ENDED_TOKENS = 1 << 16
"""Tokens that P remembers after their lease has ended, so that P refuses a late ask at once. P does not grant an ask
with an unknown token either, but refuses it only after ``ask_hold_seconds``."""
SERVE_SECONDS = 0.01
"""How long the thread answers messages before it looks at its other work; further messages wait for the next turn."""
PACKS_PER_TURN = 2
"""Chunks that the thread packs before it looks at control messages again."""
CLOSING_SECONDS = 0.02
"""How long the last message to each D, why P closes, stands alone. A D that sees it together with the end of the
connection loses it: libzmq drops what it has not delivered then. D knows that P is gone in any case."""
SIGN_SECONDS = 2.0
"""How often P repeats the grants of reads that wait for its engine: D's deadlines begin anew with each."""
READ_FAILED = "read failed"
"""The log lines of failed reads share one limited rate under this key."""


class Producer:
    """All leases of this rank and all reads under them. Used by the transfer thread only."""

    def __init__(self, rank_context: RankContext, listener: Listener, freed: Callable[[str], None]) -> None:
        """``freed``: called with each request of whose lease nothing reads the blocks any more."""
        self._rank_context = rank_context
        self._on_freed = freed
        self._log = rank_context.log
        self._listener = listener
        self._leases: dict[bytes, HeldLease] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._board = GrantBoard()
        # A grant is not posted where the engine may have freed some of the blocks: there P must check each ask.
        self._posts_grants = any(plane.pulls for plane in rank_context.planes) and all(
            region.kind in ("full", "mla") for region in rank_context.caches.geometry.regions
        )
        self._sessions = Sessions(rank_context, self._board.place)
        self._sender = Sender(rank_context.caches)
        self.computing = ComputingPrompts(rank_context.caches, self._sender.resume, self._refuse_reads)
        self._next_sign = 0.0
        settings = rank_context.settings
        self._early = EarlyRequests(settings.ask_hold_seconds, settings.lease_seconds)
        self.named = NamedPrompts(rank_context.engine_id, settings.ask_hold_seconds)
        self._replies = Replies(listener)
        self._arrived: deque[tuple[bytes, list[bytes], str]] = deque()

    # --- commands from the engine -------------------------------------------------------------------------------

    def grant(self, grant: LeaseGrant, now: float) -> None:
        """Hold the blocks of a finished prompt. Any D that sends the token may read them."""
        settings = self._rank_context.settings
        try:
            caches, packed = self._rank_context.caches, grant.block_ids
            ids = [caches.kernel_ids(region, unpack_ids(ids)) for region, ids in enumerate(packed)]
        except GeometryError:
            self.stop_prefill(PrefillStop(grant.token, ended=True), now)
            raise
        state = lease.grant(now, settings.lease_seconds, settings.lease_cap_seconds)
        lifetime, begun_at = Lifetime(lease.LEASE, state, now), self._rank_context.clock()
        self._leases[grant.token] = HeldLease(grant, ids, lifetime, self._post(grant), begun_at)
        if answers := self.named.grant(grant):
            self._answer(answers)
        if self.computing.prompts:
            self._end_prefill(grant.token, ids, now)
        if self._early.votes.cost:
            for vote in self._early.take_votes(grant.token):
                self._step(grant.token, vote, now)
        if self._early.asks.cost:
            self._serve_held(grant.token, now)

    def _serve_held(self, token: bytes, now: float) -> None:
        """Serve the asks under a token that came too early."""
        for held in self._early.take_asks(token):
            session = self._sessions.find(held.identity, now)
            try:
                if session is not None:
                    self._ask(session, held.ask, now)
            except Exception as error:  # the lease stands: an error here must not free its blocks
                self._log.exception("held ask", "kvferry: unexpected error with an ask that was held")
                self._deny(held, held.ask.read, "failed", repr(error))

    def queue_prompt(self, prompt: QueuedPrompt) -> None:
        """The engine has a prompt in its queue that a lease will cover."""
        self.named.queue(prompt)

    def begin_prefill(self, prompt: Prefill, now: float) -> None:
        """The engine begins to compute a prompt that a lease will cover. From now on D can ask for it by name."""
        if prompt.streams:
            self.computing.begin(prompt, now)
            self._serve_held(prompt.token, now)
        self._answer(self.named.begin(prompt))

    def stop_prefill(self, stop: PrefillStop, now: float) -> None:
        """The engine has taken back the blocks of a prompt. ``stop.ended``: no lease will cover it."""
        if stop.ended:
            self._answer(self.named.end(stop.token, now))
            self._remember_end(stop.token)
            self._early.take_votes(stop.token)
            for held in self._early.take_asks(stop.token):
                self._deny(held, held.ask.read, "expired", ABANDONED)
        self.computing.stop(stop, now)

    def _end_prefill(self, token: bytes, ids: list[Ids], now: float) -> None:
        """The lease of a prompt has begun: the reads that run are reads under the lease."""
        prompt = self.computing.grant(token, ids, now)
        if prompt is not None:
            for asked in prompt.asks():
                self._step(token, asked, now)
            for outgoing in self._sender.of_lease(token):
                self._step(token, lease.ReadStarted(outgoing.key), now)

    def _post(self, grant: LeaseGrant) -> int | None:
        """Post a grant on the grant board. A D that reads P's pages by itself then needs no ask and no commit."""
        if not self._posts_grants:
            return None
        return self._board.post(grant.token, messages.encode_grant(granted(grant, 0, 0, grant.block_ids)))

    # --- the loop's calls ---------------------------------------------------------------------------------------

    def serve(self, now: float) -> bool:
        """Answer messages that have arrived, for ``SERVE_SECONDS``. Returns whether there were any."""
        if not self._arrived:
            self._arrived.extend(self._listener.receive())
        clock = self._rank_context.clock
        served, end = bool(self._arrived), clock() + SERVE_SECONDS
        while self._arrived:
            identity, frames, address = self._arrived.popleft()
            try:
                self._request(identity, messages.decode_request(frames), now, address)
            except messages.VersionError as error:
                ours, theirs = str(messages.PROTOCOL_VERSION), str(error.theirs)
                self._reply(identity, messages.Refused(field="protocol version", ours=ours, theirs=theirs))
                self._drop("protocol version", error)
            except ProtocolError as error:
                self._drop("malformed", error)
            except Exception as error:  # an error with one peer must not reach the others
                self._log.exception("message", "kvferry: unexpected error with a message")
                self._drop("unexpected error", repr(error))
            if clock() >= end:
                break
        return served

    @property
    def has_arrived(self) -> bool:
        """Whether messages have arrived that ``serve`` has not answered yet."""
        return bool(self._arrived)

    def pump(self, now: float) -> bool:
        """Pack and send chunks of the reads in turn. Returns whether more can be packed or sent at once."""
        if self._sender.idle:
            return False
        for outgoing in self._sender.drained():
            self._step_read(outgoing, outgoing_read.CopiesEnded(), now)
        packed = idle = 0
        while packed < PACKS_PER_TURN and idle < len(self._sender):  # all reads have had a turn since the last chunk
            outgoing, sent, event = self._sender.turn(now)
            idle = 0 if sent else idle + 1
            if sent:
                packed += 1
                self._step(outgoing.token, lease.Renewed(), now)
            if event is not None:
                self._step_read(outgoing, event, now)
        return packed == PACKS_PER_TURN

    def tick(self, now: float) -> None:
        """Expire leases, refuse held asks that are overdue, end the sessions of D ranks that are gone."""
        for token in list(self._leases):
            self._step(token, Tick(), now)
        self.computing.tick(now)
        if now >= self._next_sign and self._sender.waiting:
            self._next_sign = now + SIGN_SECONDS
            for outgoing in chain.from_iterable(self._sender.waiting.values()):
                assert outgoing.prompt is not None
                grant = granted(outgoing.prompt.grant, outgoing.number, outgoing.lifetime.state.chunks)
                self._reply(outgoing.session.identity, grant)
        for held in self._early.take_late(now, self.named):
            self._deny(held, held.ask.read, "unknown", "no such lease was granted here in time")
        self._answer(self.named.take_late(now))
        for session in self._sessions.gone(now):
            self._end_session(session, now)
        self._replies.flush()
        while self._replies.lost:
            unread = self._sessions.peek(self._replies.lost.pop())
            if unread is not None:
                text = f"kvferry: D {unread.engine_id[:8]} does not read the replies of this rank: its session ends"
                self._log.warning("unread replies", text)
                self._end_session(unread, now)

    @property
    def reads_wait(self) -> bool:
        """Whether a read waits until P's engine has computed more. Any thread may ask."""
        return bool(self._sender.waiting)

    @property
    def live(self) -> bool:
        """Whether any deadline is running."""
        early = self._early.asks.cost or self._early.votes.cost or self.named.held.cost
        return bool(self._leases or early or self._replies.kept.cost or self._sender.waiting)

    def withdraw(self) -> None:
        """Withdraw all posted grants. After this call no reader accepts data that it has read. Idempotent."""
        self._board.close()

    def say_closing(self, reason: str) -> None:
        """Tell every D that all leases have ended, and why. Blocks for ``CLOSING_SECONDS``. ``close`` must follow."""
        for session in self._sessions:
            self._reply(session.identity, messages.Closing(reason=reason))
        if len(self._sessions):
            time.sleep(CLOSING_SECONDS)

    def close(self) -> None:
        """Drop every session. The engine reuses the blocks of all leases after this call."""
        self.withdraw()
        self._sessions.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def _request(self, identity: bytes, request: messages.Request, now: float, address: str) -> None:
        session = self._sessions.find(identity, now)
        match request:
            case messages.Hello():
                self._hello(identity, request, now, address)
            case messages.Renew():
                for token in request.tokens:
                    self._step(token, lease.Renewed(), now)
            case messages.Release():
                self._release(session, request, now)
            case messages.Resolve():
                self._answer(self.named.resolve(identity, request, now))
            case messages.LeaveName():
                self.named.leave(identity, request.number)
            case _:
                if session is None:
                    self._strange(identity, request)
                    return
                match request:
                    case messages.Attach():
                        self._reply(identity, self._sessions.attach(session, request))
                    case messages.Ask():
                        self._ask(session, request, now)
                    case messages.Cancel():
                        self._cancel(session, request, now)
                    case messages.Commit():
                        held = self._leases.get(request.token)
                        ok = held is not None and lease.may_commit(held.lifetime.state)
                        self._reply(identity, messages.Committed(read=request.read, ok=ok))

    def _strange(self, identity: bytes, request: messages.Request) -> None:
        """Refuse a request that came without a Hello, or from a D whose session has ended here. The reply lets D start
        a new handshake."""
        reply = refusal(request)
        if reply is not None:
            self._reply(identity, reply)
        raise ProtocolError(f"{type(request).__name__} before Hello")

    def _hello(self, identity: bytes, hello: messages.Hello, now: float, address: str) -> None:
        refused = self._sessions.check(hello)
        if refused is None:
            for session in self._sessions.displaced(identity):
                self._end_session(session, now)
        self._reply(identity, refused or self._sessions.begin(identity, hello, address, now))

    def _ask(self, session: Session, ask: messages.Ask, now: float) -> None:
        prompt: HeldLease | ComputingPrompt | None = self._leases.get(ask.token)
        if prompt is None and session.sender is not None:  # a D that reads P's pages by itself waits for the lease
            prompt = self.computing.get(ask.token)
        if prompt is None and ask.token not in self._ended:
            self._hold(session, ask, now)
            return
        if prompt is None or (isinstance(prompt, HeldLease) and not lease.may_commit(prompt.lifetime.state)):
            self._deny(session, ask.read, "expired")
            return
        if session.channel is None or session.channel.error is not None:
            self._deny(session, ask.read, "detached", "no data plane is attached")
            return
        session.asked = True
        leased = isinstance(prompt, HeldLease)
        try:
            self._sender.check(session, ask, prompt.grant.num_tokens, prompt.ids if leased else None)
            chunks = 0 if session.channel.pulls else self._sender.num_chunks(ask, session.chunk_bytes)
        except KVFerryError as error:
            self._deny(session, ask.read, "bounds", str(error))
            return
        # Only a D that reads P's pages by itself receives the block ids.
        block_ids: tuple[bytes, ...] = ()
        source: list[Ids] | ComputingPrompt
        if isinstance(prompt, ComputingPrompt):
            prompt.asked(ask.consumer, ask.expected)
            source = prompt
        else:
            self._step(ask.token, lease.Asked(ask.consumer, frozenset(ask.expected)), now)
            source, block_ids = prompt.ids, prompt.grant.block_ids if session.channel.pulls else ()
        self._reply(session.identity, granted(prompt.grant, ask.read, chunks, block_ids))
        if chunks:
            outgoing, displaced = self._sender.new(session, ask, source, chunks, now)
            self._step(ask.token, lease.ReadStarted(outgoing.key), now)
            outgoing.begun_at = self._rank_context.clock()
            self._sender.start(outgoing)
            self._rank_context.stats.levels["sending"] += 1
            for other in displaced:
                self._step_read(other, outgoing_read.SendFailed("P sends too many reads to this D"), now)

    def _hold(self, session: Session, ask: messages.Ask, now: float) -> None:
        """Keep an ask until its lease is granted, or until ``ask_hold_seconds`` have passed."""
        for held in self._early.hold(session, ask, now):
            self._deny(held, held.ask.read, "unknown", "too many asks are waiting for their lease")

    def _cancel(self, session: Session, cancel: messages.Cancel, now: float) -> None:
        if self._early.asks.pop((session.identity, cancel.read)) is not None:
            self._sender.refused(session, cancel.read)
        outgoing = self._sender.find(session, cancel.read)
        if outgoing is not None:
            self._step_read(outgoing, outgoing_read.SendStopped(), now)
        sent = self._sender.flush(session, cancel)
        self._reply(session.identity, messages.Stopped(read=cancel.read, sent=sent))

    def _release(self, session: Session | None, release: messages.Release, now: float) -> None:
        """Count a release. For a lease that P holds, any D counts that knows its token, also one whose geometry P has
        refused. Before that, P keeps releases of D ranks that it knows."""
        if release.token in self._ended:
            return
        if release.token in self._leases:
            event = lease.Released(release.consumer, release.consumer_rank, frozenset(release.expected))
            self._step(release.token, event, now)
        elif session is None:
            raise ProtocolError("Release of an unknown lease before Hello")
        else:
            self._early.vote(session, release, now)

    # --- effects ------------------------------------------------------------------------------------------------

    def _step(self, token: bytes, event: lease.LeaseEvent, now: float) -> None:
        held = self._leases.get(token)
        if held is None:
            return
        effects = held.lifetime.step(event, now)
        if held.posted is not None and not lease.may_commit(held.lifetime.state):
            self._board.withdraw(held.posted)  # before the engine may reuse the blocks
            held.posted = None
        for effect in effects:
            match effect:
                case lease.StopReads():
                    self._refuse_reads(token, now)
                case lease.Freed(reason):
                    self._free(token, held, reason, now)

    def _refuse_reads(self, token: bytes, now: float, why: str = "") -> None:
        """Send no more of the reads under a token."""
        for outgoing in self._sender.of(lambda outgoing: outgoing.token == token):
            self._deny(outgoing.session, outgoing.number, "expired", why)
            self._step_read(outgoing, outgoing_read.SendStopped(), now)

    def _free(self, token: bytes, held: HeldLease, reason: str, now: float) -> None:
        del self._leases[token]
        self._remember_end(token)
        self._rank_context.stats.lease_ended(reason)  # first: the engine may idle once it knows of the end
        self._on_freed(held.grant.request_id)
        if answers := self.named.end(token, now):
            self._answer(answers)
        if reason != "released":
            cap = self._rank_context.settings.lease_cap_seconds
            why = f"the cap of {cap:g} s was reached" if reason == "cap" else "nobody renewed or released it"
            logger.warning("kvferry: lease of %s expired: %s", held.grant.request_id, why)

        if held.grant.traceparent:
            span = partial(lease_span, held, reason, self._rank_context.clock())
            record(self._rank_context, held.grant.traceparent, span)

    def _remember_end(self, token: bytes) -> None:
        self._ended[token] = None
        while len(self._ended) > ENDED_TOKENS:
            self._ended.popitem(last=False)

    def _step_read(self, outgoing: OutgoingRead, event: outgoing_read.OutgoingReadEvent, now: float) -> None:
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
                self._read_failed(outgoing, why)
            case outgoing_read.StopSending():
                if self._sender.stop(outgoing):
                    self._step_read(outgoing, outgoing_read.CopiesEnded(), now)
            case outgoing_read.EndRead():
                self._sender.forget(outgoing)
                self._rank_context.stats.levels["sending"] -= 1
                self._rank_context.stats.sent(outgoing.early, outgoing.nbytes - outgoing.early)
                held = self._leases.get(outgoing.token)
                if held is not None and held.grant.traceparent and len(held.sent) < MAX_READS:
                    held.sent.append(sending_span(outgoing, self._rank_context.clock()))
                self._step(outgoing.token, lease.ReadEnded(outgoing.key), now)

    def _read_failed(self, outgoing: OutgoingRead, why: str) -> None:
        session, text = outgoing.session, f"{why}; the read at P: {outgoing.lifetime.story()}"
        self._log.warning(READ_FAILED, "kvferry: a read of D %s failed: %s", session.engine_id[:8], text)
        if session.attached:
            self._deny(session, outgoing.number, "failed", text)

    def _end_session(self, session: Session, now: float) -> None:
        for outgoing in self._sender.of(lambda outgoing: outgoing.session is session):
            self._step_read(outgoing, outgoing_read.SendStopped(), now)
        self._early.asks.drop(session.identity)
        self._sender.forget_session(session)
        self._replies.forget(session.identity)
        self._sessions.end(session)

    def _answer(self, answers: list[Answer]) -> None:
        for identity, message in answers:
            self._reply(identity, message)

    def _reply(self, identity: bytes, message: messages.Reply) -> None:
        keep = self._sessions.peek(identity) is not None
        if not self._replies.send(identity, message, keep=keep):
            self._drop("reply to a peer that is gone", type(message).__name__)

    def _deny(self, to: Session | HeldAsk, read: int, reason: messages.DenyReason, detail: str = "") -> None:
        session = self._sessions.peek(to.identity)
        if session is not None:
            self._sender.refused(session, read)
        self._reply(to.identity, messages.Deny(read=read, reason=reason, detail=detail[:1024]))

    def _drop(self, reason: str, detail: object) -> None:
        self._rank_context.stats.dropped(reason)
        self._log.warning(reason, "kvferry: control message dropped (%s): %s", reason, detail)
