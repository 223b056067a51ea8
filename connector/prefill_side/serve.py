"""P's half of the transfer thread: what P's engine and the ranks of D ask of it, and the answers.

This file handles commands and messages, and performs the effects of the leases.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import NamedTuple

from kvferry.connector.pages.computed_steps import ComputedStep
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.prefill_side.lease import (
    GIVEN_UP,
    NOT_RESUMED,
    WHY_STOPPED,
    Lease,
    LeaseEffect,
    LeaseEvent,
    LeaseEventKind,
    LeasePhase,
    Leases,
    rank_set,
)
from kvferry.connector.prefill_side.lookup import Answer, NamedPrompts
from kvferry.connector.prefill_side.prefixes import PrefixIndex
from kvferry.connector.prefill_side.send import OutgoingRead, Sends
from kvferry.connector.prefill_side.session import Session, Sessions, refusal
from kvferry.connector.prefill_side.stream import PrefillSteps
from kvferry.connector.wire import messages
from kvferry.connector.wire.messages import PREFIX_TOKENS
from kvferry.connector.wire.step_plan import (
    ID_BYTES,
    LeaseGrant,
    Prefill,
    PrefillChunk,
    PrefillStop,
    pack_ids,
    unpack_ids,
)
from kvferry.transport.control.listener import Delivery, Listener
from kvferry.transport.errors import KVFerryError, ProtocolError
from kvferry.transport.fair_table import FairTable
from kvferry.transport.grant_board import GrantBoard
from kvferry.transport.wake import FAILED_LINES, RateLimitedLog

logger = logging.getLogger("vllm.kvferry.serve")
_K = LeaseEventKind
READ_ENDED, RENEWED = LeaseEvent(_K.READ_ENDED), LeaseEvent(_K.RENEWED)

SERVE_SECONDS = 0.01
"""How long the thread answers messages before it looks at its other work; further messages wait for the next turn."""
PACKS_PER_TURN = 2
"""Chunks that the thread packs before it looks at control messages again."""
RENEW_SECONDS = 0.02
"""Between two renewals of a lease by the chunks of one read; deadlines are checked as often."""
SIGN_SECONDS = 2.0
"""How often P repeats the grants of reads that wait for its engine: D's deadlines begin anew with each."""
MAX_READERS = 1024
"""Reads of one prompt that P grants by message before its lease; others wait for the lease."""
CLOSING_SECONDS = 0.02
"""How long the last message to each D, why P closes, stands alone. A D that sees it together with the end of the
connection loses it: libzmq drops what it has not delivered then. D knows that P is gone in any case."""
HELD_SPANS = 1 << 16
"""Bound on the asks that wait, by their spans and ranks: 24 MB."""
ASK_COST = 8
"""Cost of an ask beside its spans and ranks."""
EARLY_RANKS = 1 << 14
"""Bound on the releases that wait, by the ranks that they name: 16 MB."""
UNSENT_BYTES = 16 << 20
"""Bound on the replies that are kept, for all peers together."""
REPLY_BYTES = 256
"""What a kept reply takes beside its bytes."""


class Producer:
    """P's side of this rank. Used by the transfer thread only."""

    def __init__(self, rank_context: RankContext, listener: Listener, freed: Callable[[str], None]) -> None:
        """``freed``: called with each request of whose lease nothing reads the blocks any more."""
        self._rank_context, self._listener, self._on_freed = rank_context, listener, freed
        self._log, self._expired = rank_context.log, RateLimitedLog(logger, per_key=FAILED_LINES)
        settings = rank_context.settings
        self.leases = Leases(rank_context)
        self._sessions = Sessions(rank_context, self.leases.board.place)
        self._replies = Replies(rank_context, listener, self._sessions)
        self._attaching: dict[Session, messages.Attach] = {}  # whose connection is not here yet
        self._sends = Sends(rank_context.caches, rank_context.clock)
        self.steps = PrefillSteps(rank_context.caches)
        self._early = EarlyRequests(settings.ask_hold_seconds, settings.lease_seconds)
        self.named = NamedPrompts(rank_context.engine_id, settings.ask_hold_seconds)
        view = next(iter(rank_context.caches.views), None)  # a pipeline stage may hold no layer
        pages = (view.num_pages, max(1, view.page_tokens // PREFIX_TOKENS)) if view else (0, 1)
        self.prefixes = PrefixIndex(*pages)
        self.arrived: deque[tuple[bytes, list[bytes], str]] = deque()
        """The messages that ``serve`` has not answered yet."""
        self._next_sign = 0.0

    # --- commands from the engine -------------------------------------------------------------------------------

    def grant(self, grant: LeaseGrant, now: float) -> None:
        """Hold the blocks of a finished prompt. Any D that sends the token may read them. Raises GeometryError where a
        block id is out of range; then ``refuse`` must follow."""
        token = grant.token
        ids = list(map(self._rank_context.caches.kernel_ids, count(), map(unpack_ids, grant.block_ids)))
        self.leases.begin(grant, ids, now)
        if self._sends.waiting:
            self._sends.resume(token)
        if answers := self.named.grant(grant):
            self.answer(answers)
        if self._early.votes.cost:
            for release in self._early.take_votes(token):
                self._release(None, release, now)
        if self._early.asks.cost:
            self._serve_held(token, now)

    def refuse(self, grant: LeaseGrant, now: float) -> None:
        """A grant has raised an error, or must not follow any more: the engine gets its blocks back, and no D may wait
        for them. Where the lease stands all the same, D may read the blocks, and the end of the lease gives them back.
        """
        lease = self.leases.table.get(grant.token)
        if lease is not None and lease.begun:
            return
        if lease is not None and lease.blocks is not None:
            lease.blocks.lose()
        self._on_freed(grant.request_id)
        self.stop_prefill(PrefillStop(grant.token, ended=True), now)

    def end_leases(self, now: float) -> None:
        """End all leases: nothing counts that is read, or would be committed, from now on. A read that P sends ends
        first."""
        for lease in list(self.leases.table.values()):
            self._step(lease, LeaseEvent(_K.REVOKED), now)

    def end_sessions(self, now: float) -> None:
        """Every D must make a new handshake, also one that needs no message of ours because it reads the board."""
        for session in list(self._sessions.table.values()):
            self._end_session(session, now)
        self.leases.board.close()
        self.leases.board = GrantBoard()
        self._sessions.board = self.leases.board.place

    def begin_prefill(self, prompt: Prefill, now: float) -> None:
        """The engine begins to compute a prompt that a lease will cover. From now on D can ask for it by name."""
        if prompt.streams:
            self.leases.prepare(prompt, now)
            self._serve_held(prompt.token, now)
        self.answer(self.named.begin(prompt))

    def stop_prefill(self, stop: PrefillStop, now: float) -> None:
        """The engine has taken back the blocks of a prompt. ``stop.ended``: no lease will cover it."""
        token, lease = stop.token, self._computing(stop.token)
        if stop.ended:
            self.answer(self.named.end(token, now))
            self.leases.remember_end(token)
            self._early.take_votes(token)
        else:
            self.named.take_back(token)
        for held in self._early.take_asks(token):  # a step of D may wait for it
            self.deny(held.identity, held.request.read, "expired", GIVEN_UP if stop.ended else NOT_RESUMED)
        if lease is not None:
            if stop.ended:
                del self.leases.table[token]
            self._step(lease, LeaseEvent(_K.ABANDONED if stop.ended else _K.PREEMPTED), now)

    def plan_step(self, chunks: tuple[PrefillChunk, ...], step: ComputedStep, now: float) -> None:
        """A step begins that computes these chunks. Raises GeometryError where a block id is out of range."""
        for lease, event in self.steps.plan(chunks, step, self.leases.table):
            self._step(lease, event, now)

    def look(self, now: float) -> None:
        """Look at the steps that the device has not ended."""
        for lease, event in self.steps.look():
            self._step(lease, event, now)

    def end_lost(self, now: float) -> None:
        """The engine reuses blocks of prefixes that are lent."""
        for token in self.prefixes.take_lost():
            if (lease := self.leases.table.get(token)) is not None:
                self._rank_context.stats.prefix("lent", "reused")
                self._step(lease, LeaseEvent(_K.REVOKED), now)

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

    def pump(self, now: float) -> bool:
        """Pack and send chunks of the reads in turn. Returns whether more can be packed or sent at once."""
        if not (self._sends.turns or self._sends.draining):
            return False
        for read in self._sends.drained():
            self._account(read)
            self._step(read.lease, READ_ENDED, now)
        packed = idle = 0
        while packed < PACKS_PER_TURN and idle < len(self._sends.turns):  # all have had a turn since the last chunk
            read, moved, failure = self._sends.turn()
            idle = 0 if moved else idle + 1
            if moved:
                packed += 1
                if now >= read.renews_at:
                    read.renews_at = now + RENEW_SECONDS
                    self._step(read.lease, RENEWED, now)
            if failure:
                self._fail(read, failure, now)
            elif read.sent == read.chunks and not read.reading:
                self._stop(read, now)
        return packed == PACKS_PER_TURN

    def tick(self, now: float) -> None:
        """Expire leases, refuse held asks that are overdue, end the sessions of D ranks that are gone."""
        for lease in self.leases.due(now):
            self._step(lease, LeaseEvent(_K.TICK), now)
        if now >= self._next_sign and self._sends.waiting:
            self._next_sign = now + SIGN_SECONDS
            for read in chain.from_iterable(self._sends.waiting.values()):
                self._replies.send(read.session.identity, read.lease.answer(read.ask.read, read.chunks))
        for held in self._early.take_late(now, self.named):
            self.deny(held.identity, held.request.read, "unknown", "no such lease was granted here in time")
        self.answer(self.named.take_late(now))
        for session, attach in list(self._attaching.items()):
            if self._sessions.table.get(session.identity) is session:
                self._attach(session, attach, now)
            else:
                del self._attaching[session]
        for session in self._sessions.gone(now):
            self._end_session(session, now)
        self._replies.flush()
        while self._replies.lost:
            unread = self._sessions.table.get(self._replies.lost.pop())
            if unread is not None:
                text = (
                    f"kvferry: the decode engine {unread.engine_id[:8]} does not read the replies of this "
                    "rank: its session ends"
                )
                self._log.warning("unread replies", text)
                self._end_session(unread, now)

    def _attach(self, session: Session, attach: messages.Attach, now: float) -> None:
        """Accept the data plane that D chose; again at the next tick, where D's connection is not here yet."""
        reply = self._sessions.attach(session, attach, now)
        if reply is None:
            self._attaching[session] = attach
        else:
            self._attaching.pop(session, None)
            self._replies.send(session.identity, reply)

    @property
    def reads_wait(self) -> bool:
        """Whether a read waits until P's engine has computed more. Any thread may ask."""
        return bool(self._sends.waiting)

    @property
    def answers_wait(self) -> bool:
        """Whether a D that may read P's pages by itself waits until a prompt is computed. Any thread may ask."""
        return self.leases.posts_early and bool(self.named.held.cost or self._early.asks.cost)

    @property
    def live(self) -> bool:
        """Whether any deadline is running."""
        early = self._early.asks.cost or self._early.votes.cost or self.named.held.cost or self._attaching
        return bool(self.leases.held or early or self._replies.kept.cost or self._sends.waiting)

    def withdraw(self) -> None:
        """Withdraw all posted grants. After this call no reader accepts data that it has read. Idempotent."""
        self.leases.board.close()

    def say_closing(self, reason: str) -> None:
        """Tell every D that all leases have ended, and why. Blocks for ``CLOSING_SECONDS``. ``close`` must follow."""
        for session in self._sessions.table.values():
            self._replies.send(session.identity, messages.Closing(reason=reason))
        if self._sessions.table:
            time.sleep(CLOSING_SECONDS)

    def close(self) -> None:
        """Drop every session. The engine reuses the blocks of all leases after this call."""
        self.withdraw()
        self._sessions.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def handle(self, identity: bytes, request: messages.Request, now: float, address: str) -> None:
        """Handle a request."""
        session = self._sessions.find(identity, now)
        match request:
            case messages.Hello():
                self._hello(identity, request, now, address)
            case messages.Renew():
                for token in request.tokens:
                    if (lease := self.leases.table.get(token)) is not None:
                        self._step(lease, RENEWED, now)
            case messages.Release():
                self._release(session, request, now, identity)
            case messages.Resolve():
                self.answer(self.named.resolve(identity, request, now))
            case messages.LeaveName():
                self.named.leave(identity, request.number)
            case messages.FindPrefix():
                self._replies.send(identity, self._find_prefix(request))
            case _ if session is None:
                if (reply := refusal(request)) is not None:  # it lets D start a new handshake
                    self._replies.send(identity, reply)
                raise ProtocolError(f"{type(request).__name__} before Hello")
            case messages.Attach():
                self._attach(session, request, now)
            case messages.LendPrefix():
                self._lend(session, request, now)
            case messages.Ask():
                self._ask(session, request, now)
            case messages.Cancel():
                self._cancel(session, request, now)
            case messages.Commit():
                ok = self._may_commit(identity, request)
                self._replies.send(identity, messages.Committed(read=request.read, ok=ok))

    def _hello(self, identity: bytes, hello: messages.Hello, now: float, address: str) -> None:
        refused = self._sessions.check(hello)
        if refused is None:
            for session in self._sessions.displaced(identity):
                self._end_session(session, now)
        self._replies.send(identity, refused or self._sessions.begin(identity, hello, address, now))

    def _find_prefix(self, wanted: messages.FindPrefix) -> messages.Resolved | messages.Unresolved:
        ours, prefixes = self._rank_context.engine_id, self.prefixes
        if wanted.engine_id not in ("", ours):
            return messages.Unresolved(number=wanted.number, final=True, detail=f"this is engine {ours[:256]}")
        if not prefixes.params:
            return messages.Unresolved(number=wanted.number, final=True, detail="this engine has no prefix to read")
        found = prefixes.find(wanted.digests) * PREFIX_TOKENS
        return messages.Resolved(number=wanted.number, params=prefixes.params, granted=True, found=found)

    def _lend(self, session: Session, wanted: messages.LendPrefix, now: float) -> None:
        """D is about to read a prefix. Where it does not lie here any more, the ask that follows is refused."""
        token, digests = wanted.token, wanted.digests
        if token in self.leases.table or self.leases.is_over(token) or token in self.named:
            return  # another rank of D has asked
        self.leases.drawn.put(session.identity, token, None)
        lent = self.prefixes.lend(token, digests, session.address)
        if lent is None:
            self._rank_context.stats.prefix("lent", "gone")
            return
        life, blocks = lent
        caches = self._rank_context.caches
        tokens, packed = len(digests) // messages.DIGEST_BYTES * PREFIX_TOKENS, pack_ids(blocks)
        try:
            ids = [caches.kernel_ids(region, unpack_ids(packed)) for region in range(len(caches.views))]
            digest = digests[-messages.DIGEST_BYTES :].hex()
            self.leases.lend(LeaseGrant("a prefix", token, tokens, (packed,) * len(ids), digest), ids, life, now)
        except Exception:
            self.prefixes.end(token)
            raise

    def _ask(self, session: Session, ask: messages.Ask, now: float) -> None:
        identity, read, lease = session.identity, ask.read, self.leases.table.get(ask.token)
        if lease is not None and lease.lent and not lease.intact:
            self.deny(identity, read, "expired")
            return
        # A D that reads P's pages by itself waits until all is computed.
        if lease is None or not (lease.begun or session.sender is not None or self._may_read(lease)):
            preempted = lease is not None and lease.lifetime.state.phase is LeasePhase.PREEMPTED
            if self.leases.is_over(ask.token):
                self.deny(identity, read, "expired")
            elif preempted or self.named.is_taken_back(ask.token):
                # A step of D may wait: D, or another rank of it, was told that the prompt is computed, or nearly.
                self.deny(identity, read, "expired", NOT_RESUMED)
            else:
                for held in self._early.hold(identity, ask, now):
                    self.deny(held.identity, held.request.read, "unknown", "too many asks are waiting for their lease")
            return
        if lease.begun and not lease.granted:
            self.deny(identity, read, "expired")
            return
        if session.channel is None or session.channel.error is not None:
            self.deny(identity, read, "detached", "no data plane is attached")
            return
        session.asked, pulls = True, session.channel.pulls
        try:
            chunks = self._sends.check(session, ask, lease, allocated=lease.granted or pulls)
        except KVFerryError as error:
            self.deny(identity, read, "bounds", str(error))
            return
        self._step(lease, LeaseEvent(_K.ASKED, ask.decode_engine, expected=rank_set(ask.expected)), now)
        if pulls and not lease.granted and lease.blocks is not None:
            lease.readers[identity, read] = lease.blocks
        # Only a D that reads P's pages by itself receives the block ids.
        self._replies.send(identity, lease.answer(read, chunks, lease.block_ids if pulls else ()))
        if chunks:
            displaced = self._sends.begin(session, ask, lease, chunks)
            self._step(lease, LeaseEvent(_K.READ_STARTED), now)
            self._rank_context.stats.levels["sending"] += 1
            for other in displaced:
                self._fail(other, "the prefill engine sends too many reads to this decode engine", now)

    def _serve_held(self, token: bytes, now: float) -> None:
        """Serve the asks under a token that came too early."""
        for held in self._early.take_asks(token):
            session = self._sessions.find(held.identity, now)
            try:
                if session is not None:
                    self._ask(session, held.request, now)
            except Exception as error:  # the lease stands: an error here must not free its blocks
                self._log.exception("held ask", "kvferry: unexpected error with an ask that was held")
                self.deny(held.identity, held.request.read, "failed", repr(error))

    def _may_read(self, lease: Lease) -> bool:
        """Whether a D that reads by itself may do so before the lease. What it reads, it must commit."""
        return self.leases.posts_early and lease.whole and len(lease.readers) < MAX_READERS

    def _computing(self, token: bytes) -> Lease | None:
        """The prompt under this token, before its lease."""
        lease = self.leases.table.get(token)
        return None if lease is None or lease.begun else lease

    def _may_commit(self, identity: bytes, commit: messages.Commit) -> bool:
        """Whether the blocks that D has read are those of the prompt."""
        lease = self.leases.table.get(commit.token)
        if lease is None:
            return False
        blocks = lease.readers.get((identity, commit.read))
        if blocks is not None and blocks.lost:
            return False  # it may be that the prompt lies in other blocks by now
        return lease.granted if lease.begun else blocks is not None

    def _cancel(self, session: Session, cancel: messages.Cancel, now: float) -> None:
        key = session.identity, cancel.read
        if self._early.asks.pop(key) is not None:
            self._sends.refused(session, cancel.read)
        if (read := self._sends.live.get(key)) is not None:
            self._stop(read, now)
        sent = self._sends.ended.get(key) or 0  # 0: D never asked for this read
        self._replies.send(session.identity, messages.Stopped(read=cancel.read, sent=sent))

    def _release(self, session: Session | None, release: messages.Release, now: float, identity: bytes = b"") -> None:
        """Count a release. For a lease that P holds, any D counts that knows its token, also one whose geometry P has
        refused. Before that, P keeps releases of D ranks that it knows, and of prompts that it computes."""
        if self.leases.is_over(release.token):
            return
        lease = self.leases.table.get(release.token)
        if lease is not None and (lease.begun or lease.lent):
            expected = rank_set(release.expected)
            event = LeaseEvent(_K.RELEASED, release.decode_engine, release.decode_rank, expected)
            self._step(lease, event, now)
        elif session is not None or lease is not None or release.token in self.named:
            self._early.vote(identity, release, now)

    # --- effects ------------------------------------------------------------------------------------------------

    def _step(self, lease: Lease, event: LeaseEvent, now: float) -> None:
        """Give a lease an event, and perform its effects; some of them are followed by further events."""
        events = [event]
        for each in events:
            for effect in self.leases.step(lease, each, now):
                match effect:
                    case LeaseEffect.RESUME:
                        self._sends.resume(lease.grant.token)
                    case LeaseEffect.OFFER:
                        self._offer(lease)
                    case LeaseEffect.POST:
                        self._post(lease, now)
                    case LeaseEffect.STOP:
                        why = WHY_STOPPED.get(lease.lifetime.state.phase, "")
                        for read in self._sends.of(lambda read: read.lease is lease):
                            self.deny(read.session.identity, read.ask.read, "expired", why)
                            if self._ends(read):
                                events.append(READ_ENDED)
                    case LeaseEffect.FREE:
                        self._free(lease, lease.lifetime.state.reason, now)

    def _offer(self, lease: Lease) -> None:
        """D takes some milliseconds from the answer until it reads, and waits for the rest in its step."""
        # The first stage of a pipeline does not know of the others.
        if self.leases.posts_early and self._rank_context.caches.geometry.pp_size == 1:
            self.answer(self.named.offer(lease.grant.token))

    def _post(self, lease: Lease, now: float) -> None:
        """A prompt is computed, which P's engine has not said yet. A D that reads P's pages by itself need not wait for
        the lease: the engine's thread withdraws the grant before the blocks are used for anything else."""
        if not (self.leases.posts_early and lease.whole):
            return
        try:
            assert lease.blocks is not None
            text = messages.encode_grant(lease.answer(0, 0, lease.block_ids))
            lease.blocks.post(self.leases.board, lease.grant.token, text)
            if lease.whole:  # else the engine's thread has taken the blocks back meanwhile
                self._offer(lease)
                self._serve_held(lease.grant.token, now)
        except Exception:  # other prompts of the step are computed, too; of this one D hears with its lease
            self._log.exception("computed prompt", "kvferry: unexpected error with a prompt that is computed")

    def _free(self, lease: Lease, reason: str, now: float) -> None:
        request_id, token = lease.grant.request_id, lease.grant.token
        cap = self._rank_context.settings.lease_cap_seconds
        del self.leases.table[token]
        self.leases.held -= 1
        if lease.lent:  # the engine knows nothing of it
            assert lease.blocks is not None
            if reason != "reset":
                self._rank_context.stats.prefix("lent", "read" if reason == "released" else "expired")
            self.prefixes.end(token)
            lease.blocks.lose()
            return
        self.leases.remember_end(token)
        self._rank_context.stats.lease_ended(reason)  # first: the engine may idle once it knows of the end
        self._on_freed(request_id)
        if answers := self.named.end(token, now):
            self.answer(answers)
        if reason == "reset":
            text = "kvferry: lease of %s has ended: this engine was paused, or its caches were reset"
            self._expired.info(reason, text, request_id)
        elif reason != "released":
            why = f"the cap of {cap:g} s was reached" if reason == "cap" else "nobody renewed or released it"
            self._expired.warning(reason, "kvferry: lease of %s expired: %s", request_id, why)
        if lease.traceparent:
            attributes: dict[str, str | int] = {
                "kvferry.request_id": request_id,
                "kvferry.tokens": lease.grant.num_tokens,
                # Regions of one block table share its blocks.
                "kvferry.blocks": sum(map(len, set(lease.block_ids))) // ID_BYTES,
                "kvferry.end": reason,
            }
            error = "" if reason == "released" else f"the lease ended by time ({reason})"
            end = self._rank_context.clock()
            self._rank_context.record(lease.traceparent, "kvferry.lease", lease.begun_at, end, attributes, error)

    def _fail(self, read: OutgoingRead, why: str, now: float) -> None:
        """A read cannot be sent: tell D, and send no more of it."""
        if not read.stopped:
            session, way = read.session, "sending, sent" if read.sent == read.chunks else "sending"
            seconds = self._rank_context.clock() - read.begun_at
            text = f"{why}; the prefill read: {way}, draining +{seconds:.3f} s (SendFailed)"
            with self._guarded("DenyRead"):
                self._log.warning(
                    "read failed", "kvferry: a read of decode rank %s failed: %s", session.engine_id[:8], text
                )
                if session.attached:
                    self.deny(session.identity, read.ask.read, "failed", text)
            self._stop(read, now)

    def _stop(self, read: OutgoingRead, now: float) -> None:
        """Send no more of a read."""
        if self._ends(read):
            self._step(read.lease, READ_ENDED, now)

    def _ends(self, read: OutgoingRead) -> bool:
        """Send no more of a read. Returns whether it has ended by that: a READ_ENDED must follow."""
        ended = False
        if not read.stopped:
            with self._guarded("StopSending"):
                ended = self._sends.stop(read)
        if ended:
            self._account(read)
        return ended

    def _account(self, read: OutgoingRead) -> None:
        """A read has ended."""
        with self._guarded("EndRead"):
            self._sends.forget(read)
            self._rank_context.stats.levels["sending"] -= 1
            self._rank_context.stats.sent(read.early, read.nbytes - read.early)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """An error must not keep what follows from a read: one that never ends keeps its lease."""
        try:
            yield
        except Exception:
            self._log.exception(name, "kvferry: unexpected error in %s of a read", name)
            self._rank_context.stats.failed("internal")

    def deny(self, identity: bytes, read: int, reason: messages.DenyReason, detail: str = "") -> None:
        """Refuse a read, or what is left of it."""
        session = self._sessions.table.get(identity)
        if session is not None:
            self._sends.refused(session, read)
        self._replies.send(identity, messages.Deny(read=read, reason=reason, detail=detail[:1024]))

    def _end_session(self, session: Session, now: float) -> None:
        for read in self._sends.of(lambda read: read.session is session):
            self._stop(read, now)
        self._sends.ended.drop(session.identity)
        self._early.asks.drop(session.identity)
        self.leases.drawn.drop(session.identity)
        self._replies.kept.drop(session.identity)
        self._sessions.end(session)

    def answer(self, answers: list[Answer]) -> None:
        """Send answers to questions for prompts."""
        for to, message in answers:
            self._replies.send(to, message)


class Replies:
    """Sends replies. The listener holds some thousand messages for a D that does not read; then further ones are kept
    here, for the peers with a session, and sent later, in order.

    ``lost`` contains the peers of which a kept reply found no room any more. Their sessions must end: D would wait for
    a reply that never comes.
    """

    def __init__(self, rank_context: RankContext, listener: Listener, sessions: Sessions) -> None:
        self._rank_context, self._listener, self._sessions = rank_context, listener, sessions
        self.kept: FairTable[tuple[bytes, int], tuple[bytes, list[bytes]]] = FairTable(UNSENT_BYTES)
        """By identity and the number of the reply."""
        self._last = 0
        self.lost: set[bytes] = set()

    def send(self, identity: bytes, message: messages.Reply) -> None:
        """Send a reply, or keep it where the queue of this D is full. A reply that finds no room there is dropped."""
        frames = messages.encode(message)
        sent = Delivery.FULL if self.kept.owns(identity) else self._listener.send(identity, frames)
        if sent is Delivery.SENT:
            return
        if sent is Delivery.FULL and self._sessions.table.get(identity) is not None and identity not in self.lost:
            self._last += 1
            cost = REPLY_BYTES + sum(map(len, frames))
            for owner, _ in self.kept.put(identity, (identity, self._last), (identity, frames), cost):
                self.kept.drop(owner)
                self.lost.add(owner)
            if identity not in self.lost:
                return
        elif sent is Delivery.FULL:
            self._listener.dropped["full"] += 1
        if not isinstance(message, messages.Closing):  # D has left first
            self._rank_context.drop("reply to a peer that is gone", type(message).__name__)

    def flush(self) -> None:
        """Send the kept replies for which there is room now."""
        for owner in self.kept.owners():
            while (key := self.kept.oldest(owner)) is not None:
                kept = self.kept.get(key)
                assert kept is not None
                sent = self._listener.send(*kept)
                if sent is Delivery.FULL:
                    break
                self.kept.pop(key)
                if sent is Delivery.GONE:
                    self.kept.drop(owner)


class EarlyAsk(NamedTuple):
    """An ask that arrived before its lease. ``identity``: of the D rank that sent it."""

    identity: bytes
    request: messages.Ask
    deadline: float


class EarlyRequests:
    """Asks and releases that arrive before the lease that they name. A fast router sends D the answer of P's scheduler
    before P's workers have the lease, so this is no exception. Each session has a fair share of the room.

    Args:
        ask_seconds: how long an ask waits.
        vote_seconds: how long a release waits.
    """

    def __init__(self, ask_seconds: float, vote_seconds: float) -> None:
        self._ask_seconds, self._vote_seconds = ask_seconds, vote_seconds
        self.asks: FairTable[tuple[bytes, int], EarlyAsk] = FairTable(HELD_SPANS)
        """By identity and number of the read."""
        self.votes: FairTable[tuple[bytes, bytes, int], tuple[messages.Release, float]] = FairTable(EARLY_RANKS)
        """By token, decode engine and its rank; until when each is kept."""

    def hold(self, identity: bytes, ask: messages.Ask, now: float) -> list[EarlyAsk]:
        """Keep an ask. Returns the asks that find no room any more: the caller denies them."""
        early = EarlyAsk(identity, ask, now + self._ask_seconds)
        return self.asks.put(identity, (identity, ask.read), early, ASK_COST + len(ask.spans) + len(ask.expected))

    def vote(self, identity: bytes, release: messages.Release, now: float) -> None:
        """Keep a release."""
        key = release.token, release.decode_engine, release.decode_rank
        if key not in self.votes:
            self.votes.put(identity, key, (release, now + self._vote_seconds), 1 + len(release.expected))

    def take_votes(self, token: bytes) -> list[messages.Release]:
        """The releases of a lease that P holds from now on."""
        found = [self.votes.pop(key) for key in self.votes if key[0] == token]
        return [vote[0] for vote in found if vote is not None]

    def take_asks(self, token: bytes) -> list[EarlyAsk]:
        """The asks for a lease that P holds from now on, the oldest first."""
        return self._taken([early for early in self.asks.values() if early.request.token == token])

    def take_late(self, now: float, computing: Container[bytes] = ()) -> list[EarlyAsk]:
        """The asks that have waited long enough: the caller denies them. Forgets the releases that have, except those
        of prompts that P is ``computing``."""
        for release, _ in self.votes.first(lambda vote: now >= vote[1]):
            if release.token not in computing:
                self.votes.pop((release.token, release.decode_engine, release.decode_rank))
        return self._taken(self.asks.first(lambda early: now >= early.deadline))

    def _taken(self, found: list[EarlyAsk]) -> list[EarlyAsk]:
        for early in found:
            self.asks.pop((early.identity, early.request.read))
        return found
