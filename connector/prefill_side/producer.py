"""P's half of the transfer thread: what P's engine and the ranks of D ask of it.

This file handles commands and messages. ``lease_table`` holds the leases, ``outgoing_reads`` the reads that P sends.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from kvferry.connector.pages.caches import Ids
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.prefill_side import lease
from kvferry.connector.prefill_side.computing_prompt import ABANDONED, NOT_RESUMED, ComputingPhase
from kvferry.connector.prefill_side.computing_prompts import ComputingPrompt, ComputingPrompts
from kvferry.connector.prefill_side.early_requests import EarlyRequests
from kvferry.connector.prefill_side.held_lease import HeldLease, granted
from kvferry.connector.prefill_side.lease_table import LeaseTable
from kvferry.connector.prefill_side.named_prompts import Answer, NamedPrompts
from kvferry.connector.prefill_side.outgoing_reads import OutgoingReads
from kvferry.connector.prefill_side.replies import Replies
from kvferry.connector.prefill_side.sessions import Session, Sessions, refusal
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import LeaseGrant, Prefill, PrefillStop, QueuedPrompt, unpack_ids
from kvferry.transport.control.listener import Listener
from kvferry.transport.errors import GeometryError, KVFerryError, ProtocolError

logger = logging.getLogger("vllm.kvferry.producer")

SERVE_SECONDS = 0.01
"""How long the thread answers messages before it looks at its other work; further messages wait for the next turn."""
MAX_READERS = 1024
"""Reads of one prompt that P grants by message before its lease; others wait for the lease."""
CLOSING_SECONDS = 0.02
"""How long the last message to each D, why P closes, stands alone. A D that sees it together with the end of the
connection loses it: libzmq drops what it has not delivered then. D knows that P is gone in any case."""


class Producer:
    """P's side of this rank. Used by the transfer thread only."""

    def __init__(self, rank_context: RankContext, listener: Listener, freed: Callable[[str], None]) -> None:
        """``freed``: called with each request of whose lease nothing reads the blocks any more."""
        self._rank_context = rank_context
        self._on_freed = freed
        self._log = rank_context.log
        self._listener = listener
        self._leases = LeaseTable(rank_context, self._stop_reads, self._lease_ended)
        self._sessions = Sessions(rank_context, self._leases.board.place)
        self._replies = Replies(rank_context, listener, self._sessions)
        self.reads = OutgoingReads(rank_context, self._leases, self._sessions, self._replies)
        self.computing = ComputingPrompts(
            rank_context.caches, self.reads.sender.resume, self.reads.refuse, self._computed, self._nearly_computed
        )
        settings = rank_context.settings
        self._early = EarlyRequests(settings.ask_hold_seconds, settings.lease_seconds)
        self.named = NamedPrompts(rank_context.engine_id, settings.ask_hold_seconds)
        self.arrived: deque[tuple[bytes, list[bytes], str]] = deque()
        """The messages that ``serve`` has not answered yet."""

    # --- commands from the engine -------------------------------------------------------------------------------

    def grant(self, grant: LeaseGrant, now: float) -> None:
        """Hold the blocks of a finished prompt. Any D that sends the token may read them."""
        try:
            caches, packed = self._rank_context.caches, grant.block_ids
            ids = [caches.kernel_ids(region, unpack_ids(ids)) for region, ids in enumerate(packed)]
        except GeometryError:
            self.computing.lose(grant.token)
            self.stop_prefill(PrefillStop(grant.token, ended=True), now)
            raise
        computed = self.computing.prompts.get(grant.token)
        self._leases.grant(grant, ids, None if computed is None else computed.blocks, now)
        if answers := self.named.grant(grant):
            self._answer(answers)
        if computed is not None:
            self._end_prefill(grant.token, ids, now)
        if self._early.votes.cost:
            for vote in self._early.take_votes(grant.token):
                self._leases.step(grant.token, vote, now)
        if self._early.asks.cost:
            self._serve_held(grant.token, now)

    def holds(self, token: bytes) -> bool:
        """Whether a lease of this token stands."""
        return token in self._leases.held

    def end_leases(self, now: float) -> None:
        """End all leases: nothing counts that is read, or would be committed, from now on."""
        self._leases.revoke_all(now)

    def _serve_held(self, token: bytes, now: float) -> None:
        """Serve the asks under a token that came too early."""
        for held in self._early.take_asks(token):
            session = self._sessions.find(held.identity, now)
            try:
                if session is not None:
                    self._ask(session, held.ask, now)
            except Exception as error:  # the lease stands: an error here must not free its blocks
                self._log.exception("held ask", "kvferry: unexpected error with an ask that was held")
                self.reads.deny(held, held.ask.read, "failed", repr(error))

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
            self._leases.remember_end(stop.token)
            self._early.take_votes(stop.token)
        else:
            self.named.take_back(stop.token)
        for held in self._early.take_asks(stop.token):  # a step of D may wait for it
            self.reads.deny(held, held.ask.read, "expired", ABANDONED if stop.ended else NOT_RESUMED)
        self.computing.stop(stop, now)

    def _nearly_computed(self, prompt: ComputingPrompt) -> None:
        """D takes some milliseconds from the answer until it reads, and waits for the rest in its step."""
        # The first stage of a pipeline does not know of the others.
        if self._leases.posts_grants and self._rank_context.caches.geometry.pp_size == 1:
            self._answer(self.named.offer(prompt.grant.token))

    def _computed(self, prompt: ComputingPrompt, now: float) -> None:
        """A prompt is computed, which P's engine has not said yet. A D that reads P's pages by itself need not wait for
        the lease: the engine's thread withdraws the grant before the blocks are used for anything else."""
        if not (self._leases.posts_grants and prompt.whole):
            return
        try:
            prompt.post(self._leases.board)
            if prompt.whole:  # else the engine's thread has taken the blocks back meanwhile
                self._nearly_computed(prompt)
                self._serve_held(prompt.grant.token, now)
        except Exception:  # other prompts of the step are computed, too; of this one D hears with its lease
            self._log.exception("computed prompt", "kvferry: unexpected error with a prompt that is computed")

    def _end_prefill(self, token: bytes, ids: list[Ids], now: float) -> None:
        """The lease of a prompt has begun: the reads that run are reads under the lease."""
        prompt = self.computing.grant(token, ids, now)
        if prompt is not None:
            self._leases.held[token].readers = prompt.readers
            for asked in prompt.asks():
                self._leases.step(token, asked, now)
            for outgoing in self.reads.sender.of_lease(token):
                self._leases.step(token, lease.ReadStarted(outgoing.key), now)

    # --- the loop's calls ---------------------------------------------------------------------------------------

    def serve(self, now: float) -> bool:
        """Answer messages that have arrived, for ``SERVE_SECONDS``. Returns whether some wait for the next turn."""
        if not self.arrived:
            self.arrived.extend(self._listener.receive())
        clock = self._rank_context.clock
        end = clock() + SERVE_SECONDS
        while self.arrived:
            identity, frames, address = self.arrived.popleft()
            try:
                self.handle(identity, messages.decode_request(frames), now, address)
            except messages.VersionError as error:
                ours, theirs = str(messages.PROTOCOL_VERSION), str(error.theirs)
                self._replies.send(identity, messages.Refused(field="protocol version", ours=ours, theirs=theirs))
                self._rank_context.drop("protocol version", error)
            except ProtocolError as error:
                self._rank_context.drop("malformed", error)
            except Exception as error:  # an error with one peer must not reach the others
                self._log.exception("message", "kvferry: unexpected error with a message")
                self._rank_context.drop("unexpected error", repr(error))
            if clock() >= end:
                break
        return bool(self.arrived)

    def tick(self, now: float) -> None:
        """Expire leases, refuse held asks that are overdue, end the sessions of D ranks that are gone."""
        self._leases.tick(now)
        self.computing.tick(now)
        self.reads.repeat_grants(now)
        for held in self._early.take_late(now, self.named):
            self.reads.deny(held, held.ask.read, "unknown", "no such lease was granted here in time")
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
        return bool(self.reads.sender.waiting)

    @property
    def answers_wait(self) -> bool:
        """Whether a D that may read P's pages by itself waits until a prompt is computed. Any thread may ask."""
        return self._leases.posts_grants and bool(self.named.held.cost or self._early.asks.cost)

    @property
    def live(self) -> bool:
        """Whether any deadline is running."""
        early = self._early.asks.cost or self._early.votes.cost or self.named.held.cost
        return bool(self._leases.held or early or self._replies.kept.cost or self.reads.sender.waiting)

    def withdraw(self) -> None:
        """Withdraw all posted grants. After this call no reader accepts data that it has read. Idempotent."""
        self._leases.board.close()

    def say_closing(self, reason: str) -> None:
        """Tell every D that all leases have ended, and why. Blocks for ``CLOSING_SECONDS``. ``close`` must follow."""
        for session in self._sessions:
            self._replies.send(session.identity, messages.Closing(reason=reason))
        if len(self._sessions):
            time.sleep(CLOSING_SECONDS)

    def close(self) -> None:
        """Drop every session. The engine reuses the blocks of all leases after this call."""
        self.withdraw()
        self._sessions.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def handle(self, identity: bytes, request: messages.Request, now: float, address: str) -> None:
        """Answer a request."""
        session = self._sessions.find(identity, now)
        match request:
            case messages.Hello():
                self._hello(identity, request, now, address)
            case messages.Renew():
                for token in request.tokens:
                    self._leases.step(token, lease.Renewed(), now)
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
                        self._replies.send(identity, self._sessions.attach(session, request))
                    case messages.Ask():
                        self._ask(session, request, now)
                    case messages.Cancel():
                        self._cancel(session, request, now)
                    case messages.Commit():
                        ok = self._may_commit(identity, request)
                        self._replies.send(identity, messages.Committed(read=request.read, ok=ok))

    def _strange(self, identity: bytes, request: messages.Request) -> None:
        """Refuse a request that came without a Hello, or from a D whose session has ended here. The reply lets D start
        a new handshake."""
        reply = refusal(request)
        if reply is not None:
            self._replies.send(identity, reply)
        raise ProtocolError(f"{type(request).__name__} before Hello")

    def _hello(self, identity: bytes, hello: messages.Hello, now: float, address: str) -> None:
        refused = self._sessions.check(hello)
        if refused is None:
            for session in self._sessions.displaced(identity):
                self._end_session(session, now)
        self._replies.send(identity, refused or self._sessions.begin(identity, hello, address, now))

    def _ask(self, session: Session, ask: messages.Ask, now: float) -> None:
        prompt: HeldLease | ComputingPrompt | None = self._leases.held.get(ask.token)
        if prompt is None:
            computing = self.computing.get(ask.token)
            # A D that reads P's pages by itself waits until all is computed.
            if computing is not None and (session.sender is not None or self._may_read(computing)):
                prompt = computing
        if prompt is None and ask.token not in self._leases.ended:
            if self._is_taken_back(ask.token):
                self.reads.deny(session, ask.read, "expired", NOT_RESUMED)
            else:
                self._hold(session, ask, now)
            return
        if prompt is None or (isinstance(prompt, HeldLease) and not lease.may_commit(prompt.lifetime.state)):
            self.reads.deny(session, ask.read, "expired")
            return
        if session.channel is None or session.channel.error is not None:
            self.reads.deny(session, ask.read, "detached", "no data plane is attached")
            return
        session.asked = True
        leased = isinstance(prompt, HeldLease)
        try:
            ids = prompt.ids if leased or session.channel.pulls else None
            self.reads.sender.check(session, ask, prompt.grant.num_tokens, ids)
            chunks = 0 if session.channel.pulls else self.reads.sender.num_chunks(ask, session.chunk_bytes)
        except KVFerryError as error:
            self.reads.deny(session, ask.read, "bounds", str(error))
            return
        # Only a D that reads P's pages by itself receives the block ids.
        block_ids: tuple[bytes, ...] = ()
        source: list[Ids] | ComputingPrompt
        if isinstance(prompt, ComputingPrompt):
            prompt.asked(ask.consumer, ask.expected)
            source = prompt
            if session.channel.pulls and prompt.blocks is not None:
                block_ids = prompt.block_ids
                prompt.readers[session.identity, ask.read] = prompt.blocks
        else:
            self._leases.step(ask.token, lease.Asked(ask.consumer, frozenset(ask.expected)), now)
            source, block_ids = prompt.ids, prompt.grant.block_ids if session.channel.pulls else ()
        self._replies.send(session.identity, granted(prompt.grant, ask.read, chunks, block_ids))
        if chunks:
            self.reads.begin(session, ask, source, chunks, now)

    def _may_read(self, prompt: ComputingPrompt) -> bool:
        """Whether a D that reads by itself may do so before the lease. What it reads, it must commit."""
        return self._leases.posts_grants and prompt.whole and len(prompt.readers) < MAX_READERS

    def _is_taken_back(self, token: bytes) -> bool:
        """Whether the engine has taken back the blocks of a prompt for which a step of D may wait: D, or another rank
        of it, was told that it is computed, or nearly."""
        prompt = self.computing.get(token)
        preempted = prompt is not None and prompt.lifetime.state.phase is ComputingPhase.PREEMPTED
        return preempted or self.named.is_taken_back(token)

    def _hold(self, session: Session, ask: messages.Ask, now: float) -> None:
        """Keep an ask until its lease is granted, or until ``ask_hold_seconds`` have passed."""
        for held in self._early.hold(session, ask, now):
            self.reads.deny(held, held.ask.read, "unknown", "too many asks are waiting for their lease")

    def _may_commit(self, identity: bytes, commit: messages.Commit) -> bool:
        """Whether the blocks that D has read are those of the prompt."""
        held = self._leases.held.get(commit.token)
        prompt = held or self.computing.get(commit.token)
        blocks = None if prompt is None else prompt.readers.get((identity, commit.read))
        if blocks is not None and blocks.lost:
            return False  # it may be that the prompt lies in other blocks by now
        return blocks is not None if held is None else lease.may_commit(held.lifetime.state)

    def _cancel(self, session: Session, cancel: messages.Cancel, now: float) -> None:
        if self._early.asks.pop((session.identity, cancel.read)) is not None:
            self.reads.sender.refused(session, cancel.read)
        sent = self.reads.cancel(session, cancel, now)
        self._replies.send(session.identity, messages.Stopped(read=cancel.read, sent=sent))

    def _release(self, session: Session | None, release: messages.Release, now: float) -> None:
        """Count a release. For a lease that P holds, any D counts that knows its token, also one whose geometry P has
        refused. Before that, P keeps releases of D ranks that it knows."""
        if release.token in self._leases.ended:
            return
        if release.token in self._leases.held:
            event = lease.Released(release.consumer, release.consumer_rank, frozenset(release.expected))
            self._leases.step(release.token, event, now)
        elif session is None:
            raise ProtocolError("Release of an unknown lease before Hello")
        else:
            self._early.vote(session, release, now)

    # --- effects ------------------------------------------------------------------------------------------------

    def _stop_reads(self, token: bytes, now: float) -> None:
        self.reads.refuse(token, now)

    def _lease_ended(self, grant: LeaseGrant, now: float) -> None:
        self._on_freed(grant.request_id)
        if answers := self.named.end(grant.token, now):
            self._answer(answers)

    def _end_session(self, session: Session, now: float) -> None:
        self.reads.end_session(session, now)
        self._early.asks.drop(session.identity)
        self._replies.forget(session.identity)
        self._sessions.end(session)

    def _answer(self, answers: list[Answer]) -> None:
        for identity, message in answers:
            self._replies.send(identity, message)
