"""D's questions to P for leases that D knows by name only. On one rank of D, its first; the others do nothing here.

``rendezvous.RENDEZVOUS`` decides; this file performs its effects and gives it events. No link to P can be made before
the answer, because a link is made to one life of one rank, and that life is part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from kvferry.connector.decode_side import lookup_state as rendezvous
from kvferry.connector.decode_side.link import Link
from kvferry.connector.decode_side.link_state import LinkPhase
from kvferry.connector.decode_side.lookup_state import (
    RendezvousEffect,
    RendezvousEvent,
    RendezvousPhase,
    RendezvousState,
)
from kvferry.connector.decode_side.traces import rendezvous_span
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.pages.traces import record
from kvferry.connector.wire import messages
from kvferry.connector.wire.states import Lifetime, Tick
from kvferry.connector.wire.step_plan import LeftAnswer, PeerEngine, RemoteLease, Rendezvous, RendezvousResult
from kvferry.transport.blocking_calls import BlockingCall
from kvferry.transport.bootstrap.fetch import fetch_page
from kvferry.transport.bootstrap.page import first_rank
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
class _Search:
    """The search for the prompt of one request. ``page``: P's bootstrap page, until ``contact`` is made. ``number``: of
    the open question. ``answer``: P's last answer. ``begun_at``: by ``RankContext.clock``."""

    rendezvous: Rendezvous
    lifetime: Lifetime[RendezvousState, RendezvousEvent, RendezvousEffect]
    page: BlockingCall[bytes] | None = None
    contact: _Contact | None = None
    number: int = 0
    answer: messages.Resolved | None = None
    links: Sequence[Link] = ()
    begun_at: float = 0.0

    @property
    def where(self) -> str:
        wanted = self.rendezvous
        return f"P at {wanted.host}:{wanted.port}" if wanted.port else f"P by {wanted.host}"


class PromptFinder:
    """The searches of all requests of D that wait for P to tell their lease. Used by the transfer thread only."""

    def __init__(
        self,
        rank_context: RankContext,
        links: Callable[[PeerEngine, float], list[Link]],
        report: Callable[[str, RendezvousResult], None],
        release: Callable[[RemoteLease, float], None],
        wake: Callable[[], None],
    ) -> None:
        """
        Args:
            rank_context: of this rank.
            links: the links to the ranks of a P engine that this rank reads from, opened where necessary. May raise
                KVFerryError.
            report: called with the id and the result of each request, once, unless it was left. Before that it may be
                called with results that are ``known``.
            release: releases a lease for all ranks of D, unless one of its requests needs it.
            wake: has this thread call ``serve``; any thread may call it.
        """
        self._rank_context = rank_context
        self._links, self._report, self._release, self._wake = links, report, release, wake
        self._log = rank_context.log
        geometry = rank_context.caches.geometry
        self._asks = geometry.tp_rank == geometry.pp_rank == 0
        self.contacts: dict[_Address, _Contact] = {}
        self._news: dict[_Address, _Contact] = {}
        """The contacts whose connections have news. D may have hundreds of contacts."""
        self.open: dict[str, _Search] = {}
        """By the ids of the requests that wait, or whose answer D's engine has not taken yet."""
        self._looked_at: dict[_Search, None] = {}
        """Those that wait for their bootstrap page or for links: ``serve`` looks at each."""
        self.left: dict[_Search, None] = {}
        """Of requests that have ended, while P does not know their prompt; the oldest first."""
        self._deadlines = Deadlines[_Search](lambda search: search.lifetime.state.due)
        self._by_number: dict[int, _Search] = {}
        self._last = 0

    # --- commands from the engine -------------------------------------------------------------------------------

    def begin(self, wanted: Rendezvous, now: float) -> None:
        """Ask P for the lease of a request."""
        if not self._asks:
            return
        self.leave(LeftAnswer(wanted.request_id), now)  # an id comes again
        state, effects = rendezvous.begin(located=wanted.port > 0)
        lifetime = Lifetime(rendezvous.RENDEZVOUS, state, now)
        search = _Search(wanted, lifetime, begun_at=self._rank_context.clock())
        self.open[wanted.request_id] = search
        for effect in effects:
            self._perform(search, effect, now)
        if wanted.ended is not None:
            self.leave(wanted.ended, now)

    def leave(self, left: LeftAnswer, now: float) -> None:
        """A request does not need its lease any more."""
        search = self.open.get(left.request_id)
        if search is not None:
            search.rendezvous = replace(search.rendezvous, ended=left)
            self._step(search, rendezvous.NameLeft(), now)

    def taken(self, request_id: str, now: float) -> None:
        """D's engine keeps the lease of a request from now on."""
        search = self.open.get(request_id)
        if search is not None:
            self._step(search, rendezvous.AnswerTaken(), now)

    @property
    def live(self) -> bool:
        """Whether a deadline is running."""
        return bool(self.open or self.left)

    # --- the loop's calls ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether ``serve`` must be called. P may send over a contact that no request uses."""
        return bool(self._looked_at or self._news)

    def serve(self, now: float) -> None:
        """Handle the answers that have arrived. The dialer has taken them in before. Closes a contact over which P
        sends while no request uses it; at best that is an answer to a request that has been left."""
        for address in list(self._news):
            contact = self._news.pop(address)
            if self.contacts.get(address) is not contact:
                continue  # closed
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
                    self._fail(contact, str(error), now, rendezvous.PeerFailed)
            if contact.connection.lost:
                self._fail(contact, contact.connection.reason or "the peer is gone", now)
        for search in list(self._looked_at):
            if search.page is not None and search.page.done:
                self._located(search, search.page, now)
            elif search.lifetime.state.phase is RendezvousPhase.CONNECTING:
                self._look_at_links(search, now)
            elif search.lifetime.state.phase is not RendezvousPhase.LOCATING:
                del self._looked_at[search]

    def tick(self, now: float) -> None:
        """Ask again where that is due; notice connections that could not be made; close those that are not used."""
        for search in self._deadlines.due(now):
            self._step(search, Tick(), now)
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
        self._news.clear()
        self.open.clear()
        self.left.clear()
        self._by_number.clear()

    # --- events -------------------------------------------------------------------------------------------------

    def _located(self, search: _Search, page: BlockingCall[bytes], now: float) -> None:
        search.page = None
        wanted = search.rendezvous
        try:
            if page.error:
                raise ProtocolError(page.error)
            host, port = first_rank(page.result or b"", wanted.engine_id)
        except ProtocolError as error:
            self._step(search, rendezvous.PeerFailed(f"{search.where} cannot be found: {error}"), now)
            return
        search.rendezvous = replace(wanted, host=host, port=port)
        self._step(search, rendezvous.PeerLocated(), now)

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
                self._make_room(now)
            timeout = self._rank_context.settings.handshake_timeout_seconds
            connection = self._rank_context.dialer.connect(wanted.host, wanted.port, key=key, timeout=timeout)
            contact = self.contacts[address] = _Contact(connection, now)
            connection.on_news = partial(self._news.__setitem__, address, contact)
            if connection.news:
                connection.on_news()
        contact.used_at = now
        return contact

    def _make_room(self, now: float) -> None:
        """Close a contact that no request uses, or else one that has not been made: who is there has proven nothing."""
        found = [
            (contact.open > 0, contact.used_at, address)
            for address, contact in self.contacts.items()
            if not (contact.open and contact.connection.connected)
        ]
        if not found:
            raise TransportError(f"{len(self.contacts)} P engines are asked for leases already, limit {MAX_CONTACTS}")
        contact = self.contacts.pop(min(found)[2])
        self._fail(contact, "it has not answered, and others are asked", now, rendezvous.PeerFailed)
        contact.connection.close()

    def _reply(self, contact: _Contact, reply: messages.Reply, now: float) -> None:
        if isinstance(reply, messages.Refused):  # of another version; it has no number
            why = f"its {reply.field} is {shortened(reply.ours)}, ours {shortened(reply.theirs)}"
            self._fail(contact, why, now, rendezvous.PeerFailed)
            return
        if not isinstance(reply, messages.Resolved | messages.Unresolved):
            return
        search = self._by_number.get(reply.number)
        if search is None or search.contact is not contact:
            return  # an answer that nobody waits for
        if isinstance(reply, messages.Unresolved):
            detail = f"{search.where} says: {shortened(reply.detail)!r}" if reply.detail else ""
            self._step(search, rendezvous.NameUnresolved(reply.final, detail, reply.known), now)
        else:
            search.answer = reply
            self._step(search, rendezvous.NameResolved(reply.granted, reply.streams), now)

    def _fail(
        self,
        contact: _Contact,
        why: str,
        now: float,
        event: type[rendezvous.PeerFailed | rendezvous.ContactLost] = rendezvous.ContactLost,
    ) -> None:
        for search in [each for each in (*self.open.values(), *self.left) if each.contact is contact]:
            self._step(search, event(f"{search.where} cannot be asked for the lease: {why}"), now)

    def _look_at_links(self, search: _Search, now: float) -> None:
        phases = {link.phase for link in search.links}
        if LinkPhase.FAILED in phases:
            self._step(search, rendezvous.PlaneFound(p_sends=False), now)
        elif phases <= {LinkPhase.ATTACHED}:
            self._step(search, rendezvous.PlaneFound(not any(link.pulls for link in search.links)), now)

    def _step(self, search: _Search, event: RendezvousEvent, now: float) -> None:
        before = search.lifetime.state.phase
        effects = search.lifetime.step(event, now)
        self._deadlines.note(search, search.lifetime.state.due)
        phase = search.lifetime.state.phase
        if phase in (RendezvousPhase.LEFT, RendezvousPhase.ENDED):
            if self.open.get(search.rendezvous.request_id) is search:
                del self.open[search.rendezvous.request_id]
            if phase is RendezvousPhase.LEFT:
                self.left[search] = None
            else:
                self.left.pop(search, None)
        for effect in effects:
            self._perform(search, effect, now)
        answered = phase is not before and phase in (RendezvousPhase.FOUND, RendezvousPhase.ENDED)
        if answered or isinstance(event, rendezvous.ContactLost):
            self._forget_question(search)
        if answered and before is not RendezvousPhase.FOUND and search.rendezvous.traceparent:
            self._record(search, event)

    def _forget_question(self, search: _Search) -> None:
        self._by_number.pop(search.number, None)
        if search.contact is not None:
            search.contact.open -= 1
            search.contact = None

    def _record(self, search: _Search, event: RendezvousEvent) -> None:
        error = event.why if isinstance(event, rendezvous.PeerFailed | rendezvous.ContactLost) else ""
        span = partial(rendezvous_span, search.rendezvous, search.begun_at, error, self._rank_context.clock())
        record(self._rank_context, search.rendezvous.traceparent, span)

    # --- effects ------------------------------------------------------------------------------------------------

    def _perform(self, search: _Search, effect: RendezvousEffect, now: float) -> None:
        match effect:
            case rendezvous.FetchPage():
                self._looked_at[search] = None
                refusal = self._rank_context.allowed_peers.refusal_without_keys
                search.page = fetch_page(search.rendezvous.host, refusal, self._wake)
            case rendezvous.AskName():
                self._ask(search, effect, now)
            case rendezvous.BeginLinks():
                self._looked_at[search] = None
                self._begin_links(search, now)
            case rendezvous.ReportFound(streams):
                self._found(search, streams)
            case rendezvous.ReportLost(why):
                self._report(search.rendezvous.request_id, RendezvousResult(error=why))
            case rendezvous.ReportKnown():
                self._report(search.rendezvous.request_id, RendezvousResult(known=True))
            case rendezvous.ReleaseUnneeded():
                self._release_unneeded(search, now)
            case rendezvous.SendLeave():
                assert search.contact is not None
                search.contact.connection.send(messages.encode(messages.LeaveName(number=search.number)))

    def _ask(self, search: _Search, ask: rendezvous.AskName, now: float) -> None:
        if search.contact is None:
            try:
                search.contact = self._contact(search.rendezvous, now)
            except KVFerryError as error:
                self._step(search, rendezvous.PeerFailed(str(error)), now)
                return
            search.contact.open += 1
        self._by_number.pop(search.number, None)
        self._last = (self._last + 1) % (1 << 32)
        search.number = self._last
        self._by_number[search.number] = search
        wanted = search.rendezvous
        question = messages.Resolve(number=search.number, name=wanted.name, engine_id=wanted.engine_id, until=ask.until)
        connection = search.contact.connection
        if not connection.send(messages.encode(question)):
            why = connection.reason or "its control connection takes no more messages"
            self._step(search, rendezvous.ContactLost(f"{search.where} cannot be asked for the lease: {why}"), now)

    def _release_unneeded(self, search: _Search, now: float) -> None:
        """Release the lease for all ranks of D, unless it is another prompt's, or another request of the same prompt
        needs it (``n > 1``)."""
        wanted = search.rendezvous
        if any(other.rendezvous.name == wanted.name for other in self.open.values()):
            return
        assert search.answer is not None and wanted.ended is not None
        try:
            lease = self._rank_context.lease_of(search.answer.params)
            if lease.prompt in wanted.ended.prompts:
                self._release(lease, now)
        except KVFerryError as error:  # of an answer that D could not use either
            self._log.warning("unneeded", "kvferry: the lease of %s ends by time: %s", wanted.request_id, error)

    def _begin_links(self, search: _Search, now: float) -> None:
        """Begin the handshakes, so that they are out of the way when the load begins."""
        assert search.answer is not None
        try:
            search.links = self._links(self._rank_context.lease_of(search.answer.params).peer, now)
        except KVFerryError as error:
            self._step(search, rendezvous.PeerFailed(str(error)), now)
            return
        for link in search.links:
            link.start_handshake(now)

    def _found(self, search: _Search, streams: bool) -> None:
        answer = search.answer
        assert answer is not None
        found, step_tokens = (answer.found, answer.step_tokens) if streams else (0, 0)
        result = RendezvousResult(answer.params, streams=streams, found=found, step_tokens=step_tokens)
        self._report(search.rendezvous.request_id, result)
