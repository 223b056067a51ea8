"""The leases that D still needs: D renews a lease while a request needs it, and releases it after the last request.

``kept_lease.KEPT_LEASE`` decides; this file performs its effects. No failure to send leaves this file: a renewal that
could not be sent is sent again after the next interval, and a lease whose release could not be sent expires at P.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from kvferry.connector.decode_side import kept_lease
from kvferry.connector.decode_side.link import Link
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import P_ENGINES, RankContext
from kvferry.connector.wire import messages
from kvferry.connector.wire.states import Lifetime, Tick
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress, RemoteLease
from kvferry.transport.errors import GeometryError

logger = logging.getLogger("vllm.kvferry.lease_keeper")

SIBLING_SECONDS = 0.5
"""Seconds that a release waits for more requests of the same prompt (``n > 1`` sends them one by one)."""
RENEWALS_PER_TERM = 3
"""D may lose two renewals in a row before P's lease ends."""
SHORTEST_INTERVAL = 0.1
"""Seconds. A peer that names a short term must not keep the transfer thread busy."""


@dataclass(slots=True)
class LeaseAtPeer:
    """One lease at one P engine. ``addresses``: the P ranks to which this D rank sends renewals and the release."""

    token: bytes
    peer: PeerEngine
    addresses: tuple[RankAddress, ...]
    lifetime: Lifetime[kept_lease.KeptLease, kept_lease.KeptLeaseEvent, kept_lease.KeptLeaseEffect]


RENEWED_PER_TICK = 64
"""P ranks to which D sends renewals in one tick. The others follow in the next ticks: a request may name many ranks."""


class LeaseKeeper:
    """The leases that this rank of D holds a share in.

    At least one D rank releases at every P rank, also at a P rank that no D rank reads (``TpKVTopology.release_map``).
    """

    def __init__(self, rank_context: RankContext, link: Callable[[RankAddress, float], Link]) -> None:
        self._rank_context = rank_context
        geometry = rank_context.caches.geometry
        self.rank = geometry.pp_rank * geometry.tp_size + geometry.tp_rank
        """This rank's number in its engine, over all pipeline stages."""
        self._link = link
        self._kept: dict[bytes, LeaseAtPeer] = {}
        self._deadlines = Deadlines(self._due_at)
        self._due: dict[RankAddress, dict[bytes, None]] = {}  # the tokens to renew, by P rank
        self._addresses = lru_cache(maxsize=P_ENGINES)(self._release_addresses)
        self.expected = lru_cache(maxsize=P_ENGINES * 16)(self._expected)
        self.consumer = bytes(16)
        """This life of this engine, the same on all of its ranks; set by the first step plan."""

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, token: bytes, peer: PeerEngine, request_id: str, now: float, *, siblings: bool = False) -> None:
        """``request_id`` may read under ``token``; renewals start when a third of the term has passed.

        Raises:
            GeometryError: P's parameters name ranks that P cannot have.
        """
        kept = self._kept.get(token)
        if kept is None:
            interval = max(peer.lease_seconds / RENEWALS_PER_TERM, SHORTEST_INTERVAL)
            state = kept_lease.keep_lease(now, interval, SIBLING_SECONDS)
            kept = LeaseAtPeer(token, peer, self._addresses(peer), Lifetime(kept_lease.KEPT_LEASE, state, now))
            self._kept[token] = kept
            self._deadlines.note(token, state.renew_at)
        self._step(kept, kept_lease.LeaseWanted(request_id, siblings), now)

    def release(self, token: bytes, request_id: str, now: float) -> None:
        """``request_id`` will not read any more under ``token``. The last request of a lease releases it. Raises
        nothing."""
        kept = self._kept.get(token)
        if kept is not None:
            self._step(kept, kept_lease.LeaseUnwanted(request_id), now)
            if token in self._kept:
                self._deadlines.note(token, kept.lifetime.state.due)

    def disown(self, token: bytes, request_id: str) -> None:
        """The lease is of another prompt than the request's: it is neither renewed nor released for this request."""
        kept = self._kept.get(token)
        if kept is not None and kept.lifetime.state.requests == {request_id}:
            del self._kept[token]

    def release_for_all(self, lease: RemoteLease, now: float) -> None:
        """Release a lease that no rank of this engine has kept, at all ranks of P: this rank is then the only one whose
        release P expects. Raises nothing."""
        if lease.token in self._kept:
            return
        release = messages.Release(
            token=lease.token, consumer=self.consumer, consumer_rank=self.rank, expected=(self.rank,)
        )
        for address in lease.peer.ranks:
            self._send("release", address, lambda: release, now, greets=True)

    def tick(self, now: float) -> None:
        """Renew the leases whose renewal is due, and release those that have waited for siblings long enough."""
        for token in self._deadlines.due(now):
            self._step(self._kept[token], Tick(), now)
        for address in list(self._due)[:RENEWED_PER_TICK]:
            tokens = [token for token in self._due.pop(address) if token in self._kept]
            for start in range(0, len(tokens), messages.MAX_RENEWED):
                part = tuple(tokens[start : start + messages.MAX_RENEWED])
                self._send("renewal", address, partial(messages.Renew, tokens=part), now)

    def renew_now(self) -> None:
        """Renew every lease at the next tick."""
        for kept in self._kept.values():
            self._step(kept, kept_lease.RenewalOverdue(), 0.0)  # the time does not matter to this event
            self._deadlines.note(kept.token, kept.lifetime.state.due)

    def close_all(self, now: float) -> None:
        """Release every lease."""
        for kept in list(self._kept.values()):
            self._step(kept, kept_lease.KeepingEnded(), now)

    def _expected(self, peer: PeerEngine, p_rank: int) -> tuple[int, ...]:
        """The D ranks, of every pipeline stage, that release at P's rank ``p_rank``."""
        return self._rank_context.topology(peer).expected_consumers(p_rank)

    def _release_addresses(self, peer: PeerEngine) -> tuple[RankAddress, ...]:
        """P's ranks at which this D rank renews and releases."""
        strange = [address.tp_rank for address in peer.ranks if not 0 <= address.tp_rank < peer.tp_size]
        if strange:
            raise GeometryError(f"P names a tensor-parallel rank {strange[0]}, expected one below {peer.tp_size}")
        ranks = self._rank_context.topology(peer).release_ranks()
        return tuple(address for address in peer.ranks if address.tp_rank in ranks)

    # --- effects ------------------------------------------------------------------------------------------------

    def _step(self, kept: LeaseAtPeer, event: kept_lease.KeptLeaseEvent, now: float) -> None:
        """Take one event. One message renews all leases at a P rank, so renewals are only collected here."""
        for effect in kept.lifetime.step(event, now):
            match effect:
                case kept_lease.SendRenewal():
                    for address in kept.addresses:
                        self._due.setdefault(address, {})[kept.token] = None
                case kept_lease.SendRelease():
                    self._send_release(kept, now)

    def _due_at(self, token: bytes) -> float:
        kept = self._kept.get(token)
        return math.inf if kept is None else kept.lifetime.state.due

    def _send_release(self, kept: LeaseAtPeer, now: float) -> None:
        del self._kept[kept.token]
        for address in kept.addresses:
            self._send("release", address, partial(self._release_of, kept, address), now, kept, greets=True)

    def _release_of(self, kept: LeaseAtPeer, address: RankAddress) -> messages.Release:
        return messages.Release(
            token=kept.token,
            consumer=self.consumer,
            consumer_rank=self.rank,
            expected=self.expected(kept.peer, address.tp_rank),
        )

    def _send(
        self,
        what: str,
        address: RankAddress,
        message: Callable[[], messages.Renew | messages.Release],
        now: float,
        kept: LeaseAtPeer | None = None,
        *,
        greets: bool = False,
    ) -> None:
        """Make a message about a lease, and send it to one P rank. ``greets``: before it, make this D known there. A
        failure is counted, and logged at a limited rate. It must not affect other leases, nor the report of the load
        for which D kept the lease."""
        try:
            link = self._link(address, now)
            if greets:
                link.start_greeting(now)
            link.send(message())
        except Exception as error:
            self._rank_context.stats.dropped(f"{what} not sent")
            self._rank_context.log.warning(
                f"{what} not sent",
                "kvferry: a lease's %s was not sent to %s:%d: %r%s",
                what, address.host, address.port, error, f"; the lease: {kept.lifetime.story()}" if kept else "",
            )  # fmt: skip
