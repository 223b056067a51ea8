"""Lookups: D asks P for leases that D knows by name only. On one rank of D, its first; the others do nothing here.

First the life of one lookup as a table, which is pure; then ``Lookups``, which performs what the table decides. ::

    FINDING ──▶ CONNECTING ──▶ AWAITING_GRANT ──▶ FOUND ──▶ ENDED
        └─────▶ LEFT ──────────────────────────────────────▶  ▲
    every state ── P failed, or the request has ended ────────┘

D's engine gives the request no blocks meanwhile. In FINDING, P has not begun to compute the prompt. Where P sends bytes
while it computes them, the request goes on as soon as P has begun: CONNECTING finds out whether P sends over the data
plane. Otherwise D could use no block before P has computed the whole prompt, so the request waits for the grant, and
the load then goes inside a step. The deadline is that of D's scheduler half: LEFT. It begins anew where P says that its
engine has the prompt. In FOUND, D's engine has not taken the answer yet.

A request that does not need its lease any more must not leave it to P's clock. Where P has answered, D releases the
lease at once. Where P does not know the prompt yet, P may have it already in its engine: the question stays open, LEFT.

No link to P can be made before the answer, because a link is made to one life of one rank, and that life is part of the
answer.

A question for a prefix (``PromptLookup.prefix``) goes the same way: P answers at once, as if its grant were posted.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from kvferry.connector.decode_side.link import Link, LinkPhase
from kvferry.connector.decode_side.links import Links
from kvferry.connector.decode_side.renew import LeaseRenewals
from kvferry.connector.decode_side.report import Results
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import LocalReason
from kvferry.connector.wire.states import Lifetime, TransitionTable, ignore
from kvferry.connector.wire.step_plan import LeftAnswer, LookupResult, PromptLookup
from kvferry.transport.control.dialer import Connection
from kvferry.transport.errors import KVFerryError, ProtocolError, TransportError, shortened

RETRY_SECONDS = 0.2
"""Seconds until D asks again after P has said that it does not know the name yet. P holds a question for long."""
LEFT_SECONDS = 60.0
"""How long a question stays open whose request has ended. A router ends P's leg together with D's, but a P that takes
long for a step may compute the prompt before it sees that."""
MAX_LEFT = 4096
"""Questions that stay open so; beyond it the oldest ends."""
MAX_CONTACTS = 256
"""Addresses of P engines that D asks at one time. Requests name the addresses, and clients may send any."""
IDLE_CONTACT_SECONDS = 30.0
"""D closes a connection over which it has asked nothing for this time."""


class LookupPhase(enum.Enum):
    FINDING = "finding"
    CONNECTING = "connecting"
    AWAITING_GRANT = "awaiting the grant"
    FOUND = "found"
    LEFT = "left"
    ENDED = "ended"


_P = LookupPhase
_ASKING = (_P.FINDING, _P.AWAITING_GRANT)
_WAITING = (*_ASKING, _P.CONNECTING)


class LookupState(msgspec.Struct, frozen=True):
    phase: LookupPhase = LookupPhase.FINDING
    retry_at: float | None = None
    """When D asks again, in seconds as ``now``; ``None`` while a question is open, or none is needed."""
    until: float = 0.0
    """When LEFT ends."""
    why: str = ""
    """Why D must prefill."""
    lost: bool = False
    """The connection to P was lost since P has last answered."""

    @property
    def due(self) -> float:
        """When a Tick changes something."""
        retry_at = math.inf if self.retry_at is None else self.retry_at
        if self.phase is LookupPhase.LEFT:
            return min(self.until, retry_at)
        return retry_at if self.phase in _ASKING else math.inf


class LookupEventKind(enum.Enum):
    """What happens to a lookup. The values are the names in a log line."""

    RESOLVED = "NameResolved"
    """P knows the prompt. ``granted``, ``streams``: as in ``messages.Resolved``."""
    UNRESOLVED = "NameUnresolved"
    """What D asked for has not happened; ``why``: P's words. ``final``, ``known``: as in ``messages.Unresolved``."""
    PLANE_FOUND = "PlaneFound"
    """The handshakes with P's ranks have ended. ``p_sends``: on all data planes P sends the bytes."""
    FAILED = "PeerFailed"
    """D cannot use what P has sent, see ``why``."""
    LOST = "ContactLost"
    """The connection to P could not be made, or has ended, see ``why``. A busy P may have ended it: D connects once
    more."""
    TAKEN = "AnswerTaken"
    """D's engine keeps the lease of P's answer."""
    LEFT = "NameLeft"
    """The request does not need the answer any more."""
    TICK = "Tick"


class LookupEvent(msgspec.Struct, frozen=True):
    kind: LookupEventKind
    why: str = ""
    granted: bool = False
    streams: bool = False
    final: bool = False
    known: bool = False
    p_sends: bool = False


TICK = LookupEvent(LookupEventKind.TICK)


class LookupEffect(enum.Enum):
    """What the owner must do."""

    ASK = "ask P for the prompt (FINDING, LEFT), or for its grant (AWAITING_GRANT)"
    LINKS = "begin the handshakes with P's ranks; PLANE_FOUND follows in CONNECTING"
    REPORT_FOUND = "report P's last answer"
    REPORT_LOST = "report that D must prefill, and why"
    REPORT_KNOWN = "report that P's engine has the prompt, so that D may wait on"
    RELEASE = "release the lease of P's last answer"
    LEAVE = "send P that the question is not needed any more"


Outcome = tuple[LookupState, tuple[LookupEffect, ...]]

# --- transitions ------------------------------------------------------------------------------------------------

_K, _E = LookupEventKind, LookupEffect


def _ended(*effects: LookupEffect) -> Outcome:
    return LookupState(_P.ENDED), effects


def _wait(state: LookupState, now: float, *effects: LookupEffect, lost: bool = False) -> Outcome:
    return replace(state, retry_at=now + RETRY_SECONDS, lost=lost), effects


_FOUND: Outcome = LookupState(_P.FOUND), (_E.REPORT_FOUND,)
_AWAIT: Outcome = LookupState(_P.AWAITING_GRANT), (_E.ASK,)


def _lost(why: str) -> Outcome:
    return LookupState(_P.ENDED, why=why), (_E.REPORT_LOST,)


def _found(state: LookupState, event: LookupEvent, now: float) -> Outcome:
    if event.granted:
        return _FOUND
    if event.streams:
        return LookupState(_P.CONNECTING), (_E.LINKS,)
    return LookupState(_P.AWAITING_GRANT), (_E.LINKS, _E.ASK)


def _unresolved(state: LookupState, event: LookupEvent, now: float) -> Outcome:
    if event.final:
        return _lost(event.why or "the prefill engine does not hand the prompt over")
    return _wait(state, now, *((_E.REPORT_KNOWN,) if event.known else ()))


def _retry(state: LookupState, event: LookupEvent, now: float) -> Outcome:
    if state.retry_at is None or now < state.retry_at:
        return state, ()
    return replace(state, retry_at=None), (_E.ASK,)


def _leave(state: LookupState) -> tuple[LookupEffect, ...]:
    return () if state.retry_at is not None else (_E.LEAVE,)


def _left_tick(state: LookupState, event: LookupEvent, now: float) -> Outcome:
    return _ended(*_leave(state)) if now >= state.until else _retry(state, event, now)


LOOKUP: TransitionTable[LookupState, LookupEvent, LookupEffect] = TransitionTable(
    "lookup",
    LookupPhase,
    LookupEventKind,
    (
        ((_P.FINDING,), (_K.RESOLVED,), _found),
        ((_P.CONNECTING,), (_K.PLANE_FOUND,), lambda state, event, now: _FOUND if event.p_sends else _AWAIT),
        (
            (_P.AWAITING_GRANT,),
            (_K.RESOLVED,),
            lambda state, event, now: _FOUND if event.granted else _wait(state, now, lost=state.lost),
        ),
        (_ASKING, (_K.UNRESOLVED,), _unresolved),
        (_ASKING, (_K.TICK,), _retry),
        (
            _ASKING,
            (_K.LOST,),
            lambda state, event, now: _lost(event.why) if state.lost else _wait(state, now, lost=True),
        ),
        (_WAITING, (_K.FAILED,), lambda state, event, now: _lost(event.why)),
        (
            (_P.FINDING,),
            (_K.LEFT,),
            lambda state, event, now: (replace(state, phase=_P.LEFT, until=now + LEFT_SECONDS), ()),
        ),
        ((_P.AWAITING_GRANT,), (_K.LEFT,), lambda state, event, now: _ended(*_leave(state), _E.RELEASE)),
        ((_P.CONNECTING, _P.FOUND), (_K.LEFT,), lambda *_: _ended(_E.RELEASE)),
        ((_P.LEFT,), (_K.RESOLVED,), lambda *_: _ended(_E.RELEASE)),
        (
            (_P.LEFT,),
            (_K.UNRESOLVED,),
            lambda state, event, now: _ended() if event.final else _wait(state, now),
        ),
        ((_P.LEFT,), (_K.TICK,), _left_tick),
        (
            (_P.LEFT,),
            (_K.LOST,),
            lambda state, event, now: _ended() if state.lost else _wait(state, now, lost=True),
        ),
        ((_P.LEFT,), (_K.FAILED,), lambda *_: _ended()),
        ((_P.FOUND,), (_K.TAKEN,), lambda *_: _ended()),
        # An answer may come twice, or late; links may be ready before they are needed.
        (LookupPhase, LookupEventKind, ignore),
    ),
)


# --- the lookups of a rank --------------------------------------------------------------------------------------

_Address = tuple[str, int, str]
"""Host, port, and the fingerprint of P's key."""


@dataclass(slots=True, eq=False)
class _Contact:
    """A connection to one rank of P. ``open``: how many requests use it. ``used_at``: when the last one began."""

    connection: Connection
    used_at: float
    open: int = 0


@dataclass(slots=True, eq=False)
class Lookup:
    """The lookup of one request."""

    wanted: PromptLookup
    lifetime: Lifetime[LookupState, LookupEvent, LookupEffect]
    contact: _Contact | None = None
    number: int = 0
    """Of the open question."""
    answer: messages.Resolved | None = None
    """P's last one."""
    links: Sequence[Link] = ()
    reason: LocalReason = "no_lease"
    """Of the error that is reported, if any."""

    @property
    def where(self) -> str:
        return f"the prefill engine at {self.wanted.host}:{self.wanted.port}"

    @property
    def due(self) -> float:
        return self.lifetime.state.due


class Lookups:
    """The lookups of all requests of D that wait for P's answer. Used by the transfer thread only."""

    def __init__(
        self,
        rank_context: RankContext,
        links: Links,
        renewals: LeaseRenewals,
        results: Results,
        deadlines: Deadlines[Any],
    ) -> None:
        self._rank_context, self._log = rank_context, rank_context.log
        self._links, self._renewals, self._results = links, renewals, results
        self._deadlines, self._asks = deadlines, renewals.rank == 0
        self.contacts: dict[_Address, _Contact] = {}
        self._news: dict[_Address, _Contact] = {}  # those whose connections have news: D may have hundreds
        self.open: dict[str, Lookup] = {}
        """By the ids of the requests that wait, or whose answer D's engine has not taken yet."""
        self._looked_at: dict[Lookup, None] = {}  # those that wait for links
        self.left: dict[Lookup, None] = {}
        """Of requests that have ended, while P does not know their prompt; the oldest first."""
        self.by_number: dict[int, Lookup] = {}
        """By the numbers of the open questions."""
        self.asked = 0
        """How many questions D has asked, modulo 2^32."""

    # --- commands from the engine -------------------------------------------------------------------------------

    def begin(self, wanted: PromptLookup, now: float) -> None:
        """Ask P for the lease of a request."""
        if not self._asks:
            return
        self.leave(LeftAnswer(wanted.request_id), now)  # an id comes again
        lifetime = Lifetime(LOOKUP, LookupState(retry_at=now), now)
        lookup = self.open[wanted.request_id] = Lookup(wanted, lifetime)
        self.give(lookup, TICK, now)
        if wanted.ended is not None:
            self.leave(wanted.ended, now)

    def leave(self, left: LeftAnswer, now: float) -> None:
        """A request does not need its lease any more."""
        lookup = self.open.get(left.request_id)
        if lookup is not None:
            lookup.wanted = replace(lookup.wanted, ended=left)
            self.give(lookup, LookupEvent(_K.LEFT), now)

    def taken(self, request_id: str, now: float) -> None:
        """D's engine keeps the lease of a request from now on."""
        lookup = self.open.get(request_id)
        if lookup is not None:
            self.give(lookup, LookupEvent(_K.TAKEN), now)

    # --- the loop's calls ---------------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether a deadline is running."""
        return bool(self.open or self.left)

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
                self._close(address)
                continue
            for frames in received:
                try:
                    self._reply(contact, messages.decode_reply(frames), now)
                except ProtocolError as error:
                    self._rank_context.stats.dropped("malformed reply")
                    self._fail(contact, str(error), now)
            self._look_at(contact, now)
        for lookup in list(self._looked_at):
            if lookup.lifetime.state.phase is LookupPhase.CONNECTING:
                self._look_at_links(lookup, now)
            else:
                del self._looked_at[lookup]

    def close_unused(self, now: float) -> None:
        """Notice connections that could not be made; close those that are not used."""
        for address, contact in list(self.contacts.items()):
            self._look_at(contact, now)
            if not contact.open and (contact.connection.lost or now >= contact.used_at + IDLE_CONTACT_SECONDS):
                self._close(address)

    def close(self) -> None:
        """Close all connections. What waits is not reported."""
        for contact in self.contacts.values():
            contact.connection.close()
        for table in (self.contacts, self._news, self.open, self.left, self.by_number):
            table.clear()

    # --- events -------------------------------------------------------------------------------------------------

    def _look_at_links(self, lookup: Lookup, now: float) -> None:
        phases = {link.phase for link in lookup.links}
        if LinkPhase.FAILED in phases:
            self.give(lookup, LookupEvent(_K.PLANE_FOUND), now)
        elif phases <= {LinkPhase.ATTACHED}:
            self.give(lookup, LookupEvent(_K.PLANE_FOUND, p_sends=not any(link.pulls for link in lookup.links)), now)

    def _reply(self, contact: _Contact, reply: messages.Reply, now: float) -> None:
        if isinstance(reply, messages.Refused):  # of another version; it has no number
            why = f"its {reply.field} is {shortened(reply.ours)}, ours {shortened(reply.theirs)}"
            self._fail(contact, why, now, reason="other_release")
            return
        if not isinstance(reply, messages.Resolved | messages.Unresolved):
            return
        lookup = self.by_number.get(reply.number)
        if lookup is None or lookup.contact is not contact:
            return  # an answer that nobody waits for
        if isinstance(reply, messages.Unresolved):
            detail = f"{lookup.where} says: {shortened(reply.detail)!r}" if reply.detail else ""
            self.give(lookup, LookupEvent(_K.UNRESOLVED, detail, final=reply.final, known=reply.known), now)
        else:
            lookup.answer = reply
            self.give(lookup, LookupEvent(_K.RESOLVED, granted=reply.granted, streams=reply.streams), now)

    def _look_at(self, contact: _Contact, now: float) -> None:
        if contact.connection.lost:
            why, failure = contact.connection.reason or "the peer is gone", contact.connection.failure
            self._fail(contact, why, now, _K.LOST, failure or "no_answer")

    def _fail(
        self, contact: _Contact, why: str, now: float, kind: LookupEventKind = _K.FAILED,
        reason: LocalReason = "malformed",
    ) -> None:  # fmt: skip
        for lookup in [each for each in (*self.open.values(), *self.left) if each.contact is contact]:
            lookup.reason = reason
            self.give(lookup, LookupEvent(kind, f"{lookup.where} cannot be asked for the lease: {why}"), now)

    def _close(self, address: _Address) -> None:
        self.contacts.pop(address).connection.close()

    def give(self, lookup: Lookup, event: LookupEvent, now: float) -> None:
        """Give a lookup an event. What it decides is performed, and may be followed by other events."""
        queue = deque((event,))
        while queue:
            event = queue.popleft()
            before = lookup.lifetime.state.phase
            effects = lookup.lifetime.step(event, now)
            self._deadlines.note(lookup, lookup.due)
            phase = lookup.lifetime.state.phase
            if phase in (LookupPhase.LEFT, LookupPhase.ENDED):
                if self.open.get(lookup.wanted.request_id) is lookup:
                    del self.open[lookup.wanted.request_id]
                if phase is LookupPhase.LEFT:
                    self.left[lookup] = None
                    if len(self.left) > MAX_LEFT:
                        oldest = next(iter(self.left))
                        self.give(oldest, TICK, oldest.lifetime.state.until)
                else:
                    self.left.pop(lookup, None)
            for effect in effects:
                queue.extend(self._perform(lookup, effect, now))
            answered = phase is not before and phase in (LookupPhase.FOUND, LookupPhase.ENDED)
            if answered or event.kind is _K.LOST:
                self.forget_question(lookup)

    def forget_question(self, lookup: Lookup) -> None:
        self.by_number.pop(lookup.number, None)
        if lookup.contact is not None:
            lookup.contact.open -= 1
            lookup.contact = None

    # --- effects ------------------------------------------------------------------------------------------------

    def _perform(self, lookup: Lookup, effect: LookupEffect, now: float) -> Sequence[LookupEvent]:
        request_id = lookup.wanted.request_id
        match effect:
            case _E.ASK:
                return self._ask(lookup, now)
            case _E.LINKS:
                return self._begin_links(lookup, now)
            case _E.REPORT_FOUND:
                self._report_found(lookup)
            case _E.REPORT_LOST:
                self._results.looked_up(request_id, LookupResult(error=lookup.lifetime.state.why, reason=lookup.reason))
            case _E.REPORT_KNOWN:
                self._results.looked_up(request_id, LookupResult(known=True))
            case _E.RELEASE:
                self._release_unneeded(lookup, now)
            case _E.LEAVE:
                if lookup.contact is not None:  # else P has not been asked
                    lookup.contact.connection.send(messages.encode(messages.LeaveName(number=lookup.number)))
        return ()

    def _ask(self, lookup: Lookup, now: float) -> Sequence[LookupEvent]:
        if lookup.contact is None:
            try:
                lookup.contact = self._contact(lookup.wanted, now)
            except KVFerryError as error:
                lookup.reason = "no_answer"
                return (LookupEvent(_K.FAILED, str(error)),)
            lookup.contact.open += 1
        self.by_number.pop(lookup.number, None)
        self.asked = lookup.number = (self.asked + 1) % (1 << 32)
        self.by_number[lookup.number] = lookup
        wanted, connection = lookup.wanted, lookup.contact.connection
        question: messages.Request
        if wanted.prefix:
            number, engine_id = lookup.number, wanted.engine_id
            question = messages.FindPrefix(number=number, digests=wanted.prefix, engine_id=engine_id)
        else:
            until: Literal["begun", "granted"] = "begun"
            if lookup.lifetime.state.phase is LookupPhase.AWAITING_GRANT:
                until = "granted"
            question = messages.Resolve(number=lookup.number, name=wanted.name, engine_id=wanted.engine_id, until=until)
        if connection.send(messages.encode(question)):
            lookup.reason = "no_lease"  # if P says no
            return ()
        lookup.reason = connection.failure or "no_answer"
        why = connection.reason or "its control connection takes no more messages"
        return (LookupEvent(_K.LOST, f"{lookup.where} cannot be asked for the lease: {why}"),)

    def _contact(self, wanted: PromptLookup, now: float) -> _Contact:
        """Raises TransportError: D asks too many P engines."""
        address = (wanted.host, wanted.port, wanted.key or self._rank_context.keys.fingerprint)
        contact = self.contacts.get(address)
        if contact is not None and contact.connection.lost:
            self._look_at(contact, now)
            self._close(address)
            contact = None
        if contact is None:
            if len(self.contacts) >= MAX_CONTACTS:
                self._make_room(now)
            timeout = self._rank_context.settings.handshake_timeout_seconds
            connection = self._rank_context.dialer.connect(*address[:2], key=address[2], timeout=timeout)
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
            raise TransportError(
                f"{len(self.contacts)} prefill engines are asked for leases already, limit {MAX_CONTACTS}"
            )
        address = min(found)[2]
        self._fail(self.contacts[address], "it has not answered, and others are asked", now, reason="no_answer")
        self._close(address)

    def _begin_links(self, lookup: Lookup, now: float) -> Sequence[LookupEvent]:
        """Begin the handshakes, so that they are out of the way when the load begins."""
        assert lookup.answer is not None
        self._looked_at[lookup] = None
        try:
            peer = self._rank_context.lease_of(lookup.answer.params).peer
            lookup.links = [self._links.get(address, now) for address in self._links.source_addresses(peer)]
        except KVFerryError as error:
            lookup.reason = "malformed"
            return (LookupEvent(_K.FAILED, str(error)),)
        for link in lookup.links:
            link.start_handshake(now)
        return ()

    def _report_found(self, lookup: Lookup) -> None:
        answer = lookup.answer
        assert answer is not None
        streams = not answer.granted
        found = answer.found if streams or lookup.wanted.prefix else 0
        step_tokens = answer.step_tokens if streams else 0
        result = LookupResult(answer.params, streams=streams, found=found, step_tokens=step_tokens)
        self._results.looked_up(lookup.wanted.request_id, result)

    def _release_unneeded(self, lookup: Lookup, now: float) -> None:
        """Release the lease for all ranks of D, unless it is another prompt's, or another request of the same prompt
        needs it (``n > 1``). Of a prefix there is none yet."""
        wanted = lookup.wanted
        if wanted.prefix:
            return
        if any(other.wanted.name == wanted.name for other in self.open.values()):
            return
        assert lookup.answer is not None and wanted.ended is not None
        try:
            lease = self._rank_context.lease_of(lookup.answer.params)
            if lease.digest in wanted.ended.digests:
                self._renewals.release_for_all(lease, now)
        except KVFerryError as error:  # of an answer that D could not use either
            self._log.warning("unneeded", "kvferry: the lease of %s ends by time: %s", wanted.request_id, error)
