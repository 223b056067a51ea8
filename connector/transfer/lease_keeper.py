"""Which leases D still needs, for which requests: renewal while it does, release when it no longer does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.connector.protocol import messages
from kvferry.connector.protocol.step_plan import PeerEngine, RankAddress
from kvferry.connector.transfer.link import Link
from kvferry.connector.transfer.rank_context import RankContext
from kvferry.transport.errors import GeometryError

logger = logging.getLogger("vllm.kvferry.lease_keeper")

SIBLING_SECONDS = 0.5
"""How long a release waits for more requests of the same prompt (``n > 1`` sends them one by one)."""
RENEWALS_PER_TERM = 3
"""A renewal may be lost twice before the lease is."""
SHORTEST_INTERVAL = 0.1
RENEWED_AT_ONCE = 4096
"""Tokens of one message; a message each would fill the connection's queue where all are due together."""


@dataclass(slots=True)
class KeptLease:
    """One lease at one P engine. ``addresses``: the P ranks to which this D rank sends renewals and the release.
    ``keep``: requests that may still read under the lease."""

    peer: PeerEngine
    addresses: tuple[RankAddress, ...]
    renew_at: float
    keep: set[str] = field(default_factory=set)
    siblings: bool = False
    release_at: float = float("inf")


class LeaseKeeper:
    """The leases that this rank of D holds a share in.

    At least one D rank releases at every P rank, also at a P rank that no D rank reads (``TpKVTopology.release_map``).
    """

    def __init__(self, rank_context: RankContext, link: Callable[[PeerEngine, RankAddress], Link]) -> None:
        self._rank_context = rank_context
        geometry = rank_context.caches.geometry
        self.rank = geometry.pp_rank * geometry.tp_size + geometry.tp_rank
        """This rank's number in its engine, over all pipeline stages."""
        self._link = link
        self._kept: dict[bytes, KeptLease] = {}
        self._token_of: dict[str, bytes] = {}
        self.consumer = bytes(16)
        """This life of this engine, the same on all of its ranks; set by the first step plan."""

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, token: bytes, peer: PeerEngine, request_id: str, now: float, *, siblings: bool = False) -> None:
        """``request_id`` may read under ``token``; renewals start when a third of the term has passed.

        Raises:
            GeometryError: P names ranks that it cannot have.
        """
        kept = self._kept.get(token)
        if kept is None:
            kept = self._kept[token] = KeptLease(peer, self._addresses(peer), now + _interval(peer))
        kept.keep.add(request_id)
        kept.siblings |= siblings
        kept.release_at = float("inf")
        self._token_of[request_id] = token

    def release(self, request_id: str, now: float) -> None:
        """``request_id`` will not read any more. The last one of a lease releases it."""
        token = self._token_of.pop(request_id, None)
        kept = self._kept.get(token) if token is not None else None
        if token is None or kept is None:
            return
        kept.keep.discard(request_id)
        if kept.keep:
            return
        if kept.siblings:
            kept.release_at = now + SIBLING_SECONDS
        else:
            self._release(token, kept)

    def tick(self, now: float) -> None:
        """Renew what is needed, release what waited for siblings in vain."""
        due: dict[RankAddress, tuple[PeerEngine, list[bytes]]] = {}
        for token, kept in list(self._kept.items()):
            if now >= kept.release_at:
                self._release(token, kept)
            elif now >= kept.renew_at:
                kept.renew_at = now + _interval(kept.peer)
                for address in kept.addresses:
                    due.setdefault(address, (kept.peer, []))[1].append(token)
        for address, (peer, tokens) in due.items():
            try:
                for start in range(0, len(tokens), RENEWED_AT_ONCE):
                    part = tuple(tokens[start : start + RENEWED_AT_ONCE])
                    self._link(peer, address).send(messages.Renew(tokens=part))
            except Exception:  # no connection could be made to this one; the leases of others must not end for it
                logger.exception("kvferry: leases at %s:%d are not renewed this time", address.host, address.port)

    def renew_now(self) -> None:
        """Renew everything at the next tick."""
        for kept in self._kept.values():
            kept.renew_at = float("-inf")

    def close_all(self) -> None:
        """Release everything."""
        for token, kept in list(self._kept.items()):
            self._release(token, kept)
        self._token_of.clear()

    def expected(self, peer: PeerEngine, p_rank: int) -> tuple[int, ...]:
        """The D ranks, of every pipeline stage, that release at P's rank ``p_rank``."""
        return self._rank_context.topology(peer).expected_consumers(p_rank)

    def _addresses(self, peer: PeerEngine) -> tuple[RankAddress, ...]:
        strange = [address.tp_rank for address in peer.ranks if not 0 <= address.tp_rank < peer.tp_size]
        if strange:
            raise GeometryError(f"P names a tensor-parallel rank {strange[0]}, expected one below {peer.tp_size}")
        ranks = self._rank_context.topology(peer).release_ranks()
        return tuple(address for address in peer.ranks if address.tp_rank in ranks)

    def _release(self, token: bytes, kept: KeptLease) -> None:
        del self._kept[token]
        for address in kept.addresses:
            self._link(kept.peer, address).send(
                messages.Release(
                    token=token,
                    consumer=self.consumer,
                    consumer_rank=self.rank,
                    expected=self.expected(kept.peer, address.tp_rank),
                )
            )


def _interval(peer: PeerEngine) -> float:
    """Seconds between renewals; a peer's short term must not keep us busy."""
    return max(peer.lease_seconds / RENEWALS_PER_TERM, SHORTEST_INTERVAL)
