"""What the data planes over the simulated network share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvferry.transport.errors import PlaneUnavailableError, TransportError
from kvferry.transport.plane import Plane
from tests.simulation.memory import Pages, SimCopies
from tests.simulation.network import Host, Network

MOVE_SECONDS = 400e-6
"""The longest time for which one message, or one read of pages, is under way in memory."""


class PlaneHost(Host, Protocol):
    """A process with planes."""

    network: Network
    pages: Pages
    copies: SimCopies


class SimPlane(Plane):
    """What the planes share. ``ends``: its channels that are open."""

    def __init__(self, host: PlaneHost) -> None:
        self.host = host
        self.network = host.network
        self.ends: dict[Any, None] = {}

    def offer(self) -> bytes:
        return self.host.number.to_bytes(8, "big")

    def peer(self, offer: bytes) -> Any:
        """The process of an offer."""
        peer = self.network.hosts.get(int.from_bytes(offer, "big"))
        if peer is None or not peer.alive:
            raise PlaneUnavailableError("P is not there")
        return peer

    def pollables(self) -> list[tuple[int, int]]:
        return []

    @property
    def active(self) -> bool:
        return False

    def progress(self) -> bool:
        return False

    def arm(self) -> bool:
        return True

    def close(self) -> None:
        for end in list(self.ends):
            end.close()


class End:
    """One end of a stream or of a mapping: it joins two processes until it is closed or has an error."""

    plane: SimPlane
    other: Any
    error: TransportError | None
    fail: Callable[[str], None]

    def open(self) -> None:
        self.plane.ends[self] = None
        self.plane.network.join(self.plane.host, self.other, self, self.broke)

    def broke(self, why: str) -> None:
        if self.plane.host.alive and self in self.plane.ends:
            self.fail(why)
            self.plane.host.mark(self.plane)

    def shut(self) -> bool:
        """Close this end; whether it was open."""
        if self not in self.plane.ends:
            return False
        del self.plane.ends[self]
        self.plane.network.leave(self.plane.host, self.other, self)
        return True
