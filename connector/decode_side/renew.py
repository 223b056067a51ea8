"""The leases that D still needs: D renews a lease while a request needs it, and releases it after the last request.

No failure to send leaves this file: a renewal that could not be sent is sent again after the next interval, and a lease
whose release could not be sent expires at P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from kvferry.connector.decode_side.links import Links
from kvferry.connector.pages.deadlines import Deadlines
from kvferry.connector.pages.rank_context import P_ENGINES, RankContext
from kvferry.connector.wire import messages
from kvferry.connector.wire.step_plan import PeerEngine, RankAddress, RemoteLease
from kvferry.transport.errors import GeometryError

SIBLING_SECONDS = 0.5
"""Seconds that a release waits for more requests of the same prompt: ``n > 1`` sends them one by one."""
RENEWALS_PER_TERM = 3
"""D may lose two renewals in a row before P's lease ends."""
SHORTEST_INTERVAL = 0.1
"""Seconds. A peer that names a short term must not keep the transfer thread busy."""
RENEWED_PER_TICK = 64
"""P ranks to which D sends renewals in one tick. The others follow in the next ticks: a request may name many ranks."""
NEVER = float("inf")


@dataclass(slots=True, eq=False)
class LeaseRenewal:
    """One lease at one P engine that D keeps alive."""

    token: bytes
    peer: PeerEngine
    addresses: tuple[RankAddress, ...]
    """The P ranks to which this D rank sends renewals and the release."""
    interval: float
    """Seconds between two renewals."""
    renew_at: float
    requests: set[str] = field(default_factory=set)
    """Those that may still read under the lease."""
    siblings: bool = False
    """More requests of the same prompt may follow."""
    release_at: float = NEVER
    """When the lease has waited for them long enough, while ``requests`` is empty."""

    @property
    def due(self) -> float:
        return min(self.renew_at, self.release_at)


class LeaseRenewals:
    """The leases that this rank of D holds a share in.

    At least one D rank releases at every P rank, also at a P rank that no D rank reads (``TpKVTopology.release_map``).
    """

    def __init__(self, rank_context: RankContext, links: Links, deadlines: Deadlines[Any]) -> None:
        self._rank_context, self.links, self._deadlines = rank_context, links, deadlines
        geometry = rank_context.caches.geometry
        self.rank = geometry.pp_rank * geometry.tp_size + geometry.tp_rank
        """This rank's number in its engine, over all pipeline stages."""
        self.kept: dict[bytes, LeaseRenewal] = {}
        self.to_renew: dict[RankAddress, dict[bytes, None]] = {}
        """The tokens to renew, by P rank: one message renews all leases there."""
        self._addresses = lru_cache(maxsize=P_ENGINES)(self._release_addresses)
        self.expected = lru_cache(maxsize=P_ENGINES * 16)(self._expected)
        self.decode_engine = bytes(16)
        """This life of this engine, the same on all of its ranks; set by the first step plan."""

    def keep(self, token: bytes, peer: PeerEngine, request_id: str, now: float, *, siblings: bool = False) -> None:
        """``request_id`` may read under ``token``; renewals start when a third of the term has passed.

        Raises:
            GeometryError: P's parameters name ranks that P cannot have.
        """
        renewal = self.kept.get(token)
        if renewal is None:
            interval = max(peer.lease_seconds / RENEWALS_PER_TERM, SHORTEST_INTERVAL)
            renewal = LeaseRenewal(token, peer, self._addresses(peer), interval, now + interval)
            self.kept[token] = renewal
            self._deadlines.note(renewal, renewal.renew_at)
        renewal.requests.add(request_id)
        renewal.siblings |= siblings
        renewal.release_at = NEVER

    def release(self, token: bytes, request_id: str, now: float) -> None:
        """``request_id`` will not read any more under ``token``. The last request of a lease releases it. Raises
        nothing."""
        renewal = self.kept.get(token)
        if renewal is None or not renewal.requests:
            return
        renewal.requests.discard(request_id)
        if renewal.requests:
            return
        if renewal.siblings:
            renewal.release_at = now + SIBLING_SECONDS
            self._deadlines.note(renewal, renewal.due)
        else:
            self._release(renewal, now)

    def disown(self, token: bytes, request_id: str) -> None:
        """The lease is of another prompt than the request's: it is neither renewed nor released for this request."""
        renewal = self.kept.get(token)
        if renewal is not None and renewal.requests == {request_id}:
            self._forget(renewal)

    def release_for_all(self, lease: RemoteLease, now: float) -> None:
        """Release a lease that no rank of this engine has kept, at all ranks of P: this rank is then the only one whose
        release P expects. Raises nothing."""
        for address in lease.peer.ranks if lease.token not in self.kept else ():
            self._send_release(lease.token, address, lambda: (self.rank,), now)

    def on_due(self, renewal: LeaseRenewal, now: float) -> None:
        """Renew a lease whose renewal is due, or release it where it has waited for siblings long enough."""
        if now >= renewal.release_at:
            self._release(renewal, now)
        elif now >= renewal.renew_at:
            renewal.renew_at = now + renewal.interval
            for address in renewal.addresses:
                self.to_renew.setdefault(address, {})[renewal.token] = None

    def send_renewals(self, now: float) -> None:
        """Send some of the renewals that are due."""
        for address in list(self.to_renew)[:RENEWED_PER_TICK]:
            tokens = [token for token in self.to_renew.pop(address) if token in self.kept]
            for start in range(0, len(tokens), messages.MAX_RENEWED):
                part = tuple(tokens[start : start + messages.MAX_RENEWED])
                self._send("renewal", address, partial(messages.Renew, tokens=part), now)

    def renew_now(self) -> None:
        """Renew every lease at the next tick: this thread was delayed while P's deadlines went on."""
        for renewal in self.kept.values():
            renewal.renew_at = -NEVER
            self._deadlines.note(renewal, renewal.renew_at)

    def close(self, now: float) -> None:
        """Release every lease."""
        for renewal in list(self.kept.values()):
            self._release(renewal, now)

    def _expected(self, peer: PeerEngine, p_rank: int) -> tuple[int, ...]:
        """The D ranks, of every pipeline stage, that release at P's rank ``p_rank``."""
        return self._rank_context.topology(peer).expected_consumers(p_rank)

    def _release_addresses(self, peer: PeerEngine) -> tuple[RankAddress, ...]:
        """P's ranks at which this D rank renews and releases."""
        strange = [address.tp_rank for address in peer.ranks if not 0 <= address.tp_rank < peer.tp_size]
        if strange:
            raise GeometryError(
                f"the prefill engine names a tensor-parallel rank {strange[0]}, expected one below {peer.tp_size}"
            )
        ranks = self._rank_context.topology(peer).release_ranks()
        return tuple(address for address in peer.ranks if address.tp_rank in ranks)

    def _forget(self, renewal: LeaseRenewal) -> None:
        del self.kept[renewal.token]
        renewal.renew_at = renewal.release_at = NEVER

    def _release(self, renewal: LeaseRenewal, now: float) -> None:
        self._forget(renewal)
        for address in renewal.addresses:
            self._send_release(renewal.token, address, partial(self.expected, renewal.peer, address.tp_rank), now)

    def _send_release(
        self, token: bytes, address: RankAddress, expected: Callable[[], tuple[int, ...]], now: float
    ) -> None:
        def release() -> messages.Release:
            return messages.Release(
                token=token, decode_engine=self.decode_engine, decode_rank=self.rank, expected=expected()
            )

        self._send("release", address, release, now)

    def _send(self, what: str, address: RankAddress, message: Callable[[], messages.Request], now: float) -> None:
        """Make a message about a lease, and send it to one P rank. A failure is counted, and logged at a limited rate.
        It must not affect other leases, nor the report of the load for which D kept the lease."""
        try:
            self.links.get(address, now).send(message())
        except Exception as error:
            self._rank_context.stats.dropped(f"{what} not sent")
            text = "kvferry: a lease's %s was not sent to %s:%d: %r"
            self._rank_context.log.warning(f"{what} not sent", text, what, address.host, address.port, error)
