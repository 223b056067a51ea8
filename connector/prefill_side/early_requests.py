"""Asks and releases that arrive before the lease that they name. They wait for the lease, each for a bounded time.

A fast router sends D the answer of P's scheduler before P's workers have the lease, so this is no exception.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from kvferry.connector.prefill_side import lease
from kvferry.connector.prefill_side.sessions import Session
from kvferry.connector.wire import messages
from kvferry.transport.fair_table import FairTable

HELD_SPANS = 1 << 16
"""Bound on the asks that wait, by their spans and ranks: 24 MB."""
ASK_COST = 8
"""Cost of an ask beside its spans and ranks."""
EARLY_RANKS = 1 << 14
"""Bound on the releases that wait, by the ranks that they name: 16 MB."""


@dataclass(slots=True)
class HeldAsk:
    """An ask that arrived before its lease."""

    identity: bytes
    ask: messages.Ask
    deadline: float


@dataclass(slots=True)
class _Vote:
    """The ranks of one consumer that have released a lease, and all of its ranks that must (``lease.rank_set``).
    ``key``: token and consumer."""

    key: tuple[bytes, bytes]
    expected: int
    released: int
    deadline: float


class EarlyRequests:
    """All requests that wait for their lease. Each session has a fair share of the room (``FairTable``).

    Args:
        ask_seconds: how long an ask waits.
        vote_seconds: how long a release waits.
    """

    def __init__(self, ask_seconds: float, vote_seconds: float) -> None:
        self._ask_seconds, self._vote_seconds = ask_seconds, vote_seconds
        self.asks: FairTable[tuple[bytes, int], HeldAsk] = FairTable(HELD_SPANS)
        """By identity and number of the read."""
        self.votes: FairTable[tuple[bytes, bytes], _Vote] = FairTable(EARLY_RANKS)
        """By token and consumer."""

    def hold(self, session: Session, ask: messages.Ask, now: float) -> list[HeldAsk]:
        """Keep an ask. Returns the asks that find no room any more: the caller denies them."""
        held = HeldAsk(session.identity, ask, now + self._ask_seconds)
        cost = ASK_COST + len(ask.spans) + len(ask.expected)
        return self.asks.put(session.identity, (session.identity, ask.read), held, cost)

    def vote(self, session: Session, release: messages.Release, now: float) -> None:
        """Keep a release."""
        key, bit = (release.token, release.consumer), 1 << release.consumer_rank
        vote = self.votes.get(key)
        if vote is not None:
            vote.released |= bit
            return
        vote = _Vote(key, lease.rank_set(release.expected), bit, now + self._vote_seconds)
        self.votes.put(session.identity, key, vote, 1 + len(release.expected))

    def take_votes(self, token: bytes) -> list[lease.Released]:
        """The releases of a lease that P holds from now on."""
        found: list[lease.Released] = []
        for key in [key for key in self.votes if key[0] == token]:
            vote = self.votes.pop(key)
            if vote is not None:
                expected = frozenset(lease.ranks_of(vote.expected))
                found += (lease.Released(key[1], rank, expected) for rank in lease.ranks_of(vote.released))
        return found

    def take_asks(self, token: bytes) -> list[HeldAsk]:
        """The asks for a lease that P holds from now on, the oldest first."""
        found = [held for held in self.asks.values() if held.ask.token == token]
        for held in found:
            self.asks.pop((held.identity, held.ask.read))
        return found

    def take_late(self, now: float, computing: Container[bytes] = ()) -> list[HeldAsk]:
        """The asks that have waited long enough: the caller denies them. Forgets the releases that have, except those
        of prompts that P is ``computing``."""
        for vote in self.votes.first(lambda vote: now >= vote.deadline):
            if vote.key[0] not in computing:
                self.votes.pop(vote.key)
        late = self.asks.first(lambda held: now >= held.deadline)
        for held in late:
            self.asks.pop((held.identity, held.ask.read))
        return late
