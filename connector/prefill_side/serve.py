"""P's half of the transfer thread: what P's engine and the ranks of D ask of it, and the answers.

This file handles commands and messages, and does what follows from them for the prompts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from typing import NamedTuple

import msgspec

from kvferry.connector.pages.computed_steps import ComputedStep
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.prefill_side.prefixes import PrefixIndex
from kvferry.connector.prefill_side.prompts import Prompt, Prompts, PromptState, rank_set
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
from kvferry.transport.control.listener import Listener
from kvferry.transport.errors import KVFerryError, ProtocolError
from kvferry.transport.fair_table import FairTable
from kvferry.transport.grant_board import GrantBoard
from kvferry.transport.limited_log import FAILED_LINES, RateLimitedLog

logger = logging.getLogger("vllm.kvferry.serve")

GIVEN_UP = "P's engine has given the prompt up"
NOT_RESUMED = "P's engine has preempted the prompt, and computes it later"
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
"""How long the last message to each D, why P closes, stands alone: else D may find the end of the data plane first."""
WAITING_SPANS = 1 << 17
"""Bound on the requests that wait, of all peers together, by their spans and ranks: 48 MB."""
WAITING_COST = 8
"""Cost of a request beside its spans and ranks."""


EarlyRequest = messages.Ask | messages.Release | messages.Resolve
"""What names a prompt."""


class Waiting(NamedTuple):
    """A request that came before its prompt: a router may send both legs of a request at once, and a fast one sends D
    the answer of P's scheduler before P's ranks have the lease. It is served again whenever the prompt changes."""

    identity: bytes
    """Of the D that sent it."""
    request: EarlyRequest
    deadline: float
    plans: int
    """``Producer.plans_seen`` when it came."""

    @property
    def key(self) -> Hashable:
        match self.request:
            case messages.Ask(read=number) | messages.Resolve(number=number):
                return type(self.request), self.identity, number
            case messages.Release() as release:
                return release.token, release.decode_engine, release.decode_rank

    @property
    def cost(self) -> int:
        request = self.request
        spans = len(request.spans) if isinstance(request, messages.Ask) else 0
        return WAITING_COST + spans + (0 if isinstance(request, messages.Resolve) else len(request.expected))

    def names(self, prompt: Prompt) -> bool:
        """Whether it is for this prompt."""
        request = self.request
        return request.name in prompt.names if isinstance(request, messages.Resolve) else request.token == prompt.token


class Producer:
    """P's side of this rank. Used by the transfer thread only."""

    def __init__(self, rank_context: RankContext, listener: Listener, freed: Callable[[str], None]) -> None:
        """``freed``: called with each request of whose lease nothing reads the blocks any more."""
        self._rank_context, self._listener, self._on_freed = rank_context, listener, freed
        self._log, self._expired = rank_context.log, RateLimitedLog(logger, per_key=FAILED_LINES)
        self.prompts = Prompts(rank_context)
        self._sessions = Sessions(rank_context, self.prompts.board.place)
        self._attaching: dict[Session, messages.Attach] = {}  # whose connection is not here yet
        self._sends = Sends(rank_context.caches, rank_context.clock)
        self.steps = PrefillSteps(rank_context.caches)
        self.waiting: FairTable[Hashable, Waiting] = FairTable(WAITING_SPANS)
        self.plans_seen = 0
        """Step plans of P's engine, whose thread counts them. An engine that makes none has no prompt under way."""
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
        ids = list(map(self._rank_context.caches.kernel_ids, count(), map(unpack_ids, grant.block_ids)))
        prompt = self.prompts.hold(grant, ids, now)
        if self._sends.waiting:
            self._sends.resume(grant.token)
        if 0 in prompt.votes.values():  # D needs it no more
            self._end(prompt, "released", now)
        if self.waiting.cost:
            self.serve_waiting(prompt, now)

    def refuse(self, grant: LeaseGrant, now: float) -> None:
        """A grant has raised an error, or must not follow any more: the engine gets its blocks back, and no D may wait
        for them. Where the lease stands all the same, D may read the blocks, and the end of the lease gives them back.
        """
        prompt = self.prompts.table.get(grant.token)
        if prompt is not None and prompt.state is not PromptState.OPEN:
            return
        if prompt is not None and prompt.blocks is not None:  # no grant of them may stand
            prompt.blocks.lose()
        self._on_freed(grant.request_id)
        self.stop_prefill(PrefillStop(grant.token, ended=True), now)

    def end_leases(self, now: float) -> None:
        """End all leases: nothing counts that is read, or would be committed, from now on. A read that P sends ends
        first."""
        for prompt in list(self.prompts.table.values()):
            self._end(prompt, "reset", now)

    def end_sessions(self, now: float) -> None:
        """Every D must make a new handshake, also one that needs no message of ours because it reads the board."""
        told = messages.AttachRefused(plane="any", reason="the weights of this engine have changed", detached=True)
        for session in list(self._sessions.table.values()):
            self.send(session.identity, told)
            self._end_session(session, now)
        self.prompts.board.close()
        self.prompts.board = GrantBoard()
        self._sessions.board = self.prompts.board.place

    def begin_prefill(self, prefill: Prefill, now: float) -> None:
        """The engine begins to compute a prompt that a lease will cover. From now on D can ask for it by name."""
        self.serve_waiting(self.prompts.begin(prefill), now)

    def stop_prefill(self, stop: PrefillStop, now: float) -> None:
        """The engine has taken back the blocks of a prompt. ``stop.ended``: no lease will cover it."""
        prompt = self.prompts.table.get(stop.token)
        if prompt is None or prompt.state is not PromptState.OPEN:
            return
        if stop.ended:
            self.prompts.forget(prompt, now)
            prompt.end()
            self._stop_reads(prompt, GIVEN_UP, now)
        else:
            self.prompts.preempt(prompt, now)
        self.serve_waiting(prompt, now)

    def plan_step(self, chunks: tuple[PrefillChunk, ...], step: ComputedStep, now: float) -> None:
        """A step begins that computes these chunks. Raises GeometryError where a block id is out of range."""
        for prompt in self.steps.plan(chunks, step, self.prompts, now):
            self._sends.resume(prompt.token)

    def look(self, now: float) -> None:
        """Look at the steps that the device has not ended."""
        for prompt, whole, nearly in self.steps.look():
            self._sends.resume(prompt.token)
            if whole:
                self._post(prompt, now)
            elif nearly:
                self.offer(prompt, now)

    def end_lost(self, now: float) -> None:
        """The engine reuses blocks of prefixes that are lent."""
        for token in self.prefixes.take_lost():
            if (prompt := self.prompts.table.get(token)) is not None:
                self._rank_context.stats.prefix("lent", "reused")
                self._end(prompt, "reset", now)

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
                self.send(identity, messages.Refused(field=messages.VERSION, ours=ours, theirs=theirs))
                self._rank_context.drop(messages.VERSION, error)
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
            self._read_ended(read.prompt, now)
        packed = idle = 0
        while packed < PACKS_PER_TURN and idle < len(self._sends.turns):  # all have had a turn since the last chunk
            read, moved, failure = self._sends.turn()
            idle = 0 if moved else idle + 1
            if moved:
                packed += 1
                if now >= read.renews_at:
                    read.renews_at = now + RENEW_SECONDS
                    read.prompt.renew(self._rank_context.settings, now)
            if failure:
                self._fail(read, failure, now)
            elif read.sent == read.chunks and not read.reading:
                self._stop(read, now)
        return packed == PACKS_PER_TURN

    def tick(self, now: float) -> None:
        """Expire leases, refuse held asks that are overdue, end the sessions of D ranks that are gone."""
        for prompt in self.prompts.due(now):
            if prompt.leased:
                self._end(prompt, "cap" if now >= prompt.cap else "expired", now)
            else:
                self.prompts.preempt(prompt, now)
                self._stop_reads(prompt, NOT_RESUMED, now)
        if now >= self._next_sign and self._sends.waiting:
            self._next_sign = now + SIGN_SECONDS
            for read in chain.from_iterable(self._sends.waiting.values()):
                self.send(read.session.identity, read.prompt.answer(read.ask.read, read.chunks))
        for late in self.waiting.first(lambda waiting: now >= waiting.deadline):
            self.waiting.pop(late.key)
            self._refuse(late, "no such prompt came in time")
        for session, attach in list(self._attaching.items()):
            if self._sessions.table.get(session.identity) is session:
                self._attach(session, attach, now)
            else:
                del self._attaching[session]
        ended = set[bytes]()
        if not self.arrived:  # what a D said before its connection has ended counts
            ended.update(self._listener.ended)
            self._listener.ended.clear()
        for session in self._sessions.gone(ended):
            with self._guarded("EndSession"):
                self._end_session(session, now)

    def _attach(self, session: Session, attach: messages.Attach, now: float) -> None:
        """Accept the data plane that D chose; again at the next tick, where D's connection is not here yet."""
        reply = self._sessions.attach(session, attach, now)
        if reply is None:
            self._attaching[session] = attach
        else:
            self._attaching.pop(session, None)
            self.send(session.identity, reply)

    @property
    def reads_wait(self) -> bool:
        """Whether a read waits until P's engine has computed more. Any thread may ask."""
        return bool(self._sends.waiting)

    @property
    def answers_wait(self) -> bool:
        """Whether a D that may read P's pages by itself waits until a prompt is computed. Any thread may ask."""
        return self.prompts.posts_early and bool(self.waiting.cost)

    @property
    def live(self) -> bool:
        """Whether any deadline is running."""
        waiting = self.waiting.cost or self._sends.waiting or self._attaching
        return bool(self.prompts.held or waiting)

    def withdraw(self) -> None:
        """Withdraw all posted grants. After this call no reader accepts data that it has read. Idempotent."""
        self.prompts.board.close()

    def say_closing(self, reason: str) -> None:
        """Tell every D that all leases have ended, and why. Blocks for ``CLOSING_SECONDS``. ``close`` must follow."""
        for session in self._sessions.table.values():
            self.send(session.identity, messages.Closing(reason=reason))
        if self._sessions.table:
            time.sleep(CLOSING_SECONDS)

    def close(self) -> None:
        """Drop every session. The engine reuses the blocks of all leases after this call."""
        self.withdraw()
        self._sessions.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def handle(self, identity: bytes, request: messages.Request, now: float, address: str) -> None:
        """Handle a request."""
        session = self._sessions.table.get(identity)
        match request:
            case messages.Hello():
                self._hello(identity, request, now, address)
            case messages.Renew():
                for token in request.tokens:
                    if (prompt := self.prompts.table.get(token)) is not None:
                        prompt.renew(self._rank_context.settings, now)
            case messages.Release() | messages.Resolve():
                if not self._serve(identity, request, now):
                    self._hold(identity, request, now)
            case _ if session is None:
                if (reply := refusal(request)) is not None:  # it lets D start a new handshake
                    self.send(identity, reply)
                raise ProtocolError(f"{type(request).__name__} before Hello")
            case messages.Attach():
                self._attach(session, request, now)
            case messages.Ask():
                if not self._ask(session, request, now):
                    self._hold(identity, request, now)
            case messages.Cancel():
                self._cancel(session, request, now)
            case messages.Commit():
                ok = self._may_commit(identity, request)
                self.send(identity, messages.Committed(read=request.read, ok=ok))

    def _hello(self, identity: bytes, hello: messages.Hello, now: float, address: str) -> None:
        refused = self._sessions.check(hello)
        if refused is None and (former := self._sessions.table.get(identity)) is not None:
            self._end_session(former, now)
        self.send(identity, refused or self._sessions.begin(identity, hello, address))

    def _lend(self, session: Session, token: bytes, digests: bytes, now: float) -> None:
        """D asks to read a prefix. Where it does not lie here any more, its token is over."""
        if token in self.prompts.table or self.prompts.is_over(token):
            return  # another rank of D has asked
        self.prompts.drawn.put(session.identity, token, None)
        lent = self.prefixes.lend(token, digests, session.address)
        if lent is None:
            self._rank_context.stats.prefix("lent", "gone")
            return
        life, blocks = lent
        caches = self._rank_context.caches
        tokens, packed = len(digests) // messages.DIGEST_BYTES * PREFIX_TOKENS, pack_ids(blocks)
        try:
            ids = [caches.kernel_ids(region, unpack_ids(packed)) for region in range(len(caches.views))]
            prefix = Prompt(token, "a prefix", ids, (packed,) * len(ids), num_tokens=tokens, computed=tokens)
            prefix.digest = digests[-messages.DIGEST_BYTES :].hex()
            self.prompts.lend(prefix, life, now)
        except Exception:
            self.prefixes.end(token)
            raise

    def _hold(self, identity: bytes, request: EarlyRequest, now: float) -> None:
        """Hold a request until its prompt changes."""
        if isinstance(request, messages.Ask):
            request = msgspec.structs.replace(request, prefix=b"")  # it was lent already, or is not to be had
        waiting = Waiting(identity, request, now + self._rank_context.settings.ask_hold_seconds, self.plans_seen)
        if waiting.key not in self.waiting:
            for displaced in self.waiting.put(identity, waiting.key, waiting, waiting.cost):
                self._refuse(displaced, "too many requests wait for their prompts here")

    def serve_waiting(self, prompt: Prompt, now: float) -> None:
        """A prompt has changed, or has ended: serve what waits for it. What serves one request may end the prompt, and
        so serve the others."""
        for waiting in self.waiting.values():
            if waiting.names(prompt) and waiting.key in self.waiting:
                try:
                    served = self._serve(waiting.identity, waiting.request, now)
                except Exception:  # the lease stands: an error here must not free its blocks
                    self._log.exception("held request", "kvferry: unexpected error with a request that was held")
                    self._refuse(waiting, "unexpected error")
                    served = True
                if served:
                    self.waiting.pop(waiting.key)

    def _serve(self, identity: bytes, request: EarlyRequest, now: float) -> bool:
        """Serve a request, if it need not wait for its prompt. Returns whether that is so."""
        match request:
            case messages.Resolve():
                return self._resolve(identity, request, now)
            case messages.Release():
                return self._release(request, now)
            case messages.Ask():
                return self._ask(self._sessions.table[identity], request, now)

    def _refuse(self, waiting: Waiting, why: str) -> None:
        """A request has waited for too long, or finds no room any more."""
        match waiting.request:
            case messages.Ask(read=read):
                self.deny(waiting.identity, read, "unknown", why)
            case messages.Resolve(number=number, name=name):
                known = name in self.prompts.by_name and waiting.plans != self.plans_seen
                reply = messages.Unresolved(number=number, final=False, known=known, detail=why)
                self.send(waiting.identity, reply)

    def _resolve(self, identity: bytes, wanted: messages.Resolve, now: float) -> bool:
        """D asks for a prompt by its name, or for a prefix. It needs neither a handshake nor a data plane."""
        ours, number, prompt = self._rank_context.engine_id, wanted.number, self.prompts.by_name.get(wanted.name)
        reply: messages.Resolved | messages.Unresolved
        if wanted.engine_id not in ("", ours):
            reply = messages.Unresolved(number=number, final=True, detail=f"this is engine {ours[:256]}")
        elif wanted.prefix and not (params := self.prefixes.params):
            reply = messages.Unresolved(number=number, final=True, detail="this engine has no prefix to read")
        elif wanted.prefix:
            found = self.prefixes.find(wanted.prefix) * PREFIX_TOKENS
            reply = messages.Resolved(number=number, params=params, granted=True, found=found)
        elif prompt is None and now < self.prompts.ended.get(wanted.name, now):
            text = "the prompt was not handed over, or its lease has ended"
            reply = messages.Unresolved(number=number, final=True, detail=text)
        elif prompt is not None and prompt.params and (prompt.readable or wanted.until == "begun"):
            reply = messages.Resolved(
                number=number,
                params=prompt.params,
                granted=prompt.readable,
                streams=prompt.streams and not prompt.readable,
                found=prompt.found,
                step_tokens=prompt.step_tokens,
            )
        else:
            return False
        self.send(identity, reply)
        return True

    def _ask(self, session: Session, ask: messages.Ask, now: float) -> bool:
        """D asks to read. Returns whether it need not wait."""
        if ask.prefix:
            with self._guarded("LendPrefix"):
                self._lend(session, ask.token, ask.prefix, now)
        identity, read, prompt = session.identity, ask.read, self.prompts.table.get(ask.token)
        if prompt is None and not self.prompts.is_over(ask.token):
            return False
        if prompt is None or prompt.over:
            self.deny(identity, read, "expired")
        # A D that reads P's pages by itself waits until all is computed.
        elif not (prompt.granted or (prompt.streams and session.sender is not None) or self._may_read(prompt)):
            if not prompt.taken_back:
                return False
            # A step of D may wait: D, or another rank of it, was told that the prompt is computed, or nearly.
            self.deny(identity, read, "expired", NOT_RESUMED)
        elif session.channel is None or session.channel.error is not None:
            self.deny(identity, read, "detached", "no data plane is attached")
        else:
            self._begin_read(session, ask, prompt, now)
        return True

    def _begin_read(self, session: Session, ask: messages.Ask, prompt: Prompt, now: float) -> None:
        """Grant a read, and begin to send it."""
        identity, read = session.identity, ask.read
        assert session.channel is not None
        session.asked, pulls = True, session.channel.pulls
        try:
            chunks = self._sends.check(session, ask, prompt, allocated=prompt.granted or pulls)
        except KVFerryError as error:
            self.deny(identity, read, "bounds", str(error))
            return
        prompt.asked(ask.decode_engine, rank_set(ask.expected))
        if pulls and not prompt.granted and prompt.blocks is not None:
            prompt.readers[identity, read] = prompt.blocks
        # Only a D that reads P's pages by itself receives the block ids.
        self.send(identity, prompt.answer(read, chunks, prompt.block_ids if pulls else ()))
        if chunks:
            displaced = self._sends.begin(session, ask, prompt, chunks)
            prompt.reads += 1
            self._rank_context.stats.levels["sending"] += 1
            for other in displaced:
                self._fail(other, "the prefill engine sends too many reads to this decode engine", now)

    def _may_read(self, prompt: Prompt) -> bool:
        """Whether a D that reads by itself may do so before the lease. What it reads, it must commit."""
        return self.prompts.posts_early and prompt.whole and len(prompt.readers) < MAX_READERS

    def _may_commit(self, identity: bytes, commit: messages.Commit) -> bool:
        """Whether the blocks that D has read are those of the prompt."""
        prompt = self.prompts.table.get(commit.token)
        if prompt is None:
            return False
        blocks = prompt.readers.get((identity, commit.read))
        if blocks is not None and blocks.lost:
            return False  # it may be that the prompt lies in other blocks by now
        return prompt.granted or (prompt.state is PromptState.OPEN and blocks is not None)

    def _cancel(self, session: Session, cancel: messages.Cancel, now: float) -> None:
        key = session.identity, cancel.read
        self.waiting.pop((messages.Ask, *key))
        if (read := self._sends.live.get(key)) is not None:
            self._stop(read, now)

    def _release(self, release: messages.Release, now: float) -> bool:
        """Count a release, of any D that knows the token, also one whose geometry P has refused. Returns whether it
        need not wait: one of an unknown prompt does."""
        prompt = self.prompts.table.get(release.token)
        if prompt is None:
            return self.prompts.is_over(release.token)
        if prompt.released(release.decode_engine, release.decode_rank, rank_set(release.expected)):
            self._end(prompt, "released", now)
        return True

    # --- what follows -------------------------------------------------------------------------------------------

    def offer(self, prompt: Prompt, now: float) -> None:
        """D takes some milliseconds from the answer until it reads, and waits for the rest in its step."""
        # The first stage of a pipeline does not know of the others.
        if self.prompts.posts_early and self._rank_context.caches.geometry.pp_size == 1:
            prompt.offered = prompt.blocks
        self.serve_waiting(prompt, now)

    def _post(self, prompt: Prompt, now: float) -> None:
        """A prompt is computed, which P's engine has not said yet. A D that reads P's pages by itself need not wait for
        the lease: the engine's thread withdraws the grant before the blocks are used for anything else."""
        if not (self.prompts.posts_early and prompt.whole):
            return
        try:
            self.prompts.post(prompt)
            if prompt.whole:  # else the engine's thread has taken the blocks back meanwhile
                self.offer(prompt, now)
        except Exception:  # other prompts of the step are computed, too; of this one D hears with its lease
            self._log.exception("computed prompt", "kvferry: unexpected error with a prompt that is computed")

    def _end(self, prompt: Prompt, reason: str, now: float) -> None:
        """A lease ends, if it stands. A read that P sends ends first."""
        if prompt.leased:
            prompt.end(reason)
            if prompt.reads:
                self._stop_reads(prompt, "", now)
            else:
                self._free(prompt, now)

    def _stop_reads(self, prompt: Prompt, why: str, now: float) -> None:
        """The own reads get no more bytes, or not soon: refuse them."""
        for read in self._sends.of(lambda read: read.prompt is prompt):
            self.deny(read.session.identity, read.ask.read, "expired", why)
            self._stop(read, now)

    def _read_ended(self, prompt: Prompt, now: float) -> None:
        if prompt.read_ended() and prompt.reason:
            self._free(prompt, now)

    def _free(self, prompt: Prompt, now: float) -> None:
        """Nothing reads the blocks of a lease any more: report it to the engine, once."""
        request_id, reason = prompt.request_id, prompt.reason
        cap = self._rank_context.settings.lease_cap_seconds
        self.prompts.forget(prompt, now)
        self.prompts.held -= 1
        if prompt.lent:  # the engine knows nothing of it
            if reason != "reset":
                self._rank_context.stats.prefix("lent", "read" if reason == "released" else "expired")
            self.prefixes.end(prompt.token)
            return
        self._rank_context.stats.lease_ended(reason)  # first: the engine may idle once it knows of the end
        self._on_freed(request_id)
        if self.waiting.cost:
            self.serve_waiting(prompt, now)
        if reason == "reset":
            text = "kvferry: lease of %s has ended: this engine was paused, or its caches were reset"
            self._expired.info(reason, text, request_id)
        elif reason != "released":
            why = f"the cap of {cap:g} s was reached" if reason == "cap" else "nobody renewed or released it"
            self._expired.warning(reason, "kvferry: lease of %s expired: %s", request_id, why)
        if prompt.traceparent:
            attributes: dict[str, str | int] = {
                "kvferry.request_id": request_id,
                "kvferry.tokens": prompt.num_tokens,
                # Regions of one block table share its blocks.
                "kvferry.blocks": sum(map(len, set(prompt.block_ids))) // ID_BYTES,
                "kvferry.end": reason,
            }
            error = "" if reason == "released" else f"the lease ended by time ({reason})"
            end = self._rank_context.clock()
            self._rank_context.record(prompt.traceparent, "kvferry.lease", prompt.begun_at, end, attributes, error)

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
        ended = False
        if not read.stopped:
            with self._guarded("StopSending"):
                ended = self._sends.stop(read)
        if ended:
            self._account(read)
            self._read_ended(read.prompt, now)

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

    def send(self, identity: bytes, message: messages.Reply) -> None:
        """Send a reply, which waits until D reads. The listener ends the connection of a D that leaves too many."""
        if not (self._listener.send(identity, messages.encode(message)) or isinstance(message, messages.Closing)):
            self._rank_context.drop("reply to a peer that is gone", type(message).__name__)

    def deny(self, identity: bytes, read: int, reason: messages.DenyReason, detail: str = "") -> None:
        """Refuse a read, or what is left of it."""
        self.send(identity, messages.Deny(read=read, reason=reason, detail=detail[:1024]))

    def _end_session(self, session: Session, now: float) -> None:
        for read in self._sends.of(lambda read: read.session is session):
            self._stop(read, now)
        for waiting in self.waiting.values():  # what needs no session waits on
            if waiting.identity == session.identity and isinstance(waiting.request, messages.Ask):
                self.waiting.pop(waiting.key)
        self.prompts.drawn.drop(session.identity)
        self._sessions.end(session)
