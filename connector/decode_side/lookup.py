"""Lookups: D asks P for leases that D knows by name only. On one rank of D, its first; the others do nothing here. ::

    FINDING ──▶ LINKING ──▶ AWAITING_GRANT ──▶ FOUND ──▶ ENDED
        └─────▶ LEFT ──────────────────────────────────▶  ▲
    every phase ── P failed, or the request has ended ────┘

D's engine gives the request no blocks meanwhile. In FINDING, P has not begun to compute the prompt. Where P sends bytes
while it computes them, the request goes on as soon as P has begun: LINKING finds out whether P sends over the data
plane. Otherwise D could use no block before P has computed the whole prompt, so the request waits for the grant, and
the load then goes inside a step. The deadline is that of D's scheduler half: LEFT. It begins anew where P says that its
engine has the prompt. In FOUND, D's engine has not taken the answer yet.

A request that does not need its lease any more must not leave it to P's clock. Where P has answered, D releases the
lease at once. Where P does not know the prompt yet, P may have it already in its engine: the question stays open, LEFT.

A question goes over the link to the rank that the request names, and needs no handshake: which life of P's other ranks
D reads from is part of the answer. A link that fails takes its questions with it; D asks them again over another link.

A question for a prefix (``PromptLookup.prefix``) goes the same way: P answers at once, as if its grant were posted.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from kvferry.connector.decode_side.link import Link, LinkPhase
from kvferry.connector.decode_side.links import Links
from kvferry.connector.decode_side.renew import LeaseRenewals
from kvferry.connector.decode_side.report import Results
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.wire import messages
from kvferry.connector.wire.metrics import FailureKind, LocalReason
from kvferry.connector.wire.params import lease_of_answer
from kvferry.connector.wire.step_plan import LeftAnswer, LookupResult, PromptLookup, RankAddress
from kvferry.transport.errors import KVFerryError, shortened

RETRY_SECONDS = 0.2
"""Seconds until D asks again after P has said that it does not know the name yet. P holds a question for long."""
LEFT_SECONDS = 60.0
"""How long a question stays open whose request has ended. A router ends P's leg together with D's, but a P that takes
long for a step may compute the prompt before it sees that."""
MAX_LEFT = 4096
"""Questions that stay open so; beyond it the oldest ends."""
Answer = messages.Resolved | messages.Unresolved
_REASONS: dict[FailureKind, LocalReason] = {"incompatible": "other_release", "data": "malformed"}
"""Of links that failed although their connection was made."""


class LookupPhase(enum.Enum):
    FINDING = "finding"
    LINKING = "linking"
    AWAITING_GRANT = "awaiting the grant"
    FOUND = "found"
    LEFT = "left"
    ENDED = "ended"


_P = LookupPhase


@dataclass(slots=True, eq=False)
class Lookup:
    """The lookup of one request."""

    wanted: PromptLookup
    phase: LookupPhase = LookupPhase.FINDING
    number: int = 0
    """Of the last question."""
    link: Link | None = None
    """Over which it was asked, while it is open: ``Link.questions``."""
    retry_at: float = math.inf
    """When D asks again, in seconds as ``now``."""
    until: float = math.inf
    """When LEFT ends."""
    lost: bool = False
    """A link has failed since P has last answered. A busy P may have ended it: D asks once more."""
    answer: messages.Resolved | None = None
    """P's last one."""
    links: dict[Link, None] = field(default_factory=dict)
    """To P's ranks, of which there may be thousands, once P has begun."""

    @property
    def where(self) -> str:
        return f"the prefill engine at {self.wanted.host}:{self.wanted.port}"

    @property
    def due(self) -> float:
        return min(self.retry_at, self.until)


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
        self.open: dict[str, Lookup] = {}
        """By the ids of the requests that wait, or whose answer D's engine has not taken yet."""
        self.left: dict[Lookup, None] = {}
        """Of requests that have ended, while P does not know their prompt; the oldest first."""
        self.asked = 0
        """How many questions D has asked, modulo 2^32."""

    @property
    def live(self) -> bool:
        """Whether a deadline is running."""
        return bool(self.open or self.left)

    # --- commands from the engine -------------------------------------------------------------------------------

    def begin(self, wanted: PromptLookup, now: float) -> None:
        """Ask P for the lease of a request."""
        if not self._asks:
            return
        self.leave(LeftAnswer(wanted.request_id), now)  # an id comes again
        lookup = self.open[wanted.request_id] = Lookup(wanted)
        self._ask(lookup, now)
        if wanted.ended is not None:
            self.leave(wanted.ended, now)

    def leave(self, left: LeftAnswer, now: float) -> None:
        """A request does not need its lease any more."""
        lookup = self.open.pop(left.request_id, None)
        if lookup is None:
            return
        lookup.wanted = replace(lookup.wanted, ended=left)
        if lookup.phase is not _P.FINDING:
            self._end(lookup)
            self._release(lookup, now)
            return
        lookup.phase, lookup.until = _P.LEFT, now + LEFT_SECONDS
        self._deadlines.note(lookup, lookup.due)
        self.left[lookup] = None
        if len(self.left) > MAX_LEFT:
            self._end(next(iter(self.left)))

    def taken(self, request_id: str) -> None:
        """D's engine keeps the lease of a request from now on."""
        lookup = self.open.get(request_id)
        if lookup is not None and lookup.phase is _P.FOUND:
            self._end(lookup)

    # --- what happens -------------------------------------------------------------------------------------------

    def on_due(self, lookup: Lookup, now: float) -> None:
        """Ask again, or give up a question that was left."""
        if now >= lookup.until:
            self._end(lookup)
        elif now >= lookup.retry_at:
            self._ask(lookup, now)

    def reply(self, link: Link, reply: Answer, now: float) -> None:
        """P's answer to a question, or what nobody has asked for; at best that was left."""
        lookup = link.questions.pop(reply.number, None)
        if lookup is None:
            return
        lookup.link = None
        if isinstance(reply, messages.Resolved):
            self._resolved(lookup, reply, now)
        elif reply.final:
            says = f"{lookup.where} says: {shortened(reply.detail)!r}" if reply.detail else ""
            self._fail(lookup, says or "the prefill engine does not hand the prompt over", "no_lease")
        else:
            self._wait(lookup, now, lost=False)
            if reply.known and lookup.phase is not _P.LEFT:
                self._results.looked_up(lookup.wanted.request_id, LookupResult(known=True))

    def _resolved(self, lookup: Lookup, answer: messages.Resolved, now: float) -> None:
        lookup.answer = answer
        if lookup.phase is _P.LEFT:
            self._end(lookup)
            self._release(lookup, now)
        elif answer.granted:
            self._found(lookup)
        elif lookup.phase is _P.AWAITING_GRANT:
            self._wait(lookup, now, lost=lookup.lost)
        elif self._begin_links(lookup, answer, now):
            lookup.lost = False
            if answer.streams:
                lookup.phase = _P.LINKING
                self._look_at_links(lookup, now)
            else:
                self._await_grant(lookup, now)

    def link_moved(self, link: Link, now: float) -> None:
        """A link is in another phase. Where it has failed, its questions are asked again: at once where only its data
        plane broke, which says nothing about P. Nor does a handshake for a load, which P has refused."""
        for lookup in list(link.questions.values()) if link.phase is LinkPhase.FAILED else ():
            del link.questions[lookup.number]
            lookup.link, failure = None, link.reason
            assert failure is not None
            if link.broken_plane:
                self._ask(lookup, now)
            elif link.misfit:
                self._wait(lookup, now, lost=lookup.lost)
            elif not lookup.lost:
                self._wait(lookup, now, lost=True)
            else:
                reason = _REASONS.get(failure.kind, link.connection.failure or "no_answer")
                self._fail(lookup, f"{lookup.where} cannot be asked for the lease: {failure.text}", reason)
        if link.phase not in (LinkPhase.ATTACHED, LinkPhase.FAILED):
            return
        for lookup in [each for each in self.open.values() if each.phase is _P.LINKING and link in each.links]:
            self._look_at_links(lookup, now)

    def _look_at_links(self, lookup: Lookup, now: float) -> None:
        """Go on where it is known whether P sends the bytes. A link that fails does not say so."""
        phases = {link.phase for link in lookup.links}
        if LinkPhase.FAILED in phases:
            self._await_grant(lookup, now)
        elif phases <= {LinkPhase.ATTACHED}:
            if any(link.pulls for link in lookup.links):
                self._await_grant(lookup, now)
            else:
                self._found(lookup)

    # --- what follows -------------------------------------------------------------------------------------------

    def _wait(self, lookup: Lookup, now: float, *, lost: bool) -> None:
        lookup.retry_at, lookup.lost = now + RETRY_SECONDS, lost
        self._deadlines.note(lookup, lookup.due)

    def _await_grant(self, lookup: Lookup, now: float) -> None:
        lookup.phase = _P.AWAITING_GRANT
        self._ask(lookup, now)

    def _ask(self, lookup: Lookup, now: float) -> None:
        wanted, lookup.retry_at = lookup.wanted, math.inf
        key = wanted.key or self._rank_context.keys.fingerprint
        try:
            link = self._links.get(RankAddress(0, 0, wanted.host, wanted.port, b"", key), now, redial=True)
        except KVFerryError as error:
            self._fail(lookup, str(error), "no_answer")
            return
        self.asked = lookup.number = (self.asked + 1) % (1 << 32)
        question = messages.Resolve(
            number=lookup.number, name=wanted.name, engine_id=wanted.engine_id, prefix=wanted.prefix,
            until="granted" if lookup.phase is _P.AWAITING_GRANT else "begun",
        )  # fmt: skip
        # Not ``Link.send``: where too many wait for the connection to be made, this one waits, and the link stands.
        if link.connection.send(messages.encode(question)) or link.connection.lost:  # the link fails then
            link.questions[lookup.number], lookup.link = lookup, link
        else:
            self._wait(lookup, now, lost=lookup.lost)

    def _begin_links(self, lookup: Lookup, answer: messages.Resolved, now: float) -> bool:
        """Begin the handshakes, so that they are out of the way when the load begins. False: the lookup has failed."""
        try:
            peer = lease_of_answer(answer.params).peer
            addresses = self._links.source_addresses(peer)
            lookup.links = dict.fromkeys([self._links.get(address, now) for address in addresses])
        except KVFerryError as error:
            self._fail(lookup, str(error), "malformed")
            return False
        for link in lookup.links:
            link.start_handshake(now)
        return True

    def _found(self, lookup: Lookup) -> None:
        answer = lookup.answer
        assert answer is not None
        lookup.phase = _P.FOUND
        streams = not answer.granted
        found = answer.found if streams or lookup.wanted.prefix else 0
        step_tokens = answer.step_tokens if streams else 0
        result = LookupResult(answer.params, streams=streams, found=found, step_tokens=step_tokens)
        self._results.looked_up(lookup.wanted.request_id, result)

    def _fail(self, lookup: Lookup, error: str, reason: LocalReason) -> None:
        """D must prefill, where the request has not ended."""
        if lookup.phase is not _P.LEFT:
            self._results.looked_up(lookup.wanted.request_id, LookupResult(error=error, reason=reason))
        self._end(lookup)

    def _end(self, lookup: Lookup) -> None:
        lookup.phase, lookup.retry_at, lookup.until = _P.ENDED, math.inf, math.inf
        self.left.pop(lookup, None)
        if self.open.get(lookup.wanted.request_id) is lookup:
            del self.open[lookup.wanted.request_id]
        if lookup.link is not None:
            del lookup.link.questions[lookup.number]
            lookup.link = None

    def _release(self, lookup: Lookup, now: float) -> None:
        """Release the lease for all ranks of D, unless it is another prompt's, or another request of the same prompt
        needs it (``n > 1``). Of a prefix there is none yet."""
        wanted = lookup.wanted
        if wanted.prefix or any(other.wanted.name == wanted.name for other in self.open.values()):
            return
        assert lookup.answer is not None and wanted.ended is not None
        try:
            lease = lease_of_answer(lookup.answer.params)
            if lease.digest in wanted.ended.digests:
                self._renewals.release_for_all(lease, now)
        except KVFerryError as error:  # of an answer that D could not use either
            self._log.warning("unneeded", "kvferry: the lease of %s ends by time: %s", wanted.request_id, error)
