"""P's replies to the ranks of D. A reply for which a D's queue has no room is kept, and sent later, in order."""

from __future__ import annotations

from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.prefill_side.sessions import Sessions
from kvferry.connector.wire import messages
from kvferry.transport.control.listener import Listener
from kvferry.transport.fair_table import FairTable

UNSENT_BYTES = 16 << 20
"""Bound on the replies that are kept, for all peers together."""
REPLY_BYTES = 256
"""What a kept reply takes beside its bytes."""

_Kept = tuple[bytes, int]
"""An identity, and the number of a kept reply."""


class Replies:
    """Sends replies. libzmq holds some thousand messages for a D that does not read; then further ones are kept here,
    for the peers with a session.

    ``lost`` contains the peers of which a kept reply found no room any more. Their sessions must end: D would wait for
    a reply that never comes.
    """

    def __init__(self, rank_context: RankContext, listener: Listener, sessions: Sessions) -> None:
        self._rank_context, self._listener, self._sessions = rank_context, listener, sessions
        self.kept: FairTable[_Kept, tuple[bytes, list[bytes]]] = FairTable(UNSENT_BYTES)
        self._last = 0
        self.lost: set[bytes] = set()

    def send(self, identity: bytes, message: messages.Reply) -> None:
        """Send a reply, or keep it where the queue of this D is full. A reply that finds no room there is dropped."""
        frames, keep = messages.encode(message), self._sessions.peek(identity) is not None
        sent, full = (False, True) if keep and self.kept.owns(identity) else self._try(identity, frames)
        if sent:
            return
        if full and keep and identity not in self.lost:
            self._last += 1
            cost = REPLY_BYTES + sum(map(len, frames))
            for owner, _ in self.kept.put(identity, (identity, self._last), (identity, frames), cost):
                self.forget(owner)
                self.lost.add(owner)
            if identity not in self.lost:
                return
        elif full:
            self._listener.dropped["full"] += 1
        self._rank_context.drop("reply to a peer that is gone", type(message).__name__)

    def _try(self, identity: bytes, frames: list[bytes]) -> tuple[bool, bool]:
        """Send a message. Returns whether it was sent, and whether the queue of this D is full. A message that is kept
        does not count as dropped."""
        dropped = self._listener.dropped
        before = dropped["full"]
        sent = self._listener.send(identity, frames)
        full = not sent and dropped["full"] > before
        dropped["full"] = before
        return sent, full

    def flush(self) -> None:
        """Send the kept replies for which there is room now."""
        for owner in self.kept.owners():
            while (key := self.kept.oldest(owner)) is not None:
                kept = self.kept.get(key)
                assert kept is not None
                sent, full = self._try(*kept)
                if full:
                    break
                self.kept.pop(key)
                if not sent:  # D is gone
                    self.forget(owner)

    def forget(self, identity: bytes) -> None:
        """Drop the kept replies of a D."""
        self.kept.drop(identity)
