"""P's half of the mover: which blocks are held for whom, and what is answered to the ranks of D.

Decisions are ``lease.step``'s; this file performs its effects and feeds it what happens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from kvferry.connector.protocol import lease, messages
from kvferry.connector.protocol.step_plan import LeaseGrant, unpack_ids
from kvferry.connector.transfer.caches import Ids
from kvferry.connector.transfer.rank_context import RankContext
from kvferry.connector.transfer.sender import OutgoingRead, Sender
from kvferry.connector.transfer.sessions import Session, Sessions
from kvferry.transport.control.listener import Listener
from kvferry.transport.errors import KVFerryError, ProtocolError
from kvferry.transport.grant_board import GrantBoard

logger = logging.getLogger("vllm.kvferry.producer")

ENDED_TOKENS = 1 << 16
"""Tokens remembered after their lease has ended, so that a late ask is refused at once. An unknown one is never
granted either; it only waits in vain."""
EARLY_RELEASES = 1024
EARLY_VOTES = 64
HELD_ASKS = 4096
HELD_SPANS = 1 << 16
"""Bounds on the asks that wait for their lease, in number and, by their spans and ranks, in memory."""
PACKS_PER_TURN = 2
"""Chunks packed before control messages are looked at again."""


@dataclass(slots=True)
class HeldLease:
    """A lease with the blocks it holds. ``posted``: where on the board it says so."""

    grant: LeaseGrant
    ids: list[Ids]
    state: lease.Lease
    posted: int | None = None


@dataclass(slots=True)
class HeldAsk:
    """An ask that came before its lease."""

    identity: bytes
    ask: messages.Ask
    deadline: float


class Producer:
    """All leases of this rank and all reads under them. Called from the mover's thread only."""

    def __init__(self, rank_context: RankContext, listener: Listener) -> None:
        self._rank_context = rank_context
        self._listener = listener
        self._leases: dict[bytes, HeldLease] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._board = GrantBoard()
        self._sessions = Sessions(rank_context, self._board.place)
        self._sender = Sender(rank_context.caches)
        self._waiting: list[HeldAsk] = []
        self._early: OrderedDict[bytes, list[lease.Released]] = OrderedDict()
        self._freed: list[str] = []

    # --- commands from the engine -------------------------------------------------------------------------------

    def grant(self, grant: LeaseGrant, now: float) -> None:
        """Hold the blocks of a finished prompt for whoever knows the token."""
        settings = self._rank_context.settings
        ids = [self._rank_context.caches.kernel_ids(g, unpack_ids(packed)) for g, packed in enumerate(grant.block_ids)]
        state = lease.grant(now, settings.lease_seconds, settings.lease_cap_seconds)
        self._leases[grant.token] = HeldLease(grant, ids, state, self._post(grant))
        for vote in self._early.pop(grant.token, ()):
            self._step(grant.token, vote, now)
        early = [held for held in self._waiting if held.ask.token == grant.token]
        self._waiting = [held for held in self._waiting if held.ask.token != grant.token]
        for held in early:
            session = self._sessions.find(held.identity)
            try:
                if session is not None:
                    self._ask(session, held.ask, now)
            except Exception as error:  # the lease stands: an error here must not have its blocks freed
                logger.exception("kvferry: unexpected error with an ask that was held")
                self._deny(held, held.ask.read, "failed", repr(error))

    def _post(self, grant: LeaseGrant) -> int | None:
        """Put a grant up for whoever reads our pages by itself: it need not ask then, nor have its read committed. Not
        where the engine may have given blocks back: each ask is checked against those."""
        if not any(plane.pulls for plane in self._rank_context.planes):
            return None
        if any(region.kind not in ("full", "mla") for region in self._rank_context.caches.geometry.regions):
            return None
        return self._board.post(grant.token, messages.encode_grant(_granted(grant, 0)))

    # --- the loop's calls ---------------------------------------------------------------------------------------

    def serve(self, now: float) -> bool:
        """Answer what arrived; whether anything did."""
        arrived = self._listener.receive()
        for identity, frames in arrived:
            try:
                self._request(identity, messages.decode_request(frames), now)
            except messages.VersionError as error:
                ours, theirs = str(messages.PROTOCOL_VERSION), str(error.theirs)
                self._reply(identity, messages.Refused(field="protocol version", ours=ours, theirs=theirs))
                self._drop("protocol version", error)
            except ProtocolError as error:
                self._drop("malformed", error)
            except Exception as error:  # whatever one peer brings about must not reach the others
                logger.exception("kvferry: unexpected error with a message")
                self._drop("unexpected error", repr(error))
        return bool(arrived)

    def pump(self, now: float) -> bool:
        """Pack and send chunks of the reads in turn; whether any was."""
        for outgoing in self._sender.drained():
            self._step(outgoing.token, lease.ReadEnded(outgoing.key), now)
        packed = 0
        for _ in range(len(self._sender)):  # one that cannot send now must not hold up the others
            if packed == PACKS_PER_TURN or not self._sender:
                break
            outgoing, sent = self._sender.turn()
            if sent:
                packed += 1
                self._step(outgoing.token, lease.Renewed(), now)
            if outgoing.why and outgoing.session.attached:
                self._deny(outgoing.session, outgoing.number, "failed", outgoing.why)
            if outgoing.over:
                self._end_push(outgoing, now)
        return packed > 0

    def tick(self, now: float) -> None:
        """Expire leases, give up held asks, drop the sessions of D ranks that are gone."""
        for token in list(self._leases):
            self._step(token, lease.LeaseTick(), now)
        late = [held for held in self._waiting if now >= held.deadline]
        self._waiting = [held for held in self._waiting if now < held.deadline]
        for held in late:
            self._deny(held, held.ask.read, "unknown", "no such lease was granted here in time")
        for session in self._sessions.gone():
            self._end_session(session, now)

    def take_freed(self) -> list[str]:
        """Requests whose blocks nothing reads any more, since the last call."""
        freed, self._freed = self._freed, []
        return freed

    @property
    def live(self) -> bool:
        """Whether any deadline is running."""
        return bool(self._leases or self._waiting)

    def withdraw(self) -> None:
        """From here on no reader takes what it has read for true. Idempotent."""
        self._board.close()

    def close(self) -> None:
        """Drop every session. Leases end with the process."""
        self.withdraw()
        self._sessions.close()

    # --- requests -----------------------------------------------------------------------------------------------

    def _request(self, identity: bytes, request: messages.Request, now: float) -> None:
        session = self._sessions.find(identity)
        match request:
            case messages.Hello():
                self._hello(identity, request, now)
            case messages.Renew():
                for token in request.tokens:
                    self._step(token, lease.Renewed(), now)
            case messages.Release():
                self._release(request, now)
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
                        ok = held is not None and lease.may_commit(held.state)
                        self._reply(identity, messages.Committed(read=request.read, ok=ok))

    def _strange(self, identity: bytes, request: messages.Request) -> None:
        """A request without a Hello, or from a D that was forgotten here: it hears so, and can greet again."""
        match request:
            case messages.Ask():
                text = "no handshake was made, or it was forgotten"
                self._reply(identity, messages.Deny(read=request.read, reason="detached", detail=text))
            case messages.Commit():
                self._reply(identity, messages.Committed(read=request.read, ok=False))
            case messages.Cancel():
                self._reply(identity, messages.Stopped(read=request.read, sent=0))
        raise ProtocolError(f"{type(request).__name__} before Hello")

    def _hello(self, identity: bytes, hello: messages.Hello, now: float) -> None:
        refused = self._sessions.check(hello)
        if refused is None:
            for session in self._sessions.displaced(identity):
                self._end_session(session, now)
        self._reply(identity, refused or self._sessions.begin(identity, hello))

    def _ask(self, session: Session, ask: messages.Ask, now: float) -> None:
        held = self._leases.get(ask.token)
        if held is None or not lease.may_commit(held.state):
            if ask.token in self._ended or held is not None:
                self._deny(session, ask.read, "expired")
            else:
                self._hold(session, ask, now)
            return
        if session.channel is None or session.channel.error is not None:
            self._deny(session, ask.read, "detached", "no data plane is attached")
            return
        tokens = held.grant.num_tokens
        session.asked = True
        try:
            self._sender.check(session, ask, tokens, held.ids)
            parts = [] if session.channel.pulls else self._sender.cut(ask, held.ids, session.channel.slot_bytes)
        except KVFerryError as error:
            self._deny(session, ask.read, "bounds", str(error))
            return
        self._step(ask.token, lease.Asked(ask.consumer, frozenset(ask.expected)), now)
        # Only a D that reads the pages by itself learns which they are.
        block_ids = held.grant.block_ids if session.channel.pulls else ()
        self._reply(session.identity, _granted(held.grant, ask.read, len(parts), block_ids))
        if parts:
            outgoing = OutgoingRead(session, ask.read, ask.token, parts)
            self._step(ask.token, lease.ReadStarted(outgoing.key), now)
            self._sender.start(outgoing)

    def _hold(self, session: Session, ask: messages.Ask, now: float) -> None:
        """Keep an ask until its lease comes, or its time is over."""
        size = sum(len(each.spans) + len(each.expected) for each in (ask, *(held.ask for held in self._waiting)))
        if len(self._waiting) >= HELD_ASKS or size > HELD_SPANS:
            self._deny(session, ask.read, "unknown", "too many asks are waiting for their lease")
            return
        self._waiting.append(HeldAsk(session.identity, ask, now + self._rank_context.settings.ask_hold_seconds))

    def _cancel(self, session: Session, cancel: messages.Cancel, now: float) -> None:
        def meant(held: HeldAsk) -> bool:
            return held.identity == session.identity and held.ask.read == cancel.read

        self._waiting = [held for held in self._waiting if not meant(held)]
        for outgoing in self._sender.of(lambda outgoing: outgoing.key == (session.identity, cancel.read)):
            self._end_push(outgoing, now)
        sent = self._sender.flush(session, cancel)
        self._reply(session.identity, messages.Stopped(read=cancel.read, sent=sent))

    def _release(self, release: messages.Release, now: float) -> None:
        event = lease.Released(release.consumer, release.consumer_rank, frozenset(release.expected))
        if release.token in self._leases or release.token in self._ended:
            self._step(release.token, event, now)
            return
        # D gave up before the engine told us of the lease; kept until it does.
        votes = self._early.setdefault(release.token, [])
        if len(votes) < EARLY_VOTES and event not in votes:
            votes.append(event)
        if len(self._early) > EARLY_RELEASES:
            self._early.popitem(last=False)

    # --- effects ------------------------------------------------------------------------------------------------

    def _step(self, token: bytes, event: lease.LeaseEvent, now: float) -> None:
        held = self._leases.get(token)
        if held is None:
            return
        held.state, effects = lease.step(held.state, event, now)
        if held.posted is not None and not lease.may_commit(held.state):
            self._board.withdraw(held.posted)  # before the engine hears that the blocks are its own again
            held.posted = None
        for effect in effects:
            match effect:
                case lease.StopReads():
                    for outgoing in self._sender.of(lambda outgoing: outgoing.token == token):
                        self._deny(outgoing.session, outgoing.number, "expired")
                        self._end_push(outgoing, now)
                case lease.Freed(reason):
                    self._free(token, held, reason)

    def _free(self, token: bytes, held: HeldLease, reason: str) -> None:
        del self._leases[token]
        self._ended[token] = None
        while len(self._ended) > ENDED_TOKENS:
            self._ended.popitem(last=False)
        self._freed.append(held.grant.request_id)
        self._rank_context.stats.lease_ended(reason)
        if reason != "released":
            cap = self._rank_context.settings.lease_cap_seconds
            why = f"the cap of {cap:g} s was reached" if reason == "cap" else "nobody renewed or released it"
            logger.warning("kvferry: lease of %s expired: %s", held.grant.request_id, why)

    def _end_push(self, outgoing: OutgoingRead, now: float) -> None:
        if self._sender.end(outgoing):
            self._step(outgoing.token, lease.ReadEnded(outgoing.key), now)

    def _end_session(self, session: Session, now: float) -> None:
        for outgoing in self._sender.of(lambda outgoing: outgoing.session is session):
            self._end_push(outgoing, now)
        self._sessions.end(session)

    def _reply(self, identity: bytes, message: messages.Reply) -> None:
        if not self._listener.send(identity, messages.encode(message)):
            self._drop("reply to a peer that is gone", type(message).__name__)

    def _deny(self, to: Session | HeldAsk, read: int, reason: messages.DenyReason, detail: str = "") -> None:
        self._reply(to.identity, messages.Deny(read=read, reason=reason, detail=detail[:1024]))

    def _drop(self, reason: str, detail: object) -> None:
        self._rank_context.stats.dropped(reason)
        self._rank_context.log.warning(reason, "kvferry: control message dropped (%s): %s", reason, detail)


def _granted(
    grant: LeaseGrant, read: int, chunks: int = 0, block_ids: tuple[bytes, ...] | None = None
) -> messages.Grant:
    """What a reader is told of a lease; with all of its blocks where ``block_ids`` is None."""
    return messages.Grant(
        read=read,
        epoch=0,
        num_tokens=grant.num_tokens,
        ready=grant.num_tokens,
        chunks=chunks,
        prompt=grant.prompt,
        block_ids=grant.block_ids if block_ids is None else block_ids,
    )
