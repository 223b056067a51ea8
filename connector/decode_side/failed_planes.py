"""The data planes that D does not choose for some time, because they broke. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

AVOIDED_SECONDS = 60.0
"""How long D at least chooses another plane to a rank of P whose plane broke while its control connection stood."""
MAX_PEERS = 4096
"""Ranks of P of which broken planes are kept."""


def avoided_seconds(handover_seconds: float) -> float:
    """How long D avoids a plane. All attempts of a load, which take up to ``handover_seconds``, go over the planes in
    turn: none comes back before the last one was tried."""
    return max(AVOIDED_SECONDS, handover_seconds)


class _Failed(NamedTuple):
    until: float
    why: str


class FailedPlanes:
    """The planes that broke, by peer. Times are seconds of the caller's clock."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: how long a plane that broke is avoided."""
        self._seconds = seconds
        self._by_peer: dict[Hashable, dict[str, _Failed]] = {}

    def __len__(self) -> int:
        return len(self._by_peer)

    def add(self, peer: Hashable, plane: str, why: str, now: float) -> None:
        """A plane to a peer broke."""
        failed = self._by_peer.setdefault(peer, {})
        failed[plane] = _Failed(now + self._seconds, why)
        if len(self._by_peer) > MAX_PEERS:
            del self._by_peer[next(iter(self._by_peer))]

    def of(self, peer: Hashable, now: float) -> dict[str, str]:
        """The planes to avoid for a peer, and why each broke."""
        return {plane: failed.why for plane, failed in self._by_peer.get(peer, {}).items() if now < failed.until}

    def expire(self, now: float) -> None:
        """Forget the planes that were avoided long enough."""
        for peer, planes in list(self._by_peer.items()) if self._by_peer else ():
            left = {plane: failed for plane, failed in planes.items() if now < failed.until}
            if left:
                self._by_peer[peer] = left
            else:
                del self._by_peer[peer]
