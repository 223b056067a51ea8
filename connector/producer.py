"""P's half of the mover: leases, the sessions of D's ranks, and the reads that are being pushed.

Decisions are ``lease.step``'s; this file performs its effects and feeds it what happens.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvferry.connector import lease, protocol
from kvferry.connector.errors import GeometryError, IncompatiblePeerError, KVFerryError, ProtocolError, TransportError
from kvferry.connector.plan import MAX_CHUNKS, check_spans, chunks, compatible
from kvferry.connector.site import Ids, Part, Site, check_model
from kvferry.connector.stepplan import LeaseGrant, unpack_ids
from kvferry.transport.control import Listener
from kvferry.transport.plane import SendChannel

logger = logging.getLogger("vllm.kvferry.producer")

ENDED_TOKENS = 1 << 16
"""Tokens remembered after their lease has ended, so that a late ask is refused at once. An unknown one is never
granted either; it only waits in vain."""
ENDED_READS = 4096
EARLY_RELEASES = 1024
EARLY_VOTES = 64
HELD_ASKS = 4096
SESSIONS = 4096
PACKS_PER_TURN = 2
"""Chunks packed before control messages are looked at again."""


@dataclass(slots=True)
class Held:
    """A lease with the blocks it holds."""

    grant: LeaseGrant
    ids: list[Ids]
    state: lease.Lease


@dataclass(slots=True)
class Session:
    """One rank of D, from its Hello on. ``sent``: per ended read, how many chunks went out."""

    identity: bytes
    hello: protocol.Hello
    channel: SendChannel | None = None
    peer_reads: bool = False
    sent: OrderedDict[int, int] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class Push:
    """A read on its way: ``done`` of its ``parts`` have been packed and sent."""

    session: Session
    number: int
    token: bytes
    parts: list[Part]
    done: int = 0

    @property
    def key(self) -> tuple[bytes, int]:
        return self.session.identity, self.number


@dataclass(slots=True)
class HeldAsk:
    """An ask that came before its lease."""

    identity: bytes
    ask: protocol.Ask
    deadline: float


class Producer:
    """All leases of this rank and all reads under them. Called from the mover's thread only."""

    def __init__(self, site: Site, listener: Listener) -> None:
        self._site = site
        self._listener = listener
        self._leases: dict[bytes, Held] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._pushes: deque[Push] = deque()
        self._waiting: list[HeldAsk] = []
        self._early: OrderedDict[bytes, list[lease.Released]] = OrderedDict()
        self._freed: list[str] = []
        self._offers = tuple(protocol.PlaneOffer(plane.name, plane.offer()) for plane in site.planes)

    # --- commands from the engine -------------------------------------------------------------------------------

    def grant(self, grant: LeaseGrant, now: float) -> None:
        """Hold the blocks of a finished prompt for whoever knows the token."""
        settings = self._site.settings
        ids = [self._site.caches.kernel_ids(g, unpack_ids(packed)) for g, packed in enumerate(grant.block_ids)]
        state = lease.grant(now, settings.lease_seconds, settings.lease_cap_seconds)
        self._leases[grant.token] = Held(grant, ids, state)
        for vote in self._early.pop(grant.token, ()):
            self._step(grant.token, vote, now)
        early = [held for held in self._waiting if held.ask.token == grant.token]
        self._waiting = [held for held in self._waiting if held.ask.token != grant.token]
        for held in early:
            session = self._sessions.get(held.identity)
            if session is not None:
                self._ask(session, held.ask, now)

    # --- the loop's calls ---------------------------------------------------------------------------------------

    def serve(self, now: float) -> bool:
        """Answer what arrived; whether anything did."""
        arrived = self._listener.receive()
        for identity, frames in arrived:
            try:
                self._request(identity, protocol.decode_request(frames), now)
            except protocol.VersionError as error:
                ours, theirs = str(protocol.PROTOCOL_VERSION), str(error.theirs)
                self._reply(identity, protocol.Refused(field="protocol version", ours=ours, theirs=theirs))
                self._drop("protocol version", error)
            except ProtocolError as error:
                self._drop("malformed", error)
            except Exception as error:  # whatever one peer brings about must not reach the others
                logger.exception("kvferry: unexpected error with a message")
                self._drop("unexpected error", repr(error))
        return bool(arrived)

    def pump(self, now: float) -> bool:
        """Pack and send chunks of the reads in turn; whether any was sent."""
        busy = False
        for _ in range(min(PACKS_PER_TURN, len(self._pushes))):
            push = self._pushes.popleft()
            channel = push.session.channel
            if channel is None or channel.error is not None:
                self._end_push(push, now)
                continue
            try:
                sent = self._push_one(push, channel)
            except Exception as error:  # an error of the copy is this read's, not everybody's
                logger.exception("kvferry: a chunk could not be packed and sent")
                self._deny(push.session.identity, push.number, "failed", repr(error)[:1024])
                self._end_push(push, now)
                continue
            if not sent:
                self._pushes.append(push)
                continue
            busy = True
            self._step(push.token, lease.Renewed(), now)
            if push.done == len(push.parts):
                self._end_push(push, now)
            else:
                self._pushes.append(push)
        return busy

    def _push_one(self, push: Push, channel: SendChannel) -> bool:
        """Pack and send the next chunk; ``False`` where the plane has no slot for it now."""
        slot = channel.acquire()
        if slot is None:
            return False
        part = push.parts[push.done]
        try:
            self._site.caches.pack(slot.address, part)
        except Exception:
            channel.give_back(slot)
            raise
        channel.send(slot, self._site.caches.nbytes(part), push.number << 32 | push.done)
        push.done += 1
        return True

    def tick(self, now: float) -> None:
        """Expire leases, give up held asks, drop the sessions of D ranks that are gone."""
        for token in list(self._leases):
            self._step(token, lease.Tick(), now)
        late = [held for held in self._waiting if now >= held.deadline]
        self._waiting = [held for held in self._waiting if now < held.deadline]
        for held in late:
            self._deny(held.identity, held.ask.read, "unknown", "no such lease was granted here in time")
        for session in list(self._sessions.values()):
            if session.channel is not None and session.channel.error is not None:
                logger.info("kvferry: D rank of %s is gone: %s", session.hello.engine_id[:8], session.channel.error)
                self._end_session(session, now)

    def take_freed(self) -> list[str]:
        """Requests whose blocks nothing reads any more, since the last call."""
        freed, self._freed = self._freed, []
        return freed

    @property
    def live(self) -> bool:
        """Whether any deadline is running."""
        return bool(self._leases or self._waiting)

    def close(self) -> None:
        """Drop every session. Leases end with the process."""
        for session in self._sessions.values():
            if session.channel is not None:
                session.channel.close()
        self._sessions.clear()
        self._pushes.clear()

    # --- requests -----------------------------------------------------------------------------------------------

    def _request(self, identity: bytes, request: protocol.Request, now: float) -> None:
        match request:
            case protocol.Hello():
                self._hello(identity, request, now)
            case protocol.Renew():
                for token in request.tokens:
                    self._step(token, lease.Renewed(), now)
            case protocol.Release():
                self._release(request, now)
            case _:
                session = self._sessions.get(identity)
                if session is None:
                    self._strange(identity, request)
                    return
                match request:
                    case protocol.Attach():
                        self._attach(session, request, now)
                    case protocol.Ask():
                        self._ask(session, request, now)
                    case protocol.Cancel():
                        self._cancel(session, request, now)
                    case protocol.Commit():
                        held = self._leases.get(request.token)
                        ok = held is not None and lease.may_commit(held.state)
                        self._reply(identity, protocol.Committed(read=request.read, ok=ok))

    def _strange(self, identity: bytes, request: protocol.Request) -> None:
        """A request without a Hello, or from a D that was forgotten here: it hears so, and can greet again."""
        match request:
            case protocol.Ask():
                self._deny(identity, request.read, "detached", "no handshake was made, or it was forgotten")
            case protocol.Commit():
                self._reply(identity, protocol.Committed(read=request.read, ok=False))
            case protocol.Cancel():
                self._reply(identity, protocol.Stopped(read=request.read, sent=0))
        raise ProtocolError(f"{type(request).__name__} before Hello")

    def _hello(self, identity: bytes, hello: protocol.Hello, now: float) -> None:
        try:
            check_model(self._site.model, hello.model)
            compatible(self._site.caches.geometry, hello.geometry, consumer=False)
        except (IncompatiblePeerError, GeometryError) as error:
            logger.warning("kvferry: refused D %s: %s", hello.engine_id[:8], error)
            self._reply(identity, _refusal(error))
            return
        old = self._sessions.pop(identity, None)
        if old is not None:
            self._end_session(old, now)
        while len(self._sessions) >= SESSIONS:
            self._end_session(next(iter(self._sessions.values())), now)
        self._sessions[identity] = Session(identity, hello)
        site = self._site
        self._reply(
            identity,
            protocol.Welcome(
                engine_id=site.engine_id,
                incarnation=site.incarnation,
                geometry=site.caches.geometry,
                model=dict(site.model),
                planes=self._offers,
            ),
        )

    def _attach(self, session: Session, attach: protocol.Attach, now: float) -> None:
        plane = self._site.plane(attach.plane)
        try:
            if plane is None:
                raise TransportError(f"plane {attach.plane!r} is not on offer")
            if session.channel is not None:
                raise TransportError("a data plane is attached already")
            session.channel, reply = plane.accept(attach.payload)
            session.peer_reads = plane.peer_reads
        except (TransportError, ProtocolError) as error:
            logger.warning("kvferry: D %s could not attach: %s", session.hello.engine_id[:8], error)
            names = ", ".join(offer.name for offer in self._offers)
            why = f"{attach.plane}: {error}"[:1024]
            self._reply(session.identity, protocol.Refused(field="data plane", ours=names, theirs=why))
            return
        slot_bytes = session.channel.slot_bytes
        pages = self._site.caches.page_layouts() if session.peer_reads else ()
        attached = protocol.Attached(plane=attach.plane, slot_bytes=slot_bytes, payload=reply, pages=pages)
        self._reply(session.identity, attached)
        logger.info("kvferry: D %s attached over %s", session.hello.engine_id[:8], attach.plane)

    def _ask(self, session: Session, ask: protocol.Ask, now: float) -> None:
        held = self._leases.get(ask.token)
        if held is None or not lease.may_commit(held.state):
            if ask.token in self._ended or held is not None:
                self._deny(session.identity, ask.read, "expired")
            elif len(self._waiting) >= HELD_ASKS:
                self._deny(session.identity, ask.read, "unknown", "too many asks are waiting for their lease")
            else:
                deadline = now + self._site.settings.ask_hold_seconds
                self._waiting.append(HeldAsk(session.identity, ask, deadline))
            return
        if session.channel is None or session.channel.error is not None:
            self._deny(session.identity, ask.read, "detached", "no data plane is attached")
            return
        try:
            if ask.read in session.sent or any(push.key == (session.identity, ask.read) for push in self._pushes):
                raise GeometryError(f"read {ask.read} was asked for before")
            self._check(held, ask)
            parts = [] if session.peer_reads else self._parts(held, ask, session.channel.slot_bytes)
        except KVFerryError as error:
            self._deny(session.identity, ask.read, "bounds", str(error)[:1024])
            return
        self._step(ask.token, lease.Asked(ask.consumer, frozenset(ask.expected)), now)
        tokens = held.grant.num_tokens
        # Only who reads the pages by itself hears where they are.
        block_ids = held.grant.block_ids if session.peer_reads else ()
        grant = protocol.Grant(
            read=ask.read, epoch=0, num_tokens=tokens, ready=tokens, chunks=len(parts), block_ids=block_ids
        )
        self._reply(session.identity, grant)
        if parts:
            push = Push(session, ask.read, ask.token, parts)
            self._step(ask.token, lease.ReadStarted(push.key), now)
            self._pushes.append(push)

    def _check(self, held: Held, ask: protocol.Ask) -> None:
        """Raises GeometryError for spans that are not ours, or beyond the prompt or its blocks."""
        caches = self._site.caches
        check_spans(ask.spans, caches.geometry, held.grant.num_tokens)
        for span in ask.spans:
            covered = len(held.ids[span.group]) * caches.views[span.group].block_size
            if span.token + span.num_tokens > covered:
                raise GeometryError(f"tokens up to {span.token + span.num_tokens} asked for, blocks hold {covered}")

    def _parts(self, held: Held, ask: protocol.Ask, slot_bytes: int) -> list[Part]:
        """The chunks of a read, in the order of the wire. Raises GeometryError where one does not fit into a slot."""
        caches = self._site.caches
        if ask.chunk_bytes > slot_bytes:
            raise GeometryError(f"chunk_bytes {ask.chunk_bytes} is more than the {slot_bytes} of a slot")
        parts: list[Part] = []
        for span in ask.spans:
            ids = held.ids[span.group]
            align = caches.geometry.groups[span.group].block_size
            parts.extend(
                Part(
                    group=span.group,
                    layer=span.layer + chunk.layer,
                    num_layers=chunk.num_layers,
                    head=span.head,
                    num_heads=span.num_heads,
                    token=span.token + chunk.token,
                    num_tokens=chunk.num_tokens,
                    kernel_ids=ids,
                )
                for chunk in chunks(span, caches.views[span.group].content_bytes, ask.chunk_bytes, align)
            )
        return parts

    def _cancel(self, session: Session, cancel: protocol.Cancel, now: float) -> None:
        waiting = [h for h in self._waiting if h.identity == session.identity and h.ask.read == cancel.read]
        for held in waiting:
            self._waiting.remove(held)
        push = next((p for p in self._pushes if p.session is session and p.number == cancel.read), None)
        if push is not None:
            self._pushes.remove(push)
            self._end_push(push, now)
        sent = session.sent.get(cancel.read, 0)
        if cancel.posted > sent and session.channel is not None:
            if cancel.posted > MAX_CHUNKS:
                raise ProtocolError(f"Cancel names {cancel.posted} posted chunks, limit {MAX_CHUNKS}")
            session.channel.flush(cancel.read << 32 | chunk for chunk in range(sent, cancel.posted))
            sent = session.sent[cancel.read] = cancel.posted
        self._reply(session.identity, protocol.Stopped(read=cancel.read, sent=sent))

    def _release(self, release: protocol.Release, now: float) -> None:
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

    def _step(self, token: bytes, event: lease.Event, now: float) -> None:
        held = self._leases.get(token)
        if held is None:
            return
        held.state, effects = lease.step(held.state, event, now)
        for effect in effects:
            match effect:
                case lease.StopReads():
                    for push in [push for push in self._pushes if push.token == token]:
                        self._pushes.remove(push)
                        self._deny(push.session.identity, push.number, "expired")
                        self._end_push(push, now)
                case lease.Freed(reason):
                    self._free(token, held, reason)

    def _free(self, token: bytes, held: Held, reason: str) -> None:
        del self._leases[token]
        self._ended[token] = None
        while len(self._ended) > ENDED_TOKENS:
            self._ended.popitem(last=False)
        self._freed.append(held.grant.request_id)
        self._site.stats.lease_ended(reason)
        if reason != "released":
            cap = self._site.settings.lease_cap_seconds
            why = f"the cap of {cap:g} s was reached" if reason == "cap" else "nobody renewed or released it"
            logger.warning("kvferry: lease of %s expired: %s", held.grant.request_id, why)

    def _end_push(self, push: Push, now: float) -> None:
        """The read's last access to the pages is over (packing happens on this very thread)."""
        sent = push.session.sent
        sent[push.number] = push.done
        while len(sent) > ENDED_READS:
            sent.popitem(last=False)
        self._step(push.token, lease.ReadEnded(push.key), now)

    def _end_session(self, session: Session, now: float) -> None:
        for push in [push for push in self._pushes if push.session is session]:
            self._pushes.remove(push)
            self._end_push(push, now)
        if session.channel is not None:
            session.channel.close()
        self._sessions.pop(session.identity, None)

    def _reply(self, identity: bytes, message: protocol.Reply) -> None:
        if not self._listener.send(identity, protocol.encode(message)):
            self._drop("reply to a peer that is gone", type(message).__name__)

    def _deny(self, identity: bytes, read: int, reason: protocol.DenyReason, detail: str = "") -> None:
        self._reply(identity, protocol.Deny(read=read, reason=reason, detail=detail))

    def _drop(self, reason: str, detail: object) -> None:
        self._site.stats.dropped(reason)
        self._site.log.warning(reason, "kvferry: control message dropped (%s): %s", reason, detail)


def _refusal(error: IncompatiblePeerError | GeometryError) -> protocol.Refused:
    if isinstance(error, IncompatiblePeerError):
        return protocol.Refused(field=error.field, ours=str(error.ours)[:1024], theirs=str(error.theirs)[:1024])
    return protocol.Refused(field="geometry", ours="a valid geometry", theirs=str(error)[:1024])
