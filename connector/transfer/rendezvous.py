"""D's questions to P for leases that D knows by name only. On one rank of D, its first; the others do nothing here.

``rendezvous.RENDEZVOUS`` decides; this file performs its effects and gives it events. No link to P can be made before
the answer, because a link is made to one life of one rank, and that life is part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from kvferry.connector.protocol import messages, rendezvous
from kvferry.connector.protocol.link_state import LinkPhase
from kvferry.connector.protocol.rendezvous import RendezvousEffect, RendezvousEvent, RendezvousPhase, RendezvousState
from kvferry.connector.protocol.state_machine import Lifetime, Tick
from kvferry.connector.protocol.step_plan import PeerEngine, Rendezvous, RendezvousResult
from kvferry.connector.transfer.handover_trace import record, rendezvous_span
from kvferry.connector.transfer.link import Link
from kvferry.connector.transfer.rank_context import RankContext
from kvferry.transport.control.bootstrap import PageFetch, fetch_page, first_rank
from kvferry.transport.control.dialer import Connection
from kvferry.transport.errors import KVFerryError, ProtocolError, TransportError, shortened

MAX_CONTACTS = 256
"""Addresses of P engines that D asks at one time. Requests name the addresses, and clients may send any."""
IDLE_CONTACT_SECONDS = 30.0
"""D closes a connection over which it has asked nothing for this time."""

_Address = tuple[str, int, str]
"""Host, port, and the fingerprint of P's key."""


@dataclass(slots=True, eq=False)
class _Contact:
    """A connection to one rank of P. ``open``: how many requests use it. ``used_at``: when the last one began."""

    connection: Connection
    used_at: float
    open: int = 0


@dataclass(slots=True, eq=False)
class _Meeting:
    """One request. ``page``: P's bootstrap page, until ``contact`` is made. ``number``: of the last question.
    ``answer``: P's last answer. ``begun_at``: by ``RankContext.clock``."""

    rendezvous: Rendezvous
    lifetime: Lifetime[RendezvousState, RendezvousEvent, RendezvousEffect]
    page: PageFetch | None = None
    contact: _Contact | None = None
    number: int = 0
    answer: messages.Resolved | None = None
    links: Sequence[Link] = ()
    begun_at: float = 0.0

    @property
    def where(self) -> str:
        wanted = self.rendezvous
        return f"P at {wanted.host}:{wanted.port}" if wanted.port else f"P by {wanted.host}"


class Meetings:
    """All requests of D that wait for P to tell their lease. Used by the transfer thread only."""

    def __init__(
        self,
        rank_context: RankContext,
        links: Callable[[PeerEngine, float], list[Link]],
        report: Callable[[str, RendezvousResult], None],
        wake: Callable[[], None],
    ) -> None:
        """
        Args:
            rank_context: of this rank.
            links: the links to the ranks of a P engine that this rank reads from, opened where necessary. May raise
                KVFerryError.
            report: called with the id and the result of each request, once, unless it was left.
            wake: has this thread call ``serve``; any thread may call it.
        """
        self._rank_context = rank_context
        self._links, self._report, self._wake = links, report, wake
        self._log = rank_context.log
        geometry = rank_context.caches.geometry
        self._asks = geometry.tp_rank == geometry.pp_rank == 0
        self.contacts: dict[_Address, _Contact] = {}
        self.open: dict[str, _Meeting] = {}
        """The requests that wait, by their ids."""
        self._by_number: dict[int, _Meeting] = {}
        self._last = 0

    # --- commands from the engine -------------------------------------------------------------------------------

    def begin(self, wanted: Rendezvous, now: float) -> None:
        """Ask P for the lease of a request."""
        if not self._asks:
            return
        self.leave(wanted.request_id, now)  # an id comes again
        state, effects = rendezvous.begin(located=wanted.port > 0)
        lifetime = Lifetime(rendezvous.RENDEZVOUS, state, now)
        meeting = _Meeting(wanted, lifetime, begun_at=self._rank_context.clock())
        self.open[wanted.request_id] = meeting
        for effect in effects:
            self._perform(meeting, effect, now)

    def leave(self, request_id: str, now: float) -> None:
        """A request does not need its lease any more."""
        meeting = self.open.get(request_id)
        if meeting is not None:
            self._step(meeting, rendezvous.NameLeft(), now)

    # --- the loop's calls ---------------------------------------------------------------------------------------

    def serve(self, now: float) -> None:
        """Handle the answers that have arrived. The dialer has taken them in before. Closes a contact over which P
        sends while no request uses it; at best that is an answer to a request that has been left."""
        for address, contact in list(self.contacts.items()):
            if not contact.connection.news:
                continue
            received = contact.connection.receive()
            if received and not contact.open:
                contact.connection.close()
                del self.contacts[address]
                continue
            for frames in received:
                try:
                    self._reply(contact, messages.decode_reply(frames), now)
                except ProtocolError as error:
                    self._rank_context.stats.dropped("malformed reply")
                    self._fail(contact, str(error), now)
            if contact.connection.lost:
                self._fail(contact, contact.connection.reason or "the peer is gone", now)
        for meeting in list(self.open.values()):
            if meeting.page is not None and meeting.page.done:
                self._located(meeting, meeting.page, now)
            elif meeting.lifetime.state.phase is RendezvousPhase.CONNECTING:
                self._look_at_links(meeting, now)

    def tick(self, now: float) -> None:
        """Ask again where that is due; notice connections that could not be made; close those that are not used."""
        for meeting in list(self.open.values()):
            self._step(meeting, Tick(), now)
        for address, contact in list(self.contacts.items()):
            if contact.connection.lost:
                self._fail(contact, contact.connection.reason or "the peer is gone", now)
            if not contact.open and (contact.connection.lost or now >= contact.used_at + IDLE_CONTACT_SECONDS):
                contact.connection.close()
                del self.contacts[address]

    def close(self) -> None:
        """Close all connections. What waits is not reported."""
        for contact in self.contacts.values():
            contact.connection.close()
        self.contacts.clear()
        self.open.clear()
        self._by_number.clear()

    # --- events -------------------------------------------------------------------------------------------------

    def _located(self, meeting: _Meeting, page: PageFetch, now: float) -> None:
        meeting.page = None
        wanted = meeting.rendezvous
        try:
            if page.error:
                raise ProtocolError(page.error)
            host, port = first_rank(page.content, wanted.engine_id)
        except ProtocolError as error:
            self._step(meeting, rendezvous.PeerFailed(f"{meeting.where} cannot be found: {error}"), now)
            return
        meeting.rendezvous = replace(wanted, host=host, port=port)
        self._step(meeting, rendezvous.PeerLocated(), now)

    def _contact(self, wanted: Rendezvous, now: float) -> _Contact:
        """Raises TransportError: D asks too many P engines."""
        keys = self._rank_context.keys
        key = wanted.key or ("" if keys is None else keys.fingerprint)
        address = (wanted.host, wanted.port, key)
        contact = self.contacts.get(address)
        if contact is not None and contact.connection.lost:
            self._fail(contact, contact.connection.reason, now)
            contact.connection.close()
            contact = None
        if contact is None:
            if len(self.contacts) >= MAX_CONTACTS:
                self._make_room()
            timeout = self._rank_context.settings.handshake_timeout_seconds
            connection = self._rank_context.dialer.connect(wanted.host, wanted.port, key=key, timeout=timeout)
            contact = self.contacts[address] = _Contact(connection, now)
        contact.used_at = now
        return contact

    def _make_room(self) -> None:
        unused = [(contact.used_at, address) for address, contact in self.contacts.items() if not contact.open]
        if not unused:
            raise TransportError(f"{len(self.contacts)} P engines are asked for leases already, limit {MAX_CONTACTS}")
        address = min(unused)[1]
        self.contacts.pop(address).connection.close()

    def _reply(self, contact: _Contact, reply: messages.Reply, now: float) -> None:
        if isinstance(reply, messages.Refused):  # of another version; it has no number
            self._fail(contact, f"its {reply.field} is {shortened(reply.ours)}, ours {shortened(reply.theirs)}", now)
            return
        if not isinstance(reply, messages.Resolved | messages.Unresolved):
            return
        meeting = self._by_number.get(reply.number)
        if meeting is None or meeting.contact is not contact:
            return  # an answer that nobody waits for
        if isinstance(reply, messages.Unresolved):
            detail = f"{meeting.where} says: {shortened(reply.detail)!r}" if reply.detail else ""
            self._step(meeting, rendezvous.NameUnresolved(reply.final, detail), now)
        else:
            meeting.answer = reply
            self._step(meeting, rendezvous.NameResolved(reply.granted, reply.streams), now)

    def _fail(self, contact: _Contact, why: str, now: float) -> None:
        for meeting in [each for each in self.open.values() if each.contact is contact]:
            self._step(meeting, rendezvous.PeerFailed(f"{meeting.where} cannot be asked for the lease: {why}"), now)

    def _look_at_links(self, meeting: _Meeting, now: float) -> None:
        phases = {link.phase for link in meeting.links}
        if LinkPhase.FAILED in phases:
            self._step(meeting, rendezvous.PlaneFound(p_sends=False), now)
        elif phases <= {LinkPhase.ATTACHED}:
            self._step(meeting, rendezvous.PlaneFound(not any(link.pulls for link in meeting.links)), now)

    def _step(self, meeting: _Meeting, event: RendezvousEvent, now: float) -> None:
        effects = meeting.lifetime.step(event, now)
        if meeting.lifetime.state.phase is RendezvousPhase.ENDED:
            self._forget(meeting)
            if meeting.rendezvous.traceparent:
                self._record(meeting, event)
        for effect in effects:
            self._perform(meeting, effect, now)

    def _record(self, meeting: _Meeting, event: RendezvousEvent) -> None:
        error = event.why if isinstance(event, rendezvous.PeerFailed) else ""
        span = partial(rendezvous_span, meeting.rendezvous, meeting.begun_at, error, self._rank_context.clock())
        record(self._rank_context, meeting.rendezvous.traceparent, span)

    def _forget(self, meeting: _Meeting) -> None:
        if self.open.get(meeting.rendezvous.request_id) is meeting:
            del self.open[meeting.rendezvous.request_id]
            if meeting.contact is not None:
                meeting.contact.open -= 1
        self._by_number.pop(meeting.number, None)

    # --- effects ------------------------------------------------------------------------------------------------

    def _perform(self, meeting: _Meeting, effect: RendezvousEffect, now: float) -> None:
        match effect:
            case rendezvous.FetchPage():
                refusal = self._rank_context.allowed_peers.refusal_without_keys
                meeting.page = fetch_page(meeting.rendezvous.host, refusal, self._wake)
            case rendezvous.AskName():
                self._ask(meeting, effect, now)
            case rendezvous.BeginLinks():
                self._begin_links(meeting, now)
            case rendezvous.ReportFound(streams):
                self._found(meeting, streams)
            case rendezvous.ReportLost(why):
                self._report(meeting.rendezvous.request_id, RendezvousResult(error=why))
            case rendezvous.ReportLeft(known):
                params = meeting.answer.params if known and meeting.answer is not None else b""
                self._report(meeting.rendezvous.request_id, RendezvousResult(params, left=True))
            case rendezvous.SendLeave():
                assert meeting.contact is not None
                meeting.contact.connection.send(messages.encode(messages.LeaveName(number=meeting.number)))

    def _ask(self, meeting: _Meeting, ask: rendezvous.AskName, now: float) -> None:
        if meeting.contact is None:
            try:
                meeting.contact = self._contact(meeting.rendezvous, now)
            except KVFerryError as error:
                self._step(meeting, rendezvous.PeerFailed(str(error)), now)
                return
            meeting.contact.open += 1
        self._by_number.pop(meeting.number, None)
        self._last = (self._last + 1) % (1 << 32)
        meeting.number = self._last
        self._by_number[meeting.number] = meeting
        wanted = meeting.rendezvous
        question = messages.Resolve(
            number=meeting.number, name=wanted.name, engine_id=wanted.engine_id, until=ask.until
        )
        connection = meeting.contact.connection
        if not connection.send(messages.encode(question)):
            why = connection.reason or "its control connection takes no more messages"
            self._step(meeting, rendezvous.PeerFailed(f"{meeting.where} cannot be asked for the lease: {why}"), now)

    def _begin_links(self, meeting: _Meeting, now: float) -> None:
        """Begin the handshakes, so that they are out of the way when the load begins."""
        assert meeting.answer is not None
        try:
            meeting.links = self._links(self._rank_context.peer_of(meeting.answer.params), now)
        except KVFerryError as error:
            self._step(meeting, rendezvous.PeerFailed(str(error)), now)
            return
        for link in meeting.links:
            link.start_handshake(now)

    def _found(self, meeting: _Meeting, streams: bool) -> None:
        answer = meeting.answer
        assert answer is not None
        found, step_tokens = (answer.found, answer.step_tokens) if streams else (0, 0)
        result = RendezvousResult(answer.params, streams=streams, found=found, step_tokens=step_tokens)
        self._report(meeting.rendezvous.request_id, result)
