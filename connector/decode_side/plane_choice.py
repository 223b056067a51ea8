"""D's choice of a data plane to one rank of P, and the planes that D does not choose for some time: they broke."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from kvferry.connector.pages.rank_context import RankContext
from kvferry.connector.wire.messages import PlaneOffer
from kvferry.transport.channels import DChannel
from kvferry.transport.control.dialer import Connection
from kvferry.transport.errors import PeerUnreachableError, PlaneBusyError, PlaneUnavailableError
from kvferry.transport.host import is_ours
from kvferry.transport.plane import Plane
from kvferry.transport.registry import preferred_planes

AVOIDED_SECONDS = 60.0
"""How long D at least chooses another plane to a rank of P whose plane broke while its control connection stood."""
MAX_PEERS = 4096
"""Ranks of P of which broken planes are kept."""
BUSY_TRIES = 200
"""How often D tries to connect to a P to which too many connect. It tries 50 times a second."""


def avoided_seconds(handover_seconds: float) -> float:
    """How long D avoids a plane. All attempts of a load, which take up to ``handover_seconds``, go over the planes in
    turn: none comes back before the last one was tried."""
    return max(AVOIDED_SECONDS, handover_seconds)


class FailedPlanes:
    """The planes that broke, by peer. ``seconds``: how long each is avoided, by the caller's clock."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._by_peer: dict[Hashable, dict[str, tuple[float, str]]] = {}  # until when, and why

    def __len__(self) -> int:
        return len(self._by_peer)

    def add(self, peer: Hashable, plane: str, why: str, now: float) -> None:
        """A plane to a peer broke."""
        self._by_peer.setdefault(peer, {})[plane] = now + self._seconds, why
        if len(self._by_peer) > MAX_PEERS:
            del self._by_peer[next(iter(self._by_peer))]

    def of(self, peer: Hashable, now: float) -> dict[str, str]:
        """The planes to avoid for a peer, and why each broke."""
        return {plane: why for plane, (until, why) in self._by_peer.get(peer, {}).items() if now < until}


class PlaneChoice:
    """The planes that P offers, less those that could not be used."""

    def __init__(self, rank_context: RankContext) -> None:
        self._rank_context = rank_context
        self.avoid: Mapping[str, str] = {}
        """The data planes that broke on an earlier link to this P rank, and why. They come last."""
        self._offers: dict[str, bytes] = {}
        self._rejected: dict[str, str] = {}  # the reason of the rejection, by plane
        self._tries_left = BUSY_TRIES
        self._gpu_reached = True  # false once D's GPU has failed to reach P's GPU

    def take_offers(self, offers: Sequence[PlaneOffer]) -> None:
        """The planes that P has."""
        self._offers = {offer.name: offer.payload for offer in offers}

    def note_error(self, error: Exception | None) -> None:
        """A plane could not be used because of ``error``."""
        self._gpu_reached &= not isinstance(error, PeerUnreachableError)

    def drop(self, name: str, why: str) -> None:
        """Do not choose a plane again."""
        self._rejected[name] = why.removeprefix(f"{name}: ")
        self._offers.pop(name, None)

    def connect(self, connection: Connection, *, converts: bool) -> tuple[Plane, DChannel, bytes, str]:
        """Connect the first plane that both sides have. ``converts``: dtypes differ. Returns the plane, D's end
        of it, the payload of the Attach, and why no better plane was chosen.

        Raises:
            PlaneBusyError: too many connect to P at this moment; D must try again.
            PlaneUnavailableError: no such plane is left.
            TransportError: P broke the protocol.
        """
        missing, rejected = self._rank_context.missing_planes, dict(self._rejected)
        for plane in sorted(self._rank_context.planes, key=lambda plane: plane.name in self.avoid):
            why = self._cannot_use(plane, connection.address, converts=converts)
            if why:
                rejected.setdefault(plane.name, why)
                continue
            try:
                return plane, *self._connect(plane, connection), _listed(self._better(missing, plane.name) | rejected)
            except PlaneUnavailableError as error:
                if isinstance(error, PlaneBusyError) and self._tries_left:
                    self._tries_left -= 1
                    raise
                self.note_error(error)
                rejected[plane.name] = str(error)
        raise PlaneUnavailableError(f"no data plane in common: {_listed({**missing, **rejected}) or 'none offered'}")

    def _better(self, missing: Mapping[str, str], chosen: str) -> dict[str, str]:
        """Of the planes that this machine does not have, those that KVFerry would have preferred."""
        preferred = preferred_planes(self._rank_context.caches.device)
        better = preferred[: preferred.index(chosen)] if chosen in preferred else preferred
        return {name: why for name, why in missing.items() if name in better}

    def _connect(self, plane: Plane, connection: Connection) -> tuple[DChannel, bytes]:
        channel, payload = plane.connect(self._offers[plane.name], connection.address)
        try:
            if channel.pulls and channel.process is not None:
                channel.process.check_holds_end(connection.ends)
        except BaseException:
            channel.close()
            raise
        return channel, payload

    def report_change(self, peer: str, plane: str, warn: Callable[..., object]) -> None:
        """One line, and counts, where ``plane`` takes the place of planes that broke."""
        if not self.avoid or plane in self.avoid:
            return
        text = "kvferry: data plane to %s is changed from %s to %s for %g s: %s"
        seconds = avoided_seconds(self._rank_context.settings.handover_timeout_seconds)
        warn(text, peer, " and ".join(self.avoid), plane, seconds, _listed(self.avoid))
        for broken in self.avoid:
            self._rank_context.stats.count("num_plane_changes", broken)

    def _cannot_use(self, plane: Plane, address: str, *, converts: bool) -> str:
        """Why D does not choose a plane; empty where D may choose it."""
        if plane.same_host and not is_ours(address):
            return "the prefill engine is on another host"
        if plane.name not in self._offers:
            return "the prefill engine does not offer it"
        if plane.pulls and converts:
            return "it copies bytes, and dtypes differ"
        if len(self._rank_context.planes) == 1:
            return ""
        return plane.slower_because(self._offers[plane.name], reached=self._gpu_reached)


def _listed(rejected: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in rejected.items())
