"""The leases of this rank of P: granted, posted, renewed, released, expired. The table ``lease`` decides."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from kvferry.connector.pages.caches import Ids
from kvferry.connector.pages.computed_steps import PromptBlocks
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.pages.traces import record
from kvferry.connector.prefill_side import lease
from kvferry.connector.prefill_side.held_lease import HeldLease, granted
from kvferry.connector.prefill_side.traces import lease_span
from kvferry.connector.wire import messages
from kvferry.connector.wire.states import Lifetime, Tick
from kvferry.connector.wire.step_plan import LeaseGrant
from kvferry.transport.grant_board import GrantBoard

logger = logging.getLogger("vllm.kvferry.producer")

ENDED_TOKENS = 1 << 16
"""Tokens that P remembers after their lease has ended, so that P refuses a late ask at once. P does not grant an ask
with an unknown token either, but refuses it only after ``ask_hold_seconds``."""


class LeaseTable:
    """Gives the leases their events, and performs their effects. Used by the transfer thread only.

    ``held``: by token, until nothing reads the blocks any more. ``ended``: tokens that no lease holds any more, or
    never will. ``board``: where the grants are posted, if ``posts_grants``.
    """

    def __init__(
        self,
        rank_context: RankContext,
        stop_reads: Callable[[bytes, float], None],
        freed: Callable[[LeaseGrant, float], None],
    ) -> None:
        """
        Args:
            rank_context: this rank.
            stop_reads: called with a token and the time: the reads under it must end, each with one ``ReadEnded``.
            freed: called with a lease that has ended, and the time: nothing reads its blocks any more.
        """
        self._rank_context = rank_context
        self._stop_reads, self._on_freed = stop_reads, freed
        self.held: dict[bytes, HeldLease] = {}
        self._deadlines = Deadlines(self._due)
        self.ended: OrderedDict[bytes, None] = OrderedDict()
        self.board = GrantBoard()
        # A grant is not posted where the engine may have freed some of the blocks: there P must check each ask.
        self.posts_grants = any(plane.pulls for plane in rank_context.planes) and all(
            region.kind in ("full", "mla") for region in rank_context.caches.geometry.regions
        )

    def grant(self, grant: LeaseGrant, ids: list[Ids], computed: PromptBlocks | None, now: float) -> None:
        """Hold the blocks of a finished prompt, ``ids`` per region, and post the grant on the grant board.
        ``computed``: the same blocks before the lease, of which a grant may be posted already."""
        settings, posted = self._rank_context.settings, None
        state = lease.grant(now, settings.lease_seconds, settings.lease_cap_seconds)
        lifetime, begun_at = Lifetime(lease.LEASE, state, now), self._rank_context.clock()
        if self.posts_grants:  # a D that reads P's pages by itself then needs no ask and no commit
            text = messages.encode_grant(granted(grant, 0, 0, grant.block_ids))
            posted = None if computed is None else computed.take_posted(text)
            posted = self.board.post(grant.token, text) if posted is None else posted
        self.held[grant.token] = HeldLease(grant, ids, lifetime, posted, begun_at)
        self._deadlines.note(grant.token, state.deadline)  # no event moves it to earlier

    def step(self, token: bytes, event: lease.LeaseEvent, now: float) -> None:
        """Give a lease an event, if P holds it."""
        held = self.held.get(token)
        if held is None:
            return
        effects = held.lifetime.step(event, now)
        if held.posted is not None and not lease.may_commit(held.lifetime.state):
            self.board.withdraw(held.posted)  # before the engine may reuse the blocks
            held.posted = None
        for effect in effects:
            match effect:
                case lease.StopReads():
                    self._stop_reads(token, now)
                case lease.Freed(reason):
                    self._free(token, held, reason, now)

    def _free(self, token: bytes, held: HeldLease, reason: str, now: float) -> None:
        del self.held[token]
        self.remember_end(token)
        self._rank_context.stats.lease_ended(reason)  # first: the engine may idle once it knows of the end
        self._on_freed(held.grant, now)
        if reason == "reset":
            text = "kvferry: lease of %s has ended: this engine was paused, or its caches were reset"
            logger.info(text, held.grant.request_id)
        elif reason != "released":
            cap = self._rank_context.settings.lease_cap_seconds
            why = f"the cap of {cap:g} s was reached" if reason == "cap" else "nobody renewed or released it"
            logger.warning("kvferry: lease of %s expired: %s", held.grant.request_id, why)
        if held.grant.traceparent:
            span = partial(lease_span, held, reason, self._rank_context.clock())
            record(self._rank_context, held.grant.traceparent, span)

    def remember_end(self, token: bytes) -> None:
        """No lease holds the blocks of this token from now on."""
        self.ended[token] = None
        while len(self.ended) > ENDED_TOKENS:
            self.ended.popitem(last=False)

    def revoke_all(self, now: float) -> None:
        """End all leases now. A read that P sends ends first."""
        for token in list(self.held):
            self.step(token, lease.Revoked(), now)

    def tick(self, now: float) -> None:
        """End the leases whose time is up."""
        for token in self._deadlines.due(now):
            self.step(token, Tick(), now)

    def _due(self, token: bytes) -> float:
        held = self.held.get(token)
        return math.inf if held is None else held.lifetime.state.due
